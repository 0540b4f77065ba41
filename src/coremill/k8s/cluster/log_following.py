"""`coremill k8s logs`: what the pod of a rank prints, and its successors after it."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from coremill.errors import InputError
from coremill.k8s.cluster.conditions import container_status, exit_code, newest_of
from coremill.k8s.cluster.connection import Cluster
from coremill.k8s.cluster.diagnosis import end_words
from coremill.k8s.cluster.refusals import Refused, Unavailable
from coremill.k8s.cluster.seen import Object, labels_of, look, look_again
from coremill.k8s.cluster.status import OVER, headline, state_of, status_of, told_reasons
from coremill.k8s.job import Job
from coremill.k8s.objects.pods import CONTAINER

LOOK_SECONDS = 5.0
_RETRY_SECONDS = 1.0
_CLOCKS_DIFFER_SECONDS = 600
_FRACTION = re.compile(r"\.\d+")  # nanoseconds, more than datetime reads


@dataclass(frozen=True)
class Line:
    """One line of a pod's log."""

    pod: str
    time: str  # as the kubelet has it, RFC 3339
    text: str


def pod_index(job: Job, rank: int) -> int:
    """The number of the pod that a rank is in."""
    last = job.nodes * job.ranks_per_node - 1
    if not 0 <= rank <= last:
        raise InputError(
            f"there is no rank {rank}",
            where="--rank",
            why=f"{job.nodes} pods of {job.ranks_per_node} ranks each have the ranks 0 to {last}",
            do=f"name one from 0 to {last}",
        )
    return rank // job.ranks_per_node


def lines_of(
    cluster: Cluster, job: Job, rank: int, *, follow: bool, tail: int | None, say: Callable[[str], None]
) -> Iterator[Line]:
    """Each line once. With `follow` until the job is over or stopped; without, what the newest pod has said so far."""
    index, told = pod_index(job, rank), ""
    last_of: dict[str, str] = {}  # pod -> time of the last line that was given
    seen = look(cluster, job)
    while True:
        pod, state = newest_of(seen.pods, index), state_of(seen)
        document = status_of(seen)
        if pod is None and (not follow or state in (*OVER, "absent", "stopped")):
            raise InputError(
                f"there is no pod {index}, and so no log",
                where=headline(document),
                why="; ".join(text for text, _ in told_reasons(document)) or None,
                do="coremill k8s status shows the job" + ("" if state != "absent" else "; submit sends it there"),
            )
        name = "" if pod is None else pod["metadata"]["name"]
        if pod is not None and _has_begun(pod):
            yield from _read(cluster, job, name, last_of, follow=follow, tail=tail)
            tail = None  # a successor is read from its first line
        elif not follow:
            raise InputError(f"{name} has not begun", why=_why(document, index), do="coremill k8s status says more")
        if not follow:
            return
        seen = look_again(cluster, job, say)
        pod, state = newest_of(seen.pods, index), state_of(seen)
        code = None if pod is None else exit_code(pod)
        words = _why(status_of(seen), index)
        if pod is not None and code is not None:
            words = f"{pod['metadata']['name']} ended with {code} ({end_words(pod)})"
        if words and words != told:
            say(words)
            told = words
        if state in (*OVER, "absent", "stopped", "deleting"):
            say(headline(status_of(seen)))
            return
        cluster.wait_for_change(job.namespace, labels_of(job), LOOK_SECONDS)
        seen = look_again(cluster, job, say)


def _read(
    cluster: Cluster, job: Job, pod: str, last_of: dict[str, str], *, follow: bool, tail: int | None
) -> Iterator[Line]:
    """What the pod has said since the last look; a stream that breaks is taken up again where it broke."""
    try:
        known = last_of.get(pod, "")
        lines = cluster.log_lines(
            job.namespace, pod, CONTAINER, follow=follow, tail=None if known else tail, since=_seconds_since(known)
        )
        for line in lines:
            stamp, _, text = line.partition(" ")
            if stamp > known:
                last_of[pod] = stamp
                yield Line(pod, stamp, text)
    except (Unavailable, Refused) as error:
        if not follow or getattr(error, "status", None) in (401, 403):
            raise
        time.sleep(_RETRY_SECONDS)  # the pod has just gone, or the API server: look again


def _seconds_since(stamp: str) -> int | None:
    """So far back a log has to be read again, with room for clocks that differ; None: from its beginning."""
    try:
        then = datetime.fromisoformat(_FRACTION.sub("", stamp))
    except ValueError:
        return None
    return max(1, int((datetime.now(UTC) - then).total_seconds()) + _CLOCKS_DIFFER_SECONDS)


def _has_begun(pod: Object) -> bool:
    state = container_status(pod).get("state") or {}
    return "running" in state or "terminated" in state


def _why(document: dict[str, Any], index: int) -> str:
    reason = document["pods"][index]["reason"]
    return "" if reason is None else f"pod {index}: {reason['words']}"

"""What happens to pods from outside: --reclaim and --kill, and how a machine that goes tells its pods. Pure.

spot notice .... 10 s .... SIGTERM ........... grace of the pod ........... SIGKILL; two minutes after the notice
                                                                            the machine is gone, grace or not
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from coremill.config.durations import Interval, interval_of
from coremill.errors import InputError
from coremill.k8s.check.lints.reading import duration_seconds
from coremill.k8s.rehearse.pods import Pod
from coremill.k8s.rehearse.written import Written, WrittenObjects
from coremill.k8s.times import NOTICE_REACHES_POD_SECONDS
from coremill.plan.saving import SPOT_NOTICE_SECONDS

_DO_NOT_DISRUPT = "karpenter.sh/do-not-disrupt"
_TIME = re.compile(r"(\d+)@(\d+(?:\.\d+)?(?:s|m|h)|[1-9]\d*steps?)")


@dataclass(frozen=True)
class Disruption:
    """A pod that is to go, and when: seconds after the pods have started, or once so many steps are done."""

    kind: Literal["reclaim", "kill"]
    pod: int
    when: Interval
    text: str


def parse_disruption(kind: Literal["reclaim", "kill"], text: str, pods: int) -> Disruption:
    found = _TIME.fullmatch(text)
    if found is None:
        raise InputError(
            f"{text!r} does not say which pod and when",
            where=f"--{kind}",
            do="write POD@TIME: 0@30s, 2@1.5m, or 1@20steps (once 20 steps are done)",
        )
    if int(found[1]) >= pods:
        raise InputError(
            f"there is no pod {found[1]}",
            where=f"--{kind} {text}",
            why=f"the job has {pods} pod{'' if pods == 1 else 's'}, counted from 0",
            do=f"name one from 0 to {pods - 1}",
        )
    return Disruption(kind, int(found[1]), interval_of(found[2]), text)


@dataclass(frozen=True, kw_only=True)
class ReclaimTimes:
    """Seconds from the SIGTERM of a pod to its SIGKILL, and what sets that limit."""

    is_told: bool  # False: no SIGTERM at all
    grace_seconds: float
    line: Written


def reclaim_times(pod: Pod, objects: WrittenObjects) -> ReclaimTimes:
    """What Karpenter leaves a pod of when its node goes: on spot the notice's two minutes bound everything."""
    grace, line = float(pod.grace_seconds), pod.grace_line
    pool = next(objects.of_kind("NodePool"), None)
    if pool is None:
        return ReclaimTimes(is_told=True, grace_seconds=grace, line=line)
    node_line = pool.part("spec", "template", "spec", "terminationGracePeriod")
    node = duration_seconds(node_line.value)
    is_spot = any(
        one.part("key").value == "karpenter.sh/capacity-type" and "spot" in (one.part("values").value or [])
        for one in pool.parts("spec", "template", "spec", "requirements")
    )
    room = SPOT_NOTICE_SECONDS - NOTICE_REACHES_POD_SECONDS if is_spot else None
    if pod.annotations.get(_DO_NOT_DISRUPT) == "true":
        # Not evicted: deleted only when the node's grace leaves no more than the pod's own.
        told_after = None if node is None else max(0.0, node - grace)
        if told_after is None or (room is not None and told_after >= room):
            return ReclaimTimes(is_told=False, grace_seconds=room or 0.0, line=line)
        room = None if room is None else room - told_after
    if node is not None and node < grace:
        grace, line = node, node_line
    if room is not None and room < grace:
        grace = room
    return ReclaimTimes(is_told=True, grace_seconds=grace, line=line)

"""What a cluster shows of a job, read at once: the job, its pods, nodes, volume, queue, and what was said of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from coremill.k8s.cluster.connection import Cluster
from coremill.k8s.cluster.kinds import JOB_KINDS
from coremill.k8s.cluster.refusals import FORBIDDEN, NOT_FOUND, Refused, Unavailable
from coremill.k8s.job import Job
from coremill.k8s.names import REPLICATED_JOB
from coremill.k8s.objects.nodes import POOL_LABEL

Object = dict[str, Any]
PATIENCE_SECONDS, RETRY_SECONDS = 180.0, 5.0
CLUSTER_WIDE_EVENTS = "default"  # the namespace where events of objects without one are


@dataclass(frozen=True, kw_only=True)
class Seen:
    """Everything there is to say about a job."""

    kind: str  # TrainJob, JobSet, Job
    name: str
    namespace: str
    nodes: int
    ranks_per_node: int
    pool_name: str | None  # None: the nodes are there already
    live: Object | None  # the job itself; None: it was not submitted
    pods: tuple[Object, ...] = ()
    events: tuple[Object, ...] = ()  # newest last
    pool: Object | None = None
    node_class: Object | None = None
    node_claims: tuple[Object, ...] = ()
    claim_name: str = ""
    claim: Object | None = None
    workload: Object | None = None  # Kueue's
    unseen: tuple[str, ...] = ()  # in words: what could not be read, and why


def labels_of(job: Job) -> str:
    """Selects what belongs to a job, its pods among it."""
    return ",".join(f"{key}={value}" for key, value in job.labels.items())


def look(cluster: Cluster, job: Job) -> Seen:
    """Job and pods have to be readable; what else is not, is said."""
    kind, namespace, section = JOB_KINDS[job.section.kind], job.namespace, job.section
    unseen: list[str] = []

    def readable(what: str, read: Callable[[], Any]) -> Any:
        try:
            return read()
        except Refused as error:
            if error.status not in (FORBIDDEN, NOT_FOUND):
                raise
            unseen.append(f"{what}: {error.what}")
            return None

    live = cluster.get(kind, job.name, namespace)
    pods = cluster.list_all("Pod", namespace, labels_of(job))
    events = readable("events", lambda: cluster.list_all("Event", namespace)) or []
    pool = node_class = None
    claims: list[Object] = []
    if section.has_karpenter:
        pool = readable("NodePool", lambda: cluster.get("NodePool", job.pool))
        node_class = readable("EC2NodeClass", lambda: cluster.get("EC2NodeClass", job.pool))
        claims = readable("nodes", lambda: cluster.list_all("NodeClaim", labels=f"{POOL_LABEL}={job.pool}")) or []
        if namespace != CLUSTER_WIDE_EVENTS:
            of_nodes = "involvedObject.kind=NodeClaim"
            said = readable("events of nodes", lambda: cluster.list_all("Event", CLUSTER_WIDE_EVENTS, fields=of_nodes))
            events += said or []
    return Seen(
        kind=kind,
        name=job.name,
        namespace=namespace,
        nodes=job.nodes,
        ranks_per_node=job.ranks_per_node,
        pool_name=job.pool if section.has_karpenter else None,
        live=live,
        pods=tuple(pods),
        events=tuple(sorted(events, key=event_time)),
        pool=pool,
        node_class=node_class,
        node_claims=tuple(claims),
        claim_name=section.claim,
        claim=readable("volume", lambda: cluster.get("PersistentVolumeClaim", section.claim, namespace)),
        workload=None if section.queue is None else readable("queue", lambda: workload_of(cluster, live)),
        unseen=tuple(unseen),
    )


def look_again(cluster: Cluster, job: Job, say: Callable[[str], None]) -> Seen:
    """For those who wait: a cluster that does not answer is asked again for some minutes."""
    until = time.monotonic() + PATIENCE_SECONDS
    is_told = False
    while True:
        try:
            return look(cluster, job)
        except Unavailable as error:
            if time.monotonic() > until:
                raise
            if not is_told:
                say(f"{error.what} ({error.why}): asked again until it does")
                is_told = True
            time.sleep(RETRY_SECONDS)


def remains(cluster: Cluster, job: Job) -> list[str]:
    """Which objects of a deleted job are still there: the job, and those that controllers made of it."""
    made_of = {"trainjob": ("TrainJob", "JobSet", "Job"), "jobset": ("JobSet", "Job"), "job": ("Job",)}
    found = []
    for kind in made_of[job.section.kind]:
        name = job.name if kind != "Job" or job.section.kind == "job" else f"{job.name}-{REPLICATED_JOB}-0"
        try:
            live = cluster.get(kind, name, job.namespace)
        except Refused as error:
            if error.status not in (FORBIDDEN, NOT_FOUND):
                raise
            continue  # what may not be read cannot be waited for
        found += [f"{kind}/{name}"] if live is not None else []
    return found


def workload_of(cluster: Cluster, live: Object | None) -> Object | None:
    """Kueue's object for a job, which decides whether its pods may start."""
    if live is None:
        return None
    uid = live["metadata"].get("uid")
    owned = [
        one
        for one in cluster.list_all("Workload", live["metadata"]["namespace"])
        if any(owner.get("uid") == uid for owner in one["metadata"].get("ownerReferences") or ())
    ]
    return owned[-1] if owned else None


def event_time(event: Object) -> str:
    """When it was last said, as text that sorts; who writes events has three places for it."""
    series = event.get("series") or {}
    said = series.get("lastObservedTime") or event.get("lastTimestamp") or event.get("eventTime")
    return str(said or event["metadata"].get("creationTimestamp") or "")

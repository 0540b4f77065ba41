"""A job is stopped, goes on, or is deleted. Ranks save before they end; the volume is never touched."""

from __future__ import annotations

from collections.abc import Callable

from coremill.k8s.cluster.connection import Cluster
from coremill.k8s.cluster.kinds import JOB_KINDS, KINDS, name_of
from coremill.k8s.cluster.refusals import FORBIDDEN, NOT_FOUND, Refused, Unavailable
from coremill.k8s.cluster.seen import Object, Seen, labels_of, look
from coremill.k8s.cluster.status import is_in_queue, live_pods
from coremill.k8s.job import Job
from coremill.k8s.names import cluster_wide

Say = Callable[[str], None]
LOOK_SECONDS = 5.0
# Of a namespace, in the order in which they go: the job first, so that its pods end, then what stands around it.
_NAMESPACED = (
    *("TrainJob", "JobSet", "Job", "TrainingRuntime", "Service", "NetworkPolicy", "ConfigMap", "LocalQueue"),
    "PodMonitor",
)


def stop(cluster: Cluster, seen: Seen) -> str:
    """Suspends the job: its pods get SIGTERM, ranks save, nothing comes back. Says what was changed."""
    assert seen.live is not None
    return _set_running(cluster, seen, running=False)


def resume(cluster: Cluster, seen: Seen) -> str:
    """The other way round."""
    assert seen.live is not None
    return _set_running(cluster, seen, running=True)


def _set_running(cluster: Cluster, seen: Seen, *, running: bool) -> str:
    """In a queue the job's `suspend` is Kueue's, which would start it again: there its workload is put aside."""
    if seen.workload is not None:
        cluster.merge(seen.workload, {"spec": {"active": running}})
        return name_of(seen.workload)
    assert seen.live is not None
    if is_in_queue(seen):
        raise Unavailable(
            f"Kueue has not looked at {name_of(seen.live)} yet",
            where=f"context {cluster.context}",
            why="; ".join(seen.unseen) or "there is no Workload of it, which is what is stopped",
            do="try again in a moment; where Kueue is not running, coremill k8s delete",
        )
    cluster.merge(seen.live, {"spec": {"suspend": not running}})
    return name_of(seen.live)


def wait_until_gone(cluster: Cluster, job: Job, say: Say) -> None:
    """Until no pod of the job runs: each has its grace to save in."""
    told = -1
    while left := len(live_pods(look(cluster, job))):
        if left != told:
            grace = job.times.pod_grace_seconds
            say(f"{left} pod{'' if left == 1 else 's'} still there: ranks save, for at most {grace} s")
            told = left
        cluster.wait_for_change(job.namespace, labels_of(job), LOOK_SECONDS)


def belongings(cluster: Cluster, job: Job) -> tuple[list[Object], list[Object], list[str]]:
    """What delete takes away, in its order: of the namespace, of the whole cluster; and what could not be looked for.

    By labels, so that also what an earlier run file made is found; of the whole cluster by name too, since a run of
    the same name may be in another namespace.
    """
    unseen: list[str] = []
    own: list[Object] = []
    for kind in _NAMESPACED:
        own += _listed(cluster, kind, job, unseen)
    names = {job.pool}
    if job.section.queue is not None:
        names.add(cluster_wide(job.namespace, job.section.queue))
    wide: list[Object] = []
    for kind in ("ClusterQueue", "ResourceFlavor", "NodePool", "EC2NodeClass"):
        wide += [one for one in _listed(cluster, kind, job, unseen) if one["metadata"]["name"] in names]
    return own, wide, unseen


def delete(cluster: Cluster, job: Job, own: list[Object], wide: list[Object], say: Say) -> list[str]:
    """The job first, then, when its pods have saved and gone, what stood around it and its nodes."""
    first = [one for one in own if one["kind"] in JOB_KINDS.values()]
    for one in first:
        cluster.delete(one)
        say(f"{name_of(one)} deleted")
    wait_until_gone(cluster, job, say)
    for one in [one for one in own if one not in first] + wide:
        cluster.delete(one)
        say(f"{name_of(one)} deleted")
    return [name_of(one) for one in (*own, *wide)]


def _listed(cluster: Cluster, kind: str, job: Job, unseen: list[str]) -> list[Object]:
    namespace = job.namespace if KINDS[kind].namespaced else None
    try:
        found = cluster.list_all(kind, namespace, labels_of(job))
    except Refused as error:
        if error.status == FORBIDDEN:
            unseen.append(error.what)
        elif error.status != NOT_FOUND:  # a kind that is not installed has no objects
            raise
        return []
    # What a controller made goes with its owner.
    return [one for one in found if not one["metadata"].get("ownerReferences")]

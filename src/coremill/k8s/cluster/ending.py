"""A job is stopped, goes on, or is deleted. Ranks save before they end; the volume is never touched."""

from __future__ import annotations

import time
from collections.abc import Callable

from coremill.k8s.cluster.connection import Cluster
from coremill.k8s.cluster.kinds import JOB_KINDS, KINDS, name_of
from coremill.k8s.cluster.refusals import FORBIDDEN, NOT_FOUND, Refused, Unavailable
from coremill.k8s.cluster.seen import Object, Seen, labels_of, look_again, remains
from coremill.k8s.cluster.status import is_in_queue, live_pods
from coremill.k8s.job import Job
from coremill.k8s.names import cluster_wide

Say = Callable[[str], None]
LOOK_SECONDS = 5.0
_BEYOND_GRACE_SECONDS, _PATIENCE_SECONDS, _LEFTOVER_SECONDS = 30, 120.0, 0.5
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
    told, grace = -1, job.times.pod_grace_seconds
    late = time.monotonic() + grace + _BEYOND_GRACE_SECONDS
    while pods := live_pods(look_again(cluster, job, say)):
        if len(pods) != told:
            told = len(pods)
            say(f"{told} pod{'' if told == 1 else 's'} still there: ranks save, for at most {grace} s")
        if time.monotonic() > late:
            late = float("inf")
            names = ", ".join(pod["metadata"]["name"] for pod in pods)
            say(f"beyond the grace: {names}; where the node is lost, `kubectl delete pod NAME --force` gives it up")
        cluster.wait_for_change(job.namespace, labels_of(job), LOOK_SECONDS)


def delete_job(cluster: Cluster, job: Job, live: Object, say: Say) -> None:
    """Until it is gone with all that controllers made of it: a new job of its name would be taken for the old one."""
    cluster.delete(live)
    wait_until_gone(cluster, job, say)
    until, told = time.monotonic() + _PATIENCE_SECONDS, ""
    while left := ", ".join(remains(cluster, job)):
        if left != told:
            say(f"still there: {left}")
            told = left
        if time.monotonic() > until:
            raise Unavailable(
                f"{left} was deleted and does not go",
                where=f"context {cluster.context}",
                why="a finalizer holds it: its controller is not running, or waits for something",
                do="`kubectl get -o yaml` shows metadata.finalizers; submit or delete again when it is gone",
            )
        time.sleep(_LEFTOVER_SECONDS)


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
        delete_job(cluster, job, one, say)
        say(f"{name_of(one)} deleted")
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

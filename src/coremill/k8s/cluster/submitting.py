"""Sends a job to the cluster: checked here, tried there by a dry run, then applied; a stopped job goes on.

The job itself comes last, after its own dry run: Kubeflow Trainer takes a TrainJob, also for a dry run, only once its
runtime is there. A namespace that is not there is made first, since a dry run makes none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from coremill.errors import InputError
from coremill.k8s.check.checking import check
from coremill.k8s.check.crds import shipped_schemas
from coremill.k8s.check.manifests import manifests_of
from coremill.k8s.cluster.connection import Cluster
from coremill.k8s.cluster.ending import delete_job, resume, wait_until_gone
from coremill.k8s.cluster.kinds import VOLUME_KINDS, name_of
from coremill.k8s.cluster.refusals import DENIED, INVALID, Refused
from coremill.k8s.cluster.releases import require_releases
from coremill.k8s.cluster.seen import Object, Seen, look
from coremill.k8s.cluster.status import OVER, state_of
from coremill.k8s.job import Job
from coremill.k8s.render import Rendered

Say = Callable[[str], None]
_MANAGED_BY, _INSTANCE = "app.kubernetes.io/managed-by", "app.kubernetes.io/instance"
_JOB_OBJECTS = ("TrainingRuntime", "TrainJob", "JobSet", "Job")


@dataclass(frozen=True)
class Action:
    """What was done with one object."""

    object: str
    action: str  # created, configured, unchanged, left, resumed, made anew


def submit(rendered: Rendered, cluster: Cluster, file: str, say: Say) -> list[Action]:
    """All objects as rendered, the job among them; what the cluster would refuse is refused before any is made."""
    require_checked(rendered, file, say)
    job = rendered.job
    for words in require_releases(cluster, job):
        say(words)
    seen = look(cluster, job)
    state = state_of(seen)
    live = _require_free(cluster, rendered.objects)
    is_same = seen.live is not None and _is_same(cluster, rendered, live)
    if state == "deleting":
        raise _taken(name_of(rendered.objects[-1]), "it is being deleted", "wait until it is gone, then submit again")
    if seen.live is not None and state not in (*OVER, "stopped", "stopping") and not is_same:
        raise _taken(
            name_of(rendered.objects[-1]),
            f"a job of this name is {state}, and was made from another run file",
            "`coremill k8s stop` it first: it saves, and submit goes on from there with this run file; or set"
            " kubernetes.name",
        )
    if is_same and state == "complete":
        say(f"{name_of(rendered.objects[-1])} is complete; to train it again, `coremill k8s delete` it first")
        return [Action(name_of(one), "unchanged") for one in rendered.objects]
    if is_same and state != "failed":
        return _go_on(cluster, rendered, seen, state, say)
    made_anew = seen.live is not None
    if seen.live is not None:
        _tried(cluster, rendered.objects[:-1])  # before the old job goes
        say(f"{name_of(rendered.objects[-1])} is {state}: it is made anew, and goes on from its newest checkpoint")
        delete_job(cluster, job, seen.live, say)
    actions = _place(cluster, rendered, live, say)
    return [*actions[:-1], Action(actions[-1].object, "made anew")] if made_anew else actions


def require_checked(rendered: Rendered, file: str, say: Say) -> None:
    """What `coremill k8s check` rejects is not submitted; its warnings are said."""
    outcome = check(manifests_of(rendered, file), shipped_schemas(), {})
    for finding in outcome.findings:
        say(str(finding))
    if outcome.errors:
        count = f"{outcome.errors} error{'' if outcome.errors == 1 else 's'}"
        raise InputError(
            f"nothing was submitted: coremill k8s check finds {count}",
            where=file,
            why=str(next(one for one in outcome.findings if one.problem.level == "error")),
            do="mend what it names",
        )


def _require_free(cluster: Cluster, objects: list[Object]) -> dict[str, Object]:
    """What is there already, by name. Another's object of one of our names is not touched."""
    found: dict[str, Object] = {}
    for one in objects:
        metadata = one["metadata"]
        live = cluster.get(one["kind"], metadata["name"], metadata.get("namespace"))
        if live is None:
            continue
        found[name_of(one)] = live
        if one["kind"] == "Namespace" or one["kind"] in VOLUME_KINDS:
            continue
        labels, wanted = live["metadata"].get("labels") or {}, metadata["labels"]
        if any(labels.get(key) != wanted[key] for key in (_MANAGED_BY, _INSTANCE)):
            owner = labels.get(_INSTANCE) if labels.get(_MANAGED_BY) == wanted[_MANAGED_BY] else None
            whose = f"it belongs to the run {owner}" if owner else "coremill did not make it"
            do = "set kubernetes.name to another name"
            if one["kind"] in ("ResourceFlavor", "ClusterQueue", "LocalQueue"):
                do = "set kubernetes.make_queue: false, to use the queue that is there"
            raise _taken(name_of(one), whose, do)
    return found


def _is_same(cluster: Cluster, rendered: Rendered, live: dict[str, Object]) -> bool:
    """Whether the job in the cluster is what is rendered now: a dry run would change nothing of it."""
    for one in rendered.objects:
        if one["kind"] not in _JOB_OBJECTS:
            continue
        before = live.get(name_of(one))
        if before is None:
            return False
        try:
            after = cluster.apply(one, dry_run=True)
        except Refused as error:
            # Most fields of a job cannot be changed: of a JobSet a webhook says so, by 403.
            if error.status != INVALID and not (DENIED.search(error.said) and "immutable" in error.said):
                raise
            return False
        if after.get("spec") != before.get("spec"):
            return False
    return True


def _go_on(cluster: Cluster, rendered: Rendered, seen: Seen, state: str, say: Say) -> list[Action]:
    """The job is there as it should be: started again where it was stopped."""
    others = [Action(name_of(one), "unchanged") for one in rendered.objects[:-1]]
    name = name_of(rendered.objects[-1])
    if state not in ("stopped", "stopping"):
        say(f"{name} is there already, {state}")
        return [*others, Action(name, "unchanged")]
    wait_until_gone(cluster, rendered.job, say)
    others = _apply_all(cluster, rendered.objects[:-1], say)  # nodes may have been deleted meanwhile
    resume(cluster, look(cluster, rendered.job))
    say(f"{name} goes on from its newest checkpoint")
    return [*others, Action(name, "resumed")]


def _place(cluster: Cluster, rendered: Rendered, live: dict[str, Object], say: Say) -> list[Action]:
    *around, job = rendered.objects
    first = [one for one in around if one["kind"] == "Namespace"]
    others = [one for one in around if one not in first]
    done = _apply_all(cluster, first, say)
    done += _apply_all(cluster, others, say)
    try:
        done += _apply_all(cluster, [job], say)
    except Refused:
        say("what stands around the job was made and costs nothing without pods; coremill k8s delete takes it away")
        raise
    return done


def _apply_all(cluster: Cluster, objects: list[Object], say: Say) -> list[Action]:
    """All of them tried before the first is made."""
    done = []
    for one, live in _tried(cluster, objects):
        if _is_left(one, live):
            done.append(Action(name_of(one), "left"))
        else:
            after = cluster.apply(one)
            version = after["metadata"].get("resourceVersion")
            is_same = live is not None and live["metadata"].get("resourceVersion") == version
            done.append(Action(name_of(one), "created" if live is None else "unchanged" if is_same else "configured"))
        say(f"{done[-1].object} {_ACTION_WORDS.get(done[-1].action, done[-1].action)}")
    return done


def _tried(cluster: Cluster, objects: list[Object]) -> list[tuple[Object, Object | None]]:
    """Each by a dry run, with what is there of it."""
    found: list[tuple[Object, Object | None]] = []
    for one in objects:
        live = cluster.get(one["kind"], one["metadata"]["name"], one["metadata"].get("namespace"))
        if not _is_left(one, live):
            cluster.apply(one, dry_run=True)
        found.append((one, live))
    return found


_ACTION_WORDS = {"left": "is there, and left as it is"}


def _is_left(body: Object, live: Object | None) -> bool:
    """The volume, and the namespace of others, are used as they are."""
    if live is None:
        return False
    labels = live["metadata"].get("labels") or {}
    return body["kind"] in VOLUME_KINDS or (body["kind"] == "Namespace" and labels.get(_MANAGED_BY) != "coremill")


def _taken(name: str, why: str, do: str) -> InputError:
    return InputError(f"the name of {name} is taken", where="kubernetes.name", why=why, do=do)


def wanted_pods(job: Job) -> str:
    return f"{job.nodes} pod{'' if job.nodes == 1 else 's'}"

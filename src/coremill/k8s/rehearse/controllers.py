"""From the object a user applies to the Jobs that make pods, as Kubeflow Trainer and JobSet do it. Pure.

    TrainJob + TrainingRuntime  ->  JobSet      image, command, resources, numNodes; PET_* of the torch policy
    JobSet                      ->  Job         names, labels, host names below the set's own service
    Job                         ->  pods        pods.py

What an object asks for and is not rehearsed is refused by its line, or said: never passed over.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, replace
from typing import Any

from coremill.errors import InputError
from coremill.k8s.check.lints.reading import quantity
from coremill.k8s.names import REPLICATED_JOB
from coremill.k8s.rehearse.written import Written, WrittenObjects
from coremill.world.identity import DEFAULT_PORT

COMPLETION_INDEX = "batch.kubernetes.io/job-completion-index"
_STEP_LABEL = "trainer.kubeflow.org/trainjob-ancestor-step"
_TRAINER_CONTAINER = "node"
_RESERVED = ("PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT")
_UNHEARD_OF_PATCHES = ("runtimePatches", "podTemplateOverrides", "podSpecOverrides", "initializer")
_NOT_WAITED_FOR = ("activeDeadlineSeconds", "ttlSecondsAfterFinished", "podReplacementPolicy")
JOB_SET_ACTIONS = ("FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts")
_DEFAULT_BACKOFF_LIMIT = 6


@dataclass(frozen=True, kw_only=True)
class PlannedJob:
    """A Job with what its controllers have filled in."""

    name: str
    namespace: str
    replicated_job: str | None  # of which part of a JobSet it is; None: a Job of its own
    spec: Written
    template: dict[str, Any]  # of its pods, as filled in
    completions: int
    parallelism: int

    @property
    def backoff_limit(self) -> int:
        written = self.spec.part("backoffLimit").value
        return _DEFAULT_BACKOFF_LIMIT if written is None else int(written)


@dataclass(frozen=True, kw_only=True)
class PlannedSet:
    """All Jobs that run together, and what happens to all when one fails."""

    name: str
    job: PlannedJob
    failure_policy: Written | None  # None: no JobSet, or one without: a failed Job is the end
    notes: tuple[str, ...] = ()


def plan_set(objects: WrittenObjects) -> PlannedSet:
    """What the controllers make of the one job among the objects."""
    top = objects.the_job()
    planned = _planned(objects, top)
    left_out = [part.part(key) for part in (top.part("spec"), planned.job.spec) for key in _NOT_WAITED_FOR]
    places = dict.fromkeys(one.place for one in left_out if one.value is not None)
    mediums = [one.part("emptyDir", "medium") for one in planned.job.spec.parts("template", "spec", "volumes")]
    notes = [f"not rehearsed: {place}" for place in places]
    notes += [f"on disk here, and not of the pod's memory: {one.place}" for one in mediums if one.value == "Memory"]
    return replace(planned, notes=(*planned.notes, *notes))


def _planned(objects: WrittenObjects, top: Written) -> PlannedSet:
    if top.part("spec", "suspend").value:
        raise InputError(
            "the job is suspended: no pod would start",
            where=top.part("spec", "suspend").place,
            do="leave spec.suspend out",
        )
    if top.manifest.kind == "Job":
        return PlannedSet(name=_name(top), job=_job(_name(top), top, top.part("spec"), None, None), failure_policy=None)
    if top.manifest.kind == "JobSet":
        return _of_job_set(_name(top), top, top.part("spec"), (), None)
    return _of_train_job(objects, top)


def _of_train_job(objects: WrittenObjects, top: Written) -> PlannedSet:
    """The Trainer: a JobSet from the runtime, with what the TrainJob says put in."""
    reference = top.part("spec", "runtimeRef")
    kind = reference.part("kind").value or "ClusterTrainingRuntime"
    name = str(reference.part("name").value)
    runtime = objects.find(kind, name)
    if runtime is None:
        raise InputError(
            f"the {kind} {name} is not among the objects",
            where=reference.place,
            why="the Trainer refuses a TrainJob whose runtime is not there",
            do="name its file too",
        )
    notes = [
        f"not rehearsed: {top.part('spec', key).place}"
        for key in _UNHEARD_OF_PATCHES
        if top.part("spec", key).value is not None
    ]
    return _of_job_set(_name(top), top, runtime.part("spec", "template", "spec"), tuple(notes), runtime)


def _of_job_set(name: str, top: Written, spec: Written, notes: tuple[str, ...], runtime: Written | None) -> PlannedSet:
    replicated = spec.parts("replicatedJobs")
    if len(replicated) != 1 or (replicated[0].part("replicas").value or 1) != 1:
        raise InputError(
            "a JobSet of one Job is rehearsed, and this one has more",
            where=spec.part("replicatedJobs").place,
            do="rehearse the Job that trains by itself",
        )
    part = replicated[0]
    part_name = str(part.part("name").value)
    job = _job(f"{name}-{part_name}-0", top, part.part("template", "spec"), part_name, name)
    if runtime is not None:
        job = _as_the_trainer_does(job, top, runtime, part)
    if spec.part("network", "enableDNSHostnames").value is not False:
        # The set makes a headless service of this name.
        job.template["spec"]["subdomain"] = spec.part("network", "subdomain").value or name
    policy = spec.part("failurePolicy")
    _require_rehearsable_policy(policy)
    return PlannedSet(name=name, job=job, failure_policy=None if policy.value is None else policy, notes=notes)


def _job(name: str, top: Written, spec: Written, replicated_job: str | None, job_set: str | None) -> PlannedJob:
    _require_rehearsable(spec)
    template = copy.deepcopy(spec.part("template").value or {})
    labels = template.setdefault("metadata", {}).setdefault("labels", {})
    labels |= {"batch.kubernetes.io/job-name": name, "job-name": name}
    if job_set is not None:
        labels |= {
            "jobset.sigs.k8s.io/jobset-name": job_set,
            "jobset.sigs.k8s.io/replicatedjob-name": str(replicated_job),
            "jobset.sigs.k8s.io/job-index": "0",
        }
    completions = int(spec.part("completions").value or 1)
    return PlannedJob(
        name=name,
        namespace=str(top.part("metadata", "namespace").value or "default"),
        replicated_job=replicated_job,
        spec=spec,
        template=template,
        completions=completions,
        parallelism=int(spec.part("parallelism").value or 1),
    )


def _require_rehearsable(spec: Written) -> None:
    """Jobs whose ends mean something else than the exit codes of their pods."""
    pod = spec.part("template", "spec")
    if pod.part("restartPolicy").value != "Never":
        raise InputError(
            "pods that are restarted in place are not rehearsed",
            where=pod.part("restartPolicy").place,
            why="kubelet would start the container again, and nobody would look at its exit code",
            do="restartPolicy: Never",
        )
    # JobSet and Trainer make the Job Indexed where nothing is said; a Job by itself has to say it.
    mode = spec.part("completionMode")
    if mode.value != "Indexed" and (mode.value is not None or spec.manifest.kind == "Job"):
        raise InputError(
            "pods without an index cannot know who they are", where=mode.place, do="completionMode: Indexed"
        )
    for key in ("backoffLimitPerIndex", "successPolicy", "managedBy"):
        if spec.part(key).value is not None:
            raise InputError(f"{key} is not rehearsed", where=spec.part(key).place, do="leave it out")
    if len(pod.parts("containers")) != 1:
        raise InputError(
            "a pod of one container is rehearsed", where=pod.part("containers").place, do="leave sidecars out"
        )


def _require_rehearsable_policy(policy: Written) -> None:
    """Rules of a JobSet that look at more than why its Job failed, or that restart less than all of it."""
    strategy = policy.part("restartStrategy")
    unknown = [strategy] if strategy.value not in (None, "Recreate", "BlockingRecreate") else []
    for rule in policy.parts("rules"):
        action, patterns = rule.part("action"), rule.part("onJobFailureMessagePatterns")
        unknown += [action] if action.value not in JOB_SET_ACTIONS else []
        unknown += [patterns] if patterns.value else []
    for one in unknown:
        what = f"{one.path.rpartition('.')[2]}" + ("" if isinstance(one.value, list) else f": {one.value}")
        raise InputError(f"{what} is not rehearsed", where=one.place, do=f"use {', '.join(JOB_SET_ACTIONS)} by reason")


def _as_the_trainer_does(job: PlannedJob, top: Written, runtime: Written, part: Written) -> PlannedJob:
    """What the TrainJob says goes into the pods that train, and the torch policy tells them who they are."""
    trainer = top.part("spec", "trainer")
    policy = runtime.part("spec", "mlPolicy")
    nodes = int(trainer.part("numNodes").value or policy.part("numNodes").value or 1)
    step = part.part("template", "metadata", "labels", _STEP_LABEL) if part.value else None
    container = job.template["spec"]["containers"][0]
    if step is None or step.value != "trainer" or container.get("name") != _TRAINER_CONTAINER:
        raise InputError(
            "the Trainer would not find the pods that train",
            where=part.place,
            why=f"it looks for the label {_STEP_LABEL}: trainer and the container {_TRAINER_CONTAINER}",
            do="render the runtime anew: coremill k8s render",
        )
    for key in ("image", "command", "args"):
        if trainer.part(key).value is not None:
            container[key] = trainer.part(key).value
    if trainer.part("resourcesPerNode").value is not None:
        container["resources"] = trainer.part("resourcesPerNode").value
    environment = [*(container.get("env") or []), *(trainer.part("env").value or [])]
    for place, one in enumerate(trainer.part("env").value or []):
        if one.get("name") in _RESERVED:
            raise InputError(
                f"{one['name']} is the Trainer's own", where=trainer.part("env", place).place, do="leave it out"
            )
    if policy.part("torch").value is not None:
        environment += _torch_policy(job, nodes, trainer, policy, container)
    container["env"] = list({one["name"]: one for one in environment}.values())
    return replace(job, completions=nodes, parallelism=nodes)


def _torch_policy(
    job: PlannedJob, nodes: int, trainer: Written, policy: Written, container: dict[str, Any]
) -> list[dict[str, Any]]:
    """Without numProcPerNode the Trainer takes the CPUs of the pod for it."""
    processes = trainer.part("numProcPerNode").value or policy.part("torch", "numProcPerNode").value or "auto"
    if processes in ("auto", "cpu"):
        resources = container.get("resources") or {}
        amounts = resources.get("limits") or resources.get("requests") or {}
        processes = max(1, math.ceil(quantity(amounts.get("cpu", 1)) or 1))
    set_name = job.name.removesuffix(f"-{job.replicated_job}-0")
    index = {"fieldRef": {"fieldPath": f"metadata.annotations['{COMPLETION_INDEX}']"}}
    return [
        {"name": "PET_NNODES", "value": str(nodes)},
        {"name": "PET_NPROC_PER_NODE", "value": str(processes)},
        {"name": "PET_NODE_RANK", "valueFrom": index},
        {"name": "PET_MASTER_ADDR", "value": f"{set_name}-{REPLICATED_JOB}-0-0.{set_name}"},
        {"name": "PET_MASTER_PORT", "value": str(DEFAULT_PORT)},
    ]


def _name(written: Written) -> str:
    return str(written.part("metadata", "name").value)

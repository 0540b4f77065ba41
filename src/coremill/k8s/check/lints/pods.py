"""Pods as they will be: the templates of all kinds of workload in one form, a TrainJob's joined with its runtime.

Each part keeps the path of the field it comes from, so that a finding names what the user wrote.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from coremill.k8s.check.lints.reading import at, mapping, objects, quantity, text, texts, whole
from coremill.k8s.check.manifests import Manifest

TRAINER = "trainer.kubeflow.org"
TRAINER_CONTAINER = "node"  # of the runtimes that Kubeflow Trainer ships, and the only one it gives PET_ variables
EFA = "vpc.amazonaws.com/efa"
_GPUS = ("nvidia.com/gpu", "amd.com/gpu", "aws.amazon.com/neuron")
_TRAINING = re.compile(r"\b(train\w*|finetune|torchrun|mpirun|accelerate|deepspeed|coremill)\b")
_POD_TEMPLATES = ("Deployment", "StatefulSet", "DaemonSet", "ReplicaSet", "Job")


@dataclass(frozen=True)
class Container:
    """One container of a pod and where its parts are written."""

    name: str
    path: str
    spec: Mapping[str, Any]
    paths: Mapping[str, str]  # of image, command, resources, env where that is not below `path`
    inherited: Mapping[str, Any] = field(default_factory=dict)  # what the runtime has for it and nobody writes here

    def path_of(self, key: str) -> str:
        return self.paths.get(key, f"{self.path}.{key}" if key in self.spec else self.path)

    @property
    def image(self) -> str:
        return text(self.spec.get("image"))

    @property
    def words(self) -> list[str]:
        """The command line: what takes the image's entry point's place, and its arguments."""
        both = {**self.inherited, **self.spec}
        return [*texts(both.get("command")), *texts(both.get("args"))]

    @property
    def env(self) -> dict[str, Mapping[str, Any]]:
        both = [*objects(self.inherited.get("env")), *objects(self.spec.get("env"))]
        return {text(one.get("name")): one for one in both}

    def amount(self, name: str) -> float | None:
        """What is asked for of a resource; a limit alone counts as asked for."""
        resources = mapping({**self.inherited, **self.spec}.get("resources"))
        asked = quantity(at(resources, "requests", name))
        return quantity(at(resources, "limits", name)) if asked is None else asked

    def limit(self, name: str) -> float | None:
        return quantity(at({**self.inherited, **self.spec}.get("resources"), "limits", name))


@dataclass(frozen=True)
class Pod:
    """The pods of one template, joined from all that decides about them."""

    manifest: Manifest
    path: str  # of the pod's spec, or of what stands for it
    spec: Mapping[str, Any]
    paths: Mapping[str, str]  # of fields of the spec that are written elsewhere
    annotations: Mapping[str, tuple[Any, str]]  # value and path
    containers: tuple[Container, ...]
    count: int
    processes: int | None = None  # in each pod, where the workload says it
    is_training: bool = False
    is_joined: bool = False  # a runtime whose TrainJob is there too: that one is looked at

    def path_of(self, key: str) -> str:
        return self.paths.get(key, f"{self.path}.{key}" if key in self.spec else self.path)

    @cached_property
    def main(self) -> Container | None:
        named = (each for each in self.containers if each.name == TRAINER_CONTAINER)
        return next(named, self.containers[0] if self.containers else None)

    @cached_property
    def cpu_milli(self) -> int:
        return round(1000 * sum(each.amount("cpu") or 0.0 for each in self.containers))

    @cached_property
    def memory_bytes(self) -> int:
        return round(sum(each.amount("memory") or 0.0 for each in self.containers))

    @cached_property
    def needs_gpu(self) -> bool:
        return any(each.amount(name) for each in self.containers for name in _GPUS)

    @cached_property
    def needs_efa(self) -> bool:
        return any(each.amount(EFA) for each in self.containers)


def find_pods(manifests: list[Manifest]) -> list[Pod]:
    used = {id(runtime) for each in manifests if each.kind == "TrainJob" and (runtime := runtime_of(each, manifests))}
    found: list[Pod] = []
    for manifest in manifests:
        if manifest.kind == "TrainJob" and manifest.group == TRAINER:
            found.append(_train_job_pod(manifest, runtime_of(manifest, manifests)))
        elif manifest.kind in ("TrainingRuntime", "ClusterTrainingRuntime"):
            found += _job_set_pods(manifest, "spec.template.spec", is_joined=id(manifest) in used)
        elif manifest.kind == "JobSet":
            found += _job_set_pods(manifest, "spec", is_joined=False)
        elif manifest.kind == "Pod":
            found.append(_pod(manifest, "spec", mapping(manifest.object.get("metadata")), "metadata", count=1))
        elif manifest.kind == "CronJob":
            found.append(_template_pod(manifest, "spec.jobTemplate.spec", is_training=False))
        elif manifest.kind in _POD_TEMPLATES and manifest.group in ("apps", "batch"):
            found.append(_template_pod(manifest, "spec", is_training=manifest.kind == "Job" and _trains(manifest)))
    return found


def runtime_of(job: Manifest, manifests: list[Manifest]) -> Manifest | None:
    """The runtime a TrainJob names, where it is among the manifests."""
    reference = mapping(at(job.object, "spec", "runtimeRef"))
    kind = reference.get("kind", "ClusterTrainingRuntime")
    for each in manifests:
        same_place = kind == "ClusterTrainingRuntime" or _namespace(each) == _namespace(job)
        if each.kind == kind and at(each.object, "metadata", "name") == reference.get("name") and same_place:
            return each
    return None


def patches_of(job: Manifest) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Pod templates a TrainJob puts over its runtime's: name of the replicated job, path, template."""
    spec = mapping(job.object.get("spec"))
    for number, patch in enumerate(objects(spec.get("runtimePatches"))):
        jobs = at(patch, "trainingRuntimeSpec", "template", "spec", "replicatedJobs")
        for place, one in enumerate(objects(jobs)):
            path = f"spec.runtimePatches[{number}].trainingRuntimeSpec.template.spec.replicatedJobs[{place}]"
            yield (
                text(one.get("name")),
                f"{path}.template.spec.template",
                mapping(at(one, "template", "spec", "template")),
            )
    for number, override in enumerate(objects(spec.get("podTemplateOverrides"))):
        for target in objects(override.get("targetJobs")):
            yield text(target.get("name")), f"spec.podTemplateOverrides[{number}]", override


def _trains(job: Manifest) -> bool:
    """Whether a plain Job is one of ours: several pods that know their number, or a command that says so."""
    spec = mapping(job.object.get("spec"))
    words = [
        word
        for container in objects(at(spec, "template", "spec", "containers"))
        for word in [*texts(container.get("command")), *texts(container.get("args"))]
    ]
    return spec.get("completionMode") == "Indexed" or bool(_TRAINING.search(" ".join(words)))


def _namespace(manifest: Manifest) -> str:
    return text(at(manifest.object, "metadata", "namespace")) or "default"


def _train_job_pod(job: Manifest, runtime: Manifest | None) -> Pod:
    trainer = mapping(at(job.object, "spec", "trainer"))
    base = next(iter(_job_set_pods(runtime, "spec.template.spec", is_joined=False)), None) if runtime else None
    spec: dict[str, Any] = dict(base.spec) if base else {}
    paths = {key: "spec.runtimeRef" for key in spec}
    annotations = {key: (value, "spec.runtimeRef") for key, (value, _) in (base.annotations if base else {}).items()}
    for key, value in mapping(at(job.object, "spec", "annotations")).items():
        annotations[key] = (value, f"spec.annotations[{key}]")
    for name, path, template in patches_of(job):
        if name != TRAINER_CONTAINER:
            continue
        for key, value in mapping(at(template, "metadata", "annotations")).items():
            annotations[key] = (value, f"{path}.metadata.annotations[{key}]")
        for key, value in mapping(template.get("spec")).items():
            spec[key] = _joined_value(spec.get(key), value)
            paths[key] = f"{path}.spec.{key}"
    inner = base.main.spec if base and base.main else {}
    known = {"resourcesPerNode": "resources", "image": "image", "command": "command", "args": "args", "env": "env"}
    given = {known[key]: trainer[key] for key in known if key in trainer}
    written = {known[key]: f"spec.trainer.{key}" for key in known if key in trainer}
    container = Container(TRAINER_CONTAINER, "spec.trainer", given, written, inner)
    policy = mapping(at(runtime.object, "spec", "mlPolicy")) if runtime else {}
    count = whole(trainer.get("numNodes")) or whole(policy.get("numNodes")) or 1
    processes = whole(trainer.get("numProcPerNode")) or whole(at(policy, "torch", "numProcPerNode"))
    return Pod(job, "spec.trainer", spec, paths, annotations, (container,), count, processes, is_training=True)


def _joined_value(below: Any, above: Any) -> Any:
    if isinstance(below, dict) and isinstance(above, dict):
        return {**below, **above}
    return [*below, *above] if isinstance(below, list) and isinstance(above, list) else above


def _job_set_pods(manifest: Manifest, path: str, *, is_joined: bool) -> Iterator[Pod]:
    spec = at(manifest.object, *path.split("."))
    for number, job in enumerate(objects(at(spec, "replicatedJobs"))):
        inner = mapping(at(job, "template", "spec"))
        pods = whole(inner.get("parallelism")) or whole(inner.get("completions")) or 1
        where = f"{path}.replicatedJobs[{number}].template.spec.template"
        template = mapping(inner.get("template"))
        count = (whole(job.get("replicas")) or 1) * pods
        yield replace(_of_template(manifest, where, template, count), is_training=True, is_joined=is_joined)


def _template_pod(manifest: Manifest, path: str, *, is_training: bool) -> Pod:
    spec = mapping(at(manifest.object, *path.split(".")))
    count = whole(spec.get("parallelism")) or whole(spec.get("replicas")) or whole(spec.get("completions")) or 1
    pod = _of_template(manifest, f"{path}.template", mapping(spec.get("template")), count)
    return replace(pod, is_training=is_training)


def _of_template(manifest: Manifest, path: str, template: Mapping[str, Any], count: int) -> Pod:
    metadata = mapping(template.get("metadata"))
    return _pod(manifest, f"{path}.spec", metadata, f"{path}.metadata", count=count, spec=mapping(template.get("spec")))


def _pod(
    manifest: Manifest,
    path: str,
    metadata: Mapping[str, Any],
    metadata_path: str,
    *,
    count: int,
    spec: Mapping[str, Any] | None = None,
) -> Pod:
    spec = mapping(manifest.object.get("spec")) if spec is None else spec
    annotations = {
        key: (value, f"{metadata_path}.annotations[{key}]")
        for key, value in mapping(metadata.get("annotations")).items()
    }
    containers = tuple(
        Container(text(each.get("name")), f"{path}.containers[{number}]", each, {})
        for number, each in enumerate(objects(spec.get("containers")))
    )
    processes = None
    if containers:
        named = text(containers[0].env.get("PET_NPROC_PER_NODE", {}).get("value"))
        processes = int(named) if named.isdigit() else None
    return Pod(manifest, path, spec, {}, annotations, containers, count, processes)

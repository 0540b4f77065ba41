"""Rules that live in webhooks and controllers, not in schemas: Kubeflow Trainer's, JobSet's, Job's own."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from coremill.k8s.check.findings import Problem, shown
from coremill.k8s.check.lints.containers import restart_policy_of
from coremill.k8s.check.lints.pods import TRAINER, TRAINER_CONTAINER, patches_of, runtime_of
from coremill.k8s.check.lints.reading import at, listed, mapping, objects, text, texts, whole
from coremill.k8s.check.manifests import Manifest

RESERVED = ("PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT")
_OWN_CONTAINERS = (TRAINER_CONTAINER, "dataset-initializer", "model-initializer")
_NAME_CHARACTERS = 63
_POD_SUFFIX = 6  # what Kubernetes adds to the name of a pod: -x7k2p
_RULE_NAME = re.compile(r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?\Z")
# The runtimes that Kubeflow Trainer ships for torch: replicated jobs and their containers.
_SHIPPED_RUNTIME = {TRAINER_CONTAINER: {TRAINER_CONTAINER}}


def workload_problems(manifest: Manifest, manifests: list[Manifest]) -> Iterator[Problem]:
    spec = mapping(manifest.object.get("spec"))
    if manifest.kind == "TrainJob" and manifest.group == TRAINER:
        yield from _train_job_problems(manifest, spec, manifests)
    elif manifest.kind == "JobSet":
        yield from _job_set_problems(manifest, spec, "spec")
    elif manifest.kind in ("TrainingRuntime", "ClusterTrainingRuntime"):
        inner = mapping(at(spec, "template", "spec"))
        yield from _job_set_problems(manifest, inner, "spec.template.spec", is_runtime=True)
    elif manifest.kind == "Job" and manifest.group == "batch":
        yield from _failure_policy_problems(spec, "spec")


def _warning(path: str, words: str, fix: str, rule: str = "webhook") -> Problem:
    return Problem(path, rule, words, fix, "warning")


def _train_job_problems(manifest: Manifest, spec: dict[str, Any], manifests: list[Manifest]) -> Iterator[Problem]:
    trainer = mapping(spec.get("trainer"))
    runtime = runtime_of(manifest, manifests)
    inherited = at(runtime.object, "spec", "mlPolicy", "torch", "numProcPerNode") if runtime else None
    processes = trainer.get("numProcPerNode", inherited)
    if processes in (None, "auto", "cpu", "gpu"):
        cpus = at(trainer, "resourcesPerNode", "limits", "cpu") or at(trainer, "resourcesPerNode", "requests", "cpu")
        many = f"{cpus} processes" if cpus else "as many processes as CPUs"
        words = f"without a number the Trainer starts one process for each CPU of the pod: {many}"
        path = "spec.trainer.numProcPerNode" if "numProcPerNode" in trainer else "spec.trainer"
        yield _warning(path, words, "set numProcPerNode: 1, or one for each socket", "processes")
    for number, entry in enumerate(objects(trainer.get("env"))):
        if entry.get("name") in RESERVED:
            yield _warning(
                f"spec.trainer.env[{number}]", f"{entry['name']} is the Trainer's own: it refuses it", "remove it"
            )
    yield from _runtime_problems(manifest, spec, runtime, manifests)
    name = text(at(manifest.object, "metadata", "name"))
    nodes = max(1, whole(trainer.get("numNodes")) or 1)
    yield from _name_problems(f"{name}-{TRAINER_CONTAINER}-0", nodes, "metadata.name")


def _runtime_problems(
    manifest: Manifest, spec: dict[str, Any], runtime: Manifest | None, manifests: list[Manifest]
) -> Iterator[Problem]:
    reference = mapping(spec.get("runtimeRef"))
    name = text(reference.get("name"))
    if runtime is None and reference.get("kind") == "TrainingRuntime":
        elsewhere = [
            each for each in manifests if each.kind == "TrainingRuntime" and name == at(each.object, "metadata", "name")
        ]
        if elsewhere:
            words = f"TrainingRuntime {name} is in another namespace, where the Trainer does not look"
            yield _warning("spec.runtimeRef", words, "put both into one namespace")
    elif runtime is not None and manifests.index(runtime) > manifests.index(manifest):
        words = f"{runtime.kind} {name} comes after it: the Trainer refuses a job whose runtime is not there yet"
        yield _warning("spec.runtimeRef", words, "put the runtime first")
    known = _containers_of(runtime) if runtime else _SHIPPED_RUNTIME if name.startswith("torch-distributed") else None
    for job, path, template in patches_of(manifest):
        if known is not None and job not in known:
            yield _warning(path, f"the runtime has no replicated job {shown(job)}", f"it has {', '.join(known)}")
            continue
        for key in ("containers", "initContainers"):
            for number, container in enumerate(objects(at(template, "spec", key))):
                where, its_name = f"{path}.spec.{key}[{number}]", text(container.get("name"))
                if known is not None and its_name not in known[job]:
                    yield _warning(
                        where,
                        f"the runtime has no container {shown(its_name)}",
                        f"it has {', '.join(sorted(known[job]))}",
                    )
                if container.get("env") and its_name in _OWN_CONTAINERS:
                    words = f"the Trainer takes no variables for {its_name} here"
                    yield _warning(f"{where}.env", words, "write them under spec.trainer.env")


def _containers_of(runtime: Manifest) -> dict[str, set[str]]:
    jobs = objects(at(runtime.object, "spec", "template", "spec", "replicatedJobs"))
    found: dict[str, set[str]] = {}
    for job in jobs:
        pod = mapping(at(job, "template", "spec", "template", "spec"))
        both = [*objects(pod.get("containers")), *objects(pod.get("initContainers"))]
        found[text(job.get("name"))] = {text(each.get("name")) for each in both}
    return found


def _job_set_problems(
    manifest: Manifest, spec: dict[str, Any], path: str, *, is_runtime: bool = False
) -> Iterator[Problem]:
    jobs = objects(spec.get("replicatedJobs"))
    names = [text(job.get("name")) for job in jobs]
    if is_runtime and "ttlSecondsAfterFinished" in spec:
        words = "the Trainer makes the JobSet anew each time this deletes it, without end"
        yield _warning(f"{path}.ttlSecondsAfterFinished", words, "remove it; delete the TrainJob instead", "ttl")
    for key in ("successPolicy", "failurePolicy"):
        places = [(f"{path}.{key}", mapping(spec.get(key)))]
        if key == "failurePolicy":
            rules = objects(at(spec, key, "rules"))
            places += [(f"{path}.{key}.rules[{number}]", rule) for number, rule in enumerate(rules)]
            yield from _rule_name_problems(rules, f"{path}.{key}.rules")
        for where, part in places:
            for number, target in enumerate(texts(part.get("targetReplicatedJobs"))):
                if target not in names:
                    words = f"no replicated job {shown(target)}"
                    yield _warning(f"{where}.targetReplicatedJobs[{number}]", words, f"there is {', '.join(names)}")
    for number, job in enumerate(jobs):
        where = f"{path}.replicatedJobs[{number}]"
        for place, each in enumerate(objects(job.get("dependsOn"))):
            if each.get("name") not in names[:number]:
                words = f"no replicated job {shown(each.get('name'))} before this one"
                yield _warning(f"{where}.dependsOn[{place}].name", words, "name one that stands before it")
        inner = mapping(at(job, "template", "spec"))
        yield from _failure_policy_problems(inner, f"{where}.template.spec", default="OnFailure")
        if not is_runtime:
            whole_name = text(at(manifest.object, "metadata", "name"))
            last = f"{whole_name}-{names[number]}-{max(0, (whole(job.get('replicas')) or 1) - 1)}"
            pods = whole(inner.get("parallelism")) or whole(inner.get("completions")) or 1
            yield from _name_problems(last, pods, "metadata.name")


def _rule_name_problems(rules: list[dict[str, Any]], path: str) -> Iterator[Problem]:
    seen: set[str] = set()
    for number, rule in enumerate(rules):
        name = text(rule.get("name")) or f"failurePolicyRule{number}"
        if name in seen:
            yield _warning(f"{path}[{number}].name", f"{shown(name)} stands twice", "give each rule a name of its own")
        if not _RULE_NAME.match(name):
            yield _warning(
                f"{path}[{number}].name", f"{shown(name)} is no rule name", "letters, digits, '_', ',' and ':'"
            )
        seen.add(name)


def _name_problems(job_name: str, pods: int, path: str) -> Iterator[Problem]:
    longest = len(f"{job_name}-{pods - 1}") + _POD_SUFFIX
    if longest > _NAME_CHARACTERS:
        words = f"its pods' names ({job_name}-{pods - 1}-xxxxx) have {longest} characters"
        fix = f"at most {_NAME_CHARACTERS}: shorten it by {longest - _NAME_CHARACTERS}"
        yield _warning(path, words, fix)


def _failure_policy_problems(spec: dict[str, Any], path: str, default: str = "Always") -> Iterator[Problem]:
    if listed(at(spec, "podFailurePolicy", "rules")):
        pod = mapping(at(spec, "template", "spec"))
        policy = restart_policy_of(pod) if "restartPolicy" in pod else default
        if policy != "Never":
            words = f"podFailurePolicy needs restartPolicy Never, not {policy}: the API server refuses the Job"
            yield _warning(f"{path}.podFailurePolicy", words, "set restartPolicy: Never in the pod's template")

"""The job itself: a TrainJob with its runtime, a JobSet, or an Indexed Job; how it ends follows coremill's exit codes.

    exit code                        what the job does
    70 (numbers), 78 (input)         ends: the same again would give the same
    75 (saved, on request)           a new pod, not counted; likewise a pod that was evicted or lost its node
    any other                        a new pod, counted; after some for each pod the job ends

A pod that is lost comes back alone: the launchers of the others keep running and wait for it.
"""

from __future__ import annotations

from typing import Any

from coremill.errors import InputError, NonFinite, Stopped
from coremill.k8s.job import Job
from coremill.k8s.names import REPLICATED_JOB
from coremill.k8s.objects.pods import COMMAND, CONTAINER, pod_template, pod_zero, resources
from coremill.k8s.objects.queue import QUEUE_LABEL

_TRAINER = "trainer.kubeflow.org/v1alpha1"
ENDING_CODES = sorted({NonFinite.exit_code, InputError.exit_code})


def job_objects(job: Job) -> list[dict[str, Any]]:
    """In apply order."""
    if job.section.kind == "trainjob":
        return [_training_runtime(job), _train_job(job)]
    return [_job_set(job)] if job.section.kind == "jobset" else [_indexed_job(job)]


def failure_policy() -> dict[str, Any]:
    """Of the pods of a job; the first rule that matches counts."""

    def on_codes(action: str, codes: list[int]) -> dict[str, Any]:
        return {
            "action": action,
            "onExitCodes": {"containerName": CONTAINER, "operator": "In", "values": codes},
        }

    lost = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    return {"rules": [on_codes("FailJob", ENDING_CODES), on_codes("Ignore", [Stopped.exit_code]), lost]}


def _job_spec(job: Job, template: dict[str, Any]) -> dict[str, Any]:
    return {
        "completionMode": "Indexed",
        "completions": job.nodes,
        "parallelism": job.nodes,
        "backoffLimit": job.failures_counted,
        "podFailurePolicy": failure_policy(),
        "template": template,
    }


def _job_set_spec(job: Job, replicated_job: dict[str, Any]) -> dict[str, Any]:
    """No restart of all pods: each comes back by itself, and what ends the job ends the set."""
    rule = {"name": "endsForGood", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    return {"failurePolicy": {"maxRestarts": 0, "rules": [rule]}, "replicatedJobs": [replicated_job]}


def _training_runtime(job: Job) -> dict[str, Any]:
    """One of the job's own: what ends a job cannot be set in a TrainJob."""
    spec = _job_spec(job, pod_template(job))
    del spec["completions"], spec["parallelism"]  # the Trainer's, from numNodes
    replicated = {
        "name": REPLICATED_JOB,
        "template": {"metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}}, "spec": spec},
    }
    return {
        "apiVersion": _TRAINER,
        "kind": "TrainingRuntime",
        "metadata": {
            "name": job.name,
            "namespace": job.namespace,
            "labels": {**job.labels, "trainer.kubeflow.org/framework": "torch"},
        },
        "spec": {
            "mlPolicy": {"numNodes": job.nodes, "torch": {}},  # processes of a node: in the TrainJob, in all releases
            "template": {"spec": _job_set_spec(job, replicated)},
        },
    }


def _train_job(job: Job) -> dict[str, Any]:
    return {
        "apiVersion": _TRAINER,
        "kind": "TrainJob",
        "metadata": _metadata(job),
        "spec": {
            "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": job.name},
            "trainer": {
                "image": job.section.image,
                "command": COMMAND,
                "numNodes": job.nodes,
                # Left out, the Trainer starts as many processes as the pod has CPUs.
                "numProcPerNode": job.ranks_per_node,
                "resourcesPerNode": resources(job),
            },
        },
    }


def _job_set(job: Job) -> dict[str, Any]:
    spec = _job_spec(job, pod_template(job, master_address=pod_zero(job)))
    replicated = {"name": REPLICATED_JOB, "replicas": 1, "template": {"spec": spec}}
    network = {"enableDNSHostnames": True, "publishNotReadyAddresses": True}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": _metadata(job),
        "spec": {"network": network, **_job_set_spec(job, replicated)},
    }


def _indexed_job(job: Job) -> dict[str, Any]:
    template = pod_template(job, master_address=pod_zero(job), subdomain=job.name)
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": _metadata(job), "spec": _job_spec(job, template)}


def _metadata(job: Job) -> dict[str, Any]:
    queue = {} if job.section.queue is None else {QUEUE_LABEL: job.section.queue}
    return {"name": job.name, "namespace": job.namespace, "labels": {**job.labels, **queue}}

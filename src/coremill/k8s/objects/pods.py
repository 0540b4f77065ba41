"""The pod of a job: one launcher as process 1, whole cores, a volume, and no more rights than it needs."""

from __future__ import annotations

from typing import Any

from coremill.k8s.job import Job
from coremill.k8s.names import REPLICATED_JOB
from coremill.k8s.objects.cluster import RUN_FILE, run_file_name
from coremill.k8s.objects.metrics import container_ports, pod_annotations
from coremill.k8s.objects.nodes import AMX_TOLERATION, INSTANCE_TYPE_LABEL, POOL_LABEL, ZONE_LABEL
from coremill.world.identity import DEFAULT_PORT

CONTAINER = "node"  # as Kubeflow Trainer calls it: it looks for this name
EFA_RESOURCE = "vpc.amazonaws.com/efa"
_RUN_FILE_FOLDER = "/etc/coremill"
_TEMPORARY = "/tmp"
_TEMPORARY_GIB = 20
# The launcher itself is process 1: a shell in front of it would keep SIGTERM to itself.
COMMAND = ["coremill", "train", f"{_RUN_FILE_FOLDER}/{RUN_FILE}"]
COMPLETION_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
_NO_RIGHTS: dict[str, Any] = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}


def resources(job: Job) -> dict[str, dict[str, str]]:
    """Asked for and held to, the same: only then a pod has its cores for itself."""
    amounts = {"cpu": str(job.pod.cpus), "memory": f"{job.pod.memory_gib}Gi"}
    if job.efa:
        amounts[EFA_RESOURCE] = "1"
    return {"requests": dict(amounts), "limits": dict(amounts)}


def pod_template(job: Job, *, master_address: str | None = None, subdomain: str | None = None) -> dict[str, Any]:
    """`master_address`: of pod 0, where nobody else tells pods who they are; `subdomain`: of their host names."""
    section = job.section
    spec: dict[str, Any] = {
        "restartPolicy": "Never",  # a pod that failed is replaced by the job, which looks at its exit code
        "terminationGracePeriodSeconds": job.times.pod_grace_seconds,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": section.user_id,
            "runAsGroup": section.user_id,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        **_placing(job),
        "containers": [_container(job, master_address)],
        "volumes": [
            {"name": "volume", "persistentVolumeClaim": {"claimName": section.claim}},
            {"name": "run-file", "configMap": {"name": run_file_name(job)}},
            {"name": "temporary", "emptyDir": {"sizeLimit": f"{_TEMPORARY_GIB}Gi"}},
        ],
    }
    if section.make_folder:
        spec["initContainers"] = [_folder_maker(job)]
    if subdomain is not None:
        spec["subdomain"] = subdomain
    return {"metadata": {"labels": job.labels, **pod_annotations(job)}, "spec": spec}


def _placing(job: Job) -> dict[str, Any]:
    """On nodes of the job's own pool, one pod on each; without Karpenter on any node of a type that is large enough."""
    affinity: dict[str, Any] = {
        "podAntiAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": [
                {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": job.labels}}
            ]
        }
    }
    selector = {} if job.section.zone is None else {ZONE_LABEL: job.section.zone}
    if job.section.has_karpenter:
        selector = {POOL_LABEL: job.pool, **selector}
    else:
        types = sorted(one.name for one in job.pod.instances)
        terms = [{"matchExpressions": [{"key": INSTANCE_TYPE_LABEL, "operator": "In", "values": types}]}]
        affinity["nodeAffinity"] = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    placing: dict[str, Any] = {"tolerations": [AMX_TOLERATION], "affinity": affinity}
    return {"nodeSelector": selector, **placing} if selector else placing


def _container(job: Job, master_address: str | None) -> dict[str, Any]:
    container = {
        "name": CONTAINER,
        "image": job.section.image,
        "imagePullPolicy": "IfNotPresent",
        "command": COMMAND,
        "workingDir": _TEMPORARY,
        **container_ports(job),
        "env": _environment(job, master_address),
        "resources": resources(job),
        "securityContext": _NO_RIGHTS,
        "volumeMounts": [
            {"name": "volume", "mountPath": job.section.mount_path},
            {"name": "run-file", "mountPath": _RUN_FILE_FOLDER, "readOnly": True},
            {"name": "temporary", "mountPath": _TEMPORARY},
        ],
    }
    if job.section.secrets:
        container["envFrom"] = [{"secretRef": {"name": name}} for name in job.section.secrets]
    return container


def _environment(job: Job, master_address: str | None) -> list[dict[str, Any]]:
    """Caches on the volume, the hub's token by reference, and, where nobody else says it, who this pod is."""
    plain = {
        "HOME": _TEMPORARY,
        "USER": "coremill",  # the image need not know the user's number: libraries ask for a name
        "HF_HOME": f"{job.folder}/cache/huggingface",
        "COREMILL_CACHE": f"{job.folder}/cache/coremill",
        "OMP_NUM_THREADS": str(job.threads_per_rank),
    }
    if master_address is not None:
        plain |= {
            "PET_NNODES": str(job.nodes),
            "PET_NPROC_PER_NODE": str(job.ranks_per_node),
            "PET_MASTER_ADDR": master_address,
            "PET_MASTER_PORT": str(DEFAULT_PORT),
        }
    variables: list[dict[str, Any]] = [{"name": name, "value": value} for name, value in plain.items()]
    if master_address is not None:
        variables.append({"name": "PET_NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": COMPLETION_INDEX}}})
    secret = {"name": job.section.token_secret, "key": "token", "optional": True}
    variables.append({"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": secret}})
    return variables


def _folder_maker(job: Job) -> dict[str, Any]:
    """The one thing that needs root: a Lustre file system belongs to root, and pods write in a folder of theirs."""
    user = str(job.section.user_id)
    amounts = {"cpu": "500m", "memory": "128Mi"}  # no whole CPU: it needs no core of its own
    return {
        "name": "make-folder",
        "image": job.section.image,
        "imagePullPolicy": "IfNotPresent",
        "command": ["install", "-d", "-m", "0755", "-o", user, "-g", user, job.folder],
        "resources": {"requests": dict(amounts), "limits": dict(amounts)},
        "securityContext": {
            **_NO_RIGHTS,
            "runAsNonRoot": False,
            "runAsUser": 0,
            "runAsGroup": 0,
            "capabilities": {"drop": ["ALL"], "add": ["CHOWN", "FOWNER"]},
        },
        "volumeMounts": [{"name": "volume", "mountPath": job.section.mount_path}],
    }


def pod_zero(job: Job) -> str:
    """The host name of the pod that all others meet at."""
    if job.section.kind == "job":
        return f"{job.name}-0.{job.name}"
    return f"{job.name}-{REPLICATED_JOB}-0-0.{job.name}"

"""Kinds of objects and where an API server has them; of those that somebody has to install, what to install."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Kind:
    """One kind, in the version that coremill writes or reads."""

    api_version: str
    name: str
    plural: str
    namespaced: bool
    product: str = ""  # who brings it; empty: every cluster has it

    def path(self, namespace: str | None = None, name: str | None = None) -> str:
        """Of one object, or of all; `namespace` counts only for kinds that have one."""
        root = f"/api/{self.api_version}" if "/" not in self.api_version else f"/apis/{self.api_version}"
        inner = f"/namespaces/{namespace}" if self.namespaced and namespace else ""
        return f"{root}{inner}/{self.plural}" + (f"/{name}" if name else "")


_KARPENTER, _TRAINER, _KUEUE = "Karpenter", "Kubeflow Trainer", "Kueue"
KINDS = {
    kind.name: kind
    for kind in (
        Kind("v1", "Namespace", "namespaces", False),
        Kind("v1", "ConfigMap", "configmaps", True),
        Kind("v1", "Service", "services", True),
        Kind("v1", "Pod", "pods", True),
        Kind("v1", "Event", "events", True),
        Kind("v1", "PersistentVolume", "persistentvolumes", False),
        Kind("v1", "PersistentVolumeClaim", "persistentvolumeclaims", True),
        Kind("batch/v1", "Job", "jobs", True),
        Kind("storage.k8s.io/v1", "StorageClass", "storageclasses", False),
        Kind("networking.k8s.io/v1", "NetworkPolicy", "networkpolicies", True),
        Kind("apiextensions.k8s.io/v1", "CustomResourceDefinition", "customresourcedefinitions", False),
        Kind("karpenter.sh/v1", "NodePool", "nodepools", False, _KARPENTER),
        Kind("karpenter.sh/v1", "NodeClaim", "nodeclaims", False, _KARPENTER),
        Kind("karpenter.k8s.aws/v1", "EC2NodeClass", "ec2nodeclasses", False, _KARPENTER),
        Kind("trainer.kubeflow.org/v1alpha1", "TrainJob", "trainjobs", True, _TRAINER),
        Kind("trainer.kubeflow.org/v1alpha1", "TrainingRuntime", "trainingruntimes", True, _TRAINER),
        Kind("jobset.x-k8s.io/v1alpha2", "JobSet", "jobsets", True, "JobSet"),
        Kind("kueue.x-k8s.io/v1beta2", "ResourceFlavor", "resourceflavors", False, _KUEUE),
        Kind("kueue.x-k8s.io/v1beta2", "ClusterQueue", "clusterqueues", False, _KUEUE),
        Kind("kueue.x-k8s.io/v1beta2", "LocalQueue", "localqueues", True, _KUEUE),
        Kind("kueue.x-k8s.io/v1beta2", "Workload", "workloads", True, _KUEUE),
        Kind("monitoring.coreos.com/v1", "PodMonitor", "podmonitors", True, "the Prometheus operator"),
    )
}
JOB_KINDS = {"trainjob": "TrainJob", "jobset": "JobSet", "job": "Job"}  # by kubernetes.kind
# The volume outlives jobs: made where it is missing, never changed, never deleted.
VOLUME_KINDS = frozenset({"PersistentVolume", "PersistentVolumeClaim", "StorageClass"})
# What to do where a kind is not there.
INSTEAD = {
    "TrainJob": "install Kubeflow Trainer {trainer}, or set kubernetes.kind: job, which needs nothing",
    "TrainingRuntime": "install Kubeflow Trainer {trainer}, or set kubernetes.kind: job, which needs nothing",
    "JobSet": "install JobSet 0.12, or set kubernetes.kind: job, which needs nothing",
    "NodePool": "install Karpenter {karpenter}, or set kubernetes.karpenter: none, where the nodes are there already",
    "EC2NodeClass": "install Karpenter {karpenter} for AWS, or set kubernetes.karpenter: none",
    "ResourceFlavor": "install Kueue, or leave kubernetes.queue out",
    "ClusterQueue": "install Kueue, or leave kubernetes.queue out",
    "LocalQueue": "install Kueue, or leave kubernetes.queue out",
    "PodMonitor": "install the Prometheus operator, or leave kubernetes.pod_monitor out",
}


def name_of(body: Mapping[str, Any]) -> str:
    """NodePool/coremill.run, as kubectl and `coremill k8s check` write it."""
    return f"{body['kind']}/{body['metadata']['name']}"

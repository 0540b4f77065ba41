"""Kueue: a queue with room for the job, so that all its pods start or none."""

from __future__ import annotations

from typing import Any

from coremill.k8s.job import Job
from coremill.k8s.names import cluster_wide
from coremill.k8s.objects.nodes import AMX_TOLERATION, POOL_LABEL
from coremill.k8s.objects.pods import EFA_RESOURCE

API_VERSION = "kueue.x-k8s.io/v1beta2"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"


def queue_objects(job: Job) -> list[dict[str, Any]]:
    """In apply order; none where no queue is named, or where it is there."""
    queue = job.section.queue
    if queue is None or not job.section.make_queue:
        return []
    cluster_queue = cluster_wide(job.namespace, queue)
    quotas: list[dict[str, Any]] = [
        {"name": "cpu", "nominalQuota": job.nodes * job.pod.cpus},
        {"name": "memory", "nominalQuota": f"{job.nodes * job.pod.memory_gib}Gi"},
    ]
    if job.efa:
        quotas.append({"name": EFA_RESOURCE, "nominalQuota": job.nodes})
    flavor: dict[str, Any] = {}
    if job.section.has_karpenter:
        flavor = {"nodeLabels": {POOL_LABEL: job.pool}, "tolerations": [AMX_TOLERATION]}
    return [
        _object("ResourceFlavor", {"name": job.pool, "labels": job.labels}, flavor),
        _object(
            "ClusterQueue",
            {"name": cluster_queue, "labels": job.labels},
            {
                "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": job.namespace}},
                "resourceGroups": [
                    {
                        "coveredResources": [quota["name"] for quota in quotas],
                        "flavors": [{"name": job.pool, "resources": quotas}],
                    }
                ],
            },
        ),
        _object(
            "LocalQueue",
            {"name": queue, "namespace": job.namespace, "labels": job.labels},
            {"clusterQueue": cluster_queue},
        ),
    ]


def _object(kind: str, metadata: dict[str, Any], spec: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": API_VERSION, "kind": kind, "metadata": metadata, "spec": spec}

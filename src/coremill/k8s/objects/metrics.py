"""How Prometheus finds and reaches the pods of a job, where run.metrics_port is set."""

from __future__ import annotations

from typing import Any

from coremill.k8s.job import Job
from coremill.report.readers.prometheus.reader import PATH

PORT_NAME = "metrics"
_NAMESPACE_LABEL = "kubernetes.io/metadata.name"  # the API server gives it to every namespace


def container_ports(job: Job) -> dict[str, Any]:
    """The keys of a container."""
    port = job.config.run.metrics_port
    return {} if port is None else {"ports": [{"name": PORT_NAME, "containerPort": port, "protocol": "TCP"}]}


def pod_annotations(job: Job) -> dict[str, Any]:
    """The keys of a pod's metadata, for a Prometheus without the operator; with a PodMonitor it would scrape twice."""
    port = job.config.run.metrics_port
    if port is None or job.section.pod_monitor:
        return {}
    prefix = "prometheus.io"
    return {"annotations": {f"{prefix}/scrape": "true", f"{prefix}/port": str(port), f"{prefix}/path": PATH}}


def metrics_ingress(job: Job) -> list[dict[str, Any]]:
    """Rules of the network policy: who scrapes is no pod of the job, and may be no pod at all (a managed collector)."""
    port, namespace = job.config.run.metrics_port, job.section.metrics_namespace
    if port is None:
        return []
    rule: dict[str, Any] = {"ports": [{"protocol": "TCP", "port": port}]}
    if namespace is not None:
        rule["from"] = [{"namespaceSelector": {"matchLabels": {_NAMESPACE_LABEL: namespace}}}]
    return [rule]


def pod_monitors(job: Job) -> list[dict[str, Any]]:
    """On request: the Prometheus operator need not be installed."""
    if not job.section.pod_monitor:
        return []
    labels = {**job.section.pod_monitor_labels, **job.labels}
    return [
        {
            "apiVersion": "monitoring.coreos.com/v1",
            "kind": "PodMonitor",
            "metadata": {"name": job.name, "namespace": job.namespace, "labels": labels},
            "spec": {
                "selector": {"matchLabels": job.labels},
                "podMetricsEndpoints": [{"port": PORT_NAME, "path": PATH}],
            },
        }
    ]

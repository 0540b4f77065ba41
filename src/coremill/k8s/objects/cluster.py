"""Namespace, run file, network: what stands around the pods of a job."""

from __future__ import annotations

import hashlib
from typing import Any

from coremill.k8s.job import Job
from coremill.k8s.objects.metrics import metrics_ingress

RUN_FILE = "run.yaml"
METADATA_ADDRESS = "169.254.169.254/32"  # of the instance: pods have no business there, credentials lie behind it
_ANYWHERE, _ANYWHERE_6, _METADATA_6 = "0.0.0.0/0", "::/0", "fd00:ec2::254/128"


def namespace(job: Job) -> dict[str, Any]:
    # Warnings, not refusals: others' pods may live in the same namespace.
    level = "baseline" if job.section.make_folder else "restricted"
    labels = {
        "app.kubernetes.io/managed-by": "coremill",
        "pod-security.kubernetes.io/audit": level,
        "pod-security.kubernetes.io/warn": level,
    }
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": job.namespace, "labels": labels}}


def run_file_map(job: Job) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": run_file_name(job), "namespace": job.namespace, "labels": job.labels},
        "immutable": True,
        "data": {RUN_FILE: job.run_file.text},
    }


def run_file_name(job: Job) -> str:
    """By its content: where the run is rendered anew, pods of a job that is running still get the file of theirs."""
    return f"{job.name}-run-{hashlib.sha256(job.run_file.text.encode()).hexdigest()[:8]}"


def network_policy(job: Job) -> dict[str, Any]:
    """Pods of the job talk to each other at any port (gloo takes free ones), to DNS, and to the outside over TLS."""
    own = {"podSelector": {"matchLabels": job.labels}}
    egress: list[dict[str, Any]] = [
        {"to": [own]},
        {"ports": [{"protocol": "UDP", "port": 53}, {"protocol": "TCP", "port": 53}]},
        {
            "to": [
                {"ipBlock": {"cidr": _ANYWHERE, "except": [METADATA_ADDRESS]}},
                {"ipBlock": {"cidr": _ANYWHERE_6, "except": [_METADATA_6]}},
            ],
            "ports": [{"protocol": "TCP", "port": 443}],
        },
    ]
    if job.section.may_be_spot and not job.section.has_karpenter:
        # Nobody else turns the notice into a SIGTERM: pods ask the instance themselves.
        egress.append({"to": [{"ipBlock": {"cidr": METADATA_ADDRESS}}], "ports": [{"protocol": "TCP", "port": 80}]})
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": job.name, "namespace": job.namespace, "labels": job.labels},
        "spec": {
            "podSelector": {"matchLabels": job.labels},
            "policyTypes": ["Ingress", "Egress"],
            "ingress": [{"from": [own]}, *metrics_ingress(job)],
            "egress": egress,
        },
    }


def headless_service(job: Job) -> dict[str, Any]:
    """Host names for the pods of a plain Job; also before they are ready, since they wait for each other to get so."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": job.name, "namespace": job.namespace, "labels": job.labels},
        "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": job.labels},
    }

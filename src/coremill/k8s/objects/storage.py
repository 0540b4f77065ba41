"""The volume of a job: a claim, and what it is bound to. It outlives the job: nothing here is deleted with it."""

from __future__ import annotations

from typing import Any

from coremill.k8s.job import Job
from coremill.k8s.names import cluster_wide

DRIVER = "fsx.csi.aws.com"
_MOUNT_OPTIONS = ["flock"]  # the locks by which a run folder has one owner
# Replicated within its zone, for checkpoints; 250 MB/s for each TiB.
_NEW_FILE_SYSTEM = {
    "deploymentType": "PERSISTENT_2",
    "perUnitStorageThroughput": "250",
    "fileSystemTypeVersion": "2.15",
}


def volume_objects(job: Job) -> list[dict[str, Any]]:
    """In apply order; none where the claim is there already."""
    if job.section.storage == "fsx":
        return [_static_volume(job), _claim(job, storage_class="", volume=_volume_name(job))]
    if job.section.storage == "fsx-new":
        return [_storage_class(job), _claim(job, storage_class=_volume_name(job))]
    return []


def _volume_name(job: Job) -> str:
    """Volumes and storage classes belong to the whole cluster."""
    return cluster_wide(job.namespace, job.section.claim)


def _static_volume(job: Job) -> dict[str, Any]:
    section = job.section
    region = section.region or ""
    domain = "amazonaws.com.cn" if region.startswith("cn-") else "amazonaws.com"
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": _volume_name(job), "labels": {"app.kubernetes.io/managed-by": "coremill"}},
        "spec": {
            "capacity": {"storage": f"{section.storage_gib}Gi"},
            "volumeMode": "Filesystem",
            "accessModes": ["ReadWriteMany"],
            "mountOptions": _MOUNT_OPTIONS,
            "persistentVolumeReclaimPolicy": "Retain",
            "storageClassName": "",
            "claimRef": {"namespace": job.namespace, "name": section.claim},
            "csi": {
                "driver": DRIVER,
                "volumeHandle": section.file_system,
                "volumeAttributes": {
                    "dnsname": f"{section.file_system}.fsx.{region}.{domain}",
                    "mountname": section.mount_name,
                },
            },
        },
    }


def _storage_class(job: Job) -> dict[str, Any]:
    section = job.section
    return {
        "apiVersion": "storage.k8s.io/v1",
        "kind": "StorageClass",
        "metadata": {"name": _volume_name(job), "labels": {"app.kubernetes.io/managed-by": "coremill"}},
        "provisioner": DRIVER,
        "parameters": {
            "subnetId": section.subnet,
            "securityGroupIds": ",".join(section.security_groups),
            **_NEW_FILE_SYSTEM,
        },
        "reclaimPolicy": "Retain",
        "volumeBindingMode": "Immediate",
        "mountOptions": _MOUNT_OPTIONS,
    }


def _claim(job: Job, *, storage_class: str, volume: str | None = None) -> dict[str, Any]:
    spec: dict[str, Any] = {
        "accessModes": ["ReadWriteMany"],
        "storageClassName": storage_class,
        "resources": {"requests": {"storage": f"{job.section.storage_gib}Gi"}},
    }
    if volume is not None:
        spec["volumeName"] = volume
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {
            "name": job.section.claim,
            "namespace": job.namespace,
            "labels": {"app.kubernetes.io/managed-by": "coremill"},
        },
        "spec": spec,
    }

"""NodePool and EC2NodeClass: which machines Karpenter starts for a job, and how they end."""

from __future__ import annotations

from typing import Any

from coremill.k8s.job import Job

AMX_TAINT = {"key": "intel.com/amx", "value": "present", "effect": "NoSchedule"}
AMX_TOLERATION = {"key": "intel.com/amx", "operator": "Exists", "effect": "NoSchedule"}
POOL_LABEL = "karpenter.sh/nodepool"
INSTANCE_TYPE_LABEL = "node.kubernetes.io/instance-type"
ZONE_LABEL = "topology.kubernetes.io/zone"
_DISCOVERY_TAG = "karpenter.sh/discovery"
_DISK_GIB = 100  # of a node: the image and temporary files
_CAPACITY = {
    "on-demand": ["on-demand"],
    "spot": ["spot"],
    "spot-or-on-demand": ["on-demand", "spot"],
    "reservation": ["reserved"],
}
# Karpenter up to 1.14 has no field for it: kubelets read it from the user data. Whole cores, for pods that ask for
# whole CPUs; memory of the same socket as far as it goes.
_AL2023_USER_DATA = """\
apiVersion: node.eks.aws/v1alpha1
kind: NodeConfig
spec:
  kubelet:
    config:
      cpuManagerPolicy: static
      cpuManagerPolicyOptions:
        full-pcpus-only: "true"
      topologyManagerPolicy: best-effort
"""
_BOTTLEROCKET_USER_DATA = """\
[settings.kubernetes]
cpu-manager-policy = "static"
cpu-manager-policy-options = ["full-pcpus-only"]
topology-manager-policy = "best-effort"
"""


def node_pool(job: Job) -> dict[str, Any]:
    section = job.section
    requirements = [
        _one_of("kubernetes.io/arch", ["amd64"]),
        _one_of("kubernetes.io/os", ["linux"]),
        _one_of("karpenter.sh/capacity-type", _CAPACITY[section.capacity]),
        _one_of(INSTANCE_TYPE_LABEL, sorted(one.name for one in job.pod.instances)),
    ]
    if section.zone is not None:
        requirements.append(_one_of(ZONE_LABEL, [section.zone]))
    most_vcpus = max(one.vcpus for one in job.pod.instances)
    return {
        "apiVersion": "karpenter.sh/v1",
        "kind": "NodePool",
        "metadata": {"name": job.pool, "labels": job.labels},
        "spec": {
            "template": {
                "spec": {
                    "requirements": requirements,
                    "nodeClassRef": {"group": "karpenter.k8s.aws", "kind": "EC2NodeClass", "name": job.pool},
                    "taints": [AMX_TAINT],
                    "expireAfter": "Never",
                    # Never below the pods' own grace, or they would be given less; bounded, so that a node goes.
                    "terminationGracePeriod": f"{job.times.node_grace_seconds}s",
                },
            },
            # Twice the job: the successor of a machine that goes is started before it has gone.
            "limits": {"cpu": 2 * job.nodes * most_vcpus},
            "disruption": {
                # A node goes when its pods are done, never under them: no pod needs do-not-disrupt, which would keep
                # the SIGTERM of a spot notice from it.
                "consolidationPolicy": "WhenEmpty",
                "consolidateAfter": "5m",
                "budgets": [
                    {"nodes": "0", "reasons": ["Drifted", "Underutilized"]},
                    {"nodes": "100%", "reasons": ["Empty"]},
                ],
            },
        },
    }


def node_class(job: Job) -> dict[str, Any]:
    section = job.section
    ami = section.ami if section.ami != "auto" else "bottlerocket@latest" if job.efa else "al2023@latest"
    is_bottlerocket = ami.startswith("bottlerocket@")
    tags = [{"tags": {_DISCOVERY_TAG: section.cluster}}]
    spec: dict[str, Any] = {
        "role": section.role,
        "amiSelectorTerms": [{"alias": ami}],
        "subnetSelectorTerms": tags,
        "securityGroupSelectorTerms": tags,
        "blockDeviceMappings": [
            {
                # Bottlerocket keeps images and temporary files on a second disk.
                "deviceName": "/dev/xvdb" if is_bottlerocket else "/dev/xvda",
                "ebs": {
                    "volumeSize": f"{_DISK_GIB}Gi",
                    "volumeType": "gp3",
                    "encrypted": True,
                    "deleteOnTermination": True,
                },
            }
        ],
        "metadataOptions": {
            "httpEndpoint": "enabled",
            "httpTokens": "required",
            "httpPutResponseHopLimit": 1,  # pods do not reach the credentials of their node
        },
        "userData": _BOTTLEROCKET_USER_DATA if is_bottlerocket else _AL2023_USER_DATA,
    }
    if section.capacity == "reservation":
        spec["capacityReservationSelectorTerms"] = [{"id": section.reservation}]
    if section.placement_group is not None:
        spec["placementGroupSelector"] = {"name": section.placement_group}
    return {
        "apiVersion": "karpenter.k8s.aws/v1",
        "kind": "EC2NodeClass",
        "metadata": {"name": job.pool, "labels": job.labels},
        "spec": spec,
    }


def _one_of(key: str, values: list[str]) -> dict[str, Any]:
    return {"key": key, "operator": "In", "values": values}

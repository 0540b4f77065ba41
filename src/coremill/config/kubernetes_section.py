"""The section `kubernetes` of the run file: where and as what `coremill k8s render` puts the run into a cluster.

The section is there where an image is named; without one nothing reads it, and a run is planned for machines.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field

from coremill.config.section import AUTO, AutoOrPositiveInt, PositiveInt, Section

NO_KARPENTER: Final = "none"
SPOT_CAPACITIES: Final = ("spot", "spot-or-on-demand")


def _release(value: Any) -> Any:
    """`2.3` is a number to YAML, and `v2.3.1` the tag of a release: both mean the release "2.3"."""
    if isinstance(value, float) or (isinstance(value, str) and re.fullmatch(r"v?\d+\.\d+(\.\d+)?", value)):
        return ".".join(str(value).removeprefix("v").split(".")[:2])
    return value


class KubernetesSection(Section):
    """A job on EKS: what coremill k8s render makes of the run. It needs an image; with Karpenter cluster and role."""

    image: str | None = Field(
        None,
        min_length=1,
        description="container image with coremill in it, best by its digest; without one this section does nothing",
    )
    name: str | None = Field(
        None,
        min_length=1,
        description="of the job and what belongs to it; left out: the run file's, in lower case and dashes",
    )
    namespace: str = Field(
        "coremill", min_length=1, description="made where it is not there, unless it is called default"
    )
    kind: Literal["trainjob", "jobset", "job"] = Field(
        "trainjob", description="a TrainJob of Kubeflow Trainer, a JobSet, or a plain Indexed Job, which needs neither"
    )
    trainer: Annotated[Literal["2.1", "2.2", "2.3"], BeforeValidator(_release)] = Field(
        "2.3", description="release of Kubeflow Trainer in the cluster, for trainjob: their fields differ"
    )
    karpenter: Annotated[Literal["1.8", "1.14", "none"], BeforeValidator(_release)] = Field(
        "1.14", description="release of Karpenter in the cluster; none: the nodes are there already"
    )
    cluster: str | None = Field(
        None, min_length=1, description="name of the EKS cluster, by which Karpenter finds subnets and security groups"
    )
    role: str | None = Field(None, min_length=1, description="IAM role of the nodes that Karpenter starts")
    instances: list[Annotated[str, Field(min_length=1)]] = Field(
        [],
        json_schema_extra={"x-form": "a list of instance types, in brackets"},
        description="types that a pod may run on, each large enough for it; left out: fleet.instance, or else the"
        " cheapest that the run fits; on spot name several",
    )
    capacity: Literal["on-demand", "spot", "spot-or-on-demand", "reservation"] = Field(
        "on-demand", description="how the machines are paid; spot is a third to a half of the price and may be taken"
    )
    reservation: str | None = Field(
        None,
        pattern=r"^cr-[0-9a-z]+$",
        json_schema_extra={"x-form": "the id of a capacity reservation (cr-0123456789abcdef0)"},
        description="with capacity: reservation",
    )
    zone: str | None = Field(
        None,
        pattern=r"^[a-z]{2}(-[a-z]+)+-\d(-[a-z]+-\d)?[a-z]$",
        json_schema_extra={"x-form": "an availability zone (us-west-2a)"},
        description="where nodes start; one zone for all: traffic between zones is slower and charged",
    )
    cpus: AutoOrPositiveInt = Field(
        AUTO, description="of a pod; auto: all whole cores that an instance leaves to one pod"
    )
    memory_gib: AutoOrPositiveInt = Field(AUTO, description="of a pod; auto: all that an instance leaves to one pod")
    storage: Literal["claim", "fsx", "fsx-new"] = Field(
        "claim",
        description="claim: a claim that is there; fsx: a file system (FSx for Lustre) that is there; fsx-new: one is"
        " made by the driver, and kept when the job goes",
    )
    claim: str = Field(
        "coremill", min_length=1, description="name of the volume claim, which pods of all runs may share"
    )
    file_system: str | None = Field(
        None,
        pattern=r"^fs-[0-9a-f]+$",
        json_schema_extra={"x-form": "the id of a file system (fs-0123456789abcdef0)"},
        description="with storage: fsx",
    )
    mount_name: str | None = Field(
        None, min_length=1, description="with storage: fsx: its mount name, as aws fsx describe-file-systems has it"
    )
    subnet: str | None = Field(
        None,
        pattern=r"^subnet-[0-9a-f]+$",
        json_schema_extra={"x-form": "the id of a subnet (subnet-0123456789abcdef0)"},
        description="with storage: fsx-new: where the file system is made, in the zone of the nodes",
    )
    security_groups: list[Annotated[str, Field(pattern=r"^sg-[0-9a-f]+$")]] = Field(
        [],
        json_schema_extra={"x-form": "a list of ids of security groups, in brackets ([sg-0123456789abcdef0])"},
        description="with storage: fsx-new: those of the file system; they let Lustre in (TCP 988 and 1018 to 1023)",
    )
    storage_gib: PositiveInt = Field(1200, description="size of the file system: 1200 or a multiple of 2400")
    mount_path: str = Field(
        "/fsx",
        pattern=r"^(/[A-Za-z0-9._-]+)+$",
        json_schema_extra={"x-form": "an absolute path"},
        description="where pods see the volume; run folder, checkpoints and caches lie in its folder coremill",
    )
    make_folder: bool = Field(
        True,
        description="an init container makes that folder, as root, and gives it to the pods' user: a Lustre root is"
        " root's; false: it is there and theirs",
    )
    user_id: Annotated[int, Field(ge=1000, lt=2**31)] = Field(10001, description="user and group that pods run as")
    queue: str | None = Field(
        None, min_length=1, description="Kueue: the LocalQueue of the job, made with a quota of its size (make_queue)"
    )
    make_queue: bool = Field(
        True, description="false: the queue is there; set it where other runs, or administrators, have made it"
    )
    efa: bool = Field(
        False, description="ask for Elastic Fabric Adapters where the type has them; coremill's own traffic uses TCP"
    )
    placement_group: str | None = Field(
        None, min_length=1, description="cluster placement group that is there; needs Karpenter 1.14"
    )
    ami: str = Field(
        AUTO,
        pattern=r"^(auto|(al2023|bottlerocket)@\S+)$",
        json_schema_extra={"x-form": "auto or al2023@VERSION or bottlerocket@VERSION"},
        description="image of the nodes; auto: al2023@latest, with efa bottlerocket@latest, which has its driver",
    )
    token_secret: str = Field(
        "hf-token", min_length=1, description="Secret with the hub's token under the key token; need not exist"
    )
    secrets: list[Annotated[str, Field(min_length=1)]] = Field(
        [],
        json_schema_extra={"x-form": "a list of names, in brackets"},
        description="further Secrets whose keys become environment variables (WANDB_API_KEY, ...)",
    )
    pod_monitor: bool = Field(
        False,
        description="a PodMonitor, by which the Prometheus operator scrapes the pods at run.metrics_port; false: pods"
        " have the annotations prometheus.io/scrape, port and path",
    )
    pod_monitor_labels: dict[str, str] = Field(
        {},
        json_schema_extra={"x-form": "names and values in braces ({release: kube-prometheus-stack})"},
        description="labels by which your Prometheus selects PodMonitors (kube-prometheus-stack: release, the name it"
        " was installed under)",
    )
    metrics_namespace: str | None = Field(
        None,
        min_length=1,
        description="namespace that Prometheus runs in, which alone may reach run.metrics_port then; left out: whoever"
        " reaches the pods' network",
    )

    @property
    def has_karpenter(self) -> bool:
        return self.karpenter != NO_KARPENTER

    @property
    def may_be_spot(self) -> bool:
        return self.capacity in SPOT_CAPACITIES

    @property
    def region(self) -> str | None:
        """us-west-2 of us-west-2a and of us-west-2-lax-1a."""
        found = re.match(r"[a-z]{2}(-[a-z]+)+-\d", self.zone or "")
        return found.group() if found else None

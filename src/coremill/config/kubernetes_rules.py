"""Rules between keys of the section kubernetes; the form is that of rules.py.

What needs the table of instances, or the name of the run, is checked where the job is rendered (coremill.k8s).
"""

from __future__ import annotations

from coremill import __version__
from coremill.config.kubernetes_section import KubernetesSection
from coremill.config.rule import Breach, Rule
from coremill.config.schema import RunConfig

_SIZE_STEP_GIB = 2400  # of FSx for Lustre; the smallest is half of it
# A volume there would hide what is in the image, or stand where a pod has another one.
_TAKEN_PATHS = ("/bin", "/etc", "/etc/coremill", "/lib", "/lib64", "/opt", "/run", "/sbin", "/tmp", "/usr", "/var")
_TAKEN_ROOTS = ("/dev", "/proc", "/sys")


def _image_is_named(config: RunConfig) -> Breach | None:
    """The section `kubernetes` names an `image`; the rules below hold where it does."""
    section = config.kubernetes
    given = [name for name in KubernetesSection.model_fields if getattr(section, name) != _default(name)]
    if section.image is not None or not given:
        return None
    return Breach(
        "kubernetes.image",
        "the section kubernetes has no image",
        "pods are made from a container image with coremill in it",
        f"add for instance `image: 123456789012.dkr.ecr.us-west-2.amazonaws.com/coremill:{__version__}`,"
        " or remove the section",
        others=tuple(f"kubernetes.{name}" for name in given[:1]),
    )


def _karpenter_knows_the_cluster(config: RunConfig) -> Breach | None:
    """With Karpenter `kubernetes` names `cluster` and `role`."""
    section = config.kubernetes
    missing = [name for name in ("cluster", "role") if getattr(section, name) is None]
    if section.image is None or not section.has_karpenter or not missing:
        return None
    return Breach(
        f"kubernetes.{missing[0]}",
        f"{' and '.join(f'kubernetes.{name}' for name in missing)} {'is' if len(missing) == 1 else 'are'} not given",
        "Karpenter starts nodes under an IAM role, in subnets and security groups tagged with the cluster's name",
        "add for instance `cluster: my-cluster` and `role: KarpenterNodeRole-my-cluster`,"
        " or `karpenter: none` where the nodes are there already",
        others=("kubernetes.image",),
    )


def _storage_is_whole(config: RunConfig) -> Breach | None:
    """`kubernetes.storage: fsx` needs `file_system`, `mount_name`, `zone`; `fsx-new` `subnet`, `security_groups`."""
    section = config.kubernetes
    wanted = {
        "fsx": ("file_system", "mount_name", "zone"),
        "fsx-new": ("subnet", "security_groups"),
    }.get(section.storage, ())
    missing = [name for name in wanted if not getattr(section, name)]
    if section.image is None or not missing:
        return None
    why = {
        "fsx": "a volume of a file system that is there is its id, its mount name, and the region it is in",
        "fsx-new": "the driver makes the file system in a subnet, and lets in whom its security groups let in",
    }[section.storage]
    return Breach(
        f"kubernetes.{missing[0]}",
        f"kubernetes.storage is {section.storage}, but {' and '.join(missing)} {'is' if len(missing) == 1 else 'are'}"
        " not given",
        why,
        f"add {' and '.join(missing)} to the section kubernetes, or use storage: claim with a claim that is there",
        others=("kubernetes.storage",),
    )


def _size_of_a_file_system(config: RunConfig) -> Breach | None:
    """With `kubernetes.storage: fsx-new`, `storage_gib` is 1200 or a multiple of 2400."""
    section = config.kubernetes
    size = section.storage_gib
    if (
        section.image is None
        or section.storage != "fsx-new"
        or size == _SIZE_STEP_GIB // 2
        or size % _SIZE_STEP_GIB == 0
    ):
        return None
    larger = _SIZE_STEP_GIB // 2 if size < _SIZE_STEP_GIB // 2 else -(-size // _SIZE_STEP_GIB) * _SIZE_STEP_GIB
    return Breach(
        "kubernetes.storage_gib",
        f"kubernetes.storage_gib is {size}",
        "FSx for Lustre comes in 1200 GiB and in multiples of 2400",
        f"set kubernetes.storage_gib: {larger}",
    )


def _reservation_is_named(config: RunConfig) -> Breach | None:
    """`kubernetes.capacity: reservation` and `kubernetes.reservation` go together, with Karpenter."""
    section = config.kubernetes
    is_reserved, named = section.capacity == "reservation", section.reservation is not None
    if section.image is None or is_reserved == named or not section.has_karpenter:
        return None
    what = (
        "kubernetes.capacity is reservation, but kubernetes.reservation is not given"
        if is_reserved
        else f"kubernetes.reservation is given, but kubernetes.capacity is {section.capacity}"
    )
    return Breach(
        "kubernetes.reservation" if named else "kubernetes.capacity",
        what,
        "Karpenter finds reserved machines by the id of their reservation, and only looks where it is told to",
        "set capacity: reservation and reservation: cr-..., or neither",
        others=("kubernetes.capacity", "kubernetes.reservation"),
    )


def _placement_groups_are_known(config: RunConfig) -> Breach | None:
    """`kubernetes.placement_group` goes with `karpenter: "1.14"`."""
    section = config.kubernetes
    if section.image is None or section.placement_group is None or section.karpenter == "1.14":
        return None
    return Breach(
        "kubernetes.placement_group",
        f"kubernetes.placement_group is given, but kubernetes.karpenter is {section.karpenter}",
        "Karpenter puts nodes into placement groups from 1.11 on; nodes that are there already have their place",
        'set karpenter: "1.14", or remove placement_group',
        others=("kubernetes.karpenter",),
    )


def _planned_type_is_listed(config: RunConfig) -> Breach | None:
    """`fleet.instance` is one of `kubernetes.instances`, where both are given."""
    listed, planned = config.kubernetes.instances, config.fleet.instance
    if config.kubernetes.image is None or not listed or planned is None or planned in listed:
        return None
    return Breach(
        "kubernetes.instances",
        f"fleet.instance is {planned}, which is not in kubernetes.instances ({', '.join(listed)})",
        "the run would be planned for a machine that no pod gets",
        f"add {planned} to kubernetes.instances, or remove fleet.instance",
        others=("fleet.instance",),
    )


def _cpus_are_whole_cores(config: RunConfig) -> Breach | None:
    """`kubernetes.cpus` is even: a pod gets whole cores, and a core is two CPUs."""
    cpus = config.kubernetes.cpus
    if config.kubernetes.image is None or cpus == "auto" or cpus % 2 == 0:
        return None
    return Breach(
        "kubernetes.cpus",
        f"kubernetes.cpus is {cpus}",
        "a pod gets whole cores for itself, and a core is two CPUs: the kubelet turns an odd number away",
        f"set kubernetes.cpus: {cpus + 1}" + (f" or {cpus - 1}" if cpus > 1 else "") + ", or leave it out",
    )


def _volume_has_a_place(config: RunConfig) -> Breach | None:
    """`kubernetes.mount_path` is a folder of the volume's own."""
    path = config.kubernetes.mount_path
    is_taken = path in _TAKEN_PATHS or any(path == root or path.startswith(f"{root}/") for root in _TAKEN_ROOTS)
    if config.kubernetes.image is None or not (is_taken or {".", ".."} & set(path.split("/"))):
        return None
    return Breach(
        "kubernetes.mount_path",
        f"kubernetes.mount_path is {path}",
        "pods have other files there, which the volume would hide" if is_taken else "a pod takes no path with dots",
        "give the volume a folder of its own, for instance /fsx",
    )


def _default(name: str) -> object:
    return KubernetesSection.model_fields[name].default


KUBERNETES_RULES = (
    Rule(tuple(f"kubernetes.{name}" for name in KubernetesSection.model_fields), _image_is_named),
    Rule(
        ("kubernetes.image", "kubernetes.karpenter", "kubernetes.cluster", "kubernetes.role"),
        _karpenter_knows_the_cluster,
    ),
    Rule(
        tuple(
            f"kubernetes.{name}"
            for name in ("image", "storage", "file_system", "mount_name", "zone", "subnet", "security_groups")
        ),
        _storage_is_whole,
    ),
    Rule(("kubernetes.image", "kubernetes.storage", "kubernetes.storage_gib"), _size_of_a_file_system),
    Rule(
        ("kubernetes.image", "kubernetes.capacity", "kubernetes.reservation", "kubernetes.karpenter"),
        _reservation_is_named,
    ),
    Rule(("kubernetes.image", "kubernetes.placement_group", "kubernetes.karpenter"), _placement_groups_are_known),
    Rule(("kubernetes.image", "kubernetes.instances", "fleet.instance"), _planned_type_is_listed),
    Rule(("kubernetes.image", "kubernetes.cpus"), _cpus_are_whole_cores),
    Rule(("kubernetes.image", "kubernetes.mount_path"), _volume_has_a_place),
)

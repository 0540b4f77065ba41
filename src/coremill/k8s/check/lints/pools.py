"""Karpenter's NodePools as sets of instance types of the AWS table; what is wrong with them and their NodeClasses."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from coremill.hardware.instances import Instance, all_instances
from coremill.k8s.check.findings import Problem, shown
from coremill.k8s.check.lints.reading import at, duration_seconds, mapping, objects, text, texts
from coremill.k8s.check.manifests import Manifest
from coremill.k8s.check.object_meta import LABEL_FIX, is_label_value
from coremill.nearby import nearest

FAMILY, SIZE, TYPE = (
    "karpenter.k8s.aws/instance-family",
    "karpenter.k8s.aws/instance-size",
    "node.kubernetes.io/instance-type",
)
CAPACITY, ZONE, ARCH = "karpenter.sh/capacity-type", "topology.kubernetes.io/zone", "kubernetes.io/arch"
POOL = "karpenter.sh/nodepool"
_FAMILY_FORM = re.compile(r"[a-z]+\d+[a-z]*(-[a-z0-9]+)?\Z")
_OUR_FAMILIES = re.compile(r"[a-z]+[78]i(-flex)?\Z")  # the table has all of them
_SIZE_FORM = re.compile(r"(nano|micro|small|medium|large|xlarge|\d+xlarge|metal(-\d+xl)?)\Z")
_ZONE_FORM = re.compile(r"[a-z]{2,3}(-[a-z]+)+-\d+(-[a-z]{3}-\d+)?[a-z]\Z")
_CHOICES = {
    CAPACITY: ("spot", "on-demand", "reserved"),
    ARCH: ("amd64", "arm64"),
    "kubernetes.io/os": ("linux", "windows"),
}
_NUMBERS: dict[str, Callable[[Instance], float]] = {
    "karpenter.k8s.aws/instance-cpu": lambda one: one.vcpus,
    "karpenter.k8s.aws/instance-memory": lambda one: one.memory_mib,
    "karpenter.k8s.aws/instance-generation": lambda one: float(re.sub(r"\D", "", one.family.split("-")[0]) or 0),
}
_TEXTS: dict[str, Callable[[Instance], str]] = {
    FAMILY: lambda one: one.family,
    SIZE: lambda one: one.name.split(".")[1],
    TYPE: lambda one: one.name,
    ARCH: lambda one: "amd64",
    "karpenter.k8s.aws/instance-category": lambda one: one.series,
}
_GPU_WORDS = re.compile(r"(?i)\b(gpu|nvidia|cuda|neuron)\b")
_INSTALLS = re.compile(r"(?m)^\s*(?:sudo\s+)?(pip3?|dnf|yum|apt|apt-get|conda)\s+(?:-\S+\s+)*install\b.*$")


@dataclass(frozen=True)
class Pool:
    """A NodePool: which machines it may start, and how they end."""

    manifest: Manifest
    requirements: tuple[Mapping[str, Any], ...]
    node_class: Manifest | None  # where it is among the manifests

    @property
    def name(self) -> str:
        return text(at(self.manifest.object, "metadata", "name"))

    @property
    def template(self) -> Mapping[str, Any]:
        return mapping(at(self.manifest.object, "spec", "template", "spec"))

    @property
    def labels(self) -> dict[str, Any]:
        """What pods may select its nodes by."""
        written = mapping(at(self.manifest.object, "spec", "template", "metadata", "labels"))
        return {**written, POOL: self.name}

    @property
    def is_on_aws(self) -> bool:
        return text(at(self.template, "nodeClassRef", "group")) == "karpenter.k8s.aws"

    @property
    def may_be_spot(self) -> bool:
        """Karpenter's default is on demand."""
        return any(each.get("key") == CAPACITY and "spot" in texts(each.get("values")) for each in self.requirements)

    @property
    def grace_seconds(self) -> float | None:
        return duration_seconds(self.template.get("terminationGracePeriod"))

    @property
    def is_in_table(self) -> bool:
        """Whether it is held to families the table knows, so that the table can say what fits."""
        named = {family for each in self.requirements for family in _families(each)}
        return bool(named) and named <= {one.family for one in all_instances()}

    def types(self, selected: Mapping[str, Any] | None = None) -> list[Instance]:
        """Types of the table it may start, for a pod that selects nodes by labels."""
        extra = [{"key": key, "operator": "In", "values": [value]} for key, value in (selected or {}).items()]
        found = list(all_instances())
        for requirement in (*self.requirements, *extra):
            found = [one for one in found if _matches(one, requirement)]
        return found


def find_pools(manifests: list[Manifest]) -> list[Pool]:
    classes = {text(at(each.object, "metadata", "name")): each for each in manifests if each.kind == "EC2NodeClass"}
    pools = []
    for manifest in manifests:
        if manifest.kind == "NodePool" and manifest.group == "karpenter.sh":
            spec = mapping(at(manifest.object, "spec", "template", "spec"))
            name = text(at(spec, "nodeClassRef", "name"))
            pools.append(Pool(manifest, tuple(objects(spec.get("requirements"))), classes.get(name)))
    return pools


def pool_problems(pool: Pool) -> Iterator[Problem]:
    for number, requirement in enumerate(pool.requirements):
        where = f"spec.template.spec.requirements[{number}]"
        yield from _value_problems(requirement, where, is_on_aws=pool.is_on_aws)
    if pool.is_in_table and not pool.types():
        where = "spec.template.spec.requirements"
        yield Problem(
            where, "fits-nothing", "no instance type fulfils all of these", "`coremill instances` lists the types"
        )
    yield from _taint_problems(pool)
    expires = duration_seconds(pool.template.get("expireAfter"))
    if expires is not None and pool.grace_seconds is None:
        yield Problem(
            "spec.template.spec.expireAfter",
            "disruption",
            f"after {pool.template['expireAfter']} a node is ended under a running job, or never if a pod forbids it",
            "set expireAfter: Never, or terminationGracePeriod beside it",
            "warning",
        )
    if pool.may_be_spot and pool.grace_seconds is None:
        yield Problem(
            "spec.template.spec",
            "disruption",
            "spot nodes without terminationGracePeriod: a pod with do-not-disrupt gets no SIGTERM at a reclaim",
            "set terminationGracePeriod: 2m",
            "warning",
        )


def node_class_problems(manifest: Manifest, pools: list[Pool]) -> Iterator[Problem]:
    spec = mapping(manifest.object.get("spec"))
    is_of_cpus = any(pool.node_class is manifest and pool.is_in_table for pool in pools)
    for number, term in enumerate(objects(spec.get("amiSelectorTerms")) if is_of_cpus else ()):
        for key in ("name", "ssmParameter"):
            if _GPU_WORDS.search(text(term.get(key))):
                where = f"spec.amiSelectorTerms[{number}].{key}"
                words = "an image with GPU drivers: gigabytes to start with, of no use on CPU nodes"
                yield Problem(where, "gpu-on-cpu", words, "take the plain one: alias: al2023@latest", "warning")
    installs = _INSTALLS.findall(text(spec.get("userData")))
    if installs:
        words = f"installs on the host ({', '.join(dict.fromkeys(installs))}) change nothing inside containers"
        yield Problem("spec.userData", "host-install", words, "put them into the image of the job", "warning")


def _value_problems(requirement: Mapping[str, Any], path: str, *, is_on_aws: bool) -> Iterator[Problem]:
    key, values = text(requirement.get("key")), texts(requirement.get("values"))
    for number, value in enumerate(values):
        where = f"{path}.values[{number}]"
        if not is_label_value(value):
            parts = [part for part in re.split(r"[,\s]+", value) if part]
            fix = f"write them apart: {', '.join(parts)}" if len(parts) > 1 else LABEL_FIX
            text_ = f"{shown(value)} is no label value: the API server takes it, and no node ever matches"
            yield Problem(where, "label", text_, fix)
        elif is_on_aws and requirement.get("operator") in ("In", "NotIn"):
            problem = unknown_value(key, value, where)
            if problem is not None:
                yield problem


def unknown_value(key: str, value: str, where: str) -> Problem | None:
    """A family, size, type, zone or capacity that does not exist, so that no node ever matches."""
    if key in _CHOICES and value not in _CHOICES[key]:
        near = nearest(value, _CHOICES[key])
        fix = f"did you mean {near}?" if near else f"one of {', '.join(_CHOICES[key])}"
        return Problem(where, "unknown-instance", f"no {key.split('/')[1]} {shown(value)}", fix)
    if key == ZONE and not _ZONE_FORM.match(value):
        return Problem(where, "unknown-instance", f"{shown(value)} is no zone", "write it as us-east-1a")
    if key not in (FAMILY, SIZE, TYPE):
        return None
    known = {_TEXTS[key](one) for one in all_instances()}
    if value in known:
        return None
    near = nearest(value, known)
    fix = f"did you mean {near}?" if near else "`coremill instances` lists the types"
    family, _, size = value.rpartition(".") if key == TYPE else (value, "", value)
    has_form = (key == SIZE or _FAMILY_FORM.match(family)) and (key == FAMILY or _SIZE_FORM.match(size))
    families = {one.family for one in all_instances()}
    ours = key != SIZE and (family in families or _OUR_FAMILIES.match(family))
    words = f"no instance {key.rsplit('-', 1)[1]} {shown(value)}"
    if not has_form or ours:
        return Problem(where, "unknown-instance", words, fix)
    return Problem(where, "unknown-instance", f"{words} in the table, which has Intel's 7i and 8i", fix, "warning")


def _taint_problems(pool: Pool) -> Iterator[Problem]:
    seen = set()
    for number, taint in enumerate(objects(pool.template.get("taints"))):
        identity = (text(taint.get("key")), text(taint.get("effect")))
        if identity in seen:
            where = f"spec.template.spec.taints[{number}]"
            words = "the same key and effect as an earlier taint: Karpenter takes no such NodePool"
            yield Problem(where, "webhook", words, "keep one of them", "warning")
        seen.add(identity)


def _families(requirement: Mapping[str, Any]) -> list[str]:
    key, operator, values = requirement.get("key"), requirement.get("operator"), texts(requirement.get("values"))
    if operator != "In" or key not in (FAMILY, TYPE):
        return []
    return values if key == FAMILY else [value.split(".")[0] for value in values]


def _matches(instance: Instance, requirement: Mapping[str, Any]) -> bool:
    """Keys that the table does not know let everything through."""
    key, operator, values = text(requirement.get("key")), requirement.get("operator"), texts(requirement.get("values"))
    if key in _NUMBERS and operator in ("Gt", "Lt", "Gte", "Lte") and values and values[0].isdigit():
        have, limit = _NUMBERS[key](instance), float(values[0])
        return {"Gt": have > limit, "Lt": have < limit, "Gte": have >= limit, "Lte": have <= limit}[operator]
    have_text = f"{_NUMBERS[key](instance):g}" if key in _NUMBERS else _TEXTS[key](instance) if key in _TEXTS else None
    if have_text is None:
        return True
    return (have_text in values) if operator == "In" else (have_text not in values) if operator == "NotIn" else True

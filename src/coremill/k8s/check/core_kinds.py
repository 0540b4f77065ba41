"""Schemas of core kinds (Job, Service, ConfigMap, ...), release by release, from the package kubernetes-validate.

Only its data is used: `structure.py` reads them as it reads those of custom resources, so that messages are the same.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from coremill.errors import InputError
from coremill.k8s.check.structure import Schema, Structure

CLUSTER_KINDS = frozenset(
    (
        *(
            "Namespace",
            "Node",
            "PersistentVolume",
            "StorageClass",
            "PriorityClass",
            "ClusterRole",
            "ClusterRoleBinding",
        ),
        *("CustomResourceDefinition", "ValidatingWebhookConfiguration", "MutatingWebhookConfiguration"),
        *("ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding", "APIService", "CSIDriver", "CSINode"),
        *("RuntimeClass", "IngressClass", "VolumeAttachment"),
    )
)


@dataclass(frozen=True)
class CoreKind:
    schema: Schema
    structure: Structure
    namespaced: bool
    release: str  # kubernetes 1.37


def is_core_group(group: str) -> bool:
    """Whether an API group is Kubernetes' own: no domain, or one of k8s.io but not of x-k8s.io."""
    return "." not in group or group.endswith(".k8s.io") and not group.endswith(".x-k8s.io")


def core_kind(group: str, version: str, kind: str, asked: str | None) -> CoreKind | None:
    """The schema of a kind in the release asked for, else the newest there is."""
    folder, release = _folder(asked)
    prefix = f"{group.split('.')[0]}-" if group else ""
    file = folder / f"{kind.lower()}-{prefix}{version}.json"
    if not file.is_file():
        return None
    schema = json.loads(file.read_text(encoding="utf-8"))
    structure = Structure(_definitions(folder), is_core=True)
    return CoreKind(schema, structure, kind not in CLUSTER_KINDS, f"kubernetes {release}")


def groups_of(kind: str, asked: str | None) -> list[str]:
    """Group and version of every core kind of this name, for messages."""
    folder, _ = _folder(asked)
    return sorted(file.stem.split("-", 1)[1] for file in folder.glob(f"{kind.lower()}-*.json"))


@cache
def _folder(asked: str | None) -> tuple[Path, str]:
    whole = Path(str(resources.files("kubernetes_validate"))) / "kubernetes-json-schema"
    found = {
        match[1]: each
        for each in whole.iterdir()
        if (match := re.match(r"v(\d+\.\d+)\.\d+-local$", each.name)) is not None
    }
    have = sorted(found, key=lambda text: [int(number) for number in text.split(".")])
    release = have[-1] if asked is None else ".".join(asked.removeprefix("v").split(".")[:2])
    if release not in found:
        raise InputError(
            f"no schemas of Kubernetes {asked}",
            where="--release",
            why=f"there are {have[0]} to {have[-1]}",
            do="choose one",
        )
    return found[release], release


@cache
def _definitions(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "_definitions.json").read_text(encoding="utf-8"))["$defs"])

"""Which release of Kubeflow Trainer and Karpenter a cluster runs, by the fields that its schemas have.

Controllers seldom say their release where users may read it; their CustomResourceDefinitions do, since every release
that coremill knows has other fields.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from coremill.errors import InputError
from coremill.k8s.check.crds import Release, shipped_schemas
from coremill.k8s.cluster.connection import Cluster
from coremill.k8s.cluster.kinds import KINDS
from coremill.k8s.cluster.refusals import FORBIDDEN, Refused
from coremill.k8s.job import Job


@dataclass(frozen=True)
class _Product:
    key: str  # of the section kubernetes, and how shipped releases begin
    words: str
    kind: str  # whose fields tell releases apart
    wanted: str


def require_releases(cluster: Cluster, job: Job) -> list[str]:
    """Refuses a cluster with another release than the job was rendered for; what could not be told, in words."""
    section = job.section
    products = []
    if section.kind == "trainjob":
        products.append(_Product("trainer", "Kubeflow Trainer", "TrainJob", section.trainer))
    if section.has_karpenter:
        products.append(_Product("karpenter", "Karpenter", "EC2NodeClass", section.karpenter))
    return [words for product in products if (words := _compare(cluster, product))]


def _compare(cluster: Cluster, product: _Product) -> str | None:
    kind = KINDS[product.kind]
    group = kind.api_version.split("/")[0]
    try:
        definition = cluster.get("CustomResourceDefinition", f"{kind.plural}.{group}")
    except Refused as error:
        if error.status != FORBIDDEN:
            raise
        return (
            f"which release of {product.words} the cluster runs is not known: you may not read"
            " customresourcedefinitions; the job is made for " + product.wanted
        )
    if definition is None:
        cluster.list_all(product.kind, "default")  # refused, in words that say what is not installed
        return None
    version = kind.api_version.split("/")[1]
    distances = distance_of_releases(definition, product.key, group, version, product.kind)
    if not distances:
        return None
    own = min((away for name, away in distances.items() if _is_of(name, product.wanted)), default=None)
    nearest = min(distances, key=lambda name: distances[name])
    if own is None or own == distances[nearest]:
        return None if own == 0 else _unknown(product, nearest)
    if distances[nearest] > 0:
        return _unknown(product, nearest)
    minor = ".".join(nearest.split(".")[:2])
    raise InputError(
        f"the cluster runs {product.words} {minor}, and the job is rendered for {product.wanted}",
        where=f"kubernetes.{product.key}: {product.wanted}; context {cluster.context}",
        why=f"its {product.kind} has the fields of {nearest}, {own} others than {product.wanted}",
        do=f'set kubernetes.{product.key}: "{minor}", or --set kubernetes.{product.key}={minor}',
    )


def distance_of_releases(
    definition: Mapping[str, Any], product: str, group: str, version: str, kind: str
) -> dict[str, int]:
    """How many fields each shipped release has that the cluster has not, and the other way round."""
    served = [each for each in definition["spec"]["versions"] if each["name"] == version and each.get("served")]
    if not served:
        return {}
    there = set(_fields(served[0].get("schema", {}).get("openAPIV3Schema", {}), ""))
    found = {}
    for release in shipped_schemas().releases:
        known = release.kind_of(group, version, kind) if _is_product(release, product) else None
        if known is not None:
            found[release.version] = len(there ^ set(_fields(known.schema, "")))
    return found


def _unknown(product: _Product, nearest: str) -> str:
    return (
        f"the cluster runs a release of {product.words} that coremill does not know, nearest to {nearest}; the job is"
        f" made for {product.wanted}, and the dry run tells whether it is taken"
    )


def _fields(schema: Mapping[str, Any], path: str) -> Iterator[str]:
    """Below spec only: what users write."""
    for name, inner in (schema.get("properties") or {}).items():
        if path or name == "spec":
            yield f"{path}.{name}"
            yield from _fields(inner, f"{path}.{name}")
    for name in ("items", "additionalProperties"):
        if isinstance(schema.get(name), Mapping):
            yield from _fields(schema[name], f"{path}[]")


def _is_product(release: Release, product: str) -> bool:
    return release.product == product or release.product.startswith(f"{product}-")


def _is_of(version: str, minor: str) -> bool:
    return version == minor or version.startswith(f"{minor}.")

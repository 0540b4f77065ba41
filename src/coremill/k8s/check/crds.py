"""Where schemas of custom resources come from: the releases shipped with coremill, a folder, or a cluster.

A folder has one subfolder per release, named like `trainer-v2.3.0`, each with CustomResourceDefinitions (YAML or JSON).
Of several releases of one product the newest counts, unless one is asked for. The shipped ones (`crds/`, made by
scripts/refresh_crds.py) have no descriptions.
"""

from __future__ import annotations

import gzip
import json
import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any

from coremill.errors import InputError
from coremill.k8s.check.structure import Schema
from coremill.nearby import nearest

SHIPPED = "shipped with coremill"
_RELEASE = re.compile(r"(?P<product>.+?)-v?(?P<version>\d[\w.+-]*)$")
_ENDINGS = (".yaml", ".yml", ".json", ".json.gz")
_KUBECTL = ("kubectl", "get", "customresourcedefinitions", "--output", "json")
_KUBECTL_SECONDS = 60


@dataclass(frozen=True)
class Kind:
    """One version of a custom resource."""

    schema: Schema
    namespaced: bool
    has_status: bool  # status is a subresource: what a manifest says of it is dropped
    release: str  # trainer 2.3.0
    successor: str = ""  # the version to use instead, where this one is deprecated


@dataclass(frozen=True)
class Release:
    """CustomResourceDefinitions of one release; read when first asked for."""

    product: str  # trainer; empty: a folder or cluster that names none
    version: str
    files: tuple[Any, ...]  # paths, or documents that were read already

    def __str__(self) -> str:
        return f"{self.product} {self.version}".strip() or "schemas"

    def kind_of(self, group: str, version: str, kind: str) -> Kind | None:
        spec = self._specs.get((group, kind))
        served = [each for each in spec["versions"] if each["name"] == version and each["served"]] if spec else []
        if spec is None or not served:
            return None
        return Kind(
            schema=served[0].get("schema", {}).get("openAPIV3Schema", {"x-kubernetes-preserve-unknown-fields": True}),
            namespaced=spec["scope"] == "Namespaced",
            has_status="status" in (served[0].get("subresources") or {}),
            release=str(self),
            successor=self.versions_of(group, kind)[-1] if served[0].get("deprecated") else "",
        )

    def versions_of(self, group: str, kind: str) -> list[str]:
        spec = self._specs.get((group, kind))
        return [each["name"] for each in spec["versions"] if each["served"]] if spec else []

    @property
    def groups(self) -> set[str]:
        return {group for group, _ in self._specs}

    @cached_property
    def _specs(self) -> dict[tuple[str, str], dict[str, Any]]:
        documents = [document for file in self.files for document in _documents(file)]
        specs = [each["spec"] for each in documents if each.get("kind") == "CustomResourceDefinition"]
        return {(spec["group"], spec["names"]["kind"]): spec for spec in specs}


@dataclass(frozen=True)
class Schemas:
    """All releases there are, and which were asked for."""

    releases: tuple[Release, ...]  # of one product the newest first
    origin: str  # shipped with coremill, a folder, or cluster

    def chosen(self, wanted: Mapping[str, str]) -> list[Release]:
        """One release of each product: the one asked for, else the newest."""
        found: dict[str, Release] = {}
        for release in self.releases:
            asked = next((wanted[name] for name in wanted if _same_product(name, release.product)), None)
            if asked is None or _same_version(asked, release.version):
                found.setdefault(release.product, release)
        return list(found.values())

    def require(self, wanted: Mapping[str, str]) -> None:
        """Every release asked for has to be there."""
        for name, version in wanted.items():
            have = [each for each in self.releases if _same_product(name, each.product)]
            if any(_same_version(version, each.version) for each in have) or name == "kubernetes":
                continue
            products = sorted({each.product for each in self.releases} | {"kubernetes"})
            near = nearest(name, products)
            there = ", ".join(str(each) for each in have) or ", ".join(str(each) for each in self.releases)
            raise InputError(
                f"no schemas of {name} {version}",
                where=f"--release {name}={version}",
                why=f"{self.origin}: {there or 'none'}",
                do=f"did you mean {near}={version}?" if near and not have else "name one of these, or --schemas DIR",
            )

    def kind_of(self, group: str, version: str, kind: str, wanted: Mapping[str, str]) -> Kind | None:
        found = (release.kind_of(group, version, kind) for release in self.chosen(wanted))
        return next((each for each in found if each is not None), None)

    def releases_with_field(self, group: str, version: str, kind: str, path: str) -> list[Release]:
        """Releases whose schema of this kind knows the field at a path."""
        pairs = ((release, release.kind_of(group, version, kind)) for release in self.releases)
        return [release for release, found in pairs if found and _has_path(found.schema, path)]


def shipped_schemas() -> Schemas:
    return _of_folder(Path(str(resources.files("coremill.k8s.check").joinpath("crds"))), SHIPPED)


def find_schemas(source: str | None) -> Schemas:
    """Those of `--schemas`: a folder, or `cluster` for those of the cluster kubectl asks; None: the shipped ones."""
    if source is None:
        return shipped_schemas()
    if source == "cluster":
        return Schemas((Release("", "", (_ask_cluster(),)),), "cluster")
    folder = Path(source)
    if not folder.is_dir():
        raise InputError(
            f"{source} is no folder",
            where="--schemas",
            do="name a folder with a subfolder per release (trainer-v2.3.0), or the word cluster",
        )
    found = _of_folder(folder, source)
    if not any(release.groups for release in found.releases):
        raise InputError(
            f"no CustomResourceDefinition in {source}",
            where="--schemas",
            do="each release is a subfolder (trainer-v2.3.0) with YAML files of its CustomResourceDefinitions",
        )
    return found


def parse_releases(texts: list[str]) -> dict[str, str]:
    """What `--release trainer=2.1.0` asks for."""
    wanted = {}
    for text in texts:
        name, sign, version = text.partition("=")
        if not (name and sign and version):
            raise InputError(f"{text!r} names no release", where="--release", do="write it as trainer=2.1.0")
        wanted[name.strip()] = version.strip().removeprefix("v")
    return wanted


def _of_folder(folder: Path, origin: str) -> Schemas:
    releases = [Release("", "", _files(folder))] if _files(folder) else []
    for inner in sorted(each for each in folder.iterdir() if each.is_dir()):
        parts = _RELEASE.match(inner.name)
        name, version = (parts["product"], parts["version"]) if parts else (inner.name, "")
        releases.append(Release(name, version, _files(inner)))
    releases.sort(key=lambda release: (release.product, _order(release.version)), reverse=True)
    return Schemas(tuple(release for release in releases if release.files), origin)


def _files(folder: Path) -> tuple[Path, ...]:
    return tuple(sorted(each for each in folder.iterdir() if each.name.endswith(_ENDINGS)))


def _documents(file: Any) -> Iterator[dict[str, Any]]:
    if isinstance(file, dict):
        yield from file.get("items") or [file]
        return
    text = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    if file.name.endswith((".json", ".json.gz")):
        documents = [json.loads(text)]
    else:
        import yaml

        documents = list(yaml.load_all(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)))
    for document in documents:
        if isinstance(document, dict):
            yield from document.get("items") or [document]


def _ask_cluster() -> dict[str, Any]:
    command = " ".join(_KUBECTL)
    try:
        done = subprocess.run(_KUBECTL, capture_output=True, text=True, timeout=_KUBECTL_SECONDS, check=True)
        return dict(json.loads(done.stdout))
    except FileNotFoundError as error:
        raise InputError(
            "kubectl was not found", where="--schemas cluster", do="install it, or name a folder"
        ) from error
    except subprocess.TimeoutExpired as error:
        why = f"`{command}` took more than {_KUBECTL_SECONDS} s"
        raise InputError(
            "the cluster did not answer", where="--schemas cluster", why=why, do="try it by hand"
        ) from error
    except (subprocess.CalledProcessError, ValueError) as error:
        why = (getattr(error, "stderr", "") or str(error)).strip()
        raise InputError(
            "the cluster did not answer", where="--schemas cluster", why=why, do=f"`{command}` has to work"
        ) from error


def _order(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version))


def _same_product(asked: str, product: str) -> bool:
    return asked == product or product.startswith(f"{asked}-")


def _same_version(asked: str, version: str) -> bool:
    return version == asked or version.startswith(f"{asked}.")


def _has_path(schema: Schema, path: str) -> bool:
    for part in re.findall(r"\[\d+\]|[^.\[\]]+", path):
        inner = schema.get("items") if part.startswith("[") else schema.get("properties", {}).get(part)
        if inner is None:
            return False
        schema = inner
    return True

"""The metadata every object has: names, labels, annotations, as an API server checks them whatever the kind."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from coremill.k8s.check.findings import Problem, joined, shown
from coremill.k8s.check.structure import Structure

_TEXT = {"type": "string", "nullable": True}
_TEXTS = {"type": "object", "nullable": True, "additionalProperties": {"type": "string", "nullable": True}}
_OWNER = {
    "type": "object",
    "nullable": True,
    "properties": {
        "apiVersion": _TEXT,
        "kind": _TEXT,
        "name": _TEXT,
        "uid": _TEXT,
        "controller": {"type": "boolean", "nullable": True},
        "blockOwnerDeletion": {"type": "boolean", "nullable": True},
    },
}
_TIME = {"type": "string", "nullable": True, "format": "date-time"}
_MANAGER = {
    "type": "object",
    "properties": {
        **{key: _TEXT for key in ("manager", "operation", "apiVersion", "fieldsType", "subresource")},
        "time": _TIME,
        "fieldsV1": {"x-kubernetes-preserve-unknown-fields": True},
    },
}
_INTEGER = {"type": "integer", "nullable": True}
_SCHEMA = {
    "type": "object",
    "properties": {
        **{key: _TEXT for key in ("name", "generateName", "namespace", "uid", "resourceVersion", "selfLink")},
        **{key: _TIME for key in ("creationTimestamp", "deletionTimestamp")},
        "labels": _TEXTS,
        "annotations": _TEXTS,
        "generation": _INTEGER,
        "deletionGracePeriodSeconds": _INTEGER,
        "finalizers": {"type": "array", "nullable": True, "items": _TEXT},
        "ownerReferences": {"type": "array", "nullable": True, "items": _OWNER},
        "managedFields": {"type": "array", "nullable": True, "items": _MANAGER},
    },
}
_LABEL_VALUE = re.compile(r"(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?\Z", re.ASCII)
_NAME_PART = re.compile(r"([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]\Z", re.ASCII)
_DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?\Z", re.ASCII)
_ANNOTATIONS_BYTES = 256 * 1024


def is_dns_label(text: str) -> bool:
    """The name of a namespace or a Service: one part of a host name."""
    return len(text) <= 63 and bool(_DNS_LABEL.match(text))


def is_dns_subdomain(text: str) -> bool:
    return len(text) <= 253 and all(_DNS_LABEL.match(part) for part in text.split("."))


def is_label_value(text: str) -> bool:
    return len(text) <= 63 and bool(_LABEL_VALUE.match(text))


def is_qualified_name(text: str) -> bool:
    """The key of a label: a name of up to 63 characters, before it perhaps a domain and a slash."""
    domain, slash, name = text.rpartition("/")
    return (not slash or is_dns_subdomain(domain)) and len(name) <= 63 and bool(_NAME_PART.match(name))


def metadata_problems(metadata: Any, *, namespaced: bool) -> Iterator[Problem]:
    if not isinstance(metadata, dict):
        yield Problem("metadata", "required", "missing", "give the object a name: metadata: {name: ...}")
        return
    wrong = list(Structure().problems(metadata, _SCHEMA, "metadata"))
    yield from wrong
    if any(problem.rule == "type" for problem in wrong):
        return
    yield from _name_problems(metadata, namespaced=namespaced)
    yield from label_problems(metadata.get("labels"), "metadata.labels")
    yield from annotation_problems(metadata.get("annotations"), "metadata.annotations")
    for index, text in enumerate(metadata.get("finalizers") or ()):
        if not is_qualified_name(text or ""):
            yield Problem(
                f"metadata.finalizers[{index}]", "name", f"{shown(text)} is no finalizer", "write domain/name"
            )
    for index, owner in enumerate(metadata.get("ownerReferences") or ()):
        for key in ("apiVersion", "kind", "name", "uid"):
            if not (owner or {}).get(key):
                yield Problem(f"metadata.ownerReferences[{index}].{key}", "required", "missing", "name the owner fully")


def label_problems(labels: Any, path: str) -> Iterator[Problem]:
    for key, value in labels.items() if isinstance(labels, dict) else ():
        if not is_qualified_name(key):
            yield Problem(joined(path, key), "label", f"{shown(key)} is no label key", "write name or domain/name")
        if isinstance(value, str) and not is_label_value(value):
            yield Problem(joined(path, key), "label", f"{shown(value)} is no label value", LABEL_FIX)


LABEL_FIX = "up to 63 letters, digits, '-', '_' and '.', a letter or digit at both ends"


def annotation_problems(annotations: Any, path: str) -> Iterator[Problem]:
    if not isinstance(annotations, dict):
        return
    for key in annotations:
        if not is_qualified_name(key.lower()):
            yield Problem(joined(path, key), "name", f"{shown(key)} is no annotation key", "write name or domain/name")
    size = sum(len(key.encode()) + len(str(value).encode()) for key, value in annotations.items())
    if size > _ANNOTATIONS_BYTES:
        yield Problem(path, "too-long", f"{size} bytes", f"at most {_ANNOTATIONS_BYTES} in all")


def _name_problems(metadata: dict[str, Any], *, namespaced: bool) -> Iterator[Problem]:
    name, prefix, namespace = (metadata.get(key) for key in ("name", "generateName", "namespace"))
    if not name and not prefix:
        yield Problem("metadata.name", "required", "missing", "give the object a name")
    elif name and not is_dns_subdomain(name):
        yield Problem(
            "metadata.name",
            "name",
            f"{shown(name)} is no object name",
            "lower-case letters, digits, '-' and '.', up to 253",
        )
    if prefix and not name and not is_dns_subdomain(prefix + "x"):
        yield Problem(
            "metadata.generateName", "name", f"{shown(prefix)} begins no object name", "lower-case letters and '-'"
        )
    if namespace and namespaced and not is_dns_label(namespace):
        yield Problem(
            "metadata.namespace",
            "name",
            f"{shown(namespace)} is no namespace",
            "lower-case letters, digits, '-', up to 63",
        )
    if namespace and not namespaced:
        words = "objects of this kind are in no namespace: it is dropped"
        yield Problem("metadata.namespace", "name", words, "remove it", "warning")

"""One object against its schema: what an API server says, case by case, without one."""

from __future__ import annotations

import copy
import re
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
from clusters import LONG

from coremill.k8s.check.checking import check_object
from coremill.k8s.check.crds import Release, Schemas, shipped_schemas
from coremill.k8s.check.findings import Problem
from coremill.k8s.check.manifests import Manifest, read_manifests
from k8s.mutations import mutations

GOOD = Path(__file__).parents[2] / "k8s/manifests/good"
MEMORY = ("spec.containers[0].resources.limits.memory", "value")
ANY = "x-kubernetes-preserve-unknown-fields"
SPEC: dict[str, Any] = {
    "type": "object",
    "required": ["size"],
    "x-kubernetes-validations": [
        {
            "rule": "self.size <= self.most",
            "messageExpression": "'at most %d'.format([self.most])",
            "message": "too big",
        },
        {"rule": "self == oldSelf", "message": "immutable"},
        {"rule": "oldSelf.hasValue() || self.size > 0", "optionalOldSelf": True, "message": "positive at first"},
        {"rule": "!has(self.when) || self.when > timestamp('2020-01-01T00:00:00Z')"},
        {"rule": "!has(self.unheard) || self.unheard.someday()"},
        {
            "rule": "!has(self.__namespace__) || self.__namespace__ != 'x'",
            "message": "not x",
            "fieldPath": ".namespace",
        },
    ],
    "properties": {
        "size": {"type": "integer", "format": "int32", "minimum": 0},
        "most": {"type": "integer", "default": 9},
        "when": {"type": "string", "format": "date-time"},
        "unheard": {"type": "string"},
        "namespace": {"type": "string"},
        "share": {
            "x-kubernetes-int-or-string": True,
            "anyOf": [{"type": "integer"}, {"type": "string"}],
            "pattern": r"^\d+%$",
        },
        "maybe": {"type": "string", "nullable": True, "minLength": 2, "maxLength": 4},
        "open": {"type": "object", ANY: True, "properties": {"known": {"type": "integer"}}},
        "labels": {"type": "object", "additionalProperties": {"type": "string"}, "maxProperties": 2},
        "closed": {"type": "object"},
        "inner": {"type": "object", "x-kubernetes-embedded-resource": True, ANY: True},
        "ports": {
            "type": "array",
            "x-kubernetes-list-type": "map",
            "x-kubernetes-list-map-keys": ["port", "protocol"],
            "maxItems": 3,
            "items": {
                "type": "object",
                "properties": {"port": {"type": "integer"}, "protocol": {"type": "string", "default": "TCP"}},
            },
        },
        "tags": {
            "type": "array",
            "x-kubernetes-list-type": "set",
            "items": {"type": "string"},
            "pattern": "^nobody reads this$",
        },
        "mode": {"type": "string", "enum": ["Fast", "Safe"]},
        "one": {"oneOf": [{"required": ["a"]}, {"required": ["b"]}], "type": "object", ANY: True},
        "none": {"not": {"enum": ["x"]}, "type": "string"},
    },
}
CRD = {
    "kind": "CustomResourceDefinition",
    "spec": {
        "group": "example.org",
        "scope": "Namespaced",
        "names": {"kind": "Mill", "plural": "mills"},
        "versions": [
            {
                "name": "v1",
                "served": True,
                "subresources": {"status": {}},
                "schema": {
                    "openAPIV3Schema": {
                        "type": "object",
                        "properties": {
                            "spec": SPEC,
                            "status": {"type": "object", "properties": {"ready": {"type": "boolean"}}},
                        },
                    }
                },
            },
            {
                "name": "v2",
                "served": True,
                "deprecated": True,
                "schema": {"openAPIV3Schema": {"type": "object", ANY: True}},
            },
        ],
    },
}
SCHEMAS = Schemas((Release("mill", "1.0", (CRD,)),), "here")


def verdict(changes: dict[str, Any], **root: Any):
    body = {"apiVersion": "example.org/v1", "kind": "Mill", "metadata": {"name": "m"}, "spec": {"size": 3, **changes}}
    return check_object(Manifest("f", {**body, **root}, {}), SCHEMAS, {})


def found(changes: dict[str, Any], **root: Any) -> list[tuple[str, str]]:
    return [(problem.path, problem.rule) for problem in verdict(changes, **root).problems]


TAKEN = [
    {},
    {"size": 3.0},
    {"share": 7},
    {"share": "7%"},
    {"maybe": None},
    {"mode": None},  # dropped, as it may not be null
    {"labels": {"a": None}},
    {"open": {"known": 1, "other": [1]}},
    {"inner": {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": {}}},
    {"ports": [{"port": 1}, {"port": 1, "protocol": "UDP"}]},
    {"tags": ["a", "b"]},
    {"one": {"a": 1}},
    {"none": "y"},
    {"closed": {}},
]
REFUSED = [
    ({"size": None}, [("spec.size", "required")]),
    ({"size": "3"}, [("spec.size", "type")]),
    ({"size": True}, [("spec.size", "type")]),
    ({"size": 3.5}, [("spec.size", "type")]),
    ({"size": 2**64}, [("spec.size", "type")]),
    ({"size": -1}, [("spec.size", "value"), ("spec", "cel")]),
    ({"size": 2**31, "most": 2**40}, [("spec.size", "value")]),
    ({"share": "7"}, [("spec.share", "value")]),
    ({"share": 0.5}, [("spec.share", "type")]),
    ({"share": [1]}, [("spec.share", "type")]),
    ({"maybe": "a"}, [("spec.maybe", "value")]),
    ({"maybe": "abcde"}, [("spec.maybe", "too-long")]),
    ({"maybe": "äöüß"}, []),
    ({"open": {"known": "1"}}, [("spec.open.known", "type")]),
    ({"closed": {"a": 1}}, [("spec.closed.a", "unknown-field")]),
    ({"sise": 4}, [("spec.sise", "unknown-field")]),
    ({"labels": {"a": "1", "b": "2", "c": "3"}}, [("spec.labels", "too-many")]),
    ({"labels": {"a.b/c": 1}}, [("spec.labels[a.b/c]", "type")]),
    ({"inner": {"kind": "Pod"}}, [("spec.inner.apiVersion", "required")]),
    ({"ports": [{"port": 1}, {"port": 1, "protocol": "TCP"}]}, [("spec.ports[1]", "duplicate")]),
    ({"ports": [{}] * 4}, [("spec.ports", "too-many"), *((f"spec.ports[{n}]", "duplicate") for n in (1, 2, 3))]),
    ({"ports": {}}, [("spec.ports", "type")]),
    ({"tags": ["a", "a"]}, [("spec.tags[1]", "duplicate")]),
    ({"mode": "fast"}, [("spec.mode", "value")]),
    ({"one": {}}, [("spec.one", "value")]),
    ({"one": {"a": 1, "b": 2}}, [("spec.one", "value")]),
    ({"none": "x"}, [("spec.none", "value")]),
    ({"when": "yesterday"}, [("spec.when", "type")]),
    ({"size": 10}, [("spec", "cel")]),  # the default of `most` counts
    ({"size": 0}, [("spec", "cel")]),  # optionalOldSelf: there is none at a create
    ({"namespace": "x"}, [("spec.namespace", "cel")]),
]


@pytest.mark.parametrize("changes", TAKEN, ids=str)
def test_taken(changes):
    assert found(changes) == []


@pytest.mark.parametrize(("changes", "expected"), REFUSED, ids=str)
def test_refused(changes, expected):
    assert found(changes) == expected


def test_messages_of_rules():
    assert [problem.text for problem in verdict({"size": 10}).problems] == ["at most 9"]
    assert [problem.text for problem in verdict({"size": 0}).problems] == ["positive at first"]


def test_rules_that_cannot_be_judged_are_said():
    dated, unheard = verdict({"when": "2026-01-01T00:00:00Z"}), verdict({})
    assert found({"when": "2026-01-01T00:00:00Z"}) == []
    assert any("date" in reason for reason in dated.unchecked) and not any("date" in each for each in unheard.unchecked)
    assert any("someday" in reason and "does not compile" in reason for reason in unheard.unchecked)


METADATA = [
    ({"metadata": {}}, [("metadata.name", "required")]),
    ({"metadata": None}, [("metadata", "required")]),
    ({"metadata": {"generateName": "m-"}}, []),
    ({"metadata": {"name": "Mill"}}, [("metadata.name", "name")]),
    ({"metadata": {"name": "m", "lables": {}}}, [("metadata.lables", "unknown-field")]),
    ({"metadata": {"name": "m", "labels": {"a": 1}}}, [("metadata.labels.a", "type")]),
    ({"metadata": {"name": "m", "labels": {"a": "b c"}}}, [("metadata.labels.a", "label")]),
    ({"metadata": {"name": "m", "labels": {"a b": "c"}}}, [("metadata.labels[a b]", "label")]),
    ({"metadata": {"name": "m", "annotations": {"a": "anything at all"}}}, []),
    ({"metadata": {"name": "m", "annotations": {"a": "x" * 2**18}}}, [("metadata.annotations", "too-long")]),
    ({"metadata": {"name": "m", "namespace": "a.b"}}, [("metadata.namespace", "name")]),
    ({"metadata": {"name": "m", "finalizers": ["a/b/c"]}}, [("metadata.finalizers[0]", "name")]),
    ({"extra": 1}, [("extra", "unknown-field")]),
    ({"status": {"ready": "no"}}, []),  # dropped at a create
    ({"status": {"redy": True}}, [("status.redy", "unknown-field")]),
    ({"spec": "x"}, [("spec", "type")]),
]


@pytest.mark.parametrize(("root", "expected"), METADATA, ids=str)
def test_metadata_and_root(root, expected):
    assert found({}, **root) == expected


def test_a_name_that_is_made_at_the_create_is_one():
    body = {"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob", "metadata": {"generateName": "a-"}}
    body["spec"] = {"runtimeRef": {"name": "torch-distributed"}, "trainer": {"numProcPerNode": 1}}
    assert check_object(Manifest("f", body, {}), shipped_schemas(), {}).problems == ()


def test_versions():
    body = {"apiVersion": "example.org/v2", "kind": "Mill", "metadata": {"name": "m"}}
    assert [problem.rule for problem in check_object(Manifest("f", body, {}), SCHEMAS, {}).problems] == ["deprecated"]
    unserved = check_object(Manifest("f", {**body, "apiVersion": "example.org/v3"}, {}), SCHEMAS, {})
    assert unserved.problems[0].fix == "write apiVersion: example.org/v2"
    nobody = check_object(Manifest("f", {**body, "kind": "Miller"}, {}), SCHEMAS, {})
    assert nobody.problems == () and "no schema for example.org/v2 Miller" in nobody.unchecked[0]


def test_fixes_say_what_to_write():
    fixes = {
        problem.path: problem.fix
        for changes in ({"sise": 1}, {"mode": "fast"})
        for problem in verdict(changes).problems
    }
    assert fixes == {"spec.sise": "did you mean size?", "spec.mode": "did you mean Fast?"}
    quoted = verdict({"labels": {"on": True}}).problems
    assert quoted == (Problem("spec.labels.on", "type", "true where a string belongs", 'put it in quotes: "true"'),)


def test_the_object_is_left_alone():
    body = {
        "apiVersion": "example.org/v1",
        "kind": "Mill",
        "metadata": {"name": "m"},
        "spec": {"size": 3, "mode": None},
    }
    before = copy.deepcopy(body)
    check_object(Manifest("f", body, {}), SCHEMAS, {})
    assert body == before


def test_core_kinds_are_read_as_others_read_them(monkeypatch):
    """By kubernetes-validate, strict, which does not look at the range of integers and stumbles at nulls."""
    asked = 0
    for name in ("schema_contents", "all_versions"):  # it reads megabytes for each object
        monkeypatch.setattr(kubernetes_validate.utils, name, cache(getattr(kubernetes_validate.utils, name)))
    for file in ("core.yaml", "indexed-job.yaml"):
        for manifest in read_manifests([str(GOOD / file)]):
            for mutation in mutations(manifest.object, {}, 300 if LONG else 60, seed=7):
                if mutation.words.startswith("metadata"):
                    continue
                problems = check_object(Manifest("f", mutation.object, {}), SCHEMAS, {}).problems
                ours = [each for each in problems if not re.search(r"too large for int|\d{19}|e\+|quantity", each.text)]
                try:
                    kubernetes_validate.validate(mutation.object, kubernetes_validate.latest_version(), strict=True)
                    assert not ours, (mutation.words, ours)
                except kubernetes_validate.ValidationError as error:
                    assert problems or "is valid under each of" in error.message, (mutation.words, error.message)
                asked += 1
    assert asked > 200


CORE = [
    ({"kind": "Pod", "spec": {"containers": [{"name": "c", "resources": {"limits": {"memory": "64 GB"}}}]}}, [MEMORY]),
    ({"data": {"a": "b"}}, []),
    ({"data": {"a": 1}}, [("data.a", "type")]),
    ({"dta": {}}, [("dta", "unknown-field")]),
    ({"apiVersion": "apps/v1"}, [("apiVersion", "version")]),
]


@pytest.mark.parametrize(("changes", "expected"), CORE, ids=str)
def test_core_kinds(changes, expected):
    body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "c"}, **changes}
    problems = check_object(Manifest("f", body, {}), SCHEMAS, {}).problems
    assert [(problem.path, problem.rule) for problem in problems] == expected

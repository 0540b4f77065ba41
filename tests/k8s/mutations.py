"""Good manifests made bad, in ways people make them bad: the same ones for the same seed.

Mutations know the schema (fields that could be there) and the CEL rules (breaks that only a rule sees), but not what
the checker or the API server makes of them: many are harmless, and both have to see that too.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

Path = tuple[str | int, ...]
_OF_OTHER_TYPES: tuple[Any, ...] = ("text", "", 7, -1, 1.5, True, None, [], {}, ["a"], {"a": "b"}, [None])
_OUT_OF_RANGE: tuple[Any, ...] = (-1, 0, 1, 2**31, 2**40, 2**63, -(2**31) - 1, 0.5, 1e30, 3.0)
_STRINGS: tuple[str, ...] = ("", "x" * 64, "x" * 300, "Upper", "a b", "ä", "-a", "a/b/c", "10", "1h", "a\n", "_", "a@b")

# Each breaks one CEL rule (or shows that it holds), by kind: a path and what stands there instead.
BROKEN_RULES: dict[str, tuple[tuple[Path, Any], ...]] = {
    "EC2NodeClass": (
        (("spec", "instanceProfile"), "also-a-profile"),
        (("spec", "role"), ""),
        (("spec", "amiSelectorTerms"), [{"alias": "al2023@latest"}, {"id": "ami-123"}]),
        (("spec", "amiSelectorTerms"), [{"id": "ami-0123456789abcdef0", "name": "mine"}]),
        (("spec", "amiSelectorTerms"), [{"id": "ami-0123456789abcdef0"}]),
        (("spec", "amiSelectorTerms"), [{"alias": "windows2022@v1"}]),
        (("spec", "amiSelectorTerms"), [{"alias": "ubuntu@latest"}]),
        (("spec", "amiSelectorTerms"), [{"alias": "al2023"}]),
        (("spec", "amiSelectorTerms"), [{}]),
        (("spec", "amiSelectorTerms"), [{"tags": {"": "x"}}]),
        (("spec", "amiFamily"), "Bottlerocket"),
        (("spec", "amiFamily"), "AL2023"),
        (("spec", "subnetSelectorTerms"), []),
        (("spec", "subnetSelectorTerms"), [{"id": "subnet-0123456789abcdef0", "tags": {"a": "b"}}]),
        (("spec", "securityGroupSelectorTerms"), [{"id": "sg-0123456789abcdef0", "name": "both"}]),
        (("spec", "tags"), {"kubernetes.io/cluster/demo": "owned"}),
        (("spec", "tags"), {"karpenter.sh/nodepool": "a"}),
        (("spec", "tags"), {"team": "ml"}),
        (("spec", "blockDeviceMappings", 0, "ebs"), {"encrypted": True}),
        (("spec", "blockDeviceMappings", 0, "ebs", "volumeInitializationRate"), 100),
        (("spec", "placementGroupSelector"), {"name": "a", "id": "pg-0123456789abcdef0"}),
        (("spec", "placementGroupSelector"), {}),
        (("spec", "networkInterfaces"), [{"networkCardIndex": 0, "deviceIndex": 1, "interfaceType": "efa-only"}]),
        (("spec", "kubelet"), {"evictionSoft": {"memory.available": "5%"}}),
        (("spec", "kubelet"), {"imageGCHighThresholdPercent": 10, "imageGCLowThresholdPercent": 50}),
        (("spec", "kubelet"), {"kubeReserved": {"cpu": "-1"}}),
    ),
    "NodePool": (
        (("metadata", "namespace"), "somewhere"),
        (("metadata", "creationTimestamp"), "yesterday"),
        (("metadata", "managedFields"), [{"unheard": "of"}]),
        (("metadata", "ownerReferences"), [{"kind": "Node"}]),
        (("metadata", "annotations"), {"a b": "c"}),
        (("metadata", "annotations"), {"a": "x" * 2**18}),
        (("metadata", "labels"), {"a": 1}),
        (("metadata", "labels"), {"a/b/c": "d"}),
        (("metadata", "labels"), None),
        (("metadata", "finalizers"), ["a b"]),
        (("metadata",), {"generateName": "made-"}),
        (("spec", "template", "spec", "requirements", 0, "values"), []),
        (("spec", "template", "spec", "requirements", 0, "operator"), "Gt"),
        (
            ("spec", "template", "spec", "requirements", 0),
            {"key": "karpenter.k8s.aws/instance-cpu", "operator": "Gt", "values": ["-3"]},
        ),
        (
            ("spec", "template", "spec", "requirements", 0),
            {"key": "karpenter.k8s.aws/instance-cpu", "operator": "Gt", "values": ["x"]},
        ),
        (("spec", "template", "spec", "requirements", 0, "minValues"), 7),
        (("spec", "template", "spec", "requirements", 0, "key"), "karpenter.sh/anything"),
        (("spec", "template", "spec", "requirements", 0, "key"), "karpenter.k8s.aws/instance-colour"),
        (("spec", "template", "spec", "requirements", 0, "key"), "kubernetes.io/hostname"),
        (("spec", "template", "spec", "requirements", 0, "key"), "team.example/x"),
        (("spec", "template", "spec", "requirements", 4, "values"), ["8xlarge", "24xlarge, 48xlarge"]),
        (("spec", "template", "metadata", "labels"), {"karpenter.sh/nodepool": "x"}),
        (("spec", "template", "metadata", "labels"), {"kubernetes.io/hostname": "x"}),
        (("spec", "template", "spec", "expireAfter"), "never"),
        (("spec", "template", "spec", "terminationGracePeriod"), "2 minutes"),
        (("spec", "template", "spec", "taints", 0, "effect"), "NoWay"),
        (("spec", "template", "spec", "nodeClassRef", "group"), ""),
        (("spec", "disruption", "budgets", 0, "schedule"), "@daily"),
        (("spec", "disruption", "budgets", 0, "nodes"), "101%"),
        (("spec", "disruption", "budgets", 0, "nodes"), 3),
        (("spec", "disruption", "budgets", 0, "reasons"), ["Bored"]),
        (("spec", "disruption", "consolidateAfter"), "soon"),
        (("spec", "replicas"), 3),
        (("spec", "weight"), 1000),
        (("spec", "limits"), {"cpu": "many"}),
    ),
    "TrainJob": (
        (("metadata",), {"generateName": "made-"}),
        (("metadata",), {"generateName": "1-made-"}),
        (("metadata", "name"), "1st-job"),
        (("metadata", "name"), "a" * 64),
        (("metadata", "name"), "with.dot"),
        (("spec", "managedBy"), "somebody.else/controller"),
        (("spec", "managedBy"), "kueue.x-k8s.io/multikueue"),
        (("spec", "trainer", "numProcPerNode"), "auto"),
        (("spec", "trainer", "numProcPerNode"), 0),
        (("spec", "trainer", "numProcPerNode"), -1),
        (("spec", "initializer"), {"model": {"storageUri": "no-uri"}}),
        (("spec", "initializer"), {"model": {"storageUri": "hf://owner/name"}}),
        (("spec", "trainer", "resourcesPerNode", "limits", "memory"), "64 GB"),
        (("spec", "trainer", "resourcesPerNode", "limits", "cpu"), 30),
        (("spec", "activeDeadlineSeconds"), 0),
        (("spec", "runtimeRef", "name"), None),
        (("spec", "labels"), {"a": "b"}),
        (("status",), {"jobsStatus": "x"}),
        (("status",), {"unheard": "of"}),
    ),
    "TrainingRuntime": (
        (("spec", "mlPolicy", "mpi"), {}),
        (("spec", "mlPolicy", "mpi"), {"numProcPerNode": 0}),
        (("spec", "template", "spec", "startupPolicy"), {"startupPolicyOrder": "InOrder"}),
        (("spec", "template", "spec", "replicatedJobs", 0, "dependsOn"), [{"name": "x", "status": "Complete"}]),
        (("spec", "template", "spec", "failurePolicy", "restartStrategy"), "Hope"),
        (("spec", "template", "spec", "replicatedJobs", 0, "template", "spec", "backoffLimit"), -1),
    ),
    "JobSet": (
        (("spec", "startupPolicy"), {"startupPolicyOrder": "InOrder"}),
        (("spec", "startupPolicy"), {"startupPolicyOrder": "Whenever"}),
        (("spec", "failurePolicy", "rules", 0, "action"), "Panic"),
        (("spec", "failurePolicy", "rules", 0, "name"), "1 bad name"),
        (("spec", "replicatedJobs", 0, "template", "spec", "completions"), "four"),
        (("spec", "ttlSecondsAfterFinished"), -1),
        (
            ("spec", "replicatedJobs", 0, "template", "spec", "template", "spec", "containers", 0, "env"),
            [{"value": "x"}],
        ),
    ),
    "ClusterQueue": (
        (("spec", "resourceGroups", 0, "flavors"), ["cpu-amx"]),
        (("spec", "resourceGroups", 0, "coveredResources"), None),
        (("spec", "resourceGroups", 0, "flavors", 0, "resources", 0, "nominalQuota"), "lots"),
        (("spec", "resourceGroups", 0, "coveredResources"), ["cpu", "memory", "pods"]),
        (("spec", "preemption"), {"reclaimWithinCohort": "Never", "borrowWithinCohort": {"policy": "LowerPriority"}}),
        (("spec", "queueingStrategy"), "Random"),
        (("spec", "cohortName"), "Bad_Name"),
    ),
    "ResourceFlavor": (
        (("spec", "tolerations", 0, "operator"), "Maybe"),
        (("spec", "tolerations", 0), {"operator": "Exists", "value": "x", "effect": "NoSchedule"}),
        (("spec", "tolerations", 0, "tolerationSeconds"), 5),
        (("spec", "nodeTaints"), [{"key": "a", "effect": "Sometimes"}]),
        (("spec", "topologyName"), "t"),
        (("spec", "nodeSelector"), {"a": "b"}),
    ),
    "LocalQueue": ((("spec", "clusterQueue"), "Bad Name"), (("spec", "stopPolicy"), "Later")),
}


@dataclass(frozen=True)
class Mutation:
    words: str  # what was done, for a message
    object: dict[str, Any]


def mutations(good: dict[str, Any], schema: dict[str, Any], count: int, seed: int) -> Iterator[Mutation]:
    """Every broken rule of the kind once, then random ones up to `count`."""
    for path, value in BROKEN_RULES.get(good["kind"], ()):
        changed = _replaced(good, path, value)
        if changed is not None:
            yield Mutation(f"{_words(path)} = {value!r}", changed)
            count -= 1
    source = random.Random(f"{seed} {good['kind']} {good['metadata']['name']}")
    ways: tuple[Callable[..., Mutation | None], ...] = (_dropped, _renamed, _retyped, _out_of_range, _added, _doubled)
    while count > 0:
        mutation = source.choice(ways)(good, schema, source)
        if mutation is not None and mutation.object != good:
            yield mutation
            count -= 1


def _dropped(good: dict[str, Any], schema: Any, source: random.Random) -> Mutation | None:
    path = source.choice(_paths(good))
    changed = copy.deepcopy(good)
    holder = _at(changed, path[:-1])
    del holder[path[-1]]
    return Mutation(f"{_words(path)} dropped", changed)


def _renamed(good: dict[str, Any], schema: Any, source: random.Random) -> Mutation | None:
    path = source.choice([path for path in _paths(good) if isinstance(path[-1], str)])
    key = str(path[-1])
    place = source.randrange(len(key))
    other = source.choice(
        [key[:place] + key[place + 1 :], key.upper(), key + "s", key[:1].upper() + key[1:], "x-" + key]
    )
    changed = copy.deepcopy(good)
    holder = _at(changed, path[:-1])
    holder[other] = holder.pop(key)
    return Mutation(f"{_words(path)} renamed {other}", changed)


def _retyped(good: dict[str, Any], schema: Any, source: random.Random) -> Mutation | None:
    return _with(good, source.choice(_paths(good)), source.choice(_OF_OTHER_TYPES))


def _out_of_range(good: dict[str, Any], schema: Any, source: random.Random) -> Mutation | None:
    path = source.choice([path for path in _paths(good) if not isinstance(_at(good, path), dict | list)])
    value = _at(good, path)
    return _with(good, path, source.choice(_STRINGS if isinstance(value, str) else _OUT_OF_RANGE))


def _doubled(good: dict[str, Any], schema: Any, source: random.Random) -> Mutation | None:
    lists = [path for path in _paths(good) if isinstance(_at(good, path), list) and _at(good, path)]
    if not lists:
        return None
    path = source.choice(lists)
    items = _at(good, path)
    return _with(good, path, [*items, copy.deepcopy(source.choice(items))])


def _added(good: dict[str, Any], schema: Any, source: random.Random) -> Mutation | None:
    """A field the schema knows and the manifest has not: of the right type most of the time."""
    places = [(path, part) for path, part in _schemas(good, schema, ()) if part.get("properties")]
    if not places:
        return None
    path, part = source.choice(places)
    free = sorted(set(part["properties"]) - set(_at(good, path)) - {"status"})
    if not free:
        return None
    key = source.choice(free)
    value = source.choice(_OF_OTHER_TYPES) if source.random() < 0.2 else _value_of(part["properties"][key], source, 0)
    return _with(good, (*path, key), value)


def _value_of(schema: dict[str, Any], source: random.Random, depth: int) -> Any:
    if schema.get("enum") and source.random() < 0.8:
        return source.choice(schema["enum"])
    if schema.get("x-kubernetes-int-or-string"):
        return source.choice([1, "1", "100m", "1Gi", "25%", -1, "x", "1 Gi"])
    kind = schema.get("type")
    if kind == "object":
        properties, extra = schema.get("properties", {}), schema.get("additionalProperties")
        if not properties and isinstance(extra, dict):
            return {source.choice(["a", "a.b/c", "ä"]): _value_of(extra, source, depth + 1)}
        wanted = set(schema.get("required", ())) if source.random() < 0.9 else set()
        if depth < 3 and properties:
            wanted |= set(source.sample(sorted(properties), min(2, len(properties))))
        return {key: _value_of(properties[key], source, depth + 1) for key in sorted(wanted) if key in properties}
    if kind == "array":
        return [_value_of(schema["items"], source, depth + 1) for _ in range(source.choice([0, 1, 1, 2]))]
    if kind == "boolean":
        return source.random() < 0.5
    if kind in ("integer", "number"):
        return source.choice([0, 1, 2, 5, 50, 100, *_OUT_OF_RANGE])
    return source.choice(["a", "abc", "x-1", "hf://a/b", "2026-01-02T03:04:05Z", "1h30m", *_STRINGS])


def _with(good: dict[str, Any], path: Path, value: Any) -> Mutation:
    changed = _replaced(good, path, copy.deepcopy(value))
    assert changed is not None
    return Mutation(f"{_words(path)} = {value!r}", changed)


def _replaced(good: dict[str, Any], path: Path, value: Any) -> dict[str, Any] | None:
    changed = copy.deepcopy(good)
    try:
        _at(changed, path[:-1])[path[-1]] = value
    except (KeyError, IndexError, TypeError):
        return None
    return changed


def _paths(value: Any, path: Path = ()) -> list[Path]:
    """Every field below the root, but not what says which kind it is."""
    found = [path] if path and path not in (("apiVersion",), ("kind",), ("metadata", "namespace")) else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in items:
        found += _paths(one, (*path, key))
    return found


def _schemas(value: Any, schema: dict[str, Any], path: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    if isinstance(value, dict):
        if path:
            yield path, schema
        for key, one in value.items():
            yield from _schemas(one, schema.get("properties", {}).get(key, {}), (*path, key))
    elif isinstance(value, list):
        for index, one in enumerate(value):
            yield from _schemas(one, schema.get("items", {}), (*path, index))


def _at(value: Any, path: Path) -> Any:
    for key in path:
        value = value[key]
    return value


def _words(path: Path) -> str:
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path).lstrip(".")

"""Any section kubernetes that is taken: manifests hold together, `check` has nothing to say, bytes stay the same."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from clusters import CAPACITIES, CLUSTER, IMAGE, LONG, STORAGES, loaded
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_rendered_objects import KARPENTERS, KINDS, require_checked, require_schemas, require_whole

from coremill.config.kubernetes_section import KubernetesSection
from coremill.hardware.instances import instance_named
from coremill.hardware.pods import room_for_a_pod
from coremill.k8s.render import render_objects

TYPES = [
    "c7i.8xlarge",
    "m7i.16xlarge",
    "c8i.24xlarge",
    "r8i.48xlarge",
    "c7i.metal-48xl",
    "m7i-flex.8xlarge",
    "r7iz.32xlarge",
]
LONGEST_JOB = 46  # of 200 pods


def labels(longest: int) -> st.SearchStrategy[str]:
    """Names as DNS takes them, the longest and the shortest among them."""
    drawn = st.from_regex(re.compile(rf"[a-z]([-a-z0-9]{{0,{longest - 2}}}[a-z0-9])?", re.ASCII), fullmatch=True)
    return st.one_of(drawn, st.sampled_from(["a", "on", "x" * longest]))


names = st.one_of(labels(63), st.sampled_from(["a.b", "1.14", "0", "x" * 250]))
# Each key on its own; keys that need each other are drawn together below.
SINGLE: dict[str, st.SearchStrategy[Any]] = {
    "image": st.sampled_from([IMAGE, "coremill:v1", f"example.com:5000/a/b@sha256:{'0' * 64}"]),
    "name": labels(LONGEST_JOB),
    "namespace": st.one_of(labels(63), st.sampled_from(["default", "1st"])),
    "cluster": st.sampled_from(["demo", "Prod_1"]),
    "role": st.sampled_from(["KarpenterNodeRole-demo", "eks/nodes"]),
    "claim": names,
    "mount_path": st.sampled_from(["/fsx", "/mnt/my-volume", "/data/a.b/c_d", "/tmp/volume"]),
    "make_folder": st.booleans(),
    "user_id": st.integers(1000, 2**31 - 1),
    "queue": st.one_of(labels(63), st.sampled_from(["a.b", "0"])),
    "make_queue": st.booleans(),
    "efa": st.booleans(),
    "ami": st.sampled_from(["al2023@latest", "al2023@v20260801", "bottlerocket@v1.49.0"]),
    "token_secret": names,
    "secrets": st.lists(names, max_size=3, unique=True),
    "storage_gib": st.sampled_from([1200, 2400, 48000]),
    "zone": st.sampled_from(["us-west-2a", "us-west-2-lax-1a", "cn-north-1b", "us-gov-west-1a"]),
}


@st.composite
def sections(draw: st.DrawFn) -> dict[str, Any]:
    given_keys = draw(st.sets(st.sampled_from(sorted(SINGLE))))
    section = {"image": IMAGE, **CLUSTER} | {key: draw(SINGLE[key]) for key in sorted(given_keys)}
    section |= draw(st.sampled_from(list(KINDS.values()))) | {"karpenter": draw(st.sampled_from(KARPENTERS))}
    section = draw(st.sampled_from(list(STORAGES.values()))) | section
    section |= draw(st.sampled_from(list(CAPACITIES.values())))
    if section["karpenter"] == "1.14" and draw(st.booleans()):
        section["placement_group"] = "near-each-other"
    types = draw(st.lists(st.sampled_from(TYPES), min_size=1, max_size=3, unique=True))
    rooms = [room_for_a_pod(instance_named(name)) for name in types]
    section["instances"] = types
    if draw(st.booleans()):
        section["cpus"] = 2 * draw(st.integers(1, min(cpus for cpus, _ in rooms) // 2))
        section["memory_gib"] = draw(st.integers(4, min(gib for _, gib in rooms)))
    if draw(st.booleans()):
        section["metrics_namespace"] = draw(labels(63))
    if draw(st.booleans()):
        section |= {"pod_monitor": True, "pod_monitor_labels": draw(st.sampled_from([{}, {"release": "on"}]))}
    return section


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COREMILL_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@given(section=sections(), nodes=st.integers(1, 200))
@settings(max_examples=400 if LONG else 25, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_section_that_is_taken(tmp_path: Path, section: dict[str, Any], nodes: int) -> None:
    settings = {"fleet__nodes": nodes, "fleet__instance": None}
    if {"metrics_namespace", "pod_monitor"} & set(section):
        settings["run__metrics_port"] = 1024 + nodes
    rendered, again = (render_objects(loaded(tmp_path, section, **settings)) for _ in range(2))
    require_whole(rendered)
    require_schemas(rendered)
    require_checked(rendered)
    assert json.dumps(rendered.objects) == json.dumps(again.objects) and rendered.notes == again.notes
    if LONG:  # of the same objects: slow, and seen in test_rendered_objects too
        assert rendered.to_yaml() == again.to_yaml()


def test_every_key_of_the_section_is_drawn() -> None:
    together = {"kind", "trainer", "karpenter", "instances", "cpus", "memory_gib", "placement_group"}
    together |= {"metrics_namespace", "pod_monitor", "pod_monitor_labels"}
    together |= {key for values in (*STORAGES.values(), *CAPACITIES.values()) for key in values}
    assert set(SINGLE) | together == set(KubernetesSection.model_fields)

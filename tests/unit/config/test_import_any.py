"""Any subset of the fields of accelerate, DeepSpeed or TrainingArguments: no key is lost, and the output loads."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coremill.errors import InputError
from tiers import IS_LONG
from unit.config.brought import (
    accelerate_fields,
    accelerate_section_fields,
    deepspeed_fields,
    imported,
    loaded,
    offload_fields,
    trainer_fields,
    zero_fields,
)

WORDS = [
    "auto",
    "no",
    "NO",
    "bf16",
    "fp16",
    "cosine",
    "adamw_torch",
    "steps",
    "epoch",
    "FULL_SHARD",
    "cpu",
    "all",
    "-1",
]
values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 10**12),
    st.floats(allow_nan=True),
    st.sampled_from(WORDS),
    st.text(max_size=12),
    st.lists(st.one_of(st.text(max_size=5), st.integers(0, 9)), max_size=3),
    st.dictionaries(st.text(max_size=5), st.integers(0, 9), max_size=2),
)


def some_of(names: list[str]) -> st.SearchStrategy[dict[str, Any]]:
    return st.dictionaries(st.sampled_from(sorted(set(names))), values, max_size=12)


@st.composite
def accelerate_files(draw: st.DrawFn) -> dict[str, Any]:
    kinds = ["NO", "MULTI_CPU", "FSDP", "DEEPSPEED", "XLA", "nonsense"]
    tree = {**draw(some_of(accelerate_fields())), "distributed_type": draw(st.sampled_from(kinds))}
    for section, names in accelerate_section_fields().items():
        if draw(st.booleans()):
            tree[section] = draw(some_of(names))
    return tree


@st.composite
def deepspeed_files(draw: st.DrawFn) -> dict[str, Any]:
    zero = draw(some_of(zero_fields())) | {"stage": draw(st.sampled_from([0, 1, 2, 3, "auto", "x"]))}
    zero["offload_optimizer"] = draw(some_of(offload_fields()))
    return {**draw(some_of(deepspeed_fields())), "zero_optimization": zero}


trainer_files = some_of(trainer_fields()).map(lambda tree: {"output_dir": "out", **tree})


@settings(
    max_examples=200 if IS_LONG else 40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(tree=st.one_of(accelerate_files(), deepspeed_files(), trainer_files))
def test_no_key_is_lost_and_the_output_loads(tmp_path: Path, tree: dict[str, Any]) -> None:
    path = tmp_path / "brought.json"
    path.write_text(json.dumps(tree))
    try:
        found = imported(str(path))
    except InputError as error:  # of accelerate: ranks that cannot be
        assert error.do and "distributed_type" in tree
        return
    for name in leaves(tree):
        assert re.search(rf"(?<!\w){re.escape(name)}(?!\w)", found.text), (name, found.text)
    loaded(tmp_path, found.text)
    assert imported(str(path)).text == found.text
    json.loads(found.as_json)


def leaves(tree: dict[str, Any]) -> list[str]:
    return [
        inner
        for name, value in tree.items()
        for inner in ([name, *leaves(value)] if isinstance(value, dict) else [name])
        if re.fullmatch(r"\w+", inner, re.ASCII)
    ]

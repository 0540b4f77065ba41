"""What is shown loads again to the same config; JSON Schema and loader agree; docs and examples are current."""

from __future__ import annotations

import copy
import string
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ruamel.yaml import YAML

from coremill.config.keys import Key, keys
from coremill.config.load import load_config
from coremill.config.reference import render_reference
from coremill.config.schema import RunConfig
from coremill.config.show import json_schema, scalar_text, show
from coremill.config.task_rules import ENCODERS, READ_BY
from coremill.errors import ConfigError
from tiers import IS_LONG

ROOT = Path(__file__).parents[3]
EXAMPLES = sorted((ROOT / "examples").rglob("*.yaml"))

texts = st.one_of(
    st.text(min_size=1, max_size=12),
    st.text(string.ascii_letters + "0123456789.:/#-*&!%@`'\"{}[], \n\t\\", min_size=1, max_size=12),
    st.sampled_from(
        ["null", "~", "true", "yes", "1", "2e-5", "0x1F", "2026-01-01", "-", "=", "<<", ".inf", "---", "1_0"]
    ),
    st.sampled_from(["a: b", "a #b", " a ", "def ", "\ufeff", "\x85", "\u2028", "\U0001f642"]),
)
numbers = st.floats(min_value=1e-300, max_value=1e300, allow_nan=False)
scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), texts)
trees = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3), max_leaves=8
)


FORMS = {
    "model.code_sha256": ["0" * 64, "0a1b" * 16],
    "kubernetes.reservation": ["cr-0123456789abcdef0"],
    "kubernetes.zone": ["us-west-2a", "us-west-2-lax-1a"],
    "kubernetes.file_system": ["fs-0123456789abcdef0"],
    "kubernetes.subnet": ["subnet-0123456789abcdef0"],
    "kubernetes.mount_path": ["/fsx", "/mnt/my-volume"],
    "kubernetes.ami": ["auto", "al2023@v20260801"],
}
ITEMS = {
    "run.trackers": st.sampled_from(["tensorboard", "wandb", "mlflow"]),
    "kubernetes.security_groups": st.sampled_from(["sg-0123456789abcdef0", "sg-01"]),
}


def values_for(key: Key) -> st.SearchStrategy[Any]:
    """Any good value of a key."""
    low = key.bounds.get("exclusiveMinimum", key.bounds.get("minimum", 0))
    parts: list[st.SearchStrategy[Any]] = [st.sampled_from(key.choices)] if key.choices else []
    kinds = {
        "integer": st.integers(int(low) + 1, 10**6),
        "number": st.floats(1e-12, 0.999) if "exclusiveMaximum" in key.bounds else numbers,
        "boolean": st.booleans(),
        "string": texts if key.form is None else st.sampled_from(FORMS.get(key.dotted, ["30s", "10m", "1.5h"])),
        "array": st.lists(ITEMS.get(key.dotted, texts.filter(bool)), max_size=3),
        "object": st.dictionaries(texts, trees, max_size=3).map(lambda shape: {**shape, "model_type": "llama"}),
        "null": st.none(),
    }
    return st.one_of(*parts, *(kinds[kind] for kind in sorted(key.kinds)))


@st.composite
def run_files(draw: st.DrawFn) -> dict[str, Any]:
    """A run file with some of the keys, made to keep the rules between keys."""
    chosen = draw(st.sets(st.sampled_from(sorted(keys()))))
    tree: dict[str, Any] = {}
    for dotted in sorted(chosen):
        key = keys()[dotted]
        level = tree.setdefault(key.section, {}) if key.section else tree
        level[key.name] = draw(values_for(key))
    train, data, model = (tree.setdefault(name, {}) for name in ("train", "data", "model"))
    train["steps"] = draw(st.integers(1, 10**6))
    train["epochs"] = None
    train["warmup_steps"] = draw(st.integers(0, train["steps"] - 1))
    if train.get("warmup_share") is not None:
        train["warmup_steps"] = 0
    train |= {"minimum_learning_rate": train.get("learning_rate", 2.0e-5) / 2, "schedule": "warmup-stable-decay"}
    train["decay_share"] = draw(st.none() | st.floats(1e-12, 1 - (train.get("warmup_share") or 0)))
    train["tokens_per_step"] = data.get("sequence_length", 512) * draw(st.integers(1, 8))
    data |= {"evaluation_split": None, "split": "train", "evaluation_source": None, "evaluation_fraction": 0.25}
    evaluation = tree.get("evaluation", {})
    if evaluation.get("keep_best") or evaluation.get("stop_after"):
        evaluation["every_steps"] = evaluation.get("every_steps") or 10
    if cluster := tree.get("kubernetes"):
        cluster |= {"image": draw(texts), "karpenter": "none", "placement_group": None}
        cluster |= {"storage": "claim", "cpus": "auto", "instances": []}
        for key in ("pod_monitor", "pod_monitor_labels", "metrics_namespace"):  # they go with run.metrics_port
            cluster.pop(key, None)
    if {"metrics_host", "metrics_port"} & tree.get("run", {}).keys():
        host = draw(st.sampled_from(["127.0.0.1", "::1", "0.0.0.0"]))
        tree["run"] |= {"metrics_host": host, "metrics_port": draw(st.integers(1024, 65535))}
    if train.get("update") == "inside":
        tree.get("numerics", {}).pop("on_non_finite", None)
    if "lora" in tree:
        tree["lora"]["rank"] = tree["lora"].get("rank") or 16
        tree["lora"]["target_modules"] = tree["lora"].get("target_modules") or None  # an empty list is refused
        train["freeze"] = []
    data["sources"] = None  # its items are mappings, with rules of their own
    # One form of examples: text.
    data |= {"messages_column": None, "prompt_column": None, "answer_column": None}
    if model.get("trust_remote_code"):
        model |= {"name": "some/model", "revision": "0" * 40, "config": None}
    if model.get("config") is not None:
        model |= {"weights": "random", "name": "built-in"}
        tree["tokenizer"] = draw(texts)
    return with_keys_of_the_task(tree)


def with_keys_of_the_task(tree: dict[str, Any]) -> dict[str, Any]:
    """Less what its task does not read, and what an encoder's needs."""
    task = tree.get("task", "causal-lm")
    for dotted, readers in READ_BY.items():
        section, _, name = dotted.partition(".")
        if task not in readers:
            tree.get(section, {}).pop(name, None)
    if task in ENCODERS:
        if tree["model"].get("config") is None:
            tree["model"]["name"] = "some/encoder"
        tree["data"] |= {"source": "train.jsonl", "sequence_length": 512}
        for name in (
            "text_columns",
            "label_column",
            "question_column",
            "context_column",
            "answers_column",
            "id_column",
        ):
            tree["data"].pop(name, None)
        tree["data"] |= {"doc_stride": 100} if task == "question-answering" else {}
        tree.pop("sample", None)
    elif "sample" in tree:
        tree["sample"].pop("context", None)
    return tree


@given(tree=run_files())
@settings(
    max_examples=60 if IS_LONG else 12,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_what_is_shown_loads_again(tmp_path: Path, tree):
    path = tmp_path / "run.yaml"
    path.write_text(
        "".join(f"{scalar_text(name)}: {scalar_text(value)}\n" for name, value in tree.items()), encoding="utf-8"
    )
    first = load_config(path)
    assert first.config == RunConfig.model_validate(tree)
    path.write_text(show(first), encoding="utf-8")
    second = load_config(path)
    assert second.config == first.config
    assert show(second).splitlines() != [] and all(origin.kind == "file" for origin in second.origins.values())


@given(text=st.text(max_size=60))
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_text_gives_a_config_or_a_message(tmp_path: Path, text):
    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="utf-8")
    for overrides in (["train.steps=1"], [text]):
        try:
            load_config(path, overrides)
        except ConfigError as error:
            assert str(error).encode("utf-8")


@given(name=st.sampled_from(sorted(keys())), value=trees)
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_value_gives_a_config_or_a_message(tmp_path: Path, name, value):
    section, _, inner = name.rpartition(".")
    body = f"{section}:\n  {inner}: {scalar_text(value)}\n" if section else f"{inner}: {scalar_text(value)}\n"
    path = tmp_path / "run.yaml"
    path.write_text(body, encoding="utf-8")
    try:
        load_config(path)
    except ConfigError as error:
        assert all(problem.where and problem.do for problem in error.problems)


def test_every_value_has_its_origin_beside_it(tmp_path: Path):
    path = tmp_path / "run.yaml"
    path.write_text("train:\n  steps: 5\n")
    rows = {row.partition(":")[0].strip(): row for row in show(load_config(path, ["data.column=body"])).splitlines()}
    assert rows["steps"].endswith("  # run.yaml:2")
    assert rows["column"].endswith("  # --set")
    assert rows["learning_rate"].split("#")[0].split() == ["learning_rate:", "2.0e-05"]
    assert rows["learning_rate"].endswith("  # default")


def plain(path: Path) -> Any:
    return YAML(typ="safe", pure=True).load(path)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_load_and_keep_to_the_json_schema(path: Path):
    loaded = load_config(path)
    jsonschema.validate(plain(path), json_schema())
    command = loaded.text.splitlines()[0]
    assert command == f"# coremill train {path.relative_to(ROOT)}"


def test_each_key_of_an_example_has_a_comment():
    for path in EXAMPLES:
        in_shape = False
        for row in path.read_text().splitlines():
            depth = len(row) - len(row.lstrip())
            in_shape = in_shape and depth > 2 or row.startswith("  config:")
            if row and not row.startswith("#") and not row.rstrip().endswith(":") and not in_shape:
                assert " # " in row, f"{path.name}: {row}"


def test_the_json_schema_refuses_what_the_loader_refuses():
    schema = json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    assert schema["title"] == "coremill run file" and schema["$schema"].endswith("2020-12/schema")
    good = plain(EXAMPLES[0])
    for section, key, value in [("train", "stepz", 5), ("train", "steps", "5"), ("parallel", "engine", "sharded")]:
        bad = copy.deepcopy(good)
        bad.setdefault(section, {})[key] = value
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(bad, schema)
    for fine in (None, {"train": None}, {"model": "x"}, {"model": {"name": "x"}}):
        jsonschema.validate(fine, schema)


def test_the_shown_built_in_example_keeps_to_the_json_schema():
    jsonschema.validate(YAML(typ="safe", pure=True).load(show(load_config(None))), json_schema())


def test_the_reference_page_is_current():
    page = (ROOT / "docs" / "config.md").read_text(encoding="utf-8")
    assert page == render_reference(), "run: python -m coremill.config.reference > docs/config.md"


def test_the_reference_page_has_every_key():
    page = render_reference()
    assert all(f"| `{dotted}` |" in page for dotted in keys())

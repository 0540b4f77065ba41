"""Encoders: the same numbers however the work is shared, and the same as transformers' own loss."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import Any

import pytest

import ranks
from coremill.config.schema import RunConfig
from encoder_training import encode, train_encoder
from tiny_encoders import SHAPES, make_encoder, questions, sentences, write_jsonl

PER_STEP = 8
# BERT is trained in every way below; the others are as they are in transformers, too: COREMILL_LONG_TESTS=1 runs them.
FAMILIES = SHAPES if os.environ.get("COREMILL_LONG_TESTS") else ("distilbert", "roberta")
STILL = {"dropout": 0.0, "attention_dropout": 0.0}


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("encoders")
    for family in SHAPES:
        make_encoder(folder / family, family)
    ranks.run_ranks(make_pretrained, 1, folder=folder / "pretrained")
    write_jsonl(folder / "pairs.jsonl", sentences(120, pairs=True, names=True))
    write_jsonl(folder / "scores.jsonl", [{**row, "label": len(row["text"]) / 50} for row in sentences(90)])
    write_jsonl(folder / "questions.jsonl", questions(90, unanswerable=0.2))
    return {"folder": folder, "rows": {}, "references": {}}


def make_pretrained(world: Any, *, folder: Path) -> None:
    """By a rank: torch need not be imported here."""
    make_encoder(folder, "bert", weights=True)


def config_of(scene: dict[str, Any], task: str, family: str = "bert", **sections: Any) -> dict[str, Any]:
    folder: Path = scene["folder"]
    data: dict[str, Any] = {"sequence_length": 48, "evaluation_fraction": 0.2}
    if task == "question-answering":
        data |= {"source": str(folder / "questions.jsonl"), "doc_stride": 16}
    elif task == "regression":
        data |= {"source": str(folder / "scores.jsonl")}
    else:
        data |= {"source": str(folder / "pairs.jsonl"), "text_columns": ["sentence1", "sentence2"]}
    return {
        "model": {"name": str(folder / family), **STILL, **sections.pop("model", {})},
        "task": "sequence-classification" if task == "regression" else task,
        "data": data,
        "train": {
            "steps": 20,
            "samples_per_step": PER_STEP,
            "learning_rate": 1e-3,
            "weight_decay": 0.01,
            **sections.pop("train", {}),
        },
        **sections,
    }


def run(scene: dict[str, Any], config: dict[str, Any], world_size: int, **settings: Any) -> list[dict[str, Any]]:
    key = json.dumps([config["data"], config["train"]["samples_per_step"]])
    if key not in scene["rows"]:
        checked = RunConfig.model_validate(config)
        scene["rows"][key] = encode(checked, scene["folder"] / "bert", scene["folder"] / "cache")
    return ranks.run_ranks(train_encoder, world_size, config=config, rows=scene["rows"][key], **settings)


def reference(scene: dict[str, Any], config: dict[str, Any], **settings: Any) -> dict[str, Any]:
    key = json.dumps([config, settings], sort_keys=True)
    if key not in scene["references"]:
        scene["references"][key] = run(scene, config, 1, evaluate=True, **settings)[0]
    return scene["references"][key]


def assert_same(results: list[dict[str, Any]], whole: dict[str, Any], relative: float = 1e-5) -> None:
    for result in results:
        assert result["losses"] == pytest.approx(whole["losses"], rel=relative)
        assert result["norms"] == pytest.approx(whole["norms"], rel=100 * relative)
        assert result["tokens"] == whole["tokens"]


WAYS = set(itertools.product((1, 2, 4), ("replicate", "shard"), (8, 2))) - {(1, "replicate", 8)}  # the reference itself


@pytest.mark.parametrize(("world_size", "engine", "micro_batch_rows"), sorted(WAYS))
@pytest.mark.parametrize("task", ["sequence-classification", "question-answering"])
def test_ranks_engines_and_accumulation_give_the_same_20_losses(scene, task, world_size, engine, micro_batch_rows):
    config = config_of(scene, task)
    results = run(
        scene, config, world_size, engine=engine, micro_batch_rows=min(micro_batch_rows, 8 // world_size), evaluate=True
    )
    whole = reference(scene, config)
    assert_same(results, whole)
    for result in results:
        assert result["metrics"] == pytest.approx(whole["metrics"], abs=1e-6)
        assert result["evaluation_loss"] == pytest.approx(whole["evaluation_loss"], rel=1e-5)
    assert sorted(results[0]["files"]) == sorted(whole["files"])
    assert json.loads(results[0]["files"]["predictions.json"])
    assert all(not result["files"] for result in results[1:])


@pytest.mark.parametrize(
    "settings",
    [
        {"world_size": 2, "engine": "shard", "through_memory": False},
        {"world_size": 2, "engine": "shard", "checkpointing": True},
        {"world_size": 2, "engine": "replicate", "checkpointing": True},
        {"world_size": 3, "engine": "shard", "micro_batch_rows": 2},
        {"world_size": 3, "engine": "replicate", "micro_batch_rows": 3},
    ],
    ids=lambda settings: "-".join(f"{key}={value}" for key, value in settings.items()),
)
def test_every_other_way_to_share_gives_the_same_losses(scene, settings):
    """Three ranks of eight rows: one has fewer, and where it has none left it makes a pass of a filler."""
    config = config_of(scene, "question-answering")
    assert_same(run(scene, config, **{"micro_batch_rows": 4, **settings}), reference(scene, config))


@pytest.mark.parametrize("engine", ["replicate", "shard"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("task", ["sequence-classification", "question-answering"])
def test_every_family_trains_alike_in_both_engines(scene, task, family, engine):
    config = config_of(scene, task, family)
    results = run(scene, config, 2, engine=engine, micro_batch_rows=4, steps=5)
    assert_same(results, reference(scene, config, steps=5))


def test_numbers_to_come_close_to(scene):
    config = config_of(scene, "regression")
    whole = reference(scene, config)
    assert set(whole["metrics"]) == {"pearson", "spearman"}
    assert_same(run(scene, config, 2, engine="shard", micro_batch_rows=4), whole)


@pytest.mark.parametrize("engine", ["replicate", "shard"])
def test_a_head_that_the_files_lack_is_the_same_for_any_number_of_ranks(scene, engine):
    config = config_of(scene, "sequence-classification", "pretrained")
    whole = reference(scene, config, steps=4)
    assert whole["drawn"] == ["classifier.weight", "classifier.bias"]
    assert_same(run(scene, config, 3, engine=engine, micro_batch_rows=4, steps=4), whole)


@pytest.mark.parametrize("engine", ["replicate", "shard"])
@pytest.mark.parametrize(
    "changes",
    [{"lora": {"rank": 4}}, {"train": {"freeze": ["*"]}}],
    ids=["lora", "freeze"],
)
def test_the_head_is_trained_whole_whatever_else_is_frozen(scene, changes, engine):
    config = config_of(scene, "sequence-classification", "pretrained", **changes)
    whole = reference(scene, config, steps=6)
    heads = [name for name in whole["trained"] if name.startswith("classifier")]
    assert len(heads) == 2 and whole["losses"][0] != whole["losses"][-1]
    if "train" in changes:
        assert whole["trained"] == heads
    assert_same(run(scene, config, 2, engine=engine, micro_batch_rows=4, steps=6), whole)


def test_dropout_differs_between_ranks_and_repeats_with_the_same_ranks(scene):
    config = config_of(scene, "question-answering", model={"dropout": 0.2, "attention_dropout": 0.2})
    first, again = (run(scene, config, 2, engine="replicate", micro_batch_rows=4, steps=6) for _ in range(2))
    assert [result["losses"] for result in first] == [result["losses"] for result in again]
    assert first[0]["random_state"] != first[1]["random_state"]
    assert first[0]["losses"] != pytest.approx(reference(scene, config_of(scene, "question-answering"))["losses"][:6])


def test_little_is_padding(scene):
    assert reference(scene, config_of(scene, "sequence-classification"))["padding"] < 0.25  # of tiny steps


def own_losses(world: Any, *, config: dict[str, Any], rows: dict[str, Any]) -> dict[str, Any]:
    """The first step's loss by transformers' own forward, with labels, padded to the longest."""
    import torch
    from transformers import AutoConfig, AutoModelForQuestionAnswering, AutoModelForSequenceClassification

    from coremill.data.encoded import EncodedRows
    from coremill.data.encoded_split import EncodedSplit
    from coremill.data.grouped_order import GroupedOrder

    data = EncodedRows.from_json(rows)
    split = EncodedSplit(data, "train")
    row_ids = GroupedOrder(split.lengths, seed=7, rows_per_step=PER_STEP).rows(0, PER_STEP)
    ids, mask, types = split.padded(row_ids, 48)
    torch.manual_seed(0)
    shape = AutoConfig.from_pretrained(config["model"]["name"], hidden_dropout_prob=0.0, attention_probs_dropout_prob=0)
    answers = config["task"] == "question-answering"
    model = (AutoModelForQuestionAnswering if answers else AutoModelForSequenceClassification).from_config(shape)
    targets = {name: torch.from_numpy(values[row_ids]) for name, values in split.targets.items()}
    inputs = {"input_ids": torch.from_numpy(ids), "attention_mask": torch.from_numpy(mask.astype("int64"))}
    if types is not None:
        inputs["token_type_ids"] = torch.from_numpy(types)
    with torch.no_grad():
        theirs = float(model(**inputs, **targets).loss)

    from coremill.config.schema import RunConfig
    from coremill.tasks.base import make_task

    task = make_task(RunConfig.model_validate(config)).training_on(data)
    task.prepare(model, fused=True)
    loader = task.make_loader(
        data, seed=7, rows_per_step=PER_STEP, micro_batch_rows=3, accumulation_steps=3, rank=0, world_size=1
    )
    with torch.no_grad():
        ours = sum(float(task.loss(model, batch, 1 / PER_STEP)) for batch in loader.next_step().batches)
    return {"ours": ours, "theirs": theirs}


@pytest.mark.parametrize("task", ["sequence-classification", "question-answering"])
def test_the_loss_is_that_of_transformers(scene, task):
    config = config_of(scene, task)
    reference(scene, config)
    rows = scene["rows"][json.dumps([config["data"], PER_STEP])]
    (found,) = ranks.run_ranks(own_losses, 1, config=config, rows=rows)
    assert found["ours"] == pytest.approx(found["theirs"], rel=1e-5)

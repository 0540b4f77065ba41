"""A task is chosen by its name, in one place; what it is made of fits together."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from coremill.config.schema import DataSection, RunConfig
from coremill.registry import find, names
from coremill.tasks.base import make_task, rows_from_json
from training import make_packed


@pytest.mark.parametrize("name", names("coremill.tasks"))
def test_a_task_names_what_it_measures(name: str) -> None:
    task = make_task(RunConfig(task=name))
    assert type(task) is find("coremill.tasks", name)
    assert task.metrics and len({metric.name for metric in task.metrics}) == len(task.metrics)


def test_metrics_that_follow_from_the_loss_are_as_many_as_are_named() -> None:
    task = make_task(RunConfig())
    assert len(task.training().metrics(0.5)) == len(task.metrics)


def test_the_default_is_the_first_of_ours() -> None:
    assert RunConfig().task == names("coremill.tasks")[0] == "causal-lm"


def test_rows_travel_as_json(tmp_path: Path) -> None:
    rows = make_packed(tmp_path / "rows", rows=3, length=8, vocabulary=16)
    assert rows_from_json("causal-lm", json.loads(json.dumps(rows.to_json()))) == rows
    assert [file.is_file() for file in rows.files()] == [True, True]


def test_loaders_take_their_settings_from_the_run_file(tmp_path: Path) -> None:
    rows = make_packed(tmp_path / "rows", rows=3, length=8, vocabulary=16)
    for across in (True, False):
        task = make_task(RunConfig(data=DataSection(attention_across_documents=across))).training()
        loader = task.make_loader(
            rows, seed=1, rows_per_step=2, micro_batch_rows=2, accumulation_steps=1, rank=0, world_size=1
        )
        (batch,) = loader.next_step().batches
        assert (batch.position_ids is None) == across

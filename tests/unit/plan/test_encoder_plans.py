"""Plans of runs that count in samples of different lengths."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from coremill.config.schema import RunConfig
from coremill.hardware.instances import fleet_of
from coremill.plan.card import ModelCard, read_card, with_dropouts
from coremill.plan.known_length import with_steps
from coremill.plan.planner import make_plan
from coremill.plan.stored import plan_from_json
from coremill.plan.types import Plan, RowCount, RowLengths
from coremill.report.plan_screen import render_plan
from unit.plan.shapes import BERT_LARGE, fleet

CARD = read_card(config=BERT_LARGE, name="bert-large", model_class="AutoModelForQuestionAnswering")
LENGTHS = RowLengths(mean=170.0, longest=384)
AMX = fleet_of("1xc7i.8xlarge")


def config_of(**sections: Any) -> RunConfig:
    given = {"task": "question-answering", "data": {"sequence_length": 384}, "train": {"steps": 100}}
    return RunConfig.model_validate({**given, **sections})


def windows(rows: int = 88_000, lengths: RowLengths | None = LENGTHS) -> RowCount:
    return RowCount(rows=rows, row_tokens=384, is_estimate=False, words="", lengths=lengths)


def plan_of(rows: RowCount | None = None, card: ModelCard = CARD, **sections: Any) -> Plan:
    return make_plan(config_of(**sections), AMX, card, rows=rows)


def test_time_goes_by_the_mean_length_and_memory_by_the_longest() -> None:
    unknown, known = plan_of(), plan_of(windows())
    assert known.micro_batch_rows == unknown.micro_batch_rows and known.memory.steady_step == unknown.memory.steady_step
    assert known.step_seconds.compute < 0.55 * unknown.step_seconds.compute
    assert known.samples_per_second == pytest.approx(32 / known.step_seconds.total)
    assert known.tokens_per_second == pytest.approx(170 * 32 / known.step_seconds.total)
    shorter = plan_of(windows(lengths=RowLengths(mean=50.0, longest=96)))
    assert shorter.memory.peak.activations < 0.3 * known.memory.peak.activations
    assert shorter.sequence_length == 384  # what a row may have


def test_steps_come_from_the_windows() -> None:
    plan = plan_of(windows(), train={"epochs": 2, "steps": None})
    assert plan.steps == 2 * 88_000 // 32
    assert plan.steps_words == "2 epochs of 88,000 rows, 32 a step"
    # Rows cut shorter are as many samples.
    assert windows().of_length(192) == 88_000


def test_rows_that_are_known_later_lead_to_the_same_plan() -> None:
    """`coremill train` plans before it has read the data, `coremill plan` after it has counted it."""
    config = config_of()
    counted = make_plan(config, AMX, CARD, rows=windows())
    later = with_steps(make_plan(config, AMX, CARD), config, AMX, CARD, 100, LENGTHS)
    assert replace(later, attention=counted.attention) == counted


def test_attention_dropout_is_said_with_what_it_costs() -> None:
    one_rank = {"parallel": {"ranks_per_node": 1}}
    with_dropout = plan_of(windows(), **one_rank)
    without = plan_of(windows(), with_dropouts(CARD, hidden=None, attention=0.0), **one_rank)
    assert "model.attention_dropout: 0" in with_dropout.attention.reason
    assert "% of time more" in with_dropout.attention.reason
    assert without.memory.peak.activations < 0.6 * with_dropout.memory.peak.activations
    assert "rows of different lengths are computed together: 24 layers of 24 keep" in without.attention.reason
    one_by_one = plan_of(
        windows(), with_dropouts(CARD, hidden=0.0, attention=0.0), train={"steps": 1, "micro_batch_rows": 1}
    )
    assert one_by_one.attention.reason == "no matrix of tokens by tokens is kept"  # a row by itself has no padding


def test_no_words_no_logits() -> None:
    plan = plan_of(windows())
    assert plan.logits.value == "none" and plan.memory.peak.logits == 0
    assert CARD.head_flops_per_token == 0
    # Every token sees the whole row: twice the attention of a decoder of this shape.
    assert CARD.attention_flops_per_token(100) == 2 * replace(CARD, is_causal=True).attention_flops_per_token(100)
    assert plan.model_flops_per_token == pytest.approx(6 * CARD.matmul_parameters + 12 * 24 * 170 * 1024)


def test_json_has_samples_and_comes_back() -> None:
    plan = plan_of(windows())
    document = json.loads(json.dumps(plan.to_json()))
    assert document["row_lengths"] == {"mean": 170.0, "longest": 384}
    assert document["samples_per_second"] == pytest.approx(plan.samples_per_second)
    assert plan_from_json(document) == plan
    tokens = make_plan(RunConfig(), fleet(), read_card(config={"model_type": "llama", "num_hidden_layers": 2}))
    assert "samples_per_second" not in tokens.to_json() and "row_lengths" not in tokens.to_json()


def test_the_screen_counts_in_samples() -> None:
    console = Console(width=200, record=True, file=io.StringIO())
    plan = plan_of(windows())
    render_plan(plan.to_json(), {"name": "bert-large", "parameters": CARD.parameters}, console)
    text = console.export_text()
    assert f"{plan.samples_per_second:.2f} samples/s" in text and "tokens/s" in text
    console = Console(width=200, record=True, file=io.StringIO())
    render_plan(plan_of().to_json(), {"name": "bert-large"}, console)
    assert "as if all were as long as they may be" in console.export_text()


def test_tokens_per_step_are_not_spoken_of() -> None:
    plan = plan_of(windows(), train={"steps": 5, "samples_per_step": 100}, parallel={"ranks_per_node": 1})
    reason = plan.accumulation_steps.reason
    assert "tokens" not in reason and reason.startswith("100 rows per step over 1 rank")

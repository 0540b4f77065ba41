"""Which evaluation is best, how many came since, what a checkpoint carries on."""

from __future__ import annotations

import json
import math

import pytest

from coremill.config.schema import EvaluationSection, RunConfig
from coremill.errors import InputError
from coremill.tasks.base import LOSS, Metric, deciding_metric
from coremill.train.scores import Scores

ACCURACY = Metric("accuracy", "higher")


def scores_with(values: dict[int, float], metric: Metric = LOSS, *, steps: int = 100, **settings: object) -> Scores:
    section = EvaluationSection(every_steps=10, **settings)  # type: ignore[arg-type]
    scores = Scores(metric, section, rows=section.rows, steps=steps)
    for step, value in values.items():
        scores.add(step, {"loss": 1.0, metric.name: value})
    return scores


def test_each_metric_has_its_direction_and_of_equal_ones_the_earlier_is_best() -> None:
    values = {10: 0.5, 20: 0.25, 30: 0.75, 40: 0.25, 50: 0.75}
    assert scores_with(values).best_step == 20
    assert scores_with(values, ACCURACY).best_step == 30
    assert scores_with(values, ACCURACY).best_first([10, 20, 40]) == [10, 20, 40]
    assert scores_with({}).best_step is None


def test_what_is_no_number_is_never_best_and_counts_as_not_better() -> None:
    scores = scores_with({10: math.nan, 20: 2.0, 30: math.inf, 40: -math.inf}, stop_after=2)
    assert scores.best_step == 20
    assert scores.is_over()
    json.dumps(scores.state(40), allow_nan=False)
    assert scores_with({10: math.nan, 20: math.nan}, stop_after=2).is_over()


def test_nothing_of_an_evaluation_counts_whose_loss_is_no_number() -> None:
    scores = scores_with({10: 0.5}, ACCURACY, keep_best=True)
    for step, loss in ((20, math.nan), (30, math.inf)):
        scores.add(step, {"loss": loss, "accuracy": 0.9})
        assert scores.metrics_of(step) == {"loss": None, "accuracy": None}
    assert scores.best_step == 10 and not scores.must_keep(20)


def test_a_run_ends_after_so_many_without_a_better_one_across_continuations() -> None:
    first = scores_with({10: 3.0, 20: 2.0, 30: 2.5}, stop_after=2)
    assert not first.is_over()
    second = scores_with({}, stop_after=2)
    second.restore(json.loads(json.dumps(first.state(30))), 30)
    assert not second.is_over()
    second.add(40, {"loss": 2.0})  # as good is not better
    assert (
        second.why_over() == "of the last 2 evaluations none was better than step 20, loss 2 (evaluation.stop_after: 2)"
    )
    second.add(50, {"loss": 1.0})
    assert not second.is_over()


def test_evaluations_on_other_rows_are_kept_and_not_compared() -> None:
    first = scores_with({10: 1.0, 20: 2.0}, stop_after=2, keep_best=True, rows=8)
    again = scores_with({}, stop_after=2, keep_best=True, rows=64)
    again.restore(json.loads(json.dumps(first.state(20))), 20)
    assert again.best_step is None and again.best_kept([10, 20]) is None
    again.add(30, {"loss": 5.0})
    assert again.must_keep(30) and not again.is_over()
    again.add(40, {"loss": 6.0})
    assert not again.is_over() and again.metrics_of(10) == {"loss": 1.0}
    back = scores_with({}, rows=8)
    back.restore(again.state(40), 40)
    assert back.best_step == 10
    for each in (state := first.state(20))["scores"]:
        del each["rows"]  # of an older coremill
    again.restore(state, 20)
    assert again.best_step == 10


@pytest.mark.parametrize("changed", [{"n_best": 5}, {"max_answer_tokens": 4}, {"null_threshold": 1.5}])
def test_metrics_by_other_rules_are_not_compared_and_the_loss_is(changed: dict[str, float]) -> None:
    for metric, best in ((Metric("f1", "higher"), None), (LOSS, 10)):
        state = json.loads(json.dumps(scores_with({10: 0.9, 20: 0.9}, metric).state(20)))
        again = scores_with({}, metric, keep_best=True, **changed)
        again.restore(state, 20)
        assert again.best_step == best
        again.add(30, {"loss": 2.0, metric.name: 2.0})
        assert again.best_step == (30 if best is None else best)
        for each in state["scores"]:  # of an older coremill
            del each["n_best"], each["max_answer_tokens"], each["null_threshold"]
        again.restore(state, 20)
        assert again.best_step == 10


def test_the_last_step_ends_a_run_as_it_always_did() -> None:
    assert scores_with({10: 1.0, 20: 2.0, 30: 3.0}, steps=30, stop_after=2).why_over() is None


def test_a_step_that_is_best_has_to_be_kept_only_where_that_is_asked() -> None:
    assert scores_with({10: 2.0, 20: 1.0}, keep_best=True).must_keep(20)
    assert not scores_with({10: 1.0, 20: 2.0}, keep_best=True).must_keep(20)
    assert not scores_with({10: 2.0, 20: 1.0}).must_keep(20)
    assert scores_with({10: 1.0, 20: 2.0}, keep_best="loss").best_kept([20, 30]) == 20
    assert scores_with({10: 1.0}).best_kept([10]) is None


def test_a_step_saved_without_its_evaluation_is_evaluated_first() -> None:
    scores = scores_with({10: 1.0})
    again = scores_with({})
    again.restore(scores.state(20), 20)  # asked to stop in step 20
    assert again.is_missing(20) and not again.is_missing(10)
    again.add(20, {"loss": 1.0})
    assert not again.is_missing(20)
    again.restore(scores.state(15), 15)
    assert not again.is_missing(15)
    again.restore({}, 20)  # of an older coremill
    assert not again.is_missing(20) and again.best_step is None
    assert again.is_missing(100)  # without a step left, as ever
    assert not Scores(steps=0).is_missing(0) and not Scores(steps=0).is_due(0)


def test_the_metric_that_decides_is_the_named_one_or_the_tasks_main_one() -> None:
    def named(keep_best: bool | str) -> RunConfig:
        evaluation = EvaluationSection(every_steps=1, keep_best=keep_best)
        return RunConfig().model_copy(update={"evaluation": evaluation})

    assert deciding_metric(named(True)) == deciding_metric(named(False)) == Metric("perplexity", "lower")
    assert deciding_metric(named("loss")) == LOSS
    with pytest.raises(InputError, match="bleu is no metric of causal-lm") as refused:
        deciding_metric(named("bleu"))
    assert refused.value.why == "its evaluations give perplexity, loss"

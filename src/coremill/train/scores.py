"""How a run's evaluations compare: the best so far, how many came since, whether that ends the run. No torch here.

They are part of every checkpoint. A run that goes on from one knows the evaluations up to its step and no later ones,
so what was evaluated and then lost, or set aside, never counts. Every rank is given the same numbers (rank 0's): all
decide alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from coremill.config.schema import EvaluationSection
from coremill.tasks.base import LOSS, Metric

# With other ones the same outputs have other metrics; the loss is the same.
SCORING_KEYS = ("n_best", "max_answer_tokens", "null_threshold")


class Scores:
    """The evaluations of a run by step; one per run, on every rank."""

    def __init__(
        self,
        metric: Metric = LOSS,
        settings: EvaluationSection | None = None,
        *,
        rows: int | None = None,  # of an evaluation, at most (tasks.base.evaluated_rows); None: all there are
        steps: int = 0,  # the last one is always evaluated; 0: nothing is
    ) -> None:
        settings = settings or EvaluationSection()
        self.metric, self._steps = metric, steps
        self._every_steps, self._stop_after = settings.every_steps, settings.stop_after
        self.keeps_best = bool(settings.keep_best)
        self._way = {"rows": rows, **{name: getattr(settings, name) for name in SCORING_KEYS}}
        self._by_step: dict[int, dict[str, float | None]] = {}
        self._way_of: dict[int, dict[str, Any]] = {}  # how each was measured: those of another way are not compared
        self.best_step: int | None = None  # None before the first evaluation with a value
        self._since_best = 0  # evaluations
        self._missing: int | None = None  # a step that was saved, but asked to stop before it was evaluated

    def is_due(self, step: int) -> bool:
        """Whether this step is evaluated."""
        if not self._steps or not step:
            return False
        return step == self._steps or bool(self._every_steps and step % self._every_steps == 0)

    def is_missing(self, step: int) -> bool:
        """Whether a run that goes on after this step evaluates it first; without a step left to do it always does."""
        return bool(self._steps) and (step == self._missing or step == self._steps)

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take one evaluation in; numbers that are none are kept as None, all of them where the loss is one."""
        is_sound = math.isfinite(metrics.get("loss", 0.0))
        finite = {name: value if is_sound and math.isfinite(value) else None for name, value in metrics.items()}
        self._by_step[step], self._way_of[step] = finite, self._way
        self._missing = None
        self._compare()

    def metrics_of(self, step: int) -> Mapping[str, float | None]:
        """Empty where it was not evaluated."""
        return self._by_step.get(step, {})

    def best_first(self, steps: Iterable[int]) -> list[int]:
        """Those of these steps that have a value, measured as it is now, the best first; of equal ones the earlier."""
        values = {step: self.metrics_of(step).get(self.metric.name) for step in steps if self._is_comparable(step)}
        sign = 1.0 if self.metric.better == "lower" else -1.0
        return sorted((step for step in values if values[step] is not None), key=lambda s: (sign * values[s], s))  # type: ignore[operator]

    def _compare(self) -> None:
        self.best_step = best = next(iter(self.best_first(self._by_step)), None)
        self._since_best = sum(self._is_comparable(step) and (best is None or step > best) for step in self._by_step)

    def _is_comparable(self, step: int) -> bool:
        way = self._way_of.get(step)
        if way is None or self.metric != LOSS:
            return way == self._way
        return bool(way["rows"] == self._way["rows"])  # how answers are chosen is not in the loss

    def best_kept(self, steps: Iterable[int]) -> int | None:
        """Of these checkpoints: which stays whatever is newer; None: none has to."""
        return next(iter(self.best_first(steps)), None) if self.keeps_best else None

    def must_keep(self, step: int) -> bool:
        """Whether this step has to have a checkpoint whatever `checkpoint.every` says."""
        return self.keeps_best and self.best_step == step

    def why_over(self) -> str | None:
        """In words why the run ends before its last step; None: it does not."""
        best, since = self.best_step, self._since_best
        if self._stop_after is None or since < self._stop_after or self._steps in self._by_step:
            return None
        than = "none had a value" if best is None else f"none was better than step {best:,}, {self.in_words(best)}"
        count = "1 evaluation" if since == 1 else f"{since} evaluations"
        return f"of the last {count} {than} (evaluation.stop_after: {self._stop_after})"

    def is_over(self) -> bool:
        return self.why_over() is not None

    def in_words(self, step: int) -> str:
        """The metric that decides, with its value."""
        value = self.metrics_of(step).get(self.metric.name)
        return f"{self.metric.name.replace('_', ' ')} {'-' if value is None else format(value, '.5g')}"

    def state(self, step: int) -> dict[str, Any]:
        """For a checkpoint of this step."""
        return {
            "scores": [
                {"step": each, "metrics": metrics, **self._way_of[each]}
                for each, metrics in sorted(self._by_step.items())
            ],
            "is_due": self.is_due(step) and step not in self._by_step,
        }

    def restore(self, state: Mapping[str, Any], step: int) -> None:
        """What a checkpoint of this step has; one of an older coremill has nothing."""
        scores = {int(each["step"]): each for each in state.get("scores", ())}
        self._by_step = {step: dict(each["metrics"]) for step, each in scores.items()}
        self._way_of = {
            step: {name: each.get(name, now) for name, now in self._way.items()} for step, each in scores.items()
        }
        self._missing = step if state.get("is_due") else None
        self._compare()

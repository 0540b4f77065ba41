"""The metrics themselves, made from what the events of a run amount to: names, units, and what each one is.

Names follow Prometheus' rules: base units, `_total` for what only grows, `_ratio` for shares. All of them have a label
`run`, the name of the run folder. What is of the whole run is served by the first node alone, so that sums over nodes
are right; what is of a rank, by the node that the rank is on. A number that is not known yet is left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric

from coremill import __version__
from coremill.redaction import redact
from coremill.report.cost import cost_of
from coremill.report.events import Event
from coremill.report.metrics import metric_names
from coremill.report.page.live_run import LiveRun
from coremill.report.pauses import starts_again
from coremill.report.planned import planned_figures
from coremill.report.readers.console import RECENT_STEPS
from coremill.report.subject import subject_of
from coremill.report.tally import SPLIT, RankTally, RunTally


@dataclass
class Saves:
    """What was saved, counted through the whole run."""

    done: int = 0
    failed: int = 0
    last: dict[int, Event] = field(default_factory=dict)  # of each rank, that was saved

    def take(self, event: Event) -> None:
        """Rank 0 tells of all whether a step was saved."""
        if event.get("saved"):
            self.last[event.rank] = event
        if event.rank == 0:
            self.done += bool(event.get("saved"))
            self.failed += not event.get("saved")

    def slowest(self, name: str) -> float | None:
        """Of the ranks that saved the newest step, the largest number of this name."""
        newest = max((event.number("step") for event in self.last.values()), default=0.0)
        return max((e.number(name) for e in self.last.values() if e.number("step") == newest), default=None)


class MeteredRun(LiveRun):
    """A run that is followed, with what the tally does not keep."""

    def begin(self) -> None:
        """From the first event."""
        super().begin()
        self.saves = Saves()

    def take(self, event: Event) -> None:
        """Count one event in."""
        super().take(event)
        if event.kind == "save":
            self.saves.take(event)

    def config_text(self) -> str:
        """Of the run as it was started; empty where it is not there."""
        try:
            return (self.folder / "config.yaml").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""


class _Families:
    """Metrics by name, each with one value for each set of labels; values that are not known are passed over."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._made: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}

    def gauge(self, name: str, words: str, value: float | None, **labels: str) -> None:
        """A number that goes up and down."""
        self._add(GaugeMetricFamily, name, words, value, labels)

    def counter(self, name: str, words: str, value: float | None, **labels: str) -> None:
        """A number that only grows; its name ends with _total."""
        self._add(CounterMetricFamily, name, words, value, labels)

    def _add(self, kind: type[Any], name: str, words: str, value: float | None, labels: dict[str, str]) -> None:
        if value is None:
            return
        family = self._made.setdefault(name, kind(f"coremill_{name}", words, labels=["run", *labels]))
        family.add_metric([self._run, *labels.values()], float(value))

    def all(self) -> list[Metric]:
        return list(self._made.values())


def families_of(run: MeteredRun, ranks: range | None) -> Sequence[Metric]:
    """All that a node serves whose ranks these are; None: all ranks there are."""
    families = _Families(run.folder.name)
    made: list[Metric] = []
    if ranks is None or 0 in ranks:
        made.append(_info(run))
        _training(families, run.tally)
        _evaluation(families, run.tally)
        _reliability(families, run)
        _cost(families, run)
    for rank in sorted(run.tally.current_ranks, key=lambda one: one.rank):
        if ranks is None or rank.rank in ranks:
            _rank(families, rank)
    return [*made, *families.all()]


def _info(run: MeteredRun) -> Metric:
    plan, subject = run.tally.plan, subject_of(redact(run.config_text()), {})

    def chosen(name: str) -> str:
        return str((plan.get(name) or {}).get("value") or "")

    labels = {
        "run": run.folder.name,
        "model": str(subject["model"] or ""),
        "task": str(subject["task"] or ""),
        "engine": chosen("engine"),
        "dtype": chosen("dtype"),
        "fleet": str(plan.get("fleet") or ""),
        "version": __version__,
    }
    return InfoMetricFamily("coremill_run", "What is trained, and how; always 1.", value=labels)


def _training(to: _Families, tally: RunTally) -> None:
    last, recent = tally.steps.get(tally.last_step), tally.tokens_per_second(RECENT_STEPS)
    steps = tally.plan.get("steps")
    to.gauge("steps_done", "Steps of the run that are done.", tally.last_step)
    to.gauge("steps_planned", "Steps that the run is to do.", steps)
    to.gauge("epochs_done", "Passes over the data up to the last step.", tally.epochs(tally.last_step))
    left = tally.remaining_seconds(steps, RECENT_STEPS)
    to.gauge("remaining_seconds", "Time to the last step at the pace of the most recent ones.", left)
    if last is not None:
        to.gauge("loss", "Loss of the last step, before its update.", last.loss)
        to.gauge("learning_rate", "Learning rate of the last step.", last.learning_rate)
        to.gauge("gradient_norm", "Gradient norm of the last step, before clipping.", last.gradient_norm)
    done = tally.past.tokens + sum(int(record.tokens) for record in tally.steps.values())
    to.counter("tokens_total", "Real tokens trained on; steps done again count once.", done)
    to.gauge("tokens_per_second", f"Real tokens, over the last {RECENT_STEPS} steps.", recent)
    to.gauge("step_seconds", f"Mean time of the last {RECENT_STEPS} steps.", tally.step_seconds(RECENT_STEPS))
    rate = tally.utilization(recent)
    to.gauge("utilization_ratio", "Model arithmetic as a share of what these CPUs do in matrix products.", rate)
    skipped = len(tally.past.skipped) + sum(record.skipped for record in tally.steps.values())
    to.counter("skipped_steps_total", "Steps left out since their numbers were none.", skipped)
    heard = len(tally.current_ranks)
    to.gauge("ranks", "Ranks that the last attempt began with, as far as they were heard here.", heard)
    to.gauge("last_event_timestamp_seconds", "When a rank last said anything.", tally.last_time)


def _evaluation(to: _Families, tally: RunTally) -> None:
    last = tally.evaluations.get(max(tally.evaluations, default=0))
    if last is None:
        return
    to.gauge("evaluation_step", "Step of the last evaluation.", last.number("step"))
    for name in ("loss", *metric_names(last.fields)):
        value = last.get(name)
        if isinstance(value, int | float):
            to.gauge("evaluation_score", "What the last evaluation found, by metric.", value, metric=name)
    to.gauge("best_step", "Step of the best evaluation so far.", last.get("best_step"))


def _reliability(to: _Families, run: MeteredRun) -> None:
    tally, saves = run.tally, run.saves
    to.gauge("goodput_ratio", "Share of the wall time of the run that went into steps.", tally.goodput)
    again = "Attempts after the first, by whomever: launcher, new pod, the command given again."
    to.counter("restarts_total", again, starts_again(tally.spans))
    repeated = sum(int(event.number("steps_lost")) for event in tally.restarts)
    to.counter("repeated_steps_total", "Steps that were lost to faults and done again.", repeated)
    for cause, count in Counter(str(event.get("cause")) for event in tally.faults).items():
        words = "What made ranks end, by cause; where hosts are several, others tell of a lost peer."
        to.counter("faults_total", words, count, cause=cause)
    for outcome, count in {"saved": saves.done, "failed": saves.failed}.items():
        to.counter("saves_total", "Checkpoints, by whether they were saved.", count, outcome=outcome)
    to.gauge(
        "last_save_seconds", "How long the last save took the slowest rank, beside training.", saves.slowest("seconds")
    )
    blocked = saves.slowest("blocked_seconds")
    to.gauge("last_save_blocked_seconds", "How long training stood for the last save.", blocked)
    to.gauge("last_save_step", "Step of the last checkpoint.", saves.slowest("step"))
    moment = max((event.time for event in saves.last.values()), default=None)
    to.gauge("last_save_timestamp_seconds", "When the last checkpoint was saved.", moment)


def _cost(to: _Families, run: MeteredRun) -> None:
    planned = planned_figures(run.tally.plan)
    to.gauge("rank_memory_limit_bytes", "What each rank may hold, by the plan.", planned["memory_limit_bytes_per_rank"])
    to.gauge("rank_memory_planned_bytes", "What the plan says a rank needs.", planned["memory_bytes_per_rank"])
    cost = cost_of(run.tally, run.config_text(), planned["hours"])
    if cost is not None:
        to.counter("cost_usd_total", "Dollars so far, for the nodes of the run.", cost["usd"])
        to.gauge("cost_usd_per_hour", "What the nodes of the run cost, all together.", cost["usd_per_hour"])
        to.gauge("cost_planned_usd", "Dollars that the plan counts with.", cost["planned_usd"])


def _rank(to: _Families, rank: RankTally) -> None:
    number = str(rank.rank)
    to.gauge("rank_step", "Last step that the rank has done.", rank.last_step, rank=number)
    to.gauge("rank_memory_bytes", "Resident memory of the rank.", rank.rss_bytes or None, rank=number)
    to.gauge("rank_memory_peak_bytes", "The most memory the rank ever held.", rank.peak_rss_bytes or None, rank=number)
    sent = rank.wire_bytes.total + rank.first_wire_bytes.total
    to.counter("rank_sent_bytes_total", "What the rank sent to others in steps.", sent, rank=number)
    words = "Time of the rank in steps, by what it went into; the first step of an attempt is left out."
    for part in SPLIT:
        to.counter("rank_step_seconds_total", words, rank.split_seconds[part].total, rank=number, part=part)

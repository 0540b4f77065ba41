"""The numbers of a run, counted event by event: the one implementation that console, summary and page share.

Events of different ranks may arrive in any order (the console follows files, the summary reads them one after the
other); events of one rank arrive as written. What is global (loss, tokens) is taken from the lowest rank seen.
The first step of an attempt is left out of every rate: it allocates. A screen that lives as long as its run keeps the
most recent of each list (`keep`), a live page also what older steps amount to (`remembers`); the report keeps all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from coremill.report.events import Event
from coremill.report.history import PastSteps
from coremill.report.pauses import Span, pauses_between
from coremill.report.records import Mean, SetAside, StepRecord

PHASES = ("join", "data", "build", "load", "first_step")  # before the steady steps, in this order
SPLIT = ("data", "compute", "communication", "optimizer")
REMEMBERED_AT_ONCE = 200  # steps: to look for the oldest at each would cost more than all else
COLLECTIVE_FIGURES = ("bytes", "shared_bytes", "seconds", "exposed_seconds")


@dataclass
class RankTally:
    """What one rank said, in few numbers however long the run."""

    rank: int
    start: Mapping[str, Any] = field(default_factory=dict)
    start_time: float | None = None
    phases_done: list[str] = field(default_factory=list)
    phase_seconds: dict[str, float] = field(default_factory=dict)
    phase_peak_bytes: dict[str, int] = field(default_factory=dict)  # load, first_step, steady_step; others by name
    load: Mapping[str, Any] | None = None
    peak_rss_bytes: int = 0
    rss_bytes: int = 0
    mapped_file_bytes: int = 0  # pages of libraries and other files among them, at most
    own_peak_bytes: int = 0  # without them
    last_step: int = 0
    ended: bool = False
    step_seconds: Mean = field(default_factory=Mean)
    first_step_seconds: Mean = field(default_factory=Mean)
    wire_bytes: Mean = field(default_factory=Mean)
    first_wire_bytes: Mean = field(default_factory=Mean)
    split_seconds: dict[str, Mean] = field(default_factory=lambda: {name: Mean() for name in SPLIT})
    collectives: dict[str, dict[str, Mean]] = field(default_factory=dict)  # by kind, then by figure
    watched_seconds: dict[str, float] = field(default_factory=dict)  # parts of a step's arithmetic, of a token
    warming_up: bool = True

    def saw_collectives(self, uses: Mapping[str, Mapping[str, float]]) -> None:
        """Take in what the exchanges of one steady step cost."""
        for kind, use in uses.items():
            means = self.collectives.setdefault(kind, {name: Mean() for name in COLLECTIVE_FIGURES})
            for name, mean in means.items():
                mean.add(float(use.get(name) or 0.0))

    def saw_memory(self, event: Event, phase: str | None) -> None:
        """Keep the highest peak, of the run and of the phase."""
        self.rss_bytes = int(event.number("rss_bytes")) or self.rss_bytes
        peak = int(max(event.number("peak_rss_bytes"), event.number("rss_bytes")))
        self.peak_rss_bytes = max(self.peak_rss_bytes, peak)
        mapped = int(event.number("mapped_file_bytes"))
        self.mapped_file_bytes = max(self.mapped_file_bytes, mapped)
        self.own_peak_bytes = max(self.own_peak_bytes, peak - mapped if mapped else 0)
        if phase is not None and peak:
            self.phase_peak_bytes[phase] = max(self.phase_peak_bytes.get(phase, 0), peak)

    @property
    def attempt(self) -> float:
        """That it started in last, by the clock of rank 0: all ranks of one name the same; 0: it named none."""
        return float(self.start.get("attempt") or 0.0)

    @property
    def wire_bytes_per_step(self) -> int | None:
        """Mean of the steady steps; of the first one while there is no other."""
        value = self.wire_bytes.value if self.wire_bytes.count else self.first_wire_bytes.value
        return None if value is None else round(value)


@dataclass
class RunTally:
    """All ranks together."""

    plan: Mapping[str, Any] = field(default_factory=dict)  # the keys of plan.json that numbers need
    keep: int | None = None  # so many steps, evaluations, faults and the like; None: all
    ranks: dict[int, RankTally] = field(default_factory=dict)
    steps: dict[int, StepRecord] = field(default_factory=dict)
    remembers: bool = False  # steps that are no longer kept are counted in `past`
    past: PastSteps = field(default_factory=PastSteps)
    evaluations: dict[int, Event] = field(default_factory=dict)
    choices: dict[tuple[str, str, str], list[int]] = field(default_factory=dict)  # (name, value, reason) -> ranks
    errors: list[Event] = field(default_factory=list)
    faults: list[Event] = field(default_factory=list)
    restarts: list[Event] = field(default_factory=list)
    moments: list[tuple[Event, int]] = field(default_factory=list)  # saves, ends, new beginnings; the rank's last step
    non_finite: dict[tuple[int, str], Event] = field(default_factory=dict)  # (step, text) -> by the lowest rank
    data: Event | None = None
    files_load: Event | None = None  # the first load: of the model's files; later ones are of checkpoints
    sample: Event | None = None
    export: Event | None = None
    set_aside: list[SetAside] = field(default_factory=list)  # by `train --from`
    early_stop: Event | None = None  # of a run that its evaluations ended
    last_step: int = 0  # the highest step done; 0 before the first
    first_time: float | None = None
    last_time: float | None = None
    spans: dict[float, Span] = field(default_factory=dict)  # attempt -> its first and last word

    def add(self, event: Event) -> None:
        """Take one event in; kinds unknown to this version are passed over."""
        if any(aside.covers(event) for aside in self.set_aside):
            return
        rank = self.ranks.setdefault(event.rank, RankTally(event.rank))
        self.first_time = event.time if self.first_time is None else min(self.first_time, event.time)
        self.last_time = event.time if self.last_time is None else max(self.last_time, event.time)
        handler = _HANDLERS.get(event.kind)
        if handler is not None:
            handler(self, rank, event)
            self._forget()
        if event.kind != "set_aside":  # the launcher's word before an attempt begins: no time of the one before it
            first, last = self.spans.get(rank.attempt, (event.time, event.time))
            self.spans[rank.attempt] = min(first, event.time), max(last, event.time)

    def host_of(self, rank: int) -> str | None:
        """By name, for people; with the number of its node where several hosts have the same name."""
        start = self.ranks[rank].start
        name, node = start.get("hostname"), start.get("node")
        nodes = {other.start.get("node") for other in self.ranks.values() if other.start.get("hostname") == name}
        return name if name is None or len(nodes) == 1 else f"{name} (node {node})"

    def _forget(self) -> None:
        """Let the oldest go where only so many are kept."""
        if self.keep is None:
            return
        if len(self.steps) > self.keep + (REMEMBERED_AT_ONCE if self.remembers else 0):
            for step in sorted(self.steps)[: -self.keep]:
                record = self.steps.pop(step)
                if self.remembers:
                    self.past.take(step, record)
        stepwise: tuple[dict[Any, Any], ...] = (self.evaluations, self.non_finite)
        for by_step in stepwise:
            while len(by_step) > self.keep:
                del by_step[min(by_step)]
        for events in (self.errors, self.faults, self.restarts):
            del events[: -self.keep]
        del self.moments[: -self.keep]

    def _start(self, rank: RankTally, event: Event) -> None:
        rank.start = event.fields
        rank.start_time = event.time
        rank.warming_up = True
        rank.ended = False
        rank.phases_done = []
        if rank.rank == 0:
            self.early_stop = None
        # A new attempt: what made the last one end is over.
        self.errors = [error for error in self.errors if error.rank != rank.rank]

    def _phase(self, rank: RankTally, event: Event) -> None:
        name = str(event.get("name", ""))
        if name not in rank.phases_done:
            rank.phases_done.append(name)
        rank.phase_seconds[name] = rank.phase_seconds.get(name, 0.0) + event.number("seconds")
        rank.saw_memory(event, name)

    def _load(self, rank: RankTally, event: Event) -> None:
        rank.load = event.fields
        self.files_load = self.files_load or event
        if "load" not in rank.phases_done:
            rank.phases_done.append("load")
        rank.saw_memory(event, "load")

    def _choice(self, rank: RankTally, event: Event) -> None:
        key = (str(event.get("name")), str(event.get("value")), str(event.get("reason", "")))
        ranks = self.choices.setdefault(key, [])
        if rank.rank not in ranks:  # an attempt before chose the same
            ranks.append(rank.rank)

    def _step(self, rank: RankTally, event: Event) -> None:
        step, seconds = int(event.number("step")), event.number("seconds")
        rank.last_step = step
        self.last_step = max(self.last_step, step)
        rank.saw_memory(event, "first_step" if rank.warming_up else "steady_step")
        (rank.first_step_seconds if rank.warming_up else rank.step_seconds).add(seconds)
        (rank.first_wire_bytes if rank.warming_up else rank.wire_bytes).add(event.number("wire_bytes"))
        if not rank.warming_up:
            for name, mean in rank.split_seconds.items():
                mean.add(event.number(f"{name}_seconds"))
            rank.saw_collectives(event.get("collectives") or {})
            for part, value in (event.get("watched_seconds") or {}).items():
                rank.watched_seconds[part] = value / max(1.0, event.number("tokens"))
        known = self.steps.get(step)
        if step > self.past.last_step and (known is None or rank.rank <= known.rank):
            self.steps[step] = StepRecord(
                rank=rank.rank,
                time=event.time,
                loss=event.get("loss"),
                learning_rate=event.number("learning_rate"),
                gradient_norm=event.get("gradient_norm"),
                tokens=event.number("tokens"),
                padding_tokens=event.number("padding_tokens"),
                seconds=seconds,
                warming_up=rank.warming_up,
                skipped=bool(event.get("skipped")),
            )
        rank.warming_up = False

    def _evaluation(self, rank: RankTally, event: Event) -> None:
        step = int(event.number("step"))
        known = self.evaluations.get(step)
        if known is None or event.rank <= known.rank:
            self.evaluations[step] = event

    def _non_finite(self, rank: RankTally, event: Event) -> None:
        key = (int(event.number("step")), str(event.get("text")))
        known = self.non_finite.get(key)
        if known is None or event.rank <= known.rank:
            self.non_finite[key] = event

    def _data(self, rank: RankTally, event: Event) -> None:
        self.data = event

    def _sample(self, rank: RankTally, event: Event) -> None:
        self.sample = event

    def _export(self, rank: RankTally, event: Event) -> None:
        self.export = event

    def _set_aside(self, rank: RankTally, event: Event) -> None:
        """Of no consequence any more; other ranks' words on it may still come."""
        self.set_aside.append(SetAside.by(event))
        step = self.set_aside[-1].after_step
        self.steps = {each: record for each, record in self.steps.items() if each <= step}
        self.evaluations = {each: told for each, told in self.evaluations.items() if each <= step}
        self.non_finite = {key: told for key, told in self.non_finite.items() if key[0] <= step}
        self.moments = [(told, at) for told, at in self.moments if at <= step]
        self.past.cut(step)
        self.last_step = max(self.steps, default=self.past.last_step)
        self.export = self.sample = self.early_stop = None

    def _early_stop(self, rank: RankTally, event: Event) -> None:
        self.early_stop = event

    def _error(self, rank: RankTally, event: Event) -> None:
        self.errors.append(event)
        self._moment(rank, event)

    def _moment(self, rank: RankTally, event: Event) -> None:
        self.moments.append((event, rank.last_step))

    def _fault(self, rank: RankTally, event: Event) -> None:
        self.faults.append(event)

    def _restart(self, rank: RankTally, event: Event) -> None:
        self.restarts.append(event)

    def _end(self, rank: RankTally, event: Event) -> None:
        rank.ended = True

    @property
    def attempt(self) -> float:
        """The last one. Clocks differ: a rank that began late by both, rank 0's and its own, did begin late."""
        last = max(self.ranks.values(), key=lambda rank: min(rank.attempt, rank.start_time or 0.0), default=None)
        return 0.0 if last is None else last.attempt

    @property
    def current_ranks(self) -> list[RankTally]:
        """Those of the last attempt. What others left here is over: since then they may write on another host."""
        last = self.attempt
        return [rank for rank in self.ranks.values() if rank.attempt == last]

    @property
    def world_size(self) -> int:
        """Ranks of the run: as they say themselves, else as planned, else as many as were heard."""
        started = [rank for rank in self.current_ranks if rank.start_time is not None]
        latest = max(started, key=lambda rank: rank.start_time or 0.0, default=None)  # attempts may differ in size
        said = 0 if latest is None else int(latest.start.get("world_size") or 0)
        return said or int(self.plan.get("world_size") or 0) or len(self.ranks)

    def steady_steps(self, last: int | None = None) -> list[StepRecord]:
        """Steps that count for rates; with `last`, only the most recent so many."""
        if last is None:
            return [record for record in self.steps.values() if not record.warming_up]
        recent: list[StepRecord] = []
        for step in range(self.last_step, 0, -1):
            record = self.steps.get(step)
            if record is None or len(recent) == last:
                break
            if not record.warming_up:
                recent.append(record)
        return recent

    def tokens_per_second(self, last: int | None = None) -> float | None:
        """Real tokens by the seconds of their steps, first step left out; evaluation and saving lie outside steps."""
        records, past = self.steady_steps(last), self.past if last is None else PastSteps()
        seconds = past.steady_seconds + sum(record.seconds for record in records)
        tokens = past.steady_tokens + sum(record.tokens for record in records)
        return tokens / seconds if seconds > 0 else None

    def step_seconds(self, last: int | None = None) -> float | None:
        """Mean wall time of a step, first step left out."""
        records, past = self.steady_steps(last), self.past if last is None else PastSteps()
        seconds = past.steady_seconds + sum(record.seconds for record in records)
        count = past.steady_count + len(records)
        return seconds / count if count else None

    def remaining_seconds(self, total_steps: int | None, last: int = 20) -> float | None:
        """Time to the last step at the pace of the most recent ones."""
        pace = self.step_seconds(last)
        return None if pace is None or total_steps is None else pace * max(0, total_steps - self.last_step)

    def model_flops_per_second(self, tokens_per_second: float | None) -> float | None:
        """Arithmetic the model needs for that many tokens, per second."""
        per_token = self.plan.get("model_flops_per_token")
        return None if tokens_per_second is None or not per_token else tokens_per_second * float(per_token)

    def utilization(self, tokens_per_second: float | None) -> float | None:
        """Model arithmetic as a share of what the same machines do in plain matrix products."""
        flops, rate = self.model_flops_per_second(tokens_per_second), self.plan.get("matmul_flops_per_second")
        return None if flops is None or not rate else flops / float(rate)

    @property
    def padding_fraction(self) -> float | None:
        """Share of the computed tokens that are filler."""
        real = self.past.tokens + sum(record.tokens for record in self.steps.values())
        padding = self.past.padding_tokens + sum(record.padding_tokens for record in self.steps.values())
        return padding / (real + padding) if real + padding > 0 else None

    @property
    def peak_rss_bytes(self) -> int:
        """The highest of all ranks."""
        return max((rank.peak_rss_bytes for rank in self.ranks.values()), default=0)

    def epochs(self, step: int | None) -> float | None:
        """Passes over the data up to a step; None where its rows are not known."""
        rows = 0.0 if self.data is None else self.data.number("train_rows")
        rows_per_step = self.plan.get("rows_per_step")
        return step * rows_per_step / rows if step is not None and rows and rows_per_step else None

    @property
    def pauses(self) -> list[Span]:
        """Between a stop and the command that went on; the time of a restart is part of the run."""
        return pauses_between(self.spans.values(), [f.time for f in self.faults if f.get("action") == "restart"])

    @property
    def wall_seconds(self) -> float:
        """From the first word of any rank to the last, pauses left out."""
        if self.first_time is None or self.last_time is None:
            return 0.0
        return self.last_time - self.first_time - sum(until - since for since, until in self.pauses)

    @property
    def goodput(self) -> float | None:
        """Share of the wall time that went into steps; each step counts once, however often it was repeated."""
        wall = self.wall_seconds
        in_steps = self.past.seconds + sum(record.seconds for record in self.steps.values())
        return in_steps / wall if wall > 0 and self.steps else None

    @property
    def finished(self) -> bool:
        """Every rank said that it ended; of hosts with a run folder of their own nothing is heard here.

        Ranks leave the last step and the export together: where rank 0 ended, nobody who is silent still trains.
        """
        ranks = [rank for rank in self.current_ranks if rank.rank < max(1, self.world_size)]
        return self.first_rank_ended and all(rank.ended for rank in ranks)

    @property
    def first_rank_ended(self) -> bool:
        """In the last attempt."""
        return any(rank.rank == 0 and rank.ended for rank in self.current_ranks)

    @property
    def last_restart_fault(self) -> Event | None:
        """The last fault after which the launcher started all ranks again."""
        again = [fault for fault in self.faults if fault.get("action") == "restart"]
        return max(again, key=lambda fault: fault.time, default=None)


_HANDLERS: dict[str, Callable[[RunTally, RankTally, Event], None]] = {
    "start": RunTally._start,
    "phase": RunTally._phase,
    "load": RunTally._load,
    "choice": RunTally._choice,
    "step": RunTally._step,
    "evaluation": RunTally._evaluation,
    "non_finite": RunTally._non_finite,
    "data": RunTally._data,
    "sample": RunTally._sample,
    "export": RunTally._export,
    "early_stop": RunTally._early_stop,
    "set_aside": RunTally._set_aside,
    "error": RunTally._error,
    "save": RunTally._moment,
    "resume": RunTally._moment,
    "fault": RunTally._fault,
    "restart": RunTally._restart,
    "end": RunTally._end,
}

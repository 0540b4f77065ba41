"""A run on the screen while it runs: a live display on a terminal, plain lines elsewhere.

Everything shown comes from events, through the same tally that the report is made from. The live display is redrawn
when `take` is called, also with no new events, so there is no thread of its own: call it a few times per second.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from coremill.plan.saving import SET_BY_USER, SHARE_OF_GRACE
from coremill.redaction import redact
from coremill.report.events import Event
from coremill.report.metrics import format_metric, in_words, metric_names
from coremill.report.progress import PLAIN_EVERY_SECONDS, REDRAW_EVERY_SECONDS
from coremill.report.readers.base import KEPT, Reader
from coremill.report.tally import PHASES, RunTally
from coremill.report.terminal import (
    format_bytes,
    format_count,
    format_epochs,
    format_learning_rate,
    format_loss,
    format_norm,
    format_percent,
    format_rate,
    format_seconds,
    print_line,
)
from coremill.report.weights import weight_findings
from coremill.report.work import LongWorks
from coremill.world.heartbeat import Reading

RECENT_STEPS = 20  # rates on the screen follow the last so many steps
_DOING = {  # what a rank is busy with until the phase of that name is done
    "join": "starting ranks",
    "data": "opening the data",
    "build": "building the model",
    "load": "reading weights",
    "first_step": "first step",
}

# Of those that ranks take; the report has all.
CHOICES_SAID = ("checkpoints", "export", "dropout", "weights", "moments")


class RunConsole(Reader):
    """Shows one run from its events. `total_steps` may be None where only the data knows."""

    name = "the screen"

    def __init__(
        self, total_steps: int | None, plan_json: Mapping[str, Any] | None = None, console: Console | None = None
    ) -> None:
        self.console = console if console is not None else Console()
        self.total_steps = total_steps
        self.tally = RunTally(plan_json or {}, keep=KEPT)
        self._started = time.monotonic()
        self._drawn = 0.0
        self._printed_step = 0
        self._evaluated = (0, 0)  # step and rank of the last evaluation
        self._printed_time = float("-inf")
        self._announced: deque[str] = deque(maxlen=KEPT)
        self._spinner = Spinner("dots", style="cyan")
        self._works = LongWorks()
        self._live: Live | None = None

    def begin(self) -> None:
        """On a terminal, put the live display there."""
        self._started = time.monotonic()
        if self.console.is_terminal:
            self._live = Live(console=self.console, auto_refresh=False, transient=True, get_renderable=self._display)
            self._live.start()

    def take(self, events: Iterable[Event] = ()) -> None:
        """Take new events in and show them."""
        for event in events:
            self.tally.add(event)
            self._say(event)
        if self._live is not None and time.monotonic() - self._drawn >= REDRAW_EVERY_SECONDS:
            self._live.refresh()
            self._drawn = time.monotonic()

    def take_work(self, readings: Sequence[Reading]) -> None:
        """What ranks say of work that takes long; `take` redraws."""
        self._works.take(readings)
        if self._live is None:
            for line in self._works.lines():
                print_line(self.console, line)

    def note(self, text: str) -> None:
        """One finding of the launcher, above the progress."""
        print_line(self.console, redact(text))

    def ranks_ended(self) -> None:
        """Take the live display away and leave the last step as a line."""
        if self._live is not None:
            self._live.stop()
            self._live = None
        if self.tally.last_step > self._printed_step:
            self._print_step(with_eta=False)

    def __enter__(self) -> RunConsole:
        self.begin()
        return self

    def __exit__(self, *_: object) -> None:
        self.ranks_ended()

    def _say(self, event: Event) -> None:
        """Lines that stay: milestones once, evaluations, the export; on a plain stream steps too."""
        if event.kind == "evaluation" and event is self.tally.evaluations.get(int(event.number("step"))):
            shown, self._evaluated = self._evaluated, (int(event.number("step")), event.rank)
            # All ranks tell the same, and any may be first; the same rank again is another attempt.
            if self._evaluated[0] != shown[0] or self._evaluated == shown:
                self._evaluation(event)
        elif event.kind == "save":
            self._save(event)
        elif event.kind == "notice" and event.rank:
            self._once(str(event.get("text")), f"rank {event.rank}: {event.get('text')}")
        elif event.kind in ("resume", "passed_over") and event.rank == 0:
            print_line(self.console, str(event.get("text")))
        elif event.kind == "choice" and event.get("name") in CHOICES_SAID and event.rank == 0:
            text = f"{event.get('name')}: {event.get('value')}, because {event.get('reason')}"
            self._once(text, text)
        elif event.kind == "non_finite" and event.rank == 0 and event.get("skipped"):
            self._non_finite(event)
        elif event.kind == "export":
            size, seconds = format_bytes(event.get("bytes")), format_seconds(event.get("seconds"))
            kind = {"adapter": " the adapter", "merged": " the merged model"}.get(event.get("form"), "")
            what = f"exported{kind}"
            if event.get("reason"):
                what += f"{' of' if kind else ''} step {event.get('step')}, {event.get('reason')},"
            print_line(self.console, f"{what} to {event.get('folder')} ({size} in {seconds})")
        elif event.kind == "early_stop":
            print_line(self.console, f"ends after step {event.get('step')}: {event.get('text')}")
        elif event.kind == "start" and self._everybody(lambda rank: bool(rank.start)):
            self._once("start", self._ranks_line())
        elif event.kind == "load" and self._everybody(lambda rank: rank.load is not None):
            self._once("load", self._load_line())
            for text in weight_findings(event.fields):
                self._once(text, text)
        elif event.kind == "step" and self._live is None:
            self._plain_step(event)

    def _everybody(self, test: Any) -> bool:
        ranks = self.tally.ranks.values()
        return len(ranks) >= self.tally.world_size and all(test(rank) for rank in ranks)

    def _once(self, key: str, text: str) -> None:
        if key not in self._announced:
            self._announced.append(key)
            print_line(self.console, text)

    def _ranks_line(self) -> str:
        starts = [rank.start for rank in self.tally.ranks.values()]
        first = starts[0]
        hosts = {self.tally.host_of(rank) for rank in self.tally.ranks}
        count, threads = len(starts), first.get("threads")
        where = f" on {len(hosts)} machines" if len(hosts) > 1 else ""
        each = " each" if count > 1 else ""
        with_threads = f", {threads} {'thread' if threads == 1 else 'threads'}{each}" if threads else ""
        ranks = "1 rank" if count == 1 else f"{count} ranks"
        return f"{ranks} started{where}: {first.get('engine')}, {first.get('dtype')}{with_threads}"

    def _load_line(self) -> str:
        loads = [rank.load or {} for rank in self.tally.ranks.values()]
        read, seconds = (
            max(load.get("bytes_read") or 0 for load in loads),
            max(load.get("seconds") or 0 for load in loads),
        )
        if not read:
            return f"weights made in {format_seconds(seconds)}"
        each = " per rank" if len(loads) > 1 else ""
        return f"weights read in {format_seconds(seconds)}: {format_bytes(read)}{each}"

    def _evaluation(self, event: Event) -> None:
        metrics = [f", {in_words(name)} {format_metric(event.get(name))}" for name in metric_names(event.fields)]
        found = f"loss {format_loss(event.get('loss'))}{''.join(metrics)}"
        cost = f"{format_count(event.get('tokens'))} tokens in {format_seconds(event.get('seconds'))}"
        step, best = int(event.number("step")), event.get("best_step")
        beside = "" if best is None else ", the best so far" if best == step else f", the best was step {best}"
        text = f"evaluation at step {step}: {found}{beside} ({cost})"
        print_line(self.console, text)

    def _non_finite(self, event: Event) -> None:
        counted = f" ({event.get('skipped_so_far')} of {event.get('budget')} skips spent)"
        print_line(self.console, f"{event.get('text')}: left out{counted}")

    def _save(self, event: Event) -> None:
        """A save by the word of rank 0; a failed one once per reason, for every rank tells it."""
        step = int(event.number("step"))
        if not event.get("saved"):
            self._once(f"save {step} {event.get('reason')}", f"step {step} was not saved: {event.get('reason')}")
        elif event.rank == 0:
            each = " per rank" if self.tally.world_size > 1 else ""
            size, seconds = format_bytes(event.get("bytes")), format_seconds(event.get("seconds"))
            print_line(self.console, f"saved step {step} ({size}{each} in {seconds})")
            self._warn_of_grace(event.number("seconds"))

    def _warn_of_grace(self, seconds: float) -> None:
        """The plan could only assume how quick the storage is."""
        planned = self.tally.plan.get("save") or {}
        grace = planned.get("grace_seconds") or {}
        step_seconds = self.tally.step_seconds() or 0.0  # the one under way ends first
        if grace.get("reason") == SET_BY_USER and step_seconds + seconds > SHARE_OF_GRACE * grace["value"]:
            took, given = format_seconds(seconds), format_seconds(grace["value"])
            took += f" after a step of {format_seconds(step_seconds)}" if step_seconds else ""
            text = f"a save took {took}, but a stop gives it only a part of {given} (checkpoint.grace): give it more"
            self._once("grace", text)

    def _plain_step(self, event: Event) -> None:
        step = int(event.number("step"))
        if step <= self._printed_step or step != self.tally.last_step:
            return  # another rank's word on the same step
        due = event.time - self._printed_time >= PLAIN_EVERY_SECONDS
        if due or self._printed_step == 0 or step == self.total_steps:
            self._printed_time = event.time
            self._print_step()

    def _print_step(self, *, with_eta: bool = True) -> None:
        step = self.tally.last_step
        self._printed_step = step
        record, total = self.tally.steps[step], f"/{self.total_steps}" if self.total_steps else ""
        parts = [
            f"step {step}{total}",
            f"loss {format_loss(record.loss)}",
            f"lr {format_learning_rate(record.learning_rate)}",
        ]
        if record.gradient_norm is not None:
            parts.append(f"grad norm {format_norm(record.gradient_norm)}")
        if (epochs := self.tally.epochs(step)) is not None:
            parts.append(f"epoch {epochs:.2f}")
        parts += self._rates()
        left = self.tally.remaining_seconds(self.total_steps, RECENT_STEPS)
        if left and with_eta:
            parts.append(f"ETA {format_seconds(left)}")
        print_line(self.console, "  ".join(parts))

    def _rates(self) -> list[str]:
        rate = self.tally.tokens_per_second(RECENT_STEPS)
        utilization = self.tally.utilization(rate)
        parts = [] if rate is None else [format_rate(rate)]
        if utilization is not None:
            parts.append(f"utilization {format_percent(utilization)}")
        return [*parts, self._memory()]

    def _memory(self) -> str:
        each = "/rank" if self.tally.world_size > 1 else ""
        return f"memory {format_bytes(self.tally.peak_rss_bytes)}{each}"

    def _display(self) -> Group:
        """What the live display shows now: a bar with lines of figures, or the phase before the first step."""
        elapsed = format_seconds(time.monotonic() - self._started)
        if not self.tally.last_step:
            return Group(*(self._works.rows() or [self._spinning(f"{self._phase()}  {elapsed}")]))
        step, total = self.tally.last_step, self.total_steps
        grid = Table.grid(padding=(0, 2), expand=True)
        grid.add_column(no_wrap=True)
        grid.add_column(ratio=1)
        grid.add_column(no_wrap=True, justify="right")
        grid.add_column(no_wrap=True, justify="right")
        left = self.tally.remaining_seconds(total, RECENT_STEPS)
        grid.add_row(
            Text("training", style="bold"),
            ProgressBar(total=total, completed=step, pulse=total is None),
            f"{step}/{total or '?'}",
            Text(f"ETA {format_seconds(left)}" if left else f"in {elapsed}", style="cyan"),
        )
        rows: list[Any] = [grid, self._learning(), self._pace()]
        if total is not None and step >= total:
            rows.append(self._spinning("after the last step: evaluating, exporting"))
        return Group(*rows, *self._works.rows())

    def _learning(self) -> Text:
        """What the last step did: loss, learning rate, gradient norm, how often the data was seen."""
        step, record = self.tally.last_step, self.tally.steps[self.tally.last_step]
        figures = [("loss", format_loss(record.loss)), ("learning rate", format_learning_rate(record.learning_rate))]
        if record.gradient_norm is not None:
            figures.append(("gradient norm", format_norm(record.gradient_norm)))
        line = Text(no_wrap=True, overflow="ellipsis")
        for name, value in figures:
            line.append(f"{name} ", style="dim").append(value, style="bold").append("  ")
        if (epochs := self.tally.epochs(step)) is not None:
            whole = self.tally.epochs(self.total_steps)
            line.append("epoch ", style="dim").append(f"{epochs:.2f}", style="bold")
            line.append(f" of {format_epochs(whole)}" if whole else "", style="dim")
        return line

    def _pace(self) -> Text:
        """How fast it goes, and what it takes."""
        line = Text(no_wrap=True, overflow="ellipsis")
        rate = self.tally.tokens_per_second(RECENT_STEPS)
        utilization = self.tally.utilization(rate)
        if rate is not None:
            line.append(format_rate(rate, ""), style="bold").append(" tokens/s  ", style="dim")
        if utilization is not None:
            line.append("utilization ", style="dim").append(format_percent(utilization), style="bold").append("  ")
        limit = (self.tally.plan.get("memory_bytes_per_rank") or {}).get("limit")
        per_rank = "/rank" if self.tally.world_size > 1 else ""
        line.append(f"memory{per_rank} ", style="dim").append(format_bytes(self.tally.peak_rss_bytes), style="bold")
        if limit:
            line.append(f" of {format_bytes(limit)}", style="dim")
        return line

    def _spinning(self, text: str) -> Spinner:
        self._spinner.update(text=Text(text))
        return self._spinner

    def _phase(self) -> str:
        """What the slowest rank is busy with, and how many are past it."""
        ranks, world_size = list(self.tally.ranks.values()), max(1, self.tally.world_size)
        behind = min((_reached(rank.phases_done) for rank in ranks), default=0) if len(ranks) >= world_size else 0
        done = sum(_reached(rank.phases_done) > behind for rank in ranks) if behind else len(ranks)
        count = f" ({done} of {world_size})" if world_size > 1 else ""
        return f"{_DOING[PHASES[min(behind, len(PHASES) - 1)]]}{count}"


def _reached(phases_done: list[str]) -> int:
    """How many of the phases before the first step lie behind a rank; one left out counts as done by a later one."""
    return max((PHASES.index(name) + 1 for name in phases_done if name in PHASES), default=0)

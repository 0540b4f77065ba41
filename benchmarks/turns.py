"""Contenders that take turns, for machines whose speed wavers: all run at once; who has no turn is stopped (SIGSTOP).

What slows the machine down for longer than a turn slows all of them down, so that ratios can be told where rounds one
after the other would differ by more than what is looked for. Processes are found by a mark in their environment: those
of a launcher, and on other hosts, stand still too. Seconds come from steps that ranks wrote down as they ended, and
from the kernel's count (`schedstat`) of what a rank's compute thread ran, was kept from its processor, and slept.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
import time
import uuid
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import peers, results

ENDLESS_STEPS = 100_000
START_SECONDS = 300.0
STEPS_BEFORE = 2  # of every rank, before turns begin
MARK = "COREMILL_IN_TURNS"

Turn = tuple[float, float]  # from and to, time of day


@dataclass
class Contender:
    """One of those that take turns: coremill runs that write their events below `out`."""

    name: str
    out: Path
    ranks: int
    mark: str
    leader: subprocess.Popen[bytes]
    turns: list[Turn] = field(default_factory=list)
    stolen: list[float] = field(default_factory=list)  # by turn: of the processor that neighbours took most of, a share
    awake: list[list[tuple[float, float]]] = field(default_factory=list)  # by reading and rank: ran, was kept waiting

    def pids(self) -> list[int]:
        """All its processes, on whichever host."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if self.mark.encode() in (folder / "environ").read_bytes():
                    found.append(int(folder.name))
        return found

    def events(self) -> list[list[dict[str, Any]]]:
        """What each of its ranks has written down."""
        ranks: list[list[dict[str, Any]]] = []
        for path in sorted(self.out.glob("**/events/rank-*.jsonl")):
            ranks.append([])
            for line in path.read_text().splitlines():
                with contextlib.suppress(json.JSONDecodeError):  # the last line may be half written
                    ranks[-1].append(json.loads(line))
        return ranks

    def step_ends(self) -> list[list[float]]:
        """When each rank ended which step; those that ended after the last turn, while it was asked to end, are out."""
        until = self.turns[-1][1] if self.turns else float("inf")
        return [
            [event["time"] for event in rank if event["kind"] == "step" and event["time"] <= until]
            for rank in self.events()
        ]

    def read_clocks(self) -> None:
        """How long the compute threads have run so far, and waited for a processor."""
        reading = []
        for rank in self.events():
            pid = next(event["pid"] for event in rank if event["kind"] == "start")
            ran, waited, _ = Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()
            reading.append((int(ran) / 1e9, int(waited) / 1e9))
        self.awake.append(reading)

    def steps_by_turn(self) -> list[tuple[Turn, list[float]]]:
        """Turns of which it is known how many steps each rank did in them.

        The first and the last have a part of a step of which nobody knows how much was done when."""
        ends = self.step_ends()
        return [
            ((since, to), [steps_done(each, self.turns, to) - steps_done(each, self.turns, since) for each in ends])
            for since, to in self.turns[1:]
            if all(to < each[-1] for each in ends)
        ]

    def stolen_by_turn(self) -> list[float]:
        """Of the same turns."""
        stolen = dict(zip(self.turns, self.stolen, strict=True))
        return [stolen[turn] for turn, _ in self.steps_by_turn()]

    def tokens_per_second_by_turn(self, tokens_per_step: int) -> list[float]:
        """Of all its ranks together, a step being `tokens_per_step` of them."""
        return [statistics.fmean(done) * tokens_per_step / (to - since) for (since, to), done in self.steps_by_turn()]


def start(name: str, program: str, out: Path, *, ranks: int, cache: Path) -> Contender:
    """Run a shell program that makes coremill train in `out`, until every rank has done two steps, and stop it."""
    print(f"starting {name}", flush=True)
    mark = (MARK, uuid.uuid4().hex)
    leader = subprocess.Popen(
        ["bash", "-c", program],
        env=peers.environment(cache, dict([mark])),
        cwd=peers.ROOT,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    contender = Contender(name, out, ranks, "=".join(mark), leader)
    try:
        _wait_for_steps(contender)
    except BaseException:
        end(contender)
        raise
    send(signal.SIGSTOP, contender.pids())
    return contender


def _wait_for_steps(contender: Contender) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and contender.leader.poll() is None:
        ends = contender.step_ends()
        if len(ends) == contender.ranks and min(map(len, ends)) >= STEPS_BEFORE:
            return
        time.sleep(0.5)
    raise SystemExit(f"{contender.name} did not start; see {contender.out}")


def take_turns(contenders: Sequence[Contender], seconds: float, turn_seconds: float) -> None:
    """For so long, one after the other; all are stopped at the end."""
    pids = [contender.pids() for contender in contenders]
    for contender in contenders:
        contender.read_clocks()
    ends_at = time.monotonic() + seconds
    while time.monotonic() < ends_at:
        for contender, mine in zip(contenders, pids, strict=True):
            began, stolen = time.time(), stolen_seconds()
            send(signal.SIGCONT, mine)
            time.sleep(turn_seconds)
            send(signal.SIGSTOP, mine)
            contender.turns.append((began, time.time()))
            most = max(after - before for before, after in zip(stolen, stolen_seconds(), strict=True))
            contender.stolen.append(most / (time.time() - began))
    for contender in contenders:
        contender.read_clocks()


def end(contender: Contender, *, ask: bool = True) -> None:
    """Ask, then make sure."""
    for number in (signal.SIGTERM, signal.SIGKILL) if ask else (signal.SIGKILL,):
        pids = contender.pids()
        send(number, pids)
        send(signal.SIGCONT, pids)
        deadline = time.monotonic() + 20
        while contender.pids() and time.monotonic() < deadline:
            time.sleep(0.2)
    contender.leader.wait()


def stolen_seconds() -> list[float]:
    """By processor of this process's, since the machine started: what its host let others compute on it."""
    lines = [line.split() for line in Path("/proc/stat").read_text().splitlines() if line.startswith("cpu")]
    fields = {line[0]: line for line in lines}
    ticks = [int(fields[f"cpu{cpu}"][8]) for cpu in sorted(os.sched_getaffinity(0))]
    return [each / os.sysconf("SC_CLK_TCK") for each in ticks]


def send(number: int, pids: Sequence[int]) -> None:
    """A signal to all that still live."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def active_seconds(turns: Sequence[Turn], begin: float, end: float) -> float:
    """How much of that time was this contender's."""
    return sum(max(0.0, min(end, to) - max(begin, since)) for since, to in turns)


def steps_done(ends: Sequence[float], turns: Sequence[Turn], moment: float) -> float:
    """Steps up to a moment, the one under way in part: as evenly as its turns allow."""
    index = bisect_right(ends, moment)
    if index == 0 or index == len(ends):
        return float(index)
    whole = active_seconds(turns, ends[index - 1], ends[index])
    return index + (active_seconds(turns, ends[index - 1], moment) / whole if whole else 0.0)


def table(contenders: Sequence[Contender], rates: Mapping[str, Sequence[float]], tokens_per_step: int) -> str:
    """Rates and, by step and rank, seconds of the compute thread, as a Markdown table."""
    lines = [
        "| contender | tokens/s | s/step | ran | kept waiting | slept | turns |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for contender in (contender for contender in contenders if rates[contender.name]):
        rate = statistics.fmean(rates[contender.name])
        step_seconds = tokens_per_step / rate
        steps = sum(to - since for since, to in contender.turns) / step_seconds
        first, last = contender.awake
        ran, waited = (
            statistics.fmean(after[part] - before[part] for before, after in zip(first, last, strict=True)) / steps
            for part in (0, 1)
        )
        lines.append(
            f"| {contender.name} | {rate:.0f} | {step_seconds:.2f} | {ran:.2f} | {waited:.2f}"
            f" | {step_seconds - ran - waited:.2f} | {len(rates[contender.name])} |"
        )
    return "\n".join(lines)


def ratio(name: str, mine: Sequence[float], other: Sequence[float], target: str) -> results.Ratio:
    """Of rates by turn, by quarters of the time."""
    pairs = list(zip(mine, other, strict=False))
    quarters = [pairs[len(pairs) * part // 4 : len(pairs) * (part + 1) // 4] for part in range(4)]
    each = tuple(
        statistics.fmean(one for one, _ in quarter) / statistics.fmean(alone for _, alone in quarter)
        for quarter in quarters
        if quarter
    )
    return results.Ratio(name=f"{name}, by quarters of the time", per_round=each, target=target)

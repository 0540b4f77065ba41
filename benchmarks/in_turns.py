"""What exchanging costs, told on a machine whose speed wavers: `python -m benchmarks.in_turns [--seconds N]`.

Two hosts as in the scale model, at 1 Gbit/s. coremill on single hosts, `shard` and `replicate` all run at once, but
take turns of a few seconds: who has no turn is stopped (SIGSTOP), processes of its launcher included. What slows the
machine down for longer than a turn then slows all of them down, and ratios say what an exchange costs.

Where the difference goes is told by the kernel's own count (`schedstat`), which standing still does not touch: seconds
that a rank's compute thread ran, was kept from its processor by other threads, and slept, a step. One part is nobody's
exchange: hosts that step together go at the pace of the slower one just then. How much that is can be seen on the
single hosts: in each turn, the slower one's progress over that of both.
Needs root, iproute2 and openssh-server (`make hosts-setup`). Prints figures and targets; asserts nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import tempfile
import time
import uuid
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.hosts.namespaces import fake_hosts

from benchmarks import peers, results, scale_model
from benchmarks.workload import SEQUENCE_LENGTH

CONTENDERS = ("single", "bf16", "replicate")
HOSTS = 2
ENDLESS_STEPS = 100_000
START_SECONDS = 180.0
MARK = "COREMILL_IN_TURNS"

Turn = tuple[float, float]  # from and to, time of day


@dataclass
class Contender:
    """One of those that take turns."""

    key: str
    out: Path
    mark: str
    leader: subprocess.Popen[bytes]
    turns: list[Turn] = field(default_factory=list)
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
        """What each of its two ranks has written down."""
        ranks: list[list[dict[str, Any]]] = []
        for path in sorted(self.out.glob("**/events/rank-*.jsonl")):
            ranks.append([])
            for line in path.read_text().splitlines():
                with contextlib.suppress(json.JSONDecodeError):  # the last line may be half written
                    ranks[-1].append(json.loads(line))
        return ranks

    def step_ends(self) -> list[list[float]]:
        """When each rank ended which step."""
        return [[event["time"] for event in rank if event["kind"] == "step"] for rank in self.events()]

    def read_clocks(self) -> None:
        """How long the compute threads have run so far, and waited for a processor."""
        reading = []
        for rank in self.events():
            pid = next(event["pid"] for event in rank if event["kind"] == "start")
            ran, waited, _ = Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()
            reading.append((int(ran) / 1e9, int(waited) / 1e9))
        self.awake.append(reading)


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


def main(argv: list[str] | None = None) -> int:
    """Take turns for so long; 1 where a contender ended early, else 0, whatever the figures are."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.in_turns", description=(__doc__ or "").split("\n\n")[0].replace("%", "%%")
    )
    parser.add_argument("--seconds", type=float, default=300, help="of turns, after all have started (default 300)")
    parser.add_argument("--turn", type=float, default=3.0, help="seconds of a turn (default 3)")
    parser.add_argument("--cores", type=int, default=1, help="of a host (default 1)")
    parser.add_argument("--gigabits", type=float, default=1.0, help="a second of a host's link (default 1)")
    parser.add_argument("--tokens", type=int, default=scale_model.TOKENS_PER_STEP, help="a step, of both hosts")
    parser.add_argument("--only", default=",".join(CONTENDERS), help="who takes turns (default all)")
    parser.add_argument("--json", type=Path, help="write all figures to this file too")
    parser.add_argument("--folder", type=Path, default=peers.ROOT / "runs" / "peers", help="workload, caches, logs")
    arguments = parser.parse_args(argv)
    keys = arguments.only.split(",")
    if not set(keys) <= set(CONTENDERS):
        parser.error(f"--only takes some of {', '.join(CONTENDERS)}")
    if arguments.tokens < HOSTS * SEQUENCE_LENGTH or arguments.tokens % (HOSTS * SEQUENCE_LENGTH):
        parser.error(f"--tokens takes multiples of {HOSTS * SEQUENCE_LENGTH}: whole rows for each host")
    ours = [str(cpu) for cpu in sorted(os.sched_getaffinity(0))]
    if not 1 <= arguments.cores <= len(ours) // HOSTS:
        parser.error(f"--cores: there are {len(ours)} for {HOSTS} hosts")
    hosts = [",".join(ours[host * arguments.cores :][: arguments.cores]) for host in range(HOSTS)]
    cache = arguments.folder.resolve()
    folder = scale_model.begin(cache, "in-turns")
    work = peers.prepare_workload(cache, folder / "workload.log", "13M")
    go = scale_model.Go(
        folder=folder,
        cache=cache,
        work=work,
        packed=scale_model.pack(folder, cache, work),
        tokens_per_step=arguments.tokens,
        timed_steps=ENDLESS_STEPS,
        timeout_seconds=0,
    )
    contenders: list[Contender] = []
    with tempfile.TemporaryDirectory(prefix="coremill-hosts-") as hosts_folder:
        rate = 1e9 * arguments.gigabits
        with fake_hosts(HOSTS, Path(hosts_folder), link_bits_per_second=rate, cpus=hosts) as fleet:
            try:
                for key in keys:
                    contenders.append(_start(go, fleet, key))
                    _wait_for_steps(contenders[-1])
                    send(signal.SIGSTOP, contenders[-1].pids())
                _take_turns(contenders, arguments.seconds, arguments.turn)
            finally:
                for contender in contenders:
                    _end(contender)
    return _tell(contenders, arguments, go.tokens_per_step)


def _start(go: scale_model.Go, fleet: Any, key: str) -> Contender:
    out = go.folder / key
    out.mkdir()
    seed = peers.SEED
    if key == "single":
        commands = [scale_model.single_host(go, host, out / host.name, seed, len(fleet.hosts)) for host in fleet.hosts]
    else:
        commands = [scale_model.coremill_hosts(go, fleet, out, seed, scale_model.COREMILL[key])]
    mark = (MARK, uuid.uuid4().hex)
    print(f"starting {scale_model.NAMES[key]}", flush=True)
    leader = subprocess.Popen(
        ["bash", "-c", scale_model.together(commands, out)],
        env=peers.environment(go.cache, dict([mark])),
        cwd=peers.ROOT,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    return Contender(key, out, "=".join(mark), leader)


def _wait_for_steps(contender: Contender) -> None:
    """Until both ranks have done two."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and contender.leader.poll() is None:
        ends = contender.step_ends()
        if len(ends) == 2 and min(map(len, ends)) >= 2:
            return
        time.sleep(0.5)
    raise SystemExit(f"{contender.key} did not start; see {contender.out}")


def _take_turns(contenders: Sequence[Contender], seconds: float, turn_seconds: float) -> None:
    pids = {contender.key: contender.pids() for contender in contenders}
    for contender in contenders:
        contender.read_clocks()
    ends_at = time.monotonic() + seconds
    while time.monotonic() < ends_at:
        for contender in contenders:
            began = time.time()
            send(signal.SIGCONT, pids[contender.key])
            time.sleep(turn_seconds)
            send(signal.SIGSTOP, pids[contender.key])
            contender.turns.append((began, time.time()))
    for contender in contenders:
        contender.read_clocks()


def _end(contender: Contender) -> None:
    """Ask, then make sure."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        pids = contender.pids()
        send(number, pids)
        send(signal.SIGCONT, pids)
        deadline = time.monotonic() + 20
        while contender.pids() and time.monotonic() < deadline:
            time.sleep(0.2)
    contender.leader.wait()


def _tell(contenders: Sequence[Contender], arguments: argparse.Namespace, tokens_per_step: int) -> int:
    rates: dict[str, list[float]] = {}  # by turn, tokens a second of both hosts
    slower: list[float] = []
    for contender in contenders:
        ends, turns = contender.step_ends(), contender.turns
        # The first and the last turn have a part of a step of which nobody knows how much was done when.
        known = [turn for turn in turns[1:] if all(turn[1] < each[-1] for each in ends)]
        for since, to in known:
            done = [steps_done(each, turns, to) - steps_done(each, turns, since) for each in ends]
            rates.setdefault(contender.key, []).append(statistics.fmean(done) * tokens_per_step / (to - since))
            if contender.key == "single":
                slower.append(min(done) / statistics.fmean(done))
    print(f"\nturns of {arguments.turn:g} s; by step and rank, seconds of the compute thread:\n")
    print("| contender | tokens/s | s/step | ran | kept waiting | slept | turns |\n|---|---:|---:|---:|---:|---:|---:|")
    for contender in (contender for contender in contenders if contender.key in rates):
        rate = statistics.fmean(rates[contender.key])
        step_seconds = tokens_per_step / rate
        steps = sum(to - since for since, to in contender.turns) / step_seconds
        first, last = contender.awake
        ran, waited = (
            statistics.fmean(after[part] - before[part] for before, after in zip(first, last, strict=True)) / steps
            for part in (0, 1)
        )
        print(
            f"| {scale_model.NAMES[contender.key]} | {rate:.0f} | {step_seconds:.2f} | {ran:.2f} | {waited:.2f}"
            f" | {step_seconds - ran - waited:.2f} | {len(rates[contender.key])} |"
        )
    found_ratios = []
    for key in (key for key in rates if key != "single" and "single" in rates):
        pairs = list(zip(rates[key], rates["single"], strict=False))
        quarters = [pairs[len(pairs) * part // 4 : len(pairs) * (part + 1) // 4] for part in range(4)]
        each = [
            statistics.fmean(mine for mine, _ in quarter) / statistics.fmean(alone for _, alone in quarter)
            for quarter in quarters
            if quarter
        ]
        name = f"tokens/s at {arguments.gigabits:g} Gbit/s, {key} on 2 hosts / single hosts, by quarters of the time"
        found_ratios.append(results.Ratio(name=name, per_round=tuple(each), target=">= 0.95"))
    print("\n" + results.ratio_table(found_ratios))
    if slower:
        print(
            f"\nsingle hosts: the slower one in a turn did {statistics.fmean(slower):.3f} of what both did on average"
        )
    if arguments.json:
        document = {"tokens_per_second_by_turn": rates, "slower_of_two_by_turn": slower}
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")
    return 0 if len(rates) == len(contenders) else 1


if __name__ == "__main__":
    raise SystemExit(main())

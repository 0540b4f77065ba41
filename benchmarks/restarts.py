"""How long a run stands when a rank is killed, with ranks forked by a fork server and with ranks started afresh.

    python -m benchmarks.restarts [--kills 5]                   two runs of two ranks, one after the other

Seconds are from the fault to the first step done again, as the launcher's `restart` events have them. Memory is that of
the command and all it started, shared pages counted once (PSS), in the middle of a step.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path

from chaos.running import Run, make_scene, rank_of

from coremill.supervise.descendants import descendants

WAYS = {"fork": "true", "exec": "false"}
STEPS_BETWEEN = 8


@dataclass(frozen=True)
class Measured:
    """One way of starting ranks."""

    seconds: list[float]
    rank_bytes: int
    other_bytes: int  # the launcher, and the fork server where there is one


def main() -> None:
    """Measure both ways and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=5, help="restarts to measure each way")
    kills = parser.parse_args().kills
    print(f"load average before: {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs", flush=True)
    print("ranks by   restarts   median s   from   to     memory of ranks MB   of launcher and template MB", flush=True)
    with tempfile.TemporaryDirectory(prefix="coremill-restarts-") as folder:
        for way in WAYS:
            found = measure(way, Path(folder), kills)
            low, middle, high = min(found.seconds), statistics.median(found.seconds), max(found.seconds)
            print(
                f"{way:10} {kills:8d} {middle:10.2f} {low:6.2f} {high:6.2f} {found.rank_bytes / 1e6:16.0f}"
                f" {found.other_bytes / 1e6:20.0f}",
                flush=True,
            )
    print(f"load average after: {os.getloadavg()[0]:.1f}")


def measure(way: str, shared: Path, kills: int) -> Measured:
    """One run, its rank 1 killed again and again."""
    run = Run(make_scene(shared), shared / way, shared, settings=[f"supervise.fork_ranks={WAYS[way]}"])
    run.start()
    try:
        for number in range(kills):
            run.wait_steps(STEPS_BETWEEN)
            if number == 0:
                memory = {pid: pss_bytes(pid) for pid in [run.launcher_pid, *descendants(run.launcher_pid)]}
                of_ranks = sum(size for pid, size in memory.items() if rank_of(pid) is not None)
            os.kill(run.rank_pids()[1], signal.SIGKILL)
            run.wait_for(lambda wanted=number + 1: len(run.of("restart")) == wanted, "the restart")
    finally:
        run.kill()
    seconds = [event.number("resumed_seconds") for event in run.of("restart")]
    return Measured(seconds, of_ranks, sum(memory.values()) - of_ranks)


def pss_bytes(pid: int) -> int:
    """Memory of a process, pages that others share counted in part."""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("Pss:")).split()[1])
    return 0


if __name__ == "__main__":
    main()

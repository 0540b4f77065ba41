"""One part of a measurement as its parent has it: a child process (calibrate_child.py), waited for until it has
measured or is stuck."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import coremill
from coremill.errors import CoremillError
from coremill.hardware.probe import environment_snapshot
from coremill.hardware.process_memory import KEEPS_FREED_MEMORY

# A part computes for 5 to 15 s, most of it imports. Where others compute too it takes many times as long, so only what
# it computes counts: ten times as much on each thread, or next to nothing for so long, means that it is stuck.
STUCK_SECONDS = 150.0
LOOK_SECONDS = 10.0  # most parts end before: a look at all processes would be measured too

_MEASURING: set[subprocess.Popen[str]] = set()  # children under way, of all threads

# The user's own settings of these would be measured instead of the machine.
_SPOILING_PREFIXES = ("OMP_", "KMP_", "GOMP_", "MKL_NUM", "ONEDNN_", "DNNL_", "OPENBLAS_NUM")


@dataclass(frozen=True, kw_only=True)
class Part:
    """One child process: what it measures, on which cpus, with how many threads."""

    name: str  # rates, emulated-bf16, base-memory, splits
    cpus: tuple[int, ...]
    threads: int
    with_bf16: bool = False
    copy_bytes: int | None = None
    seconds: float | None = None
    quick: bool = False
    ways: tuple[tuple[tuple[int, ...], ...], ...] = ()  # to split the cpus among processes

    def arguments(self) -> list[str]:
        words = ["--part", self.name, "--threads", str(self.threads), "--cpus", ",".join(map(str, self.cpus))]
        words += ["--bf16"] if self.with_bf16 else []
        words += ["--copy-bytes", str(self.copy_bytes)] if self.copy_bytes is not None else []
        words += ["--seconds", str(self.seconds)] if self.seconds is not None else []
        if self.ways:
            words += ["--ways", ";".join("|".join(",".join(map(str, each)) for each in way) for way in self.ways)]
        return [*words, "--quick"] if self.quick else words


def run_part(part: Part) -> Mapping[str, Any]:
    """Starts the child for one part and reads the JSON it prints."""
    command = _command(part)
    environ = child_environment(environment_snapshot(), part.threads)
    try:
        done = _run(command, {**environ, **(KEEPS_FREED_MEMORY if part.ways else {})}, part)
    except OSError as error:
        raise CoremillError(f"cannot start a process to measure this machine: {error}") from error
    lines = done.stdout.strip().splitlines()
    with contextlib.suppress(ValueError, IndexError):
        result = json.loads(lines[-1])
        if done.returncode == 0 and isinstance(result, dict):
            return result
    ending = f"signal {-done.returncode}" if done.returncode < 0 else f"exit code {done.returncode}"
    complaint = "\n".join(done.stderr.strip().splitlines()[-6:])
    raise CoremillError(
        f"measuring this machine ({part.name}) failed with {ending}",
        why=complaint or ("it was killed, most likely for memory" if done.returncode == -9 else "it said nothing"),
        do="see all of it: " + " ".join(command),
    )


def _command(part: Part) -> list[str]:
    return [sys.executable, "-m", "coremill.hardware.calibrate_child", *part.arguments()]


def _run(command: list[str], environ: Mapping[str, str], part: Part) -> subprocess.CompletedProcess[str]:
    """The child when it has ended; one that is stuck is ended."""
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, env=environ, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True, errors="replace"
    ) as process:
        _MEASURING.add(process)
        try:
            moved = still_seconds = 0.0
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    said, complaint = process.communicate(timeout=LOOK_SECONDS)
                    return subprocess.CompletedProcess(command, process.returncode, said, complaint)
                used = _cpu_seconds(process.pid)
                if used > part.threads * STUCK_SECONDS:
                    words = f"it has computed for {used / part.threads:.0f} s on each thread"
                    raise _stuck(part, f"{words}, where {STUCK_SECONDS / 10:.0f} s are usual")
                if used > moved + STUCK_SECONDS / 100:
                    moved, still_seconds = used, 0.0
                    continue
                # By looks, not by the clock: stopped (Ctrl-Z, a paused container), this process makes none.
                still_seconds += LOOK_SECONDS
                if still_seconds > STUCK_SECONDS:
                    raise _stuck(part, f"it has computed next to nothing for {still_seconds:.0f} s")
        finally:
            _MEASURING.discard(process)
            process.kill()  # nothing where it has ended; else the context would wait for it


@contextlib.contextmanager
def side_by_side(parts: int) -> Iterator[ThreadPoolExecutor]:
    """Threads to run so many parts in; who is asked to stop meanwhile waits for none of them."""
    with ThreadPoolExecutor(max_workers=parts) as pool:
        try:
            yield pool
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in list(_MEASURING):
                process.kill()
            raise


def _cpu_seconds(pid: int) -> float:
    """What a process and those that it started have computed; 0: it has ended."""
    import psutil  # only a measurement needs it

    seconds = 0.0
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        for each in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                seconds += sum(each.cpu_times()[:4])
    return seconds


def _stuck(part: Part, why: str) -> CoremillError:
    return CoremillError(
        f"measuring this machine ({part.name}) did not end",
        why=f"{why}: torch hangs on this machine, or others leave it nothing",
        do="look at the load, then run `coremill doctor`",
    )


def child_environment(environ: Mapping[str, str], threads: int) -> dict[str, str]:
    """The user's environment without thread settings, with ours, and with this very package importable."""
    clean = {name: value for name, value in environ.items() if not name.startswith(_SPOILING_PREFIXES)}
    package_parent = str(Path(coremill.__file__).resolve().parent.parent)
    paths = [package_parent, *filter(None, [clean.get("PYTHONPATH")])]
    return {
        **clean,
        "OMP_NUM_THREADS": str(threads),
        "PYTHONPATH": os.pathsep.join(paths),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }

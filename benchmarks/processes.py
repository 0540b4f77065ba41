"""Run one command with all it starts: output to a log, memory of the tree sampled, a time limit, nothing left behind.

torchrun starts its workers in sessions of their own, so ending a process group is not enough: every descendant ever
seen is remembered, and what still lives at the end is ended one by one.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

# A sample walks /proc once (about 1 ms per 100 processes): twice a second stays below half a percent of one core.
SAMPLE_SECONDS = 0.5
GRACE_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True)
class Finished:
    """How a command ended."""

    returncode: int
    timed_out: bool
    seconds: float
    peak_tree_rss_bytes: int  # largest sum of RSS over the whole tree, launchers and helpers included, as sampled
    log: Path


def run_tree(
    command: Sequence[str],
    *,
    environment: Mapping[str, str],
    folder: Path,
    log: Path,
    timeout_seconds: float,
    on_sample: Callable[[float, int], None] | None = None,
) -> Finished:
    """Run to the end or to the time limit; `on_sample(elapsed_seconds, tree_rss_bytes)` is called twice a second."""
    seen: dict[int, psutil.Process] = {}
    peak_bytes = 0
    began = time.monotonic()
    with log.open("wb") as output:
        leader = subprocess.Popen(
            list(command),
            cwd=folder,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    timed_out = False
    try:
        root = psutil.Process(leader.pid)
        while leader.poll() is None:
            elapsed = time.monotonic() - began
            rss_bytes = _sample(root, seen)
            peak_bytes = max(peak_bytes, rss_bytes)
            if on_sample:
                on_sample(elapsed, rss_bytes)
            if elapsed > timeout_seconds:
                timed_out = True
                break
            time.sleep(SAMPLE_SECONDS)
    finally:
        _end(leader, seen)
    return Finished(
        returncode=leader.returncode,
        timed_out=timed_out,
        seconds=time.monotonic() - began,
        peak_tree_rss_bytes=peak_bytes,
        log=log,
    )


def python_path(source: Path) -> str:
    """The package's source before what the caller's PYTHONPATH names."""
    return os.pathsep.join(filter(None, [str(source), os.environ.get("PYTHONPATH", "")]))


def clean_environment(additions: Mapping[str, str]) -> dict[str, str]:
    """The caller's environment without what would decide for a contender: threads, pinning, ranks, allocator."""
    libraries = ("OMP_", "KMP_", "GOMP_", "MKL_", "ONEDNN_", "DNNL_")
    decided = (*libraries, "PET_", "PMI_", "OMPI_", "TORCHELASTIC_", "ACCELERATE_")
    single = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LD_PRELOAD"}
    kept = {name: value for name, value in os.environ.items() if name not in single and not name.startswith(decided)}
    return {**kept, **additions}


def _sample(root: psutil.Process, seen: dict[int, psutil.Process]) -> int:
    """Remember all descendants; return the sum of their resident bytes."""
    total_bytes = 0
    try:
        members = [root, *root.children(recursive=True)]
    except psutil.Error:
        return 0
    for member in members:
        seen.setdefault(member.pid, member)
        try:
            total_bytes += member.memory_info().rss
        except psutil.Error:
            continue
    return total_bytes


def _end(leader: subprocess.Popen[bytes], seen: dict[int, psutil.Process]) -> None:
    """Ask first, then insist. psutil compares start times, so a reused pid is never touched."""
    if leader.poll() is None:
        with contextlib.suppress(psutil.Error):
            _sample(psutil.Process(leader.pid), seen)
        leader.terminate()
        try:
            leader.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            leader.kill()
    left = [process for process in seen.values() if process.pid != leader.pid and process.is_running()]
    for process in left:
        try:
            process.terminate()
        except psutil.Error:
            continue
    for process in psutil.wait_procs(left, timeout=GRACE_SECONDS / 2)[1]:
        try:
            process.kill()
        except psutil.Error:
            continue
    leader.wait()

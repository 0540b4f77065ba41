"""The self-test: two real ranks on this machine add numbers over gloo and train with each of coremill's engines.

It answers the question that no probe can: does what a run is made of (torch, gloo, transformers, the engines in the
form that the plan gives them here) work on this machine. Both ranks are ended before this returns, whatever happens;
should the doctor itself be killed, the kernel ends them (Linux).
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from coremill.config.schema import DataSection, ParallelSection, RunConfig, TrainSection
from coremill.hardware.calibrate_part import child_environment
from coremill.hardware.facts import Calibration, NodeFacts
from coremill.hardware.instances import this_machine
from coremill.plan.card import read_card
from coremill.plan.engine_cost import engines_for_auto
from coremill.plan.planner import make_plan
from coremill.plan.types import Plan
from coremill.report.terminal import format_bytes, format_seconds
from coremill.world.identity import STORE_FD
from coremill.world.sockets import listen_on_loopback

WORLD_SIZE = 2
TINY_LLAMA = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
# Where measuring failed: the plan's rates do not matter here, and fp32 is asked for.
_NOT_MEASURED = Calibration(
    source="assumed",
    origin="not measured",
    threads=1,
    fp32_matmul_flops_per_second=1e10,
    bf16_matmul_flops_per_second=None,
    copy_bytes_per_second=1e9,
    base_rss_bytes=400_000_000,
    torch_version="",
)
# Engines add gradients up in different orders: by how much their losses may differ, of one.
_SAME_LOSS = {"fp32": 1e-4, "bf16": 1e-2}
_THROUGH = {"memory": "through memory", "wire": "over gloo"}
TIMEOUT_SECONDS = 600.0  # it takes 10 s, and five times that on a machine that is busy: more than that again is stuck
_GRACE_SECONDS = 5.0  # for the other rank to notice and say so, once one has failed


@dataclass(frozen=True, kw_only=True)
class Check:
    """One thing that was tried."""

    name: str
    passed: bool
    detail: str  # what was seen, in words


@dataclass(frozen=True, kw_only=True)
class SelfTest:
    """What the two ranks found."""

    checks: tuple[Check, ...]
    seconds: float
    all_reduce_bytes_per_second: float | None = None

    @property
    def passed(self) -> bool:
        """Whether everything worked."""
        return all(check.passed for check in self.checks)


@dataclass(frozen=True)
class _Ended:
    """How a rank ended."""

    rank: int
    exit_code: int | None  # None: it did not end by itself within the time
    stdout: str
    stderr: str


def self_test(
    node: NodeFacts,
    environ: Mapping[str, str],
    calibration: Calibration | None = None,
    *,
    timeout_seconds: float = TIMEOUT_SECONDS,
    command: Sequence[str] | None = None,
) -> SelfTest:
    """Starts two ranks on loopback and judges what they report (`command` replaces the rank program)."""
    started = time.monotonic()
    argv = list(command or [sys.executable, "-m", "coremill.doctor.rank_program"])
    with tempfile.TemporaryDirectory(prefix="coremill-self-test-") as name:
        folder = Path(name)
        try:
            plans = [plan.to_json() for plan in plans_here(node, calibration)]
        except Exception as error:  # an engine of another package may raise anything: the doctor goes on
            check = Check(name="two ranks", passed=False, detail=f"no plan for them: {error}")
            return SelfTest(checks=(check,), seconds=time.monotonic() - started)
        (folder / "plans.json").write_text(json.dumps(plans), encoding="utf-8")
        (folder / "config.json").write_text(json.dumps(TINY_LLAMA), encoding="utf-8")
        # Rank 0 inherits a socket that listens already: a port that is only looked for may be somebody else's by then.
        with listen_on_loopback() as listener:
            environments = _environments(node, environ, folder, timeout_seconds, listener)
            ranks = _run_ranks(argv, environments, folder, timeout_seconds, listener)
    seconds = time.monotonic() - started
    failures = [failure for ended in _culprits(ranks) if (failure := _failure_of(ended, timeout_seconds))]
    if failures:
        detail = "; ".join(failures)
        return SelfTest(checks=(Check(name="two ranks", passed=False, detail=detail),), seconds=seconds)
    results: list[dict[str, Any]] = [json.loads(ended.stdout.strip().splitlines()[-1]) for ended in ranks]
    rate = min(float(result["all_reduce_bytes_per_second"]) for result in results)
    return SelfTest(checks=judge(results, rate), seconds=seconds, all_reduce_bytes_per_second=rate)


def plans_here(node: NodeFacts, calibration: Calibration | None) -> list[Plan]:
    """Of two ranks on this machine with each engine that a plan may choose, else as it chooses."""
    fleet = this_machine(node, calibration or _NOT_MEASURED)
    card = read_card(config=TINY_LLAMA, name="a tiny Llama")
    dtype: Any = "fp32" if calibration is None else "auto"
    configs = [
        RunConfig(
            data=DataSection(sequence_length=64),
            train=TrainSection(steps=2, tokens_per_step=256),
            parallel=ParallelSection(engine=engine, dtype=dtype, ranks_per_node=WORLD_SIZE),  # type: ignore[arg-type]
        )
        for engine in engines_for_auto(WORLD_SIZE)
    ]
    return [make_plan(config, fleet, card, with_remedies=False) for config in configs]


def judge(results: Sequence[Mapping[str, Any]], rate: float) -> tuple[Check, ...]:
    """Of what the ranks reported (rank_program.py)."""
    engines: list[Mapping[str, Any]] = results[0]["engines"]  # losses are those of both ranks
    found = [engine for result in results for engine in result["engines"]]
    forms = " and ".join(f"{engine['engine']} {_THROUGH[engine['exchange']]}" for engine in engines)
    losses = " then ".join(f"{loss:.4f}" for loss in engines[0]["losses"])
    step_seconds = max(float(engine["step_seconds"]) for engine in found)
    sums_right = all(result["all_reduce_is_right"] for result in results)
    finite = all(engine["weights_moved"] and all(map(math.isfinite, engine["losses"])) for engine in found)
    equal = all(engine["weights_are_equal"] for engine in found)
    alike = all(
        math.isclose(loss, first, rel_tol=_SAME_LOSS[engine["dtype"]])
        for engine in engines
        for loss, first in zip(engine["losses"], engines[0]["losses"], strict=True)
    )
    kept_onednn = not any(result["onednn_was_lost"] for result in results)
    return (
        Check(
            name="collective",
            passed=sums_right,
            detail=f"gloo all-reduce of 2 ranks on loopback {'is right' if sums_right else 'gave WRONG SUMS'}, "
            f"{format_bytes(rate)}/s",
        ),
        Check(
            name="training step",
            passed=finite,
            detail=f"two steps of a tiny Llama in {engines[0]['dtype']} with {forms}, {format_seconds(step_seconds)} or"
            f" less each, loss {losses}" + ("" if finite else ": not finite, or the weights did not move"),
        ),
        Check(
            name="equal weights",
            passed=equal and alike,
            detail=f"both ranks hold {'the same' if equal else 'DIFFERENT'} weights after the steps, and the engines"
            f" come to {'the same' if alike else 'DIFFERENT'} losses",
        ),
        Check(
            name="oneDNN",
            passed=kept_onednn,
            detail="not switched off by the steps"
            if kept_onednn
            else "switched itself off during the steps: products are slow",
        ),
    )


def _environments(
    node: NodeFacts, environ: Mapping[str, str], folder: Path, timeout_seconds: float, listener: socket.socket
) -> list[dict[str, str]]:
    """One environment per rank: which one it is, and where its orders lie."""
    threads = max(1, node.usable_cores // WORLD_SIZE)
    port = listener.getsockname()[1]
    variables = [{STORE_FD: str(listener.fileno())}, *[{} for _ in range(1, WORLD_SIZE)]]
    return [
        {
            **child_environment(environ, threads),
            "RANK": str(rank),
            "WORLD_SIZE": str(WORLD_SIZE),
            "MASTER_PORT": str(port),
            "COREMILL_SELF_TEST_FOLDER": str(folder),
            "COREMILL_SELF_TEST_SECONDS": str(timeout_seconds / 2),
            **own,
        }
        for rank, own in enumerate(variables)
    ]


def _run_ranks(
    argv: Sequence[str],
    environments: Sequence[Mapping[str, str]],
    folder: Path,
    timeout_seconds: float,
    listener: socket.socket,
) -> list[_Ended]:
    """Runs one process per environment until all have ended, one has failed, or the time is up."""
    processes: list[subprocess.Popen[bytes]] = []
    with contextlib.ExitStack() as stack:
        stack.callback(_end_all, processes)
        for rank, environ in enumerate(environments):
            files: list[IO[bytes]] = [
                stack.enter_context((folder / f"{rank}.{name}").open("wb")) for name in ("stdout", "stderr")
            ]
            processes.append(
                subprocess.Popen(
                    argv,
                    env=dict(environ),
                    stdin=subprocess.DEVNULL,
                    stdout=files[0],
                    stderr=files[1],
                    start_new_session=True,
                    pass_fds=[listener.fileno()] if rank == 0 else [],
                )
            )
        listener.close()  # with rank 0 it is to be gone
        for _ in _ticks(timeout_seconds):
            codes = [process.poll() for process in processes]
            if None not in codes:
                break
            if any(codes):
                for _ in _ticks(_GRACE_SECONDS):
                    if all(process.poll() is not None for process in processes):
                        break
                break
        exit_codes = [process.poll() for process in processes]
    return [
        _Ended(rank, code, _text(folder / f"{rank}.stdout"), _text(folder / f"{rank}.stderr"))
        for rank, code in enumerate(exit_codes)
    ]


def _ticks(seconds: float) -> Iterator[None]:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        yield
        time.sleep(0.05)


def _end_all(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Kills what still runs, each with its process group, and collects it."""
    for process in processes:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _culprits(ranks: Sequence[_Ended]) -> list[_Ended]:
    """The ranks that failed by themselves; a rank that was ended on account of another one is not to blame."""
    return [ended for ended in ranks if ended.exit_code] or list(ranks)


def _failure_of(ended: _Ended, timeout_seconds: float) -> str | None:
    """Why this rank did not end well, in one line; None where it did."""
    if ended.exit_code == 0 and _is_result(ended.stdout):
        return None
    last = [line.strip() for line in ended.stderr.strip().splitlines() if line.strip()]
    complaint = f": {last[-1]}" if last else ""
    if ended.exit_code is None:
        return f"rank {ended.rank} did not end within {timeout_seconds:.0f} s and was ended{complaint}"
    if ended.exit_code < 0:
        hint = " (most likely for memory)" if ended.exit_code == -signal.SIGKILL else ""
        return f"rank {ended.rank} was killed by {signal.Signals(-ended.exit_code).name}{hint}{complaint}"
    if ended.exit_code == 0:
        return f"rank {ended.rank} reported nothing{complaint}"
    return f"rank {ended.rank} failed with exit code {ended.exit_code}{complaint}"


def _is_result(stdout: str) -> bool:
    try:
        return isinstance(json.loads(stdout.strip().splitlines()[-1]), dict)
    except (ValueError, IndexError):
        return False


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8", errors="replace")

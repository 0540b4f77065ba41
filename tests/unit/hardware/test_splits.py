from __future__ import annotations

import multiprocessing
import os
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from coremill.errors import CoremillError
from coremill.hardware import splits, step_parts
from coremill.hardware.calibrate import MOST_PROCESSES, PROCESS_BYTES, calibration_of
from coremill.hardware.calibrate_part import Part
from coremill.hardware.facts import SPLIT_WIDTHS
from coremill.hardware.probe import affinity_mask
from unit.hardware.fake_machine import node_of
from unit.hardware.test_calibrate import FakeRunner

torch = pytest.importorskip("torch")


def dies(width: int, tokens: int, dtype: Any) -> step_parts.Work:
    os._exit(3)


class Clock:
    """Of one process: no time passes but what is said to."""

    now = 0.0

    @classmethod
    def passes(cls, seconds: float) -> None:
        cls.now += seconds


def measure(line: Any, makers: dict[str, Any], by_own_clock: bool) -> None:
    splits.MAKERS.update(makers)
    if by_own_clock:
        clock: Any = SimpleNamespace(perf_counter=lambda: Clock.now, process_time=time.process_time)
        splits.time = clock
    cpu = min(affinity_mask())
    try:
        line.send(splits.measure_splits([[[cpu, cpu]], [[cpu], [cpu]]], "fp32", quick=True))
    except EOFError:
        line.send("a process ended")


def in_a_process(by_own_clock: bool = False, **makers: Any) -> Any:
    """What measures forks, which a process that has computed must not: it gets a fresh one, as in calibration."""
    spawning = multiprocessing.get_context("spawn")
    line, theirs = spawning.Pipe()
    process = spawning.Process(target=measure, args=(theirs, makers, by_own_clock))
    process.start()
    theirs.close()
    assert line.poll(120)
    found = line.recv()
    process.join()
    return found


def test_one_process_beside_two_with_real_parts_of_a_step() -> None:
    (one, two), seconds = in_a_process()
    assert (one["processes"], two["processes"]) == (1, 2) and seconds > 0
    assert one["products"] == (1.0,) and one["update"] == 1.0


def as_long_as(slow: float, quick: float, folder: Path, width: int, tokens: int, dtype: Any) -> step_parts.Work:
    """Work that takes one process of two threads 0.9 s, of two processes of one thread the first so long, the other so
    long."""
    seconds = 0.9
    if torch.get_num_threads() == 1:
        try:
            (folder / "the first one").touch(exist_ok=False)
            seconds = slow
        except FileExistsError:
            seconds = quick
    return partial(Clock.passes, seconds)


def in_no_time(width: int, tokens: int, dtype: Any) -> step_parts.Work:
    return partial(Clock.passes, 0.001)


def test_for_the_same_work_of_the_machine_all_wait_for_the_slowest(tmp_path: Path) -> None:
    """Two processes do twice the work in 1.71 s: 0.95 of 0.9 for each. Not 1.05, 1.9, or 0.75 by the quicker one."""
    others = dict.fromkeys(("between", "attention", "update"), in_no_time)
    (_, two), _ = in_a_process(by_own_clock=True, **others, products=partial(as_long_as, 1.71, 1.35, tmp_path))
    assert two["products"][0] == pytest.approx(0.95)


def test_the_quickest_turn_counts() -> None:
    times = {("products", 256): [[1.0, 0.9], [3.0, 0.8], [1.2, 2.0]], ("update", 0): [[1.0, 1.0]]}
    assert splits._rates(2, 1, times).products == (pytest.approx(0.8),)


def test_a_process_that_ends_does_not_leave_the_others_waiting() -> None:
    assert in_a_process(between=dies) == "a process ended"


def test_the_same_work_of_a_machine_counts() -> None:
    for dtype, tokens in splits.TOKENS.items():
        assert splits._size("products", SPLIT_WIDTHS[0], 1, dtype) == tokens
        assert splits._size("products", SPLIT_WIDTHS[0], 16, dtype) == tokens  # ranks take as much at once
    assert splits._size("update", 0, 4, "fp32") * 4 == splits.UPDATED_NUMBERS


class WithoutSplits(FakeRunner):
    def __call__(self, part: Part) -> Any:
        if part.name == "splits":
            raise CoremillError("no more processes")
        return super().__call__(part)


def test_where_they_cannot_be_measured_the_rest_is_there(tmp_path: Any) -> None:
    found = calibration_of(node_of(8), tmp_path, runner=WithoutSplits())
    assert found.splits == () and found.taken_while_busy, "another start tries again"


def test_they_are_measured_in_the_dtype_that_runs_take(tmp_path: Any) -> None:
    for bf16, is_quicker in ((5e8, False), (4e9, True)):  # fp32: 1e9
        runner = FakeRunner(bf16_flops_per_second=bf16)
        calibration_of(node_of(8, isa=("amx_bf16",)), tmp_path / str(bf16), runner=runner)
        (part,) = [part for part in runner.parts if part.name == "splits"]
        assert part.with_bf16 == is_quicker


def test_no_more_processes_than_memory_and_reason_allow(tmp_path: Any) -> None:
    runner = FakeRunner()
    calibration_of(node_of(192, memory_available_bytes=2**40), tmp_path, runner=runner)
    (ways,) = [part.ways for part in runner.parts if part.name == "splits"]
    assert len(ways[0]) == 1 and 2 < sum(map(len, ways)) <= MOST_PROCESSES
    runner = FakeRunner()
    crowded = node_of(16, memory_available_bytes=8 * PROCESS_BYTES)
    found = calibration_of(crowded, tmp_path, runner=runner, refresh=True)
    assert [each.processes for each in found.splits] == [1, 2]
    assert found.taken_while_busy, "others have the memory for now"
    small = replace(crowded, memory_total_bytes=9 * PROCESS_BYTES)
    found = calibration_of(small, tmp_path, runner=runner, refresh=True)
    assert [each.processes for each in found.splits] == [1, 2]
    assert not found.taken_while_busy, "it will never have more"

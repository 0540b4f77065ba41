from __future__ import annotations

import multiprocessing
import os
from typing import Any

import pytest

from coremill.errors import CoremillError
from coremill.hardware import splits, step_parts
from coremill.hardware.calibrate import MOST_PROCESSES, PROCESS_BYTES, Part, calibration_of
from coremill.hardware.facts import SPLIT_WIDTHS
from coremill.hardware.probe import affinity_mask
from unit.hardware.fake_machine import node_of
from unit.hardware.test_calibrate import FakeRunner

torch = pytest.importorskip("torch")


def dies(width: int, tokens: int, dtype: Any) -> step_parts.Work:
    os._exit(3)


def in_a_process(monkeypatch: pytest.MonkeyPatch, **makers: Any) -> Any:
    """What measures forks, which a process that has computed must not: as in calibration it has one of its own."""
    monkeypatch.setattr(splits, "MAKERS", {**step_parts.MAKERS, **makers})
    cpu = min(affinity_mask())
    forking = multiprocessing.get_context("fork")
    line, theirs = forking.Pipe()

    def measure() -> None:
        try:
            theirs.send(splits.measure_splits([[[cpu]], [[cpu], [cpu]]], "fp32", quick=True))
        except EOFError:
            theirs.send("a process ended")

    process = forking.Process(target=measure)
    process.start()
    theirs.close()
    assert line.poll(120)
    found = line.recv()
    process.join()
    return found


def test_one_process_beside_two_with_real_parts_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    (one, two), seconds = in_a_process(monkeypatch)
    assert (one["processes"], two["processes"]) == (1, 2) and seconds > 0
    assert one["products"] == (1.0,) and one["update"] == 1.0
    low, high = splits.BOUNDS
    assert all(low <= two[part][0] <= high for part in ("products", "between", "attention"))


def test_a_process_that_ends_does_not_leave_the_others_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    assert in_a_process(monkeypatch, between=dies) == "a process ended"


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
    assert calibration_of(node_of(8), tmp_path, runner=WithoutSplits()).splits == ()


def test_no_more_processes_than_memory_and_reason_allow(tmp_path: Any) -> None:
    runner = FakeRunner()
    calibration_of(node_of(192, memory_available_bytes=2**40), tmp_path, runner=runner)
    (ways,) = [part.ways for part in runner.parts if part.name == "splits"]
    assert len(ways[0]) == 1 and 2 < sum(map(len, ways)) <= MOST_PROCESSES
    runner = FakeRunner()
    small = calibration_of(node_of(16, memory_available_bytes=8 * PROCESS_BYTES), tmp_path, runner=runner, refresh=True)
    assert [each.processes for each in small.splits] == [1, 2]

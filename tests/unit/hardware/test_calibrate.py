from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coremill.errors import CoremillError, Stopped
from coremill.hardware import calibrate
from coremill.hardware.calibrate import (
    BUSY_EXPIRES_SECONDS,
    cached_calibration,
    calibration_of,
)
from coremill.hardware.calibrate_part import Part
from coremill.hardware.facts import Core, NodeFacts
from unit.hardware.fake_machine import node_of


def split_of(processes: int) -> dict[str, Any]:
    """What the child says of one way to split the cores, as JSON has it."""
    ratios = [1.0, 1.0, 1.0] if processes == 1 else [0.9, 0.95, 1.0]
    return {"processes": processes, "products": ratios, "between": ratios, "attention": ratios, "update": 1.0}


class FakeRunner:
    """Answers like the child and remembers what it was asked."""

    def __init__(self, *, busy_fraction: float = 0.0, bf16_flops_per_second: float = 4e9) -> None:
        self.parts: list[Part] = []
        self.bf16_flops_per_second = bf16_flops_per_second
        self.busy_fraction = busy_fraction
        self.fails = False
        self._lock = threading.Lock()

    def __call__(self, part: Part) -> Mapping[str, Any]:
        with self._lock:
            self.parts.append(part)
        if self.fails:
            raise CoremillError("no")
        return {
            "rates": {
                "fp32_matmul_flops_per_second": 1e9 * part.threads,
                "bf16_matmul_flops_per_second": self.bf16_flops_per_second * part.threads if part.with_bf16 else None,
                "copy_bytes_per_second": 1e10,
                "busy_fraction": self.busy_fraction,
            },
            "emulated-bf16": {"bf16_emulated_flops_per_second": 1e7},
            "base-memory": {"base_rss_bytes": 400_000_000},
            "splits": {"splits": [split_of(len(way)) for way in part.ways], "busy_fraction": self.busy_fraction},
        }[part.name]

    @property
    def measurements(self) -> int:
        return sum(part.name == "base-memory" for part in self.parts)


def test_measured_once_then_read_from_the_cache(tmp_path: Path) -> None:
    runner, said = FakeRunner(), []
    first = calibration_of(node_of(), tmp_path, runner=runner, progress=said.append)
    assert first.source == "measured"
    assert first.fp32_matmul_flops_per_second == 4e9
    assert first.bf16_matmul_flops_per_second == 16e9
    assert first.bf16_emulated_flops_per_second is None
    assert not first.taken_while_busy
    assert len(said) == 1
    assert calibration_of(node_of(), tmp_path, runner=runner, progress=said.append) == first
    assert cached_calibration(node_of(), tmp_path) == first
    assert runner.measurements == 1
    assert len(said) == 1
    assert not list(tmp_path.rglob("*.part"))
    calibration_of(node_of(), tmp_path, runner=runner, refresh=True)
    assert runner.measurements == 2


@pytest.mark.parametrize(
    "other",
    [
        node_of(cpu_model="Other CPU"),
        node_of(isa=()),
        node_of(cores=3),
        node_of(cpu_quota=2.0),
        node_of(siblings=True),
        node_of(numa_nodes=2),
    ],
)
def test_another_machine_has_an_entry_of_its_own(tmp_path: Path, other: NodeFacts) -> None:
    calibration_of(node_of(), tmp_path, runner=FakeRunner())
    assert cached_calibration(other, tmp_path) is None
    assert cached_calibration(node_of(hostname="twin", busy_fraction=0.5), tmp_path) is not None


@pytest.mark.parametrize("name", ["torch_version", "CALIBRATION_VERSION"])
def test_another_version_is_measured_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    calibration_of(node_of(), tmp_path, runner=FakeRunner())
    monkeypatch.setattr(calibrate, name, (lambda: "99.0") if name == "torch_version" else 99)
    assert cached_calibration(node_of(), tmp_path) is None


def test_no_bf16_units_the_cost_of_emulation_is_measured_apart(tmp_path: Path) -> None:
    runner = FakeRunner()
    calibration = calibration_of(node_of(isa=("avx2",)), tmp_path, runner=runner)
    assert calibration.bf16_matmul_flops_per_second is None
    assert calibration.bf16_emulated_flops_per_second == 1e7
    assert sorted(part.name for part in runner.parts) == ["base-memory", "emulated-bf16", "rates", "splits"]
    assert not runner.parts[0].with_bf16


def test_numa_nodes_are_measured_side_by_side_and_added(tmp_path: Path) -> None:
    runner = FakeRunner()
    calibration = calibration_of(node_of(8, numa_nodes=2, siblings=True), tmp_path, runner=runner)
    rates = sorted((part for part in runner.parts if part.name == "rates"), key=lambda part: part.cpus)
    assert [part.cpus for part in rates] == [(0, 1, 2, 3), (4, 5, 6, 7)]  # first hardware thread of each core
    assert [part.threads for part in rates] == [4, 4]
    assert calibration.threads == 8
    assert calibration.fp32_matmul_flops_per_second == 8e9
    assert calibration.copy_bytes_per_second == 2e10


def test_a_quota_limits_threads_and_not_cpus(tmp_path: Path) -> None:
    runner = FakeRunner()
    assert calibration_of(node_of(8, cpu_quota=3.5), tmp_path, runner=runner).threads == 3
    assert runner.parts[0].cpus == tuple(range(8))


def numa_nodes_of(*sizes: int, **changes: Any) -> NodeFacts:
    """A machine with so many cores on each of its NUMA nodes."""
    places = [numa for numa, size in enumerate(sizes) for _ in range(size)]
    cores = tuple(Core(cpus=(cpu,), numa_node=numa, socket=numa) for cpu, numa in enumerate(places))
    return replace(node_of(**changes), cores=cores)


@pytest.mark.parametrize(
    ("node", "threads"),
    [
        (numa_nodes_of(8, 8, cpu_quota=3.0), [2, 1]),
        (numa_nodes_of(8, 8, cpu_quota=1.5), [1]),
        (numa_nodes_of(12, 4, cpu_quota=8.0), [4, 4]),
        (numa_nodes_of(12, 4), [12, 4]),
    ],
)
def test_as_many_threads_are_measured_as_ranks_will_have(tmp_path: Path, node: NodeFacts, threads: list[int]) -> None:
    """The plan takes what was measured for the rate of all usable cores."""
    runner = FakeRunner()
    assert calibration_of(node, tmp_path, runner=runner).threads == node.usable_cores
    rates = sorted((part for part in runner.parts if part.name == "rates"), key=lambda part: part.cpus)
    assert [part.threads for part in rates] == threads


def test_cores_that_lie_otherwise_on_numa_nodes_are_another_machine(tmp_path: Path) -> None:
    """Two jobs of a cluster, 16 cores each: one has no even splits."""
    assert calibration_of(numa_nodes_of(10, 6), tmp_path, runner=FakeRunner()).splits == ()
    assert calibration_of(numa_nodes_of(8, 8), tmp_path, runner=FakeRunner()).splits != ()


def test_what_was_taken_with_little_memory_is_taken_again_where_there_is_more(tmp_path: Path) -> None:
    """A pod of 2 GiB and one of 60 on machines of one kind that share a home folder."""
    runner, all_of_it = FakeRunner(), node_of(8)
    small = replace(all_of_it, memory_limit_bytes=2 * 2**30, memory_available_bytes=2**30)
    first = calibration_of(small, tmp_path, runner=runner)
    assert first.splits == () and not first.taken_while_busy
    assert calibration_of(small, tmp_path, runner=runner) == first and runner.measurements == 1
    again = calibration_of(all_of_it, tmp_path, runner=runner)
    assert [each.processes for each in again.splits] == [1, 2, 4, 8] and runner.measurements == 2
    assert calibration_of(small, tmp_path, runner=runner) == again and runner.measurements == 2


def test_copy_arrays_stay_small_on_a_small_machine(tmp_path: Path) -> None:
    runner = FakeRunner()
    calibration_of(node_of(memory_available_bytes=2**30), tmp_path, runner=runner)
    assert runner.parts[0].copy_bytes == 2**27


@pytest.mark.parametrize(("before", "during"), [(0.9, 0.0), (0.0, 0.9)])
def test_a_disturbed_measurement_is_marked_and_made_again_after_an_hour(
    tmp_path: Path, before: float, during: float
) -> None:
    runner = FakeRunner(busy_fraction=during)
    node = node_of(busy_fraction=before)
    busy = calibration_of(node, tmp_path, runner=runner, clock=lambda: 1000.0)
    assert busy.taken_while_busy
    calibration_of(node, tmp_path, runner=runner, clock=lambda: 1000.0 + BUSY_EXPIRES_SECONDS - 1)
    assert runner.measurements == 1
    assert cached_calibration(node, tmp_path) == busy
    runner.busy_fraction = 0.0
    quiet = replace(node, busy_fraction=0.0)
    later = calibration_of(quiet, tmp_path, runner=runner, clock=lambda: 1000.0 + BUSY_EXPIRES_SECONDS)
    assert runner.measurements == 2
    assert not later.taken_while_busy
    calibration_of(quiet, tmp_path, runner=runner, clock=lambda: 1e9)
    assert runner.measurements == 2


def test_an_expired_entry_serves_where_measuring_fails(tmp_path: Path) -> None:
    runner = FakeRunner(busy_fraction=0.5)
    busy = calibration_of(node_of(), tmp_path, runner=runner, clock=lambda: 0.0)
    runner.fails = True
    said: list[str] = []
    assert calibration_of(node_of(), tmp_path, runner=runner, clock=lambda: 1e6, progress=said.append) == busy
    assert "earlier measurement" in said[-1]


@pytest.mark.parametrize("name", ["rates", "splits"])
def test_a_request_to_stop_is_no_failure_of_a_part(tmp_path: Path, name: str) -> None:
    answer = FakeRunner()

    def runner(part: Part) -> Mapping[str, Any]:
        if part.name == name:
            raise Stopped("SIGTERM")
        return answer(part)

    calibration_of(node_of(busy_fraction=0.5), tmp_path, runner=answer, clock=lambda: 0.0)  # expired: could serve
    with pytest.raises(Stopped):
        calibration_of(node_of(), tmp_path, runner=runner, clock=lambda: 1e6)


def test_without_an_entry_the_failure_is_raised(tmp_path: Path) -> None:
    runner = FakeRunner()
    runner.fails = True
    with pytest.raises(CoremillError):
        calibration_of(node_of(), tmp_path, runner=runner)


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"key": 1}', "zero", "missing"])
def test_a_damaged_entry_is_measured_anew(tmp_path: Path, damage: str) -> None:
    runner = FakeRunner()
    calibration_of(node_of(), tmp_path, runner=runner)
    (file,) = tmp_path.rglob("*.json")
    document = json.loads(file.read_text())
    if damage == "zero":
        document["calibration"]["fp32_matmul_flops_per_second"] = 0
    if damage == "missing":
        del document["calibration"]["threads"]
    file.write_text(json.dumps(document) if damage in ("zero", "missing") else damage)
    assert cached_calibration(node_of(), tmp_path) is None
    calibration_of(node_of(), tmp_path, runner=runner)
    assert runner.measurements == 2
    assert cached_calibration(node_of(), tmp_path) is not None


def test_a_cache_that_cannot_be_written_costs_only_the_next_measurement(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    said: list[str] = []
    calibration = calibration_of(node_of(), blocked / "cache", runner=FakeRunner(), progress=said.append)
    assert calibration.source == "measured"
    assert "could not be kept" in said[-1]


def test_two_at_once_measure_once(tmp_path: Path) -> None:
    pytest.importorskip("fcntl")
    runner, results = FakeRunner(), []
    threads = [
        threading.Thread(target=lambda: results.append(calibration_of(node_of(), tmp_path, runner=runner)))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert runner.measurements == 1
    assert results[0] == results[1] == results[2]

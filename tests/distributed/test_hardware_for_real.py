"""The child processes of calibrate and doctor, started for real."""

from __future__ import annotations

import sys
from pathlib import Path

from coremill.doctor import self_test
from coremill.hardware.calibrate_part import Part, run_part
from coremill.hardware.probe import affinity_mask, environment_snapshot, probe_node


def test_the_calibration_child_measures() -> None:
    part = Part(name="rates", cpus=(min(affinity_mask()),), threads=1, copy_bytes=2**22, seconds=0.02, quick=True)
    rates = run_part(part)
    assert rates["fp32_matmul_flops_per_second"] > 1e6
    assert rates["bf16_matmul_flops_per_second"] is None
    assert rates["copy_bytes_per_second"] > 1e6
    assert 0 <= rates["busy_fraction"] <= 1


def test_two_ranks_add_and_train() -> None:
    tested = self_test(probe_node(busy_seconds=0), environment_snapshot())
    assert tested.passed, tested.checks
    assert [check.name for check in tested.checks] == ["collective", "training step", "equal weights", "oneDNN"]
    assert tested.all_reduce_bytes_per_second and tested.all_reduce_bytes_per_second > 1e6


def run_program(tmp_path: Path, program: str, timeout_seconds: float = 280.0) -> str:
    """The failure text of a self-test whose ranks run this program; all its processes must be gone afterwards."""
    pids = tmp_path / "pids"
    pids.mkdir()
    note = f"import os, sys, time; open({str(pids)!r} + '/' + str(os.getpid()), 'w').close()\n"
    command = [sys.executable, "-c", note + program]
    tested = self_test(
        probe_node(busy_seconds=0), environment_snapshot(), timeout_seconds=timeout_seconds, command=command
    )
    assert not tested.passed
    started = [int(file.name) for file in pids.iterdir()]
    assert started
    assert not [pid for pid in started if Path(f"/proc/{pid}").exists()]
    return tested.checks[0].detail


def test_a_rank_that_fails_is_named_and_the_other_is_ended(tmp_path: Path) -> None:
    text = run_program(tmp_path, "if os.environ['RANK'] == '1': raise ImportError('no gloo')\ntime.sleep(600)")
    assert text == "rank 1 failed with exit code 1: ImportError: no gloo"  # and not that rank 0 was too slow


def test_ranks_that_hang_are_ended(tmp_path: Path) -> None:
    assert "did not end within 8 s" in run_program(tmp_path, "time.sleep(600)", timeout_seconds=8.0)


def test_a_killed_rank_is_explained(tmp_path: Path) -> None:
    text = run_program(tmp_path, "import signal; os.kill(os.getpid(), signal.SIGKILL)")
    assert "rank 0 was killed by SIGKILL (most likely for memory)" in text


def test_silent_ranks_did_not_pass(tmp_path: Path) -> None:
    assert "reported nothing" in run_program(tmp_path, "pass")

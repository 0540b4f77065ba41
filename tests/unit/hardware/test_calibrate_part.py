from __future__ import annotations

import itertools
import subprocess
import sys
import time
from typing import Any

import psutil
import pytest

from coremill.errors import CoremillError, Stopped
from coremill.hardware import calibrate_part
from coremill.hardware.calibrate_part import Part, child_environment, run_part, side_by_side


def test_the_child_does_not_inherit_thread_settings() -> None:
    environ = child_environment({"OMP_NUM_THREADS": "1", "KMP_AFFINITY": "x", "PATH": "/bin", "PYTHONPATH": "/mine"}, 6)
    assert environ["OMP_NUM_THREADS"] == "6"
    assert "KMP_AFFINITY" not in environ
    assert environ["PATH"] == "/bin"
    assert environ["PYTHONPATH"].endswith(":/mine")


SPINNING = [sys.executable, "-c", "while True: pass"]


def run_instead(monkeypatch: pytest.MonkeyPatch, code: str, threads: int = 1) -> Any:
    """What comes of a part whose child is this program."""
    monkeypatch.setattr(calibrate_part, "_command", lambda part: [sys.executable, "-c", code])
    return run_part(Part(name="rates", cpus=(0,), threads=threads))


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("import no_torch", "No module named 'no_torch'"),
        ("import os; os.kill(os.getpid(), 9)", "most likely for memory"),
        ("print('not json')", "exit code 0"),
        ("print('{\"a\": 1}'); exit(3)", "exit code 3"),
    ],
)
def test_a_failing_child_is_explained(monkeypatch: pytest.MonkeyPatch, code: str, expected: str) -> None:
    with pytest.raises(CoremillError) as caught:
        run_instead(monkeypatch, code)
    assert expected in str(caught.value)


@pytest.mark.parametrize(("cpu_seconds", "why"), [(0.0, "next to nothing"), (1.0, "has computed for 1 s")])
def test_a_child_that_is_stuck_is_ended(monkeypatch: pytest.MonkeyPatch, cpu_seconds: float, why: str) -> None:
    monkeypatch.setattr(calibrate_part, "STUCK_SECONDS", 0.4)
    monkeypatch.setattr(calibrate_part, "LOOK_SECONDS", 0.1)
    monkeypatch.setattr(calibrate_part, "_cpu_seconds", lambda pid: cpu_seconds)
    before = set(psutil.Process().children())
    with pytest.raises(CoremillError, match="did not end") as caught:
        run_instead(monkeypatch, "import time; time.sleep(60)")
    assert why in str(caught.value.why)
    assert set(psutil.Process().children()) <= before


def test_a_child_that_others_leave_little_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate_part, "STUCK_SECONDS", 0.4)
    monkeypatch.setattr(calibrate_part, "LOOK_SECONDS", 0.1)
    looks = itertools.count(1)
    monkeypatch.setattr(calibrate_part, "_cpu_seconds", lambda pid: 0.01 * next(looks))
    assert run_instead(monkeypatch, "import time; time.sleep(2); print('{\"a\": 1}')") == {"a": 1}
    assert next(looks) > 2


def test_a_process_that_was_stopped_itself_takes_no_child_for_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-Z, or a container that was paused: the clock went on, and neither of them did."""
    monkeypatch.setattr(calibrate_part, "STUCK_SECONDS", 0.4)
    monkeypatch.setattr(calibrate_part, "LOOK_SECONDS", 0.1)
    looks = itertools.count()

    def stopped_meanwhile(pid: int) -> float:
        next(looks)
        time.sleep(0.15)
        return 0.0

    monkeypatch.setattr(calibrate_part, "_cpu_seconds", stopped_meanwhile)
    with pytest.raises(CoremillError, match="did not end"):
        run_instead(monkeypatch, "import time; time.sleep(60)")
    assert next(looks) > 0.4 / 0.1


def test_who_is_asked_to_stop_waits_for_no_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate_part, "_command", lambda part: [sys.executable, "-c", "import time; time.sleep(60)"])
    with pytest.raises(Stopped), side_by_side(1) as pool:
        measuring = pool.submit(run_part, Part(name="rates", cpus=(0,), threads=1))
        while not calibrate_part._MEASURING and not measuring.done():
            time.sleep(0.01)
        raise Stopped("SIGTERM")
    with pytest.raises(CoremillError, match="signal 9"):
        measuring.result()


def test_what_a_child_starts_counts() -> None:
    """The splits are measured by processes of the part's."""
    with subprocess.Popen(
        [sys.executable, "-c", "import subprocess, sys; subprocess.run(sys.argv[1:])", *SPINNING]
    ) as one:
        try:
            deadline = time.monotonic() + 100
            while calibrate_part._cpu_seconds(one.pid) < 0.5:
                assert one.poll() is None and time.monotonic() < deadline
                time.sleep(0.05)
        finally:
            for each in psutil.Process(one.pid).children():
                each.kill()
    assert calibrate_part._cpu_seconds(one.pid) == 0.0

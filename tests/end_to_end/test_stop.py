"""How runs end before their time: Ctrl-C on a terminal, signals, ranks that die or raise. No process is ever left."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from coremill.child import wrapped
from coremill.world.stop import SAME_PRESS_SECONDS
from end_to_end.scene import DEADLINE_SECONDS, Ended, Running, Scene, left_behind

TRAIN = [sys.executable, "-m", "coremill", "train", "run.yaml", "--nproc", "2"]
WITHOUT_END = ["--set", "train.steps=50000"]  # minutes: far longer than any test waits
ONCE = ["--set", "supervise.restart=false"]

# Found on PYTHONPATH by every Python: rank 1 raises in its third step, as a fault in the model would.
FAULT = """
import importlib.abc, importlib.machinery, os, sys
class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "coremill.train.loop":
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module
        def exec_module(module):
            execute(module)
            steps = module.train_steps
            def train_steps(*arguments, **named):
                for result in steps(*arguments, **named):
                    yield result
                    if result.step == 3 and os.environ["RANK"] == "1":
                        raise ArithmeticError("a fault of rank 1")
            module.train_steps = train_steps
        spec.loader.exec_module = exec_module
        return spec
sys.meta_path.insert(0, Finder())
"""


def events(folder: Path, rank: int = 0) -> list[dict[str, object]]:
    file = folder / "events" / f"rank-{rank:05d}.jsonl"
    whole, _, _ = (file.read_bytes() if file.exists() else b"").rpartition(b"\n")  # the last line may be half written
    return [json.loads(line) for line in whole.splitlines()]


def wait_for(condition: Callable[[], bool], running: Running) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        if running.process.poll() is not None or time.monotonic() > deadline:
            running.kill()
            pytest.fail(f"it ended or took too long: {running.process.returncode}")
        time.sleep(0.05)


@contextlib.contextmanager
def training(scene: Scene, folder: str) -> Iterator[Running]:
    """Two ranks without end, from their third step on."""
    running = scene.start([*TRAIN, *WITHOUT_END, *ONCE, "--set", f"run.folder={folder}"])
    try:
        wait_for(lambda: any(event.get("step") == 3 for event in events(scene.path(folder), 1)), running)
        yield running
    finally:
        if running.process.poll() is None:
            running.kill()


def pid_of(folder: Path, rank: int) -> int:
    return int(str(events(folder, rank)[0]["pid"]))


@pytest.mark.skipif(
    not os.environ.get("COREMILL_LONG_TESTS"), reason="X6b of test_chaos.py does it: COREMILL_LONG_TESTS=1 runs it"
)
def test_sigterm_saves_and_ends(scene: Scene) -> None:
    with training(scene, "term") as running:
        running.process.terminate()
        done = running.end()
    assert done.code == 75, str(done)
    assert not done.left
    assert "SIGTERM: saving, then stopping" in done.out
    assert re.search(r"stopped on request after step \d+, which is saved", done.out), str(done)
    assert not done.err
    assert json.loads((scene.path("term") / "report.json").read_text())["state"] == "stopped"


def test_a_second_ctrl_c_ends_at_once(scene: Scene) -> None:
    with training(scene, "twice") as running:
        os.kill(pid_of(scene.path("twice"), 1), signal.SIGSTOP)  # the other waits for it, and cannot save
        os.killpg(running.process.pid, signal.SIGINT)
        said = ""
        assert running.process.stdout is not None
        while "Ctrl-C: saving, then stopping; Ctrl-C again ends at once" not in said:
            line = running.process.stdout.readline()
            assert line, said
            said += line
        # Another press; one that a wrapper passes on: tests/distributed/test_launch.py.
        time.sleep(SAME_PRESS_SECONDS + 1)
        assert running.process.poll() is None
        os.killpg(running.process.pid, signal.SIGINT)
        done = running.end()
    assert done.code == 130, str(done)
    assert not done.left
    assert "stopped at once (Ctrl-C)" in done.err and "Traceback" not in done.err
    report = json.loads((scene.path("twice") / "report.json").read_text())
    assert (report["state"], report["exit_code"]) == ("stopped", 130)
    assert report["error"]["message"] == "stopped at once (Ctrl-C)"
    assert json.loads(scene.coremill("report", "twice", "--json").out)["state"] == "stopped"


def test_a_killed_rank_ends_the_run_and_is_named(scene: Scene) -> None:
    with training(scene, "killed") as running:
        os.kill(pid_of(scene.path("killed"), 1), signal.SIGKILL)
        done = running.end()
    assert done.code == 137, str(done)
    assert not done.left
    assert done.err.strip() == "error on rank 1: was ended by SIGKILL", str(done)
    report = json.loads((scene.path("killed") / "report.json").read_text())
    assert report["state"] == "failed"
    assert report["error"] | {"traceback": None} == {
        "rank": 1, "message": "was ended by SIGKILL", "exit_code": 137, "traceback": None,
    }  # fmt: skip


def train_with_fault(scene: Scene, folder: str, fault: str) -> Ended:
    """Two ranks with a sitecustomize on their path."""
    place = scene.path(f"fault-{folder}")
    place.mkdir()
    (place / "sitecustomize.py").write_text(fault)
    paths = scene.environ("", {})["PYTHONPATH"]
    environ = {"PYTHONPATH": f"{place}{os.pathsep}{paths}"}
    return scene.run([*TRAIN, *WITHOUT_END, *ONCE, "--set", f"run.folder={folder}"], environ)


def test_a_rank_that_cannot_start_is_shown_by_its_log(scene: Scene) -> None:
    """Nor can the fork server: ranks are started afresh then, and speak for themselves."""
    fault = """
import os, sys
if os.environ.get("RANK") == "1" or "coremill.forked_rank" in sys.orig_argv:
    sys.modules["torch"] = None
"""
    done = train_with_fault(scene, "absent", fault)
    assert done.code == 1, str(done)
    assert not done.left
    (line,) = [line for line in done.out.splitlines() if "the fork server" in line]
    assert "ended with exit code 1 while it imported (ModuleNotFoundError: import of torch halted" in line
    assert done.err.startswith("error on rank 1: failed with exit code 1\ntraceback of rank 1:\n"), str(done)
    assert done.err.count("Traceback") == 1 and "No module named 'torch" in done.err.splitlines()[-1]
    assert json.loads((scene.path("absent") / "report.json").read_text())["error"]["rank"] == 1


def test_a_ranks_exception_is_shown_once_with_its_rank(scene: Scene) -> None:
    done = train_with_fault(scene, "raised", FAULT)
    assert done.code == 1, str(done)
    assert not done.left
    first, second, *rest = done.err.splitlines()
    assert first == "error on rank 1: ArithmeticError: a fault of rank 1"
    assert second == "traceback of rank 1:"
    assert sum("Traceback" in line for line in rest) == 1 and "sitecustomize.py" in done.err
    assert rest[-1].strip() == "ArithmeticError: a fault of rank 1"
    assert "error" not in done.out and "step 3" not in done.err
    # The other rank noticed by itself; what ended it is not what the user is shown.
    report = json.loads((scene.path("raised") / "report.json").read_text())
    assert report["state"] == "failed" and report["error"]["rank"] == 1


def on_a_terminal(scene: Scene, command: list[str], marker: str, until: Callable[[str], bool]) -> tuple[int, str]:
    """Exit code and all that was drawn on a terminal of 80 columns; Ctrl-C is typed when `until` says so."""
    command = wrapped(command, launcher_pid=os.getpid(), cpus=None)
    child, terminal = pty.fork()
    if child == 0:
        try:
            os.chdir(scene.folder)
            os.execve(command[0], command, {**scene.environ(marker, {}), "TERM": "xterm-256color"})
        finally:
            os._exit(127)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    drawn, typed, deadline = b"", False, time.monotonic() + DEADLINE_SECONDS
    while time.monotonic() < deadline:
        if select.select([terminal], [], [], 0.1)[0]:
            try:
                drawn += os.read(terminal, 1 << 16)
            except OSError:  # the other end is closed
                break
        if not typed and until(drawn.decode(errors="replace")):
            os.write(terminal, b"\x03")
            typed = True
    else:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    os.close(terminal)
    return os.waitstatus_to_exitcode(status), drawn.decode()


def plain(drawn: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", drawn)


def test_a_terminal_shows_progress_and_ctrl_c_stops(scene: Scene) -> None:
    command = [*TRAIN, *WITHOUT_END, "--set", "run.folder=terminal"]
    mark = uuid4().hex
    code, drawn = on_a_terminal(scene, command, mark, lambda text: len(re.findall("ETA", text)) > 5)
    text = plain(drawn)
    assert code == 75, text
    assert not left_behind(mark)
    assert "\x1b[?25l" in drawn and drawn.rindex("\x1b[?25h") > drawn.rindex("\x1b[?25l")  # the cursor comes back
    assert re.search(r"training  ━+  \d+/50000  ETA ", text), text
    learning = r"loss \d+\.\d+  learning rate \S+  gradient norm \S+  epoch [\d.]+ of 1732\b"
    pace = r"[\d,]+ tokens/s  utilization [\d.]+ %  memory/rank \d+ MB of [\d.]+ GB"
    assert len(re.findall(learning, text)) > 3 and len(re.findall(pace, text)) > 3, text
    assert max(len(line) for line in re.split(r"[\r\n]", text) if "/" not in line.split(" ")[-1]) <= 80
    assert "Ctrl-C: saving, then stopping; Ctrl-C again ends at once" in text
    assert re.search(r"stopped on request after step \d+, which is saved", text), text
    assert "Traceback" not in text

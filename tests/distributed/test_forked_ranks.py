"""Ranks of a fork server are born as those started afresh are, and never depend on its life."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from coremill.supervise import fork_client
from coremill.supervise.fork_client import ForkServer
from coremill.supervise.hang_detector import HangDetector
from coremill.supervise.ranks import Outcome, run_local_ranks
from coremill.supervise.stuck import Limits
from coremill.world.heartbeat import HeartbeatBoard
from distributed.test_launch import BARE_FORK_SERVER, ENVIRON
from rank_plans import rank_plan

# What a rank can know of itself. Descriptors: whether the numbers in its environment are what they say.
TELL = """
import json, os, signal, stat, subprocess, sys, threading
named = [name for name in ("COREMILL_STORE_FD", "COREMILL_PULSE_FD") if name in os.environ]
numbers = {name: int(os.environ.pop(name).split(":")[0]) for name in named}
del os.environ["MASTER_PORT"]
links = {number: f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")}
held = {number: os.readlink(link) for number, link in links.items() if os.path.islink(link)}
print(json.dumps({
    "environ": dict(os.environ),
    "environ of children": sorted(subprocess.check_output(["env", "-0"]).decode("latin-1").split(chr(0))),
    "sockets": {name: stat.S_ISSOCK(os.fstat(number).st_mode) for name, number in numbers.items()},
    "all sockets": sum("socket" in target for target in held.values()),
    "standard": [held[number] for number in "012"],
    "own session": os.getsid(0) == os.getpid(),
    "child of the launcher": os.getppid() == LAUNCHER,
    "cpus": sorted(os.sched_getaffinity(0)),
    "threads": threading.active_count(),
    "signals": [str(signal.getsignal(number)) for number in (signal.SIGHUP, signal.SIGINT, signal.SIGPIPE, signal.SIGTERM)],
    "folder": os.getcwd(),
}))
"""  # noqa: E501


def launch(folder: Path, code: str, fork_server: ForkServer | None, **options: Any) -> Outcome:
    environ = {**ENVIRON, "ODD": "\udcff ü\n", "COREMILL_STORE_FD": "99"}
    options = {"plan": rank_plan(2), "environ": environ, "fork_server": fork_server, **options}
    return run_local_ranks(argv=[sys.executable, "-c", code], log_folder=folder, **options)


def logs(folder: Path) -> list[str]:
    return [file.read_text() for file in sorted(folder.glob("rank-*.log"))]


def test_a_forked_rank_is_born_as_a_fresh_one(tmp_path: Path) -> None:
    said: list[str] = []
    told = []
    plan = rank_plan(2, cpus=((min(os.sched_getaffinity(0)),), (10_000,)))
    code = TELL.replace("LAUNCHER", str(os.getpid()))
    environ = {**ENVIRON, "ONLY_IN_THE_TEMPLATE": "1"}
    with (
        ForkServer(BARE_FORK_SERVER, environ, tmp_path / "template.log", said.append) as fork_server,
        HeartbeatBoard(2) as board,
    ):
        for way in (fork_server, None):
            folder = tmp_path / ("exec" if way is None else "fork")
            hang_detector = HangDetector(board, Limits(is_watching=False))
            outcome = launch(folder, code, way, plan=plan, hang_detector=hang_detector)
            assert outcome.exit_code == 0, logs(folder)
            told.append([json.loads(line.replace(str(folder), "FOLDER")) for line in logs(folder)])
    assert told[0] == told[1] and said == []
    first = told[0][0]
    assert first["own session"] and first["child of the launcher"] and first["environ"]["ODD"] == "\udcff ü\n"
    assert first["sockets"] == {"COREMILL_STORE_FD": True, "COREMILL_PULSE_FD": False}


def test_a_signal_before_the_rank_listens_is_not_lost(tmp_path: Path) -> None:
    code = """
import os, signal, sys
from coremill.errors import Stopped
from coremill.world.stop import REQUESTS
os.kill(os.getpid(), signal.SIGTERM)
try:
    REQUESTS.listen()
except Stopped as error:
    sys.exit(error.exit_code)
"""
    with ForkServer(BARE_FORK_SERVER, ENVIRON, tmp_path / "template.log", pytest.fail) as fork_server:
        outcome = launch(tmp_path, code, fork_server, plan=rank_plan(1))
    assert (outcome.exit_code, outcome.exit_codes) == (75, (75,))


def test_a_dead_fork_server_is_replaced_and_its_ranks_live_on(tmp_path: Path) -> None:
    said: list[str] = []
    pids: list[int | None] = []
    fork_server = ForkServer(BARE_FORK_SERVER, ENVIRON, tmp_path / "template.log", said.append)

    def kill() -> None:
        if fork_server.pid not in (*pids, None) and len(list(tmp_path.glob("up-*"))) == 2:
            pids.append(fork_server.pid)
            os.kill(fork_server.pid or 0, signal.SIGKILL)

    up = f"pathlib.Path({str(tmp_path)!r}, 'up-' + os.environ['RANK'])"
    code = f"import os, pathlib, time; {up}.touch(); time.sleep(1)"
    with fork_server:
        assert launch(tmp_path, code, fork_server, on_tick=kill).exit_code == 0
        assert said == [] and len(pids) == 1
        assert launch(tmp_path, "import os; print(os.getppid())", fork_server).exit_code == 0
    assert said == ["the fork server was ended by SIGKILL: a new one is started"]
    assert logs(tmp_path) == [f"{os.getpid()}\n"] * 2


def test_a_fork_server_that_cannot_import_is_done_without(tmp_path: Path) -> None:
    said: list[str] = []
    argv = [sys.executable, "-c", "raise ImportError('no such library')"]
    with ForkServer(argv, ENVIRON, tmp_path / "template.log", said.append) as fork_server:
        for _ in range(2):
            assert launch(tmp_path, "print('afresh')", fork_server).exit_code == 0
    assert logs(tmp_path) == ["afresh\n"] * 2
    reason = "ended with exit code 1 while it imported (ImportError: no such library)"
    assert said == [f"the fork server {reason}: ranks are started afresh, which takes longer"]


def test_a_fork_server_with_threads_does_not_fork(tmp_path: Path) -> None:
    said: list[str] = []
    with ForkServer([*BARE_FORK_SERVER, "thread"], ENVIRON, tmp_path / "template.log", said.append) as fork_server:
        for _ in range(2):
            assert launch(tmp_path, "print('afresh')", fork_server).exit_code == 0
    assert logs(tmp_path) == ["afresh\n"] * 2
    (line,) = said
    assert "it has 2 threads, and only a process with one may fork" in line


def test_a_fork_server_that_answers_too_late_has_forked_no_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fork_client, "ANSWER_SECONDS", 1.0)
    said: list[str] = []
    up = f"pathlib.Path({str(tmp_path)!r}, 'up-' + os.environ['RANK'] + f'-{{os.getpid()}}')"
    code = f"import os, pathlib, time; {up}.touch(); time.sleep(1)"
    with ForkServer([*BARE_FORK_SERVER, "late"], ENVIRON, tmp_path / "template.log", said.append) as fork_server:
        assert launch(tmp_path, code, fork_server).exit_code == 0
    assert sorted(file.name.split("-")[1] for file in tmp_path.glob("up-*")) == ["0", "1"]
    assert said == ["the fork server did not answer for 1 s: ranks are started afresh"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_request_to_stop_while_it_imports(tmp_path: Path, number: signal.Signals) -> None:
    argv = [sys.executable, "-c", "import time; time.sleep(600)"]
    with ForkServer(argv, ENVIRON, tmp_path / "template.log", pytest.fail) as fork_server:
        outcome = launch(tmp_path, "", fork_server, on_tick=lambda: os.kill(os.getpid(), number))
        pid = fork_server.pid
    assert (outcome.exit_code, outcome.exit_codes, outcome.on_request) == (75, (), True)
    assert not Path(f"/proc/{pid}").exists()

"""`train --hostfile` while ranks and hosts go away: the group forms again, and nothing is left at the end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from end_to_end.scene import RUN_FILE, make_cache, write_text
from hosts.namespaces import DEVICE, Fleet, clean_environment, fake_hosts, why_not
from tiny_models import make_model, make_tokenizer

_reason = why_not()
pytestmark = pytest.mark.skipif(_reason is not None, reason=f"no hosts here: {_reason}")
DEADLINE_SECONDS = 280
SETTINGS = ("train.steps=1000000", "train.schedule=constant", "checkpoint.every=10steps", "run.export=false")


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("hosts")
    make_tokenizer(make_model(folder / "model", "llama"))
    write_text(folder / "text")
    (folder / "run.yaml").write_text(RUN_FILE)
    make_cache(folder / "cache")
    with fake_hosts(2, folder) as hosts:
        yield hosts


class Training:
    """A run on two hosts, started on the first one."""

    def __init__(self, fleet: Fleet, name: str, *settings: str) -> None:
        self.fleet, self.folder, self.mark = fleet, fleet.folder / name, uuid.uuid4().hex
        words = [word for setting in (*SETTINGS, *settings, f"run.folder={name}") for word in ("--set", setting)]
        hostfile = str(fleet.hostfile("node1 slots=1", "node2 slots=1"))
        command = [sys.executable, "-m", "coremill", "train", "run.yaml", *words]
        self.process = subprocess.Popen(
            fleet.hosts[0].command([*command, "--hostfile", hostfile, "--ssh", fleet.ssh], fleet.folder),
            env={**clean_environment(), "COREMILL_CACHE": str(fleet.folder / "cache"), "MARK": self.mark},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def events(self, kind: str, rank: int | None = None) -> list[dict[str, Any]]:
        files = (self.folder / "events").glob("rank-*.jsonl" if rank is None else f"rank-{rank:05d}.jsonl")
        lines = [line for file in files for line in file.read_bytes().splitlines() if line.endswith(b"}")]
        found = [event for event in map(json.loads, lines) if event["kind"] == kind]
        return sorted(found, key=lambda event: float(event["time"]))

    def pid_of_rank(self, rank: int) -> int:
        return int(self.events("start", rank)[-1]["pid"])

    def wait_for(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not condition():
            if self.process.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"exit code {self.process.poll()}\n{self.end()}")
            time.sleep(0.1)

    def goes_on(self, *, steps: int = 12) -> None:
        """So many more steps are done from now on."""
        now = time.time()
        self.wait_for(lambda: sum(event["time"] > now for event in self.events("step", 0)) >= steps)

    def stop(self) -> str:
        """Ask the head to stop; returns what it printed."""
        self.process.terminate()
        text, _ = self.process.communicate(timeout=DEADLINE_SECONDS)
        return text

    def end(self) -> str:
        """Whatever is still there."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        return self.process.communicate()[0] or ""


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def connection_to(host: str, mark: str) -> int:
    """The ssh of a run that leads there."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (folder / "cmdline").read_bytes().split(b"\0")
            if words[0] == b"ssh" and host.encode() in words and mark.encode() in (folder / "environ").read_bytes():
                return int(folder.name)
    raise AssertionError(f"no connection to {host}")


def losses(training: Training) -> dict[int, float]:
    """By step; a step that was done twice had the same loss."""
    found: dict[int, float] = {}
    for event in training.events("step"):
        assert found.setdefault(event["step"], event["loss"]) == event["loss"], event["step"]
    return found


@pytest.mark.timeout(900)  # four starts, of which each takes a minute on a machine that others use
def test_a_lost_rank_a_lost_launcher_and_a_lost_connection_come_back(fleet: Fleet) -> None:
    training = Training(fleet, "lost")
    try:
        training.goes_on()
        os.kill(training.pid_of_rank(1), signal.SIGKILL)
        training.wait_for(lambda: len(training.events("start", 1)) == 2)
        training.goes_on()
        # The launcher of the second host: its rank goes with it, and the head starts another one.
        os.kill(parent_of(training.pid_of_rank(1)), signal.SIGKILL)
        training.wait_for(lambda: len(training.events("start", 1)) == 3)
        training.goes_on()
        # The connection: nobody asked the run to stop, so it goes on.
        os.kill(connection_to("node2", training.mark), signal.SIGKILL)
        training.wait_for(lambda: len(training.events("start", 1)) == 4)
        training.goes_on()
        text = training.stop()
    finally:
        training.end()
    assert training.process.returncode == 75, text
    assert "host node2: its launcher ended with 137; trying again for up to 600 s" in text
    # Each host tells what it saw: the second one the kill, the first one a lost peer, three times.
    told = [(event["rank"], event["cause"], event["action"]) for event in training.events("fault")]
    assert sorted(told) == [(0, "peer lost", "restart")] * 3 + [(1, "killed", "restart")]
    assert len(losses(training)) == max(losses(training))
    fleet.assert_nothing_left(training.mark)


@pytest.mark.skipif(
    not os.environ.get("COREMILL_LONG_TESTS"), reason="a minute and more: COREMILL_LONG_TESTS=1 runs it"
)
def test_with_fewer_hosts_where_the_config_allows(fleet: Fleet) -> None:
    training = Training(fleet, "fewer", "fleet.min_nodes=1", "supervise.wait_for_hosts=5s")
    link = ["ip", "-n", fleet.hosts[1].namespace, "link", "set", DEVICE]
    try:
        training.goes_on()
        subprocess.run([*link, "down"], check=True)
        training.wait_for(lambda: any(event["world_size"] == 1 for event in training.events("start", 0)))
        training.goes_on()
        text = training.stop()
    finally:
        subprocess.run([*link, "up"], check=True)
        training.end()
    assert training.process.returncode == 75, text
    assert "host node2 is given up; the run goes on with 1 of 2" in text
    fleet.assert_nothing_left(training.mark, within_seconds=60)

"""Two hosts that share no disk for what a run writes: each has a small one of its own mounted at the same path."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from end_to_end.scene import RUN_FILE, make_cache, write_text
from hosts.namespaces import Fleet, clean_environment, fake_hosts, why_not
from tiny_models import make_model, make_tokenizer

_reason = why_not()
pytestmark = [
    pytest.mark.skipif(_reason is not None, reason=f"no hosts here: {_reason}"),
    pytest.mark.skipif(
        not os.environ.get("COREMILL_LONG_TESTS"), reason="a minute and more: COREMILL_LONG_TESTS=1 runs it"
    ),
]
WAIT_SECONDS = 280


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    make_tokenizer(make_model(tmp_path / "model", "llama"))
    write_text(tmp_path / "text")
    (tmp_path / "run.yaml").write_text(RUN_FILE)
    make_cache(tmp_path / "cache")
    (tmp_path / "disk").mkdir()
    with fake_hosts(2, tmp_path) as hosts:
        for host in hosts.hosts:  # in the host's own mount namespace
            mount = ["mount", "-t", "tmpfs", "-o", "size=200m,mode=755", host.name, str(tmp_path / "disk")]
            subprocess.run(host.command(mount), check=True)
        yield hosts


def disk(fleet: Fleet, host: int) -> Path:
    """A host's own disk, seen from here."""
    return Path(f"/proc/{fleet.hosts[host].sshd_pid}/root{fleet.folder}/disk")


def start(fleet: Fleet, mark: str, *settings: str, swapped: bool = False) -> subprocess.Popen[str]:
    chosen = ("run.folder=disk/run", "train.schedule=constant", "checkpoint.every=10steps", *settings)
    words = [word for setting in chosen for word in ("--set", setting)]
    command = [sys.executable, "-m", "coremill", "train", "run.yaml", *words, "--ssh", fleet.ssh]
    lines = ("node1 slots=1", "node2 slots=1")
    hostfile = str(fleet.hostfile(*(reversed(lines) if swapped else lines)))
    return subprocess.Popen(
        fleet.hosts[int(swapped)].command([*command, "--hostfile", hostfile], fleet.folder),
        env={**clean_environment(), "COREMILL_CACHE": str(fleet.folder / "cache"), "MARK": mark},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def steps_of(fleet: Fleet, host: int) -> list[str]:
    return sorted(path.name for path in (disk(fleet, host) / "run" / "checkpoints").glob("step-*"))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("swapped", [False, True], ids=["as before", "hosts swapped"])
def test_a_run_on_hosts_without_a_shared_disk_stops_goes_on_and_ends(fleet: Fleet, swapped: bool) -> None:
    """With the hosts swapped the second host leads, and has events of a rank that writes elsewhere now."""
    mark = uuid.uuid4().hex
    first = start(fleet, mark, "train.steps=1000000")
    try:
        deadline = time.monotonic() + WAIT_SECONDS
        while len(steps_of(fleet, 1)) < 2 and first.poll() is None and time.monotonic() < deadline:
            time.sleep(0.2)
        first.terminate()
        text, _ = first.communicate(timeout=WAIT_SECONDS)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(first.pid, signal.SIGKILL)
    assert first.returncode == 75, text
    assert "checkpoints: per host, because node2 does not see node1's folder" in text
    assert steps_of(fleet, 0) == steps_of(fleet, 1) and len(steps_of(fleet, 0)) == 2
    newest = [disk(fleet, host) / "run" / "checkpoints" / steps_of(fleet, host)[-1] for host in (0, 1)]
    assert (newest[0] / "manifest.json").read_bytes() == (newest[1] / "manifest.json").read_bytes()
    assert [[path.name for path in each.glob("rank-*")] for each in newest] == [
        [f"rank-0000{host}-of-00002.safetensors"] for host in (0, 1)
    ]
    step = int(newest[0].name.removeprefix("step-"))
    second = start(fleet, mark, f"train.steps={step + 5}", swapped=swapped)
    try:
        text, _ = second.communicate(timeout=WAIT_SECONDS)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(second.pid, signal.SIGKILL)
    assert second.returncode == 0, text
    assert f"this host has its part of step {step}" in text and f"the run goes on after step {step}" in text
    report = json.loads((disk(fleet, int(swapped)) / "run" / "report.json").read_text())
    assert report["state"] == "finished" and report["steps"] == step + 5
    assert steps_of(fleet, 0)[-1] == steps_of(fleet, 1)[-1] == f"step-{step + 5:08d}"
    assert not [path for host in (0, 1) for path in (disk(fleet, host) / "run" / "checkpoints").glob(".*")]
    fleet.assert_nothing_left(mark)

"""`coremill train --hostfile` while it runs: its connections, its environment, torch's debugging, Ctrl-C; and hosts
that differ, or have the same name, under every launcher."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from coremill.hosts.fingerprint import digest_of_files
from coremill.plan.headers import read_file_header
from end_to_end.scene import RUN_FILE, make_cache, write_text
from hosts.namespaces import DEVICE, Fleet, clean_environment, fake_hosts, free_port, why_not
from tiers import long_test
from tiny_models import make_model, make_tokenizer

FLOWS = 4  # named by the user: by itself coremill opens one for every two cores
WAIT_SECONDS = 240  # only a hang takes that long

_reason = why_not()
pytestmark = pytest.mark.skipif(_reason is not None, reason=f"no hosts here: {_reason}")


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("train-on-hosts")
    make_tokenizer(make_model(folder / "model", "llama"))
    write_text(folder / "text")
    (folder / "run.yaml").write_text(RUN_FILE)
    make_cache(folder / "cache")
    with fake_hosts(2, folder) as hosts:
        yield hosts


def steps_of(run: Path, rank: int) -> list[dict]:
    file = run / "events" / f"rank-{rank:05d}.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n") and '"step"' in line[:20]]


def busy_connections(fleet: Fleet, least_bytes: int) -> int:
    """TCP connections from the first host to the second that have carried so many bytes each way."""
    done = fleet.run(["ss", "--tcp", "--info", "--no-header", "--oneline", "dst", fleet.hosts[1].address])
    found = 0
    for line in done.stdout.splitlines():
        sent, received = (re.search(rf"\bbytes_{way}:(\d+)", line) for way in ("sent", "received"))
        is_ssh = re.search(r":(22|ssh)\s", line)
        found += not is_ssh and all(count and int(count[1]) >= least_bytes for count in (sent, received))
    return found


@pytest.mark.timeout(900)  # a minute alone; four processes import torch, which takes minutes where others compute
def test_a_run_on_two_hosts_and_its_end_by_ctrl_c(fleet: Fleet) -> None:
    run, mark = fleet.folder / "run", uuid.uuid4().hex
    command = [sys.executable, "-m", "coremill", "train", "run.yaml", "--set", "train.steps=50000"]
    command += ["--set", "parallel.engine=shard", "--hostfile", str(fleet.hostfile()), "--ssh", fleet.ssh]
    debugging = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL", "GLOO_LOG_LEVEL": "DEBUG"}
    named = {"GLOO_SOCKET_IFNAME": ",".join([DEVICE] * FLOWS)}
    environ = {**clean_environment(), **debugging, **named, "COREMILL_CACHE": str(fleet.folder / "cache"), "MARK": mark}
    process = subprocess.Popen(
        fleet.hosts[0].command(command, fleet.folder),
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        deadline = time.monotonic() + WAIT_SECONDS
        while len(steps_of(run, 1)) < 12 and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.2)
        assert process.poll() is None and len(steps_of(run, 1)) >= 12, process.communicate(timeout=60)[0]
        # A tiny model's pieces are too small to be cut: exchanges take the connections in turn.
        assert busy_connections(fleet, least_bytes=10_000) >= FLOWS
        pid = json.loads((run / "events" / "rank-00001.jsonl").read_text().splitlines()[0])["pid"]
        seen = dict(item.split("=", 1) for item in Path(f"/proc/{pid}/environ").read_text().split("\0") if "=" in item)
        assert "MALLOC_TRIM_THRESHOLD_" in seen or "LD_PRELOAD" in seen
        assert {**debugging, **named}.items() <= seen.items()
        process.send_signal(signal.SIGINT)  # nsenter became the launcher
        output, _ = process.communicate(timeout=WAIT_SECONDS)
    finally:
        process.kill()
    assert process.returncode == 75, output
    assert "stopped on request" in output
    assert re.search(r"network between 2 hosts: [\d.]+ Gbit/s", (run / "logs" / "rank-00000.log").read_text())
    last = steps_of(run, 0)[-1]["step"]
    saved = [
        json.loads(line) for line in (run / "events" / "rank-00000.jsonl").read_text().splitlines() if '"save"' in line
    ]
    assert saved[-1]["step"] == last and saved[-1]["saved"]
    assert list((run / "checkpoints").glob(f"step-{last:08d}"))
    use = steps_of(run, 0)[-1]["collectives"]
    assert set(use) == {"gather", "reduce_scatter", "agreement"}
    assert all(0 <= one["exposed_seconds"] <= one["seconds"] and one["bytes"] > 0 for one in use.values())
    fleet.assert_nothing_left(mark)


# --- hosts that differ, hosts of one name

TRAIN = [sys.executable, "-m", "coremill", "train", "run.yaml"]
LONG = pytest.mark.skipif(
    not os.environ.get("COREMILL_LONG_TESTS"), reason="the other launchers: COREMILL_LONG_TESTS=1 runs them"
)


@pytest.fixture
def other_word(fleet: Fleet) -> Iterator[None]:
    """On the second host one word of the text is another."""
    text = fleet.folder / "text" / "part.jsonl"
    other = fleet.folder / "other.jsonl"
    other.write_text(text.read_text().replace("wheel", "wheat", 1))
    host = fleet.hosts[1]
    subprocess.run(host.command(["mount", "--bind", str(other), str(text)]), check=True)
    yield
    subprocess.run(host.command(["umount", str(text)]), check=True)


def on_each(
    fleet: Fleet, commands: list[list[str]], environs: list[dict[str, str]]
) -> list[subprocess.CompletedProcess[str]]:
    """A command on each host at the same time, as people or pods start them."""
    processes = [
        subprocess.Popen(
            host.command(command, fleet.folder),
            env={**clean_environment(), "COREMILL_CACHE": str(fleet.folder / "cache"), **environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for host, command, environ in zip(fleet.hosts, commands, environs, strict=True)
    ]
    try:
        told = [process.communicate(timeout=WAIT_SECONDS)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [
        subprocess.CompletedProcess(command, process.returncode, text)
        for command, process, text in zip(commands, processes, told, strict=True)
    ]


def said_of_the_data(text: str) -> bool:
    return "node2 and node1 differ in the data" in text and bool(
        re.search(r"the data: .+ 60 documents, hash \S+ on node1 .+; .+ hash \S+ on node2", text)
    )


@pytest.mark.timeout(900)
@pytest.mark.usefixtures("other_word")
@pytest.mark.parametrize(
    "via",
    [
        pytest.param((), id="coremill", marks=long_test("tests/distributed/test_hosts_agree.py compares hosts")),
        pytest.param(("--via", "torchrun"), id="torchrun", marks=LONG),
        pytest.param(("--via", "mpirun", "--mpirun", "mpirun.openmpi"), id="Open MPI", marks=LONG),
    ],
)
def test_hosts_with_different_data_are_refused(fleet: Fleet, via: tuple[str, ...]) -> None:
    mark, words = uuid.uuid4().hex, ["--hostfile", str(fleet.hostfile()), "--ssh", fleet.ssh, *via]
    started = ["--set", "run.folder=differ", "--set", "parallel.engine=replicate", "--ppn", "1"]
    done = fleet.run([*TRAIN, *started, *words], COREMILL_CACHE=str(fleet.folder / "cache"), MARK=mark)
    assert done.returncode == 78, done.stdout + done.stderr
    assert said_of_the_data(done.stdout + done.stderr), done.stdout + done.stderr
    assert not list((fleet.folder / "differ").glob("checkpoints/step-*"))
    fleet.assert_nothing_left(mark)


@LONG
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("other_word")
def test_pods_with_different_data_are_refused(fleet: Fleet) -> None:
    mark, port = uuid.uuid4().hex, str(free_port())
    node = {"PET_NNODES": "2", "PET_MASTER_ADDR": "node1", "PET_MASTER_PORT": port, "PET_NPROC_PER_NODE": "1"}
    environs = [{**node, "PET_NODE_RANK": str(rank), "MARK": mark} for rank in (0, 1)]
    command = [*TRAIN, "--set", "run.folder=pods", "--set", "parallel.engine=replicate"]
    for done in on_each(fleet, [command, command], environs):
        assert done.returncode == 78 and said_of_the_data(done.stdout), done.stdout
    fleet.assert_nothing_left(mark)


def with_a_changed_weight(folder: Path) -> Path:
    """Weights beside tensors that no model has, so large that the hosts' comparison takes samples; and a copy of which
    one bit, of a weight, is another, where no sample was taken."""
    import torch
    from safetensors.torch import load_file, save_file

    file, changed = folder / "model.safetensors", folder / "changed" / "model.safetensors"
    weights = load_file(file)
    save_file({**weights, "a.unused": torch.zeros(6_000_000), "z.unused": torch.zeros(6_000_000)}, file)
    changed.parent.mkdir()
    header = read_file_header(file)["model.layers.0.mlp.up_proj.weight"]
    content = bytearray(file.read_bytes())
    for place in range(header.start, header.end, 4):
        content[place] ^= 1
        changed.write_bytes(content)
        if digest_of_files([changed]) == digest_of_files([file]):
            return changed
        content[place] ^= 1
    raise AssertionError("all of it is sampled")


@LONG
@pytest.mark.timeout(900)
def test_replicas_that_read_different_weights_end_with_70(fleet: Fleet) -> None:
    mark, model = uuid.uuid4().hex, make_tokenizer(make_model(fleet.folder / "padded", "llama"))
    changed = with_a_changed_weight(model)
    mount = ["mount", "--bind", str(changed), str(model / "model.safetensors")]
    subprocess.run(fleet.hosts[1].command(mount), check=True)
    words = ["--set", "run.folder=drift", "--set", "model=padded", "--set", "parallel.engine=replicate", "--ppn", "1"]
    words += ["--hostfile", str(fleet.hostfile()), "--ssh", fleet.ssh]
    done = fleet.run([*TRAIN, *words], COREMILL_CACHE=str(fleet.folder / "cache"), MARK=mark)
    assert done.returncode == 70, done.stdout + done.stderr
    told = "rank 0 on node1 and rank 1 on node2 hold different weights after loading"
    assert told in done.stdout + done.stderr and "model.layers.0.mlp.up_proj.weight" in done.stdout + done.stderr
    assert not list((fleet.folder / "drift").glob("checkpoints/step-*"))
    fleet.assert_nothing_left(mark)


@LONG
@pytest.mark.timeout(900)
def test_hosts_of_one_name_are_two(fleet: Fleet) -> None:
    """Two ranks on each under torchrun: a network between them is measured, and each plans with its own cores."""
    mark, port = uuid.uuid4().hex, str(free_port())
    run = fleet.folder / "clones"
    words = ["-m", "coremill", "train", "run.yaml", "--set", f"run.folder={run}"]
    commands = [
        [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={rank}", "--nproc-per-node=2"]
        + ["--master-addr=node1", f"--master-port={port}", *words]
        for rank in (0, 1)
    ]
    for host in fleet.hosts:
        subprocess.run(host.command(["hostname", "localhost"]), check=True)
    try:
        first, second = on_each(fleet, commands, [{"MARK": mark}] * 2)
    finally:
        for host in fleet.hosts:
            subprocess.run(host.command(["hostname", host.name]), check=True)
    assert (first.returncode, second.returncode) == (0, 0), first.stdout + second.stdout
    measured = re.search(r"network between 2 hosts: ([\d.e+-]+) Gbit/s", first.stdout)
    assert measured and float(measured[1]) > 0, first.stdout
    assert "4 ranks started on 2 machines" in first.stdout
    report = json.loads((run / "report.json").read_text())
    assert report["environment"]["hosts"] == ["localhost (node 0)", "localhost (node 1)"]
    fleet.assert_nothing_left(mark)


@pytest.mark.skipif(not os.environ.get("COREMILL_LONG_TESTS"), reason="takes a minute: COREMILL_LONG_TESTS=1 runs it")
@pytest.mark.timeout(900)
def test_a_second_start_is_refused_and_a_second_ctrl_c_ends_all_hosts_at_once(fleet: Fleet) -> None:
    run, mark = fleet.folder / "owned", uuid.uuid4().hex
    command = [sys.executable, "-m", "coremill", "train", "run.yaml", "--set", "train.steps=50000"]
    command += ["--set", "run.folder=owned", "--set", "supervise.stuck_after=never"]
    command += ["--hostfile", str(fleet.hostfile()), "--ssh", fleet.ssh]
    environ = {**clean_environment(), "COREMILL_CACHE": str(fleet.folder / "cache"), "MARK": mark}
    pipes = {"env": environ, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(fleet.hosts[0].command(command, fleet.folder), **pipes)
    try:
        deadline = time.monotonic() + WAIT_SECONDS
        while len(steps_of(run, 1)) < 3 and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.2)
        assert process.poll() is None and len(steps_of(run, 1)) >= 3, process.communicate(timeout=60)[0]
        again = fleet.hosts[0].command([*command, "--fresh"], fleet.folder)
        second = subprocess.run(again, timeout=WAIT_SECONDS, **pipes)
        assert second.returncode == 78, second.stdout
        assert re.search(r"owned is the folder of a run that is going on: host \S+, process \d+, since", second.stdout)
        assert process.poll() is None
        lines = (run / "events" / "rank-00001.jsonl").read_text().splitlines()
        assert sum('"start"' in line for line in lines) == 1, "no rank of the second start wrote into the run"
        pid = json.loads(lines[0])["pid"]
        os.kill(pid, signal.SIGSTOP)  # the other waits for it, and cannot save
        process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)  # the same press
        time.sleep(2)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)  # two minutes were given to the save
    finally:
        process.kill()
    assert process.returncode == 130, output
    assert "stopped at once (Ctrl-C)" in output
    report = json.loads((run / "report.json").read_text())
    assert (report["state"], report["exit_code"]) == ("stopped", 130)
    fleet.assert_nothing_left(mark)

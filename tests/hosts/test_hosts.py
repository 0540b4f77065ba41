"""Real hosts, as far as one machine can have them: `launch` and `train` over ssh, torchrun and both MPIs."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from end_to_end.scene import RUN_FILE, make_cache, write_text
from hosts.namespaces import DEVICE, Fleet, clean_environment, fake_hosts, why_not
from tiers import IS_LONG
from tiny_models import make_model, make_tokenizer

LAUNCHED = Path(__file__).resolve().parents[1] / "launched"
WAYS = {
    "torchrun": ("--via", "torchrun"),
    "Open MPI": ("--via", "mpirun", "--mpirun", "mpirun.openmpi"),
    "MPICH": ("--via", "mpirun", "--mpirun", "mpirun.mpich"),
    # Where it is installed: `pip install impi-rt` brings it too.
    "Intel MPI": ("--via", "mpirun", "--mpirun", os.environ.get("I_MPI_ROOT", "/opt/intel/mpi") + "/bin/mpiexec.hydra"),
}
LOSS_TOLERANCE = 1e-5  # relative, fp32 wire: sums in another order

_reason = why_not()
pytestmark = pytest.mark.skipif(_reason is not None, reason=f"no hosts here: {_reason}")


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Four hosts and a shared folder with scripts, a tiny model, text and a run file."""
    folder = tmp_path_factory.mktemp("hosts")
    for script in LAUNCHED.glob("*.py"):
        shutil.copy(script, folder)
    make_tokenizer(make_model(folder / "model", "llama"))
    write_text(folder / "text")
    (folder / "run.yaml").write_text(RUN_FILE)
    make_cache(folder / "cache")
    with fake_hosts(4, folder) as hosts:
        yield hosts


def way(name: str) -> tuple[str, ...]:
    words = WAYS[name]
    if words[-1] != "torchrun" and shutil.which(words[-1]) is None:
        cure = "I_MPI_ROOT says where it is" if name == "Intel MPI" else "make hosts-setup"
        pytest.skip(f"{words[-1]} is not installed ({cure})")
    return words


def said(output: str) -> list[dict]:
    entries = [json.loads(line.split("SAID ", 1)[1]) for line in output.splitlines() if "SAID " in line]
    return sorted(entries, key=lambda entry: entry["rank"])


@pytest.mark.parametrize("name", WAYS)
def test_a_script_on_two_hosts(fleet: Fleet, name: str) -> None:
    """With torchrun a torch.distributed script; with the MPIs one without torch, for training follows below."""
    words, hostfile = way(name), str(fleet.hostfile("node1 slots=1", "node2 slots=1"))
    script = "plain_distributed.py" if name == "torchrun" else "who_am_i.py"
    done = fleet.launch("--hostfile", hostfile, *words, "--prefix", script, OF_THE_USER="went along")
    assert done.returncode == 0, done.stderr
    entries = said(done.stdout)
    assert [(entry["rank"], entry["local"], entry["host"]) for entry in entries] == [
        (0, [0, 1], "node1"),
        (1, [0, 1], "node2"),
    ]
    everything = sorted(os.sched_getaffinity(0))
    for entry in entries:
        environ = entry["environ"]
        assert (environ["GLOO_SOCKET_IFNAME"], environ["OF_THE_USER"]) == (",".join([DEVICE] * 4), "went along")
        # These hosts are one machine: a rank that has a host to itself is not squeezed onto its first core.
        assert entry["allowed"] == everything and environ["OMP_NUM_THREADS"] == str(len(everything))
        assert entry.get("sum", 3.0) == 3.0
        assert f"[{entry['rank']}] SAID" in done.stdout
    assert re.search(r"^coremill: node2: OMP_NUM_THREADS=\d+  \(.+\)$", done.stderr, re.MULTILINE)


@pytest.mark.parametrize("by", ["variable", "option"])
def test_threads_are_judged_on_the_host_of_the_rank(fleet: Fleet, by: str) -> None:
    """More than four times what this machine has, which was refused where the command is typed."""
    words, hostfile = way("MPICH"), str(fleet.hostfile("node1 slots=1", "node2 slots=1"))
    option, environ = (("--threads", "2300"), {}) if by == "option" else ((), {"OMP_NUM_THREADS": "2300"})
    done = fleet.launch("--hostfile", hostfile, *words, *option, "who_am_i.py", **environ)
    assert done.returncode == 0, done.stderr
    assert [entry["environ"]["OMP_NUM_THREADS"] for entry in said(done.stdout)] == ["2300", "2300"]
    told = re.findall(r"^coremill: warning: 2300 threads share \d+ hardware threads? on (node\d)", done.stderr, re.M)
    assert sorted(told) == ["node1", "node2"]


@pytest.mark.parametrize("name", WAYS)
def test_a_failure_on_another_host_ends_all_and_is_named(fleet: Fleet, name: str) -> None:
    words, mark = way(name), uuid.uuid4().hex
    hostfile = str(fleet.hostfile("node1:1", "node2:1"))
    done = fleet.launch("-q", "--no-check", "--hostfile", hostfile, *words, "who_am_i.py", "fail", MARK=mark)
    assert done.returncode == 1
    end = done.stderr[done.stderr.index("coremill: rank 1 on node2 failed with exit code 1") :]
    assert end.rstrip().endswith("ValueError: poisoned batch")
    fleet.assert_nothing_left(mark)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_launcher_that_ends_leaves_nothing_on_any_host(fleet: Fleet, how: signal.Signals) -> None:
    mark = uuid.uuid4().hex
    words = (
        "-m",
        "coremill",
        "launch",
        "--ssh",
        fleet.ssh,
        "-q",
        "--no-check",
        "--hostfile",
        str(fleet.hostfile("node2")),
    )
    process = subprocess.Popen(
        fleet.hosts[0].command([sys.executable, *words, "--ppn", "2", "who_am_i.py", "sleep"], fleet.folder),
        env={**clean_environment(), "MARK": mark},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    entries = said("".join(process.stdout.readline() for _ in range(2)))
    assert {entry["host"] for entry in entries} == {"node2"}
    process.send_signal(how)  # nsenter became the launcher
    process.communicate(timeout=240)
    fleet.assert_nothing_left(mark)


def train(fleet: Fleet, run: str, *words: str) -> float:
    """The last loss of a training run."""
    command = [
        sys.executable,
        "-m",
        "coremill",
        "train",
        "run.yaml",
        "--set",
        f"run.folder={run}",
        "--set",
        "run.export=false",
    ]
    done = fleet.run([*command, *words], COREMILL_CACHE=str(fleet.folder / "cache"))
    assert done.returncode == 0, done.stdout + done.stderr
    return float(json.loads((fleet.folder / run / "report.json").read_text())["loss_last"])


@pytest.fixture(scope="module")
def loss_of_one_process(fleet: Fleet) -> float:
    return train(fleet, "one", "--nproc", "1")


@pytest.mark.parametrize(
    ("name", "hosts"),
    [(name, hosts) for hosts in (2, 4) for name in WAYS],
)
def test_training_has_the_loss_of_one_process(fleet: Fleet, loss_of_one_process: float, name: str, hosts: int) -> None:
    words = way(name)
    if not IS_LONG and (hosts > 2 or name != "Open MPI"):
        pytest.skip("two hosts by one launcher; COREMILL_LONG_TESTS=1 runs four hosts, and all launchers")
    hostfile = str(fleet.hostfile(*(f"node{index + 1} slots=1" for index in range(hosts))))
    run = f"run-{name.replace(' ', '-')}-{hosts}"
    loss = train(fleet, run, "--hostfile", hostfile, "--ssh", fleet.ssh, *words)
    assert loss == pytest.approx(loss_of_one_process, rel=LOSS_TOLERANCE)
    starts = [json.loads(path.read_text().splitlines()[0]) for path in (fleet.folder / run / "events").glob("*.jsonl")]
    assert len({start["hostname"] for start in starts}) == hosts == len(starts)


# --- hosts that are not ready


def one_line(fleet: Fleet, *words: str, **environ: str) -> str:
    """The single line that is told; the exit code is 78, and nothing is left."""
    mark = uuid.uuid4().hex
    done = fleet.launch("-q", *words, "who_am_i.py", MARK=mark, **environ)
    lines = done.stderr.splitlines()
    assert (done.returncode, done.stdout, len(lines)) == (78, "", 1), done
    fleet.assert_nothing_left(mark)
    return lines[0]


def test_hosts_that_cannot_be_reached(fleet: Fleet) -> None:
    hostfile = str(fleet.hostfile("node1", "nowhere"))
    assert "host nowhere: cannot be reached by ssh: Could not resolve" in one_line(fleet, "--hostfile", hostfile)
    config = (fleet.folder / "ssh_config").read_text()
    closed = fleet.folder / "ssh_config_closed"
    closed.write_text(f"Port 2222\n{config}")
    hostfile = str(fleet.hostfile("node1", "node2"))
    line = one_line(fleet, "--hostfile", hostfile, "--ssh", f"ssh -F {closed}")
    assert "host node2: cannot be reached by ssh" in line and "refused" in line
    stranger = fleet.folder / "ssh_config_stranger"
    stranger.write_text(config.replace("user_key", "host_key"))
    line = one_line(fleet, "--hostfile", hostfile, "--ssh", f"ssh -F {stranger}")
    assert "host node2: cannot be reached by ssh" in line and "Permission denied" in line


def test_each_bad_host_has_its_line(fleet: Fleet) -> None:
    hostfile = str(fleet.hostfile("node1", "nowhere", "node2", "neither"))
    done = fleet.launch("-q", "--hostfile", hostfile, "who_am_i.py")
    assert done.returncode == 78
    assert [line.partition("host ")[2].split(":")[0] for line in done.stderr.splitlines()] == ["nowhere", "neither"]


def test_another_version_of_coremill_on_a_host(fleet: Fleet) -> None:
    """The other host's interpreter finds an older coremill first."""
    older = fleet.folder / "older" / "coremill"
    shutil.copytree(Path(__file__).resolve().parents[2] / "src" / "coremill", older, dirs_exist_ok=True)
    source = (older / "__init__.py").read_text()
    changed, count = re.subn(r"^__version__ = .*$", '__version__ = "0.0.9"', source, flags=re.MULTILINE)
    assert count == 1
    (older / "__init__.py").write_text(changed)
    python = fleet.folder / "python-of-the-host"
    python.write_text(
        f'#!/bin/sh\n[ "$(hostname)" = node2 ] && export PYTHONPATH={older.parent}\nexec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    line = one_line(fleet, "--hostfile", str(fleet.hostfile("node1", "node2")), "--python", str(python))
    assert re.match(r"coremill: host node2: has other versions: coremill 0\.0\.9 \(here .+\)", line)


def test_what_a_host_lacks(fleet: Fleet) -> None:
    hostfile = str(fleet.hostfile("node1", "node2"))
    told = {
        "--python": ("/nowhere/python", "has no /nowhere/python"),
        "--interface": ("nope0", "has no interface nope0"),
    }
    for option, (value, words) in told.items():
        done = fleet.launch("-q", "--hostfile", hostfile, option, value, "who_am_i.py")
        lines = done.stderr.removeprefix("coremill: ").splitlines()
        assert done.returncode == 78 and len(lines) == 2, done
        assert lines[0].startswith(f"host node1: {words}") and lines[1].startswith(f"host node2: {words}")


def test_a_port_that_is_taken_on_the_first_host(fleet: Fleet) -> None:
    program = "import socket, time; s = socket.create_server(('', 23456)); print('UP', flush=True); time.sleep(600)"
    holder = subprocess.Popen(
        fleet.hosts[0].command([sys.executable, "-c", program]), stdout=subprocess.PIPE, env=clean_environment()
    )
    try:
        assert holder.stdout is not None and holder.stdout.readline() == b"UP\n"
        hostfile = str(fleet.hostfile("node1", "node2"))
        line = one_line(fleet, "--hostfile", hostfile, "--master", "node1:23456")
        assert "host node1: port 23456 cannot be used" in line and "in use" in line
    finally:
        holder.kill()
        holder.communicate()

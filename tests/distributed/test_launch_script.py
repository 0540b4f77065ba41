"""`coremill launch` on this machine: real scripts, real cores, read from /proc."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from free_port import free_port_for_all_addresses
from tiers import long_test

TESTS = Path(__file__).resolve().parents[1]
PLAIN = TESTS / "launched" / "plain_distributed.py"
WHO = TESTS / "launched" / "who_am_i.py"
MASK = sorted(os.sched_getaffinity(0))
DEADLINE_SECONDS = 240
FOREIGN = ("OMP_", "GLOO_", "MASTER_", "RANK", "WORLD_SIZE", "LOCAL_", "KMP_", "LD_", "MALLOC_", "THP_", "PYTHON")


def environment(**changes: str) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
    return {**clean, "PYTHONPATH": str(TESTS.parent / "src"), **changes}


def command(*words: str | Path) -> list[str]:
    return [sys.executable, "-m", "coremill", "launch", *(str(word) for word in words)]


def launch(*words: str | Path, folder: Path | None = None, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run it to its end; nothing it started is left."""
    mark = uuid.uuid4().hex
    done = subprocess.run(
        command(*words),
        env=environment(COREMILL_TEST_MARK=mark, **environ),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
    )
    assert left_behind(mark) == []
    return done


def left_behind(mark: str, patience_seconds: float = 60.0) -> list[str]:
    deadline = time.monotonic() + patience_seconds
    while True:
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if mark.encode() in (folder / "environ").read_bytes():
                    found.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.05)


def said(output: str) -> list[dict[str, Any]]:
    entries = [json.loads(line.split("SAID ", 1)[1]) for line in output.splitlines() if "SAID " in line]
    return sorted(entries, key=lambda entry: entry["rank"])


def check_pinned(entries: list[dict[str, Any]], mask: list[int]) -> None:
    """Every thread of a rank stays on the rank's cores; no two ranks share one where there are enough."""
    for entry in entries:
        assert set(entry["seen"]) <= set(entry["allowed"]) <= set(mask), entry
        assert entry["torch_threads"] == len(entry["allowed"]) == int(entry["environ"]["OMP_NUM_THREADS"])
    if len(entries) <= len(mask):
        cpus = [cpu for entry in entries for cpu in entry["allowed"]]
        assert len(cpus) == len(set(cpus))


def test_a_plain_script_on_two_ranks(tmp_path: Path) -> None:
    done = launch("--nproc", "2", "--prefix", "--log-dir", tmp_path, PLAIN, "--steps", "3", OF_THE_USER="kept")
    assert done.returncode == 0, done.stderr
    entries = said(done.stdout)
    assert [(entry["rank"], entry["size"], entry["sum"], entry["local"]) for entry in entries] == [
        (0, 2, 3.0, [0, 2]),
        (1, 2, 3.0, [1, 2]),
    ]
    for entry in entries:
        assert entry["arguments"] == ["--steps", "3"]
        assert (entry["environ"]["OF_THE_USER"], entry["environ"]["GLOO_SOCKET_IFNAME"]) == ("kept", "lo")
    if len(MASK) >= 2:
        check_pinned(entries, MASK)
    for rank in (0, 1):
        assert f"[{rank}] SAID " in done.stdout
        assert said((tmp_path / f"rank-{rank:05d}.log").read_text()) == [entries[rank]]
    # Each setting is said with its reason.
    assert re.search(r"^coremill: OMP_NUM_THREADS=\d+  \(.+\)$", done.stderr, re.MULTILINE)
    assert re.search(r"^coremill: GLOO_SOCKET_IFNAME=lo  \(.+\)$", done.stderr, re.MULTILINE)


@pytest.mark.parametrize(
    "via", [("torchrun",), ("mpirun", "--mpirun", "mpirun.openmpi"), ("mpirun", "--mpirun", "mpirun.mpich")]
)
def test_other_launchers_pin_as_well(via: tuple[str, ...]) -> None:
    if via[0] == "mpirun" and shutil.which(via[-1]) is None:
        pytest.skip(f"{via[-1]} is not installed (make hosts-setup)")
    done = launch("--nproc", "2", "--via", *via, WHO, OF_THE_USER="kept")
    assert done.returncode == 0, done.stderr
    entries = said(done.stdout)
    assert [(entry["rank"], entry["size"], entry["local"]) for entry in entries] == [(0, 2, [0, 2]), (1, 2, [1, 2])]
    assert {entry["environ"]["OF_THE_USER"] for entry in entries} == {"kept"}
    if len(MASK) >= 2:
        assert not set(entries[0]["allowed"]) & set(entries[1]["allowed"])
        for entry in entries:
            assert entry["environ"]["OMP_NUM_THREADS"] == str(len(MASK) // 2)  # and not torchrun's 1


@contextlib.contextmanager
def cpuset(cpus: list[int]) -> Iterator[Path]:
    """A cgroup that allows these cpus only, version 1 or 2."""
    name = f"coremill-test-{os.getpid()}"
    for base, version in ((Path("/sys/fs/cgroup/cpuset"), 1), (Path("/sys/fs/cgroup"), 2)):
        folder = base / name
        try:
            if version == 2 and "cpuset" not in (base / "cgroup.subtree_control").read_text().split():
                continue
            folder.mkdir()
        except OSError:
            continue
        try:
            (folder / "cpuset.cpus").write_text(",".join(str(cpu) for cpu in cpus))
            if version == 1:
                (folder / "cpuset.mems").write_text((base / "cpuset.mems").read_text())
            yield folder
        finally:
            folder.rmdir()
        return
    pytest.skip("no right to make a cpuset cgroup here")


def test_inside_a_cpuset_ranks_stay_inside() -> None:
    with cpuset(MASK[-1:]) as folder:
        enter = f'echo $$ > {folder}/cgroup.procs && exec "$@"'
        done = subprocess.run(
            ["sh", "-c", enter, "sh", *command("--nproc", "1", "-q", PLAIN)],
            env=environment(),
            capture_output=True,
            text=True,
            timeout=DEADLINE_SECONDS,
        )
    assert done.returncode == 0, done.stderr
    (entry,) = said(done.stdout)
    assert (entry["allowed"], entry["seen"]) == (MASK[-1:], MASK[-1:])
    check_pinned([entry], MASK[-1:])


def test_inside_a_rank_the_mask_is_left_alone() -> None:
    """torchrun writes one thread; the mask is shared by two ranks, so each takes half, and nobody is pinned."""
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--no-python", *command("-q", WHO)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    for entry in said(done.stdout):
        assert entry["allowed"] == MASK
        assert entry["environ"]["OMP_NUM_THREADS"] == str(max(1, len(MASK) // 2))


def test_two_nodes_by_hand() -> None:
    from coremill.world.sockets import own_address_towards

    address = own_address_towards("198.51.100.1", is_one_host=False)
    if address == "198.51.100.1":
        pytest.skip("this machine has no address but loopback")
    port = free_port_for_all_addresses()
    words = ("-q", "--nproc", "1", "--nnodes", "2", "--master", f"{address}:{port}", "--node-rank")
    nodes = [
        subprocess.Popen(
            command(*words, str(node), PLAIN),
            env=environment(),
            stdout=subprocess.PIPE,
            text=True,
        )
        for node in range(2)
    ]
    try:
        entries = said("".join(node.communicate(timeout=DEADLINE_SECONDS)[0] for node in nodes))
    finally:
        for node in nodes:
            node.kill()
    assert [node.returncode for node in nodes] == [0, 0]
    assert [(entry["rank"], entry["sum"], entry["local"]) for entry in entries] == [(0, 3.0, [0, 1]), (1, 3.0, [0, 1])]
    # Two nodes that are one machine: neither is squeezed onto the first core.
    assert all(len(entry["allowed"]) == len(MASK) for entry in entries) or len(MASK) < 2


@pytest.mark.parametrize("via", ["local", "torchrun"])
def test_the_rank_that_failed_is_named_last(via: str, tmp_path: Path) -> None:
    done = launch("-q", "--nproc", "2", "--via", via, "--log-dir", tmp_path, WHO, "fail")
    assert done.returncode == 1
    end = done.stderr[done.stderr.index("coremill: rank 1 failed with exit code 1") :]
    assert end.rstrip().endswith("ValueError: poisoned batch")
    assert "ValueError: poisoned batch" in (tmp_path / "rank-00001.log").read_text()


@pytest.mark.parametrize(
    ("via", "how"), [("local", signal.SIGINT), ("local", signal.SIGKILL), ("torchrun", signal.SIGKILL)]
)
def test_a_launcher_that_ends_leaves_nothing(via: str, how: signal.Signals) -> None:
    mark = uuid.uuid4().hex
    process = subprocess.Popen(
        command("-q", "--nproc", "2", "--via", via, WHO, "sleep"),
        env=environment(COREMILL_TEST_MARK=mark),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert len(said("".join(process.stdout.readline() for _ in range(2)))) == 2
    process.send_signal(how)
    _, errors = process.communicate(timeout=240)
    if how == signal.SIGINT:
        assert process.returncode == 130, errors
        assert "stopped on request (Ctrl-C)" in errors
    assert left_behind(mark, patience_seconds=30) == []


@long_test("tests/hosts/test_peer_scripts.py starts run_qa.py")
def test_an_hf_trainer_script(tmp_path: Path) -> None:
    done = launch("-q", "--nproc", "2", TESTS / "launched" / "hf_trainer.py", tmp_path)
    assert done.returncode == 0, done.stderr + done.stdout
    found = re.findall(r"TRAINED rank (\d) of (\d), loss ([\d.]+)", done.stdout)
    assert sorted(found) == [("0", "2", found[0][2]), ("1", "2", found[0][2])]


def test_ranks_of_accelerate_see_each_other(tmp_path: Path) -> None:
    """`Accelerator()` without arguments takes a CPU's ranks for single processes unless it is told."""
    done = launch("-q", "--nproc", "2", TESTS / "launched" / "plain_accelerate.py", folder=tmp_path)
    assert done.returncode == 0, done.stderr + done.stdout
    assert sorted(entry["rank"] for entry in said(done.stdout)) == [0, 1]
    assert all(entry["world"] == 2 and entry["gathered"] == [0, 1] for entry in said(done.stdout))


# accelerate's test_ops asks for `PartialState()`, which is a single process on any CPU: it would prove nothing here.
@pytest.mark.parametrize("name", ["test_sync", "test_script"])
def test_the_scripts_that_accelerate_ships(name: str, tmp_path: Path) -> None:
    found = importlib.util.find_spec("accelerate")
    if found is None or found.origin is None:
        pytest.skip("accelerate is not installed")
    if not os.environ.get("COREMILL_LONG_TESTS"):
        pytest.skip("takes half a minute: COREMILL_LONG_TESTS=1 runs it")
    script = Path(found.origin).parent / "test_utils" / "scripts" / f"{name}.py"
    done = launch("-q", "--nproc", "2", script, folder=tmp_path)  # some write files where they are
    assert done.returncode == 0, done.stderr + done.stdout[-4000:]

"""The command line of `coremill launch`: what is refused, in one line each, and what a dry run shows."""

from __future__ import annotations

import os
import re
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from coremill import cli

Command = Callable[..., tuple[int, str, str]]
SECRET = "hf_" + "a" * 30


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Command:
    """`coremill launch WORDS` in this process: exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text("raise SystemExit('this script must not be started')\n")
    for name in [name for name in os.environ if name.startswith(("RANK", "OMP_", "GLOO_", "CCL_", "KMP_", "PMI_"))]:
        monkeypatch.delenv(name)

    def run(*words: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["coremill", "launch", *(str(word) for word in words)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return run


def one_line(ended: tuple[int, str, str]) -> str:
    code, out, err = ended
    lines = [line for line in err.splitlines() if line.strip()]
    assert (code, out, len(lines)) == (78, "", 1), ended
    assert lines[0].startswith("coremill: ")
    return lines[0]


def hostfile(*lines: str) -> Path:
    Path("hosts").write_text("".join(f"{line}\n" for line in lines))
    return Path("hosts")


def test_ports_and_interfaces_that_cannot_be_used(launch: Command) -> None:
    with socket.create_server(("", 0)) as taken:
        master = f"127.0.0.1:{taken.getsockname()[1]}"
        by_hand = ("--nnodes", "2", "--node-rank", "0", "--master", master)
        assert "in use" in one_line(launch("-q", *by_hand, "script.py"))
        assert "in use" in one_line(launch("-q", "--via", "torchrun", "--master", master, "script.py"))
    assert "no interface nope0" in one_line(launch("-q", "--interface", "nope0", "script.py"))


def test_hosts_that_cannot_be_used(launch: Command) -> None:
    hosts = hostfile("node1 slots=1", "node2:4")
    assert "host node1: 1 slot in hosts" in one_line(launch("-q", "--hostfile", hosts, "--ppn", "2", "script.py"))
    words = ("-q", "--hostfile", hosts, "--ppn", "1", "--ssh", "no-such-ssh")
    assert "no-such-ssh is not installed" in one_line(launch(*words, "script.py"))
    assert "asks for more" in one_line(launch("-q", "--hostfile", hosts, "--nnodes", "3", "script.py"))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("no-such.py",), "there is no script no-such.py"),
        (("--nproc", "0", "script.py"), "--nproc 0"),
        (("--nproc", "2", "--hostfile", "hosts", "script.py"), "--ppn"),
        (("--hostfile", "no-hosts", "script.py"), "no-hosts cannot be read"),
        (("--hostfile", "hosts", "script.py"), "different numbers of slots"),
        (("--hostfile", "hosts", "--ppn", "1", "--via", "local", "script.py"), "this machine only"),
        (("--nnodes", "2", "script.py"), "--node-rank"),
        (("--nnodes", "2", "--node-rank", "2", "--master", "a", "script.py"), "0 to 1"),
        (("--master", "node1:port", "script.py"), "ADDRESS[:PORT]"),
        (("--nproc", "1", "--via", "mpirun", "--mpirun", "no-such", "script.py"), "no-such is not installed"),
        (("--allocator", "jemalloc", "--dry-run", "script.py"), "jemalloc is not installed"),
    ],
)
def test_what_cannot_be_meant(
    launch: Command, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], told: str
) -> None:
    hostfile("node1 slots=1", "node2 slots=2")
    monkeypatch.setattr("coremill.hardware.probe.find_library", lambda *_: None)
    code, out, err = launch("-q", *words)
    assert (code, out) == (78, ""), err
    assert told in err


def test_a_dry_run_on_this_machine(launch: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    code, out, _ = launch("--nproc", "2", "--dry-run", "script.py", "--rows", "3")
    assert code == 0
    assert "script.py --rows 3" in out and out.count(", cpus ") == 2
    assert "OMP_NUM_THREADS=1  # set by you" in out
    assert out.rstrip().endswith("nothing was started")


@pytest.mark.parametrize("by", ["variable", "option"])
def test_threads_are_judged_where_ranks_run(launch: Command, monkeypatch: pytest.MonkeyPatch, by: str) -> None:
    """Far more threads than this machine has: a warning here, and no word of it for ranks on other machines."""
    words = ("--threads", "2300") if by == "option" else ()
    if by == "variable":
        monkeypatch.setenv("OMP_NUM_THREADS", "2300")
    code, out, err = launch(*words, "--nproc", "2", "--dry-run", "script.py")
    assert code == 0, err
    assert "OMP_NUM_THREADS=2300  # set by you" in out
    assert re.search(r"^warning: 2300 threads for each of 2 ranks share \d+ hardware threads? on ", out, re.MULTILINE)
    hosts = hostfile("node1 slots=2", "node2 slots=2")
    code, out, err = launch(*words, "--hostfile", hosts, "--dry-run", "script.py")
    assert code == 0, err
    assert "warning" not in out and ("OMP_NUM_THREADS=2300" in out or '"threads":2300' in out)


@pytest.mark.parametrize("via", ["torchrun", "mpirun"])
def test_a_dry_run_on_hosts_shows_all_but_secrets(launch: Command, monkeypatch: pytest.MonkeyPatch, via: str) -> None:
    monkeypatch.setenv("HF_TOKEN", SECRET)
    monkeypatch.setenv("OF_THE_USER", "goes along")
    answer = subprocess.CompletedProcess([], 0, stdout="mpirun (Open MPI) 4.1.4\n", stderr="")
    monkeypatch.setattr("coremill.hosts.mpirun.subprocess.run", lambda *_, **__: answer)
    monkeypatch.setattr("coremill.hosts.mpirun.shutil.which", lambda name: f"/usr/bin/{name}")
    hosts = hostfile("node1 slots=2", "node2 slots=2")
    code, out, err = launch("--hostfile", hosts, "--via", via, "--dry-run", "script.py", f"--token={SECRET}")
    assert code == 0, err
    assert SECRET not in out + err
    assert "HF_TOKEN" in out and "OF_THE_USER" in out and "--token=***" in out
    assert "nothing was started; the hosts were not asked" in out
    assert "nothing leaves it" not in out, "ranks of two hosts do not talk through loopback"
    if via == "torchrun":
        for node in (1, 2):
            assert f"host node{node}: 2 ranks" in out and f"--node-rank={node - 1}" in out
        assert "OF_THE_USER='goes along'" in out
    else:
        assert "-np 4" in out and "--bind-to none" in out and "-x OF_THE_USER" in out and "MASTER_ADDR=node1" in out

import contextlib
import sys
from pathlib import Path

import psutil
import pytest
from benchmarks import peers, processes
from benchmarks.workload import Workload


def a_session(folder: Path, cores: int) -> peers.Session:
    work = Workload(folder=str(folder), parameters=1, documents=1, tokens=1, rows=1, paragraphs=1, paragraph_tokens=1)
    return peers.Session(
        folder=folder, cache=folder, work=work, dtype="fp32", cores=cores, timed_steps=3, timeout_seconds=9
    )


def test_the_recipe_gets_torchruns_default_threads_and_the_packed_peers_all_cores(tmp_path):
    session = a_session(tmp_path, cores=16)
    command, additions = peers.contender_command(session, "a", tmp_path, 1)
    assert "OMP_NUM_THREADS" not in additions and "--rows-per-rank" not in command
    for key in "bc":
        command, additions = peers.contender_command(session, key, tmp_path, 1)
        assert additions == {"OMP_NUM_THREADS": "8"}
        assert command[command.index("--rows-per-rank") + 1] == "2"
        assert command[command.index("--steps") + 1] == "4"


def test_coremill_is_started_by_its_documented_command(tmp_path):
    command, additions = peers.contender_command(a_session(tmp_path, cores=2), "d", tmp_path, 1)
    assert command == [sys.executable, "-m", "coremill", "train", str(tmp_path / "coremill.yaml")]
    assert additions == {}


def test_no_contender_inherits_threads_or_ranks(monkeypatch, tmp_path):
    for name in ("OMP_NUM_THREADS", "KMP_AFFINITY", "RANK", "WORLD_SIZE", "LD_PRELOAD"):
        monkeypatch.setenv(name, "1")
    environment = peers.environment(tmp_path)
    assert not {"OMP_NUM_THREADS", "KMP_AFFINITY", "RANK", "WORLD_SIZE", "LD_PRELOAD"} & set(environment)
    assert environment["PATH"].startswith(str(Path(sys.executable).parent))


@pytest.mark.parametrize("arguments", [["--only", "a,x"], ["--only", ""], ["--rounds", "0"], ["--steps", "0"]])
def test_wrong_arguments_are_refused(arguments, capsys):
    with pytest.raises(SystemExit) as refusal:
        peers.main(arguments)
    assert refusal.value.code == 2


def test_a_time_limit_ends_descendants_in_sessions_of_their_own(monkeypatch, tmp_path):
    monkeypatch.setattr(processes, "SAMPLE_SECONDS", 0.05)
    # The child has left the leader's session and group, as torchrun's workers do.
    finished = processes.run_tree(
        ["sh", "-c", "setsid sleep 300 & echo $!; sleep 300"],
        environment=processes.clean_environment({}),
        folder=tmp_path,
        log=tmp_path / "log.txt",
        timeout_seconds=10,
    )
    assert finished.timed_out and finished.returncode != 0
    child = int((tmp_path / "log.txt").read_text())
    with contextlib.suppress(psutil.NoSuchProcess):
        assert psutil.Process(child).status() == psutil.STATUS_ZOMBIE
    assert finished.peak_tree_rss_bytes > 0


def test_a_command_that_ends_leaves_its_code_and_output(tmp_path):
    finished = processes.run_tree(
        ["sh", "-c", "echo out; echo err >&2; exit 3"],
        environment=processes.clean_environment({}),
        folder=tmp_path,
        log=tmp_path / "log.txt",
        timeout_seconds=60,
    )
    assert (finished.returncode, finished.timed_out) == (3, False)
    assert sorted((tmp_path / "log.txt").read_text().split()) == ["err", "out"]

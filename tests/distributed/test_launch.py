"""Starting and stopping: real processes under coremill's launcher, torchrun, Open MPI and MPICH."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from coremill.supervise.fork_client import ForkServer
from coremill.supervise.ranks import Outcome, run_local_ranks
from coremill.world.sockets import own_address_towards
from coremill.world.stop import REQUESTS, SAME_PRESS_SECONDS, StopSignals
from free_port import free_port_for_all_addresses
from rank_plans import rank_plan
from tiers import some_long

TESTS = Path(__file__).resolve().parents[1]
MEET = TESTS / "meet.py"
BARE_FORK_SERVER = [sys.executable, str(TESTS / "bare_fork_server.py")]
ENVIRON = {
    **{name: value for name, value in os.environ.items() if name != "GLOO_SOCKET_IFNAME"},
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": os.pathsep.join([str(TESTS.parent / "src"), str(TESTS)]),
}
TOLD_WITHIN_SECONDS = 120  # far below the minutes that collectives wait; machines are shared

# Ranks without torch: quick to start. Each leaves a file that says it is up, with its pid.
PRELUDE = """
import os, pathlib, signal, subprocess, sys, time
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})  # as a forked rank does when it listens
rank = int(os.environ["RANK"])
up = pathlib.Path(os.environ["UP"])
def say_up():
    (up / f"new-{rank}").write_text(str(os.getpid()))
    (up / f"new-{rank}").rename(up / f"up-{rank}")
def wait_for(count):
    while len(list(up.glob("up-*"))) < count: time.sleep(0.02)
"""

DEAF = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"


Launch = Callable[..., Outcome]


@pytest.fixture(params=["exec", "fork"])
def launch(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Launch]:
    """Runs code on ranks under coremill's launcher, in this process: started afresh, and forked by a fork server."""
    with contextlib.ExitStack() as templates:

        def run(folder: Path, code: str, ranks: int = 2, **options: Any) -> Outcome:
            if request.param == "fork":
                options["fork_server"] = templates.enter_context(bare_fork_server(folder))
            options = {"plan": rank_plan(ranks), "environ": {**ENVIRON, "UP": str(folder)}, **options}
            outcome = run_local_ranks(argv=[sys.executable, "-c", PRELUDE + code], log_folder=folder, **options)
            assert_gone(folder)
            return outcome

        yield run


def bare_fork_server(folder: Path) -> ForkServer:
    """One that fails the test where it is lost."""
    return ForkServer(BARE_FORK_SERVER, ENVIRON, folder / "template.log", pytest.fail)


def pids(folder: Path) -> list[int]:
    return [int(file.read_text()) for file in folder.glob("up-*")]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in ("Z", "X")
    except OSError:
        return False


def assert_gone(folder: Path, within_seconds: float = TOLD_WITHIN_SECONDS) -> None:
    """No process that said it was up is left."""
    deadline = time.monotonic() + within_seconds
    while time.monotonic() < deadline and any(is_alive(pid) for pid in pids(folder)):
        time.sleep(0.02)
    assert [pid for pid in pids(folder) if is_alive(pid)] == []


# --- ranks that end ---


def test_all_well(launch: Launch, tmp_path: Path) -> None:
    ticks: list[float] = []
    code = "say_up(); print('hello from', rank, os.environ['WORLD_SIZE'], flush=True); time.sleep(0.5)"
    outcome = launch(tmp_path, code, 3, on_tick=lambda: ticks.append(time.monotonic()))
    assert (outcome.exit_code, outcome.failed_rank, outcome.message) == (0, None, "")
    assert outcome.exit_codes == (0, 0, 0)
    assert (tmp_path / "rank-00002.log").read_text() == "hello from 2 3\n"
    assert len(ticks) >= 2
    assert {setting.variable for setting in outcome.settings} >= {"OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME"}


def test_ranks_are_pinned_inside_the_inherited_mask(launch: Launch, tmp_path: Path) -> None:
    inherited = sorted(os.sched_getaffinity(0))
    plan = rank_plan(2, cpus=((inherited[-1],), (10_000,)))
    code = "say_up(); print(sorted(os.sched_getaffinity(0)), os.getsid(0) == os.getpid())"
    outcome = launch(tmp_path, code, plan=plan)
    assert outcome.exit_code == 0
    assert (tmp_path / "rank-00000.log").read_text() == f"{[inherited[-1]]} True\n"
    assert (tmp_path / "rank-00001.log").read_text() == f"{inherited} True\n"
    assert sorted(os.sched_getaffinity(0)) == inherited


def test_a_failing_rank_is_named_and_ends_the_others(launch: Launch, tmp_path: Path) -> None:
    code = "say_up(); wait_for(3)\nif rank == 1: raise ValueError('poisoned batch')\ntime.sleep(600)"
    outcome = launch(tmp_path, code, 3)
    assert (outcome.exit_code, outcome.failed_rank, outcome.signal) == (1, 1, None)
    assert "rank 1 failed with exit code 1" in outcome.message
    assert outcome.log_tail.count("ValueError: poisoned batch") == 1
    assert outcome.log_file == tmp_path / "rank-00001.log"
    assert outcome.exit_codes == (-signal.SIGTERM, 1, -signal.SIGTERM)


def test_a_rank_that_ignores_sigterm_is_killed(launch: Launch, tmp_path: Path) -> None:
    code = f"{DEAF}; say_up(); wait_for(2)\nif rank == 0: sys.exit(78)\ntime.sleep(600)"
    outcome = launch(tmp_path, code, grace_seconds=0.3)
    assert (outcome.exit_code, outcome.failed_rank) == (78, 0)
    assert outcome.exit_codes == (78, -signal.SIGKILL)
    assert "bad config or input" in outcome.message


@pytest.mark.parametrize(("first", "code"), [("the one that lost its peers", 69), ("the one that follows", 78)])
def test_a_rank_that_only_followed_is_not_blamed(launch: Launch, tmp_path: Path, first: str, code: int) -> None:
    """It ends first; the one that failed takes a little longer."""
    program = f"""
say_up(); wait_for(2)
if rank == 0:
    if {code} == 78: print("coremill: rank 0 ends because rank 1 failed", flush=True)
    sys.exit({code})
time.sleep(0.7)
print("the real reason", flush=True)
sys.exit(78)
"""
    outcome = launch(tmp_path, program)
    assert (outcome.exit_code, outcome.failed_rank) == (78, 1)
    assert outcome.log_tail == "the real reason\n"


def test_lost_peers_are_told_where_nobody_else_failed(launch: Launch, tmp_path: Path) -> None:
    outcome = launch(tmp_path, "say_up(); sys.exit(69 if rank else 0)")
    assert (outcome.exit_code, outcome.failed_rank) == (69, 1)
    assert "lost the connection" in outcome.message


def test_a_killed_rank_is_told_with_its_signal(launch: Launch, tmp_path: Path) -> None:
    code = "say_up(); wait_for(2)\nif rank == 1: os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(600)"
    outcome = launch(tmp_path, code)
    assert (outcome.exit_code, outcome.failed_rank, outcome.signal) == (137, 1, signal.SIGKILL)
    assert outcome.message.startswith("rank 1 was ended by SIGKILL")


@pytest.mark.parametrize("session", [False, True], ids=["its session", "a session of its own"])
def test_children_of_a_dead_rank_are_ended(launch: Launch, tmp_path: Path, session: bool) -> None:
    """A child holds its parent's sockets, and so lets a dead rank look alive."""
    code = f"""
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session={session})
(up / f"up-{{rank}}").write_text(str(child.pid))
os._exit(3 if rank else 0)
"""
    assert launch(tmp_path, code).exit_code == 3


def test_a_fork_of_a_rank_in_a_session_of_its_own_is_ended(launch: Launch, tmp_path: Path) -> None:
    code = """
if os.fork() == 0:
    os.setsid()
    say_up()
    time.sleep(600)
wait_for(2)
os._exit(3)
"""
    assert launch(tmp_path, code).exit_code == 3
    assert_gone(tmp_path)


def test_another_parts_processes_are_left_alone(launch: Launch, tmp_path: Path) -> None:
    """A notebook's cell may start a session of its own while ranks run, and wait for it itself."""
    own: list[subprocess.Popen[bytes]] = []

    def on_tick() -> None:
        if not own:
            own.append(subprocess.Popen(["sleep", "600"], start_new_session=True))
            own.append(subprocess.Popen(["sh", "-c", "exit 7"], start_new_session=True))

    try:
        assert launch(tmp_path, "say_up(); wait_for(2)", on_tick=on_tick).exit_code == 0
        going, done = own
        assert going.poll() is None
        assert done.wait(TOLD_WITHIN_SECONDS) == 7
    finally:
        for process in own:
            process.kill()
            process.wait()


def test_a_command_that_does_not_exist(tmp_path: Path) -> None:
    outcome = run_local_ranks(argv=["no-such-program"], plan=rank_plan(2), environ=ENVIRON, log_folder=tmp_path)
    assert (outcome.exit_code, outcome.failed_rank) == (127, 0)
    assert "cannot start no-such-program" in outcome.log_tail


def test_a_request_that_came_between_two_attempts_starts_no_rank(tmp_path: Path) -> None:
    former = signal.getsignal(signal.SIGTERM)
    try:
        with StopSignals() as stop:
            signal.raise_signal(signal.SIGTERM)
            outcome = run_local_ranks(
                argv=["no-such-program"], plan=rank_plan(2), environ=ENVIRON, log_folder=tmp_path, stop_signals=stop
            )
    finally:
        REQUESTS.forget()
        signal.signal(signal.SIGTERM, former)
    assert (outcome.exit_code, outcome.exit_codes, outcome.on_request) == (75, (), True)


def test_an_error_while_drawing_leaves_no_rank(launch: Launch, tmp_path: Path) -> None:
    def on_tick() -> None:
        if len(pids(tmp_path)) == 2:
            raise OSError("the terminal is gone")

    with pytest.raises(OSError, match="the terminal is gone"):
        launch(tmp_path, "say_up(); time.sleep(600)", on_tick=on_tick)
    assert_gone(tmp_path)


# --- stopping the launcher ---


@contextlib.contextmanager
def launcher(
    folder: Path, code: str, ranks: int = 2, grace: float = 5.0, way: str = "exec", **environ: str
) -> Iterator[subprocess.Popen[str]]:
    """A launcher process whose ranks are all up."""
    process = subprocess.Popen(
        [sys.executable, str(TESTS / "launch_ranks.py"), str(ranks), str(folder), "-c", PRELUDE + code],
        env={**ENVIRON, "GRACE": str(grace), "WAY": way, **environ},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "READY\n"
        yield process
    finally:
        process.kill()
        process.wait()
        assert_gone(folder)


def ended(process: subprocess.Popen[str]) -> dict[str, Any]:
    output, _ = process.communicate(timeout=TOLD_WITHIN_SECONDS)
    outcome: dict[str, Any] = json.loads(output)
    assert process.returncode == outcome["exit_code"]
    return outcome


@pytest.mark.parametrize("way", ["exec", "fork"])
@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_request_to_stop_ends_all_ranks(tmp_path: Path, number: signal.Signals, exit_code: int, way: str) -> None:
    with launcher(tmp_path, "say_up(); time.sleep(600)", way=way) as process:
        process.send_signal(number)
        outcome = ended(process)
    assert outcome["exit_code"] == exit_code
    assert outcome["exit_codes"] == [-signal.SIGTERM] * 2
    assert outcome["message"].startswith("stopped on request")


def test_a_second_ctrl_c_ends_at_once(tmp_path: Path) -> None:
    stubborn = (
        "signal.signal(signal.SIGTERM, lambda *_: (up / f'asked-{rank}').touch()); say_up()\nwhile True: time.sleep(1)"
    )
    with launcher(tmp_path, stubborn, grace=600) as process:
        process.send_signal(signal.SIGINT)
        while len(list(tmp_path.glob("asked-*"))) < 2:  # asked, and still there
            time.sleep(0.02)
        time.sleep(SAME_PRESS_SECONDS)
        process.send_signal(signal.SIGINT)
        outcome = ended(process)
    assert (outcome["exit_code"], outcome["exit_codes"]) == (130, [-signal.SIGKILL] * 2)
    assert outcome["message"].startswith("stopped at once")


def test_a_ctrl_c_that_a_wrapper_passes_on_again_is_one(tmp_path: Path) -> None:
    saves = "signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.5), os._exit(75))); say_up(); time.sleep(600)"
    with launcher(tmp_path, saves, grace=600, SAME_PRESS="30") as process:
        for _ in range(3):
            process.send_signal(signal.SIGINT)
            time.sleep(0.1)
        outcome = ended(process)
    assert (outcome["exit_code"], outcome["exit_codes"]) == (75, [75] * 2), outcome


@pytest.mark.parametrize("way", ["exec", "fork"])
def test_a_killed_launcher_leaves_no_orphan(tmp_path: Path, way: str) -> None:
    with launcher(tmp_path, f"{DEAF}; say_up(); time.sleep(600)", 3, way=way) as process:
        fork_server = [tmp_path / "template.pid"] if way == "fork" else []
        for file in fork_server:
            file.rename(tmp_path / "up-template")  # it is to go as well
        assert len(pids(tmp_path)) == 3 + len(fork_server)
        process.kill()
        process.wait()
        assert_gone(tmp_path)


# --- ranks that meet, under each launcher ---


def met(output: str) -> list[dict[str, Any]]:
    """What the ranks of tests/meet.py printed, by rank."""
    found = [json.loads(line.split("MET ", 1)[1]) for line in output.splitlines() if "MET " in line]
    return sorted(found, key=lambda entry: entry["rank"])


def check_met(entries: list[dict[str, Any]], size: int, launcher_name: str) -> None:
    assert [entry["rank"] for entry in entries] == list(range(size))
    for rank, entry in enumerate(entries):
        assert entry["launcher"] == launcher_name
        assert (entry["size"], entry["local"], entry["node"]) == (size, [rank, size], [0, 1])
        assert entry["gathered"] == [f"hello from {other}" for other in range(size)]
        assert (entry["sum"], entry["once"]) == (size * (size + 1) / 2, 0)


def run(command: list[str], **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env={**ENVIRON, **environ}, text=True, capture_output=True, timeout=280, check=False)


def test_ranks_meet_under_coremill(tmp_path: Path) -> None:
    outcome = run_local_ranks(argv=[sys.executable, str(MEET)], plan=rank_plan(2), environ=ENVIRON, log_folder=tmp_path)
    logs = "".join(file.read_text() for file in sorted(tmp_path.glob("rank-*.log")))
    assert outcome.exit_code == 0, logs
    check_met(met(logs), 2, "coremill")


def test_an_exception_under_coremill_shows_once_and_names_its_rank(tmp_path: Path) -> None:
    outcome = run_local_ranks(
        argv=[sys.executable, str(MEET), "fail"], plan=rank_plan(2), environ=ENVIRON, log_folder=tmp_path
    )
    assert (outcome.exit_code, outcome.failed_rank) == (1, 1)
    assert outcome.log_tail.count("Traceback") == 1 and "ValueError: poisoned batch" in outcome.log_tail


def test_bad_input_on_one_rank_is_told_by_that_rank_only(tmp_path: Path) -> None:
    outcome = run_local_ranks(
        argv=[sys.executable, str(MEET), "fail", "input"], plan=rank_plan(2), environ=ENVIRON, log_folder=tmp_path
    )
    assert (outcome.exit_code, outcome.failed_rank) == (78, 0)
    assert "coremill: no such column" in outcome.log_tail
    assert "no such column" not in (tmp_path / "rank-00001.log").read_text()


def test_plain_python_has_no_rank() -> None:
    done = run([sys.executable, str(MEET)])
    assert (done.returncode, done.stdout) == (0, "no launcher\n")


def torchrun(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", *arguments]


def test_ranks_meet_under_torchrun_and_again_after_a_restart() -> None:
    """With torchrun's own store the restarted ranks would dial the dead ones."""
    rendezvous = ("--max-restarts=1", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0")
    done = run(torchrun(*rendezvous, str(MEET), "fail", "once"))
    assert done.returncode == 0, done.stderr
    for attempt in (0, 1):
        check_met([entry for entry in met(done.stdout) if entry["restart"] == attempt], 2, "torchrun")


def mpirun(program: str, ranks: int, *arguments: str) -> list[str]:
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed")
    options = ["--oversubscribe"] if "openmpi" in program else []
    if options and os.geteuid() == 0:
        options.append("--allow-run-as-root")
    return [program, *options, "-n", str(ranks), sys.executable, str(MEET), *arguments]


@pytest.mark.parametrize(
    ("program", "ranks", "launcher_name"),
    [("mpirun.openmpi", 2, "open-mpi"), ("mpirun.openmpi", 1, "open-mpi"), ("mpirun.mpich", 2, "hydra")],
)
def test_ranks_meet_under_mpirun(program: str, ranks: int, launcher_name: str) -> None:
    done = run(mpirun(program, ranks))
    assert done.returncode == 0, done.stderr
    check_met(met(done.stdout), ranks, launcher_name)


def test_an_exception_under_mpirun_ends_the_job() -> None:
    """MPICH leaves ranks alone when one exits badly: the others must notice by themselves."""
    done = run(mpirun("mpirun.mpich", 2, "fail"))
    assert done.returncode != 0
    assert done.stderr.count("ValueError: poisoned batch") == 1
    assert "coremill: the connection to another rank was lost" in done.stderr


def kubeflow(nodes: int) -> list[dict[str, str]]:
    """The variables of each node, all of them on this machine's own address."""
    address = own_address_towards("198.51.100.1", is_one_host=False)
    if address == "198.51.100.1":
        pytest.skip("this machine has no address but loopback")
    port = str(free_port_for_all_addresses())
    shared = {"PET_NNODES": str(nodes), "PET_NPROC_PER_NODE": "1", "PET_MASTER_ADDR": address, "PET_MASTER_PORT": port}
    return [{**ENVIRON, **shared, "PET_NODE_RANK": str(node)} for node in range(nodes)]


def start_node(environ: dict[str, str], folder: Path) -> subprocess.Popen[str]:
    """A launcher whose ranks want to meet."""
    command = [sys.executable, str(TESTS / "launch_ranks.py"), "1", str(folder), str(MEET)]
    return subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL, text=True)


def end_nodes(nodes: list[subprocess.Popen[str]]) -> list[int]:
    try:
        return [process.wait(timeout=280) for process in nodes]
    finally:
        for process in nodes:
            process.kill()
            process.wait()


def test_two_launchers_make_one_world_under_kubeflow(tmp_path: Path) -> None:
    nodes = [start_node(environ, tmp_path / str(node)) for node, environ in enumerate(kubeflow(2))]
    assert end_nodes(nodes) == [0, 0]
    logs = "".join(file.read_text() for file in sorted(tmp_path.glob("*/rank-*.log")))
    assert [(entry["rank"], entry["size"], entry["node"], entry["once"]) for entry in met(logs)] == [
        (0, 2, [0, 2], 0),
        (1, 2, [1, 2], 1),
    ]


def start_refusing(environ: dict[str, str], folder: Path) -> subprocess.Popen[str]:
    """`coremill train` on a node where the run file is wrong."""
    (folder / "bad.yaml").write_text("train: {steps: many}\n")
    command = [sys.executable, "-m", "coremill", "train", "bad.yaml"]
    return subprocess.Popen(command, env=environ, cwd=folder, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("refusing", some_long([0, 1, 2], [1], "one of three nodes"))
def test_a_node_that_refuses_tells_the_others(tmp_path: Path, refusing: int) -> None:
    """They end with 78 and its words; their ranks wait for minutes at most, and end with 69 if nobody tells them."""
    nodes = [
        start_refusing(environ, tmp_path) if node == refusing else start_node(environ, tmp_path / str(node))
        for node, environ in enumerate(kubeflow(3))
    ]
    said = nodes[refusing].stderr
    assert end_nodes(nodes) == [78, 78, 78]
    assert said is not None and said.read().count("train.steps must be") == 1
    logs = [file.read_text() for file in sorted(tmp_path.glob("*/rank-*.log"))]
    assert len(logs) == 2
    for log in logs:
        assert f"coremill: node {refusing} ({socket.gethostname()}) refused: train.steps must be" in log


def test_nodes_that_all_refuse_do_not_wait_for_each_other(tmp_path: Path) -> None:
    """The usual case: all have the same file. Each would wait for three minutes if it took the others for absent."""
    nodes = [start_refusing(environ, tmp_path) for environ in kubeflow(2)]
    assert end_nodes(nodes) == [78, 78]


def test_ctrl_c_ends_the_telling(tmp_path: Path) -> None:
    process = start_refusing(kubeflow(2)[1], tmp_path)
    assert process.stderr is not None
    while "telling the other nodes" not in process.stderr.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert end_nodes([process]) == [78]

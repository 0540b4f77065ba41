"""What scripts find in their environment, and why; what goes to other hosts; how lines and failures travel."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from coremill.errors import InputError
from coremill.hosts.forwarding import forwarded, shown, shown_arguments
from coremill.hosts.mpirun import Mpirun, hostfile_text, mpirun_command, mpirun_environment
from coremill.hosts.preflight import Questions, _problem
from coremill.hosts.ssh import Host, Remote, is_this_host
from coremill.launch import settings as settings_module
from coremill.launch.rank_shim import ShimOrder, start_of_rank
from coremill.launch.request import Request, hosts_of, master_of
from coremill.launch.settings import (
    OpenMp,
    asked_threads,
    find_openmp,
    notes_on,
    script_settings,
    threads_warning,
)
from coremill.plan.layout import lay_out
from coremill.plan.types import Choice
from coremill.supervise.output import Failure, LogFollower, Prefixer, Tail, first_failure, last_words
from coremill.world.identity import RankIdentity
from coremill.world.lost_peers import is_follower
from coremill.world.sockets import interface_for_flows
from unit.hardware.fake_machine import node_of

GOMP = OpenMp(runtime="libgomp", preload=None, reason="torch brings libgomp")


@pytest.fixture(autouse=True)
def _every_library_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings_module, "can_preload", lambda library: "broken" not in library)


def chosen(
    environ: dict[str, str] | None = None, *, openmp: OpenMp = GOMP, **changes: Any
) -> dict[str, tuple[str, str]]:
    options = {name: changes.pop(name) for name in ("allocator", "bind_threads") if name in changes}
    node = node_of(**changes)
    found = script_settings(
        node,
        lay_out(node, ranks=2, threads=None),
        environ or {},
        openmp=openmp,
        interface=Choice("eth1", "leads to node1"),
        **options,
    )
    assert all(setting.reason for setting in found)
    return {setting.variable: (setting.value, setting.reason) for setting in found}


def test_threads_are_the_physical_cores_of_a_rank() -> None:
    assert chosen(cores=8, siblings=True)["OMP_NUM_THREADS"][0] == "4"
    assert chosen(cores=8, cpu_quota=2.0)["OMP_NUM_THREADS"][0] == "1"
    node = node_of(8, numa_nodes=2, siblings=True)
    assert lay_out(node, ranks=None, threads=None).cpus_of_rank == ((0, 1, 2, 3), (4, 5, 6, 7))


def test_too_many_threads_for_a_host_are_a_warning_on_it() -> None:
    node = node_of(8, siblings=True)
    assert threads_warning(node, 2, 8, 4) is None and threads_warning(node, 2, None, 4) is None
    told = threads_warning(node, 2, 23, 4)
    assert told is not None and "23 threads for each of 2 ranks share 16 hardware threads" in told and "take 4" in told
    with pytest.raises(InputError, match="hardware threads"):  # a run file is planned, and may be refused
        lay_out(node, ranks=2, threads=65)
    assert lay_out(node, ranks=2, threads=65, any_threads=True).threads_per_rank.value == 65
    assert asked_threads(None, {"OMP_NUM_THREADS": "23,2"}) == 23 and asked_threads(5, {"OMP_NUM_THREADS": "23"}) == 5


def test_what_the_user_set_stays() -> None:
    theirs = {"OMP_NUM_THREADS": "3", "GLOO_SOCKET_IFNAME": "ib0", "LD_PRELOAD": "/my.so", "OMP_PROC_BIND": "spread"}
    found = chosen(theirs, allocators=(("tcmalloc", "/usr/lib/libtcmalloc.so.4"),))
    for name, value in theirs.items():
        assert found[name][0] == value and found[name][1].startswith("set by you")
    assert "would have taken eth1" in found["GLOO_SOCKET_IFNAME"][1]


def test_on_several_hosts_the_interface_is_named_once_per_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings_module, "interface_towards", lambda host: "lo" if host is None else "ens5")

    def value(asked: str | None, master: str | None, hosts: int) -> str:
        choice = settings_module.choose_interface(asked, master, hosts)
        assert choice is not None and ("connections to each peer" in choice.reason) == ("," in choice.value)
        return choice.value

    assert value(None, None, 1) == "lo"
    assert [value(None, "node1", hosts).count("ens5") for hosts in (2, 3, 4, 5, 64)] == [4, 2, 2, 1, 1]
    assert value("ib0", "node1", 2) == "ib0,ib0,ib0,ib0"
    monkeypatch.setattr(settings_module, "interface_towards", lambda host: None)
    assert settings_module.choose_interface(None, "node1", 2) is None


def test_ranks_with_few_cores_have_fewer_connections() -> None:
    named = [interface_for_flows("ens5", 2, cores) for cores in (None, 1, 3, 4, 8, 64)]
    assert [value.count("ens5") for value in named] == [4, 1, 1, 2, 4, 4]


def test_binding_speaks_to_the_runtime_that_is_loaded() -> None:
    assert chosen()["OMP_PROC_BIND"][0] == "false"
    bound = chosen(bind_threads=True)
    assert (bound["OMP_PROC_BIND"][0], bound["OMP_PLACES"][0]) == ("close", "cores")
    intel = OpenMp(runtime="libiomp5", preload="/opt/libiomp5.so", reason="installed")
    found = chosen(openmp=intel)
    assert (found["KMP_BLOCKTIME"][0], found["KMP_AFFINITY"][0], found["LD_PRELOAD"][0]) == (
        "1",
        "none",
        "/opt/libiomp5.so",
    )
    assert "OMP_PROC_BIND" not in found
    assert chosen(openmp=intel, bind_threads=True)["KMP_AFFINITY"][0].startswith("granularity=fine")


def test_the_runtime_is_looked_up(tmp_path: Path) -> None:
    torch = tmp_path / "torch"
    (torch / "lib").mkdir(parents=True)
    assert find_openmp(node_of(), torch, {}).runtime == "unknown"
    (torch / "lib" / "libgomp-24e2ab19.so.1.0.0").touch()
    assert find_openmp(node_of(), torch, {}).runtime == "libgomp"
    assert find_openmp(node_of(openmp="/x/libiomp5.so"), torch, {}).preload == "/x/libiomp5.so"
    assert find_openmp(node_of(openmp="/x/libiomp5.so", architecture="aarch64"), torch, {}).runtime == "libgomp"
    (torch / "lib" / "libiomp5.so").touch()
    assert find_openmp(node_of(), torch, {}) == OpenMp(runtime="libiomp5", preload=None, reason="torch brings libiomp5")
    here = node_of(openmp="/x/libiomp5.so")
    preloaded = find_openmp(here, torch, {"LD_PRELOAD": "/y/libtcmalloc.so.4:/y/libiomp5.so"})
    assert preloaded == OpenMp(runtime="libiomp5", preload=None, reason="you preload libiomp5")
    assert find_openmp(here, torch, {"LD_PRELOAD": "/y/libtcmalloc.so.4"}).preload is None  # nothing is added to it


def test_allocators_are_preloaded_where_they_work() -> None:
    both = (("tcmalloc", "/usr/lib/libtcmalloc.so.4"), ("jemalloc", "/usr/lib/libjemalloc.so.2"))
    assert chosen(allocators=both)["LD_PRELOAD"][0] == "/usr/lib/libtcmalloc.so.4"
    assert "MALLOC_TRIM_THRESHOLD_" not in chosen(allocators=both)
    found = chosen(allocators=both, allocator="jemalloc")
    assert found["LD_PRELOAD"][0] == "/usr/lib/libjemalloc.so.2" and "MALLOC_CONF" in found
    for options in ({"allocator": "none", "allocators": both}, {"allocators": (("tcmalloc", "/broken.so"),)}):
        found = chosen(**options)
        assert "LD_PRELOAD" not in found and "MALLOC_TRIM_THRESHOLD_" in found
    with pytest.raises(InputError, match="jemalloc is not installed"):
        chosen(allocator="jemalloc")


def test_huge_pages_are_asked_for_where_asking_helps() -> None:
    assert chosen(huge_pages="madvise")["THP_MEM_ALLOC_ENABLE"][0] == "1"
    assert "THP_MEM_ALLOC_ENABLE" not in chosen(huge_pages="always")
    assert "THP_MEM_ALLOC_ENABLE" not in chosen(huge_pages="never")


def test_settings_of_other_stacks_are_explained() -> None:
    environ = {
        "CCL_WORKER_COUNT": "4",
        "KMP_AFFINITY": "compact",
        "I_MPI_PIN_DOMAIN": "[0xff]",
        "ACCELERATE_USE_IPEX": "1",
    }
    notes = notes_on(environ, ("--use_ipex", "--ddp_backend", "ccl"), GOMP)
    for word in (*environ, "--use_ipex", "--ddp_backend"):
        assert sum(word in note for note in notes) == 1, word
    assert notes_on({"OMP_NUM_THREADS": "4", "HOME": "/home/me"}, ("--ddp_backend", "gloo"), GOMP) == []


# --- ranks of other launchers


def rank(local_rank: int, *, hosts: int = 1) -> RankIdentity:
    return RankIdentity(
        rank=local_rank, size=2 * hosts, local_rank=local_rank, local_size=2, node_rank=0, master_address="127.0.0.1",
        master_port=29500, launcher="torchrun",
    )  # fmt: skip


def start(local_rank: int, mask: frozenset[int], monkeypatch: pytest.MonkeyPatch, **options: Any) -> Any:
    cores = tuple(core for core in node_of(8).cores if core.cpus[0] in mask)
    node = dataclasses.replace(node_of(8), cores=cores)
    monkeypatch.setattr("coremill.launch.rank_shim.probe_node", lambda **_: node)
    order = options.pop("order", ShimOrder())
    environ = {"OMP_NUM_THREADS": "1", "OF_THE_USER": "kept"}
    return start_of_rank(rank(local_rank), environ, order, inherited=mask, **{"is_bound": False, **options})


def test_ranks_share_the_mask_they_inherit(monkeypatch: pytest.MonkeyPatch) -> None:
    mask = frozenset({2, 3, 4, 5})
    first, second = (start(local, mask, monkeypatch) for local in (0, 1))
    assert (first.cpus, second.cpus) == (frozenset({2, 3}), frozenset({4, 5}))
    assert first.environ["OMP_NUM_THREADS"] == "2"  # torchrun's silent 1 is not the user's
    assert first.environ["OF_THE_USER"] == "kept"
    assert (second.environ["RANK"], second.environ["LOCAL_WORLD_SIZE"]) == ("1", "2")


def test_a_mask_of_its_own_is_neither_narrowed_nor_widened(monkeypatch: pytest.MonkeyPatch) -> None:
    bound = start(1, frozenset({6, 7}), monkeypatch, is_bound=True)
    assert bound.cpus is None and bound.environ["OMP_NUM_THREADS"] == "2"
    shared = start(1, frozenset({4, 5, 6, 7}), monkeypatch, may_pin=False)
    assert shared.cpus is None and shared.environ["OMP_NUM_THREADS"] == "2"


def test_threads_of_the_user_reach_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    mask = frozenset(range(8))
    assert start(0, mask, monkeypatch, order=ShimOrder(user_threads=True)).environ["OMP_NUM_THREADS"] == "1"
    order = ShimOrder.from_json(ShimOrder(threads=3, user_threads=True).to_json())
    assert start(0, mask, monkeypatch, order=order).environ["OMP_NUM_THREADS"] == "3"


# --- what goes to other hosts


def test_the_users_variables_go_along_and_this_hosts_do_not() -> None:
    environ = {
        "HF_HOME": "/data/hf", "MY_SETTING": "1", "PATH": "/bin", "HOME": "/home/me", "HOSTNAME": "here",
        "SSH_TTY": "/s",
        "OMPI_COMM_WORLD_RANK": "3", "RANK": "3", "MASTER_ADDR": "old", "BASH_FUNC_x%%": "() { }",
        "COREMILL_LAUNCHER_PID": "5",
    }  # fmt: skip
    assert set(forwarded(environ)) == {"HF_HOME", "MY_SETTING", "PATH"}


def test_secrets_are_not_shown() -> None:
    for name in ("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD", "GOOGLE_APPLICATION_CREDENTIALS"):
        assert shown(name, "anything") == "***"
    assert shown("NOTE", "use hf_secretsecret") == "***"
    assert shown("PROXY", "socks5://a:b@proxy:3128") == "***"
    for name, value in (("TOKENIZERS_PARALLELISM", "false"), ("OMP_NUM_THREADS", "4"), ("TOKENS_PER_STEP", "512")):
        assert shown(name, value) == value
    words = ["train.py", "--hub_token", "abc", "--api-key=abc", "--rows", "3", "hf_secretsecret"]
    assert shown_arguments(words) == ["train.py", "--hub_token", "***", "--api-key=***", "--rows", "3", "***"]


def test_hosts_and_their_ranks(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("localhost slots=4\nalice@node2:4\nnode3\n")
    hosts = hosts_of(Request(script="s", hostfile=path, ppn=2), node_of())
    assert [(host.name, host.address, host.ranks, host.is_here) for host in hosts] == [
        ("localhost", "localhost", 2, True), ("alice@node2", "node2", 2, False), ("node3", "node3", 2, False),
    ]  # fmt: skip
    hosts = hosts_of(Request(script="s", hostfile=path, via="mpirun"), node_of(numa_nodes=2))
    assert [host.ranks for host in hosts] == [4, 4, 2]
    assert len(hosts_of(Request(script="s", hostfile=path, ppn=1, nnodes=2), node_of())) == 2
    assert not is_this_host("192.0.2.1")
    assert (master_of("node1"), master_of("node1:4"), master_of("[fd00::1]:4")) == (
        ("node1", None),
        ("node1", 4),
        ("fd00::1", 4),
    )


HOSTS = (Host(name="n1", ranks=2, is_here=True), Host(name="bob@n2", ranks=2, is_here=False))


def test_words_for_each_mpirun() -> None:
    open_mpi = Mpirun(program="mpirun", family="open-mpi", version="")
    hydra = Mpirun(program="mpiexec", family="hydra", version="")
    assert hostfile_text(HOSTS, "open-mpi") == "n1 slots=2\nbob@n2 slots=2\n"
    assert hostfile_text(HOSTS, "hydra") == "n1:2\nbob@n2:2\n"
    ssh = ("ssh", "-F", "config")
    words = mpirun_command(open_mpi, HOSTS, Path("h"), Path("/w"), ["A", "B"], ssh, "eth0", ["python", "s.py"])
    text = " ".join(words)
    for part in ("--hostfile h", "-np 4", "--bind-to none", "-x A -x B", "plm_rsh_agent ssh -F config", "--wdir /w"):
        assert part in text
    assert text.endswith("python s.py")
    words = mpirun_command(hydra, HOSTS, Path("h"), Path("/w"), ["A", "B"], ssh, "eth0", ["python", "s.py"])
    assert " ".join(words) == "mpiexec -machinefile h -iface eth0 -n 4 -wdir /w -genvlist A,B python s.py"
    told = mpirun_environment(hydra, HOSTS, ssh, {"I_MPI_PIN": "1"})
    assert told["HYDRA_LAUNCHER_EXTRA_ARGS"] == "-F config" and "I_MPI_PIN" not in told
    assert mpirun_environment(open_mpi, HOSTS, ssh, {}) == {}
    remote, here = ([Host(name="n1", ranks=2, is_here=is_here)] for is_here in (False, True))
    assert "HYDRA_LAUNCHER" in mpirun_environment(hydra, remote, ssh, {})
    assert "HYDRA_LAUNCHER" not in mpirun_environment(hydra, here, ssh, {})


def test_nothing_but_the_agent_is_on_the_command_line() -> None:
    remote = Remote(ssh=("ssh",), python="/venv/bin/python", environ={"HF_TOKEN": "secret", "PYTHONPATH": "/src dir"})
    words = remote.command(HOSTS[1], "coremill.hosts.agent")
    assert words[-2:] == ["bob@n2", "env 'PYTHONPATH=/src dir' /venv/bin/python -m coremill.hosts.agent"]
    assert not any("secret" in word for word in words)


# --- what a host may answer


def answer(**changes: Any) -> str | None:
    here = {"versions": {"coremill": "1", "torch": "2"}, "files": {"s.py": "abc"}}
    report: dict[str, Any] = {
        "versions": here["versions"], "time": 100.0, "folder": True, "files": {"s.py": "abc"},
        "interfaces": {"eth0": "a"}, "port_problem": None, "memory_available_bytes": 8e9, **changes,
    }  # fmt: skip
    questions = Questions(
        folder=Path("/w"),
        files=("s.py",),
        master=HOSTS[0],
        ports=(29500,),
        interface="eth0",
        memory_bytes_per_rank=2**31,
    )
    return _problem(HOSTS[1], report, questions, here, 99.0, 101.0)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"versions": {"coremill": "0.9", "torch": "2"}}, "coremill 0.9 (here 1)"),
        ({"versions": {"coremill": "1"}}, "torch none (here 2)"),
        ({"time": 160.0}, "59 s off"),
        ({"time": 40.0}, "59 s off"),
        ({"folder": False}, "has no folder /w"),
        ({"files": {"s.py": None}}, "has no file s.py"),
        ({"files": {"s.py": "other"}}, "another version of the file"),
        ({"interfaces": {"lo": "b"}}, "no interface eth0"),
        ({"port_problem": "Address already in use"}, "port 29500 cannot be used"),
        ({"memory_available_bytes": 4e9}, "need 4.3 GB"),
    ],
)
def test_a_host_that_is_not_ready_is_told_in_one_line(changes: dict[str, Any], told: str) -> None:
    assert answer() is None
    problem = answer(**changes)
    assert problem is not None and told in problem and "\n" not in problem


# --- lines


def test_lines_stay_whole_and_carry_their_rank() -> None:
    prefixer = Prefixer(3)
    assert prefixer.feed(b"one\ntw") == b"[3] one\n"
    assert prefixer.feed(b"o\r 50%\r100%\r\nthree") == b"[3] two\n[3]  50%\n[3] 100%\n"
    assert (prefixer.rest(), prefixer.rest()) == (b"[3] three\n", b"")
    plain = Prefixer(None)
    assert plain.feed(b"a\nb") + plain.rest() == b"a\nb\n"


def test_logs_are_followed(tmp_path: Path) -> None:
    shown_lines: list[bytes] = []
    follower = LogFollower(tmp_path, [0, 1], shown_lines.append, prefix=True)
    follower.poll()
    (tmp_path / "rank-00001.log").write_bytes(b"half")
    follower.poll()
    assert shown_lines == []
    follower.poll(is_end=True)
    assert shown_lines == [b"[1] half\n"]


def failure(rank_number: int, time: float, **changes: Any) -> Failure:
    values = {"host": "n", "exit_code": 1, "signal": None, "follows": False, "tail": "", **changes}
    return Failure(rank=rank_number, time=time, **values)


def test_the_first_failure_of_its_own_is_blamed() -> None:
    found = [failure(0, 1.0, follows=True), failure(2, 3.0), failure(1, 2.0)]
    blamed = first_failure(found)
    assert blamed is not None and blamed.rank == 1
    assert first_failure([]) is None


def test_a_failure_travels_in_one_write() -> None:
    long = failure(1, 2.0, tail="ä\n" * 4000)
    line = long.to_line()
    assert len(line.encode()) <= 4096 and line.count("\n") == 1
    back = Failure.from_line(line.encode())
    assert back is not None and back.rank == 1 and back.tail.endswith("ä\n")
    assert Failure.from_line(b"an ordinary line\n") is None


def test_last_words_are_the_last_traceback() -> None:
    tail = Tail()
    tail.add(b"[rank1]: Traceback (most recent call last):\n[rank1]:   old\n" + b"x" * 20000 + b"\n")
    tail.add(b"[rank1]: Traceback (most recent call last):\n[rank1]:   File\n[rank1]: ValueError: here\n")
    assert tail.text() == "Traceback (most recent call last):\n  File\nValueError: here"
    assert last_words("a\nb\n") == "a\nb"


def test_a_script_that_lost_its_peer_only_follows() -> None:
    lost = "RuntimeError: [/p/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:14261. This is"
    assert is_follower(f"[rank0]:   work.wait()\n[rank0]: {lost}\n") and is_follower(lost)
    assert not is_follower("RuntimeError: the store is closed\nValueError: poisoned")

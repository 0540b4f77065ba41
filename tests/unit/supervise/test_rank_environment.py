"""What ranks find in their environment, and which cores they get."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest

from coremill.forked_rank import STAGES
from coremill.run import story as run
from coremill.supervise.fork_client import why_no_fork_server
from coremill.supervise.fork_server import renumbered
from coremill.supervise.rank_environment import (
    cpus_for_rank,
    node_of_launcher,
    oversubscription_note,
    rank_environment,
    shared_settings,
)
from coremill.supervise.rank_process import memory_kills
from coremill.world.heartbeat import HEARTBEAT_FD
from coremill.world.identity import STORE_FD, NodeIdentity, identify
from coremill.world.lost_peers import follower_line, is_follower
from coremill.world.meeting import machine_id, names_of, nodes_of
from rank_plans import rank_plan

NODE = NodeIdentity(node_rank=1, nodes=2, ranks_per_node=2, master_address="host-a", master_port=29400)


def environment_of(local_rank: int, environ: dict[str, str], node: NodeIdentity | None = None) -> dict[str, str]:
    plan = rank_plan(2, threads=3)
    here = node_of_launcher(plan, node, 41000)
    return rank_environment(
        environ,
        shared_settings(plan, environ, here),
        here,
        local_rank=local_rank,
        local_size=2,
        launcher_pid=77,
        store_fd=9 if local_rank == 0 and here.nodes == 1 else None,
    )


def test_ranks_of_one_machine() -> None:
    first, second = (environment_of(local_rank, {"HOME": "/home/me"}) for local_rank in (0, 1))
    assert first["HOME"] == "/home/me"
    assert first["OMP_NUM_THREADS"] == "3"
    assert first["GLOO_SOCKET_IFNAME"] == "lo"
    one, two = identify(first), identify(second)
    assert one is not None and two is not None
    assert (one.rank, one.size, one.store_fd, one.launcher) == (0, 2, 9, "coremill")
    assert (two.rank, two.size, two.store_fd, two.master_port) == (1, 2, None, 41000)
    assert one.master_address == "127.0.0.1" and one.is_one_host


def test_ranks_of_one_node_of_two() -> None:
    identity = identify(environment_of(1, {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "2"}, NODE))
    assert identity is not None
    assert (identity.rank, identity.size, identity.local_rank, identity.node_rank) == (3, 4, 1, 1)
    assert (identity.master_address, identity.master_port, identity.store_fd) == ("host-a", 29400, None)
    # Which device leads to the master is found by the ranks themselves.
    assert "GLOO_SOCKET_IFNAME" not in environment_of(1, {}, NODE)


@pytest.mark.parametrize("variable", ["OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "KMP_AFFINITY", "LD_PRELOAD"])
def test_what_the_user_set_stays(variable: str) -> None:
    environ = {variable: "theirs"}
    assert environment_of(0, environ)[variable] == "theirs"


def test_settings_say_why() -> None:
    plan = rank_plan(2, threads=3)
    settings = shared_settings(plan, {"OMP_NUM_THREADS": "8"}, node_of_launcher(plan, None, 1))
    reasons = {setting.variable: (setting.value, setting.reason) for setting in settings}
    assert reasons["OMP_NUM_THREADS"] == ("8", "set by you; coremill would have taken 3")
    assert reasons["GLOO_SOCKET_IFNAME"][0] == "lo"
    assert all(reason for _, reason in reasons.values())


def test_variables_of_a_launcher_further_out_are_dropped() -> None:
    ours = environment_of(1, {"TORCHELASTIC_USE_AGENT_STORE": "True", "COREMILL_STORE_FD": "4"})
    assert "TORCHELASTIC_USE_AGENT_STORE" not in ours and "COREMILL_STORE_FD" not in ours


@pytest.mark.parametrize(
    ("cpus", "inherited", "expected"),
    [
        pytest.param(((0, 1), (2, 3)), {0, 1, 2, 3}, {2, 3}, id="narrows"),
        pytest.param(((0, 1), (2, 3)), {2, 3}, None, id="already so"),
        pytest.param(((0, 1), (2, 3)), {0, 1, 2}, {2}, id="stays inside what was inherited"),
        pytest.param(((0, 1), (2, 3)), {0, 1}, None, id="never widens"),
        pytest.param(((0, 1),), {0, 1, 2}, None, id="not planned"),
    ],
)
def test_cpus_for_rank(cpus: tuple[tuple[int, ...], ...], inherited: set[int], expected: set[int] | None) -> None:
    assert cpus_for_rank(rank_plan(2, cpus=cpus), 1, frozenset(inherited)) == expected


def test_layout_is_described_only_where_ranks_share() -> None:
    assert oversubscription_note(rank_plan(2, cpus=((0,), (1,)))) is None
    line = oversubscription_note(rank_plan(4, cpus=((0, 1),) * 4))
    assert line is not None and "\n" not in line
    assert "4 ranks" in line and "2 CPUs" in line and "50%" in line


@pytest.mark.parametrize(
    ("machines", "local_ranks", "nodes"),
    [
        pytest.param("aabb", [0, 1, 0, 1], [0, 0, 1, 1], id="filled host by host"),
        pytest.param("abab", [0, 0, 1, 1], [0, 1, 0, 1], id="dealt out in turn"),
        pytest.param("bbba", [0, 1, 2, 0], [0, 0, 0, 1], id="unequal"),
        pytest.param("aaaa", [0, 1, 0, 1], [0, 0, 1, 1], id="two containers of one name"),
    ],
)
def test_nodes_are_counted_from_the_roll(machines: str, local_ranks: list[int], nodes: list[int]) -> None:
    roster = [{"machine": name, "local_rank": rank} for name, rank in zip(machines, local_ranks, strict=True)]
    assert nodes_of(roster) == nodes


def test_machines_of_one_name_get_the_number_of_their_node() -> None:
    roster = [{"host": name} for name in ("localhost", "localhost", "other", "localhost")]
    assert names_of(roster, [0, 0, 1, 2]) == ("localhost (node 0)", "localhost (node 0)", "other", "localhost (node 2)")
    assert names_of(roster[:3], [0, 0, 1]) == ("localhost", "localhost", "other")
    assert machine_id() == machine_id() and Path("/proc/sys/kernel/random/boot_id").read_text().strip() in machine_id()


def test_followers_are_recognised_by_their_line() -> None:
    assert is_follower("warning: something\n" + follower_line(3, 0) + "\n")
    assert not is_follower("Traceback: rank 0 failed\n")


def test_kernel_kills_are_read(tmp_path) -> None:  # type: ignore[no-untyped-def]
    assert memory_kills(tmp_path) == 0
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "vmstat").write_text("nr_free_pages 1\noom_kill 12\noom_kill_other 3\n")
    assert memory_kills(tmp_path) == 12
    # The cgroup knows better where it counts: the machine's number holds strangers.
    level = tmp_path / "sys" / "fs" / "cgroup"
    level.mkdir(parents=True)
    (level / "cgroup.controllers").write_text("memory\n")
    (level / "memory.events").write_text("low 0\nhigh 0\nmax 9\noom 4\noom_kill 3\noom_group_kill 0\n")
    assert memory_kills(tmp_path) == 3


def test_a_forked_rank_finds_its_descriptors_under_its_own_numbers() -> None:
    environ = {STORE_FD: "7", HEARTBEAT_FD: "9:1", "OTHER_FD": "7"}
    assert renumbered(environ, {7: 4, 9: 5}) == {STORE_FD: "4", HEARTBEAT_FD: "5:1", "OTHER_FD": "7"}
    assert renumbered({"HOME": "/"}, {}) == {"HOME": "/"}


def test_threads_bound_by_openmp_need_a_process_of_their_own() -> None:
    assert why_no_fork_server({"OMP_PROC_BIND": ""}) is None
    assert "OMP_PROC_BIND is set" in str(why_no_fork_server({"OMP_PROC_BIND": "close"}))


def test_the_fork_server_imports_all_stages_of_a_rank() -> None:
    """What the stages of the story import when they run, a forked rank finds imported."""
    tree = ast.parse(inspect.getsource(run))
    stages = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    wanted = {node.module for stage in stages for node in ast.walk(stage) if isinstance(node, ast.ImportFrom)}
    assert wanted and wanted <= set(STAGES)

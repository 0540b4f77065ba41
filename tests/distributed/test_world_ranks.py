"""World on real gloo ranks: exchanges, once per node, lost peers, and a store only this machine reaches."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from coremill.errors import InputError, PeerLost
from coremill.world import group
from coremill.world.group import PeerFailed, World, join_world
from coremill.world.identity import RankIdentity
from ranks import RankError, run_ranks
from tiers import some_long


def exchanges(world: World) -> dict[str, Any]:
    values = {"rank": world.rank, "text": "ü" * (world.rank * 1000), "none": None}
    world.barrier()
    return {
        "gathered": [value["rank"] for value in world.gather(values)],
        "lengths": [len(value["text"]) for value in world.gather(values)],
        "broadcast": world.broadcast({"from": world.rank}, source=world.size - 1),
        "sums": world.sums([1.0, world.rank, 1e12 if world.rank == 0 else 1.0]),
        "sum": world.sum(0.1),
        "empty": world.sums([]),
        "mesh": list(world.mesh().shape),
        "same_mesh": world.mesh() is world.mesh(),
        "node": (world.node_rank, world.nodes, world.local_rank, world.local_size, len(world.hostnames)),
    }


@pytest.mark.parametrize("size", [1, 2, 4])
def test_exchanges(size: int) -> None:
    results = run_ranks(exchanges, size)
    for rank, result in enumerate(results):
        assert result["gathered"] == list(range(size))
        assert result["lengths"] == [1000 * other for other in range(size)]
        assert result["broadcast"] == {"from": size - 1}
        assert result["sums"][:2] == [size, sum(range(size))]
        assert result["sums"][2] == 1e12 + (size - 1)  # lost in single precision
        assert result["sum"] == results[0]["sum"] == pytest.approx(0.1 * size)
        assert result["empty"] == []
        assert result["mesh"] == [size] and result["same_mesh"]
        assert result["node"] == (0, 1, rank, size, size)


def listening_addresses() -> list[str]:
    """Local addresses of the TCP sockets this process listens on."""
    mine = set()
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            mine.add(os.readlink(f"/proc/self/fd/{descriptor}"))
        except OSError:
            continue
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in mine:
                found.append(fields[1].split(":")[0])
    return found


def who_listens(world: World) -> list[str]:
    world.barrier()
    return listening_addresses()


def test_store_and_collectives_listen_on_loopback_only() -> None:
    listening = [address for rank in run_ranks(who_listens, 2) for address in rank]
    assert len(listening) >= 3  # the store, and gloo on each rank
    assert set(listening) == {"0100007F"}


def derived_port_listens(identity: RankIdentity) -> list[str]:
    """As under mpirun: no socket is handed over, rank 0 binds by itself."""
    bare = replace(RankIdentity.alone(), master_address="localhost", launcher="open-mpi")
    with join_world(bare):
        return listening_addresses()


def test_a_store_without_inherited_socket_listens_on_loopback_only() -> None:
    [[*addresses]] = run_ranks(derived_port_listens, 1, join=False)
    # The nursery's own unused listener is on loopback as well.
    assert addresses and set(addresses) == {"0100007F"}


def prepare_once(world: World, fail: str | None = None) -> Any:
    def action() -> list[int]:
        if fail == "input":
            raise InputError("no such column", where="data.column", do="name one of: text")
        if fail == "bug":
            raise ZeroDivisionError("division by zero")
        if fail == "not json":
            return {1, 2}  # type: ignore[return-value]
        return [world.rank, os.getpid()]

    results = [world.once_per_node(action), world.once_per_node(lambda: "again")]
    return results, os.getpid()


def test_once_per_node_runs_on_one_rank() -> None:
    results = run_ranks(prepare_once, 3)
    assert [result[0] for result in results] == [[[0, results[0][1]], "again"]] * 3


def outcome_of_once(world: World, fail: str) -> tuple[str, int, bool, str]:
    try:
        with mock.patch.object(
            group, "HEARING_SECONDS", 1.0
        ):  # who follows waits for the end of rank 0: here none comes
            prepare_once(world, fail)
    except BaseException as error:
        return type(error).__name__, getattr(error, "exit_code", 1), getattr(error, "silent", False), str(error)
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize(
    ("fail", "kind", "exit_code"),
    [("input", "InputError", 78), ("bug", "ZeroDivisionError", 1), ("not json", "TypeError", 1)],
)
def test_once_per_node_fails_on_all_ranks_and_speaks_on_one(fail: str, kind: str, exit_code: int) -> None:
    first, second = run_ranks(outcome_of_once, 2, fail=fail)
    assert first[:3] == (kind, exit_code, False)
    assert second[:3] == (PeerFailed.__name__, exit_code, True)
    assert first[3] == second[3]


def slow_once(world: World) -> str:
    """Longer than a collective may take."""
    return world.once_per_node(lambda: (time.sleep(14), "done")[1])


def meet_however_late() -> None:
    """In this process: the short timeout of a test is for what comes after the meeting."""
    from coremill.world import group as module

    meet = module.meet_at_a_fresh_store
    module.meet_at_a_fresh_store = lambda identity, deadline: meet(identity, deadline + 60)


def join_with_short_timeout(identity: RankIdentity) -> str:
    from coremill.world import group as module

    module.HEARTBEAT_SECONDS = 0.2
    meet_however_late()
    with join_world(identity, timeout_seconds=10.0) as world:
        return slow_once(world)


def test_once_per_node_outlasts_the_timeout_while_its_rank_lives() -> None:
    assert run_ranks(join_with_short_timeout, 2, join=False) == ["done", "done"]


def wait_for_long_work(identity: RankIdentity, marks: bool, how: str) -> tuple[float, str]:
    """Rank 1 works for longer than the timeout; the others wait for it in a collective. Where it gets on, the timeout
    is longer than anybody may keep it off its processor."""
    import torch
    import torch.distributed as dist

    from coremill.world.heartbeat import HEARTBEAT
    from coremill.world.lost_peers import peer_errors

    meet_however_late()
    began = time.monotonic()
    try:
        with join_world(identity, timeout_seconds=10.0 if marks else 2.0) as world:
            if world.rank == 1:
                for _ in range(140 if marks else 40):
                    time.sleep(0.1)
                    if marks:
                        HEARTBEAT.advance(1000)
            if how == "barrier":
                world.barrier()
            elif world.rank == 1:
                dist.send(torch.ones(3), 0)
            elif world.rank == 0:
                with peer_errors():
                    dist.recv(torch.ones(3), 1)
            return time.monotonic() - began, "done"
    except PeerLost as error:
        return time.monotonic() - began, str(error)


@pytest.mark.parametrize("how", ["barrier", "receive"])
def test_a_rank_is_waited_for_as_long_as_it_gets_on(how: str) -> None:
    for _, ended in run_ranks(wait_for_long_work, 3, join=False, marks=True, how=how):
        assert ended == "done"


def test_a_rank_that_does_not_get_on_is_lost_after_the_timeout() -> None:
    first, _, third = run_ranks(wait_for_long_work, 3, join=False, marks=False, how="barrier")
    for seconds, ended in (first, third):
        assert "another rank stopped answering" in ended and "no rank got on for 2 s" in ended
        assert seconds >= 2.0


def die_or_wait(world: World, how: str) -> None:
    world.barrier()
    if world.rank == 1:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("the batch is poisoned")
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.ones(1_000_000))


def test_a_rank_that_raises_is_named_and_the_others_notice() -> None:
    with pytest.raises(RankError, match="the batch is poisoned") as caught:
        run_ranks(die_or_wait, 3, how="raise", timeout_seconds=60)
    assert (caught.value.rank, caught.value.kind) == (1, "ValueError")
    assert "rank 0: PeerLost" in str(caught.value) and "rank 2: PeerLost" in str(caught.value)


def test_a_killed_rank_is_noticed_by_the_others() -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(die_or_wait, 2, how="kill", timeout_seconds=60)
    assert (caught.value.rank, caught.value.kind) == (1, "died")
    assert "rank 0: PeerLost" in str(caught.value)


def leave_while_a_collective_waits(identity: RankIdentity) -> tuple[float, str]:
    """Rank 1 raises with a collective under way that rank 0 never enters."""
    import torch
    import torch.distributed as dist

    began = time.monotonic()
    try:
        with join_world(identity, timeout_seconds=60) as world:
            world.barrier()
            began = time.monotonic()
            if world.rank == 1:
                dist.all_reduce(torch.ones(100_000), async_op=True)
                raise KeyError("here")
            world.barrier()
    except (KeyError, PeerLost) as error:
        return time.monotonic() - began, type(error).__name__
    raise AssertionError("nothing was raised")


def test_leaving_after_an_exception_waits_for_nobody() -> None:
    results = run_ranks(leave_while_a_collective_waits, 2, join=False)
    assert [kind for _, kind in results] == ["PeerLost", "KeyError"]
    # Torch alone waits for the full timeout here.
    assert all(seconds < 60 / 2 for seconds, _ in results)


def join_with(identity: RankIdentity, changes: dict[int, dict[str, int]], patience: float) -> tuple[str, str]:
    try:
        with join_world(replace(identity, **changes.get(identity.rank, {})), timeout_seconds=patience) as world:
            world.barrier()
    except (InputError, PeerLost) as error:
        return "InputError" if isinstance(error, InputError) else "PeerLost", str(error)
    return "joined", ""


def test_a_missing_rank_is_named() -> None:
    results = run_ranks(join_with, 2, join=False, changes={0: {"size": 3}, 1: {"size": 3}}, patience=8.0)
    assert [kind for kind, _ in results] == ["PeerLost", "PeerLost"]
    assert "1 of 3 ranks did not arrive in time: 2" in results[0][1]


def test_ranks_that_count_differently_are_refused() -> None:
    results = run_ranks(join_with, 2, join=False, changes={1: {"size": 4}}, patience=20.0)
    assert results[0][0] == "InputError" and "rank 1 on" in results[0][1] and "counts 4 ranks" in results[0][1]
    assert results[1][0] in ("InputError", "PeerLost")


def test_two_processes_of_one_rank_are_refused() -> None:
    results = run_ranks(join_with, 3, join=False, changes={2: {"rank": 1}}, patience=8.0)
    assert any(kind == "InputError" and "two processes say they are rank 1" in text for kind, text in results[1:])


def interface_seen(world: World) -> str | None:
    return os.environ.get("GLOO_SOCKET_IFNAME")


def test_the_interface_of_the_user_is_kept() -> None:
    assert run_ranks(interface_seen, 2) == ["lo", "lo"]
    assert run_ranks(interface_seen, 2, environ={"GLOO_SOCKET_IFNAME": "lo,lo"}) == ["lo,lo", "lo,lo"]


def test_no_process_is_left_behind() -> None:
    import ranks

    run_ranks(exchanges, 2)
    nursery = ranks._nursery().process.pid
    children = Path(f"/proc/{nursery}/task/{nursery}/children").read_text().split()
    assert children == []


def fail_and_leave(world: World) -> None:
    """The error goes through join_world: rank 0, which serves the store, leaves as fast as it can."""
    world.once_per_node(lambda: 1 / 0)


@pytest.mark.parametrize("turn", some_long(range(3), [0], "three turns at the same race"))
def test_the_others_hear_why_before_rank_0_leaves(turn: int) -> None:
    with pytest.raises(RankError, match="division by zero") as caught:
        run_ranks(fail_and_leave, 3)
    assert (caught.value.rank, caught.value.kind) == (0, "ZeroDivisionError")
    assert "rank 1: PeerFailed, rank 2: PeerFailed" in str(caught.value)


def policies_of_gloo(world: World) -> list[int]:
    """The scheduling policy of each of gloo's threads, after an exchange."""
    world.sums([1.0])
    tasks = [task for task in Path("/proc/self/task").iterdir() if (task / "comm").read_text().startswith("gloo")]
    return [os.sched_getscheduler(int(task.name)) for task in tasks]


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="only Linux has batch threads")
def test_gloos_threads_let_compute_threads_finish() -> None:
    for policies in run_ranks(policies_of_gloo, 2):
        assert policies and set(policies) == {os.SCHED_BATCH}

"""What a rank finds in its environment: who it is, how many threads it takes, which device it talks through.

Rank variables are the launcher's own and always set. Everything else yields to what the user has set already.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from coremill.hardware.process_memory import KEEPS_FREED_MEMORY
from coremill.plan.layout import Layout
from coremill.plan.types import Plan
from coremill.supervise.descendants import mark_of_ranks
from coremill.world.heartbeat import HEARTBEAT_FD
from coremill.world.identity import LAUNCHER_PID, LOOPBACK, STORE_FD, NodeIdentity
from coremill.world.sockets import interface_towards


@dataclass(frozen=True)
class Setting:
    """One variable of the ranks' environment, and why it has its value."""

    variable: str
    value: str
    reason: str


# A step frees and takes the same gigabytes again and again; given back to the kernel, every page is faulted in and
# zeroed anew. Kept, a 50 M model in bf16 on 16 AMX cores ran 7,781 instead of 5,872 tokens/s with the same peak
# (glibc); in fp32 on two Neoverse-N1 cores a step took 4 % less CPU time for 5 % more memory (mimalloc, in torch's
# ARM builds).
_KEPT = "memory freed within a step is kept for the next one instead of being faulted in anew"
# 336 and 341 tokens/s against 310 for 1.24 B parameters on four ranks of 4 AMX cores, with the same memory.
_IN_HUGE_PAGES = "where the kernel gives huge pages to who asks, the allocator asks"
KEEP_MEMORY = tuple(
    Setting(name, value, _IN_HUGE_PAGES if name == "GLIBC_TUNABLES" else _KEPT)
    for name, value in KEEPS_FREED_MEMORY.items()
)


def node_of_launcher(plan: Plan | Layout, base: NodeIdentity | None, port: int) -> NodeIdentity:
    """The node this launcher starts ranks on; without a description it is the only one."""
    if base is not None and base.nodes > 1:
        return base
    return NodeIdentity(
        node_rank=0, nodes=1, ranks_per_node=plan.ranks_per_node.value, master_address=LOOPBACK, master_port=port
    )


def shared_settings(plan: Plan | Layout, environ: Mapping[str, str], node: NodeIdentity) -> tuple[Setting, ...]:
    """What all ranks of this node share besides their rank variables."""
    wanted = [
        Setting("OMP_NUM_THREADS", str(plan.threads_per_rank.value), plan.threads_per_rank.reason),
        Setting("PYTHONUNBUFFERED", "1", "the last lines of a rank that is killed reach its log"),
        *KEEP_MEMORY,
    ]
    if node.nodes == 1:
        device = interface_towards(None)
        if device is not None:
            wanted.append(Setting("GLOO_SOCKET_IFNAME", device, "all ranks are on this machine: nothing leaves it"))
    return tuple(unless_set_by_user(setting, environ) for setting in wanted)


def rank_environment(
    environ: Mapping[str, str],
    settings: tuple[Setting, ...],
    node: NodeIdentity,
    *,
    local_rank: int,
    local_size: int,
    launcher_pid: int | None,
    store_fd: int | None,
) -> dict[str, str]:
    """Of one rank; `launcher_pid` only where it has orders to find: a rank of `launch` has none, whatever it runs."""
    kept = {**fork_server_environment(environ, settings), **mark_of_ranks()}
    kept.update(
        {
            "RANK": str(node.node_rank * local_size + local_rank),
            "WORLD_SIZE": str(node.nodes * local_size),
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(local_size),
            "GROUP_RANK": str(node.node_rank),
            "MASTER_ADDR": node.master_address,
            "MASTER_PORT": str(node.master_port),
        }
    )
    if launcher_pid is not None:
        kept[LAUNCHER_PID] = str(launcher_pid)
    if store_fd is not None:
        kept[STORE_FD] = str(store_fd)
    return kept


def fork_server_environment(environ: Mapping[str, str], settings: tuple[Setting, ...]) -> dict[str, str]:
    """What all ranks have in common: libraries read it as they are imported."""
    # Left over from a launcher further out: its orders and its store are not ours.
    not_ours = (LAUNCHER_PID, STORE_FD, HEARTBEAT_FD)
    kept = {
        name: value for name, value in environ.items() if not name.startswith("TORCHELASTIC_") and name not in not_ours
    }
    kept.update({setting.variable: setting.value for setting in settings})
    return kept


def cpus_for_rank(plan: Plan | Layout, local_rank: int, inherited: frozenset[int]) -> frozenset[int] | None:
    """The mask to give a rank; None where it would not narrow the inherited one, which is never widened."""
    if local_rank >= len(plan.cpus_of_rank):
        return None
    cpus = frozenset(plan.cpus_of_rank[local_rank]) & inherited
    return cpus if cpus and cpus != inherited else None


def oversubscription_note(plan: Plan | Layout) -> str | None:
    """What it costs where ranks ask for more threads than they have CPUs, in one line; None where they do not."""
    ranks, threads = plan.ranks_per_node.value, plan.threads_per_rank.value
    cpus = len({cpu for rank in plan.cpus_of_rank for cpu in rank})
    asked = ranks * threads
    if not cpus or asked <= cpus:
        return None
    each = "1 thread" if threads == 1 else f"{threads} threads"
    where = "1 CPU" if cpus == 1 else f"{cpus} CPUs"
    return (
        f"{ranks} ranks with {each} each share {where}: they take turns, about {cpus / asked:.0%} of the time each, "
        f"and wait for the slowest at every exchange; more ranks than {max(1, cpus // threads)} make no step faster"
    )


def unless_set_by_user(setting: Setting, environ: Mapping[str, str]) -> Setting:
    """The setting, or what the user has set instead."""
    theirs = environ.get(setting.variable)
    if not theirs:
        return setting
    if theirs == setting.value:
        return Setting(setting.variable, theirs, "set by you")
    return Setting(setting.variable, theirs, f"set by you; coremill would have taken {setting.value}")

"""`--dry-run`: the exact command and environment of every host and rank, printed; nothing is started."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence

from coremill.hosts.across_hosts import HostCommand
from coremill.hosts.forwarding import shown, shown_arguments
from coremill.hosts.preflight import HostAnswer
from coremill.hosts.ssh import Remote
from coremill.launch.request import Request
from coremill.plan.layout import Layout
from coremill.supervise.rank_environment import Setting, cpus_for_rank
from coremill.world.identity import LOOPBACK, NodeIdentity


def show_local(
    request: Request, layout: Layout, base: NodeIdentity | None, settings: Sequence[Setting], warning: str | None
) -> None:
    """Ranks that this machine's launcher would start."""
    ranks = layout.ranks_per_node.value
    first, size = (0, ranks) if base is None else (base.node_rank * ranks, base.nodes * ranks)
    address, port = (LOOPBACK, "a free one") if base is None else (base.master_address, str(base.master_port))
    inherited = frozenset(os.sched_getaffinity(0))
    print(f"this host: {_count(ranks, 'rank')} of {size}, in {os.getcwd()}")
    print(f"  command: {_command(request.program)}")
    print("  environment of all ranks, besides what is set already:")
    _print_settings(settings)
    print(f"    MASTER_ADDR={address} MASTER_PORT={port} WORLD_SIZE={size} LOCAL_WORLD_SIZE={ranks}")
    for local in range(ranks):
        cpus = cpus_for_rank(layout, local, inherited) or inherited
        print(f"  rank {first + local}: RANK={first + local} LOCAL_RANK={local}, cpus {_cpu_text(cpus)}")
    if warning is not None:
        print(warning)
    print("nothing was started")


def show_hosts(
    commands: Sequence[HostCommand],
    remote: Remote,
    answers: Sequence[HostAnswer],
    settings: Sequence[Setting],
    environ: Mapping[str, str],
) -> None:
    """What would run on each host."""
    for command in commands:
        host = command.host
        print(f"host {host.name}: {_count(host.ranks, 'rank')}, in {command.folder}")
        if not host.is_here:
            print(f"  reached by: {_command(remote.command(host, 'coremill.hosts.agent'))}")
        print(f"  command: {_command(command.argv)}")
        how = "besides what is set here" if host.is_here else "sent over the connection"
        print(f"  environment, {how}:")
        for name, value in sorted(command.environ.items()):
            if not host.is_here or environ.get(name) != value:
                print(f"    {name}={shlex.quote(shown(name, value))}")
    for answer in answers:
        report = answer.report or {}
        free = report["memory_available_bytes"] / 1e9
        print(f"host {answer.host.name}: ready, {_count(report['cores'], 'core')}, {free:.1f} GB of memory free")
    print("each rank's own environment is chosen on its host; on one like this:")
    _print_settings(settings)
    print("nothing was started" + ("" if answers else "; the hosts were not asked (--check asks them)"))


def _print_settings(settings: Sequence[Setting]) -> None:
    for setting in settings:
        value = shlex.quote(shown(setting.variable, setting.value))
        print(f"    {setting.variable}={value}  # {setting.reason}")


def _command(argv: Sequence[str]) -> str:
    return shlex.join(shown_arguments(list(argv)))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _cpu_text(cpus: frozenset[int]) -> str:
    return ",".join(str(cpu) for cpu in sorted(cpus))

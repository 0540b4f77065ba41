"""torchrun on each host: static rendezvous at the first one, ranks started through coremill's shim."""

from __future__ import annotations

from collections.abc import Sequence

from coremill.hosts.ssh import Host


def torchrun_command(
    hosts: Sequence[Host], node_rank: int, python: str, master_address: str, master_port: int, program: Sequence[str]
) -> list[str]:
    """Argv for one host.

    Static rendezvous: with c10d the ranks of a restart dial the dead ranks of the attempt before (torch 2.13), and a
    clock that is 15 s off makes a node look dead. Restarts are left to whoever starts this command again.
    """
    return [
        python,
        "-m",
        "torch.distributed.run",
        f"--nnodes={len(hosts)}",
        f"--node-rank={node_rank}",
        f"--nproc-per-node={hosts[node_rank].ranks}",
        f"--master-addr={master_address}",
        f"--master-port={master_port}",
        "--no-python",
        python,
        "-m",
        "coremill.launch.rank_shim",
        *program,
    ]

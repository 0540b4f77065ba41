"""coremill's own launcher on each host of a hostfile, told which node it is in the form Kubeflow made common."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from coremill.hosts.across_hosts import HostCommand
from coremill.hosts.forwarding import forwarded
from coremill.hosts.host_restarts import SILENCE_SECONDS
from coremill.hosts.ssh import Host
from coremill.launch.request import Request, master_address
from coremill.world.identity import COMES_BACK, HEAD, INTERFACE


def node_commands(
    request: Request, hosts: tuple[Host, ...], port: int, environ: Mapping[str, str], *, is_first: bool
) -> list[HostCommand]:
    """One per host; one that comes back later is not told what was meant for the first start only."""
    words = [word for word in request.program if is_first or word not in request.only_first]
    told = forwarded(environ)
    if request.interface is not None:
        told |= {INTERFACE: request.interface, "GLOO_SOCKET_IFNAME": ""}  # also where a host has one of its own
    return [
        HostCommand(
            host=host,
            argv=(*words, "--set", f"fleet.nodes={len(hosts)}"),
            folder=Path.cwd(),
            environ={
                **told,
                HEAD: "1" if is_first else COMES_BACK,
                "PET_NNODES": str(len(hosts)),
                "PET_NODE_RANK": str(index),
                "PET_NPROC_PER_NODE": str(host.ranks),
                "PET_MASTER_ADDR": master_address(request, hosts),
                "PET_MASTER_PORT": str(port),
            },
            grace_seconds=request.stop_seconds,
            ends_itself=request.ends_itself,
            silence_seconds=SILENCE_SECONDS,
        )
        for index, host in enumerate(hosts)
    ]

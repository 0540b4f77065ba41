"""What the user asked `coremill launch` for, checked: which program, where, how many ranks, started by what."""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from coremill.errors import InputError
from coremill.hardware.facts import NodeFacts
from coremill.hardware.hostfile import read_hostfile
from coremill.hosts.host_restarts import HostRestarts
from coremill.hosts.ssh import Host, is_this_host
from coremill.launch.settings import Allocator
from coremill.plan.layout import lay_out
from coremill.world.identity import DEFAULT_PORT, DERIVED_PORTS, LOOPBACK, NodeIdentity, is_loopback
from coremill.world.sockets import own_address_towards

Via = Literal["local", "torchrun", "mpirun"]


@dataclass(frozen=True, kw_only=True)
class Request:
    """The options of `coremill launch`."""

    script: str  # a file, or a module's name
    arguments: tuple[str, ...] = ()
    is_module: bool = False
    nproc: int | None = None
    hostfile: Path | None = None
    ppn: int | None = None
    ppn_setting: str = "--ppn"  # who says so, for messages
    via: Via | None = None
    nnodes: int | None = None
    node_rank: int | None = None
    master: str | None = None  # ADDRESS[:PORT]
    accelerate: Path | None = None  # a file of accelerate that says the rest
    interface: str | None = None
    threads: int | None = None
    allocator: Allocator = "auto"
    bind_threads: bool = False
    prefix: bool = False
    log_folder: Path | None = None
    dry_run: bool = False
    check: bool | None = None  # of hosts; None: before a start, not in a dry run
    quiet: bool = False
    ssh: str = "ssh"
    python: str = sys.executable
    mpirun: str | None = None
    same_files: tuple[str, ...] = ()  # besides the script: files that must be the same on all hosts
    memory_bytes_per_rank: int | None = None  # where known: hosts with less are refused
    stop_seconds: float = 8.0  # from a request to stop to the kill
    ends_itself: bool = False  # the launcher on each host does, when nothing gets on: it is not killed while it lives
    nodes: HostRestarts | None = None  # the program is a launcher on each host, and a host that is lost comes back
    only_first: tuple[str, ...] = ()  # words of `arguments` that a host which comes back is not told

    @property
    def program(self) -> list[str]:
        """Argv of a rank."""
        return [self.python, *(["-m"] if self.is_module else []), self.script, *self.arguments]

    @property
    def files(self) -> tuple[str, ...]:
        """What must be the same on all hosts."""
        return (*(() if self.is_module else (self.script,)), *self.same_files)

    @property
    def by_hand(self) -> bool:
        """Whether the user starts one launcher on each node."""
        return self.hostfile is None and self.nnodes is not None and self.nnodes > 1


def check_request(request: Request) -> None:
    """Refuse what cannot be meant, before anything is looked at."""
    if not request.is_module and not Path(request.script).is_file():
        raise InputError(
            f"there is no script {request.script}", do="name a Python file, or a module with -m", where="SCRIPT"
        )
    for option, value in (
        ("--nproc", request.nproc),
        ("--ppn", request.ppn),
        ("--nnodes", request.nnodes),
        ("--threads", request.threads),
    ):
        if value is not None and value < 1:
            raise InputError(f"{option} {value}: at least 1 is needed")
    if request.hostfile is not None and request.nproc is not None:
        raise InputError(
            "--nproc counts the ranks of one machine, --hostfile names several",
            do="use --ppn for the ranks per host",
        )
    if request.hostfile is not None and request.node_rank is not None:
        raise InputError("--node-rank is for a start by hand on each node", do="leave out --hostfile or --node-rank")
    if request.by_hand:
        if request.node_rank is None or request.master is None:
            raise InputError(
                f"--nnodes {request.nnodes} without a hostfile is a start by hand: it needs --node-rank and --master",
                do="on each node: --nnodes N --node-rank I --master ADDRESS[:PORT], or once: --hostfile FILE",
            )
        if not 0 <= request.node_rank < (request.nnodes or 1):
            raise InputError(f"--node-rank {request.node_rank}: with --nnodes {request.nnodes} it is 0 to"
                             f" {(request.nnodes or 1) - 1}")  # fmt: skip
        if request.via == "mpirun":
            raise InputError("mpirun starts all nodes at once", do="use --hostfile, or leave --via out")
    if request.master is not None:
        master_of(request.master)


def master_of(text: str) -> tuple[str, int | None]:
    """ADDRESS[:PORT] in its parts; IPv6 with a port in brackets."""
    address, colon, port = text.rpartition(":")
    if not colon or (address.count(":") and not address.startswith("[")):
        return text.strip("[]"), None
    if not port.isdigit() or not 0 < int(port) < 65536 or not address:
        raise InputError(f"--master {text} is not ADDRESS[:PORT]", do="for example --master node1:29500")
    return address.strip("[]"), int(port)


def ranks_of(node: NodeFacts) -> int:
    """As many as a machine has where nobody says a number."""
    return lay_out(node, ranks=None, threads=None).ranks_per_node.value


def hosts_of(request: Request, node: NodeFacts) -> tuple[Host, ...]:
    """The hosts of a hostfile with their ranks; this machine alone without one."""
    if request.hostfile is None:
        return (Host(name="localhost", ranks=request.nproc or ranks_of(node), is_here=True),)
    slots = read_hostfile(request.hostfile)
    if request.nnodes is not None:
        if request.nnodes > len(slots):
            raise InputError(f"{request.hostfile} names {len(slots)} hosts, --nnodes {request.nnodes} asks for more")
        slots = dict(list(slots.items())[: request.nnodes])
    few = [
        f"host {name}: {count} slot{'s' if count != 1 else ''} in {request.hostfile},"
        f" {request.ppn_setting} {request.ppn} asks for more"
        for name, count in slots.items()
        if count is not None and request.ppn is not None and count < request.ppn
    ]
    if few:
        raise InputError("\n".join(few))
    hosts = tuple(
        # Hosts of a fleet are alike: where nothing is said, as many ranks as this one would take.
        Host(name=name, ranks=request.ppn or count or ranks_of(node), is_here=is_this_host(name))
        for name, count in slots.items()
    )
    if request.via == "local" and not _is_one_here(hosts):
        raise InputError(
            f"--via local starts ranks on this machine only, and {request.hostfile} names others",
            do="leave --via out (torchrun over ssh), or use --via mpirun",
        )
    if via_of(request, hosts) == "torchrun" and len({host.ranks for host in hosts}) > 1:
        raise InputError(
            f"{request.hostfile} gives hosts different numbers of slots, and torchrun takes one number for all",
            do="set --ppn, or use --via mpirun",
        )
    return hosts


def via_of(request: Request, hosts: tuple[Host, ...]) -> Via:
    """As asked; left out, coremill's own launcher on this machine and torchrun on others."""
    return request.via or ("local" if _is_one_here(hosts) else "torchrun")


def _is_one_here(hosts: tuple[Host, ...]) -> bool:
    return len(hosts) == 1 and hosts[0].is_here


def master_address(request: Request, hosts: tuple[Host, ...]) -> str:
    """Where rank 0 will be found by all."""
    if request.master is not None:
        return master_of(request.master)[0]
    first = hosts[0].address
    if len(hosts) == 1:
        return LOOPBACK if hosts[0].is_here else first
    # "localhost" means something else on every host.
    return own_address_towards(hosts[1].address, is_one_host=False) if is_loopback(first) else first


def ports_to_try(request: Request) -> tuple[int, ...]:
    """For the rendezvous: the user's, or a few by chance, so that runs side by side do not meet."""
    fixed = master_of(request.master)[1] if request.master is not None else None
    return (fixed,) if fixed is not None else tuple(random.sample(DERIVED_PORTS, 8))


def node_by_hand(request: Request) -> NodeIdentity:
    """This node, as the user numbered it."""
    assert request.master is not None and request.nnodes is not None and request.node_rank is not None
    address, port = master_of(request.master)
    return NodeIdentity(
        node_rank=request.node_rank,
        nodes=request.nnodes,
        ranks_per_node=request.nproc,
        master_address=address,
        master_port=port or DEFAULT_PORT,
    )

"""Addresses, devices and sockets that ranks meet through."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from math import ceil

from coremill.errors import InputError
from coremill.world.identity import LOOPBACK, RankIdentity, is_loopback

# A cloud caps what one connection carries (AWS: 5 Gbit/s of a card's 12.5 and more), and one thread of gloo's serves
# each. With so many connections to all peers together a card is full.
FLOWS_TO_FILL_A_CARD = 4
# That thread wakes a hundred times a second even when nothing comes: felt where a rank has few cores. Their cards are
# small, too.
CORES_PER_FLOW = 2
# What ranks of one host call each other by (engines/one_host/shared_memory.py): abstract names, without a file.
SAME_HOST_PREFIX = b"\0coremill-"
_SOMEWHERE_ELSE = "198.51.100.1"  # reserved for documentation: asks the routing table only, nothing is sent


def listen_on_loopback() -> socket.socket:
    """A listening socket on a free port that only this machine reaches."""
    return socket.create_server((LOOPBACK, 0), backlog=1024)


def listen_for_store(identity: RankIdentity) -> socket.socket:
    """The socket rank 0 serves the store on, open to no more interfaces than the other ranks need."""
    if identity.store_fd is not None:
        with contextlib.suppress(OSError):  # a stale number: a process that only inherited the variable
            inherited = socket.socket(fileno=os.dup(identity.store_fd))
            if inherited.getsockname()[1] == identity.master_port:
                os.close(identity.store_fd)
                return inherited
            inherited.close()
    port = 0 if identity.agent_store else identity.master_port
    address = _address_to_bind(identity)
    try:
        if address is not None:
            try:
                return socket.create_server((address, port), family=_family(address), backlog=1024)
            except OSError as error:
                if error.errno != errno.EADDRNOTAVAIL:  # MASTER_ADDR is not ours: behind a service address
                    raise
        return socket.create_server(("", port), backlog=1024)
    except OSError as error:
        raise InputError(
            f"rank 0 cannot listen on port {port}: {error.strerror}",
            where=f"MASTER_ADDR={identity.master_address}, MASTER_PORT={identity.master_port}",
            do="set MASTER_PORT to a free port, the same for all ranks",
        ) from error


def own_address_towards(host: str, *, is_one_host: bool) -> str:
    """The address under which ranks elsewhere reach this process."""
    if is_one_host:
        return LOOPBACK
    address = _local_address(_resolve(host) or _SOMEWHERE_ELSE)
    # On the master itself its name may resolve to a loopback address; the others resolve it their own way.
    return host if address is None or is_loopback(address) else address


def interface_towards(host: str | None) -> str | None:
    """The network device that leads to `host` (None: to this machine itself), or None where that cannot be told."""
    if host is None:
        target: str | None = LOOPBACK
    else:
        resolved = _resolve(host)
        target = _local_address(_SOMEWHERE_ELSE if resolved is None or is_loopback(resolved) else resolved)
    if target is None:
        return None
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address.split("%")[0] == target for address in addresses):
            return name
    return None


def interface_for_flows(name: str, hosts: int, cores_per_rank: int | None = None) -> str:
    """The device as often as there should be connections to each peer: gloo opens one for every time it is named.

    Ranks must name it equally often: without `cores_per_rank` of the one that has fewest, by the number of hosts alone.
    """
    flows = 1 if hosts == 1 else ceil(FLOWS_TO_FILL_A_CARD / (hosts - 1))
    if cores_per_rank is not None:
        flows = min(flows, max(1, cores_per_rank // CORES_PER_FLOW))
    return ",".join([name] * flows)


def flows_of(interface: str) -> int:
    """Connections to each peer that gloo opens for this value of GLOO_SOCKET_IFNAME."""
    return max(1, len([name for name in interface.split(",") if name]))


def reaches(host: str, port: int) -> bool:
    """Whether somebody listens there."""
    try:
        socket.create_connection((host, port), timeout=2.0).close()
    except OSError:
        return False
    return True


def open_sockets() -> frozenset[str]:
    """The sockets this process has open, by the kernel's names for them."""
    return frozenset(_socket_descriptors())


def close_sockets_since(before: frozenset[str]) -> None:
    """Shut every connection between ranks opened since `before`; descriptors stay valid for their owners to close.

    Listening sockets are spared: gloo aborts the process when its accept fails.
    """
    for name, descriptor in _socket_descriptors().items():
        if name in before:
            continue
        with contextlib.suppress(OSError):
            with socket.socket(fileno=os.dup(descriptor)) as connection:
                if _is_between_ranks(connection) and not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    connection.shutdown(socket.SHUT_RDWR)


def _is_between_ranks(connection: socket.socket) -> bool:
    """TCP, or what ranks of one host tie among themselves."""
    if connection.family != socket.AF_UNIX:
        return connection.family in (socket.AF_INET, socket.AF_INET6)
    return any(
        isinstance(name, bytes) and name.startswith(SAME_HOST_PREFIX)
        for name in (connection.getsockname(), connection.getpeername())
    )


def _socket_descriptors() -> dict[str, int]:
    found: dict[str, int] = {}
    try:
        descriptors = os.listdir("/proc/self/fd")
    except OSError:
        return found
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{descriptor}")
            if target.startswith("socket:"):
                found[target] = int(descriptor)
    return found


def _address_to_bind(identity: RankIdentity) -> str | None:
    """The one address to listen on; None: all of them."""
    if identity.agent_store and identity.is_one_host:
        return LOOPBACK
    host = identity.master_address
    if identity.agent_store:
        host = own_address_towards(host, is_one_host=False)
    resolved = _resolve(host)
    if resolved is not None and is_loopback(resolved):
        # The name of this machine may stand for loopback in its own hosts file; other machines need a real interface.
        return resolved if identity.is_one_host else None
    return resolved


def _resolve(host: str) -> str | None:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return None
    # IPv4 first where a name has both: gloo and the store's clients try it first as well.
    found.sort(key=lambda entry: entry[0] != socket.AF_INET)
    return str(found[0][4][0]) if found else None


def _local_address(target: str) -> str | None:
    with contextlib.suppress(OSError):
        with socket.socket(_family(target), socket.SOCK_DGRAM) as probe:
            probe.connect((target, 9))  # UDP: only chooses a route
            return str(probe.getsockname()[0])
    return None


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET

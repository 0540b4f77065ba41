"""Commands on other hosts: how ssh is called, and which of the hosts is the one we are on."""

from __future__ import annotations

import contextlib
import shlex
import shutil
import socket
from collections.abc import Mapping
from dataclasses import dataclass

import psutil

from coremill.errors import InputError
from coremill.world.identity import is_loopback

CONNECT_SECONDS = 10
# A password cannot be asked for on several hosts at once. A connection that is silent for 55 s is lost: TCP doubles its
# pauses, so after an outage of 20 s, or two of 8 s soon after each other, 33 s pass before anything gets through. ssh
# takes the first value it sees: what the user's own --ssh sets stays.
ALIVE_SECONDS, ALIVE_COUNT = 5, 10
_SSH_OPTIONS = (
    "-T",
    "-o", "BatchMode=yes",
    "-o", f"ConnectTimeout={CONNECT_SECONDS}",
    "-o", f"ServerAliveInterval={ALIVE_SECONDS}",
    "-o", f"ServerAliveCountMax={ALIVE_COUNT}",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Host:
    """One host of a run."""

    name: str  # as the hostfile has it, perhaps with a user in front
    ranks: int
    is_here: bool

    @property
    def address(self) -> str:
        """Without the user: what ranks dial."""
        return self.name.rpartition("@")[2]


@dataclass(frozen=True, kw_only=True)
class Remote:
    """How commands get to the other hosts."""

    ssh: tuple[str, ...]  # the program and the user's own options
    python: str  # the interpreter there
    environ: Mapping[str, str]  # of the launcher

    def command(self, host: Host, module: str) -> list[str]:
        """Argv that runs one of coremill's modules on a host, without a shell's word splitting in between."""
        argv = [self.python, "-m", module]
        if host.is_here:
            return argv
        if self.environ.get("PYTHONPATH"):  # where coremill itself is found in a checkout
            argv = ["env", f"PYTHONPATH={self.environ['PYTHONPATH']}", *argv]
        return [*self.ssh, *_SSH_OPTIONS, host.name, shlex.join(argv)]


def ssh_program(text: str) -> tuple[str, ...]:
    """The user's ssh command in words, checked to exist."""
    words = tuple(shlex.split(text))
    if not words or shutil.which(words[0]) is None:
        raise InputError(
            f"{words[0] if words else 'ssh'} is not installed here: other hosts cannot be started on; install"
            " openssh-client, name it with --ssh, or start by hand on each host (--nnodes, --node-rank, --master)"
        )
    return words


def is_this_host(name: str) -> bool:
    """Whether a host of the hostfile is the machine we run on: by name, or by one of its addresses."""
    address = name.rpartition("@")[2]
    if is_loopback(address) or address in (socket.gethostname(), socket.getfqdn()):
        return True
    own = {entry.address.partition("%")[0] for entries in psutil.net_if_addrs().values() for entry in entries}
    with contextlib.suppress(OSError):
        return any(found[4][0] in own for found in socket.getaddrinfo(address, None, type=socket.SOCK_STREAM))
    return False

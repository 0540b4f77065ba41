"""What torchrun and mpirun start in place of a script: gives the rank its cores, threads and environment, then runs it.

    python -m coremill.launch.rank_shim PROGRAM [ARGUMENT ...]             COREMILL_SHIM: what the launcher wants (JSON)

It looks at the host it is on, so hosts may differ. The mask it inherited is where it works: ranks of one host share it
by cores, and where the launcher has bound each rank already, that binding stays. The script's lines go on to whoever
started us, with the rank in front where asked, and into a file; if it fails, one line tells the launcher why.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import IO

from coremill.child import die_with_parent
from coremill.errors import KnownEnding, PeerLost, Stopped
from coremill.hardware.probe import affinity_mask, environment_snapshot, probe_node
from coremill.hardware.topology import parse_cpu_list
from coremill.launch.settings import (
    Allocator,
    asked_threads,
    choose_interface,
    find_openmp,
    find_torch_folder,
    script_settings,
    setting_lines,
    threads_warning,
)
from coremill.plan.layout import lay_out
from coremill.supervise.descendants import adopt_orphans, end_descendants
from coremill.supervise.output import Failure, Prefixer, Tail, write_lines
from coremill.supervise.process import exit_code_of, start_process
from coremill.supervise.rank_environment import Setting, cpus_for_rank
from coremill.world.identity import RankIdentity, identify
from coremill.world.lost_peers import is_follower
from coremill.world.stop import ForwardedSignals

SHIM = "COREMILL_SHIM"


@dataclass(frozen=True, kw_only=True)
class ShimOrder:
    """What the launcher wants of every rank."""

    threads: int | None = None  # None: by the cores of the rank
    user_threads: bool = False  # OMP_NUM_THREADS is the user's, and not torchrun's own 1
    allocator: Allocator = "auto"
    bind_threads: bool = False
    interface: str | None = None
    prefix: bool = False
    log_folder: str | None = None
    deepspeed: bool = False  # the script trains by it
    announce: bool = False  # the first rank of each host says what was set there, and why

    def to_json(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> ShimOrder:
        document = json.loads(text)
        return cls(**{field.name: document[field.name] for field in fields(cls) if field.name in document})


@dataclass(frozen=True, kw_only=True)
class ScriptStart:
    """How one rank starts: its environment and its cores."""

    environ: dict[str, str]
    cpus: frozenset[int] | None  # None: the mask stays as it is
    settings: tuple[Setting, ...]
    warning: str | None = None  # the user's threads are too many for this host

    def lines(self, where: str = "") -> list[str]:
        """What is set and why, for the screen."""
        return [*setting_lines(self.settings, where), *([f"coremill: {self.warning}"] if self.warning else [])]


def start_of_rank(
    identity: RankIdentity,
    environ: Mapping[str, str],
    order: ShimOrder,
    *,
    inherited: frozenset[int],
    is_bound: bool,
    may_pin: bool = True,
) -> ScriptStart:
    """Cores and environment of this rank on this host.

    `is_bound`: the launcher gave this rank a mask of its own. Without `may_pin` a shared mask is left alone too, and
    only the threads are counted.
    """
    environ = dict(environ)
    environ.pop(SHIM, None)
    if not order.user_threads or order.threads is not None:
        environ.pop("OMP_NUM_THREADS", None)  # torchrun's silent 1
    node = probe_node(mask=inherited, busy_seconds=0)
    ranks_in_mask = 1 if is_bound else identity.local_size
    layout = lay_out(node, ranks=ranks_in_mask, threads=order.threads, any_threads=True)
    own = lay_out(node, ranks=ranks_in_mask, threads=None).threads_per_rank.value
    warning = threads_warning(node, ranks_in_mask, asked_threads(order.threads, environ), own)
    master = None if identity.is_one_host else identity.master_address
    settings = script_settings(
        node,
        layout,
        environ,
        openmp=find_openmp(node, find_torch_folder(), environ),
        interface=choose_interface(order.interface, master, identity.size // identity.local_size),
        allocator=order.allocator,
        bind_threads=order.bind_threads,
        deepspeed=order.deepspeed,
    )
    environ.update({setting.variable: setting.value for setting in settings})
    environ.update(
        RANK=str(identity.rank),
        WORLD_SIZE=str(identity.size),
        LOCAL_RANK=str(identity.local_rank),
        LOCAL_WORLD_SIZE=str(identity.local_size),
        MASTER_ADDR=identity.master_address,
        MASTER_PORT=str(identity.master_port),
    )
    cpus = None if is_bound or not may_pin else cpus_for_rank(layout, identity.local_rank, inherited)
    return ScriptStart(environ=environ, cpus=cpus, settings=settings, warning=warning)


def is_bound_by_parent(inherited: frozenset[int]) -> bool:
    """Whether the launcher narrowed our mask: it is smaller than that of the process that started us."""
    try:
        status = Path(f"/proc/{os.getppid()}/status").read_text()
    except OSError:
        return False
    line = next((line for line in status.splitlines() if line.startswith("Cpus_allowed_list:")), "")
    return inherited < frozenset(parse_cpu_list(line.partition(":")[2]))


def run_rank(argv: list[str], start: ScriptStart, rank: int, order: ShimOrder) -> int:
    """Run the script as this rank; returns its exit code. Nothing it started is left."""
    adopt_orphans()
    process = start_process(argv, start.environ, cpus=start.cpus, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    signals = ForwardedSignals(process.send_signal)
    tail, errors = Tail(), Tail()
    with contextlib.ExitStack() as files:
        log = None
        if order.log_folder is not None:
            folder = Path(order.log_folder)
            folder.mkdir(parents=True, exist_ok=True)
            log = files.enter_context((folder / f"rank-{rank:05d}.log").open("wb", buffering=0))
        shown_rank = rank if order.prefix else None
        readers = [
            threading.Thread(target=_relay, args=(source, target, shown_rank, log, tails), daemon=True)
            for source, target, tails in (
                (process.stdout, sys.stdout, (tail,)),
                (process.stderr, sys.stderr, (tail, errors)),
            )
        ]
        for reader in readers:
            reader.start()
        code = process.wait()
        end_descendants(grace_seconds=0.5)  # they hold the rank's sockets, and its pipes
        for reader in readers:
            reader.join(timeout=5)
    exit_code = exit_code_of(code)
    if exit_code and (not signals.any_came or exit_code == Stopped.exit_code):
        text = errors.text() or tail.text()
        failure = Failure(
            rank=rank,
            host=socket.gethostname(),
            exit_code=exit_code,
            signal=-code if code < 0 else None,
            time=time.time(),
            follows=exit_code == PeerLost.exit_code or is_follower(text),
            tail=text,
        )
        sys.stderr.write(failure.to_line())
        sys.stderr.flush()
    return exit_code


def _relay(
    source: IO[bytes] | None, target: IO[str], rank: int | None, log: IO[bytes] | None, tails: Sequence[Tail]
) -> None:
    assert source is not None
    prefixer = Prefixer(rank)
    while chunk := os.read(source.fileno(), 65536):
        for tail in tails:
            tail.add(chunk)
        if log is not None:
            log.write(chunk)
        write_lines(target.fileno(), prefixer.feed(chunk))
    write_lines(target.fileno(), prefixer.rest())


def main() -> int:
    """Become the rank that the environment describes."""
    die_with_parent()
    environ = environment_snapshot()
    order = ShimOrder.from_json(environ.get(SHIM, "{}"))
    try:
        identity = identify(environ) or RankIdentity.alone()
        inherited = affinity_mask()
        start = start_of_rank(identity, environ, order, inherited=inherited, is_bound=is_bound_by_parent(inherited))
    except KnownEnding as error:
        print(f"coremill: {error}", file=sys.stderr)
        return error.exit_code
    if order.announce and identity.local_rank == 0:
        where = "" if identity.is_one_host else f"{socket.gethostname()}: "
        print("\n".join(start.lines(where)), file=sys.stderr, flush=True)
    return run_rank(sys.argv[1:], start, identity.rank, order)


if __name__ == "__main__":
    sys.exit(main())

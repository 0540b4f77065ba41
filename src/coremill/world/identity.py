"""Who am I among how many: what each launcher tells a process through its environment.

    launcher               variables read                                          gives
    coremill, torchrun     RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE             a rank
    Open MPI               OMPI_COMM_WORLD_RANK ..._SIZE ..._LOCAL_RANK ...        a rank
    MPICH, Intel MPI       PMI_RANK PMI_SIZE MPI_LOCALRANKID MPI_LOCALNRANKS       a rank
    Kubeflow               PET_NNODES PET_NPROC_PER_NODE PET_NODE_RANK ...         a node: ranks are still to be started
    none (plain python)    -                                                       nothing

The innermost launcher wins: torchrun started by mpirun makes ranks of its own. Everything here is a pure function of
the mapping it is given; `world/group.py` is where the process's own environment comes from.
"""

from __future__ import annotations

import ipaddress
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from coremill.errors import InputError

Launcher = Literal["coremill", "torchrun", "open-mpi", "hydra", "environment", "alone"]

LAUNCHER_PID = "COREMILL_LAUNCHER_PID"  # set for ranks that coremill's own launcher started
STORE_FD = "COREMILL_STORE_FD"  # rank 0 inherits the listening socket of the store under this number
HEAD = "COREMILL_HEAD"  # set for launchers that `train --hostfile` started: they report to it instead of to people
COMES_BACK = "again"  # its value where the run goes on: the head has started this host before, or other ones
INTERFACE = "COREMILL_INTERFACE"  # the device of `train --hostfile --interface`; ranks settle how often to name it
LOOPBACK = "127.0.0.1"
DEFAULT_PORT = 29500  # what torch takes where nothing is said
# Linux hands ports from 32768 on to outgoing connections: a derived port below that is not taken by chance.
DERIVED_PORTS = range(20000, 32768)


@dataclass(frozen=True, kw_only=True)
class RankIdentity:
    """One process of a run, as its launcher told it."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    node_rank: int | None  # None: the launcher does not say; ranks work it out when they meet
    master_address: str
    master_port: int  # 0: any free one (a world of one)
    launcher: Launcher
    agent_store: bool = False  # torchrun's agent already serves a store at the master address
    restarts: int = 0  # how often torchrun has started ranks anew, as far as this node knows
    store_fd: int | None = None  # rank 0 under coremill: the store's listening socket, bound by the launcher

    @property
    def is_one_host(self) -> bool:
        """Whether all ranks share this machine."""
        return self.size == self.local_size

    @classmethod
    def alone(cls) -> RankIdentity:
        """A process nobody launched, as a world of one."""
        return cls(
            rank=0, size=1, local_rank=0, local_size=1, node_rank=0,
            master_address=LOOPBACK, master_port=0, launcher="alone",
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class NodeIdentity:
    """One machine of several on which coremill has yet to start the ranks."""

    node_rank: int
    nodes: int
    ranks_per_node: int | None  # None: left to the plan
    master_address: str
    master_port: int


def identify(
    environ: Mapping[str, str], *, job_of_process: Callable[[], str | None] | None = None
) -> RankIdentity | None:
    """The rank that `environ` makes of this process; None where no launcher did, or where only a node is described.

    `job_of_process` names the job where the variables do not (MPICH and Intel MPI); it is asked only then.
    """
    mpi = _mpi(environ, job_of_process or hydra_job)
    if "LOCAL_RANK" in environ or ("RANK" in environ and not _describes_node(environ)):
        if mpi is not None and "RANK" not in environ:
            return _check(_agreeing(mpi, environ))
        return _check(_torch(environ, mpi))
    if mpi is not None:
        return _check(_agreeing(mpi, environ))
    if "WORLD_SIZE" in environ and not _describes_node(environ):
        raise _incomplete("WORLD_SIZE", "RANK")
    return None


def identify_node(environ: Mapping[str, str]) -> NodeIdentity | None:
    """The node that Kubeflow's variables describe, or None where there are none or this process is already a rank."""
    if not _describes_node(environ) or "LOCAL_RANK" in environ:
        return None
    nodes = _node_count(environ.get("PET_NNODES", "1"))
    per_node = environ.get("PET_NPROC_PER_NODE", "auto")
    ranks_per_node = None if per_node in ("auto", "cpu") else _integer(environ, "PET_NPROC_PER_NODE", minimum=1)
    if nodes > 1:
        for needed in ("PET_NODE_RANK", "PET_MASTER_ADDR"):
            if not environ.get(needed):
                raise _incomplete("PET_NNODES", needed)
    node_rank = _integer(environ, "PET_NODE_RANK", minimum=0, default=0)
    if node_rank >= nodes:
        raise _contradiction(environ, "PET_NODE_RANK", "PET_NNODES", "a node's number is below the number of nodes")
    return NodeIdentity(
        node_rank=node_rank,
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        master_address=environ.get("PET_MASTER_ADDR") or LOOPBACK,
        master_port=_integer(environ, "PET_MASTER_PORT", minimum=1, default=DEFAULT_PORT),
    )


def hydra_job() -> str | None:
    """A name for the MPICH or Intel MPI job on this host: the pid of the proxy all its local ranks descend from."""
    stat = Path("/proc/self/stat")
    while True:
        try:
            text = stat.read_text()
        except OSError:
            return None
        # The name is in brackets and may hold blanks: the parent's pid is the second field after the last bracket.
        name = text[text.index("(") + 1 : text.rindex(")")]
        pid, parent = text.split(" ", 1)[0], text[text.rindex(")") + 1 :].split()[1]
        if name.startswith("hydra_pmi_pro"):  # the kernel cuts names at 15 characters
            return f"hydra {pid}"
        if parent in ("0", "1"):
            return None
        stat = Path(f"/proc/{parent}/stat")


def port_of_job(job: str) -> int:
    return DERIVED_PORTS[zlib.crc32(job.encode()) % len(DERIVED_PORTS)]


def is_loopback(address: str) -> bool:
    """Whether an address is this machine's own by definition; names other than localhost are not looked up."""
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def _torch(environ: Mapping[str, str], mpi: RankIdentity | None) -> RankIdentity:
    """RANK and WORLD_SIZE, the form torchrun made common; coremill's own launcher sets the same."""
    rank = _integer(environ, "RANK", minimum=0)
    size = _integer(environ, "WORLD_SIZE", minimum=1)
    wraps_mpi = mpi is not None and (mpi.rank, mpi.size) == (rank, size)  # a wrapper script that copies MPI's variables
    master_address = environ.get("MASTER_ADDR") or (mpi.master_address if mpi else "")
    other_port = mpi.master_port if wraps_mpi and mpi is not None else 0 if size == 1 else DEFAULT_PORT
    if "LOCAL_RANK" in environ:
        local_rank = _integer(environ, "LOCAL_RANK", minimum=0)
        local_size = _integer(environ, "LOCAL_WORLD_SIZE", minimum=1)
    elif wraps_mpi and mpi is not None:
        local_rank, local_size = mpi.local_rank, mpi.local_size
    elif is_loopback(master_address):
        local_rank, local_size = rank, size
    else:  # the convention of job controllers that set RANK by pod: one rank per host
        local_rank, local_size = 0, 1
    if size == 1 and not master_address:
        master_address = LOOPBACK
    if not master_address:
        raise _incomplete("RANK", "MASTER_ADDR")
    ours = LAUNCHER_PID in environ
    store_fd = _integer(environ, STORE_FD, minimum=0) if ours and rank == 0 and STORE_FD in environ else None
    return RankIdentity(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        node_rank=_integer(environ, "GROUP_RANK", minimum=0) if "GROUP_RANK" in environ else None,
        master_address=master_address,
        master_port=_integer(environ, "MASTER_PORT", minimum=0, default=other_port),
        launcher="coremill" if ours else "torchrun" if "TORCHELASTIC_RUN_ID" in environ else "environment",
        agent_store=not ours and environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        restarts=0 if ours else _integer(environ, "TORCHELASTIC_RESTART_COUNT", minimum=0, default=0),
        store_fd=store_fd,
    )


def _mpi(environ: Mapping[str, str], job_of_process: Callable[[], str | None]) -> RankIdentity | None:
    """A rank of an MPI launcher, which names no master: derived on one host, asked for on several."""
    launcher: Launcher
    if "OMPI_COMM_WORLD_RANK" in environ:
        launcher = "open-mpi"
        rank_name, size_name = "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"
        local_rank_name, local_size_name = "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"
        job = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid")
    elif "PMI_RANK" in environ:
        launcher = "hydra"
        rank_name, size_name = "PMI_RANK", "PMI_SIZE"
        local_rank_name, local_size_name = "MPI_LOCALRANKID", "MPI_LOCALNRANKS"
        job = environ.get("PMI_JOBID")
    else:
        return None
    rank = _integer(environ, rank_name, minimum=0)
    size = _integer(environ, size_name, minimum=1)
    alone = size == 1
    local_rank = _integer(environ, local_rank_name, minimum=0, default=0 if alone else None)
    local_size = _integer(environ, local_size_name, minimum=1, default=1 if alone else None)
    master_address = environ.get("MASTER_ADDR")
    if not master_address:
        if local_size != size:
            raise InputError(
                f"{size} ranks run on several hosts and MASTER_ADDR is not set",
                where=f"{local_size_name}={local_size}, {size_name}={size}",
                why="ranks on other hosts need the address of the host that rank 0 runs on",
                do="add the host of rank 0: -x MASTER_ADDR=HOST (Open MPI), -genv MASTER_ADDR HOST (MPICH, Intel MPI)",
            )
        master_address = LOOPBACK
    if "MASTER_PORT" in environ:
        master_port = _integer(environ, "MASTER_PORT", minimum=0 if alone else 1)
    elif alone:
        master_port = 0
    else:
        if not job and launcher == "hydra" and local_size == size:  # a process has a name for the job on its own host
            job = job_of_process()
        master_port = DEFAULT_PORT if job is None else port_of_job(job)
    return RankIdentity(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        node_rank=0 if local_size == size else None,
        master_address=master_address,
        master_port=master_port,
        launcher=launcher,
    )


def _agreeing(mpi: RankIdentity, environ: Mapping[str, str]) -> RankIdentity:
    """An MPI rank, after a look at the torch variables the user may have exported beside it."""
    for name, value in (("WORLD_SIZE", mpi.size), ("LOCAL_RANK", mpi.local_rank), ("LOCAL_WORLD_SIZE", mpi.local_size)):
        if name in environ and _integer(environ, name, minimum=0) != value:
            raise InputError(
                f"{name}={environ[name]} contradicts the MPI launcher, which says {value}",
                where=f"environment of rank {mpi.rank}",
                do=f"unset {name}: it is taken from the launcher",
            )
    return mpi


def _check(identity: RankIdentity) -> RankIdentity:
    """Counts that cannot be true together are refused before anything waits for a rank that does not exist."""
    where = "environment of this process"
    if identity.rank >= identity.size:
        raise InputError(
            f"rank {identity.rank} in a world of {identity.size}",
            where=where,
            why="ranks count from 0 to the world size less 1",
        )
    if identity.local_rank >= identity.local_size:
        raise InputError(
            f"local rank {identity.local_rank} among {identity.local_size} local ranks",
            where=where,
            why="local ranks count from 0 to the number of local ranks less 1",
        )
    if identity.local_size > identity.size:
        raise InputError(
            f"{identity.local_size} local ranks in a world of {identity.size}",
            where=where,
            why="LOCAL_WORLD_SIZE cannot exceed WORLD_SIZE",
        )
    if identity.master_port > 65535:
        raise InputError(f"MASTER_PORT={identity.master_port} is not a port", where=where, do="set one from 1 to 65535")
    if identity.is_one_host and identity.node_rank is None:
        return replace(identity, node_rank=0)
    return identity


def _describes_node(environ: Mapping[str, str]) -> bool:
    return "PET_NNODES" in environ or "PET_NPROC_PER_NODE" in environ


def _node_count(text: str) -> int:
    """PET_NNODES is a number, or a range MIN:MAX for elastic runs."""
    low, _, high = text.partition(":")
    if not low.isdigit() or (high and not high.isdigit()) or int(low) < 1:
        raise InputError(f"PET_NNODES={text} is not a number of nodes", where="environment of this pod")
    if high and high != low:
        raise InputError(
            f"PET_NNODES={text} asks for a changing number of nodes",
            where="environment of this pod",
            why="the number of ranks is fixed when a run starts",
            do=f"set numNodes to one number, for example {high}",
        )
    return int(low)


def _integer(environ: Mapping[str, str], name: str, *, minimum: int, default: int | None = None) -> int:
    text = environ.get(name)
    if text is None or text == "":
        if default is None:
            raise InputError(
                f"{name} is not set, though other variables of the same launcher are",
                where="environment of this process",
                do=f"set {name}, or unset the others to start without a launcher",
            )
        return default
    try:
        value = int(text)
    except ValueError:
        value = minimum - 1
    if value < minimum:
        raise InputError(
            f"{name}={text} is not a whole number of at least {minimum}", where="environment of this process"
        )
    return value


def _incomplete(present: str, missing: str) -> InputError:
    return InputError(
        f"{present} is set and {missing} is not",
        where="environment of this process",
        why="together they say which rank this is",
        do=f"set {missing}, or unset {present} to let coremill start the ranks",
    )


def _contradiction(environ: Mapping[str, str], first: str, second: str, why: str) -> InputError:
    return InputError(
        f"{first}={environ[first]} and {second}={environ.get(second)} contradict each other",
        where="environment of this process",
        why=why,
    )

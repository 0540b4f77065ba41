"""mpirun as a starter of processes: Open MPI, and Hydra as MPICH and Intel MPI bring it.

Collectives stay on gloo, for stock PyTorch has no MPI backend. Each family has its own words for hosts and environment;
binding is switched off in both, because the shim gives cores by the real topology. Variables are named, not spelt out:
both families take the values from mpirun's own environment, and nothing secret stands on a command line.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from coremill.errors import InputError
from coremill.hosts.ssh import Host

Family = Literal["open-mpi", "hydra"]
_PROGRAMS = ("mpirun", "mpiexec", "mpiexec.hydra", "mpirun.openmpi", "mpirun.mpich")


@dataclass(frozen=True, kw_only=True)
class Mpirun:
    """An mpirun that is installed here."""

    program: str
    family: Family
    version: str  # its first line about itself


def find_mpirun(wanted: str | None) -> Mpirun:
    """The user's mpirun, or the first one on the path; asked what it is."""
    program = next((name for name in ((wanted,) if wanted else _PROGRAMS) if shutil.which(name)), None)
    if program is None:
        raise InputError(
            f"{wanted or 'mpirun'} is not installed here; install openmpi-bin or mpich, or start with --via torchrun"
        )
    try:
        done = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InputError(f"{program} --version does not answer: {error}") from error
    text = done.stdout + done.stderr
    first = next((line.strip() for line in text.splitlines() if line.strip()), "")
    if "Open MPI" in text or "OpenRTE" in text or "prte" in text.lower():
        return Mpirun(program=program, family="open-mpi", version=first)
    if "hydra" in text.lower() or "Intel(R) MPI" in text or "mpich" in text.lower():
        return Mpirun(program=program, family="hydra", version=first)
    raise InputError(f"{program} is neither Open MPI nor Hydra (MPICH, Intel MPI): it says {first!r}")


def hostfile_text(hosts: Sequence[Host], family: Family) -> str:
    form = "{} slots={}" if family == "open-mpi" else "{}:{}"
    return "".join(form.format(host.name, host.ranks) + "\n" for host in hosts)


def mpirun_command(
    mpirun: Mpirun,
    hosts: Sequence[Host],
    hostfile: Path | None,
    folder: Path,
    variables: Sequence[str],
    ssh: Sequence[str],
    interface: str | None,
    program: Sequence[str],
) -> list[str]:
    """Argv for the one mpirun that starts all ranks; without a hostfile, all on this machine."""
    ranks = sum(host.ranks for host in hosts)
    if mpirun.family == "open-mpi":
        return [
            mpirun.program,
            *(["--allow-run-as-root"] if os.geteuid() == 0 else []),
            *(["--hostfile", str(hostfile)] if hostfile else ["--oversubscribe"]),
            *(["--mca", "plm_rsh_agent", shlex.join(ssh)] if hostfile and tuple(ssh) != ("ssh",) else []),
            *(["--mca", "oob_tcp_if_include", interface] if hostfile and interface else []),
            "-np", str(ranks),
            "--map-by", "slot",
            "--bind-to", "none",
            "--wdir", str(folder),
            *(word for name in variables for word in ("-x", name)),
            *program,
        ]  # fmt: skip
    return [
        mpirun.program,
        # Intel MPI reads counts from a machine file only; to MPICH it is the same as -f.
        *(["-machinefile", str(hostfile)] if hostfile else []),
        *(["-iface", interface] if hostfile and interface else []),
        "-n", str(ranks),
        "-wdir", str(folder),
        "-genvlist", ",".join(variables),
        *program,
    ]  # fmt: skip


def mpirun_environment(
    mpirun: Mpirun, hosts: Sequence[Host], ssh: Sequence[str], environ: Mapping[str, str]
) -> dict[str, str]:
    """What mpirun itself is told through its environment, besides what ranks get."""
    if mpirun.family == "open-mpi":
        return {}
    # Intel MPI pins to logical cores by itself, and takes these names; MPICH takes the others.
    told = {"I_MPI_PIN": "0"}
    if not all(host.is_here for host in hosts) and tuple(ssh) != ("ssh",):
        program, extra = shutil.which(ssh[0]) or ssh[0], " ".join(ssh[1:])
        told |= {"HYDRA_LAUNCHER": "ssh", "HYDRA_LAUNCHER_EXEC": program, "HYDRA_LAUNCHER_EXTRA_ARGS": extra}
        told |= {"I_MPI_HYDRA_BOOTSTRAP_EXEC": program, "I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS": extra}
    return {name: value for name, value in told.items() if name not in environ}

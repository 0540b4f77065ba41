"""`coremill launch --accelerate FILE`: what `accelerate launch` takes from its file, as options and variables of ours.

Options of the command line go over the file, and what is set in the environment stays, as it does under accelerate.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from coremill.config.foreign import find_foreign
from coremill.config.imports.accelerate_file import AccelerateFile, read_accelerate_file
from coremill.errors import InputError
from coremill.launch.request import Request

_OF_CPUS = ("NO", "MULTI_CPU")
# What would make another training of it: said where it is in the file, with the reason the table has.
_NOT_TAKEN = (
    "deepspeed_config",
    "fsdp_config",
    "megatron_lm_config",
    "parallelism_config",
    "fp8_config",
    "ipex_config",
)


@dataclass(frozen=True)
class TakenFromFile:
    """The request and the environment with what the file adds, and what is to be said of it."""

    request: Request
    environ: Mapping[str, str]
    notes: tuple[str, ...]


def with_accelerate_file(request: Request, path: Path, environ: Mapping[str, str], *, is_rank: bool) -> TakenFromFile:
    """`is_rank`: somebody else's launcher has started us, and has settled how many there are and where."""
    path = Path(os.path.expanduser(path))
    if not os.path.exists(path):
        do = "name the file that accelerate config wrote (~/.cache/huggingface/accelerate/default_config.yaml)"
        raise InputError(f"there is no file {path}", where=f"--accelerate {path}", do=do)
    file = read_accelerate_file(path)
    changes = {} if is_rank else _places(request, file)
    variables = {name: value for name, value in _variables(file).items() if name not in environ}
    taken = [*_as_options(changes), *(f"{name}={value}" for name, value in variables.items())]
    notes = [f"{path}: {', '.join(taken)}"] if taken else [f"{path}: nothing in it that is not settled already"]
    return TakenFromFile(replace(request, **changes), {**environ, **variables}, (*notes, *_not_taken(file)))


def _places(request: Request, file: AccelerateFile) -> dict[str, Any]:
    """How many ranks, on which hosts; only what the command line leaves open."""
    wanted: dict[str, Any] = {}
    hostfile = request.hostfile or (Path(os.path.expanduser(file.hostfile)) if file.hostfile else None)
    by_command_line = request.hostfile is not None or request.nnodes is not None
    if hostfile is not None and file.machines > 1 or request.hostfile is not None:
        wanted |= {"hostfile": hostfile, "ppn": file.processes_per_machine}
        wanted |= {} if by_command_line else {"nnodes": file.machines}
    elif file.machines > 1 and request.nnodes != 1:
        wanted |= {"nnodes": file.machines, "node_rank": file.machine_rank, "nproc": file.processes_per_machine}
        if file.main_address is not None:
            port = "" if file.main_port is None else f":{file.main_port}"
            address = f"[{file.main_address}]" if port and ":" in file.main_address else file.main_address
            wanted["master"] = f"{address}{port}"
    else:
        wanted["nproc"] = file.processes
    if request.ppn is not None or request.nproc is not None:
        wanted = {name: value for name, value in wanted.items() if name not in ("ppn", "nproc")}
    return {name: value for name, value in wanted.items() if value is not None and getattr(request, name) is None}


def _variables(file: AccelerateFile) -> dict[str, str]:
    """What accelerate's launcher tells the script's `Accelerator()`."""
    found = {} if file.mixed_precision is None else {"ACCELERATE_MIXED_PRECISION": file.mixed_precision}
    for name, value in file.dynamo.items():
        text = value.upper() if name == "dynamo_backend" else value
        found[f"ACCELERATE_{name.upper()}"] = text
    return {**found, "ACCELERATE_DEBUG_MODE": "true"} if file.values.get("debug") is True else found


def _as_options(changes: Mapping[str, Any]) -> list[str]:
    return [f"--{name.replace('_', '-')} {shlex.quote(str(value))}" for name, value in changes.items()]


def _not_taken(file: AccelerateFile) -> list[str]:
    notes = []
    place = str(file.values.get("compute_environment", "LOCAL_MACHINE")).upper()
    if place != "LOCAL_MACHINE":
        notes.append(f"compute_environment: {place}: ranks are started from this machine, not there")
    if file.hostfile is not None and file.machines == 1:
        notes.append(f"{file.hostfile}: not read; num_machines is 1, so all ranks are on this machine (--hostfile)")
    kind = str(file.values.get("distributed_type", "NO")).upper().removeprefix("DISTRIBUTEDTYPE.")
    if kind not in _OF_CPUS:
        notes.append(f"distributed_type: {kind}: ranks compute on CPUs here, each with the whole script")
    for section in _NOT_TAKEN:
        if file.values.get(section) not in (None, "", {}):
            row = find_foreign((section,))
            why = row.why if row is not None and row.why else "it is for other machines or engines"
            notes.append(f"{section}: not handed on; {why}")
    if file.mixed_precision in ("fp16", "fp8"):
        why = "scripts want a GPU for it; on CPUs it is bf16, where they have units for it"
        notes.append(f"mixed_precision: {file.mixed_precision}: {why}")
    return notes

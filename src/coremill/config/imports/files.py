"""`coremill config import FILE`: which tool wrote a file, and what becomes of its settings."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from coremill.config.foreign import find_foreign
from coremill.config.imports.accelerate_file import AccelerateFile, as_accelerate
from coremill.config.imports.fates import Brought, by_name, fate_of, settings_in
from coremill.config.imports.run_file import Composed, compose
from coremill.config.imports.settings_file import SettingsFile, read_settings_file
from coremill.config.keys import keys, sections
from coremill.config.unknown_keys import plain_name
from coremill.errors import InputError

TOOLS = {
    "accelerate": "accelerate's file",
    "trainer": "TrainingArguments",
    "deepspeed": "DeepSpeed's settings",
    "axolotl": "Axolotl's file",
    "llama-factory": "LLaMA-Factory's file",
    "trl": "TRL's arguments",
    "peft": "peft's adapter config",
}
# What is left out of a file means something else there than here.
DEFAULTS = {"axolotl": {"lr_scheduler": "cosine"}}
# Files that are often beside those, by keys that tell them.
_OTHERS = (
    (("architectures", "model_type"), "a model's config", "name its folder as the model: --set model=FOLDER"),
    (("log_history", "global_step"), "the Trainer's state", "import that run's TrainingArguments instead"),
    (("added_tokens", "normalizer", "model"), "a tokenizer", "name its folder: --set tokenizer=FOLDER"),
)  # fmt: skip


@dataclass(frozen=True)
class ImportedFile:
    """A file of another tool, and the run file that it makes."""

    tool: str
    composed: Composed
    notes: tuple[str, ...]
    accelerate: AccelerateFile | None = None


def import_settings(file: SettingsFile) -> ImportedFile:
    """Every setting of the file with its fate; InputError where it is none that can be imported."""
    accelerate = as_accelerate(file)
    tool = "accelerate" if accelerate is not None else tool_of(file)
    brought = list(settings_in(file.values if accelerate is None else accelerate.values, tool))
    of_deepspeed, notes = settings_of_deepspeed(brought, file.path.parent)
    brought += of_deepspeed
    given = by_name(brought)
    unsaid = {name: value for name, value in DEFAULTS.get(tool, {}).items() if given.get(name) is None}
    brought += [Brought(f"default of {TOOLS[tool]}, {name}", (name,), value, tool) for name, value in unsaid.items()]
    if accelerate is not None:
        if accelerate.mended:
            which = " and ".join(accelerate.mended)
            notes.append(f"The file had lost its indentation: keys were put back into {which}.")
        notes += _on_several_hosts(accelerate)
    fates = [fate_of(each, given) for each in brought]
    if accelerate is not None and accelerate.hostfile:
        command = f"--hostfile {accelerate.hostfile}"
        hosts = [each.brought.path[-1] in ("mpirun_hostfile", "deepspeed_hostfile") for each in fates]
        fates = [
            replace(each, kind="mapped", command=command) if named else each
            for each, named in zip(fates, hosts, strict=True)
        ]
    composed = compose(fates)
    return ImportedFile(tool, composed, tuple(notes), accelerate)


def settings_of_deepspeed(brought: Sequence[Brought], beside: Path | None = None) -> tuple[list[Brought], list[str]]:
    """Of the file that `--deepspeed ds.json` or `deepspeed_config_file` names; where it is not here, a note on it."""
    for each in brought:
        if each.path[-1] in ("deepspeed", "deepspeed_config_file") and isinstance(each.value, str) and each.value:
            path = named_file(each.value, beside)
            if path is None:
                return [], [f"{each.value} is not here: run `coremill config import {each.value}` where it is."]
            return list(settings_in(read_settings_file(path).values, "deepspeed")), []
    return [], []


def tool_of(file: SettingsFile) -> str:
    """The tool most of whose names are in the file."""
    names = [plain_name(name) for name in file.values]
    for telling, kind, do in _OTHERS:
        if all(name in names for name in telling):
            raise InputError(f"{file.path} is {kind}, not settings of a training", where=str(file.path), do=do)
    ours = [name for name in names if name in sections() or name in keys()]
    if len(ours) == len(names) and not any(_is_theirs(name, file.values) for name in file.values):
        do = f"use it as it is: coremill train {file.path}"
        raise InputError(f"{file.path} is a run file of coremill already", where=str(file.path), do=do)
    votes: dict[str, int] = {}
    for name, value in zip(names, file.values.values(), strict=True):
        row = find_foreign((name,)) or find_foreign((name, "*"))
        for tool in row.tools if row is not None else ():
            of_sections = tool == "deepspeed" and isinstance(value, Mapping)  # hardly another tool's settings have some
            votes[tool] = votes.get(tool, 0) + (2 if of_sections else 1)
    known = {tool: votes[tool] for tool in TOOLS if tool in votes and tool != "accelerate"}  # which writes more
    if not known:
        why = f"none of its names ({', '.join(names[:6])}) is one of accelerate, DeepSpeed, transformers or Axolotl"
        raise InputError(f"{file.path} has no settings that are known here", where=str(file.path), why=why,
                         do="name another file; `coremill config schema` has all keys of a run file")  # fmt: skip
    return max(known, key=lambda tool: known[tool])


def _is_theirs(name: str, values: Mapping[str, Any]) -> bool:
    """`optimizer: {type: AdamW}`, `compile: {...}`: a section where we have a single value, or none."""
    return isinstance(values[name], Mapping) and plain_name(name) not in sections()


def _on_several_hosts(file: AccelerateFile) -> list[str]:
    hostfile, ranks = file.hostfile, file.processes_per_machine
    launch = f"coremill launch --accelerate {file.path} SCRIPT"
    if file.machines == 1 and hostfile is None:
        return ["A script as it is, started as accelerate launch would with this file:", f"  {launch}"]
    ppn = f" --ppn {ranks}" if ranks else ""
    train = f"coremill train run.yaml --hostfile {hostfile or 'HOSTFILE'}{ppn}"
    return ["On all hosts, one a line in the hostfile:", f"  {train}", "A script as it is:", f"  {launch}"]


def named_file(path: str, beside: Path | None = None) -> Path | None:
    """A file that a command line names, where it is here."""
    for folder in (Path(), beside):
        named = None if folder is None else folder / os.path.expanduser(path)
        if named is not None and os.path.isfile(named):
            return named
    return None

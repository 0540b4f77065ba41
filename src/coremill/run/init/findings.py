"""What lies in the current folder and could be meant: a model, data, a hostfile. Names and first rows, nothing more."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from coremill.config.schema import BUILT_IN
from coremill.data.file_kinds import find_files, kind_of_name, whole_suffix
from coremill.data.recognised import first_columns
from coremill.data.sources import TextSource
from coremill.errors import InputError
from coremill.hardware.facts import NodeFacts
from coremill.hardware.hostfile import read_hostfile
from coremill.nearby import nearest
from coremill.plan.types import Choice
from coremill.report.terminal import format_bytes

_ENTRIES_READ = 400  # of a folder: someone's home may have any number
_HOSTFILES = ("hostfile", "hosts", "hostfile.txt", "hosts.txt", "machinefile")
_NOT_DATA = ("requirements", "readme", "license", "licence", "notes", "todo", "constraints")  # .txt of other purposes
_LIKELY_TEXT = ("content", "body", "article", "document", "passage", "sentence", "abstract", "code", "story")
_LIKELY_LABEL = (
    "class",
    "category",
    "target",
    "sentiment",
    "intent",
    "topic",
    "rating",
    "score",
    "stars",
    "gold_label",
)
_NOT_HERE = "nothing like it is in this folder; the built-in example needs no download"


@dataclass(frozen=True)
class Findings:
    """What there is to suggest, each with its reason; None: nothing."""

    model: Choice[str]
    data: Choice[str]
    hosts: Choice[int] | None
    hostfile: str | None
    machine: tuple[str, ...]  # in words


def look_around(node: NodeFacts) -> Findings:
    """Of the current folder and the folders in it; hidden ones are left alone."""
    here = Path()
    folders = [entry for entry in _entries(here) if entry.is_dir()]
    hostfile, hosts = _hosts(here)
    return Findings(
        model=_model(folders) or Choice(BUILT_IN, _NOT_HERE),
        data=_data([here, *folders]) or Choice(BUILT_IN, _NOT_HERE),
        hosts=hosts,
        hostfile=hostfile,
        machine=_machine_in_words(node),
    )


def columns_of(source: str) -> list[str]:
    """The columns of files that a source names; none of plain text, of the hub, and where it cannot be told."""
    if source == BUILT_IN or "://" in source:
        return []
    with contextlib.suppress(InputError, OSError):
        kind, files = find_files(source, "data.source")
        found = TextSource(name=source, setting="data.source", kind=kind, column="", files=files)
        return [] if kind == "txt" else first_columns(found)
    return []


def likely_column(usual: str, columns: list[str]) -> str:
    """Which of them is meant where the usual one is missing."""
    near = nearest(usual, columns)
    if usual == "label":
        return near or next((name for name in _LIKELY_LABEL if name in columns), columns[-1])
    return near or next((name for name in _LIKELY_TEXT if name in columns), columns[0])


def _entries(folder: Path) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in islice(entries, _ENTRIES_READ) if not entry.name.startswith(".")]
    except OSError:
        return []
    return [folder / name for name in sorted(names)]


def _model(folders: list[Path]) -> Choice[str] | None:
    """A folder with the config.json of a model; an export of an earlier run is none that anyone would mean."""
    for folder in folders:
        with contextlib.suppress(OSError, ValueError):
            config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
            if isinstance(config, dict) and isinstance(config.get("model_type"), str):
                return Choice(str(folder), f"found here: a model of type {config['model_type']}")
    return None


def _data(folders: list[Path]) -> Choice[str] | None:
    """The kind of file with most bytes in one folder: its files by a pattern, one by its name."""
    found: list[tuple[int, str, list[Path]]] = []
    for folder in folders:
        if (folder / "config.json").is_file():  # a model's: tokenizer.json and the like
            continue
        by_suffix: dict[str, list[Path]] = {}
        for path in _entries(folder):
            kind = kind_of_name(path.name)
            is_other = kind in ("txt", "json") and (folder == Path() or path.name.lower().startswith(_NOT_DATA))
            if kind is not None and not is_other and path.is_file():
                by_suffix.setdefault(whole_suffix(path.name), []).append(path)
        for suffix, paths in by_suffix.items():
            found.append((sum(path.stat().st_size for path in paths), suffix, paths))
    if not found:
        return None
    size, suffix, paths = max(found, key=lambda each: each[0])
    name = str(paths[0]) if len(paths) == 1 else str(paths[0].parent / f"*{suffix}")
    count = "1 file" if len(paths) == 1 else f"{len(paths)} files"
    return Choice(name, f"found here: {count}, {format_bytes(size)}")


def _hosts(here: Path) -> tuple[str | None, Choice[int] | None]:
    for name in _HOSTFILES:
        if (here / name).is_file():
            with contextlib.suppress(InputError):
                count = len(read_hostfile(here / name))
                if count:
                    return name, Choice(count, f"the file {name} here names {count}")
    return None, None


def _machine_in_words(node: NodeFacts) -> tuple[str, ...]:
    cores = f"{node.usable_cores} core{'' if node.usable_cores == 1 else 's'}"
    numa = "" if len(node.numa_nodes) == 1 else f" on {len(node.numa_nodes)} NUMA nodes"
    bf16 = "bf16 in hardware" if node.has_bf16_units else "no bf16 units, so fp32"
    return (
        f"{cores}{numa} ({node.cpu_model}), {format_bytes(node.memory_bytes)} of memory, {bf16}",
        "how many ranks share them depends on the model: `coremill plan` says it",
    )

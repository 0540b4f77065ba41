"""What two runs of the same settings may not differ in, read from the folders they left; and where they do.

Times, memory and paths differ between any two runs; everything else here is compared to the bit.
"""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

# The fields of an event that hold what was computed, not how long it took or where.
COMPUTED_FIELDS = {
    "step": ("step", "loss", "learning_rate", "gradient_norm", "tokens", "padding_tokens", "skipped", "wire_bytes"),
    "evaluation": ("step", "loss", "perplexity", "tokens"),
    "choice": ("name", "value"),
    "resume": ("step", "checkpoint", "world_size"),
    "sample": ("prompt", "completion"),
}

OTHER_KEYS = "**"

# Values of choices that have another name since the first release: fused layers.
RENAMED_VALUES = {"lean": "fused"}

Values = dict[str, str]  # what is compared, by a name to show


def read_events(run: Path) -> dict[str, list[dict[str, Any]]]:
    """The events of every rank, in order, by file name."""
    files = sorted((run / "events").glob("rank-*.jsonl"))
    return {file.stem: [json.loads(line) for line in file.read_text().splitlines()] for file in files}


def computed(run: Path, kind: str) -> Values:
    """All ranks' events of this kind, each number with all its digits."""
    return {
        f"{rank} {kind} {position} {name}": repr(_today(event.get(name)))
        for rank, events in read_events(run).items()
        for position, event in enumerate(event for event in events if event["kind"] == kind)
        for name in COMPUTED_FIELDS[kind]
    }


def _today(value: Any) -> Any:
    return RENAMED_VALUES.get(value, value) if isinstance(value, str) else value


def files_of(folder: Path) -> Values:
    """Every file with the digest of its bytes."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {file.relative_to(folder).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def checkpoint_files(folder: Path, new_keys: Iterable[str]) -> Values:
    """The same, but the keys of JSON files: they hold times and paths, and the run file, which may have new keys."""
    found = files_of(folder)
    for name in found:
        if name.endswith(".json"):
            paths = key_paths(json.loads((folder / name).read_text()))
            found[name] = " ".join(sorted(path for path in paths if not f".{path}".endswith(suffixes(new_keys))))
    return found


def suffixes(keys: Iterable[str]) -> tuple[str, ...]:
    """How a path ends that leads to one of the keys."""
    return tuple(f".{key}" for key in keys)


def key_paths(document: Any, prefix: str = "") -> set[str]:
    """Each key of nested JSON with those above it, `a.b[].c`; what is not a key has no name."""
    if isinstance(document, Mapping):
        paths = {f"{prefix}.{key}".lstrip("."): value for key, value in document.items()}
        return set(paths).union(*(key_paths(value, path) for path, value in paths.items()))
    if isinstance(document, list):
        return set().union(*(key_paths(item, f"{prefix}[]") for item in document))
    return set()


def leaves(document: Any, prefix: str = "") -> Values:
    """Each value of nested JSON by its path; what holds nothing is a value too."""
    if isinstance(document, Mapping) and document:
        items: Iterable[tuple[str, Any]] = ((f"{prefix}.{key}".lstrip("."), value) for key, value in document.items())
    elif isinstance(document, list) and document:
        items = ((f"{prefix}[{position}]", value) for position, value in enumerate(document))
    else:
        return {prefix: json.dumps(document)}
    return {name: value for path, item in items for name, value in leaves(item, path).items()}


def event_keys(runs: Iterable[Path]) -> Values:
    """Each kind of event and each of its keys that any of the runs has written."""
    return {
        f"{event['kind']}: {path}": ""
        for run in runs
        for events in read_events(run).values()
        for event in events
        for path in key_paths(event)
    }


def written_kinds(package: Path) -> dict[str, set[str]]:
    """Each kind of event that the source writes, also where no run here gets to it, with the keys that are spelled out.

    Keys that come from elsewhere (`**fields`) are one key, OTHER_KEYS.
    """
    found: dict[str, set[str]] = {}
    for file in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            match node:
                case ast.Call(func=ast.Attribute(attr="write"), args=[ast.Constant(value=str(kind)), *_]):
                    found.setdefault(kind, set()).update(word.arg or OTHER_KEYS for word in node.keywords)
    return found


def written_differences(before: dict[str, set[str]], after: dict[str, set[str]]) -> list[str]:
    """Kinds that are gone or new; their keys where both sides spell out all of them."""
    known = {kind for kind in before.keys() & after.keys() if OTHER_KEYS not in before[kind] | after[kind]}
    sides = [
        {kind: " ".join(sorted(keys)) if kind in known else "" for kind, keys in side.items()}
        for side in (before, after)
    ]
    return differences(*sides)


def report_keys(runs: Iterable[Path]) -> Values:
    """Each key that any of the runs' report.json has."""
    return {path: "" for run in runs for path in key_paths(json.loads((run / "report.json").read_text()))}


def differences(before: Values, after: Values) -> list[str]:
    """What is not the same on both sides, in the order of `before`; empty where all is."""
    found = [f"{name}: gone" for name in before if name not in after]
    found += [
        f"{name}: {before[name]} -> {after[name]}" for name in before if after.get(name, before[name]) != before[name]
    ]
    return found + [f"{name}: new" for name in after if name not in before]

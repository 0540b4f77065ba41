"""What has to be the same on every host before a run starts, and in words what is not.

Every host resolves the run file, the model and the data for itself. Each writes down what it found as facts; after the
meeting they are compared (run/orders.py), and hosts that differ train nothing. Pure but for reading files; no torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coremill.errors import InputError
from coremill.hosts.host_report import public_version, versions

# Only these say what is computed; two hosts with other Pythons get the same numbers from the same files.
CHANGE_NUMBERS = ("coremill", "torch", "transformers", "tokenizers")
# Where things lie on a host, how many cores it has and who would take it away: what is found there is compared instead,
# and the launchers count the ranks.
MAY_DIFFER = frozenset({
    "model.name", "tokenizer", "data.source", "data.sources", "data.evaluation_source",
    "lora.start_from", "run.folder", "checkpoint.folder", "checkpoint.spot_notices", "parallel.ranks_per_node",
    "parallel.threads_per_rank", "run.metrics_port", "run.metrics_host",
})  # fmt: skip
# Of large files: 256 reads, a second or two from a cold disk. A trained model differs from another one everywhere.
SAMPLED_BYTES = 16 * 2**20
BLOCK_BYTES = 2**16
MOST_SHOWN = 8
LONGEST_VALUE = 160


@dataclass(frozen=True)
class Fact:
    """One thing a host found."""

    value: str  # in words; compared
    note: str = ""  # only shown: where it was found


Facts = Mapping[str, Fact]  # by name


def facts_of_versions() -> dict[str, Fact]:
    installed = versions()
    return {name: Fact(public_version(installed[name])) for name in CHANGE_NUMBERS}


def facts_of_settings(config: Mapping[str, Any]) -> dict[str, Fact]:
    """Of the resolved run file, as plain JSON, by dotted key."""
    return {key: Fact(value) for key, value in _flat(config) if key not in MAY_DIFFER}


def facts_to_json(facts: Facts) -> dict[str, list[str]]:
    return {name: [fact.value, fact.note] for name, fact in facts.items()}


def facts_from_json(document: Mapping[str, Sequence[str]]) -> dict[str, Fact]:
    return {name: Fact(*parts) for name, parts in document.items()}


def digest_of_files(files: Sequence[Path]) -> str:
    """Of their names, sizes and content; of files that are large together, of blocks spread evenly over each."""
    digest = hashlib.blake2b(digest_size=6)
    share = max(2 * BLOCK_BYTES, SAMPLED_BYTES // max(1, len(files)))
    for file in files:
        with file.open("rb", buffering=0) as stream:
            size = file.stat().st_size
            digest.update(f"{file.name} {size} ".encode())
            blocks = -(-min(size, share) // BLOCK_BYTES)
            for index in range(blocks):
                stream.seek(index * BLOCK_BYTES if size <= share else index * (size - BLOCK_BYTES) // (blocks - 1))
                digest.update(stream.read(BLOCK_BYTES))
    return digest.hexdigest()


def disagreement(told: Mapping[str, Facts]) -> InputError | None:
    """What the hosts, each with its facts, do not agree on; None: they do. The same words whoever asks."""
    hosts = list(told)
    lines, odd_hosts = {}, set()
    for name in dict.fromkeys(name for facts in told.values() for name in facts):
        found = {host: told[host].get(name, Fact("nothing")) for host in hosts}
        by_value: dict[str, list[str]] = {}
        for host in hosts:
            by_value.setdefault(found[host].value, []).append(host)
        if len(by_value) == 1:
            continue
        usual = max(by_value.values(), key=len)  # of equally many the first host's
        odd_hosts |= {host for host in hosts if host not in usual}
        lines[name] = "; ".join(
            f"{_short(value)} on {_listed(those)}{found[those[0]].note and f' ({found[those[0]].note})'}"
            for value, those in by_value.items()
        )
    if not lines:
        return None
    odd = [host for host in hosts if host in odd_hosts]
    others = [host for host in hosts if host not in odd_hosts]
    who = f"{_listed(odd)} and {_listed(others)} differ" if others else f"{_listed(hosts)} differ"
    shown = [f"{name}: {line}" for name, line in lines.items()][:MOST_SHOWN]
    more = [f"and {len(lines) - MOST_SHOWN} more"] if len(lines) > MOST_SHOWN else []
    return InputError(
        "\n  ".join([f"{who} in {_listed(list(lines)[:MOST_SHOWN])}", *shown, *more]),
        why="every host goes by its own run file, files and versions: they would not train one model in one way",
        do="give all hosts the same run file, model, data and versions, and start again",
    )


def _flat(value: Any, path: str = "") -> Iterable[tuple[str, str]]:
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _flat(inner, f"{path}.{key}" if path else str(key))
    else:
        yield path, json.dumps(value)


def _short(value: str) -> str:
    return value if len(value) <= LONGEST_VALUE else f"{value[:LONGEST_VALUE]}..."


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"

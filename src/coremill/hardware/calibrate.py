"""How fast this machine is: measured once in child processes, then read from a cache.

The plan, the dtype and the `utilization` in the report rest on these numbers. They are kept by what they depend on
(CPU, instruction sets, usable cores, torch); a measurement taken while others used the machine is marked, and made
again after an hour. This module imports no torch: `cached_calibration` answers in a millisecond.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from coremill.errors import CoremillError, StorageError
from coremill.files import CACHE_ADVICE, locked, write_atomically
from coremill.hardware.calibrate_child import COPY_BYTES
from coremill.hardware.calibrate_part import STUCK_SECONDS, Part, run_part, side_by_side
from coremill.hardware.cores import rank_counts, split_cores, usable_cores
from coremill.hardware.facts import Calibration, NodeFacts, Observation, SplitRates

# Raise it when what is measured changes: older caches are then not read.
CALIBRATION_VERSION = 6

BUSY_FRACTION = 0.15  # from here on a measurement is marked as disturbed: more than one core in seven was not ours
BUSY_EXPIRES_SECONDS = 3600.0

# What finished runs taught: enough for a median by engine and dtype; older ones go, for the code has moved on since.
MOST_OBSERVATIONS = 20

# Processes of all ways to split the cores, which live at once; each holds at most so much of its own.
MOST_PROCESSES = 128
PROCESS_BYTES = 300 * 2**20
# Where less is free, others have it for now.
MEMORY_USUALLY_FREE = 0.75

Say = Callable[[str], None]
Runner = Callable[[Part], Mapping[str, Any]]  # runs one part and returns what it measured; replaced in tests


def calibration_of(
    node: NodeFacts,
    cache_folder: Path,
    *,
    progress: Say | None = None,
    refresh: bool = False,
    runner: Runner | None = None,
    clock: Callable[[], float] = time.time,
) -> Calibration:
    """The rates of this machine, from the cache or measured now (some 40 s, said through `progress` beforehand)."""
    say = progress or (lambda _: None)
    entry = None if refresh else _read_entry(node, cache_folder)
    if entry is not None and not _is_stale(entry, node, clock()):
        return entry.calibration
    with _one_at_a_time(_file_of(node, cache_folder), say):
        entry = None if refresh else _read_entry(node, cache_folder)  # another process may have measured meanwhile
        if entry is not None and not _is_stale(entry, node, clock()):
            return entry.calibration
        say(
            "measuring this machine (once, about 40 s): matrix products, copy bandwidth, memory of a bare rank, how a"
            " step scales with threads"
        )
        try:
            calibration = measure(node, runner or run_part)
        except CoremillError as error:
            if entry is None:
                raise
            say(f"measuring failed ({error.what}); the earlier measurement is used")
            return entry.calibration
        _write_entry(node, cache_folder, calibration, clock(), say)
    return replace(calibration, learned=_read_observations(_learned_file(node, cache_folder)))


def cached_calibration(node: NodeFacts, cache_folder: Path) -> Calibration | None:
    """What was measured earlier, or None; starts nothing. A disturbed measurement is better than none."""
    entry = _read_entry(node, cache_folder)
    return entry.calibration if entry is not None else None


def remember(node: NodeFacts, cache_folder: Path, observation: Observation) -> Path:
    """Keep what a run taught about this machine beside its calibration; one that is learned again replaces itself."""
    file = _learned_file(node, cache_folder)
    earlier = [one for one in _read_observations(file) if one.run != observation.run]
    documents = [asdict(one) for one in (*earlier, observation)[-MOST_OBSERVATIONS:]]
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, json.dumps(documents, indent=1))
    except OSError as error:
        what = f"what was learned cannot be kept: {error.strerror or error}"
        raise StorageError(what, where=str(file), do=CACHE_ADVICE) from error
    return file


def torch_version() -> str:
    """The installed torch, without importing it."""
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        raise CoremillError(
            "torch is not installed", why="coremill computes with torch", do="pip install torch, then run this again"
        ) from None


def measure(node: NodeFacts, runner: Runner) -> Calibration:
    """Runs all parts. NUMA nodes are measured side by side and added up: a rank does not reach across them either."""
    rate_parts = [_rate_part(node, numa, threads) for numa, threads in sorted(_threads_by_numa_node(node).items())]
    with side_by_side(len(rate_parts)) as pool:
        rates = list(pool.map(runner, rate_parts))
    everywhere = rate_parts[0]
    with side_by_side(1) as pool:  # neither minds the other: one looks for an order of magnitude, one at memory
        base_part = pool.submit(runner, Part(name="base-memory", cpus=everywhere.cpus, threads=everywhere.threads))
        emulated = None
        if not node.has_bf16_units:
            part = Part(name="emulated-bf16", cpus=everywhere.cpus, threads=everywhere.threads)
            emulated = float(runner(part)["bf16_emulated_flops_per_second"])
        base = base_part.result()
    threads = sum(part.threads for part in rate_parts)
    bf16 = _sum(rates, "bf16_matmul_flops_per_second") if node.has_bf16_units else None
    fp32 = _sum(rates, "fp32_matmul_flops_per_second")
    splits, splits_busy = _measured_splits(node, runner, in_bf16=bf16 is not None and bf16 > fp32)
    most_busy = max(node.busy_fraction, splits_busy, *(float(rate["busy_fraction"]) for rate in rates))
    busy = most_busy > BUSY_FRACTION
    return Calibration(
        source="measured",
        origin=f"measured on {node.hostname}: {node.cpu_model}, {threads} threads" + (", while busy" if busy else ""),
        threads=threads,
        fp32_matmul_flops_per_second=fp32,
        bf16_matmul_flops_per_second=bf16,
        copy_bytes_per_second=_sum(rates, "copy_bytes_per_second"),
        base_rss_bytes=int(base["base_rss_bytes"]),
        torch_version=torch_version(),
        taken_while_busy=busy,
        bf16_emulated_flops_per_second=emulated,
        splits=splits,
    )


def _measured_splits(node: NodeFacts, runner: Runner, *, in_bf16: bool) -> tuple[tuple[SplitRates, ...], float]:
    """Of the numbers of ranks that a machine may have, and how busy others kept it meanwhile. None where so many
    processes do not run here now: then the machine counts as busy, so that another start measures again, and the plan
    keeps to one rank for each NUMA node."""
    ways, usual = _ways(node), len(_usual_ways(node))
    ways = _with_room(ways, node.memory_available_bytes)
    if len(ways) < 2:
        return (), 1.0 if usual else 0.0
    cpus = tuple(core.cpus[0] for core in usable_cores(node))
    part = Part(name="splits", cpus=cpus, threads=len(cpus), with_bf16=in_bf16, ways=tuple(ways))
    try:
        found = runner(part)
    except CoremillError:
        return (), 1.0
    busy = float(found["busy_fraction"]) if len(ways) >= usual else 1.0
    return tuple(_split_rates(each) for each in found["splits"]), busy


def _ways(node: NodeFacts) -> list[tuple[tuple[int, ...], ...]]:
    """To split the cores among processes, fewest processes first."""
    cores = usable_cores(node)
    ways = [tuple(tuple(core.cpus[0] for core in each) for each in split_cores(cores, n)) for n in rank_counts(node)]
    while len(ways) > 1 and sum(map(len, ways)) > MOST_PROCESSES:
        ways.pop()
    return ways


def _usual_ways(node: NodeFacts) -> list[tuple[tuple[int, ...], ...]]:
    """Those that have room where others have no more of the memory than usual; none where that leaves no choice."""
    ways = _with_room(_ways(node), MEMORY_USUALLY_FREE * node.memory_bytes)
    return ways if len(ways) > 1 else []


def _with_room(ways: Sequence[tuple[tuple[int, ...], ...]], free_bytes: float) -> list[tuple[tuple[int, ...], ...]]:
    """Those, fewest processes first, that all run at once within half of so much memory."""
    room = free_bytes // (2 * PROCESS_BYTES)
    return [way for end, way in enumerate(ways, 1) if sum(map(len, ways[:end])) <= room]


def _split_rates(document: Mapping[str, Any]) -> SplitRates:
    by_width = {name: tuple(document[name]) for name in ("products", "between", "attention")}
    return SplitRates(processes=document["processes"], update=document["update"], **by_width)


def _sum(rates: Sequence[Mapping[str, Any]], name: str) -> float:
    return sum(float(rate[name]) for rate in rates)


def _threads_by_numa_node(node: NodeFacts) -> Counter[int]:
    """As many as ranks will have: a small CPU quota leaves some NUMA nodes without."""
    return Counter(core.numa_node for core in usable_cores(node))


def _rate_part(node: NodeFacts, numa_node: int, threads: int) -> Part:
    """The rates of one NUMA node, on the first hardware thread of each core.

    Under a CPU quota fewer threads run, on all those cores: the kernel finds free ones, where others that all start
    counting at cpu 0 would meet.
    """
    cpus = tuple(core.cpus[0] for core in node.cores if core.numa_node == numa_node)
    # Two arrays; together at most a quarter of what is free.
    copy_bytes = max(2**20, min(COPY_BYTES, node.memory_available_bytes // (8 * len(node.numa_nodes))))
    return Part(name="rates", cpus=cpus, threads=threads, with_bf16=node.has_bf16_units, copy_bytes=copy_bytes)


# -- the cache


@dataclass(frozen=True)
class _Entry:
    calibration: Calibration
    taken_at: float  # unix seconds
    ways: int | None  # to split the cores that there was room for; None: an earlier version took it


def _key(node: NodeFacts) -> dict[str, Any]:
    """All that the numbers depend on."""
    sizes = sorted(Counter(core.numa_node for core in node.cores).values())
    return {
        "architecture": node.architecture,
        "cpu_model": node.cpu_model,
        "isa": list(node.isa),
        "usable_cores": node.usable_cores,
        "cores": len(node.cores),
        "cpus": sum(len(core.cpus) for core in node.cores),
        "numa_nodes": len(sizes) if len(set(sizes)) == 1 else sizes,
        "torch_version": torch_version(),
        "calibration_version": CALIBRATION_VERSION,
    }


def _file_of(node: NodeFacts, cache_folder: Path) -> Path:
    digest = hashlib.sha256(json.dumps(_key(node), sort_keys=True).encode()).hexdigest()
    return cache_folder / "calibration" / f"{digest[:16]}.json"


def _learned_file(node: NodeFacts, cache_folder: Path) -> Path:
    return _file_of(node, cache_folder).with_suffix(".learned.json")


def _is_stale(entry: _Entry, node: NodeFacts, now: float) -> bool:
    """Also where it was taken under a limit of memory without room for ways to split the cores that have it here."""
    if entry.calibration.taken_while_busy:
        return not 0 <= now - entry.taken_at < BUSY_EXPIRES_SECONDS
    return entry.ways is not None and entry.ways < len(_usual_ways(node))


def _read_entry(node: NodeFacts, cache_folder: Path) -> _Entry | None:
    """The entry of this machine; whatever cannot be understood is as good as not there."""
    try:
        document = json.loads(_file_of(node, cache_folder).read_text(encoding="utf-8"))
        if document["key"] != _key(node):
            return None
        learned = _read_observations(_learned_file(node, cache_folder))
        known = _known_fields(Calibration, document["calibration"])
        splits = tuple(_split_rates(each) for each in known.get("splits", ()))
        calibration = Calibration(**{**known, "learned": learned, "splits": splits})
        fp32, copy = calibration.fp32_matmul_flops_per_second, calibration.copy_bytes_per_second
        is_sound = fp32 > 0 and copy > 0 and calibration.base_rss_bytes > 0
        ways = document.get("ways")
        ways = None if ways is None else int(ways)
        return _Entry(calibration, float(document["taken_at"]), ways) if is_sound else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _read_observations(file: Path) -> tuple[Observation, ...]:
    try:
        documents = json.loads(file.read_text(encoding="utf-8"))
        return tuple(Observation(**_known_fields(Observation, document)) for document in documents)
    except (OSError, ValueError, TypeError, AttributeError):
        return ()


def _known_fields(kind: type[Calibration] | type[Observation], document: Mapping[str, Any]) -> dict[str, Any]:
    """Another version may have written more."""
    names = {field.name for field in fields(kind)}
    return {name: value for name, value in document.items() if name in names}


def _write_entry(node: NodeFacts, cache_folder: Path, calibration: Calibration, now: float, say: Say) -> None:
    file = _file_of(node, cache_folder)
    document = {
        "key": _key(node),
        "taken_at": now,
        "ways": len(_usual_ways(node)),
        "calibration": asdict(replace(calibration, learned=())),
    }
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, json.dumps(document, indent=1))
    except OSError as error:
        say(f"the measurement could not be kept for next time in {file.parent}: {error.strerror}; {CACHE_ADVICE}")


@contextlib.contextmanager
def _one_at_a_time(file: Path, say: Say) -> Iterator[None]:
    """One process at a time measures: two side by side would each see half a machine.

    Waits some minutes at most, for who has the lock may be stopped. Where locks do not work it goes on without.
    """
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            held.enter_context(
                locked(
                    file.with_suffix(".lock"),
                    lambda: say("another process is measuring this machine; waiting for it"),
                    most_seconds=3 * STUCK_SECONDS,
                )
            )
        yield

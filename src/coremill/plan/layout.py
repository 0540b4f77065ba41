"""Which cores belong to which rank of a machine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from coremill.errors import InputError
from coremill.hardware.cores import hardware_threads, split_cores, usable_cores
from coremill.hardware.facts import Core, NodeFacts
from coremill.plan.types import Choice
from coremill.plan.words import plural


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Ranks of one machine and their cores."""

    ranks_per_node: Choice[int]
    threads_per_rank: Choice[int]
    cpus_of_rank: tuple[tuple[int, ...], ...]


def lay_out(node: NodeFacts, *, ranks: int | None, threads: int | None, any_threads: bool = False) -> Layout:
    """One rank per NUMA node and one thread per physical core, unless the user fixed either.

    `any_threads`: as many as the user says, also where that is far too many; whoever asks for this warns.
    """
    cores = usable_cores(node)
    if ranks is not None and ranks > 64 * len(cores):
        raise InputError(
            f"{ranks} ranks on {len(cores)} cores",
            where="parallel.ranks_per_node",
            do="ask for at most a few ranks per core",
        )
    logical = hardware_threads(node)
    if threads is not None and threads > 4 * logical and not any_threads:
        raise InputError(
            f"{threads} threads for a rank on a machine with {logical} usable hardware threads",
            where="parallel.threads_per_rank",
            why="threads of one product wait for each other; more of them than hardware threads only wait longer",
            do=f"leave it out, or set at most {logical}",
        )
    by_node = Counter(core.numa_node for core in cores)
    count = ranks if ranks is not None else 1 if _is_lopsided(by_node) else len(by_node)
    groups = split_cores(cores, count)
    own = _threads_choice(threads, groups, count, len(cores), len(node.cores))
    if own.value * count <= len(cores) < len(node.cores):
        groups = _all_cores(node, cores, count)
    return Layout(
        ranks_per_node=_ranks_choice(ranks, count, by_node),
        threads_per_rank=own,
        cpus_of_rank=tuple(tuple(core.cpus[0] for core in group) for group in groups),
    )


def _all_cores(node: NodeFacts, usable: tuple[Core, ...], ranks: int) -> list[tuple[Core, ...]]:
    """Under a CPU quota a rank has fewer threads than cores to put them on: the kernel finds free ones, where ranks of
    several containers that all start counting at cpu 0 would meet."""
    numa_nodes = {core.numa_node for core in usable}
    return split_cores(tuple(core for core in node.cores if core.numa_node in numa_nodes), ranks)


def _is_lopsided(by_node: Mapping[int, int]) -> bool:
    """Whether ranks of one size, one for each NUMA node, would leave most cores idle (`taskset -c 0-17` of 2 x 16)."""
    return 2 * len(by_node) * min(by_node.values()) < sum(by_node.values())


def _ranks_choice(fixed: int | None, count: int, by_node: Mapping[int, int]) -> Choice[int]:
    numa_nodes, cores = len(by_node), sum(by_node.values())
    if fixed is None and count < numa_nodes:
        sizes = " and ".join(map(str, by_node.values()))
        return Choice(count, f"NUMA nodes of {sizes} cores: ranks as small as the smallest would leave most cores idle")
    if fixed is None:
        place = "one NUMA node" if numa_nodes == 1 else f"{numa_nodes} NUMA nodes"
        return Choice(count, f"{place}: one rank each, so that no thread waits for another node's memory")
    reason = "set by you"
    if fixed > cores:
        reason += f"; {fixed} ranks share {cores} cores and take turns: right for a rehearsal, slow for a run"
    elif fixed > numa_nodes:
        reason += "; each rank of a machine has activations of its own"
    return Choice(count, reason)


def _threads_choice(
    fixed: int | None, groups: list[tuple[Core, ...]], ranks: int, cores: int, there: int
) -> Choice[int]:
    # As many threads as the smallest group has cores: ranks wait for each other, extra threads would idle.
    own = min(len(group) for group in groups)
    if fixed is not None:
        reason = "set by you"
        if fixed * ranks > cores:
            reason += f"; {fixed * ranks} threads share {cores} cores"
        return Choice(fixed, reason)
    if ranks > cores:
        return Choice(1, "fewer cores than ranks")
    if cores < there:
        return Choice(own, f"the CPU quota pays for {cores} of {there} cores; {plural(own, 'thread')} per rank")
    return Choice(
        own, f"{plural(own, 'physical core')} per rank; a second hardware thread on a core adds nothing to a product"
    )

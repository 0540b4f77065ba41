"""Which cores of a machine a run keeps busy, and how they are split among processes that compute side by side."""

from __future__ import annotations

from collections import Counter

from coremill.hardware.facts import Core, NodeFacts

# Numbers of ranks worth measuring and pricing lie this far apart: what is between differs little from one of them.
APART = 2


def rank_counts(node: NodeFacts) -> list[int]:
    """Ranks that a machine can have with equal shares of its cores, none across NUMA nodes: one per NUMA node first, at
    last one per core."""
    cores = usable_cores(node)
    by_node = Counter(core.numa_node for core in cores)
    counts = [1]
    if len(set(by_node.values())) == 1:
        each = by_node.most_common(1)[0][1]
        for ranks in range(2, each + 1):
            if each % ranks == 0 and (ranks >= APART * counts[-1] or ranks == each):
                counts.append(ranks)
    return [len(by_node) * ranks for ranks in counts]


def usable_cores(node: NodeFacts) -> tuple[Core, ...]:
    """The cores a run may keep busy: all, or as many as the CPU quota pays for, taken evenly from the NUMA nodes."""
    by_node = [[core for core in node.cores if core.numa_node == numa] for numa in node.numa_nodes]
    taken: list[Core] = []
    for turn in range(max((len(group) for group in by_node), default=0)):
        taken += [group[turn] for group in by_node if turn < len(group)]
    taken = taken[: node.usable_cores]
    return tuple(sorted(taken, key=lambda core: (core.numa_node, core.cpus)))


def hardware_threads(node: NodeFacts) -> int:
    """Of the cores a run may keep busy."""
    return sum(len(core.cpus) for core in usable_cores(node))


def split_cores(cores: tuple[Core, ...], ranks: int) -> list[tuple[Core, ...]]:
    """Equal runs of neighbouring cores, inside a NUMA node where their number allows; more ranks than cores share."""
    if ranks >= len(cores):
        return [(cores[rank * len(cores) // ranks],) for rank in range(ranks)]
    numa_nodes = sorted({core.numa_node for core in cores})
    if ranks % len(numa_nodes) == 0:
        per_node = ranks // len(numa_nodes)
        groups = []
        for numa in numa_nodes:
            groups += _equal_runs(tuple(core for core in cores if core.numa_node == numa), per_node)
        if all(groups):
            return groups
    return _equal_runs(cores, ranks)


def _equal_runs(cores: tuple[Core, ...], parts: int) -> list[tuple[Core, ...]]:
    return [cores[part * len(cores) // parts : (part + 1) * len(cores) // parts] for part in range(parts)]

"""How the parts of a training step scale with threads: one process with all cores beside several with some each.

Ranks that share a machine are the cheaper way to fill its cores where threads wait for each other: between small
operations, at the ends of products. How much that brings depends on the CPU and on the width of the model, so it is
measured. Processes for each way to split the cores are forked once from this one, which has imported torch for all and
computed nothing; ways take turns, part by part, and the quickest turn of each counts: others who compute on the machine
make a turn longer, never shorter. Runs in a process of its own (hardware/calibrate_child.py).
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from importlib import import_module
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from coremill.child import die_with_parent
from coremill.hardware.facts import SPLIT_WIDTHS, SplitRates
from coremill.hardware.step_parts import MAKERS, Work

# cpus of each process, for each way to split the machine.
Split = Sequence[Sequence[int]]

# What a process takes at once, in every way the same, as ranks do; fewer tokens of wide models, whose products would
# take seconds without matrix units.
TOKENS = {"fp32": 512, "bf16": 2048}
MOST_NUMBERS = {"fp32": 512 * 768, "bf16": 2048 * 1536}
UPDATED_NUMBERS = 2**23
PARTS = ("products", "between", "attention")
ROUNDS = 4
# What lies outside comes from others that computed meanwhile: threads that wait for each other suffer most from those.
BOUNDS = (0.7, 1.5)
SECONDS_PER_TURN = 0.05


def measure_splits(
    splits: Sequence[Split], dtype: str, *, quick: bool = False
) -> tuple[list[dict[str, object]], float]:
    """Of each way to split the machine, its seconds over those of the first way, part by part; and the processor time
    that all of it took."""
    rounds, seconds = (1, 0.0) if quick else (ROUNDS, SECONDS_PER_TURN)
    orders = [(part, width) for part in PARTS for width in (SPLIT_WIDTHS[:1] if quick else SPLIT_WIDTHS)]
    orders.append(("update", 0))
    times: dict[tuple[str, int], list[list[float]]] = {order: [] for order in orders}
    import_module("torch.fx.experimental.symbolic_shapes")  # backward wants it, and torch: once for all

    with ExitStack() as stack:
        ways = [stack.enter_context(_workers(split, dtype)) for split in splits]
        for part, width in orders:
            for way in ways:
                _ask(way, (part, width, _size(part, width, len(way), dtype)))
            for _ in range(rounds):
                times[part, width].append([_seconds(way, part, seconds) for way in ways])
        processor_seconds = sum(sum(_ask(way, None)) for way in ways)
    return [asdict(_rates(len(split), place, times)) for place, split in enumerate(splits)], processor_seconds


def _size(part: str, width: int, processes: int, dtype: str) -> int:
    """What one process does at once: tokens, or of the update its share of the numbers."""
    if part == "update":
        return UPDATED_NUMBERS // processes
    return min(TOKENS[dtype], MOST_NUMBERS[dtype] // width)


def _seconds(way: list[Connection], part: str, budget_seconds: float) -> float:
    """Of the machine for the same work: all wait for the slowest, as ranks do."""
    slowest = max(_ask(way, budget_seconds))
    return slowest if part == "update" else slowest / len(way)


def _rates(processes: int, place: int, times: dict[tuple[str, int], list[list[float]]]) -> SplitRates:
    def beside_first(part: str, width: int) -> float:
        first, here = (min(turn[way] for turn in times[part, width]) for way in (0, place))
        ratio = here / first
        return min(max(ratio, BOUNDS[0]), BOUNDS[1])

    def by_width(part: str) -> tuple[float, ...]:
        return tuple(beside_first(part, width) for known, width in times if known == part)

    return SplitRates(
        processes=processes,
        products=by_width("products"),
        between=by_width("between"),
        attention=by_width("attention"),
        update=beside_first("update", 0),
    )


@contextmanager
def _workers(split: Split, dtype: str) -> Iterator[list[Connection]]:
    """A process for each; where one ends, so does the call that waits for it."""
    forking = multiprocessing.get_context("fork")
    started: list[tuple[BaseProcess, Connection]] = []
    try:
        for cpus in split:
            # One after the other: a process must not hold the far end of another's line.
            ours, theirs = forking.Pipe()
            process: BaseProcess = forking.Process(
                target=_work, args=(theirs, tuple(cpus), dtype, os.getpid()), daemon=True
            )
            process.start()
            theirs.close()
            started.append((process, ours))
        yield [line for _, line in started]
    finally:
        for process, line in started:
            process.kill()
            process.join()
            line.close()


def _ask(way: list[Connection], order: object) -> list[float]:
    """The same of all, at once."""
    for line in way:
        line.send(order)
    return [line.recv() for line in way]


def _work(line: Connection, cpus: tuple[int, ...], dtype: str, parent: int) -> None:
    """Do what is asked for: lay out a part of a step, do it over and over for so many seconds, or tell the processor
    time it took."""
    die_with_parent(parent)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cpus)  # before the first product: threads inherit the mask
    import torch

    torch.set_num_threads(len(cpus))
    work: Work | None = None
    while True:
        order = line.recv()
        if order is None:
            line.send(time.process_time())
        elif isinstance(order, tuple):
            part, width, size = order
            work = MAKERS[part](width, size, torch.bfloat16 if dtype == "bf16" else torch.float32)
            work()
            line.send(0.0)
        elif work is not None:
            line.send(_mean_seconds(work, order))


def _mean_seconds(work: Work, budget_seconds: float) -> float:
    began, times = time.perf_counter(), 0
    while True:
        work()
        times += 1
        seconds = time.perf_counter() - began
        if seconds > budget_seconds:
            return seconds / times

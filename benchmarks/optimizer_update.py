"""How long an update takes: `python -m benchmarks.optimizer_update [--threads N ...] [--rows N] [--inductor]`.

One matrix of the width of Llama-3-8B, moved again and again: nanoseconds for each parameter, the quickest and the
median of all goes, of torch's fused AdamW in fp32 and of adamw-8bit over fp32 and bf16 weights; and bytes that each
holds beside the weight. With `--inductor` also the same arithmetic as one pass compiled by Inductor (wants a C++
compiler), in turns with ours, how long compiling took, and how far apart their weights are. For a machine that has
nothing else to do. Asserts nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn

from coremill.config.schema import TrainSection
from coremill.engines.optimizers import optimizer_of
from coremill.engines.optimizers.adamw_8bit import layout_of
from coremill.engines.optimizers.cost import BLOCK, STRETCH_NUMEL
from coremill.engines.optimizers.moments_8bit import (
    FIRST_LEVELS,
    JUST_BELOW,
    LEAST,
    MOST,
    SECOND_LEVELS,
    Moments8bit,
)
from coremill.engines.optimizers.place_bits import PlaceBits
from coremill.model.slices import RowSlice

COLUMNS = 4096
WAYS = (("adamw", torch.float32), ("adamw-8bit", torch.float32), ("adamw-8bit", torch.bfloat16))
INDUCTOR = "Inductor"
LEARNING_RATE = 1e-5


@dataclass(frozen=True, kw_only=True)
class Measured:
    optimizer: str
    weights: str
    threads: int
    quickest_ns: float  # of a parameter
    median_ns: float
    state_bytes: float  # of a parameter


def measure(name: str, dtype: torch.dtype, *, threads: int, rows: int, goes: int) -> Measured:
    torch.set_num_threads(threads)
    module = nn.Linear(COLUMNS, rows, bias=False, dtype=dtype)
    weight = module.weight
    settings = optimizer_of(TrainSection(steps=1, optimizer="adamw-8bit" if name == "adamw-8bit" else "adamw"))
    optimizer = settings.make(module, [("weight", weight)], [RowSlice("weight", (rows, COLUMNS), 0, rows, weight)])
    gradient = torch.randn(rows, COLUMNS).mul_(1e-3).to(dtype)
    seconds = []
    for _ in range(goes + 1):
        began = time.perf_counter()
        optimizer.move(weight, gradient, LEARNING_RATE)
        seconds.append(time.perf_counter() - began)
    held = sum(tensor.nbytes for tensor in optimizer.state_of(weight)[0].values())
    nanoseconds = [1e9 * each / weight.numel() for each in seconds[1:]]  # the first makes the moments
    return Measured(
        optimizer=name,
        weights=str(dtype).removeprefix("torch."),
        threads=threads,
        quickest_ns=min(nanoseconds),
        median_ns=statistics.median(nanoseconds),
        state_bytes=held / weight.numel(),
    )


class OnePass:
    """adamw-8bit's move of one weight of whole blocks by a single compiled loop, with the same bits by place."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._settings = optimizer_of(TrainSection(steps=1, optimizer="adamw-8bit"))
        self._moments = Moments8bit.zeros(len(weight), layout_of(weight.shape))
        self._bits = PlaceBits(self._settings.seed, largest_numel=weight.numel(), widest_row=weight.shape[1])
        self._pass = torch.compile(self._eager, dynamic=False)
        self._updates = 0

    @torch.no_grad()
    def move(self, weight: torch.Tensor, gradient: torch.Tensor, learning_rate: float) -> None:
        self._updates += 1
        beta1, beta2 = self._settings.adam_betas
        numbers = (learning_rate, 1 - beta1**self._updates, (1 - beta2**self._updates) ** 0.5)
        corrections = torch.tensor(numbers)  # as numbers they would be compiled in
        moments, (rows, columns) = self._moments, weight.shape
        for place in self._bits.stretches("weight", self._updates, 0, rows, columns, STRETCH_NUMEL):
            part = slice(place.begin, place.end)
            held = (moments.first, moments.first_scale, moments.second, moments.second_scale)
            shape = (place.end - place.begin, columns // BLOCK, BLOCK)
            own = [each[part].view(*shape[:2], -1) for each in (weight, gradient, *held)]
            self._pass(*own, *(each.view(shape) for each in (place.bits, *place.uniform)), corrections)

    def _eager(
        self,
        weight: torch.Tensor,
        gradient: torch.Tensor,
        first: torch.Tensor,
        first_scale: torch.Tensor,
        second: torch.Tensor,
        second_scale: torch.Tensor,
        bits: torch.Tensor,
        first_chance: torch.Tensor,
        second_chance: torch.Tensor,
        corrections: torch.Tensor,
    ) -> None:
        settings, (beta1, beta2) = self._settings, self._settings.adam_betas
        learning_rate, correction1, correction2 = corrections.unbind()
        moved, slope = weight.float(), gradient.float()
        root = first.float()
        momentum = torch.lerp(root * root.abs() * first_scale, slope, 1 - beta1)
        square = (second.float() * second_scale) ** 4 * beta2 + slope * slope * (1 - beta2)
        step = momentum / correction1 / (square.sqrt() / correction2 + settings.adam_epsilon)
        moved = moved * (1 - learning_rate * settings.weight_decay) - learning_rate * step
        fourth = square.sqrt().sqrt()
        largest = fourth.amax(dim=2, keepdim=True).clamp(LEAST, MOST)
        second_scale.copy_(largest / SECOND_LEVELS)
        level = fourth * (SECOND_LEVELS * JUST_BELOW / largest) + second_chance
        second.copy_(level.clamp(1, SECOND_LEVELS).to(torch.int32))
        sizes = momentum.abs()
        largest = sizes.amax(dim=2, keepdim=True).clamp(LEAST, MOST)
        first_scale.copy_(largest / FIRST_LEVELS**2)
        squares = (sizes * (FIRST_LEVELS**2 * JUST_BELOW / largest)).clamp(max=FIRST_LEVELS**2)
        below = squares.sqrt().floor()
        whole = (squares + first_chance + 2 * below * first_chance).sqrt()
        first.copy_(torch.copysign(whole, momentum))
        if weight.dtype == torch.float32:
            weight.copy_(moved)
        else:
            words = (moved.view(torch.int32) + bits) & ~0xFFFF
            weight.copy_(words.view(torch.float32))


def compare_compiled(dtype: torch.dtype, *, threads: int, rows: int, goes: int) -> str:
    """The compiled pass in turns with ours, on the same weights and gradients."""
    torch.set_num_threads(threads)
    module = nn.Linear(COLUMNS, rows, bias=False, dtype=dtype)
    ours, theirs = module.weight, module.weight.detach().clone()
    settings = optimizer_of(TrainSection(steps=1, optimizer="adamw-8bit"))
    optimizer = settings.make(module, [("weight", ours)], [RowSlice("weight", (rows, COLUMNS), 0, rows, ours)])
    compiled = OnePass(theirs)
    before = ours.detach().clone()
    gradient = torch.randn(rows, COLUMNS).mul_(1e-3).to(dtype)
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(goes + 1):
        optimizer.begin_step()
        for own, move, weight in ((seconds[0], optimizer.move, ours), (seconds[1], compiled.move, theirs)):
            began = time.perf_counter()
            move(weight, gradient, LEARNING_RATE)
            own.append(time.perf_counter() - began)
    way, apart = (ours - before).float(), (theirs - ours).float()
    quickest = [1e9 * min(each[1:]) / ours.numel() for each in seconds]
    return (
        f"one pass by {INDUCTOR}, {str(dtype).removeprefix('torch.'):9} {threads:2} threads: {quickest[1]:6.2f} ns a"
        f" parameter, ours {quickest[0]:.2f} beside it; compiled in {seconds[1][0]:.0f} s; apart by"
        f" {apart.norm() / way.norm():.1e} of the way moved"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[torch.get_num_threads()])
    parser.add_argument("--rows", type=int, default=14336, help="of the matrix; 14336: a layer's largest")
    parser.add_argument("--goes", type=int, default=7)
    parser.add_argument("--inductor", action="store_true", help="one compiled pass beside it")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = []
    for threads in options.threads:
        for name, dtype in WAYS:
            one = measure(name, dtype, threads=threads, rows=options.rows, goes=options.goes)
            found.append(one)
            print(
                f"{one.optimizer:11} {one.weights:9} {one.threads:2} threads: {one.quickest_ns:6.2f} ns a parameter"
                f" (median {one.median_ns:.2f}), {8.03 * one.quickest_ns:.1f} s for 8.03 B;"
                f" {one.state_bytes:.2f} bytes beside it"
            )
        if options.inductor:
            for dtype in (torch.float32, torch.bfloat16):
                print(compare_compiled(dtype, threads=threads, rows=options.rows, goes=options.goes), flush=True)
    if options.json:
        options.json.write_text(json.dumps([asdict(one) for one in found], indent=1) + "\n")


if __name__ == "__main__":
    main()

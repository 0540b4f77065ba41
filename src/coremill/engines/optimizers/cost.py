"""What an optimizer costs for each parameter that it moves: engines count with it when the plan asks."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from coremill.hardware.facts import Fleet
from coremill.plan.card import ModelCard
from coremill.plan.time import rank_cores, rank_share
from coremill.plan.types import Arrangement

WEIGHT_BYTES = 4  # what is moved is fp32, unless an optimizer needs no masters
GRADIENT_BYTES = 4  # summed in fp32
# Where a bf16 copy to compute with stands beside it: written again after an update.
COPY_BYTES = 2


@dataclass(frozen=True)
class OptimizerCost:
    """Of one parameter."""

    state_bytes: float  # held beside the weight from the first update on
    update_bytes: int  # read and written by an update, norm and clipping included
    has_masters: bool  # what it moves is fp32 where arithmetic is bf16: a copy to compute with stands beside it
    update_core_seconds: float  # of one core: where memory is quick, arithmetic takes longer than its bytes

    def weight_bytes(self, arrangement: Arrangement) -> int:
        """Of a weight as it is moved, and saved."""
        return WEIGHT_BYTES if self.has_masters else arrangement.compute_bytes

    def copy_bytes(self, arrangement: Arrangement) -> int:
        """Of what is computed with, where that stands beside what is moved."""
        return COPY_BYTES if self.has_masters and arrangement.dtype == "bf16" else 0

    def beside(self, parameters: int) -> int:
        """Held beside so many."""
        return ceil(self.state_bytes * parameters)

    def held_bytes(self, card: ModelCard, parameters: int, arrangement: Arrangement) -> int:
        """Beside so many parameters on a rank, with what an update works in."""
        if self.has_masters:
            return self.beside(parameters)
        table = 2 * min(STRETCH_NUMEL, card.largest_tensor_parameters, card.trainable_parameters) * BIT_BYTES
        return self.beside(parameters) + table + arrangement.threads_per_rank * PIECE_BYTES

    def saved_bytes(self, card: ModelCard, arrangement: Arrangement) -> int:
        """In a checkpoint: all weights but those of a base, and the state of those that are trained."""
        weights = self.weight_bytes(arrangement) * card.own_parameters
        return weights + self.beside(card.trainable_parameters)

    def seconds(self, parameters: float, arrangement: Arrangement, fleet: Fleet, *, has_copy: bool) -> float:
        """Of updating so many on one rank: as long as memory needs for it, or the cores."""
        moved_bytes = self.update_bytes + (WEIGHT_BYTES + COPY_BYTES if has_copy else 0)
        in_memory = moved_bytes / (fleet.calibration.copy_bytes_per_second * rank_share(arrangement, fleet))
        return parameters * max(in_memory, self.update_core_seconds / rank_cores(arrangement, fleet))


# Two fp32 tensors. The fused kernel reads weight, gradient and these and writes three; norm and clipping read and write
# gradients. Square roots and quotients: measured on Neoverse-N1.
ADAMW = OptimizerCost(state_bytes=8, update_bytes=28 + 4 + 8, has_masters=True, update_core_seconds=2.6e-9)

# Moments in 8 bits share a scale in fp32 by this many elements of a row; vectors keep theirs in fp32.
BLOCK = 256
# It works with a table of random bits (place_bits.py), twice as many as elements of a parameter read one stretch of,
# with what drawing them takes; and with four pieces in fp32 for each thread (adamw_8bit.py), of so many elements that
# they stay in a core's second cache.
STRETCH_NUMEL = 2**21
BIT_BYTES = 16
NUMEL_AT_ONCE = 2**17
PIECE_BYTES = 4 * 4 * NUMEL_AT_ONCE
# Two bytes and two scales; it reads the gradient, and reads and writes weight and moments in cache-sized pieces. Of a
# core of Emerald Rapids 21 ns in a bf16 run, of Skylake 13 where AdamW takes 1.5.
ADAMW_8BIT = OptimizerCost(
    state_bytes=2 + 2 * 4 / BLOCK, update_bytes=4 + 2 * 4 + 2 * 2, has_masters=False, update_core_seconds=2.1e-8
)

COSTS = {"adamw": ADAMW, "adamw-8bit": ADAMW_8BIT}  # by train.optimizer

"""What an optimizer costs for each parameter that it moves: the plan counts with it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class OptimizerCost:
    """Of one parameter."""

    state_bytes: int  # held beside the weight from the first update on
    update_bytes: int  # read and written by an update, norm and clipping included
    update_core_seconds: float  # of one core: where memory is quick, arithmetic takes longer than its bytes


# Two fp32 tensors. The fused kernel reads weight, gradient and these and writes three; norm and clipping read and write
# gradients. Square roots and quotients: measured on Neoverse-N1.
ADAMW = OptimizerCost(state_bytes=8, update_bytes=28 + 4 + 8, update_core_seconds=2.6e-9)

COSTS = {"adamw": ADAMW}  # by train.optimizer

"""AdamW over what the engine hands out, and the learning rate over the steps."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from coremill.config.schema import TrainSection


def make_optimizer(parameters: Sequence[tuple[str, torch.Tensor]], settings: TrainSection) -> torch.optim.AdamW:
    """Fused AdamW: one vectorised pass over weights, gradients and moments where the plain one makes about ten.

    Vectors (norms, biases) are not decayed.
    """
    decayed = [tensor for _, tensor in parameters if tensor.dim() >= 2]
    vectors = [tensor for _, tensor in parameters if tensor.dim() < 2]
    groups = [
        {"params": decayed, "weight_decay": settings.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=settings.learning_rate,
        betas=(settings.adam_beta1, settings.adam_beta2),
        eps=settings.adam_epsilon,
        fused=True,
    )


def learning_rate_at(step: int, steps: int, settings: TrainSection) -> float:
    """The rate used in step `step` (from 1) of `steps`: a linear warm-up, then the chosen decay towards zero."""
    if step <= settings.warmup_steps:
        return settings.learning_rate * step / settings.warmup_steps
    if settings.schedule == "constant":
        return settings.learning_rate
    # The first step after the warm-up runs at the full rate, the last one still learns: zero would be reached at steps
    # + 1.
    progress = (step - 1 - settings.warmup_steps) / max(1, steps - settings.warmup_steps)
    share = 1 - progress if settings.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return settings.learning_rate * share

"""AdamW over what the engine hands out."""

from __future__ import annotations

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

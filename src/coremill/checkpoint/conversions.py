"""What a run goes on with that is not as it was saved, in words: moments of another optimizer, weights that are held in
another dtype."""

from __future__ import annotations

import torch

from coremill.checkpoint.manifest import Checkpoint
from coremill.checkpoint.snapshot import WEIGHTS, CheckpointReader
from coremill.engines.base import Engine
from coremill.engines.optimizers.moments_8bit import FIRST
from coremill.plan.types import Choice


def conversions(checkpoint: Checkpoint | None, engine: Engine) -> dict[str, Choice[str]]:
    """By what is converted; empty where all is as it was."""
    found: dict[str, Choice[str]] = {}
    if checkpoint is None:
        return found
    with CheckpointReader(checkpoint) as reader:
        for each in engine.state():
            if not each.rows.local.numel():
                continue
            if "weights" not in found and reader.dtype_of(WEIGHTS, each.rows) != (held := each.rows.local.dtype):
                found["weights"] = _weights(held)
            if "moments" not in found and each.optimizer:
                before, now = reader.optimizer_groups(each.rows), sorted(each.optimizer)
                if before != now:
                    found["moments"] = _moments(before, now)
    return found


def _weights(held: torch.dtype) -> Choice[str]:
    if held == torch.float32:
        return Choice("widened", "the checkpoint holds weights in bf16, and from here on they are in fp32")
    return Choice(
        "rounded",
        "the checkpoint holds weights in fp32; adamw-8bit in bf16 arithmetic holds them in bf16 alone: what rounding"
        " them cuts off is gone for good",
    )


def _moments(before: list[str], now: list[str]) -> Choice[str]:
    had, has = ("in 8 bits" if FIRST in names else "in fp32" for names in (before, now))
    return Choice(
        "converted",
        f"the checkpoint holds moments {had}, and from here on they are {has}: losses are, by little, not what they"
        " would have been",
    )

"""Whether a run that goes on drops what it would have dropped, and if not, why: in words.

Each rank has its own random numbers, and they are in the checkpoint. What they come to depends on how many ranks share
them, on how masks are made of them (model/quick_dropout.py, model.fused) and on how many rows are computed at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from coremill.checkpoint.manifest import Checkpoint
from coremill.model.quick_dropout import QuickDropout
from coremill.plan.types import Choice

LOOKED_UP, DRAWN = "looked up", "drawn"


def dropout_of(model: nn.Module, micro_batch_rows: int | None) -> dict[str, Any] | None:
    """What masks depend on beside random numbers, for a checkpoint; None: the model drops nothing."""
    modules = list(model.modules())
    if not any(map(_drops, modules)):
        return None
    masks = LOOKED_UP if any(isinstance(module, QuickDropout) for module in modules) else DRAWN
    return {"masks": masks, "micro_batch_rows": micro_batch_rows}


def _drops(module: nn.Module) -> bool:
    """By itself, or by what it tells attention to do."""
    share = module.p if isinstance(module, _DropoutNd) else getattr(module, "attention_dropout", 0.0)
    return isinstance(share, int | float) and share > 0


def other_dropout(checkpoint: Checkpoint | None, now: Mapping[str, Any] | None, world_size: int) -> Choice[str] | None:
    """Why a continuation drops other places; `now` is `dropout_of` it. None: it does not, or drops nothing."""
    if checkpoint is None or now is None:
        return None
    had = checkpoint.manifest.world_size
    if had != world_size:
        before, here = (f"{count} rank{'s' if count != 1 else ''}" for count in (had, world_size))
        return Choice(
            "drawn anew",
            f"{before} had random numbers of their own, and {here} cannot go on with them: what is dropped from here"
            f" on, and with it the loss, is not what {before} would have had",
        )
    reasons = []
    earlier = checkpoint.state().get("dropout")
    if earlier is None and now["masks"] == LOOKED_UP:
        reasons.append(
            "the checkpoint was written by an earlier coremill, whose masks torch drew, and now they are looked up in a"
            " table (model.fused: false draws them as before)"
        )
    elif earlier is not None and earlier["masks"] != now["masks"]:
        reasons.append(f"masks were {earlier['masks']} and are {now['masks']} now (model.fused)")
    rows = None if earlier is None else earlier["micro_batch_rows"]
    if rows not in (None, now["micro_batch_rows"]):
        reasons.append(f"{rows:,} rows were computed at a time, and now {now['micro_batch_rows']:,}")
    if not reasons:
        return None
    words = "what is dropped from here on, and with it the loss, is not what it would have been"
    return Choice("other masks", f"{'; '.join(reasons)}: {words}")

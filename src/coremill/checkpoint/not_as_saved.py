"""What a run does not go on with as it was saved: told to the user, for from there on its losses are others."""

from __future__ import annotations

from torch import nn

from coremill.checkpoint.manifest import Checkpoint
from coremill.checkpoint.snapshot import CheckpointReader, Training
from coremill.engines.base import Engine
from coremill.plan.types import Choice


def what_is_other(checkpoint: Checkpoint | None, training: Training, world_size: int) -> dict[str, Choice[str]]:
    """By the name of an event `choice`."""
    found = {
        "dropout": _other_dropout(checkpoint, training.model, world_size),
        "moments": _other_moments(checkpoint, training.engine),
    }
    return {name: choice for name, choice in found.items() if choice is not None}


def _other_moments(checkpoint: Checkpoint | None, engine: Engine) -> Choice[str] | None:
    """Whether another optimizer held other ones, or weights in another dtype; None: they are as they were."""
    if checkpoint is None:
        return None
    with CheckpointReader(checkpoint) as reader:
        for each in engine.state():
            if not each.optimizer or not each.rows.local.numel():
                continue
            before, now = reader.optimizer_groups(each.rows), sorted(each.optimizer)
            if before != now:
                return Choice(
                    "converted",
                    f"the checkpoint holds {' and '.join(before)} of each weight, and this optimizer"
                    f" {' and '.join(now)}: from here on losses are not what they would have been, by little",
                )
    return None


def _other_dropout(checkpoint: Checkpoint | None, model: nn.Module, world_size: int) -> Choice[str] | None:
    """What becomes of dropout where other ranks go on: each rank had its own random numbers. None: nothing."""
    if checkpoint is None or checkpoint.manifest.world_size == world_size:
        return None
    chances = [module.p for module in model.modules() if isinstance(module, nn.Dropout) and module.p > 0]
    if not chances:
        return None
    before, now = (f"{count} rank{'s' if count != 1 else ''}" for count in (checkpoint.manifest.world_size, world_size))
    return Choice(
        "drawn anew",
        f"{before} had random numbers of their own, and {now} cannot go on with them: what is dropped from here on, and"
        f" with it the loss, is not what {before} would have had",
    )

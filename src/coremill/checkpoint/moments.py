"""Whether a run goes on with the moments that were saved, or with what another optimizer makes of them: in words."""

from __future__ import annotations

from coremill.checkpoint.manifest import Checkpoint
from coremill.checkpoint.snapshot import CheckpointReader
from coremill.engines.base import Engine
from coremill.engines.optimizers.moments_8bit import FIRST
from coremill.plan.types import Choice


def other_moments(checkpoint: Checkpoint | None, engine: Engine) -> Choice[str] | None:
    """None: they are as they were."""
    if checkpoint is None:
        return None
    with CheckpointReader(checkpoint) as reader:
        for each in engine.state():
            if not each.optimizer or not each.rows.local.numel():
                continue
            before, now = reader.optimizer_groups(each.rows), sorted(each.optimizer)
            if before != now:
                had, has = ("in 8 bits" if FIRST in names else "in fp32" for names in (before, now))
                return Choice(
                    "converted",
                    f"the checkpoint holds moments {had}, and from here on they are {has}: losses are, by little, not"
                    " what they would have been",
                )
    return None

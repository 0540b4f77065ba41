"""Which optimizer moves the weights, and when: the ways that a run file leaves open, in the order in which auto takes
the first that fits, and why it was that one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from coremill.config.schema import AUTO, RunConfig
from coremill.errors import InputError
from coremill.plan.engine_cost import cost_named
from coremill.plan.pricing import Candidate
from coremill.plan.types import Choice
from coremill.plan.words import size

Update = Literal["after", "inside"]
EIGHT_BIT = "adamw-8bit"
BY_AUTO = ("adamw", EIGHT_BIT)
UPDATES: tuple[Update, ...] = ("after", "inside")


def ways_of(config: RunConfig) -> list[tuple[str, Update]]:
    """Optimizer and update, of which the first that fits is taken.

    Updating inside backward changes by which norm gradients are clipped. So it is not done unasked: of adamw, named or
    left out, `train.update: auto` is after."""
    train = config.train
    optimizers = BY_AUTO if train.optimizer == AUTO else (train.optimizer,)
    if train.update != AUTO:
        return [(optimizer, train.update) for optimizer in optimizers]
    may_be_inside = train.optimizer != "adamw" and config.numerics.on_non_finite != "skip"
    return [(optimizer, update) for optimizer in optimizers for update in (UPDATES if may_be_inside else UPDATES[:1])]


def require_update(config: RunConfig) -> None:
    """Refuse an engine that does not have the update that is asked for."""
    engine, update = config.parallel.engine, config.train.update
    if engine == AUTO or update == AUTO or update in (offered := cost_named(engine).updates):
        return
    raise InputError(
        f"the engine {engine} does not update weights {update} backward",
        where="train.update",
        why=f"it has {' and '.join(offered)}",
        do="leave train.update out, or set parallel.engine: auto",
    )


def optimizer_choice(config: RunConfig, chosen: Candidate, candidates: Sequence[Candidate]) -> Choice[str]:
    """Of adamw, named or left out, there is nothing to say."""
    asked, optimizer = config.train.optimizer, chosen.arrangement.optimizer
    if asked == "adamw":
        return Choice(optimizer, "")
    dtype = chosen.arrangement.dtype
    rounded = ", rounded stochastically" if dtype == "bf16" else ""
    what = f"moments in 8 bits by blocks of 256, weights in {dtype} alone{rounded}"
    if asked != AUTO:
        return Choice(optimizer, f"set by you: {what}")
    if optimizer == "adamw":
        fits = "it fits" if chosen.fits else "the smallest there is, and still too large"
        return Choice(optimizer, f"{fits}: weights and moments in fp32")
    needed = _least(one for one in candidates if one.arrangement.optimizer == "adamw")
    return Choice(
        optimizer,
        f"adamw needs {size(needed)} per rank at least, and there are {size(chosen.memory.limit)}: {what}; it rounds by"
        " chance, so losses are close to adamw's, not those to the bit",
    )


def update_choice(config: RunConfig, chosen: Candidate, candidates: Sequence[Candidate]) -> Choice[Update]:
    """Of adamw, named or left out, updated after backward as it always was, there is nothing to say."""
    train, arrangement = config.train, chosen.arrangement
    if arrangement.update == "after":
        if train.optimizer == "adamw":
            return Choice("after", "")
        if train.update != AUTO:
            return Choice("after", "set by you")
        if config.numerics.on_non_finite == "skip":
            return Choice("after", "numerics.on_non_finite: skip needs all gradients before a weight moves")
        if not chosen.fits:
            return Choice("after", "the smallest there is, and still too large")
        return Choice("after", "gradients fit: their norm is known before a weight moves")
    what = "each gradient is freed as soon as its weight has moved"
    if arrangement.accumulation_steps > 1:
        what = f"of the last of {arrangement.accumulation_steps} passes {what}"
        if arrangement.world_size == 1 and arrangement.dtype == "bf16":
            what += "; sums over passes are kept in bf16"
    if train.clip_norm is not None:
        what += "; train.clip_norm goes by the norms of earlier steps"
    if train.update != AUTO:
        return Choice("inside", f"set by you: {what}")
    same = [one for one in candidates if one.arrangement.optimizer == arrangement.optimizer]
    needed = _least(one for one in same if one.arrangement.update == "after")
    return Choice("inside", f"with all gradients at once it takes {size(needed)} per rank at least: {what}")


def _least(candidates: Iterable[Candidate]) -> int:
    return min(candidate.memory.peak.total for candidate in candidates)

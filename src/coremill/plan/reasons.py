"""Why a plan is as it is, in words: of each choice that the search made, and what it had to assume."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import ceil
from typing import Literal

from coremill.config.schema import RunConfig
from coremill.hardware.facts import Calibration, Fleet
from coremill.plan.activations import uses_flash
from coremill.plan.card import ModelCard
from coremill.plan.engine_cost import AutoChoice, cost_of
from coremill.plan.learn import factors_of
from coremill.plan.model_choices import activations_choice, attention_choice
from coremill.plan.pricing import Candidate, price
from coremill.plan.time import DEFAULT_LINK_BITS_PER_SECOND
from coremill.plan.types import Arrangement, Choice, StepCounts
from coremill.plan.words import plural, size


def attention_reason(card: ModelCard, chosen: Candidate, fleet: Fleet) -> Choice[Literal["sdpa", "eager"]]:
    """With what its dropout costs, where that is all that keeps a task's model from the quick kernel."""
    found = attention_choice(card, chosen.arrangement)
    if card.has_vocabulary_head or not card.block.attention_dropout:
        return found
    without = replace(card, block=replace(card.block, attention_dropout=False))
    if not uses_flash(without, chosen.arrangement):
        return found
    quick = price(without, chosen.arrangement, fleet, chosen.memory.limit)
    saved = chosen.memory.steady_step.total - quick.memory.steady_step.total
    slower = chosen.seconds.total / quick.seconds.total
    words = f"{size(saved)} per rank and {100 * (slower - 1):.0f} % of time more than with model.attention_dropout: 0,"
    return Choice(found.value, f"{found.reason}; {words} whose kernel keeps none")


def engine_reason(config: RunConfig, card: ModelCard, chosen: Candidate, candidates: list[Candidate]) -> str:
    arrangement = chosen.arrangement
    if config.parallel.engine != "auto":
        return "set by you"
    if arrangement.world_size == 1:
        return "one rank: nothing to share"
    whole = next(one.arrangement for one in candidates if cost_of(one.arrangement).holds_whole_model)
    plain_seconds = [candidate.seconds.total for candidate in candidates if candidate.fits and candidate.is_plain]
    return cost_of(arrangement).reason(
        AutoChoice(
            arrangement=arrangement,
            step_seconds=chosen.seconds.total,
            limit_bytes=chosen.memory.limit,
            whole_model=cost_of(whole).state(card, whole),
            whole_model_seconds=min(plain_seconds, default=None),
        )
    )


def ranks_reason(
    calibration: Calibration, chosen: Candidate, found: Sequence[Candidate], seconds: Callable[[Candidate], float]
) -> str:
    """Of ranks that share a machine, beside the next best number of them and a quicker one that does not fit."""
    if not chosen.fits:
        return "more ranks take more memory"
    rest, words = [one for one in found if one is not chosen], []
    if fitting := [one for one in rest if one.fits]:
        second = min(fitting, key=seconds)
        words.append(f"{_ranks(second)} would take {_beside(seconds(second), seconds(chosen))}")
        if seconds(second) < seconds(chosen):
            words[-1] += ": not worth their memory and their start"
    if too_large := [one for one in rest if not one.fits and seconds(one) < seconds(chosen)]:
        quickest = min(too_large, key=seconds)
        ranks, memory = quickest.arrangement.ranks_per_node, quickest.memory
        needed, there = size(ranks * memory.peak.total), size(ranks * memory.limit)
        less = _beside(seconds(quickest), seconds(chosen))
        words.append(
            f"{_ranks(quickest)} would take {less}, but need {needed} of memory in all where there are {there}"
        )
    busy = " while others computed" if calibration.taken_while_busy else ""
    return (
        "; ".join(words or ["no other number fits"]) + f" (scaling of a step with threads: {calibration.source}{busy})"
    )


def _ranks(candidate: Candidate) -> str:
    return plural(candidate.arrangement.ranks_per_node, "rank")


def _beside(seconds: float, chosen_seconds: float) -> str:
    share = seconds / chosen_seconds - 1
    if abs(share) < 0.005:
        return "as much time"
    return f"{100 * abs(share):.0f} % {'more' if share > 0 else 'less'} time"


def micro_batch_reason(config: RunConfig, chosen: Candidate, candidates: list[Candidate]) -> str:
    arrangement = chosen.arrangement
    rows, tokens = arrangement.micro_batch_rows, arrangement.tokens_per_forward
    asked = config.train.micro_batch_rows
    if asked != "auto":
        return "set by you" if asked <= rows else f"you set {asked}, but a rank has only {plural(rows, 'row')} per step"
    largest = max(candidate.arrangement.micro_batch_rows for candidate in candidates)
    if rows == largest:
        if arrangement.accumulation_steps == 1:
            return f"all rows a rank has in a step, {tokens} tokens per forward pass"
        return f"{tokens} tokens per forward pass: larger ones bring no speed"
    if not chosen.fits:
        return "the smallest there is, and still too large"
    return f"{tokens} tokens per forward pass: the quickest of those that fit into memory"


def accumulation_reason(config: RunConfig, arrangement: Arrangement, counts: StepCounts) -> str:
    length, rows_per_step = counts.row_tokens, counts.rows
    tokens = rows_per_step * length if counts.rows_differ else config.train.tokens_per_step
    rank_rows = ceil(rows_per_step / arrangement.world_size)
    reason = (
        f"{plural(rows_per_step, 'row')} per step over {plural(arrangement.world_size, 'rank')}:"
        f" {rank_rows} each, {arrangement.micro_batch_rows} at a time"
    )
    left_over = tokens - rows_per_step * length
    if 0 < left_over < length:
        reason += (
            f"; {tokens} tokens are {plural(rows_per_step, 'row')} of {length}, the {left_over} left over are not used"
        )
    if rows_per_step < arrangement.world_size:
        reason += f"; {arrangement.world_size - rows_per_step} ranks have no row and only wait"
    return reason


def checkpointing_reason(config: RunConfig, chosen: Candidate, candidates: list[Candidate]) -> str:
    if config.train.activation_checkpointing != "auto":
        return "set by you"
    if not chosen.arrangement.activation_checkpointing:
        return "not needed: activations fit"
    without = [one.seconds.total for one in candidates if one.fits and not one.arrangement.activation_checkpointing]
    if not without:
        return "only so do activations fit; it costs about a third more arithmetic"
    seconds = f"{chosen.seconds.total:.1f} s per step against {min(without):.1f} s without"
    return f"larger micro-batches with fewer exchanges: {seconds}"


def assumptions(fleet: Fleet, arrangement: Arrangement, card: ModelCard) -> tuple[str, ...]:
    kept = activations_choice(card)
    notes = [f"what layers keep for backward: {kept.reason}"] if kept.value == "estimated" else []
    notes += [f"how far attention reaches: {words}" for words in card.unread]
    learned = factors_of(
        fleet.calibration, engine=arrangement.engine, dtype=arrangement.dtype, optimizer=arrangement.optimizer
    )
    if learned.runs:
        notes.append(f"that it goes as {plural(learned.runs, 'run')} learned from on this machine: {learned.words()}")
    if fleet.calibration.source == "assumed":
        notes.append(f"the rates of the CPU: {fleet.calibration.origin}")
    if fleet.nodes > 1 and fleet.link_bits_per_second is None:
        notes.append(f"the network between machines: {DEFAULT_LINK_BITS_PER_SECOND / 1e9:.0f} Gbit/s")
    elif fleet.nodes > 1 and fleet.calibration.source == "assumed" and fleet.link_bits_per_second is not None:
        notes.append(f"the network: its declared {fleet.link_bits_per_second / 1e9:g} Gbit/s per machine")
    if fleet.calibration.taken_while_busy:
        notes.append("the machine was busy while it was measured: rates may be too low")
    return tuple(notes)

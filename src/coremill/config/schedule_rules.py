"""Rules between keys about how long to train, and at which learning rate; the form is that of rules.py."""

from __future__ import annotations

from coremill.config.rule import Breach, Rule
from coremill.config.schema import RunConfig


def _one_length(config: RunConfig) -> Breach | None:
    """Exactly one of `train.steps` and `train.epochs` says how long to train."""
    train = config.train
    if train.steps is not None and train.epochs is not None:
        return Breach(
            "train.steps",
            "train.steps and train.epochs are both given",
            f"{train.steps} steps and {train.epochs:g} epochs are two answers to how long to train",
            "keep one; --set train.steps=null or --set train.epochs=null takes one back",
            others=("train.epochs",),
        )
    if train.steps is None and train.epochs is None:
        return Breach(
            "train.steps",
            "neither train.steps nor train.epochs is given",
            "without one of them the training has no end",
            "add `steps: 100` or `epochs: 1` to the section train (or --set train.steps=100)",
        )
    return None


def _warmup_ends(config: RunConfig) -> Breach | None:
    """`train.warmup_steps` is below `train.steps`."""
    steps, warmup = config.train.steps, config.train.warmup_steps
    if steps is None or warmup < steps:
        return None
    return Breach(
        "train.warmup_steps",
        f"train.warmup_steps ({warmup}) is not below train.steps ({steps})",
        "the learning rate would never reach its peak",
        f"set train.warmup_steps to at most {steps - 1}, or train for more steps",
        others=("train.steps",),
    )


def _one_warmup(config: RunConfig) -> Breach | None:
    """`train.warmup_steps` and `train.warmup_share` exclude each other."""
    train = config.train
    if train.warmup_share is None or not train.warmup_steps:
        return None
    return Breach(
        "train.warmup_share",
        "train.warmup_share and train.warmup_steps are both given",
        f"{train.warmup_share:g} of the run and {train.warmup_steps} steps are two answers to how long to warm up",
        "keep one; --set train.warmup_share=null or --set train.warmup_steps=0 takes one back",
        others=("train.warmup_steps",),
    )


def _decay_share_is_used(config: RunConfig) -> Breach | None:
    """`train.decay_share` goes with `train.schedule: warmup-stable-decay`."""
    train = config.train
    if train.decay_share is None or train.schedule == "warmup-stable-decay":
        return None
    return Breach(
        "train.decay_share",
        f"train.decay_share is given, but train.schedule is {train.schedule}",
        "linear and cosine decay from the end of the warm-up to the end of the run, constant never does",
        "set train.schedule: warmup-stable-decay, or remove train.decay_share",
        others=("train.schedule",),
    )


def _shares_of_one_run(config: RunConfig) -> Breach | None:
    """`train.warmup_share` and `train.decay_share` are at most 1 together."""
    warmup, decay = config.train.warmup_share, config.train.decay_share
    if warmup is None or decay is None or warmup + decay <= 1:
        return None
    return Breach(
        "train.decay_share",
        f"train.warmup_share ({warmup:g}) and train.decay_share ({decay:g}) are more than the whole run",
        "the learning rate would have to fall before it has risen",
        f"set train.decay_share to at most {1 - warmup:g}",
        others=("train.warmup_share",),
    )


def _minimum_is_reached(config: RunConfig) -> Breach | None:
    """`train.minimum_learning_rate` is not above `train.learning_rate`, and needs a schedule that decays."""
    train, lowest = config.train, config.train.minimum_learning_rate
    if lowest > train.learning_rate:
        return Breach(
            "train.minimum_learning_rate",
            f"train.minimum_learning_rate ({lowest:g}) is above train.learning_rate ({train.learning_rate:g})",
            "train.learning_rate is the peak, from which the rate falls to the minimum",
            "give a lower minimum, or a higher peak",
            others=("train.learning_rate",),
        )
    if lowest and train.schedule == "constant":
        return Breach(
            "train.minimum_learning_rate",
            f"train.minimum_learning_rate is {lowest:g}, but train.schedule is constant",
            "the rate never falls",
            "set train.schedule to linear, cosine or warmup-stable-decay, or remove the minimum",
            others=("train.schedule",),
        )
    return None


SCHEDULE_RULES = (
    Rule(
        (
            "train.steps",
            "train.epochs",
        ),
        _one_length,
    ),
    Rule(
        (
            "train.warmup_steps",
            "train.steps",
        ),
        _warmup_ends,
    ),
    Rule(
        (
            "train.warmup_share",
            "train.warmup_steps",
        ),
        _one_warmup,
    ),
    Rule(
        (
            "train.decay_share",
            "train.schedule",
        ),
        _decay_share_is_used,
    ),
    Rule(
        (
            "train.decay_share",
            "train.warmup_share",
        ),
        _shares_of_one_run,
    ),
    Rule(
        (
            "train.minimum_learning_rate",
            "train.learning_rate",
            "train.schedule",
        ),
        _minimum_is_reached,
    ),
)

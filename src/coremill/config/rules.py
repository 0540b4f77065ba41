"""Rules between keys: each value is fine by itself, together they are not.

One function per rule; the first line of its docstring is its entry in `docs/config.md`. A rule names the keys it reads:
where one of them has a problem of its own, the rule is left out, so that one mistake gives one message.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass

from coremill.config.keys import keys
from coremill.config.schema import BUILT_IN, RunConfig
from coremill.remote_code import pin_problem


@dataclass(frozen=True)
class Breach:
    """A broken rule; `key` is the one to point at first, `others` stand beside it."""

    key: str
    what: str
    why: str
    do: str
    others: tuple[str, ...] = ()


Check = Callable[[RunConfig], Breach | None]
SHARE_TOLERANCE = 0.01  # 0.33 three times is meant as thirds


@dataclass(frozen=True)
class Rule:
    """A check between keys, and the keys it reads."""

    reads: tuple[str, ...]
    check: Check

    @property
    def summary(self) -> str:
        return (self.check.__doc__ or "").strip().splitlines()[0]


RULES: list[Rule] = []


def _rule(*reads: str) -> Callable[[Check], Check]:
    def register(check: Check) -> Check:
        RULES.append(Rule(reads, check))
        return check

    return register


def breaches_of(config: RunConfig, doubtful: Set[str]) -> Iterator[Breach]:
    """All broken rules that read no doubtful key."""
    for rule in RULES:
        assert all(key in keys() for key in rule.reads), rule.reads
        if doubtful.isdisjoint(rule.reads) and (breach := rule.check(config)):
            yield breach


@_rule("train.steps", "train.epochs")
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


@_rule("train.warmup_steps", "train.steps")
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


@_rule("train.warmup_share", "train.warmup_steps")
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


@_rule("train.decay_share", "train.schedule")
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


@_rule("train.decay_share", "train.warmup_share")
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


@_rule("train.minimum_learning_rate", "train.learning_rate", "train.schedule")
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


@_rule("train.tokens_per_step", "data.sequence_length")
def _step_holds_a_row(config: RunConfig) -> Breach | None:
    """`train.tokens_per_step` is at least `data.sequence_length`: a step holds one row or more."""
    tokens, length = config.train.tokens_per_step, config.data.sequence_length
    if tokens >= length:
        return None
    return Breach(
        "train.tokens_per_step",
        f"train.tokens_per_step ({tokens}) is below one row (data.sequence_length is {length})",
        "a step is made of whole rows",
        f"set train.tokens_per_step to {length} or more, or data.sequence_length to {tokens} or less",
        others=("data.sequence_length",),
    )


@_rule("model.config", "model.weights")
def _shape_has_no_weights(config: RunConfig) -> Breach | None:
    """`model.config` goes with `model.weights: random`."""
    if config.model.config is None or config.model.weights == "random":
        return None
    return Breach(
        "model.config",
        f"model.config is given, but model.weights is {config.model.weights}",
        "a config describes a shape; there are no weights to load for it",
        "set model.weights: random to start from scratch, or give model.name instead of model.config",
        others=("model.weights",),
    )


@_rule("model.config", "model.name")
def _one_model(config: RunConfig) -> Breach | None:
    """`model.config` replaces `model.name`: give one of the two."""
    if config.model.config is None or config.model.name == BUILT_IN:
        return None
    return Breach(
        "model.config",
        f"model.config is given together with model.name ({config.model.name})",
        "each of the two describes a whole model",
        "keep one: model.name for an existing model, model.config for a new shape",
        others=("model.name",),
    )


@_rule("model.config")
def _shape_has_a_type(config: RunConfig) -> Breach | None:
    """`model.config` names its `model_type`."""
    shape = config.model.config
    if shape is None or isinstance(shape.get("model_type"), str):
        return None
    return Breach(
        "model.config",
        "model.config has no model_type" if "model_type" not in shape else "model.config.model_type is not text",
        "transformers picks the architecture by it",
        "add for instance `model_type: llama` to model.config",
    )


@_rule("model.config", "tokenizer")
def _shape_has_a_tokenizer(config: RunConfig) -> Breach | None:
    """`model.config` goes with a `tokenizer`."""
    # Also with built-in data: vocab_size has to cover a vocabulary, so the user should say which one.
    if config.model.config is None or config.tokenizer is not None:
        return None
    return Breach(
        "model.config",
        "model.config is given without a tokenizer",
        "a shape made on the spot has no tokenizer of its own",
        "add `tokenizer: built-in`, or a hub id or folder, and a vocab_size that covers it",
    )


@_rule("model.trust_remote_code", "model.name", "model.config", "model.revision", "model.code_sha256")
def _trusted_code_is_pinned(config: RunConfig) -> Breach | None:
    """`model.trust_remote_code` goes with a commit as `model.revision` (hub) or with `model.code_sha256` (folder)."""
    model = config.model
    if not model.trust_remote_code:
        return None
    if model.config is not None or model.name == BUILT_IN:
        return Breach(
            "model.trust_remote_code",
            "model.trust_remote_code is true, but no model with code of its own is named",
            "the built-in model and those made of model.config come without code",
            "remove model.trust_remote_code",
        )
    problem = pin_problem(model.name, model.revision, model.code_sha256)
    if problem is None:
        return None
    others = () if problem.key == "model.trust_remote_code" else ("model.trust_remote_code",)
    return Breach(problem.key, problem.what, problem.why, problem.do, others=others)


@_rule("data.source", "data.sources")
def _one_or_several_sources(config: RunConfig) -> Breach | None:
    """`data.sources` replaces `data.source`: give one of the two."""
    data = config.data
    if data.sources is None or data.source == BUILT_IN:
        return None
    return Breach(
        "data.sources",
        f"data.sources is given together with data.source ({data.source})",
        "each of the two says what to train on",
        f"keep one; to mix it in, make it an entry of data.sources: {{source: {data.source}, share: ...}}",
        others=("data.source",),
    )


@_rule("data.sources")
def _shares_are_whole(config: RunConfig) -> Breach | None:
    """The shares of `data.sources` add up to 1 (to 0.01), or none is given."""
    sources = config.data.sources or []
    shares = [entry.share for entry in sources if entry.share is not None]
    if not shares:
        return None
    if len(shares) < len(sources):
        missing = next(index for index, entry in enumerate(sources) if entry.share is None)
        left = 1 - math.fsum(shares)
        return Breach(
            f"data.sources[{missing}]",
            f"data.sources[{missing}] ({sources[missing].source}) has no share, and others have one",
            "without shares the sizes of the sources decide; with them each needs its own",
            f"add share: {left:.4g} to it"
            if left > 0 and len(sources) - len(shares) == 1
            else "give all a share, or none",
        )
    total = math.fsum(shares)
    if round(abs(total - 1), 6) <= SHARE_TOLERANCE:
        return None
    scaled = ", ".join(f"{share / total:.4g}" for share in shares)
    return Breach(
        "data.sources",
        f"the shares of data.sources add up to {total:.4g}, not to 1",
        " + ".join(f"{share:g}" for share in shares) + f" = {total:.4g}; a share is a part of the whole",
        f"in the same proportion they are {scaled}",
    )


@_rule("data.sources", "data.column", "data.split")
def _each_source_once(config: RunConfig) -> Breach | None:
    """No source stands twice in `data.sources`, unless with another column or split."""
    seen: dict[tuple[str, str, str], int] = {}
    for index, entry in enumerate(config.data.sources or []):
        same = (entry.source, entry.column or config.data.column, entry.split or config.data.split)
        if same in seen:
            return Breach(
                f"data.sources[{index}]",
                f"data.sources has {entry.source} twice",
                f"it is data.sources[{seen[same]}] and data.sources[{index}]: its share would be in doubt",
                "keep one, with the share of both; one column or split of it is a source of its own",
            )
        seen[same] = index
    return None


@_rule("data.sources")
def _splits_of_listed_datasets(config: RunConfig) -> Breach | None:
    """A `split` in `data.sources` goes with an `hf://` source."""
    for index, entry in enumerate(config.data.sources or []):
        if entry.split is not None and not _is_dataset(entry.source):
            return Breach(
                f"data.sources[{index}]",
                f"data.sources[{index}] has a split, but {entry.source} is not an hf:// dataset",
                "files have no splits",
                "remove it, and name the files to train on in source",
            )
    return None


@_rule("data.split", "data.source", "data.sources")
def _split_of_a_dataset(config: RunConfig) -> Breach | None:
    """`data.split` other than `train` goes with an `hf://` source."""
    data = config.data
    named = [data.source] if data.sources is None else [entry.source for entry in data.sources]
    if data.split == "train" or any(_is_dataset(source) for source in named):
        return None
    return Breach(
        "data.split",
        f"data.split is {data.split}, but "
        + (f"data.source ({data.source}) is not an hf:// dataset" if data.sources is None else "no source is one"),
        "files have no splits",
        "remove data.split, and name the files to train on in data.source",
        others=("data.source",),
    )


@_rule("data.evaluation_split", "data.evaluation_source", "data.source", "data.sources")
def _evaluation_split_of_a_dataset(config: RunConfig) -> Breach | None:
    """`data.evaluation_split` goes with an `hf://` source."""
    data = config.data
    key = "data.source" if data.evaluation_source is None else "data.evaluation_source"
    source = data.evaluation_source or data.source
    if data.evaluation_split is None:
        return None
    if data.sources is not None and data.evaluation_source is None:
        return Breach(
            "data.evaluation_split",
            "data.evaluation_split is given together with data.sources",
            "it does not say of which of the sources",
            "name the dataset in data.evaluation_source too, or set data.evaluation_fraction: 0.05",
            others=("data.sources",),
        )
    if _is_dataset(source):
        return None
    return Breach(
        "data.evaluation_split",
        f"data.evaluation_split is given, but {key} ({source}) is not an hf:// dataset",
        "only a dataset has named splits",
        "name other files in data.evaluation_source, or set data.evaluation_fraction: 0.05",
        others=(key,),
    )


@_rule("data.evaluation_fraction", "data.evaluation_source", "data.evaluation_split")
def _one_evaluation_set(config: RunConfig) -> Breach | None:
    """`data.evaluation_fraction` excludes `data.evaluation_source` and `data.evaluation_split`."""
    data = config.data
    candidates = (("data.evaluation_source", data.evaluation_source), ("data.evaluation_split", data.evaluation_split))
    named = [key for key, value in candidates if value is not None]
    if not named or data.evaluation_fraction == 0:
        return None
    return Breach(
        "data.evaluation_fraction",
        f"data.evaluation_fraction is given together with {' and '.join(named)}",
        "evaluation rows are either named or cut off the training rows, not both",
        "keep one of them",
        others=tuple(named),
    )


@_rule("evaluation.every_steps", "data.evaluation_fraction", "data.evaluation_source", "data.evaluation_split")
def _something_to_evaluate_on(config: RunConfig) -> Breach | None:
    """`evaluation.every_steps` needs rows to evaluate on."""
    data = config.data
    rows_come_from = data.evaluation_fraction or data.evaluation_source or data.evaluation_split
    if config.evaluation.every_steps is None or rows_come_from:
        return None
    return Breach(
        "evaluation.every_steps",
        "evaluation.every_steps is given, but there is nothing to evaluate on",
        "no evaluation source, split or fraction is named in the section data",
        "set data.evaluation_fraction: 0.05, data.evaluation_source or data.evaluation_split",
    )


def _is_dataset(source: str) -> bool:
    return source.startswith("hf://")

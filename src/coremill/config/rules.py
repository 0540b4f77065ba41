"""Rules between keys: each value is fine by itself, together they are not.

One function per rule; the first line of its docstring is its entry in `docs/config.md`. A rule names the keys it reads:
where one of them has a problem of its own, the rule is left out, so that one mistake gives one message.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Set

from coremill.config.chat_rules import CHAT_RULES
from coremill.config.keys import keys
from coremill.config.kubernetes_rules import KUBERNETES_RULES
from coremill.config.metrics_rules import METRICS_RULES
from coremill.config.rule import Breach, Check, Rule
from coremill.config.schedule_rules import SCHEDULE_RULES
from coremill.config.schema import BUILT_IN, RunConfig
from coremill.config.task_rules import ENCODERS, TASK_RULES
from coremill.remote_code import pin_problem

SHARE_TOLERANCE = 0.01  # 0.33 three times is meant as thirds

RULES: list[Rule] = [*SCHEDULE_RULES, *CHAT_RULES, *TASK_RULES, *KUBERNETES_RULES, *METRICS_RULES]


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


@_rule("task", "train.tokens_per_step", "data.sequence_length")
def _step_holds_a_row(config: RunConfig) -> Breach | None:
    """`train.tokens_per_step` is at least `data.sequence_length`: a step holds one row or more."""
    tokens, length = config.train.tokens_per_step, config.data.sequence_length
    if tokens >= length or config.task in ENCODERS:
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


@_rule("evaluation.keep_best", "evaluation.stop_after", "evaluation.every_steps")
def _evaluations_to_compare(config: RunConfig) -> Breach | None:
    """`evaluation.keep_best` and `evaluation.stop_after` need `evaluation.every_steps`."""
    evaluation = config.evaluation
    named = {"evaluation.keep_best": evaluation.keep_best, "evaluation.stop_after": evaluation.stop_after}
    given = [key for key, value in named.items() if value not in (False, None)]
    if not given or evaluation.every_steps is not None:
        return None
    return Breach(
        given[0],
        f"{' and '.join(given)} {'is' if len(given) == 1 else 'are'} given, but only the last step is evaluated",
        "without evaluations on the way there is nothing to compare it with",
        "set evaluation.every_steps: 100, and data.evaluation_fraction: 0.05 or what else is to be evaluated on",
        others=tuple(given[1:]),
    )


def _is_dataset(source: str) -> bool:
    return source.startswith("hf://")


@_rule("lora.rank", "lora.alpha", "lora.dropout", "lora.target_modules", "lora.modules_to_save", "lora.start_from")
def _adapters_have_a_rank(config: RunConfig) -> Breach | None:
    """Keys of `lora` go with `lora.rank`."""
    lora = config.lora
    named = [name for name, value in lora.model_dump().items() if value not in (None, 0.0, [], False)]
    if lora.rank is not None or not named:
        return None
    return Breach(
        f"lora.{named[0]}",
        f"lora.{named[0]} is given without lora.rank",
        "without a rank there are no adapters: all weights are trained",
        "add lora.rank: 16, or remove the section lora",
    )


@_rule("lora.rank", "train.freeze")
def _adapters_freeze_the_rest(config: RunConfig) -> Breach | None:
    """`train.freeze` goes without `lora.rank`: beside adapters the whole model is frozen."""
    if config.lora.rank is None or not config.train.freeze:
        return None
    return Breach(
        "train.freeze",
        "train.freeze is given together with lora.rank",
        "beside adapters nothing of the model is trained but lora.modules_to_save",
        "remove train.freeze; lora.target_modules says where adapters are",
        others=("lora.rank",),
    )


@_rule("train.update", "numerics.on_non_finite")
def _steps_that_can_be_left_out(config: RunConfig) -> Breach | None:
    """`train.update: inside` goes with `numerics.on_non_finite: stop`."""
    if config.train.update != "inside" or config.numerics.on_non_finite == "stop":
        return None
    return Breach(
        "train.update",
        f"train.update is inside, but numerics.on_non_finite is {config.numerics.on_non_finite}",
        "inside backward weights have moved before the last gradient is there: such a step cannot be left out",
        "set numerics.on_non_finite: stop, or train.update: after",
        others=("numerics.on_non_finite",),
    )

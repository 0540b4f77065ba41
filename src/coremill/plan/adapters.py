"""Which linear maps of a model get adapters, which modules are trained whole, and how many numbers that is. Pure.

By what a model consists of, no list of model names: every linear map inside the layers, unless `lora.target_modules`
says otherwise. Launcher and ranks match here, so that all of them mean the same modules.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from coremill.config.schema import LoraSection
from coremill.config.translate_adapters import ALL_LINEAR
from coremill.errors import InputError
from coremill.plan.allocator import hole_bytes_of
from coremill.plan.card import AdapterParameters, FrozenParameters, ModelCard
from coremill.plan.tensor_names import role_of
from coremill.plan.trained import NamedParameter, with_frozen
from coremill.plan.words import plural

SHOWN_NAMES = 3
ALPHA_PER_RANK = 2.0  # where lora.alpha is left out


@dataclass(frozen=True)
class Adapted:
    """What is trained beside a frozen model."""

    rank: int
    targets: tuple[tuple[str, tuple[int, ...]], ...]  # linear maps: the names of their modules, shapes of their weights
    whole: tuple[NamedParameter, ...]  # of lora.modules_to_save, and the head of a task that has its own
    reason: str
    has_dropout: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.targets)

    @property
    def adapter_parameters(self) -> int:
        return sum(self.rank * sum(shape) for _, shape in self.targets)

    @property
    def whole_parameters(self) -> int:
        return sum(parameter.numel for parameter in self.whole)

    @property
    def trained_parameters(self) -> int:
        return self.adapter_parameters + self.whole_parameters


def alpha_of(lora: LoraSection) -> float:
    assert lora.rank is not None
    return ALPHA_PER_RANK * lora.rank if lora.alpha is None else lora.alpha


def adapted_by(parameters: Sequence[NamedParameter], lora: LoraSection) -> Adapted:
    """What the section means in this model; a name that means nothing in it is refused."""
    assert lora.rank is not None
    whole = _whole_modules(parameters, lora.modules_to_save)
    whole = [each for each in parameters if each.in_head or each in whole]
    linear = {
        _module(name): parameter
        for parameter in parameters
        if parameter.is_linear
        for name in parameter.names
        if role_of(name) != "embedding"  # whose table a tied head has
    }
    free = {name: parameter for name, parameter in linear.items() if parameter not in whole}
    if lora.target_modules is None:
        targets = {name: parameter for name, parameter in free.items() if role_of(f"{name}.weight").isdigit()}
        reason = f"all {plural(len(targets), 'linear map')} of the layers"
        if not targets:
            raise InputError(
                "the model's layers have no linear maps that could get adapters",
                where="lora.rank",
                why="their weights are of another kind",
                do="leave the section lora out: all weights are trained then",
            )
    else:
        targets = _named(free, linear, lora.target_modules)
        reason = f"{plural(len(targets), 'linear map')} named by lora.target_modules"
    shapes = tuple((name, parameter.shape) for name, parameter in targets.items())
    return Adapted(lora.rank, shapes, tuple(whole), reason, has_dropout=lora.dropout > 0)


def with_adapters(card: ModelCard, parameters: Sequence[NamedParameter], adapted: Adapted) -> ModelCard:
    """The card of a run that trains these beside the model."""
    card = with_frozen(card, [each for each in parameters if each not in adapted.whole])
    layers, rest = [0] * card.layers, 0
    for name, shape in adapted.targets:
        role = role_of(f"{name}.weight")
        if role.isdigit() and int(role) < card.layers:
            layers[int(role)] += adapted.rank * sum(shape)
        else:
            rest += adapted.rank * sum(shape)
    turned = _has_turned_weights(card, parameters)
    inputs, outputs = (sum(shape[axis] for _, shape in adapted.targets) for axis in ((0, 1) if turned else (1, 0)))
    beside = AdapterParameters(
        rank=adapted.rank,
        layers=tuple(layers),
        rest=rest,
        inputs=inputs,
        outputs=outputs,
        maps=len(adapted.targets),
        hole_bytes=hole_bytes_of(each.numel for each in parameters if len(each.shape) > 1),
        has_dropout=adapted.has_dropout,
    )
    card = replace(card, adapters=beside)
    return replace(card, adapters=replace(beside, unkept=_unkept(card, parameters, adapted)))


def _unkept(card: ModelCard, parameters: Sequence[NamedParameter], adapted: Adapted) -> int:
    """Numbers of a token that full training keeps and this does not, over all layers that backward comes to: inputs of
    maps without a gradient.

    Maps of one module (attention, an MLP) read the same, but the last one, which reads what the module made of it; and
    attention keeps its own result anyway, if not a copy of it. Of families that are not known, and of experts, nothing
    is taken off."""
    if card.estimated_numbers is not None:
        return 0
    reading = {name for each in adapted.whole for name in map(_module, each.names)}
    reading |= set() if adapted.has_dropout else set(adapted.names)  # a copy of what they read is kept instead
    feeds: dict[str, list[bool]] = {}  # by layer: whether what goes into each of its modules is kept
    unkept = 0
    modules = _maps_by_module(parameters)
    if not card.is_causal:
        modules = _maps_by_kind(card, modules)
    for (layer, _), maps in modules.items():
        if int(layer) < card.layers_below_backward:
            continue
        is_mlp = _is_mlp(card, maps)
        last = next((name for name, shape in reversed(maps) if is_mlp or shape[0] == card.hidden), None)
        feeds.setdefault(layer, []).append(any(name in reading for name, _ in maps if name != last))
        if last is None or last in reading:
            continue
        if is_mlp and card.block.mlp_tensors_kept > 1 and not card.experts:
            unkept += card.intermediate
        if not is_mlp and card.block.copies_attention_output:
            unkept += card.heads * card.head_dim
    for kept in feeds.values():
        has_one_feed = card.block.norms_into_matmul < len(kept)
        left_out = (not any(kept)) * 1 if has_one_feed else kept.count(False)
        unkept += left_out * card.hidden
    return unkept


_Maps = list[tuple[str, tuple[int, ...]]]  # names and shapes of linear maps


def _maps_by_module(parameters: Sequence[NamedParameter]) -> dict[tuple[str, str], _Maps]:
    """The linear maps of the layers, by layer and by the module that they are in."""
    modules: dict[tuple[str, str], _Maps] = {}
    for each in parameters:
        role = role_of(each.names[0])
        if each.is_linear and role.isdigit():
            name = _module(each.names[0])
            modules.setdefault((role, _module(name)), []).append((name, each.shape))
    return modules


def _maps_by_kind(card: ModelCard, modules: dict[tuple[str, str], _Maps]) -> dict[tuple[str, str], _Maps]:
    """The same where families of encoders cut attention and MLP into modules of one map each (BERT)."""
    kinds: dict[tuple[str, str], _Maps] = {}
    for (layer, _), maps in modules.items():
        for each in maps:
            kinds.setdefault((layer, "mlp" if _is_mlp(card, [each]) else "attention"), []).append(each)
    return kinds


def _is_mlp(card: ModelCard, maps: _Maps) -> bool:
    return any(card.intermediate in shape or 2 * card.intermediate in shape for _, shape in maps)


def _has_turned_weights(card: ModelCard, parameters: Sequence[NamedParameter]) -> bool:
    """Whether weights are (inputs, outputs), as GPT-2's: the first of an MLP reads the hidden state."""
    first = next((maps[0][1] for maps in _maps_by_module(parameters).values() if _is_mlp(card, maps)), None)
    return first is not None and first[0] == card.hidden != first[1]


def with_usual_adapters(card: ModelCard, rank: int) -> ModelCard:
    """About the card of a run with adapters beside all linear maps of the layers, by what the model's card says alone:
    near enough to tell whether it would fit."""
    width, kv_width = card.heads * card.head_dim, card.kv_heads * card.head_dim
    ends = [(card.hidden, width), (card.hidden, kv_width), (card.hidden, kv_width), (width, card.hidden)]
    if not card.experts:
        ups = 1 if card.block.norm == "layer" else 2
        ends += [(card.hidden, card.intermediate)] * ups + [(card.intermediate, card.hidden)]
    inputs, outputs = (card.layers * sum(each[side] for each in ends) for side in (0, 1))
    tables = [card.vocabulary_rows * card.lookup_width] * (2 if card.has_vocabulary_head and not card.tied else 1)
    of_a_layer = rank * (inputs + outputs) // max(1, card.layers)
    frozen = FrozenParameters(
        embedding=card.embedding_parameters,
        head=card.head_parameters,
        layers=card.layer_parameters,
        rest=card.rest_parameters,
        matmul=card.matmul_parameters,
    )
    beside = AdapterParameters(
        rank=rank,
        layers=(of_a_layer,) * card.layers,
        rest=0,
        inputs=inputs,
        outputs=outputs,
        maps=card.layers * len(ends),
        hole_bytes=hole_bytes_of([*(into * out for into, out in ends * card.layers), *tables]),
    )
    return replace(card, frozen=frozen, adapters=beside)


def words_of_adapters(adapted: Adapted, lora: LoraSection) -> str:
    """What is trained, for people."""
    words = f"{adapted.trained_parameters:,} parameters are trained: rank {lora.rank} beside {adapted.reason}"
    if adapted.whole:
        named = [*lora.modules_to_save, *(["the head"] if any(each.in_head for each in adapted.whole) else [])]
        words += f", and {adapted.whole_parameters:,} of {', '.join(named)} whole"
    return f"{words}; the model itself stays as it is"


def words_of_wide_adapters(card: ModelCard) -> str | None:
    """A warning where adapters are no narrower than the model; None where they are."""
    if card.adapters is None or card.adapters.rank <= card.hidden:
        return None
    return (
        f"warning: lora.rank {card.adapters.rank:,} exceeds the model's width of {card.hidden:,}: such adapters hold"
        " more numbers than the weights beside them and can do no more; 8 to 64 is usual"
    )


def means(pattern: str, module: str) -> bool:
    """Whether a name of the run file means this module: its whole name, the end of it, or a pattern of it."""
    return module == pattern or module.endswith(f".{pattern}") or fnmatchcase(module, pattern)


def names_for_peft(targets: Sequence[str], modules: Sequence[str]) -> list[str]:
    """The same choice in peft's words, which are ends of names: short ones where they mean no other module."""
    ends = sorted({name.rpartition(".")[2] for name in targets})
    meant = {name for name in modules if name.rpartition(".")[2] in ends}
    return ends if meant == set(targets) else sorted(targets)


def modules_of(parameters: Sequence[NamedParameter]) -> list[str]:
    """Those that have parameters of their own."""
    return list(dict.fromkeys(_module(name) for parameter in parameters for name in parameter.names))


def _module(parameter_name: str) -> str:
    return parameter_name.rpartition(".")[0]


def _named(
    free: dict[str, NamedParameter], linear: dict[str, NamedParameter], patterns: Sequence[str]
) -> dict[str, NamedParameter]:
    for pattern in patterns:
        if not any(means(pattern, name) for name in free):
            raise _means_nothing("lora.target_modules", pattern, list(linear), "linear maps")
    targets = {name: parameter for name, parameter in free.items() if any(means(each, name) for each in patterns)}
    for name, parameter in targets.items():
        if len(parameter.names) > 1:
            raise InputError(
                f"lora.target_modules: {name} shares its weight with the embedding",
                where="lora.target_modules",
                why="an adapter of one of the two could not be merged: the other would change with it",
                do=f"leave it out, or train the weight whole: lora.modules_to_save: [{name.rpartition('.')[2]}]",
            )
    return targets


def _whole_modules(parameters: Sequence[NamedParameter], patterns: Sequence[str]) -> list[NamedParameter]:
    """Every parameter in a module of these names."""

    def modules_around(name: str) -> list[str]:
        parts = name.split(".")[:-1]
        return [".".join(parts[: end + 1]) for end in range(len(parts))]

    around = {id(each): [module for name in each.names for module in modules_around(name)] for each in parameters}
    for pattern in patterns:
        if not any(means(pattern, module) for modules in around.values() for module in modules):
            names = list(dict.fromkeys(module for modules in around.values() for module in modules))
            raise _means_nothing("lora.modules_to_save", pattern, names, "modules")
    return [
        each
        for each in parameters
        if any(means(pattern, module) for pattern in patterns for module in around[id(each)])
    ]


def _means_nothing(key: str, pattern: str, names: Sequence[str], what: str) -> InputError:
    ends = [end for end in dict.fromkeys(name.rpartition(".")[2] for name in names) if not end.isdigit()]
    near = difflib.get_close_matches(pattern.rpartition(".")[2], ends, n=SHOWN_NAMES, cutoff=0.5)
    if pattern in ALL_LINEAR:
        do = f"leave {key} out: every linear map of the layers gets an adapter then"
    else:
        do = f"did you mean {' or '.join(near)}?" if near else "take names from there"
    return InputError(
        f"{key}: {pattern} means none of the model's {len(names)} {what}",
        where=key,
        why=f"they end in {', '.join(ends[:12])}{' and others' if len(ends) > 12 else ''}",
        do=do,
    )

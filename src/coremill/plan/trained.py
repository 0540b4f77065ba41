"""Which parameters a run trains: `train.freeze` and `train.no_decay` against the names of a model's parameters. Pure.

Names are those of the module in transformers (`model.named_parameters()`), of a tied weight all of them. Launcher,
ranks and optimizer match here, so that all of them mean the same parameters.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from math import prod

from coremill.errors import InputError
from coremill.plan.card import FrozenParameters, ModelCard, active_parameters
from coremill.plan.shape import Tensor
from coremill.plan.tensor_names import role_of
from coremill.plan.words import plural

SHOWN_NAMES = 3


@dataclass(frozen=True)
class NamedParameter:
    """One parameter of a module."""

    names: tuple[str, ...]  # several where it is tied
    shape: tuple[int, ...]
    is_linear: bool = False  # the weight of a linear map
    in_head: bool = False  # behind a trunk, where no words are predicted, or new with it: always trained

    @property
    def numel(self) -> int:
        return prod(self.shape)


def is_named(names: Sequence[str], patterns: Sequence[str]) -> bool:
    """Whether one of a parameter's names matches one of the patterns; upper and lower case differ."""
    return any(fnmatchcase(name, pattern) for name in names for pattern in patterns)


def named_by(parameters: Sequence[NamedParameter], patterns: Sequence[str], *, key: str) -> list[NamedParameter]:
    """Those that the patterns of this key mean; a pattern that means none of them is refused."""
    for pattern in patterns:
        if not any(is_named(parameter.names, [pattern]) for parameter in parameters):
            raise _matches_nothing(parameters, pattern, key)
    return [parameter for parameter in parameters if is_named(parameter.names, patterns)]


def frozen_by(parameters: Sequence[NamedParameter], patterns: Sequence[str]) -> list[NamedParameter]:
    """What `train.freeze` leaves untrained; something has to be left to train, and a task's own head always is."""
    for pattern in patterns:
        named = named_by(parameters, [pattern], key="train.freeze")
        if named and all(parameter.in_head for parameter in named):
            raise InputError(
                f"train.freeze: {pattern} names the head alone, which is always trained",
                where="train.freeze",
                why=f"{named[0].names[0]} is what the task learns, or new with it",
                do="remove it; ['*'] freezes all but the head",
            )
    frozen = [each for each in named_by(parameters, patterns, key="train.freeze") if not each.in_head]
    if len(frozen) == len(parameters):
        raise InputError(
            f"train.freeze leaves nothing to train: it names all {plural(len(parameters), 'parameter')} of the model",
            where="train.freeze",
            do="freeze less; coremill plan says how many parameters are trained",
        )
    return frozen


def words_of_frozen(parameters: Sequence[NamedParameter], frozen: Sequence[NamedParameter]) -> str:
    """How much is trained, and which frozen ones go by several names."""
    total, left_out = (sum(parameter.numel for parameter in each) for each in (parameters, frozen))
    words = f"train.freeze: {total - left_out:,} of {total:,} parameters are trained, {left_out:,} are frozen"
    tied = [" = ".join(parameter.names) for parameter in frozen if len(parameter.names) > 1]
    return words + (f"; one weight under several names is frozen as a whole: {', '.join(tied)}" if tied else "")


def with_frozen(card: ModelCard, frozen: Sequence[NamedParameter]) -> ModelCard:
    """The card of a run that does not train these."""
    if not frozen:
        return card
    counts = {"embedding": 0, "positions": 0, "head": 0, "rest": 0}
    layers, matmul = [0] * card.layers, 0
    for parameter in frozen:
        roles = {role_of(name) for name in parameter.names}
        role = "embedding" if "embedding" in roles else role_of(parameter.names[0])
        if role.isdigit() and int(role) < card.layers:
            layers[int(role)] += parameter.numel
            is_expert = len(parameter.shape) == 3 and parameter.shape[0] == card.experts
            if len(parameter.shape) > 1:
                matmul += active_parameters(Tensor(role, parameter.shape, is_expert), card)
        else:
            counts[role if role in counts else "rest"] += parameter.numel
        is_head = role == "head" or (role == "embedding" and card.tied)
        if is_head and len(parameter.shape) > 1:
            matmul += card.head_matmul_parameters
    return replace(
        card,
        frozen=FrozenParameters(
            embedding=counts["embedding"] + counts["positions"],
            head=counts["head"],
            layers=tuple(layers),
            rest=counts["rest"],
            matmul=matmul,
        ),
    )


def _matches_nothing(parameters: Sequence[NamedParameter], pattern: str, key: str) -> InputError:
    names = [name for parameter in parameters for name in parameter.names]
    near = difflib.get_close_matches(pattern, names, n=SHOWN_NAMES, cutoff=0.5) or names[:SHOWN_NAMES]
    meant = _meant(names, pattern)
    return InputError(
        f"{key}: {pattern} matches none of the model's {plural(len(parameters), 'parameter')}",
        where=key,
        why=f"names are those that transformers gives them, such as {', '.join(near)}; a pattern is held against the"
        " whole name",
        do=f"did you mean {meant}?" if meant else "take a name from there; * stands for any text",
    )


def _meant(names: Sequence[str], pattern: str) -> str | None:
    """A pattern that does match: what is inside of a module, or of one that is spelt alike."""
    for wider in (f"{pattern}.*", f"*{pattern.strip('*')}*"):
        if any(fnmatchcase(name, wider) for name in names):
            return wider
    parts = [name.split(".") for name in names]
    modules = dict.fromkeys(".".join(each[:length]) for each in parts for length in range(1, len(each)))
    close = difflib.get_close_matches(pattern.rstrip("*."), modules, n=1, cutoff=0.8)
    return f"{close[0]}.*" if close else None

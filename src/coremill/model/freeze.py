"""Parameters that a run does not train: frozen before an engine places the model, which then gives them no gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from coremill.model.parameter_list import named_parameters
from coremill.plan.trained import frozen_by, words_of_frozen
from coremill.plan.types import Choice

if TYPE_CHECKING:
    from torch import nn


def freeze(model: nn.Module, patterns: Sequence[str]) -> dict[str, Choice[int]]:
    """Freeze what the patterns of `train.freeze` name; how many parameters are trained, where some are not."""
    if not patterns:
        return {}
    parameters = named_parameters(model)
    frozen = frozen_by(parameters, patterns)
    for parameter in frozen:
        model.get_parameter(parameter.names[0]).requires_grad_(False)
    trained = sum(each.numel for each in parameters) - sum(each.numel for each in frozen)
    return {"trained parameters": Choice(trained, words_of_frozen(parameters, frozen))}

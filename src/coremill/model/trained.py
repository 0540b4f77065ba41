"""What of a model a run trains: all, all but `train.freeze`, or adapters beside it; before an engine places it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from coremill.config.schema import RunConfig
from coremill.model.parameter_list import named_parameters
from coremill.plan.trained import frozen_by, words_of_frozen
from coremill.plan.types import Choice

if TYPE_CHECKING:
    from torch import nn


def choose_trained(model: nn.Module, config: RunConfig) -> dict[str, Choice[Any]]:
    """Freeze what is not trained: it gets no gradient; what is, where that is not all, and why."""
    if config.lora.rank is None:
        return freeze(model, config.train.freeze)
    from coremill.model.lora import add_adapters

    return add_adapters(model, config.lora)


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

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
    from transformers import PreTrainedModel

    from coremill.model.source import ModelFolder


def choose_trained(model: PreTrainedModel, config: RunConfig, source: ModelFolder) -> dict[str, Choice[Any]]:
    """Freeze what is not trained: it gets no gradient; what is, where that is not all, and why."""
    if config.lora.rank is None and not config.train.freeze:
        return {}
    from coremill.model.poolers import drawn_poolers

    drawn = drawn_poolers(model, source)
    if config.lora.rank is None:
        return freeze(model, config.train.freeze, drawn)
    from coremill.model.lora import add_adapters

    return add_adapters(model, config.lora, drawn)


def freeze(model: nn.Module, patterns: Sequence[str], drawn: tuple[str, ...] = ()) -> dict[str, Choice[int]]:
    """Freeze what the patterns of `train.freeze` name; how many parameters are trained, where some are not. What begins
    with `drawn` is new and counts as head."""
    if not patterns:
        return {}
    parameters = named_parameters(model, drawn)
    frozen = frozen_by(parameters, patterns)
    for parameter in frozen:
        model.get_parameter(parameter.names[0]).requires_grad_(False)
    trained = sum(each.numel for each in parameters) - sum(each.numel for each in frozen)
    return {"trained parameters": Choice(trained, words_of_frozen(parameters, frozen))}

"""In which order backward is through with a model's parameters: gradients leave in it, the same on every rank."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from torch import nn

from coremill.model.build import find_layers


@dataclass(frozen=True)
class LeavingGroup:
    """Parameters whose gradients are made one after the other."""

    parameters: list[nn.Parameter]
    is_layer: bool


def in_leaving_order(model: nn.Module) -> list[LeavingGroup]:
    """The head, the layers from the last to the first, the rest, the lookup; tied weights are the lookup's."""
    parts = find_layers(model)
    seen: set[nn.Parameter] = set()

    def group(module: nn.Module, *, is_layer: bool = False) -> LeavingGroup:
        fresh = [parameter for parameter in module.parameters() if parameter not in seen]
        if is_layer:
            fresh = [parameter for parameter in fresh if uses[parameter] == 1]
        seen.update(fresh)
        return LeavingGroup(fresh, is_layer)

    # What layers share belongs to none: Zamba 2 uses one part of it in this layer, another part in that.
    uses = Counter(parameter for layer in parts.layers for parameter in layer.parameters())
    layers = [group(layer, is_layer=True) for layer in parts.layers]
    lookup, head = group(parts.embedding), group(parts.head)
    # Of the rest, a final norm's gradient is made early, that of learned positions last.
    ordered = [head, *reversed(layers), group(model), lookup]
    return [each for each in ordered if each.parameters]

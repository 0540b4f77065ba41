"""Parts of a trunk that a model's files lack, and that may be new: poolers.

A model that was trained to fill in words has none, and a classifier begins with a new one. As a head it is trained
whole, whatever else is frozen: frozen, it would stay what chance made of it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

from coremill.model.build import find_layers
from coremill.model.names import map_names
from coremill.model.source import ModelFolder
from coremill.plan.headers import read_headers

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def poolers_not_stored(blueprint: PreTrainedModel, stored: Iterable[str]) -> tuple[str, ...]:
    """What the names begin with of poolers that files with these tensors lack; none where words are predicted."""
    if blueprint.get_output_embeddings() is not None:
        return ()
    found = map_names(blueprint, stored)
    there = {*found.renamed, *found.conversions}
    return whole_poolers([name for name, _ in blueprint.named_parameters() if name not in there], blueprint)


def drawn_poolers(blueprint: PreTrainedModel, source: ModelFolder) -> tuple[str, ...]:
    """The same of a model's folder; none where all weights are drawn."""
    if source.weights != "pretrained" or blueprint.get_output_embeddings() is not None:
        return ()
    return poolers_not_stored(blueprint, read_headers(source.folder))


def whole_poolers(missing: Collection[str], blueprint: PreTrainedModel) -> tuple[str, ...]:
    """Parts of the trunk beside embedding and layers of which the files have nothing: what their names begin with."""
    trunk, prefix = blueprint.base_model, blueprint.base_model_prefix
    if trunk is blueprint:
        return ()
    needed = {id(part) for part in (find_layers(blueprint).layers[0], blueprint.get_input_embeddings())}
    lacking, found = set(missing), []
    for name, child in trunk.named_children():
        own = {f"{prefix}.{name}.{inner}" for inner, _ in child.named_parameters()}
        if own and own <= lacking and needed.isdisjoint(id(module) for module in child.modules()):
            found.append(f"{prefix}.{name}.")
    return tuple(found)

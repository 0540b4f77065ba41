"""From the names in files to the names in the module, by transformers' own conversion mapping.

Names in files differ from module names: a base model's prefix, GPT-NeoX's head, legacy names, experts that the module
keeps merged. Most differences are a renaming: then a rank reads its rows by byte range. The rest (merged, split,
transposed tensors) go through transformers' converters, which need their sources whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from coremill.model.slices import named_tensors

# Buffers that old files hold where models have long moved them or stopped saving them.
OLD_BUFFERS = {"rotary_emb.inv_freq": r"rotary_emb\.inv_freq", "position_ids": r"(^|\.)position_ids$"}


@dataclass
class Conversion:
    """File tensors that become parameters by more than a new name."""

    converter: Any
    sources: list[tuple[str, str]] = field(default_factory=list)  # name in the file, converter's pattern it matched


@dataclass(frozen=True)
class NameMap:
    """Where every tensor of the files goes."""

    renamed: dict[str, str]  # name in the module -> name in the file
    conversions: dict[str, Conversion]  # by the first name in the module
    unexpected: tuple[str, ...]  # names in the files that the module has no place for
    used: tuple[Any, ...]  # transformers' transforms that matched: an export reverts these


def map_names(blueprint: PreTrainedModel, file_names: Iterable[str]) -> NameMap:
    """Map the names of files on a module that no engine has wrapped: the mapping goes by class names."""
    transforms = get_model_conversion_mapping(blueprint)
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    converter_of = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    prefix = blueprint.base_model_prefix
    wanted = named_tensors(blueprint)

    renamed: dict[str, str] = {}
    conversions: dict[str, Conversion] = {}
    unexpected: list[str] = []
    # Transforms keep state between names and expect this order.
    for name in sorted(file_names, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, wanted)
        if target not in wanted and name in wanted:
            target, pattern = rename_source_key(name, [], [], prefix, wanted)
        if target not in wanted:
            unexpected.append(name)
        elif pattern is None:
            renamed.setdefault(target, name)
        else:
            conversion = conversions.setdefault(target, Conversion(deepcopy(converter_of[pattern])))
            conversion.sources.append((name, pattern))
    used = tuple(transform for transform in transforms if transform.was_used())
    return NameMap(renamed, conversions, tuple(_worth_telling(blueprint, unexpected)), used)


def _worth_telling(blueprint: PreTrainedModel, names: list[str]) -> Iterable[str]:
    """Names the model class itself does not declare as leftovers (old masks and such), nor transformers for all."""
    patterns = [*(getattr(blueprint, "_keys_to_ignore_on_load_unexpected", None) or ())]
    buffers = [name for name, _ in blueprint.named_buffers()]
    patterns += [old for name, old in OLD_BUFFERS.items() if any(buffer.endswith(name) for buffer in buffers)]
    return (name for name in names if not any(re.search(pattern, name) for pattern in patterns))

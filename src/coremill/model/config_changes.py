"""What a run changes in a model's config before the model is made: the labels of its head, dropout.

Names of dropout differ by family; they are found in the config that transformers made, so nothing here knows a family.
"""

from __future__ import annotations

import re
from typing import Any

from coremill.errors import InputError
from coremill.model.source import ModelFolder

_DROPOUT = re.compile(r"(.*_)?(dropout|pdrop)(_prob|_p|_rate)?")
_OF_ATTENTION = re.compile(r"(.*_)?(attention|attn)_.*")
_NOT_A_CHANCE = re.compile(r"layerdrop|.*_layerdrop")


def change_config(config: Any, source: ModelFolder) -> dict[str, Any]:
    """Write what the run file and the data ask for into transformers' config; what was written, for an export."""
    written = dict(source.config_changes)
    for setting, value, of_attention in (
        ("model.dropout", source.dropout, False),
        ("model.attention_dropout", source.attention_dropout, True),
    ):
        if value is None:
            continue
        names = _dropout_names(config, of_attention=of_attention)
        if not names:
            raise InputError(
                f"a {config.model_type} model has no {setting.removeprefix('model.').replace('_', ' ')} to set",
                where=setting,
                why="no name in its config is one of it",
                do=f"remove {setting}",
            )
        written |= dict.fromkeys(names, value)
    for name, value in written.items():
        # JSON has made texts of the numbers of classes.
        setattr(config, name, {int(key): label for key, label in value.items()} if name == "id2label" else value)
    return written


def _dropout_names(config: Any, *, of_attention: bool) -> list[str]:
    """Numbers in the config that are chances of dropping something; one that is None goes by another."""
    found = []
    for name, value in config.to_dict().items():
        is_chance = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_chance or not _DROPOUT.fullmatch(name) or _NOT_A_CHANCE.fullmatch(name):
            continue
        if bool(_OF_ATTENTION.fullmatch(name)) == of_attention:
            found.append(name)
    return found

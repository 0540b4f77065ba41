"""The generation config of an export: what the model came with, and the tokens that its answers end with.

A base model that learned conversations says its chat template's end of turn; the file it came with knows the end of a
text only, and whoever generates by it (`pipeline`, `model.generate`) would run on past the answer.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel

GENERATION_CONFIG = "generation_config.json"


def with_end_ids(model_folder: Path, blueprint: PreTrainedModel, end_ids: Sequence[int]) -> dict[str, Any] | None:
    """The config with those of `end_ids` that it lacks; None where it lacks none and is right as it is."""
    own = _own(model_folder, blueprint)
    ends = own.get("eos_token_id")
    known = ends if isinstance(ends, list) else [] if ends is None else [ends]
    lacking = [each for each in end_ids if each not in known]
    if not lacking:
        return None
    # Without the mark that it was derived from config.json, which has no such list.
    return {key: value for key, value in own.items() if key != "_from_model_config"} | {"eos_token_id": known + lacking}


def _own(model_folder: Path, blueprint: PreTrainedModel) -> dict[str, Any]:
    derived = getattr(blueprint, "generation_config", None)  # from config.json
    from_config: dict[str, Any] = {} if derived is None else derived.to_diff_dict()
    try:
        read = json.loads((model_folder / GENERATION_CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return from_config
    if not isinstance(read, dict):
        return from_config
    return {**read, "eos_token_id": read.get("eos_token_id", from_config.get("eos_token_id"))}

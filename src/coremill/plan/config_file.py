"""config.json of a model folder, and what a folder is that has none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from coremill.errors import InputError
from coremill.nearby import missing_folder


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a model folder, which says at least what kind of model it is."""
    path = folder / "config.json"
    if not folder.is_dir():
        raise missing_folder(folder, "model", f"no such model folder: {folder}")
    if not path.is_file():
        raise _no_config(folder)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"config.json cannot be read: {error}", where=str(path)) from None
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        advice = "use the config.json of a transformers model"
        raise InputError("config.json has no model_type", where=str(path), do=advice)
    return config


def _no_config(folder: Path) -> InputError:
    """A folder around models, an adapter, or something else."""
    why, do = "it says what shape the model has", "give a Hugging Face model folder (config.json and model.safetensors)"
    inside = sorted(path.parent for path in folder.glob("*/config.json"))
    if (folder / "adapter_config.json").is_file():
        why, do = (
            "it holds an adapter, not a whole model",
            f"name the model it was trained beside{_base_of_adapter(folder)} in model, and this folder in"
            " lora.start_from, with its lora.rank, to train it further; a merged model (coremill export --merged) has a"
            " config.json of its own",
        )
    elif inside:
        do = f"did you mean {inside[-1]}?" if len(inside) == 1 else f"name one of {', '.join(map(str, inside[:8]))}"
    return InputError("no config.json in the model folder", where=str(folder), why=why, do=do)


def _base_of_adapter(folder: Path) -> str:
    """In brackets, as the adapter has it; empty where it says none."""
    try:
        named = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    return f" ({named})" if isinstance(named, str) else ""

"""What a run is about, for people and for report.json: model, parameters, data, learning rate, command.

Taken from the resolved config.yaml and from orders.json. A run folder of an older coremill, or one that was edited, may
lack any of it: then it is null.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

_COMMIT = re.compile(r"[0-9a-f]{40}")


def subject_of(config_text: str | None, orders: Mapping[str, Any]) -> dict[str, Any]:
    """The key `subject` of report.json."""
    config = config_values(config_text)
    model, data, train, lora = (_section(config, name) for name in ("model", "data", "train", "lora"))
    in_samples = (orders.get("plan") or {}).get("samples_per_second") is not None
    sources = [one.get("source") for one in data.get("sources") or () if isinstance(one, Mapping)]
    return {
        "model": _model_name(config.get("model")),
        "weights": model.get("weights"),
        "parameters": orders.get("parameters"),
        "trainable_parameters": orders.get("trainable_parameters"),
        "adapter_rank": lora.get("rank"),
        "task": config.get("task"),
        "data": [str(source) for source in sources] or ([str(data["source"])] if data.get("source") else []),
        "sequence_length": data.get("sequence_length"),
        "tokens_per_step": None if in_samples else train.get("tokens_per_step"),
        **({"samples_per_step": train.get("samples_per_step")} if in_samples else {}),
        "epochs": train.get("epochs"),
        "learning_rate": train.get("learning_rate"),
        "schedule": train.get("schedule"),
        "warmup_steps": train.get("warmup_steps"),
        "command": orders.get("command"),
        "commits": _commits(config, orders),
    }


def _commits(config: Mapping[str, Any], orders: Mapping[str, Any]) -> dict[str, str]:
    """Of what came from the hub, by its name in the run file: with these the run can be repeated after the hub has
    changed."""
    model, data = (_section(orders, name) for name in ("model", "data"))
    named = (config.get("tokenizer"), orders.get("tokenizer")), (_model_name(config.get("model")), model.get("folder"))
    # The hub's cache has a folder for each commit.
    last = {str(name): str(folder or "").rpartition("/")[2] for name, folder in named if name}
    return {name: word for name, word in last.items() if _COMMIT.fullmatch(word)} | dict(_section(data, "commits"))


def _model_name(model: Any) -> str | None:
    """The hub id or folder; of a shape that the run file itself gives its family."""
    if not isinstance(model, Mapping):
        return model if isinstance(model, str) else None
    if isinstance(model.get("config"), Mapping):
        return shape_name(model["config"])
    return model.get("name")


def shape_name(model_config: Mapping[str, Any]) -> str:
    """What a model is called whose `model.config` is given instead of a name."""
    return f"{model_config.get('model_type', 'a')} shape of the run file"


@lru_cache(maxsize=4)  # who follows a run asks again and again, and reading takes 50 ms
def config_values(text: str | None) -> Mapping[str, Any]:
    """A resolved config as plain values; empty where it is none."""
    try:
        values = YAML(typ="safe", pure=True).load(text or "")
    except (YAMLError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = config.get(name)
    return section if isinstance(section, Mapping) else {}

"""Whether transformers knows a model as a causal language model, told without importing it.

The answer is needed before any rank starts, and importing transformers' models costs torch, seconds and 400 MB. Its
tables of names are plain literals in one file; they are read from there (60 ms). Should that file look different one
day, nothing is refused here and a rank says it later.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coremill.errors import InputError
from coremill.remote_code import TRUST_ADVICE

MODEL_CLASS = "AutoModelForCausalLM"
ADVICE = "use a model that predicts the next token: Llama, Qwen, Mistral, Gemma, GPT-2, Phi and the like"
_CAUSAL = "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"
_MASKED = "MODEL_FOR_MASKED_LM_MAPPING_NAMES"

# What makes a family causal that transformers lists as such whatever its config says.
_CAUSAL_BY: dict[str, dict[str, Any]] = {
    "bert-generation": {"is_decoder": True},
    "big_bird": {"is_decoder": True, "attention_type": "original_full"},  # blocks of long rows see what comes later
    "xlm": {"causal": True},
    "xlnet": {"attn_type": "uni"},
}
# Listed too, yet none of these learns from text to predict the next token.
_SOMETHING_ELSE = {
    "cpmant": "it sees the tokens it is to predict",
    "gemma4_assistant": "it goes on from the hidden states of another model",
    "gemma4_unified_assistant": "it goes on from the hidden states of another model",
    "git": "it predicts the text to a picture",
    "musicgen": "it predicts codes of sound, several at a time",
    "musicgen_melody": "it predicts codes of sound, several at a time",
    "prophetnet": "it predicts several tokens ahead, with a loss of its own",
    "reformer": "which tokens it attends to is settled with those it is to predict, and rows have one length only",
}


def require_causal(config: Mapping[str, Any], *, description: str, where: str, trusted: bool = False) -> None:
    """Refuse a config.json that is not a causal language model; `trusted`: its own code may say that it is one."""
    own_classes = config.get("auto_map")
    if trusted and isinstance(own_classes, Mapping) and MODEL_CLASS in own_classes:
        return
    tables = _tables()
    family = str(config["model_type"])
    if not tables:
        return
    if family not in tables[_CAUSAL]:
        own_code = "auto_map" in config
        raise InputError(
            f"{description} is not a causal language model that transformers knows",
            where=where,
            why=f"model_type is {family}" + (f", and {_why_not_own(trusted)}" if own_code else ""),
            do=TRUST_ADVICE if own_code else ADVICE,
        )
    if family in _SOMETHING_ELSE:
        raise InputError(
            f"{description} is not a model that learns to predict the next token of a text",
            where=where,
            why=f"model_type is {family}: {_SOMETHING_ELSE[family]}",
            do=ADVICE,
        )
    is_encoder = tables[_MASKED].get(family, "").endswith("MaskedLM")
    needed = _CAUSAL_BY.get(family, {"is_decoder": True} if is_encoder else {})
    if any(config.get(key) != value for key, value in needed.items()):
        shown = " and ".join(f"{key}: {json.dumps(value)}" for key, value in needed.items())
        raise InputError(
            f"{description} is an encoder, not a causal language model",
            where=where,
            why=f"a {family} model sees the tokens it is to predict, unless its config has {shown}",
            do=ADVICE,
        )


def causal_families() -> list[str]:
    """Every model_type that transformers lists as a causal language model."""
    return sorted(_tables().get(_CAUSAL, {}))


def _why_not_own(trusted: bool) -> str:
    return f"its auto_map names no {MODEL_CLASS}" if trusted else "its own code would have to be run"


@functools.cache
def _tables() -> dict[str, dict[str, str]]:
    """Class names by model_type, for both kinds; empty where they cannot be found."""
    package = importlib.util.find_spec("transformers")
    if package is None or package.origin is None:
        return {}
    try:
        source = (Path(package.origin).parent / "models" / "auto" / "modeling_auto.py").read_text(encoding="utf-8")
        found = {
            statement.targets[0].id: dict(ast.literal_eval(statement.value.args[0]))
            for statement in ast.parse(source).body
            if isinstance(statement, ast.Assign)
            and isinstance(statement.targets[0], ast.Name)
            and statement.targets[0].id in (_CAUSAL, _MASKED)
            and isinstance(statement.value, ast.Call)
        }
    except (OSError, SyntaxError, ValueError, TypeError, IndexError):
        return {}
    return found if {_CAUSAL, _MASKED} == set(found) else {}

"""Whether transformers knows a model as a causal language model, told without importing it (tasks/model_tables.py)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from coremill.errors import InputError
from coremill.remote_code import TRUST_ADVICE
from coremill.tasks.model_tables import families_of

MODEL_CLASS = "AutoModelForCausalLM"
ADVICE = "use a model that predicts the next token: Llama, Qwen, Mistral, Gemma, GPT-2, Phi and the like"
_CAUSAL, _MASKED = "causal", "masked"

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
            do="set task: sequence-classification or task: question-answering to train it as what it is, or " + ADVICE,
        )


def causal_families() -> list[str]:
    """Every model_type that transformers lists as a causal language model."""
    return sorted(_tables().get(_CAUSAL, {}))


def _why_not_own(trusted: bool) -> str:
    return f"its auto_map names no {MODEL_CLASS}" if trusted else "its own code would have to be run"


def _tables() -> dict[str, Mapping[str, str]]:
    """Class names by model_type, for both kinds; empty where they cannot be found."""
    found = {_CAUSAL: families_of(MODEL_CLASS), _MASKED: families_of("AutoModelForMaskedLM")}
    return found if all(found.values()) else {}

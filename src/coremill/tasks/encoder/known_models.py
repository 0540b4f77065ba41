"""Whether a model is an encoder that transformers knows for a task, told without importing it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from coremill.errors import InputError
from coremill.remote_code import TRUST_ADVICE
from coremill.tasks.model_tables import families_of, is_encoder_family

ADVICE = "use an encoder: BERT, DistilBERT, RoBERTa, ELECTRA, DeBERTa, ModernBERT and the like"


def require_encoder(
    config: Mapping[str, Any], *, task: str, model_class: str, description: str, where: str, trusted: bool
) -> None:
    """Refuse a config.json that is none; `trusted`: its own code may say that it is one."""
    own_classes = config.get("auto_map")
    if trusted and isinstance(own_classes, Mapping) and model_class in own_classes:
        return
    family, known = str(config["model_type"]), families_of(model_class)
    if not known:
        return
    if family in families_of("AutoModelForCausalLM") and (not is_encoder_family(family) or config.get("is_decoder")):
        raise InputError(
            f"{description} is a decoder, and {task} trains encoders",
            where=where,
            why=f"a token of a {family} model sees only those before it",
            do=f"{ADVICE}; to train it on text, set task: causal-lm",
        )
    if config.get("is_encoder_decoder"):
        raise InputError(
            f"{description} is an encoder with a decoder, and {task} trains encoders",
            where=where,
            why=f"model_type is {family}",
            do=ADVICE,
        )
    if family not in known:
        own_code = isinstance(own_classes, Mapping)
        raise InputError(
            f"{description} is not a model that transformers knows for {task}",
            where=where,
            why=f"model_type is {family}, which {model_class} does not have"
            + (", and its own code would have to be run" if own_code and not trusted else ""),
            do=TRUST_ADVICE if own_code and not trusted else ADVICE,
        )

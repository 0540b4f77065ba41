"""Which attention a model gets, and where a mask of tokens by tokens is made for it.

SDPA's flash kernel knows "causal" by itself. Documents kept apart and windows shorter than a row it is told by a mask:
transformers makes one of rows x tokens x tokens, torch turns it into numbers of the compute dtype in every layer and
keeps these for backward, and with a mask K and V are repeated for all heads (read off with saved_tensors_hooks, torch
2.13, transformers 5.22).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard

from coremill.plan.families import Family

# Model types for which transformers 5.22 has no sdpa form (a test compares): they keep the matrix of every head.
_WITHOUT_SDPA = (
    "big_bird bigbird_pegasus bloom codegen cpmant deepseek_v4 falcon_mamba flint gemma2 git got_ocr2 gpt_neo "
    "gpt_neox_japanese gpt_oss gptj granite_swa granitemoe_swa hy_v4 mamba mamba2 megatron-bert mimo_v2_flash "
    "mpt mvp openai-gpt prophetnet reformer rembert roformer rwkv trocr vaultgemma xglm xlm xlnet xlstm"
)
EAGER_ONLY = frozenset(_WITHOUT_SDPA.split())
# Likewise of those that it has with heads of question answering or classification, and not as language models.
_ENCODERS_WITHOUT_SDPA = (
    "canine convbert deberta deberta-v2 flaubert fnet funnel ibert layoutlmv2 layoutlmv3 led lilt longformer luke "
    "lxmert markuplm mpnet mra nystromformer perceiver splinter squeezebert t5gemma tapas yoso"
)
EAGER_ONLY_ENCODERS = frozenset(_ENCODERS_WITHOUT_SDPA.split())

_WINDOW_KEYS = ("sliding_window", "attention_chunk_size", "max_window_layers")


def windows_of(config: Mapping[str, Any], traits: Family, layers: int) -> tuple[int | None, ...]:
    """By layer, how many tokens its attention reaches back; None: all of them, or in no form we can read."""
    window = _positive(config.get("sliding_window", traits.sliding_window))
    by_type = {
        "sliding_attention": window,
        "hybrid_sliding": window,
        "chunked_attention": _positive(config.get("attention_chunk_size")),
    }
    types = config.get("layer_types")
    if isinstance(types, list) and len(types) == layers:
        return tuple(by_type.get(str(kind)) for kind in types)
    if not config.get("use_sliding_window", not traits.window_is_optional):
        window = None
    first = (_positive(config.get("max_window_layers")) or 0) if traits.window_is_optional else 0
    pattern = config.get("sliding_window_pattern") or traits.full_attention_every
    if _is_letters(pattern):  # the last layer sees all, whatever the letters say (EXAONE 4)
        return tuple(
            window if pattern[layer % len(pattern)] == "L" and layer + 1 < layers else None for layer in range(layers)
        )
    full_every = _positive(pattern)
    return tuple(
        None if layer < first or (full_every and (layer + 1) % full_every == 0) else window for layer in range(layers)
    )


def unread_windows(config: Mapping[str, Any]) -> tuple[str, ...]:
    """What a config says of windows in a form that windows_of does not read, in words."""
    found = [key for key in _WINDOW_KEYS if config.get(key) and _positive(config[key]) is None]
    pattern = config.get("sliding_window_pattern")
    if pattern and not _is_letters(pattern) and _positive(pattern) is None:
        found.append("sliding_window_pattern")
    return tuple(
        f"{key} of the model config is {str(config[key])[:60]!r}, which the plan cannot read: left aside"
        for key in found
    )


def _positive(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 1 else None


def _is_letters(pattern: Any) -> TypeGuard[str]:
    """L for a layer with a window, G for one that sees all: LLLG."""
    return isinstance(pattern, str) and pattern != "" and set(pattern) <= {"L", "G"}

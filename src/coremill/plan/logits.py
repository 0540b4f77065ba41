"""How many hidden rows become logits at a time: the loss cuts by it, the plan counts with it; and which models have
whole logits made, because something happens to them after the head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# A chunk of logits in the compute dtype: near the last-level cache of a server CPU, yet tall enough that each product
# keeps its rate.
CHUNK_BYTES = 32 * 2**20
MIN_CHUNK_ROWS = 256
# Every chunk reads and writes the whole gradient of the weight once more. Chunks of up to a quarter of that gradient
# do so seldom enough, and are small beside it.
SHARE_OF_WEIGHT = 0.25
# What one thread makes of a chunk at a time in fp32: it stays in its second-level cache.
BLOCK_BYTES = 2**20


# The weight's gradient over several chunks of bf16 is summed in fp32, and each chunk's part is made beside it: 6 bytes
# for every 2 of one made at once. Up to so many rows for each column, all logits in bf16 take less than that.
ROWS_AT_ONCE_PER_COLUMN = 2


def chunk_rows_for(rows: int, vocabulary_rows: int, hidden: int, compute_bytes: int, *, trains_weight: bool) -> int:
    """Rows of one chunk, all of them where they are few."""
    if trains_weight and compute_bytes == 2 and rows <= ROWS_AT_ONCE_PER_COLUMN * hidden:
        return rows
    most = max(
        MIN_CHUNK_ROWS,
        CHUNK_BYTES // (compute_bytes * vocabulary_rows),
        int(SHARE_OF_WEIGHT * 4 * hidden) // compute_bytes,
    )
    return min(rows, most)


def block_rows_for(vocabulary_rows: int, threads: int) -> int:
    """Rows of a chunk whose probabilities are made at once: some for each thread."""
    return threads * max(1, BLOCK_BYTES // (4 * vocabulary_rows))


# Model types that scale or cut their logits whatever the config says (transformers 5.22).
_SCALED_OR_CUT = (
    "cohere cohere2 cohere2_moe granite granite_swa granitemoe granitemoe_swa granitemoehybrid granitemoeshared "
    "hyperclovax falcon_h1 electra rembert prophetnet whisper git gemma4_unified_assistant"
)
_ALWAYS_WHOLE = frozenset(_SCALED_OR_CUT.split())
_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
_CAPPED = {"gemma2": 30.0, "vaultgemma": 30.0, "gemma3n_text": 30.0, "recurrent_gemma": 30.0, "nanochat": 15.0}
_SCALES = ("logit_scale", "logits_scaling")
# Of one whole logit, when backward starts: its log-probability, the gradient of that, and its own, all fp32. Before
# that fewer stand.
WHOLE_LOGIT_BYTES = 12


def caps_logits(config: Mapping[str, Any], family: str) -> bool:
    """Whether the model bends its logits by a tanh, which is kept for backward."""
    return any(config.get(key, _CAPPED.get(family) if key == _CAPS[0] else None) is not None for key in _CAPS)


def makes_whole_logits(config: Mapping[str, Any], family: str) -> bool:
    """Whether something happens to the logits after the head: the loss then needs all of them at once."""
    scaled = any(config.get(key) not in (None, 1, 1.0) for key in _SCALES)
    return family in _ALWAYS_WHOLE or scaled or caps_logits(config, family)

"""Where a tensor belongs, by its name in a file or a module."""

from __future__ import annotations

import re

_LAYER = re.compile(r"(?:^|\.)(?:layers|layer|h|blocks|block)\.(\d+)\.")
_HEAD = re.compile(r"(?:^|\.)(?:lm_head|embed_out)\.(?:weight|bias)$")
_EMBEDDING = re.compile(r"(?:^|\.)(?:embed_tokens|embed_in|wte|word_embeddings)\.weight$")
_POSITIONS = re.compile(r"(?:^|\.)(?:wpe|embed_positions|position_embeddings|token_type_embeddings)\.weight$")
# Of a model that was saved with a head: its own is made by the task.
OTHER_HEAD = re.compile(
    r"(?:^|\.)(?:cls|lm_head|embed_out|(?:lm|mask|discriminator|generator)_predictions|predictions|vocab_\w+|qa_outputs|"
    r"classifier|pre_classifier|score|pooler)\."
)
# Causal masks and rotary tables that older checkpoints carry along: buffers, not parameters.
BUFFER = re.compile(r"\.(?:attn|attention)\.(?:bias|masked_bias)$|rotary_emb\.inv_freq$|position_ids$")
EXPERT = re.compile(r"\.experts?\.")


def role_of(name: str) -> str:
    layer = _LAYER.search(name)
    if layer:
        return layer.group(1)
    if _HEAD.search(name):
        return "head"
    if _POSITIONS.search(name):
        return "positions"
    return "embedding" if _EMBEDDING.search(name) else "rest"

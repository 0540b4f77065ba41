"""What a forward pass keeps for backward, per token: exact sums by family, held to the real models by a test."""

from __future__ import annotations

from coremill.plan.card import ModelCard
from coremill.plan.types import Arrangement


def kept_bytes(card: ModelCard, arrangement: Arrangement) -> int:
    """What stands when forward is through: all layers, or only their inputs where they are computed again."""
    if arrangement.activation_checkpointing:
        layers = card.layers * arrangement.compute_bytes * card.hidden
    else:
        layers = card.layers * layer_bytes_per_token(card, arrangement)
    return arrangement.tokens_per_forward * (layers + ends_bytes_per_token(card, arrangement))


def backward_bytes(card: ModelCard, arrangement: Arrangement) -> int:
    """What the backward of one layer adds: its gradients in flight, and its activations where they are made again."""
    per_token = working_bytes_per_token(card, arrangement)
    if arrangement.activation_checkpointing:
        per_token += layer_bytes_per_token(card, arrangement)
    return arrangement.tokens_per_forward * per_token


def one_layer_bytes(card: ModelCard, arrangement: Arrangement) -> int:
    """Activations and gradients in flight of the first layer, the last one to be differentiated."""
    per_token = layer_bytes_per_token(card, arrangement) + working_bytes_per_token(card, arrangement)
    return arrangement.tokens_per_forward * per_token


def layer_bytes_per_token(card: ModelCard, arrangement: Arrangement) -> int:
    """What one decoder layer keeps for backward, per token: norms, attention, MLP, dropout masks."""
    block, compute, hidden = card.block, arrangement.compute_bytes, card.hidden
    norms = block.norms_into_matmul * _norm_bytes(card, compute) + block.norms_into_residual * (
        _norm_bytes(card, compute) - compute * hidden
    )
    if block.shared_norm_input:
        norms -= (block.norms_into_matmul - 1) * compute * hidden
    mlp = block.mlp_tensors_kept * compute * card.intermediate
    return norms + _attention_bytes(card, arrangement) + mlp + block.residual_dropouts * compute * hidden


def ends_bytes_per_token(card: ModelCard, arrangement: Arrangement) -> int:
    """Token ids, the final norm, and hidden states with their gradient, made in forward by the chunked loss."""
    block, compute, hidden = card.block, arrangement.compute_bytes, card.hidden
    embedding = compute * hidden if block.embedding_dropout else 0
    return 8 + embedding + _norm_bytes(card, compute) + compute * hidden


def _norm_bytes(card: ModelCard, compute: int) -> int:
    """Input, statistics, and output of one norm; an RMS norm (model/lean.py) has one number per row, in fp32."""
    statistics = 2 * compute if card.block.norm == "layer" else 4
    return compute * card.hidden + statistics + compute * card.hidden


def uses_flash(card: ModelCard, arrangement: Arrangement) -> bool:
    """Whether attention runs without a matrix of sequence by sequence."""
    return arrangement.attention == "sdpa" and not card.block.attention_dropout and not card.block.softcap


def _attention_bytes(card: ModelCard, arrangement: Arrangement) -> int:
    block, compute, length = card.block, arrangement.compute_bytes, arrangement.sequence_length
    width, kv_width = card.heads * card.head_dim, card.kv_heads * card.head_dim
    per_head_norm = 0
    if block.qk_norm:
        statistics = 2 * compute if block.norm == "layer" else 4
        per_head_norm = compute * (width + kv_width) + statistics * (card.heads + card.kv_heads)
    if uses_flash(card, arrangement):
        rotated = width + kv_width if block.rotary else 0
        projected = width + 2 * kv_width if block.fused_qkv else kv_width if block.rotary else width + 2 * kv_width
        outputs = 2 * width if block.copies_attention_output else width
        return per_head_norm + compute * (rotated + projected + outputs) + 4 * card.heads
    # K and V are repeated for every head, and the matrix is kept.
    math_bytes = compute
    if arrangement.attention == "sdpa" and not block.softcap:
        math_bytes = 4  # torch's math path computes in fp32
    matrix = math_bytes
    if math_bytes == 2 and block.eager_softmax_in_fp32:
        matrix = 4 + 2  # the softmax in fp32, and its copy in bf16
    if block.attention_dropout:
        matrix = 3 * math_bytes
    if block.softcap:
        matrix += compute
    return per_head_norm + math_bytes * 3 * width + compute * width + matrix * card.heads * length


def working_bytes_per_token(card: ModelCard, arrangement: Arrangement) -> int:
    """Gradients alive at once in the backward of one layer: of the MLP's branches, or of the attention matrix."""
    mlp = arrangement.compute_bytes * (3 * card.intermediate + 2 * card.hidden)
    attention = 0 if uses_flash(card, arrangement) else 2 * 4 * card.heads * arrangement.sequence_length
    return max(mlp, attention)

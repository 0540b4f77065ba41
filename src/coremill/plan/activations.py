"""What a forward pass keeps for backward, per token: exact sums by family, held to the real models by a test.

Of families that are not known an estimate (plan/unknown.py)."""

from __future__ import annotations

from coremill.config.schema import DataSection
from coremill.plan.card import ModelCard
from coremill.plan.types import Arrangement


def documents_apart(data: DataSection) -> bool:
    """Whether the documents of a row are kept apart, as far as the run file says: conversations are."""
    names_conversations = data.messages_column is not None or data.prompt_column is not None
    return names_conversations or not data.attention_across_documents


def kept_bytes(card: ModelCard, arrangement: Arrangement) -> int:
    """What stands when forward is through: all layers, or only their inputs where they are computed again; none of
    those that backward does not come to. Frozen ones that it passes keep less, inputs of products that only their
    weights' gradients need: measured, that is not felt, and it is counted."""
    compute, length = arrangement.compute_bytes, arrangement.sequence_length
    in_backward = card.layers - card.layers_below_backward
    if arrangement.activation_checkpointing:
        layers = in_backward * compute * card.hidden
        # Made once for all layers of a kind, and held for each to be computed again: a byte, or a number to be added.
        windows = card.windows[card.layers_below_backward :]
        kinds = len({window for window in windows if is_masked(window, arrangement)})
        layers += kinds * length * (1 if uses_flash(card, arrangement) else compute)
    else:
        masked = masked_layers(card, arrangement)
        layers = in_backward * layer_bytes_per_token(card, arrangement)
        layers += masked * mask_bytes_per_token(card, arrangement)
    return arrangement.tokens_per_forward * (layers + ends_bytes_per_token(card, arrangement))


def backward_bytes(card: ModelCard, arrangement: Arrangement) -> int:
    """What the backward of one layer adds: its gradients in flight, and its activations where they are made again."""
    per_token = working_bytes_per_token(card, arrangement)
    if arrangement.activation_checkpointing:
        per_token += _largest_layer_bytes_per_token(card, arrangement)
    return arrangement.tokens_per_forward * per_token


def one_layer_bytes(card: ModelCard, arrangement: Arrangement) -> int:
    """Activations and gradients in flight of the first layer, the last one to be differentiated."""
    per_token = _largest_layer_bytes_per_token(card, arrangement) + working_bytes_per_token(card, arrangement)
    return arrangement.tokens_per_forward * per_token


def _largest_layer_bytes_per_token(card: ModelCard, arrangement: Arrangement) -> int:
    mask = mask_bytes_per_token(card, arrangement) if masked_layers(card, arrangement) else 0
    return layer_bytes_per_token(card, arrangement) + mask


def layer_bytes_per_token(card: ModelCard, arrangement: Arrangement) -> int:
    """What one layer keeps for backward, per token: norms, attention, MLP, dropout masks; and its adapters."""
    adapters = _adapter_numbers(card) * arrangement.compute_bytes
    if card.estimated_numbers is not None:
        return (
            arrangement.compute_bytes * card.estimated_numbers + _estimated_matrix_bytes(card, arrangement) + adapters
        )
    return _known_layer_bytes_per_token(card, arrangement) + adapters


def _adapter_numbers(card: ModelCard) -> int:
    """What a layer keeps more with adapters, in the mean of those that backward comes to: the narrow product of each,
    with dropout a copy of its input and what was left out of it; less what only gradients need that are not made."""
    if (adapters := card.adapters) is None:
        return 0
    copies = 2 * adapters.inputs if adapters.has_dropout else 0
    layers = max(1, card.layers - card.layers_below_backward)
    return (adapters.rank * adapters.maps + copies - adapters.unkept) // layers


def _known_layer_bytes_per_token(card: ModelCard, arrangement: Arrangement) -> int:
    block, compute, hidden = card.block, arrangement.compute_bytes, card.hidden
    norms = block.norms_into_matmul * _norm_bytes(card, compute) + block.norms_into_residual * (
        _norm_bytes(card, compute) - compute * hidden
    )
    if block.shared_norm_input:
        norms -= (block.norms_into_matmul - 1) * compute * hidden
    mlp = _experts_bytes(card, compute) if card.experts else block.mlp_tensors_kept * compute * card.intermediate
    masks = block.residual_dropouts * compute * hidden if block.masks_kept else 0
    return norms + _attention_bytes(card, arrangement) + mlp + masks


def _experts_bytes(card: ModelCard, compute: int) -> int:
    """For each expert that a token goes to: its input and output, gate and up in one, the activated gate and their
    product; and the router's probabilities, choices and order."""
    routed = card.experts_per_token
    return routed * compute * (2 * card.hidden + 4 * card.expert_width) + 4 * card.experts + 40 * routed


def ends_bytes_per_token(card: ModelCard, arrangement: Arrangement) -> int:
    """Token ids, the final norm, and hidden states with their gradient, made in forward by the chunked loss; of an
    encoder the norm of its embedding, and what comes out of the last layer."""
    block, compute, width = card.block, arrangement.compute_bytes, card.lookup_width
    embedding = compute * width if block.embedding_dropout and block.masks_kept else 0
    if not block.embedding_norm:
        return 8 + embedding + _norm_bytes(card, compute) + compute * card.hidden
    into_projection = compute * width if width != card.hidden else 0
    ids = 24  # of tokens, their types and positions
    return ids + compute * (width + 2) + embedding + into_projection + compute * card.hidden


def _norm_bytes(card: ModelCard, compute: int) -> int:
    """Input, statistics, and output of one norm; a fused RMS norm has one number per row, in fp32."""
    if card.block.norm == "unfused rms":
        return 8 * card.hidden + 4 + compute * card.hidden  # input and normalised rows, both in fp32
    statistics = 2 * compute if card.block.norm == "layer" else 4
    return compute * card.hidden + statistics + compute * card.hidden


def uses_flash(card: ModelCard, arrangement: Arrangement) -> bool:
    """Whether attention runs without a matrix of sequence by sequence for each head."""
    block = card.block
    return arrangement.attention == "sdpa" and not (block.attention_dropout or block.softcap or block.eager_only)


def is_masked(window: int | None, arrangement: Arrangement) -> bool:
    """Whether a layer with this window is told by a mask what it may see."""
    if arrangement.documents_apart or arrangement.is_padded:
        return True
    return window is not None and arrangement.sequence_length >= window


def masked_layers(card: ModelCard, arrangement: Arrangement) -> int:
    """Layers that keep a mask of rows x tokens x tokens; where a matrix is kept for each head anyway, none does."""
    if not uses_flash(card, arrangement):
        return 0
    return sum(is_masked(window, arrangement) for window in card.windows[card.layers_below_backward :])


def mask_bytes_per_token(card: ModelCard, arrangement: Arrangement) -> int:
    """What a layer keeps besides where its attention has a mask: the mask as numbers, K and V for all heads."""
    compute = arrangement.compute_bytes
    mask = compute * arrangement.sequence_length
    if card.kv_heads == card.heads:
        return mask
    width, kv_width = card.heads * card.head_dim, card.kv_heads * card.head_dim
    repeated = 2 * (width - kv_width) if card.estimated_numbers is not None else 3 * width - _attention_inputs(card)
    return mask + compute * repeated


def _attention_inputs(card: ModelCard) -> int:
    """Numbers of Q, K and V that the flash kernel keeps of a token, with what they are slices of."""
    block = card.block
    width, kv_width = card.heads * card.head_dim, card.kv_heads * card.head_dim
    rotated = width + kv_width if block.rotary else 0
    projected = width + 2 * kv_width if block.fused_qkv else kv_width if block.rotary else width + 2 * kv_width
    return rotated + projected


def _attention_bytes(card: ModelCard, arrangement: Arrangement) -> int:
    block, compute, length = card.block, arrangement.compute_bytes, arrangement.sequence_length
    width, kv_width = card.heads * card.head_dim, card.kv_heads * card.head_dim
    head_norms = 0
    if block.qk_norm or block.whole_qk_norm:
        statistics = 2 * compute if block.norm == "layer" else 4
        head_norms = (8 if block.norm == "unfused rms" else compute) * (width + kv_width)
        head_norms += statistics * (2 if block.whole_qk_norm else card.heads + card.kv_heads)
    if uses_flash(card, arrangement):
        outputs = 2 * width if block.copies_attention_output else width
        return head_norms + compute * (_attention_inputs(card) + outputs) + 4 * card.heads
    # K and V are repeated for every head, and the matrix is kept.
    math_bytes = compute
    if arrangement.attention == "sdpa" and not (block.softcap or block.eager_only):
        math_bytes = 4  # torch's math path computes in fp32
    matrix = math_bytes
    if math_bytes == 2 and block.eager_softmax_in_fp32:
        matrix = 4 + 2  # the softmax in fp32, and its copy in bf16
    if block.attention_dropout:
        matrix = 3 * math_bytes
        if arrangement.attention == "sdpa" and not (block.masks_kept or card.is_causal):  # in model/quick_dropout.py
            math_bytes, matrix = compute, 2 * compute
    if block.softcap:
        matrix += compute
    return head_norms + math_bytes * 3 * width + compute * width + matrix * card.heads * length


def _estimated_matrix_bytes(card: ModelCard, arrangement: Arrangement) -> int:
    """What an unknown family keeps where no flash kernel runs: scores and softmax in fp32, K and V for all heads."""
    if uses_flash(card, arrangement):
        return 0
    repeated = 2 * arrangement.compute_bytes * max(0, card.heads - card.kv_heads) * card.head_dim
    matrices = 4 if card.block.attention_dropout else 2
    return repeated + matrices * 4 * card.heads * arrangement.sequence_length


def working_bytes_per_token(card: ModelCard, arrangement: Arrangement) -> int:
    """Gradients alive at once in the backward of one layer: of the MLP's branches, or of the attention matrix."""
    compute = arrangement.compute_bytes
    mlp = compute * (3 * card.intermediate + 2 * card.hidden)
    if card.experts and card.estimated_numbers is None:
        mlp = compute * (card.experts_per_token * (3 * card.expert_width + card.hidden) + 2 * card.hidden)
    attention = 0 if uses_flash(card, arrangement) else 2 * 4 * card.heads * arrangement.sequence_length
    return max(mlp, attention)

"""Bytes per rank, phase by phase and part by part: simple sums that follow what the engines hold.

State (weights, gradients, moments) and what a layer keeps for backward are exact; transients and the allocator's share
are constants, together at the top, each with where it was measured. A phase is described at its worst moment: on a
single rank gradients appear while activations go, so the two are not simply added.
"""

from __future__ import annotations

from math import ceil

from coremill.plan.card import ModelCard
from coremill.plan.logits import chunk_rows_for
from coremill.plan.types import Arrangement, MemoryPart, MemoryPlan

MIB = 2**20


# Numbers of parallel/: DDP's buckets, reductions in flight under shard, exchanges in flight under replicate.
BUCKET_BYTES = 32 * MIB
SHARD_REDUCTIONS_IN_FLIGHT = 2
REPLICATE_EXCHANGES_IN_FLIGHT = 3
RING_RANKS = 2  # fp32 gradients of so many ranks at most go around gloo's ring

# Rows are memory-mapped and a batch is small; loader, mapped index and pages in use.
DATA_BYTES = 16 * MIB

# A slice on its way from file to parameter.
LOAD_SLICE_BYTES = 64 * MIB

# What the allocator keeps of freed activations, as a share of activations, logits and buffers. One run behind it so
# far: a 42 M parameter Llama, one rank, 2048 tokens at once, Neoverse-N1, 2.10 GB measured.
SLACK_SHARE = 0.08
# Thread stacks, oneDNN's scratchpads and packed weights, gloo's rings, with one step done.
SLACK_BYTES = 32 * MIB
GLOO_BYTES = 16 * MIB


def memory_plan(card: ModelCard, arrangement: Arrangement, *, base_bytes: int, limit_bytes_per_rank: int) -> MemoryPlan:
    """All phases of one rank."""
    parameters = parameter_bytes(card, arrangement)
    optimizer = optimizer_bytes(card, arrangement)
    buffers = buffer_bytes(card, arrangement)
    logits = logits_bytes(card, arrangement)
    gradients, activations = _worst_moment(card, arrangement)
    gloo = GLOO_BYTES if arrangement.world_size > 1 else 0

    def part(
        *, gradients: int = 0, optimizer: int = 0, activations: int = 0, logits: int = 0, buffers: int = 0
    ) -> MemoryPart:
        moving = activations + logits + buffers
        return MemoryPart(
            parameters=parameters,
            gradients=gradients,
            optimizer=optimizer,
            activations=activations,
            logits=logits,
            buffers=buffers,
            data=DATA_BYTES,
            base=base_bytes,
            slack=SLACK_BYTES + gloo + int(SLACK_SHARE * moving),
        )

    largest = min(4 * card.largest_tensor_parameters, LOAD_SLICE_BYTES)
    first_forward = part(gradients=gradients, activations=activations, logits=logits, buffers=buffers, optimizer=0)
    # The moments appear at the end of the first step, when the activations have gone.
    first_update = part(gradients=gradient_bytes(card, arrangement), optimizer=optimizer, buffers=buffers)
    return MemoryPlan(
        load=part(buffers=largest),
        first_step=max(first_forward, first_update, key=lambda candidate: candidate.total),
        steady_step=max(
            part(gradients=gradients, optimizer=optimizer, activations=activations, logits=logits, buffers=buffers),
            first_update,
            key=lambda candidate: candidate.total,
        ),
        # One tensor at a time is put together and written.
        checkpoint=part(optimizer=optimizer, buffers=8 * card.largest_tensor_parameters),
        limit=limit_bytes_per_rank,
    )


def share(parameters: int, arrangement: Arrangement) -> int:
    """Parameters of a rank: all of them, or its N-th part rounded up."""
    return parameters if arrangement.engine == "replicate" else ceil(parameters / arrangement.world_size)


def parameter_bytes(card: ModelCard, arrangement: Arrangement) -> int:
    """fp32 weights; under replicate in bf16 a bf16 copy beside the fp32 masters."""
    own = share(card.parameters, arrangement)
    copy = 2 * own if arrangement.engine == "replicate" and arrangement.dtype == "bf16" else 0
    return 4 * own + copy


def gradient_bytes(card: ModelCard, arrangement: Arrangement) -> int:
    """Gradients once backward is through."""
    own = 4 * share(card.parameters, arrangement)
    if arrangement.engine == "shard":
        # Gradients of earlier micro-batches wait while this one's arrive, or wait whole where weights stay gathered.
        if arrangement.accumulation_steps == 1:
            return own
        return 4 * card.parameters + own if arrangement.keep_gathered else 2 * own
    if arrangement.dtype == "bf16" and arrangement.world_size > 1:
        # fp32 sums, DDP's bf16 buckets, and the fp32 totals on the wire until the last bucket has left.
        return own + 2 * card.parameters + 4 * card.parameters
    return own


def optimizer_bytes(card: ModelCard, arrangement: Arrangement) -> int:
    """Two fp32 moments."""
    return 8 * share(card.parameters, arrangement)


def _worst_moment(card: ModelCard, arrangement: Arrangement) -> tuple[int, int]:
    """Gradients and activations where their sum is largest."""
    whole = activation_bytes(card, arrangement)
    gradients = gradient_bytes(card, arrangement)
    lasting = arrangement.engine == "shard" or arrangement.world_size > 1 or arrangement.dtype == "bf16"
    if lasting or arrangement.accumulation_steps > 1:
        return gradients, whole
    # One fp32 rank drops gradients after the update: when backward starts there is only the head's, made in forward.
    head = 4 * card.vocabulary_rows * card.hidden
    last_layer = one_layer_bytes(card, arrangement)
    return (head, whole) if head + whole >= gradients + last_layer else (gradients, last_layer)


def activation_bytes(card: ModelCard, arrangement: Arrangement) -> int:
    """What forward keeps for backward, and the working set of one layer's backward."""
    tokens = arrangement.tokens_per_forward
    compute = arrangement.compute_bytes
    if arrangement.activation_checkpointing:
        # Layer inputs stay; one layer at a time is computed again.
        layers = card.layers * compute * card.hidden + layer_bytes_per_token(card, arrangement)
    else:
        layers = card.layers * layer_bytes_per_token(card, arrangement)
    return tokens * (layers + ends_bytes_per_token(card, arrangement) + _working_bytes_per_token(card, arrangement))


def one_layer_bytes(card: ModelCard, arrangement: Arrangement) -> int:
    """Activations of the last layer to be differentiated."""
    per_token = layer_bytes_per_token(card, arrangement) + _working_bytes_per_token(card, arrangement)
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
    """Input, statistics, and output of one norm; RMS norms compute in fp32 and keep the normalised rows besides."""
    hidden = card.hidden
    if card.block.norm == "layer":
        return compute * hidden + 2 * compute + compute * hidden
    normalised = 4 if card.block.norm_in_fp32 else compute
    return 4 * hidden + 4 + normalised * hidden + compute * hidden


def uses_flash(card: ModelCard, arrangement: Arrangement) -> bool:
    """Whether attention runs without a matrix of sequence by sequence."""
    return arrangement.attention == "sdpa" and not card.block.attention_dropout and not card.block.softcap


def _attention_bytes(card: ModelCard, arrangement: Arrangement) -> int:
    block, compute, length = card.block, arrangement.compute_bytes, arrangement.sequence_length
    width, kv_width = card.heads * card.head_dim, card.kv_heads * card.head_dim
    per_head_norm = 0
    if block.qk_norm:
        heads = card.heads + card.kv_heads
        if block.norm == "layer":
            per_head_norm = compute * (width + kv_width) + 2 * compute * heads
        else:
            per_head_norm = (4 + compute) * (width + kv_width) + 4 * heads
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


def _working_bytes_per_token(card: ModelCard, arrangement: Arrangement) -> int:
    """Gradients alive at once in the backward of one layer: of the MLP's branches, or of the attention matrix."""
    mlp = arrangement.compute_bytes * (3 * card.intermediate + 2 * card.hidden)
    attention = 0 if uses_flash(card, arrangement) else 2 * 4 * card.heads * arrangement.sequence_length
    return max(mlp, attention)


def logits_bytes(card: ModelCard, arrangement: Arrangement) -> int:
    """The chunk of logits in the compute dtype, its fp32 log-probabilities, the head's gradient where summed apart."""
    tokens, vocabulary = arrangement.tokens_per_forward, card.vocabulary_rows
    if not card.block.plain_logits:
        # The model's own loss: logits, the capped ones, fp32 copy, log-probabilities and their gradient.
        return tokens * vocabulary * (2 * arrangement.compute_bytes + 3 * 4)
    rows = min(tokens, chunk_rows_for(vocabulary))
    chunk = rows * vocabulary * (arrangement.compute_bytes + 4)
    if rows < tokens:
        # The next chunk is made while the last one's probabilities still stand (measured: three of 67 MB at once).
        chunk += 4 * rows * vocabulary
    if arrangement.dtype == "bf16" and rows < tokens:
        # The weight's gradient is summed in fp32 over chunks, each made in bf16.
        chunk += (4 + 2) * vocabulary * card.hidden
    return chunk


def buffer_bytes(card: ModelCard, arrangement: Arrangement) -> int:
    """Gathered weights, and send and receive buffers; the pool keeps what it once made."""
    if arrangement.world_size == 1:
        return 0
    wire = arrangement.gradient_bytes
    if arrangement.engine == "replicate":
        if wire == 4 and arrangement.world_size <= RING_RANKS:
            return 0  # gloo's ring sums in place
        ends = 2 * wire * sum(card.groups[: 1 if card.tied else 2])
        in_layers = sum(card.layer_parameters)
        bucket = max(BUCKET_BYTES // 4, card.largest_layer_parameters // 2)
        return ends + 2 * wire * min(in_layers, REPLICATE_EXCHANGES_IN_FLIGHT * bucket)
    largest_layer, largest = card.largest_layer_parameters, max(card.groups)
    layers_in_flight = min(SHARD_REDUCTIONS_IN_FLIGHT, card.layers)
    ends_total = sum(card.groups) - sum(card.layer_parameters)
    # Send and receive buffers, by size: each of the ends once, layers as many as are in flight.
    pool = 2 * wire * (ends_total + layers_in_flight * largest_layer)
    # FSDP2 lays a group's gradients out in fp32 before they leave; the gradients themselves are still there.
    laid_out = (4 + arrangement.compute_bytes) * largest
    return pool + laid_out + gathered_bytes(card, arrangement)


def gathered_bytes(card: ModelCard, arrangement: Arrangement) -> int:
    """Whole weights in the compute dtype: of the group in use and the next one, or of the model where they are kept."""
    compute = arrangement.compute_bytes
    if arrangement.keep_gathered:
        return compute * card.parameters + compute * max(card.groups)
    ends = max(card.groups) if card.tied else card.head_parameters
    # In use, on its way, and gloo's flat copy of the one on its way.
    return compute * (ends + 3 * card.largest_layer_parameters)

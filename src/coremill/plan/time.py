"""Seconds of one optimizer step: arithmetic at calibrated rates, memory passes at copy bandwidth, the wire at its rate.

The constants stand together at the top. Rates come from the machine (measured) or from the instance table (assumed).
"""

from __future__ import annotations

from dataclasses import replace

from coremill.hardware.facts import Fleet
from coremill.plan.activations import layer_bytes_per_token
from coremill.plan.card import ModelCard, fully_trained
from coremill.plan.dtype import matmul_flops_per_second
from coremill.plan.engine_cost import cost_of
from coremill.plan.splitting import SplitFactors, split_factors
from coremill.plan.traffic import Traffic
from coremill.plan.types import Arrangement, StepSeconds

# Share of the calibrated matmul rate that the products of a step reach: nearly all of it in fp32 (two Neoverse-N1
# cores); in bf16 with AMX, where a product is over before its weights are laid out, less (16 Emerald Rapids cores).
MATMUL_SHARE = {"fp32": 0.98, "bf16": 0.65}
# What is not a product (norms, rotary, SwiGLU, residual, softmax, and their backward) keeps the cores busy rather than
# the memory, and costs about the same on both machines: seconds of one core per byte kept for backward, and per byte
# of logits in fp32.
ELEMENTWISE_CORE_SECONDS_PER_BYTE = 2.4e-9
# In encoders a GELU by erf takes the place of SwiGLU, and masks of dropout, a byte each, are drawn and multiplied with:
# so much more for each byte (1.6 to 2.3 in nine runs on two Skylake cores).
ENCODER_ELEMENTWISE = 1.8
LOGITS_CORE_SECONDS_PER_BYTE = 6.5e-9
# An adapted map's input and its output are read and written so often in forward and backward (model/lora.py): products
# with one side as narrow as the rank wait for that besides their arithmetic. Seconds of one core (two Skylake cores).
ADAPTER_PASSES = 4
ADAPTER_CORE_SECONDS_PER_BYTE = 1.2e-10
# More threads than cores: what they take from each other's caches.
CROWDED_SHARE = 0.9
# Of rows that differ in length, grouped with their like: padding beside real tokens where several are computed at once.
GROUPED_PADDING = 0.03
# Adding a micro-batch's gradient to the sum: read both, write one, fp32.
ACCUMULATE_BYTES_PER_PARAMETER = 12

# Bytes per second between ranks of one machine through gloo, counting only seconds that arithmetic does not hide: 1.6
# to 2.2 GB/s on 16 Emerald Rapids cores, mostly 2 to 5 on two Neoverse-N1 cores.
LOOPBACK_BYTES_PER_SECOND = 2.0e9
# The same where ranks share memory, of gradients: laid out, and read to be summed. Weights are read in place. Assumed,
# per rank.
MEMORY_BYTES_PER_SECOND = 4.0e9
# Share of a network card's rate that TCP payload reaches.
LINK_SHARE = 0.93
# TCP connections between two ranks: gloo opens one per pair and device.
FLOWS_PER_PEER = 1
# Share of the communication that can run while arithmetic goes on; the rest is the first gather and the last reduction.
HIDEABLE_SHARE = 0.9
# What a fleet without a known link is given.
DEFAULT_LINK_BITS_PER_SECOND = 10e9


def step_seconds(card: ModelCard, arrangement: Arrangement, fleet: Fleet, traffic: Traffic) -> StepSeconds:
    """One optimizer step of the slowest rank; all ranks do the same work."""
    cost = cost_of(arrangement)
    compute = compute_seconds(card, arrangement, fleet)
    update = _split_of(card, arrangement, fleet).update
    communication = exposed = communication_seconds(arrangement, fleet, traffic)
    if arrangement.nodes > 1:
        hidden = HIDEABLE_SHARE * cost.overlap_seconds(arrangement, compute)
        exposed = max(communication * (1 - HIDEABLE_SHARE), communication - hidden)
    return StepSeconds(
        compute=compute,
        communication=communication,
        exposed_communication=exposed,
        optimizer=update * cost.optimizer_seconds(card, arrangement, fleet),
    )


def rank_share(arrangement: Arrangement, fleet: Fleet) -> float:
    """The part of a machine's rate one rank gets: its threads of all cores, or an equal share when crowded."""
    cores = max(1, fleet.node.usable_cores)
    return min(arrangement.threads_per_rank / cores, 1.0 / arrangement.ranks_per_node)


def rank_cores(arrangement: Arrangement, fleet: Fleet) -> float:
    """Cores of one rank, a fraction where ranks share them."""
    return rank_share(arrangement, fleet) * max(1, fleet.node.usable_cores)


def compute_seconds(card: ModelCard, arrangement: Arrangement, fleet: Fleet) -> float:
    """Forward and backward of all micro-batches of one rank."""
    share, cores = rank_share(arrangement, fleet), rank_cores(arrangement, fleet)
    flops_rate = matmul_flops_per_second(fleet.calibration, arrangement.dtype) * share
    row_tokens = computed_row_tokens(arrangement)
    tokens = arrangement.micro_batch_rows * arrangement.accumulation_steps * row_tokens

    # A task whose loss is not made of words has no head of the vocabulary's size.
    flops = card.flops_per_token(row_tokens)
    if not arrangement.vocabulary_logits:
        flops -= card.head_flops_per_token
    # Of layers that backward does not come to, only forward: a third.
    layer_kept = layer_bytes_per_token(replace(card, adapters=None), _of_length(arrangement, row_tokens))
    kept = card.layers * layer_kept - card.layers_below_backward * layer_kept * 2 // 3
    beside = _adapter_core_seconds_per_token(card, arrangement)
    if arrangement.activation_checkpointing:
        # The last product of a layer is not computed again: backward does not need its result.
        whole = fully_trained(card)
        last = 6.0 * card.layers * card.intermediate * card.hidden
        in_layers = whole.flops_per_token(row_tokens) - whole.head_flops_per_token - last
        flops += in_layers / 3.0 * card.share_of_layers_in_backward + (
            2.0 * card.adapters.total if card.adapters else 0
        )
        kept = kept * 4 // 3
        beside *= 4 / 3
    split = _split_of(card, arrangement, fleet)
    within_rows = min(flops, card.attention_flops_per_token(row_tokens))
    weighted = split.products * (flops - within_rows) + split.attention * within_rows
    products = weighted / (flops_rate * MATMUL_SHARE[arrangement.dtype])
    logits = card.vocabulary_rows if arrangement.vocabulary_logits else 0
    elementwise = ELEMENTWISE_CORE_SECONDS_PER_BYTE * (1.0 if card.is_causal else ENCODER_ELEMENTWISE)
    between = split.between * (elementwise * kept + LOGITS_CORE_SECONDS_PER_BYTE * 4 * logits + beside)
    accumulate: float = ACCUMULATE_BYTES_PER_PARAMETER * (arrangement.accumulation_steps - 1)
    accumulate *= cost_of(arrangement).added_up_parameters(card, arrangement)
    seconds = tokens * (products + between / cores) + accumulate / (fleet.calibration.copy_bytes_per_second * share)
    crowded = arrangement.ranks_per_node * arrangement.threads_per_rank > fleet.node.usable_cores
    return seconds / CROWDED_SHARE if crowded else seconds


def _split_of(card: ModelCard, arrangement: Arrangement, fleet: Fleet) -> SplitFactors:
    ranks, dtype = arrangement.ranks_per_node, arrangement.dtype
    return split_factors(fleet.calibration, ranks=ranks, width=card.hidden, dtype=dtype)


def computed_row_tokens(arrangement: Arrangement) -> float:
    """Tokens of a row that are computed, in the mean: with padding, where rows differ."""
    if (mean := arrangement.mean_row_tokens) is None:
        return arrangement.sequence_length
    padded = mean * (1 + GROUPED_PADDING) if arrangement.is_padded else mean
    return min(padded, arrangement.sequence_length)


def _of_length(arrangement: Arrangement, row_tokens: float) -> Arrangement:
    return replace(arrangement, sequence_length=round(row_tokens))


def _adapter_core_seconds_per_token(card: ModelCard, arrangement: Arrangement) -> float:
    """Passes over what goes into the adapted maps and comes out of them."""
    if (adapters := card.adapters) is None:
        return 0.0
    passed_bytes = ADAPTER_PASSES * arrangement.compute_bytes * (adapters.inputs + adapters.outputs)
    return ADAPTER_CORE_SECONDS_PER_BYTE * passed_bytes


def communication_seconds(arrangement: Arrangement, fleet: Fleet, traffic: Traffic) -> float:
    """Time on the wire, hidden or not."""
    if arrangement.world_size == 1:
        return 0.0
    if arrangement.nodes == 1:
        crowding = max(1.0, arrangement.ranks_per_node / max(1, fleet.node.usable_cores))
        if traffic.through_memory:
            return traffic.reduce_bytes * crowding / MEMORY_BYTES_PER_SECOND
        return traffic.total * crowding / LOOPBACK_BYTES_PER_SECOND
    ring, spread = traffic.gather_bytes, traffic.reduce_bytes
    # A ring crosses each network card once whatever the number of ranks behind it; an exchange of pieces goes to all
    # peers elsewhere.
    elsewhere = arrangement.world_size - arrangement.ranks_per_node
    spread_per_node = spread * arrangement.ranks_per_node * elsewhere / (arrangement.world_size - 1)
    flows = FLOWS_PER_PEER * arrangement.ranks_per_node * elsewhere
    return ring / link_bytes_per_second(fleet, FLOWS_PER_PEER) + spread_per_node / link_bytes_per_second(fleet, flows)


def link_bytes_per_second(fleet: Fleet, flows: int) -> float:
    """What this many TCP flows get of a node's network card."""
    bits = fleet.link_bits_per_second or DEFAULT_LINK_BITS_PER_SECOND
    if fleet.link_flow_bits_per_second is not None:
        bits = min(bits, flows * fleet.link_flow_bits_per_second)
    return bits * LINK_SHARE / 8

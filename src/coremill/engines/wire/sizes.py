"""How large pieces and buffers on the wire are: engines send by these, and count by them when the plan asks."""

from __future__ import annotations

# Reductions of sharded gradients in flight at once, each with a send and a receive buffer of one layer. Two keep the
# wire busy while backward computes the next; where layers are small as many as have room, so that a rank which is
# quicker just now need not wait for the others at every layer.
LEAST_IN_FLIGHT = 2
ROOM_IN_FLIGHT_BYTES = 2**26

# An embedding or a head above the first size leaves in pieces of the second, so that its send and receive buffers are
# those of two pieces: 0.13 instead of 2.1 GB in bf16 for the 525 M parameters of Llama-3's head. All but the last two
# are waited for: 0.5 s of a step of 90 on 12.5 Gbit/s. Layers leave whole: backward goes on meanwhile.
WHOLE_UP_TO_NUMEL = 2**26
PIECE_NUMEL = 2**24

# Sizes of pooled buffers between a power of two and the next: each is rounded up by an eighth at most, by a sixteenth
# on average.
_SIZE_BITS = 3
POOL_ROUNDING = 1 + 0.5 / 2**_SIZE_BITS


def rounded_up(numel: int) -> int:
    """The size of a pooled buffer for so many elements."""
    step = 1 << max(0, numel.bit_length() - 1 - _SIZE_BITS)
    return -(-numel // step) * step

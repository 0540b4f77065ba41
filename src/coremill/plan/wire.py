"""In what form gradients travel between ranks, and how many bytes that takes: engines send by it, the plan counts."""

from __future__ import annotations

from typing import Literal

GradientForm = Literal["fp32", "bf16", "sqrt16"]

# Gradients that share one scale when they travel as sqrt16 (engines/wire/codec.py).
SCALE_BLOCK = 1024
_SCALE_BYTES = 4

# Replicated gradients leave a bucket at a time: large enough to be bandwidth, not latency, small enough that the first
# leaves early in backward and little is left to do when the last one is there.
MOST_BUCKET_MIB = 32
BUCKETS_OF_A_MODEL = 8
# Towards the end of backward they get smaller, down to this: there is less and less left to hide them behind.
LEAST_BUCKET_BYTES = 2**20

# Reductions of sharded gradients in flight at once, each with a send and a receive buffer of one layer. Two keep the
# wire busy while backward computes the next; where layers are small as many as have room, so that a rank which is
# quicker just now need not wait for the others at every layer.
LEAST_IN_FLIGHT = 2
ROOM_IN_FLIGHT_BYTES = 2**26
# Of replicate's buckets, which are larger: half a model.
MOST_BUCKETS_IN_FLIGHT = 4

# Through memory, an embedding or head larger than a layer passes in pieces, so much of each rank's at once: few enough
# bytes to stay in the caches between who writes and who reads them.
PASSED_AT_ONCE_NUMEL = 2**21

# Weights that ranks of one host share: of more than that, rows of other ranks are resident only while they are in use.
# Mapping them anew is felt where weights are large beside the arithmetic.
RESIDENT_UP_TO_BYTES = 2**28


def bucket_mib(gradient_bytes: int) -> int:
    """Of a model with so many bytes of gradients on each rank."""
    return min(MOST_BUCKET_MIB, max(1, gradient_bytes // BUCKETS_OF_A_MODEL // 2**20))


def most_buckets_in_flight(bucket_buffer_bytes: int) -> int:
    """With so many bytes of send and receive buffers each; of three, one may be in its second stage."""
    return max(LEAST_IN_FLIGHT + 1, min(MOST_BUCKETS_IN_FLIGHT, ROOM_IN_FLIGHT_BYTES // max(1, bucket_buffer_bytes)))


def sends_rows(named: int, rows: int) -> bool:
    """Whether of a table with so many rows only those go on the wire that tokens of any rank named: taking them out and
    putting them back costs two copies."""
    return 2 * named <= rows


def gradient_form(wire_dtype: str, dtype: str) -> GradientForm:
    """Exact, bf16, or sqrt16: also 16 bits, but finer, for arithmetic that is itself finer than bf16."""
    if wire_dtype == "fp32":
        return "fp32"
    return "sqrt16" if wire_dtype == "auto" and dtype == "fp32" else "bf16"


def sent_bytes(form: GradientForm, gradients: int) -> int:
    """Of so many gradients on the wire."""
    if form == "fp32":
        return 4 * gradients
    scales = -(-gradients // SCALE_BLOCK) if form == "sqrt16" else 0
    return 2 * gradients + _SCALE_BYTES * scales

"""How many hidden rows become logits at a time: the loss cuts by it, the plan counts with it."""

from __future__ import annotations

# One chunk in fp32: near the last-level cache of a server CPU, yet tall enough that each product keeps its rate.
CHUNK_BYTES = 32 * 2**20
MIN_CHUNK_ROWS = 256


def chunk_rows_for(vocabulary_rows: int) -> int:
    """Rows of one chunk."""
    return max(MIN_CHUNK_ROWS, CHUNK_BYTES // (4 * vocabulary_rows))

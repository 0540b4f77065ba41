"""How many hidden rows become logits at a time: the loss cuts by it, the plan counts with it."""

from __future__ import annotations

# A chunk of logits in the compute dtype: near the last-level cache of a server CPU, yet tall enough that each product
# keeps its rate.
CHUNK_BYTES = 32 * 2**20
MIN_CHUNK_ROWS = 256
# Every chunk reads and writes the whole gradient of the weight once more. Chunks of up to a quarter of that gradient
# do so seldom enough, and are small beside it.
SHARE_OF_WEIGHT = 0.25
# What one thread makes of a chunk at a time in fp32: it stays in its second-level cache.
BLOCK_BYTES = 2**20


def chunk_rows_for(rows: int, vocabulary_rows: int, hidden: int, compute_bytes: int) -> int:
    """Rows of one chunk, all of them where they are few."""
    most = max(
        MIN_CHUNK_ROWS,
        CHUNK_BYTES // (compute_bytes * vocabulary_rows),
        int(SHARE_OF_WEIGHT * 4 * hidden) // compute_bytes,
    )
    return min(rows, most)


def block_rows_for(vocabulary_rows: int, threads: int) -> int:
    """Rows of a chunk whose probabilities are made at once: some for each thread."""
    return threads * max(1, BLOCK_BYTES // (4 * vocabulary_rows))

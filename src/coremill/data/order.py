"""The order of rows: a permutation that can be asked for any stretch of it, made of integer arithmetic only.

A library's shuffle would hold all rows in memory on every rank, and may change with the library's version, which
would change a resumed run. This is a Feistel network over the smallest even number of bits that can count the rows;
results beyond the count are sent through again until they fall inside, which keeps it a permutation.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

ROUNDS = 8
MASK = (1 << 64) - 1

Positions = npt.NDArray[np.int64]


def mixed(value: int) -> int:
    """A 64-bit integer whose every bit depends on every bit of `value` (the finaliser of splitmix64)."""
    value = (value + 0x9E3779B97F4A7C15) & MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def order_key(*parts: int) -> int:
    """One key out of seed, epoch and purpose."""
    key = 0
    for part in parts:
        key = mixed(key ^ mixed(part & MASK))
    return key


def shuffled(positions: Positions, count: int, key: int) -> Positions:
    """Where the permutation of range(count) under `key` sends each of `positions`."""
    half_bits = max(1, ((count - 1).bit_length() + 1) // 2)
    round_keys = [order_key(key, index) for index in range(ROUNDS)]
    values = _network(positions.astype(np.uint64), half_bits, round_keys)
    outside = values >= count
    while outside.any():  # at most 4 times as many values as rows: a few turns
        values[outside] = _network(values[outside], half_bits, round_keys)
        outside = values >= count
    return values.astype(np.int64)


def _network(values: npt.NDArray[np.uint64], half_bits: int, round_keys: list[int]) -> npt.NDArray[np.uint64]:
    shift, low_bits = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = values >> shift, values & low_bits
    for round_key in round_keys:
        left, right = right, left ^ (_mix(right ^ np.uint64(round_key)) & low_bits)
    return (left << shift) | right


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))

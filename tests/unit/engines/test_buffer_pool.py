"""Buffers that are used again: by whom, and which are not kept."""

from __future__ import annotations

import torch

from coremill.engines.wire.collectives import BufferPool, rounded_up


def test_nearly_equal_sizes_share_a_buffer() -> None:
    pool = BufferPool()
    first = pool.take(8_400_000, torch.float32)
    address = first.data_ptr()
    pool.give(first)
    del first
    second = pool.take(8_600_000, torch.float32)
    assert second.data_ptr() == address and second.shape == (8_600_000,)
    assert pool.take(8_600_000, torch.float32).data_ptr() != address


def test_a_given_buffer_is_whole_again() -> None:
    pool = BufferPool()
    pool.give(pool.take(33, torch.bfloat16))
    larger = pool.take(36, torch.bfloat16)
    larger.fill_(1.0)
    assert larger.sum() == 36


def test_rounding_wastes_an_eighth_at_most() -> None:
    for numel in (1, 7, 8, 9, 100, 1000, 12_345, 8_404_992, 2**30 + 1):
        assert numel <= rounded_up(numel) <= numel * 9 / 8 + 1


def test_what_is_too_large_is_not_kept() -> None:
    pool = BufferPool()
    pool.keep_up_to_numel = 1000
    large = pool.take(1001, torch.float32)
    pool.give(large)
    assert pool.take(1001, torch.float32).data_ptr() != large.data_ptr()

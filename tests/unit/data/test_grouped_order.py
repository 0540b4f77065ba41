from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coremill.data.grouped_order import GroupedOrder, computed_tokens, share_of_rank


def lengths_of(count: int, seed: int = 0, longest: int = 384) -> np.ndarray:
    """As SQuAD's windows have them: 170 of 384 on average."""
    drawn = np.random.default_rng(seed).lognormal(np.log(158), 0.42, count)
    return np.clip(drawn, 30, longest).astype(np.int32)


@st.composite
def orders(draw) -> tuple[np.ndarray, int, int]:
    rows = draw(st.integers(1, 150))
    return lengths_of(rows, draw(st.integers(0, 9))), draw(st.integers(1, rows)), draw(st.integers(0, 2**40))


@given(orders())
@settings(max_examples=40, deadline=None)
def test_every_row_once_an_epoch(order):
    """After any whole number of steps no row has come twice more often than another has come at all."""
    lengths, size, seed = order
    rows, steps = len(lengths), 3 * len(lengths) // size + 1
    walked = GroupedOrder(lengths, seed=seed, rows_per_step=size).rows(0, steps * size).reshape(steps, size)
    seen = np.zeros(rows, dtype=int)
    for step, row_ids in enumerate(walked):
        assert (np.diff(lengths[row_ids]) >= 0).all()  # sorted
        np.add.at(seen, row_ids, 1)
        whole, begun = divmod((step + 1) * size, rows)
        assert seen.min() >= whole and seen.max() <= whole + bool(begun)


@given(orders(), st.integers(0, 500), st.integers(0, 100))
@settings(max_examples=40, deadline=None)
def test_any_stretch_is_the_same_wherever_one_begins(order, first, count):
    lengths, size, seed = order
    walked = GroupedOrder(lengths, seed=seed, rows_per_step=size).rows(0, first + count)
    restored = GroupedOrder(lengths, seed=seed, rows_per_step=size)
    assert np.array_equal(restored.rows(first, count), walked[first:])


@given(orders(), st.integers(1, 9))
@settings(max_examples=50, deadline=None)
def test_ranks_share_a_step(order, world_size):
    """The same rows whatever the number of ranks, each on one, and balanced: no rank has more than a row more."""
    lengths, size, seed = order
    step = GroupedOrder(lengths, seed=seed, rows_per_step=size).rows(size, size)
    shares = [share_of_rank(step, rank, world_size) for rank in range(world_size)]
    assert sorted(np.concatenate(shares).tolist()) == sorted(step.tolist())
    counts = [len(share) for share in shares]
    assert max(counts) - min(counts) <= 1
    if min(counts):
        work = [int(lengths[share].sum()) for share in shares]
        assert max(work) - min(work) <= int(lengths[step].max())


@pytest.mark.parametrize(
    ("rows", "step_rows", "world_size", "micro_batch_rows", "accumulation_steps"),
    [
        (88_000, 32, 1, 32, 1),
        (20_000, 24, 2, 12, 1),
        (20_000, 32, 4, 8, 1),
        (4_000, 32, 2, 4, 4),
        (4_000, 256, 4, 16, 4),
        (1_000, 32, 1, 32, 1),
    ],
)
def test_little_is_padding(rows, step_rows, world_size, micro_batch_rows, accumulation_steps):
    lengths = lengths_of(rows)
    assert 165 < lengths.mean() < 175
    order = GroupedOrder(lengths, seed=7, rows_per_step=step_rows)
    real = computed = 0
    for step in range(min(400, 2 * rows // step_rows)):
        found = lengths[order.rows(step * step_rows, step_rows)]
        real += int(found.sum())
        computed += computed_tokens(
            found,
            world_size=world_size,
            micro_batch_rows=micro_batch_rows,
            accumulation_steps=accumulation_steps,
        )
    assert 0 < 1 - real / computed <= 0.10
    assert 1 - lengths.mean() / 384 > 0.5  # padded to the maximum


def test_what_an_order_depends_on():
    lengths = lengths_of(1000)
    base = GroupedOrder(lengths, seed=7, rows_per_step=32).rows(0, 320)
    assert not np.array_equal(base, GroupedOrder(lengths, seed=8, rows_per_step=32).rows(0, 320))
    epochs = [GroupedOrder(lengths, seed=7, rows_per_step=25).rows(epoch * 1000, 1000) for epoch in range(2)]
    assert not np.array_equal(*epochs)
    # Which rows meet in a step differs from epoch to epoch too, and long ones come at any time.
    sets = [{frozenset(step.tolist()) for step in epoch.reshape(-1, 25)} for epoch in epochs]
    assert not sets[0] & sets[1]
    longest = [lengths[step].max() for step in epochs[0].reshape(-1, 25)]
    assert sorted(longest) != longest and sorted(longest, reverse=True) != longest


def test_the_order_of_all_runs_to_come():
    """A run that goes on with a later version finds the order it began with."""
    lengths = np.arange(20, 0, -1, dtype=np.int32)
    walked = GroupedOrder(lengths, seed=7, rows_per_step=4).rows(0, 24).tolist()
    assert walked == [7, 6, 3, 1, 17, 14, 10, 9, 19, 18, 16, 15, 13, 12, 11, 8, 5, 4, 2, 0, 17, 15, 11, 10]


def test_computed_tokens():
    """A micro-batch is as wide as its longest row; a rank without one computes a filler of one token."""
    lengths = np.array([3, 5, 8], dtype=np.int32)
    count = {"micro_batch_rows": 2, "accumulation_steps": 1}
    assert computed_tokens(lengths, world_size=1, micro_batch_rows=2, accumulation_steps=2) == 2 * 5 + 8
    assert computed_tokens(lengths, world_size=2, **count) == 2 * 8 + 5
    assert computed_tokens(lengths[:1], world_size=2, **count) == 3 + 1

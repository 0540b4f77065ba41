from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from coremill.data.order import order_key, shuffled


@settings(deadline=None)  # how long it takes is not what is tested
@given(count=st.integers(1, 3000), seed=st.integers(0, 2**63))
def test_it_is_a_permutation(count: int, seed: int) -> None:
    assert sorted(shuffled(np.arange(count), count, order_key(seed)).tolist()) == list(range(count))


@settings(deadline=None)  # how long it takes is not what is tested
@given(count=st.integers(1, 10**12), position=st.integers(0, 10**12))
def test_a_stretch_equals_the_whole(count: int, position: int) -> None:
    position %= count
    stretch = np.arange(position, min(count, position + 5))
    values = shuffled(stretch, count, order_key(1, 2))
    assert [
        int(shuffled(stretch[[index]], count, order_key(1, 2))[0]) for index in range(len(stretch))
    ] == values.tolist()
    assert (values >= 0).all() and (values < count).all()


def test_it_is_pinned() -> None:
    """A resumed run must find the order it began with: these numbers never change."""
    assert shuffled(np.arange(10), 10, order_key(7, 2, 0)).tolist() == [8, 0, 3, 1, 6, 4, 9, 5, 2, 7]


def test_it_looks_random() -> None:
    count = 10_000
    orders = [shuffled(np.arange(count), count, order_key(7, epoch)) for epoch in range(4)]
    for order in orders:
        assert abs(np.corrcoef(np.arange(count), order)[0, 1]) < 0.05
        assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.05
    for first, second in zip(orders, orders[1:], strict=False):
        assert (first == second).sum() < 20  # one fixed point is expected

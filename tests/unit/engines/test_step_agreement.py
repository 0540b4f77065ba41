"""What ranks tell each other at the end of a step about parameters that had no use."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from coremill.engines.base import StepAgreement
from coremill.engines.wire.exchange import WireMeter


class Ranks:
    """Two, of which the second one's numbers are given."""

    size = 2

    def __init__(self) -> None:
        self.exchanges = 0
        self.other: list[list[float]] = []

    def sums(self, values: list[float]) -> list[float]:
        self.exchanges += 1
        return [mine + theirs for mine, theirs in zip(values, self.other.pop(0), strict=True)]


def test_what_has_no_use_is_told_once():
    ranks: Any = Ranks()
    agreement = StepAgreement(ranks, WireMeter())
    parameters = [nn.Parameter(torch.ones(1)) for _ in range(3)]

    def step(used: list[bool], *other: list[float]) -> tuple[int, list[bool]]:
        """Exchanges, and which gradients are left."""
        for parameter in parameters:
            parameter.grad = torch.ones(1)
        ranks.exchanges, ranks.other = 0, list(other)
        totals = agreement.reach(loss=1.0, squares=2.0, votes=[1.0], is_used=dict(zip(parameters, used, strict=True)))
        assert (totals.loss, totals.gradient_norm, totals.votes) == (2.0, 2.0, (1.0,)) and not ranks.other
        return ranks.exchanges, [parameter.grad is not None for parameter in parameters]

    rest = [1.0, 2.0, 0.0]  # of the second rank: loss, squares, vote; then: has unused ones, has changed
    none_unused, told, changed = [*rest, 0.0, 1.0], [*rest, 1.0, 0.0], [*rest, 1.0, 1.0]
    everything, all_but_last, last_two = [True] * 3, [True, True, False], [False, True, True]
    assert step(everything, none_unused) == (1, everything)
    assert step(all_but_last, changed, [0.0, 1.0, 0.0]) == (2, all_but_last)
    assert step(all_but_last, told) == (1, all_but_last)
    assert step(everything, none_unused) == (1, everything)  # for once; what was told still stands
    assert step(all_but_last, told) == (1, all_but_last)
    assert step(all_but_last, changed, [0.0, 1.0, 1.0]) == (2, everything)  # the second rank's changed
    assert step(all_but_last, told) == (1, everything)
    assert step(last_two, told, [0.0, 1.0, 1.0]) == (2, last_two)  # the first rank's changed

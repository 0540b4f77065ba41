"""How much longer or shorter the parts of a step take where several ranks share a machine, beside one per NUMA node.

Measured once (hardware/splits.py), declared for machines out of reach; what lies between two measured widths or numbers
of ranks is interpolated, and beyond them as the nearest.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from math import log

from coremill.hardware.facts import SPLIT_WIDTHS, Calibration


@dataclass(frozen=True, kw_only=True)
class SplitFactors:
    """Seconds over those of one rank per NUMA node, for the same work of the whole machine."""

    products: float = 1.0
    between: float = 1.0
    attention: float = 1.0
    update: float = 1.0


def dtype_of_splits(calibration: Calibration) -> str | None:
    """What they were measured in: the dtype that a run on this machine takes by itself. None: they were not."""
    bf16 = calibration.bf16_matmul_flops_per_second or 0.0
    quicker = "bf16" if bf16 > calibration.fp32_matmul_flops_per_second else "fp32"
    return quicker if calibration.splits else None


def split_factors(calibration: Calibration, *, ranks: int, width: int, dtype: str) -> SplitFactors:
    rates = calibration.splits
    if not rates or ranks <= rates[0].processes or dtype != dtype_of_splits(calibration):
        return SplitFactors()
    counts = [each.processes for each in rates]

    def by_width(values: Sequence[float]) -> float:
        return _between(SPLIT_WIDTHS, values, width)

    return SplitFactors(
        products=_between(counts, [by_width(each.products) for each in rates], ranks),
        between=_between(counts, [by_width(each.between) for each in rates], ranks),
        attention=_between(counts, [by_width(each.attention) for each in rates], ranks),
        update=_between(counts, [each.update for each in rates], ranks),
    )


def _between(places: Sequence[int], values: Sequence[float], place: int) -> float:
    """On a straight line over the logarithm."""
    above = bisect_left(places, place)
    if above == 0 or len(values) == 1:
        return values[0]
    if above >= min(len(places), len(values)):
        return values[-1]
    low, high = log(places[above - 1]), log(places[above])
    share = (log(place) - low) / (high - low)
    return values[above - 1] + share * (values[above] - values[above - 1])

"""Measured rates fed back: how a finished run went beside its plan, and what that says about the next one.

An observation holds factors, measured over planned. A plan takes the median of those made with its engine and dtype,
with its dtype alone for arithmetic, with its dtype and optimizer for the update. Rates that were calibrated anew since
are taken into account: what is learned is how fast this machine trains, not how far off one calibration was.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from statistics import median

from coremill.hardware.facts import Calibration, Fleet, Observation
from coremill.plan.dtype import Dtype, matmul_flops_per_second
from coremill.plan.types import MemoryPart, StepSeconds

# A slack that seems several times the planned one comes from something else: other libraries, a longer vocabulary file.
SLACK_BOUNDS = (0.0, 4.0)


@dataclass(frozen=True, kw_only=True)
class Factors:
    """What planned numbers are multiplied with; 1 where nothing was learned."""

    runs: int = 0
    compute: float = 1.0
    optimizer: float = 1.0
    communication: float = 1.0
    slack: float = 1.0

    def words(self) -> str:
        return (
            f"compute x {self.compute:.2f}, optimizer x {self.optimizer:.2f},"
            f" communication x {self.communication:.2f}, allocator slack x {self.slack:.2f}"
        )

    def scaled(self, seconds: StepSeconds) -> StepSeconds:
        """A step as the learned runs would have it."""
        return StepSeconds(
            compute=seconds.compute * self.compute,
            communication=seconds.communication,
            exposed_communication=seconds.exposed_communication * self.communication,
            optimizer=seconds.optimizer * self.optimizer,
        )


def factors_of(calibration: Calibration, *, engine: str, dtype: Dtype, optimizer: str = "adamw") -> Factors:
    """What runs on this machine taught about an engine, a dtype and an optimizer."""
    same_dtype = [one for one in calibration.learned if one.dtype == dtype]
    if not same_dtype:
        return Factors()
    same_engine = [one for one in same_dtype if one.engine == engine]
    matmul, copy = matmul_flops_per_second(calibration, dtype), calibration.copy_bytes_per_second
    return Factors(
        runs=len(same_dtype),
        compute=median(one.compute * matmul / one.matmul_flops_per_second for one in same_dtype),
        optimizer=_median(
            one.optimizer * copy / one.copy_bytes_per_second for one in same_dtype if one.moved_by == optimizer
        ),
        communication=_median(one.communication for one in same_engine if one.communication is not None),
        slack=_median(one.slack for one in same_engine),
    )


def observe(
    *,
    run: str,
    engine: str,
    dtype: Dtype,
    optimizer: str = "adamw",
    fleet: Fleet,
    planned_seconds: StepSeconds,
    planned_memory: MemoryPart,
    measured_seconds: StepSeconds,
    measured_bytes: int,
) -> Observation:
    """One run beside its plan, made without anything learned."""
    slack = max(1, planned_memory.slack)
    excess = measured_bytes - (planned_memory.total - planned_memory.slack)
    exchanged = planned_seconds.exposed_communication > 0
    return Observation(
        run=run,
        engine=engine,
        dtype=dtype,
        compute=measured_seconds.compute / planned_seconds.compute,
        optimizer=measured_seconds.optimizer / planned_seconds.optimizer,
        communication=(
            measured_seconds.exposed_communication / planned_seconds.exposed_communication if exchanged else None
        ),
        slack=min(max(excess / slack, SLACK_BOUNDS[0]), SLACK_BOUNDS[1]),
        matmul_flops_per_second=matmul_flops_per_second(fleet.calibration, dtype),
        copy_bytes_per_second=fleet.calibration.copy_bytes_per_second,
        moved_by=optimizer,
    )


def without_learning(fleet: Fleet) -> Fleet:
    """The same machines as calibrated."""
    return replace(fleet, calibration=replace(fleet.calibration, learned=()))


def _median(values: Iterable[float]) -> float:
    known = list(values)
    return median(known) if known else 1.0

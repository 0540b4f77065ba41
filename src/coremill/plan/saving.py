"""What a checkpoint takes: how many bytes, how long, and whether a stop gives it that time. Pure, like the whole plan.

Nobody knows a folder's rate before the first save. The assumed one is what the smallest disks of a cloud give; on the
screen it is called assumed, and a save that took longer than a stop would wait for it is told when it happened.
"""

from __future__ import annotations

from math import ceil

from coremill.config.durations import seconds_of
from coremill.config.schema import AUTO, RunConfig
from coremill.plan.types import Choice, SavePlan
from coremill.plan.words import size

ASSUMED_BYTES_PER_SECOND = 125e6  # a gp3 volume as it comes
# A save of which no rank writes a byte for so long hangs in the storage.
STANDING_SECONDS = 600.0
# Ranks have at least so long to stop once the step under way has ended; beyond it as long as they write.
GRACE_SECONDS = 120.0
# Of the time to stop: the rest is for saying so and leaving.
SHARE_OF_GRACE = 0.8
SET_BY_USER = "set by you"
SPOT_NOTICE_SECONDS = 120.0  # from the notice until EC2 takes the machine back


def plan_save(config: RunConfig, state_bytes: int, step_seconds: float) -> SavePlan:
    """One checkpoint of the whole state, all of it in one folder."""
    seconds = state_bytes / ASSUMED_BYTES_PER_SECOND
    takes = (
        f"a save of {size(state_bytes)} takes {_time(seconds)} at an assumed {size(int(ASSUMED_BYTES_PER_SECOND))}/s"
    )
    grace, deadline = _grace(config, seconds, takes, step_seconds), _deadline(config)
    after_a_step = f"{takes}, after a step of up to {_time(ceil(step_seconds))}"
    warnings = []
    in_spot_pods = config.kubernetes.image is not None and config.kubernetes.may_be_spot
    # Of pods on spot machines the notice decides, whatever grace they are given.
    if SHARE_OF_GRACE * grace.value < step_seconds + seconds and not in_spot_pods:
        warnings.append(
            f"checkpoint.grace is {config.checkpoint.grace}, but {after_a_step}: when asked to stop, the run would be"
            " ended before it is saved; leave checkpoint.grace out, or give it more"
        )
    if config.supervise.save_deadline != AUTO and deadline.value < seconds:
        warnings.append(
            f"supervise.save_deadline is {config.supervise.save_deadline}, but {takes}: it would be given up; leave it"
            " out, and a save lasts as long as it gets on"
        )
    is_spot = in_spot_pods or config.checkpoint.spot_notices == "on"
    if is_spot and step_seconds + seconds > SHARE_OF_GRACE * SPOT_NOTICE_SECONDS:
        warnings.append(
            f"EC2 takes a spot machine back {SPOT_NOTICE_SECONDS:.0f} s after it says so, but {after_a_step}: what was"
            " done since the last save (checkpoint.every) would be lost"
        )
    return SavePlan(
        bytes=state_bytes,
        bytes_per_second=ASSUMED_BYTES_PER_SECOND,
        seconds=seconds,
        grace_seconds=grace,
        deadline_seconds=deadline,
        warnings=tuple(warnings),
    )


def _grace(config: RunConfig, seconds: float, takes: str, step_seconds: float) -> Choice[float]:
    if config.checkpoint.grace != AUTO:
        return Choice(seconds_of(config.checkpoint.grace), SET_BY_USER)
    # One save may be under way when the stop is asked for, and the last one comes on top.
    value = max(GRACE_SECONDS, float(ceil(2 * seconds / SHARE_OF_GRACE)))
    # A request that comes right after ranks agreed on a step is heard at the end of the next.
    value += ceil(step_seconds / SHARE_OF_GRACE)
    return Choice(
        value,
        f"the step under way ends first; {takes}, and one may be under way already; longer as long as bytes are"
        " written",
    )


def _deadline(config: RunConfig) -> Choice[float]:
    if config.supervise.save_deadline != AUTO:
        return Choice(seconds_of(config.supervise.save_deadline), SET_BY_USER)
    return Choice(STANDING_SECONDS, "without a byte written: as long as it gets on, a save is not given up")


def _time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"

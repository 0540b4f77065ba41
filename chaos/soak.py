"""X25: a long run with random faults, a minute apart on average: how much of the time was training, what is growing.

`python -m chaos --only X25 --n 30` takes about half an hour. Goodput is the time of steps that counted over all the
time since the first step; a step done twice counts once. Memory, file handles and temporary files are compared between
the first and the last third.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Generator
from dataclasses import dataclass

import psutil

from chaos.campaign import STOPPED, Campaign, Fault, killed, stopped_for_a_while, stopped_for_ever
from chaos.experiment import Rig, Trial
from chaos.running import Broken, losses

MEAN_GAP_SECONDS = 60.0
SAMPLE_SECONDS = 5.0
# Ranks are killed far more often than they hang.
MIX: tuple[tuple[Fault, int], ...] = ((killed, 6), (stopped_for_a_while, 3), (stopped_for_ever, 1))
SETTINGS = ("train.tokens_per_step=2048", "checkpoint.every=20steps")
LEAST_GOODPUT = 0.85
MOST_GROWTH = 1.05


@dataclass(frozen=True)
class Sample:
    """What could grow."""

    launcher_bytes: int
    launcher_handles: int
    rank_handles: int
    rank_bytes: int
    hidden_files: int  # half-written or discarded checkpoints
    shared_memory_files: int


def soak(rig: Rig, counts: dict[str, int]) -> Generator[tuple[str, Trial], None, str | None]:
    """So many faults, with random gaps."""
    (key, faults), *_ = counts.items()
    campaign = Campaign(rig)
    campaign.run.settings = SETTINGS
    samples: list[Sample] = []
    try:
        campaign.going()
        for _ in range(faults):
            _pause(campaign, campaign.random.expovariate(1 / MEAN_GAP_SECONDS), samples)
            (fault,) = campaign.random.choices([each for each, _ in MIX], [weight for _, weight in MIX])
            try:
                yield key, fault(campaign)
            except (Broken, OSError) as error:
                campaign.run.kill()
                yield key, Trial(passed=False, fault=fault.__name__, outcome=str(error))
                campaign.going()
        _pause(campaign, MEAN_GAP_SECONDS / 2, samples)
        code = campaign.stop()
        yield key, _whole(campaign, samples, code)
        torn = [step for step, values in losses(campaign.run).items() if len(values) > 1]
        return f"step {torn[0]} had several losses" if torn else None
    finally:
        campaign.run.kill()


def _pause(campaign: Campaign, seconds: float, samples: list[Sample]) -> None:
    until = time.monotonic() + seconds
    next_sample = time.monotonic()
    while time.monotonic() < until:
        campaign.run.look()
        if campaign.run.process is None or campaign.run.process.poll() is not None:
            raise Broken(f"the run ended by itself; see {campaign.run.log}")
        if time.monotonic() >= next_sample:
            with contextlib.suppress(OSError, ValueError, psutil.Error):  # a rank that is just starting or ending
                samples.append(_sample(campaign))
            next_sample = time.monotonic() + SAMPLE_SECONDS
        time.sleep(0.2)


def _sample(campaign: Campaign) -> Sample:
    run = campaign.run
    pids = [pid for _, pid in sorted(run.rank_pids().items())]
    return Sample(
        launcher_bytes=psutil.Process(run.launcher_pid).memory_info().rss,
        launcher_handles=_handles(run.launcher_pid),
        rank_handles=max(_handles(pid) for pid in pids),
        rank_bytes=max(psutil.Process(pid).memory_info().rss for pid in pids),
        hidden_files=sum(path.name.startswith(".") for path in run.checkpoints.iterdir()),
        shared_memory_files=len(os.listdir("/dev/shm")),
    )


def _handles(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def goodput(campaign: Campaign) -> float:
    """The share of the time, from the first step on, that went into steps that counted."""
    steps = campaign.run.of("step", rank=0)
    useful = {int(event.number("step")): event.number("seconds") for event in steps}
    return sum(useful.values()) / (steps[-1].time - steps[0].time + steps[0].number("seconds"))


def _whole(campaign: Campaign, samples: list[Sample], code: int) -> Trial:
    third = max(1, len(samples) // 3)
    grown = []
    for name in Sample.__dataclass_fields__:
        early = statistics.median(getattr(sample, name) for sample in samples[:third])
        late = statistics.median(getattr(sample, name) for sample in samples[-third:])
        if late > MOST_GROWTH * early + 1:
            grown.append(f"{name} from {early:,.0f} to {late:,.0f}")
    share = goodput(campaign)
    flat = ", ".join(grown) or "memory, handles and temporary files flat"
    return Trial(
        passed=share >= LEAST_GOODPUT and not grown and code == STOPPED,
        fault="all of it",
        outcome=f"goodput {share:.1%}, {flat}",
        exit_code=code,
    )

"""Faults of storage under a real run: its checkpoint folder lies on a disk that fills up, turns read-only or hangs.

One run bears them all and is compared with one left in peace, as in `campaign.py`.
"""

from __future__ import annotations

import contextlib
import os
import resource
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

from chaos.campaign import STOPPED, Campaign
from chaos.experiment import Rig, Trial
from chaos.mounts import frozen, mounted_ext4, set_read_only
from chaos.running import Broken, compare, left_in_peace
from coremill.checkpoint.manifest import Unusable, survey
from coremill.report.events import Event

LEFT_BYTES = 2 * 2**20  # on the full disk: less than a checkpoint and what the store wants to spare
FROZEN_SECONDS = 15.0
StorageFault = Callable[[Campaign, Path], Trial]


def siege(rig: Rig, counts: dict[str, int]) -> Generator[tuple[str, Trial], None, str | None]:
    """All asked-for faults, then the comparison."""
    with mounted_ext4(rig.folder / "disk") as disk:
        campaign = Campaign(rig)
        campaign.run.settings = (f"checkpoint.folder={disk / 'checkpoints'}",)
        try:
            for key in FAULTS:
                for _ in range(counts.get(key, 0)):
                    try:
                        campaign.going()
                        campaign.run.wait_for(lambda: len(survey(campaign.run.checkpoints).sound) >= 2, "two saves")
                        yield key, FAULTS[key](campaign, disk)
                    except (Broken, Unusable, OSError) as error:
                        campaign.run.kill()
                        yield key, Trial(passed=False, fault=key, outcome=str(error))
            campaign.going()
            if (code := campaign.stop()) != STOPPED:
                return f"the run could not be stopped: {code}"
            last = campaign.run.newest()
            if last is None:
                return "no checkpoint is left"
            return compare(campaign.run, left_in_peace(campaign.run, last.step))
        finally:
            campaign.run.kill()


def _weathered(campaign: Campaign, fault: str, words: str, trouble: contextlib.AbstractContextManager[object]) -> Trial:
    """Every rank says that a save failed and why, training goes on, nothing is lost; afterwards saves work again."""
    run, ranks = campaign.run, campaign.run.ranks
    since = time.time()
    with trouble:

        def told() -> dict[int, Event]:
            return {
                e.rank: e for e in run.of("save", since=since) if not e.get("saved") and words in str(e.get("reason"))
            }

        run.wait_for(lambda: len(told()) == ranks, f"a word on every rank: {words}")
        detected = min(event.time for event in told().values()) - since
        run.wait_steps(6)
        kept = survey(run.checkpoints)
        for checkpoint in kept.sound:
            checkpoint.verify()
        left = [path.name for path in run.checkpoints.iterdir() if path.name.startswith(".")]
    healed = time.time()
    run.wait_for(
        lambda: len({e.rank for e in run.of("save", since=healed) if e.get("saved")}) == ranks, "a save afterwards"
    )
    # At most one save may be under way while we look.
    good = len(kept.sound) >= 2 and not kept.passed_over and len(left) <= 1 and not run.of("fault", since=since)
    return Trial(
        passed=good,
        fault=fault,
        outcome="told on every rank, training went on, older ones whole, next save worked"
        if good
        else f"{len(kept.sound)} sound, passed over {len(kept.passed_over)}, left {left}",
        detected_seconds=detected,
        steps_lost=0,
    )


def disk_full(campaign: Campaign, disk: Path) -> Trial:
    """X15: somebody else fills the disk, and frees it again."""

    @contextlib.contextmanager
    def ballast() -> Iterator[None]:
        path = disk / "ballast"
        with path.open("wb") as file:
            free = os.statvfs(disk)
            os.posix_fallocate(file.fileno(), 0, max(1, free.f_bavail * free.f_frsize - LEFT_BYTES))
        try:
            yield
        finally:
            path.unlink()

    return _weathered(campaign, "the disk of the checkpoints is full", "the disk is too full", ballast())


def file_too_large(campaign: Campaign, disk: Path) -> Trial:
    """X16: one rank may not write files as large as its part of a checkpoint."""
    rank, pid = campaign.victim()
    newest = campaign.run.newest()
    assert newest is not None
    size = max(file.bytes for file in newest.manifest.files)

    @contextlib.contextmanager
    def limit() -> Iterator[None]:
        before = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (size - 4096, before[1]))
        try:
            yield
        finally:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, before)

    return _weathered(campaign, f"EFBIG on rank {rank}", f"rank {rank}: File too large", limit())


def read_only(campaign: Campaign, disk: Path) -> Trial:
    """X20b: the file system turns read-only."""

    @contextlib.contextmanager
    def trouble() -> Iterator[None]:
        set_read_only(disk, True)
        try:
            yield
        finally:
            set_read_only(disk, False)

    return _weathered(campaign, "the file system is read-only", "Read-only file system", trouble())


def hanging(campaign: Campaign, disk: Path) -> Trial:
    """X20: every write waits and cannot even be killed, as on a network file system whose server is away."""
    run, since = campaign.run, time.time()
    with frozen(disk, FROZEN_SECONDS + 60):
        run_until = time.monotonic() + FROZEN_SECONDS
        while time.monotonic() < run_until:
            run.look()
            time.sleep(0.05)
    healed = time.time()
    run.wait_for(lambda: [e for e in run.of("save", since=healed) if e.get("saved")], "a save afterwards")
    steps = [e.time for e in run.of("step", rank=0, since=since) if e.time < healed]
    alarms = [e for e in run.of("save", since=since) if not e.get("saved")] + run.of("slow_save", since=since)
    went_on = len(steps) >= 2 and steps[-1] - since > 0.8 * FROZEN_SECONDS
    good = went_on and bool(alarms) and not run.of("fault", since=since)
    return Trial(
        passed=good,
        fault=f"every write hangs for {FROZEN_SECONDS:.0f} s",
        outcome="told, training went on, next save worked"
        if good
        else f"training went on: {went_on}, told: {bool(alarms)}, restarts: {len(run.of('fault', since=since))}",
        detected_seconds=min(event.time for event in alarms) - since if alarms else None,
        steps_lost=0,
    )


FAULTS: dict[str, StorageFault] = {
    "X15": disk_full,
    "X16": file_too_large,
    "X20b": read_only,
    "X20": hanging,
}

"""Faults of processes, one after the other, all on one run: after the last one it is compared with a run left in peace.

Every loss that any rank ever told, also of steps done twice, and every tensor of the last checkpoint (weights, moments,
random numbers) must have the bits of the undisturbed run. So a fault that is survived with slightly other numbers is
found, whichever it was.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Generator
from dataclasses import replace

from chaos.experiment import Rig, Trial
from chaos.running import PATIENCE_SECONDS, Broken, Run, compare, left_in_peace, make_scene, rank_of
from coremill.checkpoint.manifest import Unusable
from coremill.report.events import Event
from coremill.supervise.descendants import descendants

STOPPED, NON_FINITE, KILLED = 75, 70, 137
STOP_SECONDS = 5.0  # X5
FEWEST_STEPS, MOST_STEPS = 3, 14  # between two faults: always at least one new checkpoint on average
Fault = Callable[["Campaign"], Trial]


class Campaign:
    """The run that is being disturbed."""

    def __init__(self, rig: Rig, engine: str = "replicate") -> None:
        self.random = rig.random("campaign")
        self.folder = rig.folder
        self.run = Run(make_scene(rig.shared, engine=engine), rig.folder / "run", rig.shared)
        self._inside: str | None = None

    # --- between faults ---

    def going(self, inside: dict[str, object] | None = None) -> int:
        """Have it train, with these faults inside its ranks, for a random number of steps more; the last step done."""
        wanted = None if inside is None else json.dumps(inside)
        if self.run.process is not None and wanted != self._inside:
            self.stop()
        if self.run.process is None:
            self._inside = wanted
            self.run.start(environ={} if wanted is None else {"CHAOS_INSIDE": wanted})
        self.run.wait_steps(self.random.randint(FEWEST_STEPS, MOST_STEPS))
        return self.run.last_step

    def stop(self) -> int:
        """As a user would; the exit code."""
        os.kill(self.run.launcher_pid, signal.SIGTERM)
        return self.run.wait_end()

    def victim(self) -> tuple[int, int]:
        """A random rank and its process."""
        return self.random.choice(sorted(self.run.rank_pids().items()))

    # --- after a fault ---

    def recovered(self, since: float, fault: str, *, named: int | None, outcome: str = "went on by itself") -> Trial:
        """Wait until it trains again; what was seen on the way. `named`: the rank that has to be blamed."""
        run = self.run
        seen: Event = run.wait_for(lambda: run.of("fault", since=since), f"a word about: {fault}")[-1]
        step = run.wait_for(lambda: self._first_step_after(seen.time), f"a step after: {fault}")
        done = max((int(e.number("step")) for e in run.of("step", rank=0) if e.time < seen.time), default=0)
        blamed = named is None or seen.rank == named
        return Trial(
            passed=blamed,
            fault=fault,
            outcome=outcome if blamed else f"blamed rank {seen.rank} instead",
            detected_seconds=seen.time - since,
            resumed_seconds=step.time - since,
            steps_lost=done - int(step.number("step")) + 1,
        )

    def _first_step_after(self, moment: float) -> Event | None:
        """Of the attempt that began after that moment."""
        starts = self.run.of("start", rank=0, since=moment)
        steps = self.run.of("step", rank=0, since=starts[-1].time) if starts else []
        return steps[0] if steps else None

    def strangers(self) -> list[int]:
        """Ranks, or what they forked, that belong to no attempt that is going."""
        ours = set()
        if self.run.process is not None:
            for pid in self.run.rank_pids().values():
                ours |= {pid, *descendants(pid)}
        return [pid for pid in descendants(os.getpid()) if pid not in ours and rank_of(pid) is not None]

    def wait_no_strangers(self, seconds: float = 10.0) -> bool:
        """Whether they are gone in time."""
        deadline = time.monotonic() + seconds
        while self.strangers():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True


def battle(rig: Rig, counts: dict[str, int]) -> Generator[tuple[str, Trial], None, str | None]:
    """All asked-for faults, then the comparison."""
    campaign = Campaign(rig)
    try:
        for key in FAULTS:
            for _ in range(counts.get(key, 0)):
                try:
                    yield key, FAULTS[key](campaign)
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


# --- the faults ---


def killed(campaign: Campaign) -> Trial:
    """X1: SIGKILL of a random rank in a random step."""
    step, (rank, pid) = campaign.going(), campaign.victim()
    since = time.time()
    os.kill(pid, signal.SIGKILL)
    return campaign.recovered(since, f"rank {rank} killed after step {step}", named=rank)


def launcher_killed(campaign: Campaign) -> Trial:
    """X3: SIGKILL of the launcher; the same command, given by whoever looks after it, goes on."""
    step = campaign.going()
    since = time.time()
    os.kill(campaign.run.launcher_pid, signal.SIGKILL)
    code = campaign.run.wait_end()
    alone = campaign.wait_no_strangers()
    gone = time.time()
    done = campaign.run.last_step
    campaign.going()
    first = campaign._first_step_after(gone)
    return Trial(
        passed=alone and first is not None,
        fault=f"launcher killed after step {step}",
        outcome="no rank outlives it, the same command goes on" if alone else "ranks outlive it",
        detected_seconds=gone - since,
        steps_lost=None if first is None else done - int(first.number("step")) + 1,
        exit_code=128 - code if code < 0 else code,
    )


def stopped_for_ever(campaign: Campaign) -> Trial:
    """X4: a rank that stands still."""
    step, (rank, pid) = campaign.going(), campaign.victim()
    since = time.time()
    os.kill(pid, signal.SIGSTOP)
    return campaign.recovered(
        since, f"rank {rank} stopped after step {step}", named=rank, outcome="named, ended, went on by itself"
    )


def stopped_for_a_while(campaign: Campaign) -> Trial:
    """X5: a rank that stands still and goes on: nothing to be done about it."""
    step, (rank, pid) = campaign.going(), campaign.victim()
    run, since = campaign.run, time.time()
    os.kill(pid, signal.SIGSTOP)
    run_until = time.monotonic() + STOP_SECONDS
    while time.monotonic() < run_until:
        run.look()
        time.sleep(0.05)
    healed = time.time()
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)
    run.wait_for(lambda: run.of("step", rank=0, since=healed), "a step after the stall")
    run.wait_steps(2)
    faults, again = run.of("fault", since=since), run.of("start", since=since)
    next_step = run.of("step", rank=0, since=healed)[0]
    return Trial(
        passed=not faults and not again,
        fault=f"rank {rank} stopped for {STOP_SECONDS:.0f} s after step {step}",
        outcome="no restart" if not faults else "restarted although it healed",
        resumed_seconds=next_step.time - since,
        steps_lost=0 if not again else None,
    )


def asked_to_stop(whom: str) -> Fault:
    """X6: SIGTERM to one rank, to the launcher, or to all."""

    def ask(campaign: Campaign) -> Trial:
        campaign.going()
        run, pids = campaign.run, campaign.run.rank_pids()
        rank = campaign.random.choice(sorted(pids))
        targets = {"rank": [pids[rank]], "launcher": [run.launcher_pid], "all": [run.launcher_pid, *pids.values()]}
        since = time.time()
        for again in range(campaign.random.choice((1, 2))):  # a second SIGTERM changes nothing
            time.sleep(0.1 * again)
            for pid in targets[whom]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
        code = run.wait_end()
        seconds = time.time() - since
        last = {rank: max((int(e.number("step")) for e in run.of("step", rank=rank)), default=0) for rank in pids}
        saved = run.newest()
        same = len(set(last.values())) == 1 and saved is not None and saved.step == max(last.values())
        alone = campaign.wait_no_strangers()
        return Trial(
            passed=code == STOPPED and same and alone,
            fault=f"SIGTERM to {f'rank {rank}' if whom == 'rank' else whom} after step {max(last.values())}",
            outcome="all ranks saved the same step and ended"
            if same and alone
            else f"last steps {last}, saved {saved and saved.step}, processes left: {not alone}",
            resumed_seconds=seconds,
            steps_lost=None if saved is None else max(last.values()) - saved.step,
            exit_code=code,
        )

    return ask


def orphaned(campaign: Campaign) -> Trial:
    """X10: a rank dies and leaves a child that holds its sockets."""
    step = campaign.going({"kind": "orphan", "folder": str(campaign.folder)})
    rank, pid = campaign.victim()
    os.kill(pid, signal.SIGUSR2)
    note = campaign.folder / f"died-{pid}"
    campaign.run.wait_for(note.exists, "the death of a rank", may_end=True)
    since = float(note.read_text() or time.time())
    trial = campaign.recovered(since, f"rank {rank} died after step {step}, its child lives on", named=rank)
    if not campaign.wait_no_strangers():
        for stranger in campaign.strangers():  # or the next trials would be blamed for it
            os.kill(stranger, signal.SIGKILL)
        return replace(trial, passed=False, outcome="the child was left")
    return trial


def killed_twice(campaign: Campaign) -> Trial:
    """X11: a second kill 0 to 5 s after the first, wherever the recovery is by then."""
    step = campaign.going()
    # Two kills before a new commit and two after the last one would be four in a row: a crash loop, which rightly ends.
    begun = campaign.run.newest()
    campaign.run.wait_for(
        lambda: (newest := campaign.run.newest()) is not None and (begun is None or newest.step > begun.step),
        "a checkpoint since the last kills",
    )
    rank, pid = campaign.victim()
    since = time.time()
    os.kill(pid, signal.SIGKILL)
    delay = campaign.random.uniform(0, 5)
    until = time.monotonic() + delay
    while time.monotonic() < until:
        campaign.run.look()
        time.sleep(0.02)
    pids = campaign.run.wait_for(campaign.run.rank_pids, "ranks to kill")
    second = campaign.random.choice(sorted(pids))
    moment = time.time()
    with contextlib.suppress(ProcessLookupError):
        os.kill(pids[second], signal.SIGKILL)
    step_again = campaign.run.wait_for(
        lambda: campaign._first_step_after(moment), f"a step after two kills, {delay:.1f} s apart"
    )
    done = max((int(e.number("step")) for e in campaign.run.of("step", rank=0) if e.time < moment), default=0)
    return Trial(
        passed=True,
        fault=f"rank {rank} killed after step {step}, rank {second} {delay:.1f} s later",
        outcome="went on by itself",
        resumed_seconds=step_again.time - since,
        steps_lost=max(0, done - int(step_again.number("step")) + 1),
    )


def poisoned(campaign: Campaign) -> Trial:
    """X12: the same step fails on every attempt."""
    step = campaign.run.last_step + 7
    if campaign.run.process is not None:
        campaign.stop()
        step = campaign.run.last_step + 7
    since = time.time()
    campaign._inside = "raise"
    campaign.run.start(environ={"CHAOS_INSIDE": json.dumps({"kind": "raise", "rank": 1, "step": step})})
    code = campaign.run.wait_end(4 * PATIENCE_SECONDS)  # three restarts lie before the end
    attempts = len(campaign.run.of("start", rank=0, since=since))
    named = [e for e in campaign.run.of("error", rank=1, since=since) if f"poison in step {step}" in str(e.fields)]
    good = code not in (0, STOPPED) and bool(named) and attempts == 4 and campaign.wait_no_strangers()
    return Trial(
        passed=good,
        fault=f"rank 1 raises in step {step}, always",
        outcome="ended after 3 restarts without progress, cause named" if good else f"{attempts} attempts, exit {code}",
        exit_code=code,
    )


def not_a_number(campaign: Campaign) -> Trial:
    """X21: a loss or a weight that is no number, on one rank."""
    if campaign.run.process is not None:
        campaign.stop()
    kind = campaign.random.choice(("nan-loss", "inf-loss", "nan-weight"))
    step, rank = campaign.run.last_step + campaign.random.randint(3, 9), campaign.random.randrange(campaign.run.ranks)
    since, before = time.time(), campaign.run.newest()
    campaign._inside = kind
    campaign.run.start(environ={"CHAOS_INSIDE": json.dumps({"kind": kind, "rank": rank, "step": step})})
    code = campaign.run.wait_end()
    errors = campaign.run.of("error", since=since)
    told = {e.rank for e in errors if f"step {step}" in str(e.get("message")) and e.number("exit_code") == NON_FINITE}
    steps = {int(e.number("step")) for e in campaign.run.of("step", since=since)}
    saved = campaign.run.newest()
    good = code == NON_FINITE and told == set(range(campaign.run.ranks)) and max(steps, default=0) < step
    is_kept = before is None if saved is None else saved.step < step
    return Trial(
        passed=good and is_kept and campaign.wait_no_strangers(),
        fault=f"{kind} on rank {rank} in step {step}",
        outcome="all ranks stop before the update, step and rows named"
        if good
        else f"exit {code}, told by {sorted(told)}, steps up to {max(steps, default=0)}",
        exit_code=code,
    )


def wrong_clock(campaign: Campaign) -> Trial:
    """X14: the clock of one rank jumps."""
    if campaign.run.process is not None:
        campaign.stop()
    seconds = campaign.random.choice((-3600, -60, 60, 3600))
    step = campaign.run.last_step + 5
    since = time.time()
    campaign._inside = "clock"
    order = {"kind": "clock", "rank": 1, "seconds": seconds, "step": step}
    campaign.run.start(environ={"CHAOS_INSIDE": json.dumps(order)})
    campaign.run.wait_for(lambda: campaign.run.last_step >= step + 10, "steps after the jump")
    faults = campaign.run.of("fault", since=since)
    code = campaign.stop()
    return Trial(
        passed=not faults and code == STOPPED,
        fault=f"the clock of rank 1 jumps by {seconds} s in step {step}",
        outcome="nothing happens" if not faults else "restarted",
        steps_lost=0 if not faults else None,
        exit_code=code,
    )


FAULTS: dict[str, Fault] = {
    "X1": killed,
    "X5": stopped_for_a_while,
    "X4": stopped_for_ever,
    "X11": killed_twice,
    "X3": launcher_killed,
    "X6a": asked_to_stop("rank"),
    "X6b": asked_to_stop("launcher"),
    "X6c": asked_to_stop("all"),
    "X10": orphaned,
    "X12": poisoned,
    "X21": not_a_number,
    "X14b": wrong_clock,
}

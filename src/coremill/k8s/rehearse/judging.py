"""Was what is written enough: steps, restarts, lost work, times; and what is wrong, by its line. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from coremill.config.durations import DURATION_PATTERN, Interval, interval_of, seconds_of
from coremill.errors import NonFinite, PeerLost, Stopped
from coremill.k8s.check.lints.reading import text
from coremill.k8s.rehearse.controllers import PlannedSet
from coremill.k8s.rehearse.job_controller import BY_LIMIT
from coremill.k8s.rehearse.rehearsal import Life, Seen
from coremill.k8s.rehearse.run_in_pods import PodRunFile

_IN_FLIGHT_SECONDS = 5.0  # a step may end, and be written down, a moment after a pod is gone


@dataclass(frozen=True)
class Fault:
    """Something that is written wrong, or did not work: where, what, and what to do."""

    where: str
    problem: str
    fix: str

    def __str__(self) -> str:
        return f"{self.where}: {self.problem}; {self.fix}"


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """What a rehearsal has shown."""

    faults: tuple[Fault, ...]
    summary: dict[str, Any]

    @property
    def passed(self) -> bool:
        return not self.faults


def judge(seen: Seen, planned: PlannedSet, run_file: PodRunFile | None) -> Judgement:
    faults = [*_of_the_end(seen), *_of_disruptions(seen, planned, run_file), *_of_waiting(seen, run_file)]
    faults += (
        Fault(f"--{one.kind} {one.text}", "it never came to it: the job had ended before", "name an earlier time")
        for one in seen.never_due
        if seen.state == "complete"
    )
    report = seen.events.report()
    lost = sum(steps for _, steps in seen.events.lost())
    summary = {
        "passed": not faults,
        "state": seen.state,
        "reason": seen.reason or None,
        "steps": seen.events.done,
        "steps_lost": lost,
        "loss_last": report.get("loss_last"),
        "restarts": len(seen.lives) - len({life.pod.index for life in seen.lives}),
        "restarts_counted": sum(bool(life.answer and life.answer.counted) for life in seen.lives),
        "job_set_restarts": seen.set_restarts,
        "seconds": round(seen.seconds, 3),
        "times": _times(seen, run_file),
        "pods": [_life_to_json(life) for life in seen.lives],
        "faults": [{"where": one.where, "problem": one.problem, "fix": one.fix} for one in faults],
    }
    return Judgement(faults=tuple(faults), summary=summary)


def _of_the_end(seen: Seen) -> Iterator[Fault]:
    if seen.state != "failed" or seen.last is None or seen.line is None:
        return
    life = seen.last
    what = f"the job has failed ({seen.reason}): pod {life.pod.index} ended with {life.exit_code}"
    if seen.reason == BY_LIMIT:
        fix = "the end of its log says why; the same happened at every start"
    elif life.exit_code == NonFinite.exit_code:
        fix = "the run's numbers are not finite: the end of its log says where"
    else:
        fix = "the end of its log says what is wrong in the run file"
    yield Fault(seen.line.place, what, fix)


def _of_disruptions(seen: Seen, planned: PlannedSet, run_file: PodRunFile | None) -> Iterator[Fault]:
    """A reclaim may cost nothing but time; a kill at most what is done between two saves."""
    for life in seen.lives:
        one, answer = life.disruption, life.answer
        if one is None or answer is None:
            continue
        if one.kind == "reclaim" and life.reclaim is not None:
            if not life.reclaim.is_told:
                yield Fault(
                    planned.job.spec.part("template", "metadata", "annotations").place,
                    f"no SIGTERM reached pod {one.pod} when its machine was taken back",
                    "leave karpenter.sh/do-not-disrupt out",
                )
            elif life.was_killed:
                yield Fault(
                    life.reclaim.line.place,
                    f"{life.reclaim.grace_seconds:g} s of grace were not enough for pod {one.pod}: it was killed"
                    " before it had saved",
                    "give pods longer than a save takes (coremill k8s render does)",
                )
            elif life.exit_code not in (0, Stopped.exit_code):
                yield Fault(
                    f"--reclaim {one.text}",
                    f"pod {one.pod} ended with {life.exit_code} on SIGTERM instead of {Stopped.exit_code} (saved)",
                    "the end of its log says why",
                )
            if answer.counted:
                left = planned.job.backoff_limit
                yield Fault(
                    answer.line.place,
                    f"the exit code {life.exit_code} of a pod that was taken back is counted: after {left} more"
                    " such ends the job fails, though nothing is wrong",
                    f"action: Ignore for the exit code {Stopped.exit_code} and for DisruptionTarget",
                )
        lost = _lost_after(seen, life)
        if one.kind == "reclaim" and lost and not life.was_killed:
            yield Fault(f"--reclaim {one.text}", f"{lost} steps were lost, though the pod was told", "see the logs")
        every = interval_of(text(run_file.get("checkpoint.every")) or "never") if run_file else Interval()
        if one.kind == "kill" and every.steps is not None and lost > every.steps:
            yield Fault(
                f"--kill {one.text}",
                f"{lost} steps were lost, and a checkpoint is due every {every.steps}",
                "see the logs: which saves failed",
            )


def _of_waiting(seen: Seen, run_file: PodRunFile | None) -> Iterator[Fault]:
    """Pods that gave the others up."""
    for life in seen.lives:
        if life.exit_code == PeerLost.exit_code and life.disruption is None:
            waited = run_file.get("supervise.wait_for_hosts") if run_file else None
            yield Fault(
                "supervise.wait_for_hosts",
                f"pod {life.pod.index} ended with {PeerLost.exit_code}: it waited {waited or 'its time'} for another",
                "give a lost pod longer to come back, or see in the logs why it does not",
            )


def _lost_after(seen: Seen, life: Life) -> int:
    """Steps that were done before a disruption and again for its sake."""
    return sum(steps for moment, steps in seen.events.lost() if _blamed(seen, moment) is life)


def _blamed(seen: Seen, moment: float) -> Life | None:
    """For whom work was begun again then: a pod that was killed since the last step that was done; else the last one
    that was disrupted at all."""
    disrupted = [life for life in seen.lives if life.disruption is not None and life.disrupted_at <= moment]
    last_step = max((time for time, _ in seen.events.steps if time < moment), default=0.0)
    kills = [
        life
        for life in disrupted
        if life.disruption is not None
        and life.disruption.kind == "kill"
        and life.disrupted_at >= last_step - _IN_FLIGHT_SECONDS
    ]
    return min(kills, key=_disrupted_at) if kills else max(disrupted, key=_disrupted_at, default=None)


def _disrupted_at(life: Life) -> float:
    return life.disrupted_at


def _times(seen: Seen, run_file: PodRunFile | None) -> dict[str, Any]:
    """Measured beside what is written; seconds."""
    told = [life for life in seen.lives if life.told_seconds is not None and life.ended_seconds is not None]
    ends: list[float] = [life.ended_seconds - life.told_seconds for life in told]  # type: ignore[operator]
    away = [
        later.started_seconds - life.ended_seconds
        for life in seen.lives
        if life.ended_seconds is not None and (later := _successor(seen, life)) is not None
    ]
    saves = [float(save["seconds"]) for save in seen.events.saves if "seconds" in save]
    waits = text(run_file.get("supervise.wait_for_hosts")) if run_file else ""
    grace = text(run_file.get("checkpoint.grace")) if run_file else ""
    return {
        "longest_save_seconds": max(saves, default=None),
        "longest_end_after_sigterm_seconds": round(max(ends), 3) if ends else None,
        "pod_grace_seconds": min((life.reclaim.grace_seconds for life in told if life.reclaim), default=None),
        "checkpoint_grace_seconds": seconds_of(grace) if _is_duration(grace) else None,
        "longest_away_seconds": round(max(away), 3) if away else None,
        "wait_for_hosts_seconds": seconds_of(waits) if _is_duration(waits) else None,
    }


def _is_duration(words: str) -> bool:
    return re.match(DURATION_PATTERN, words) is not None


def _successor(seen: Seen, life: Life) -> Life | None:
    later = seen.lives[seen.lives.index(life) + 1 :]
    return next((one for one in later if one.pod.index == life.pod.index), None)


def _life_to_json(life: Life) -> dict[str, Any]:
    return {
        "pod": life.pod.index,
        "name": life.pod.name,
        "address": life.network.address,
        "started_seconds": round(life.started_seconds, 3),
        "ended_seconds": None if life.ended_seconds is None else round(life.ended_seconds, 3),
        "exit_code": life.exit_code,
        "disruption": None if life.disruption is None else life.disruption.kind,
        "killed_at_end_of_grace": life.was_killed,
        "counted": bool(life.answer and life.answer.counted),
    }

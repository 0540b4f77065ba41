"""The loop of a rehearsal: pods start, are disrupted, end and are replaced, as the controllers say.

Nothing here decides: `job_controller` does, and what was seen is kept for `judging`.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from coremill.k8s.rehearse.controllers import PlannedSet
from coremill.k8s.rehearse.disruptions import Disruption, ReclaimTimes, reclaim_times
from coremill.k8s.rehearse.job_controller import Answer, JobController, SetController
from coremill.k8s.rehearse.machine import SUBNET, Machine, PodNetwork, first_process, hears
from coremill.k8s.rehearse.pods import Container, Pod, Secrets, make_pod
from coremill.k8s.rehearse.policy import has_service, nft_rules
from coremill.k8s.rehearse.run_in_pods import PodWords, RunEvents, with_fewer_threads
from coremill.k8s.rehearse.written import Written, WrittenObjects
from coremill.report.terminal import format_loss

_TICK_SECONDS = 0.05
_SHOWN_EVERY_SECONDS = 5.0
_DEAF_SECONDS = 5.0  # so long a reclaim waits for a program that has just begun to listen for SIGTERM
_SUFFIX = "bcdfghjklmnpqrstvwxz2456789"  # what Kubernetes makes names from
Say = Callable[[int | None, str], None]  # which pod (None: the job), what


@dataclass
class Life:
    """A pod from its start to its end."""

    pod: Pod
    network: PodNetwork
    waiting: list[Container]  # those that have yet to run, one after the other
    process: subprocess.Popen[bytes]
    running: Container
    started_seconds: float
    disruption: Disruption | None = None
    reclaim: ReclaimTimes | None = None
    told_seconds: float | None = None  # SIGTERM
    kill_at_seconds: float | None = None
    was_killed: bool = False  # by the end of its grace
    ended_seconds: float | None = None
    exit_code: int | None = None
    answer: Answer | None = None
    disrupted_at: float = 0.0  # unix seconds, as events have them


@dataclass
class Seen:
    """All that happened, for the judge."""

    lives: list[Life] = field(default_factory=list)
    events: RunEvents = field(default_factory=lambda: RunEvents(None))
    state: str = "running"  # complete, failed
    reason: str = ""
    line: Written | None = None  # what ended the job
    last: Life | None = None  # whose end it was
    set_restarts: int = 0
    never_due: list[Disruption] = field(default_factory=list)
    seconds: float = 0.0


class Rehearsal:
    """One job on one machine."""

    def __init__(
        self,
        planned: PlannedSet,
        objects: WrittenObjects,
        secrets: Secrets,
        machine: Machine,
        disruptions: Sequence[Disruption],
        events: RunEvents,
        threads_per_rank: int,
        say: Say,
    ) -> None:
        self.planned, self.objects, self.secrets, self.machine = planned, objects, secrets, machine
        self.pending, self.threads_per_rank, self.say = list(disruptions), threads_per_rank, say
        self.seen = Seen(events=events)
        self.controller = JobController(planned.job)
        self.set_controller = SetController(planned)
        self._alive: dict[int, Life] = {}
        self._due: dict[int, float] = {}  # pods to be started, and when
        self._began = time.monotonic()
        self._shown_step, self._shown_seconds = 0, 0.0
        self._words, self._words_seconds = PodWords(machine.logs), 0.0
        self._cpus = sorted(os.sched_getaffinity(0))

    def run(self) -> Seen:
        """To the end of the job. Whatever ends this, no pod is left."""
        job = self.planned.job
        self._due = {index: 0.0 for index in range(min(job.completions, job.parallelism))}
        try:
            while self.seen.state == "running":
                self._tick()
                time.sleep(_TICK_SECONDS)
            self._end_all(with_grace=True)
        finally:
            self._end_all(with_grace=False)
            self.seen.events.follow()
            self.seen.seconds = self._now()
            self.seen.never_due = self.pending
        return self.seen

    def _tick(self) -> None:
        now = self._now()
        for index in [index for index, due in self._due.items() if due <= now]:
            del self._due[index]
            self._start(index)
        self.seen.events.follow()
        self._show_words()
        self._show_progress()
        for one in list(self.pending):
            if self._is_due(one, now):
                self.pending.remove(one)
                self._disrupt(one, now)
        for life in list(self._alive.values()):
            if life.ended_seconds is not None:  # meanwhile: a failed job ends them all
                continue
            if life.kill_at_seconds is not None and now >= life.kill_at_seconds and life.process.poll() is None:
                life.was_killed = True
                self.say(life.pod.index, "SIGKILL: its grace is over")
                _kill(life)
            if life.process.poll() is not None:
                self._container_ended(life)

    def _now(self) -> float:
        return time.monotonic() - self._began

    def _start(self, index: int) -> None:
        network = self.machine.make_network()
        suffix = "".join(random.choices(_SUFFIX, k=5))
        pod = make_pod(self.planned.job, index, suffix, network.address, self.objects, self.secrets)
        pod = with_fewer_threads(pod, self.threads_per_rank)
        rules = nft_rules(self.objects, pod.labels, SUBNET)
        if rules is not None and self.machine.has_filter:
            self.machine.let_through(network, rules)
        waiting = [*pod.init_containers, pod.container]
        running = waiting.pop(0)
        self._names([*self._addresses(), (pod, network.address)])
        process = self.machine.start(pod, running, network, self._cpus_of(index))
        life = Life(pod, network, waiting, process, running, self._now())
        self._alive[index] = life
        self._words.begin_anew()
        self.seen.lives.append(life)
        self.say(index, f"{pod.name} starts at {network.address}")

    def _addresses(self) -> list[tuple[Pod, str]]:
        return [(life.pod, life.network.address) for life in self._alive.values()]

    def _names(self, pods: list[tuple[Pod, str]]) -> None:
        """The names that the headless service gives to pods that have an address."""
        names: dict[str, Sequence[str]] = {}
        for pod, address in pods:
            if has_service(pod, self.planned.job, self.objects):
                name, namespace = f"{pod.hostname}.{pod.subdomain}", self.planned.job.namespace
                ends = (f".{namespace}.svc.cluster.local", f".{namespace}.svc", f".{namespace}", "")
                names[address] = [f"{name}{end}" for end in ends]
        self.machine.name_pods(pods, names)

    def _cpus_of(self, index: int) -> list[int]:
        """A part of this machine's for each pod: in a cluster none shares its cores with another."""
        pods = self.planned.job.parallelism
        each = max(1, len(self._cpus) // pods)
        return [self._cpus[(index * each + place) % len(self._cpus)] for place in range(each)]

    def _is_due(self, one: Disruption, now: float) -> bool:
        life = self._alive.get(one.pod)
        if life is None or life.disruption is not None:
            return False
        if one.kind == "reclaim" and now - life.started_seconds < _DEAF_SECONDS and not hears(life.process.pid):
            return False
        if one.when.steps is not None:
            return self.seen.events.step >= one.when.steps
        return now >= (one.when.seconds or 0.0)

    def _disrupt(self, one: Disruption, now: float) -> None:
        life = self._alive[one.pod]
        life.disruption, life.disrupted_at = one, time.time()
        if one.kind == "kill":
            self.say(one.pod, "SIGKILL, without a word (--kill)")
            _kill(life)
            return
        life.reclaim = reclaim_times(life.pod, self.objects)
        life.kill_at_seconds = now + life.reclaim.grace_seconds
        if not life.reclaim.is_told:
            gone = f"gone in {life.reclaim.grace_seconds:g} s"
            self.say(one.pod, f"its machine is taken back (--reclaim): no SIGTERM reaches it, {gone}")
            return
        life.told_seconds = now
        self.say(one.pod, f"its machine is taken back (--reclaim): SIGTERM, {life.reclaim.grace_seconds:g} s of grace")
        _signal(life, signal.SIGTERM)

    def _container_ended(self, life: Life) -> None:
        code = _exit_code(life.process)
        if code == 0 and life.waiting:
            life.running = life.waiting.pop(0)
            life.process = self.machine.start(life.pod, life.running, life.network, self._cpus_of(life.pod.index))
            return
        index = life.pod.index
        self._bury(life, code)
        is_reclaimed = life.disruption is not None and life.disruption.kind == "reclaim"
        answer = self.controller.pod_ended(index, code, is_disrupted=is_reclaimed, container=life.running.name)
        life.answer = answer
        took = "" if life.told_seconds is None else f" {self._now() - life.told_seconds:.1f} s after SIGTERM"
        if answer.action == "done":
            self.say(index, "done")
            if self.controller.is_complete:
                self.seen.state = "complete"
            return
        if answer.action == "replace":
            counted = (
                f"counted, {self.controller.counted} of {self.planned.job.backoff_limit}"
                if answer.counted
                else "not counted"
            )
            self.say(index, f"ended with {code}{took}: {counted}; a new pod in {answer.delay_seconds:g} s")
            self._due[index] = 0.0
            # Of the Job, not of the pod: whoever waits for a start waits from the last failure on.
            self._due = {one: self._now() + answer.delay_seconds for one in self._due}
            return
        self.say(index, f"ended with {code}{took}: the job fails ({answer.reason})")
        self._job_failed(answer, life)

    def _job_failed(self, answer: Answer, life: Life) -> None:
        self._end_all(with_grace=True)
        self._due.clear()
        action, line = self.set_controller.job_failed(answer.reason)
        if action == "fail":
            self.seen.state, self.seen.reason, self.seen.last = "failed", answer.reason, life
            self.seen.line = answer.line
            return
        self.seen.set_restarts += 1
        self.say(None, f"the JobSet starts anew ({line.place})")
        self.controller = JobController(self.planned.job)
        self._due = {index: self._now() for index in range(self.planned.job.parallelism)}

    def _bury(self, life: Life, code: int) -> None:
        life.ended_seconds, life.exit_code = self._now(), code
        self._alive.pop(life.pod.index, None)
        self._names(self._addresses())
        self.machine.remove_network(life.network)

    def _end_all(self, *, with_grace: bool) -> None:
        """As a controller deletes pods: SIGTERM, their grace, SIGKILL."""
        lives, told = list(self._alive.values()), time.monotonic()
        for life in lives:
            _signal(life, signal.SIGTERM if with_grace else signal.SIGKILL)
        for life in lives:
            with contextlib.suppress(subprocess.TimeoutExpired):
                left = max(0.0, told + life.pod.grace_seconds - time.monotonic())
                life.process.wait(left if with_grace else None)
            _signal(life, signal.SIGKILL)
            life.process.wait()
            self._bury(life, _exit_code(life.process))

    def _show_words(self) -> None:
        """What pods say of themselves, now and then; what several say, once."""
        if self._now() - self._words_seconds >= _SHOWN_EVERY_SECONDS:
            self._words_seconds = self._now()
            for index, life in sorted(self._alive.items()):
                if words := self._words.of(life.pod.name):
                    self.say(index, words)

    def _show_progress(self) -> None:
        """Now and then: the run's own screen is in the log of its pod."""
        step, now = self.seen.events.step, self._now()
        if step < self._shown_step or (step > self._shown_step and now - self._shown_seconds >= _SHOWN_EVERY_SECONDS):
            self._shown_step, self._shown_seconds = step, now
            self.say(None, f"step {step}, loss {format_loss(self.seen.events.loss)}")


def _signal(life: Life, number: signal.Signals) -> None:
    if life.process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            life.process.send_signal(number)


def _kill(life: Life) -> None:
    """The container's own processes: their connections are closed before the pod's network goes, as in a cluster."""
    inner = first_process(life.process.pid)
    if inner is None:
        _signal(life, signal.SIGKILL)
    else:
        with contextlib.suppress(ProcessLookupError):
            os.kill(inner, signal.SIGKILL)


def _exit_code(process: subprocess.Popen[bytes]) -> int:
    code = process.wait()
    return 128 - code if code < 0 else code

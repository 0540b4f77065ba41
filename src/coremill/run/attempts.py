"""The launcher's watch over its ranks: what it sees goes on the screen and into the events, and ranks that die or hang
are started again from the newest whole checkpoint. No torch.

    fault    cause, text, exit_code, signal, step, committed_step, detected_seconds, action: restart | end
    restart  attempt, cause, from_step, steps_lost, resumed_seconds: written when the first step is done again
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from coremill.checkpoint.continuation import checkpoint_folder
from coremill.checkpoint.manifest import Checkpoint, survey
from coremill.config.durations import seconds_of
from coremill.config.schema import AUTO, RunConfig
from coremill.plan.saving import GRACE_SECONDS, STANDING_SECONDS
from coremill.plan.types import Plan
from coremill.report.events import Event, EventFollower, EventWriter, read_events
from coremill.report.readers.base import Readers
from coremill.report.terminal import format_bytes
from coremill.run.early_imports import EarlyImports
from coremill.run.folder import RunFolder
from coremill.run.prepare import Orders
from coremill.supervise.fork_client import ForkServer
from coremill.supervise.hang_detector import HangDetector
from coremill.supervise.rank_environment import Setting, node_of_launcher, shared_settings
from coremill.supervise.rank_process import memory_note
from coremill.supervise.ranks import Outcome, run_local_ranks
from coremill.supervise.restarts import Decision, RestartBudget, cause_of, is_worth_a_restart, supervise
from coremill.supervise.spot import spot_notices
from coremill.supervise.stuck import Limits
from coremill.world.heartbeat import HeartbeatBoard
from coremill.world.identity import NodeIdentity
from coremill.world.run_lock import OWNED
from coremill.world.stop import StopSignals


@dataclass(frozen=True, kw_only=True)
class NodeRun:
    """A run as the launcher of one node knows it."""

    config: RunConfig
    orders: Orders
    folder: RunFolder
    environ: Mapping[str, str]
    node: NodeIdentity | None  # None: the only one
    readers: Readers

    @property
    def nodes(self) -> int:
        return 1 if self.node is None else self.node.nodes

    @property
    def node_rank(self) -> int:
        return 0 if self.node is None else self.node.node_rank

    @property
    def leads(self) -> bool:
        """Whether this node speaks for the run."""
        return self.node_rank == 0

    def committed_step(self) -> int:
        """Of the newest checkpoint here."""
        return committed_step(self.config, self.folder.path)


@dataclass(frozen=True)
class Ending:
    """How the last attempt ended, and when it had begun."""

    outcome: Outcome
    since: float  # unix seconds: what was said before is of an earlier attempt


def watch_ranks(run: NodeRun, imports: EarlyImports) -> Ending:
    """Start this node's ranks, show their events until they end, and start them again where that is worth it."""
    wanted, plan = run.config.supervise, run.orders.plan
    budget = RestartBudget(
        enabled=wanted.restart,
        without_progress=wanted.restarts_without_progress,
        wait_for_hosts_seconds=seconds_of(wanted.wait_for_hosts) if run.nodes > 1 else 0.0,
        committed_step=run.committed_step(),
    )
    settings = shared_settings(plan, run.environ, node_of_launcher(plan, run.node, port=0))
    log_file = run.folder.logs / f"fork-server-{run.node_rank:05d}.log"
    with (
        HeartbeatBoard(plan.ranks_per_node.value) as board,
        run.readers,
        imports.for_ranks(plan, run.orders.model, log_file, run.readers.note) as fork_server,
    ):
        watched = _Watched(run, settings, fork_server, board)
        # Between two attempts too: a request ends a run as what it is, and is written down.
        with (
            watched.stop_signals,
            spot_notices(run.config.checkpoint.spot_notices, run.environ, watched.on_notice),
        ):
            outcome = supervise(watched, budget, run.committed_step, watched.on_fault)
        watched.show_events()
    return Ending(outcome, watched.since)


def committed_step(config: RunConfig, run_folder: Path) -> int:
    """Of the newest checkpoint whose structure is sound; 0: there is none.

    Where hosts share no folder it is the newest that this host has a part of: enough to see that the run gets on.
    """
    newest = _newest(config, run_folder)
    return 0 if newest is None else newest.step


def origin_in_words(config: RunConfig, run_folder: Path, nodes: int) -> str:
    """Where ranks that start again go on, as far as this host can tell."""
    newest = _newest(config, run_folder)
    if newest is not None and not newest.manifest.hosts:
        return f"step {newest.step}"
    return "the start" if newest is None and nodes == 1 else "the newest step that is whole over all hosts"


def _newest(config: RunConfig, run_folder: Path) -> Checkpoint | None:
    try:
        return next(iter(survey(checkpoint_folder(config, run_folder)).sound), None)
    except OSError:  # the storage is away: nothing new is committed there
        return None


def grace_of(config: RunConfig, plan: Plan) -> float:
    """Seconds from the request to stop to the end by force: as the user set it, else as planned."""
    if config.checkpoint.grace != AUTO:
        return seconds_of(config.checkpoint.grace)
    return GRACE_SECONDS if plan.save is None else plan.save.grace_seconds.value


def limits_of(config: RunConfig, nodes: int, planned_step_seconds: float) -> Limits:
    """What the section `supervise` says about waiting."""
    wanted = config.supervise
    named = wanted.stuck_after not in (AUTO, "never")
    return Limits(
        stuck_after_seconds=seconds_of(wanted.stuck_after) if named else None,
        is_watching=wanted.stuck_after != "never",
        # Ranks give a late save up themselves; who cannot even do that is ended.
        save_deadline_seconds=1.5 * _save_deadline(config) + 30.0,
        save_may_get_on=wanted.save_deadline == AUTO,
        other_hosts=nodes > 1,
        planned_step_seconds=planned_step_seconds,
    )


def _save_deadline(config: RunConfig) -> float:
    named = config.supervise.save_deadline
    return STANDING_SECONDS if named == AUTO else seconds_of(named)


def errors_of(rank: int, run_folder: Path, since: float) -> list[Event]:
    """What a rank itself said of its failure."""
    return [e for e in read_events(run_folder) if e.kind == "error" and e.rank == rank and e.time >= since]


@dataclass
class _Fault:
    """The last failure, until the run is going again."""

    outcome: Outcome
    rank: int
    step: int  # the last one done


class _Watched:
    """All attempts of this launcher, one after the other."""

    def __init__(
        self, run: NodeRun, settings: tuple[Setting, ...], fork_server: ForkServer | None, board: HeartbeatBoard
    ) -> None:
        self._run, self._settings, self._fork_server, self._board = run, settings, fork_server, board
        self._follower = EventFollower(run.folder.path, since=time.time())
        self._limits = limits_of(run.config, run.nodes, run.orders.plan.step_seconds.total)
        self._attempt = 0
        self._fault: _Fault | None = None
        self._steps_done = 0  # in any attempt
        self._notice: str | None = None
        self._first_rank = run.node_rank * board.ranks
        self._report_before = run.folder.report_stamp()
        self._hang_detector = self._new_hang_detector()
        self.stop_signals = StopSignals()
        self.since = time.time()

    def _new_hang_detector(self) -> HangDetector:
        planned = self._run.orders.plan.save
        return HangDetector(self._board, self._limits, self._slow_save, 0.0 if planned is None else planned.seconds)

    @property
    def has_met(self) -> bool:
        """Whether the ranks of the last attempt found each other."""
        return self._hang_detector.has_met

    @property
    def has_trained(self) -> bool:
        """Whether a step was done in any attempt."""
        return self._steps_done > 0

    def run(self, number: int) -> Outcome:
        """One attempt."""
        OWNED.check_now()
        if number > 0 and self._is_finished_by_others():
            self._run.readers.note("the run was finished by the other nodes meanwhile: nothing is left to do here")
            return Outcome(
                exit_code=0,
                failed_rank=None,
                signal=None,
                message="",
                exit_codes=(),
                log_tail="",
                log_file=None,
                settings=self._settings,
            )
        self._attempt = number
        self._hang_detector = self._new_hang_detector()
        self.since = time.time()
        outcome = run_local_ranks(
            argv=[sys.executable, "-m", "coremill", "train", str(self._run.folder.config)],
            plan=self._run.orders.plan,
            environ=self._run.environ,
            log_folder=self._run.folder.logs,
            on_tick=self._tick,
            identity_base=self._run.node,
            stop_grace_seconds=grace_of(self._run.config, self._run.orders.plan),
            grace_may_grow=self._run.config.checkpoint.grace == AUTO,
            on_stop=self._on_stop,
            settings=self._settings,
            hang_detector=self._hang_detector,
            ends_at_once=is_worth_a_restart,
            append_logs=number > 0,
            fork_server=self._fork_server,
            stop_signals=self.stop_signals,
        )
        self._tick()
        return self._with_memory(outcome)

    def _is_finished_by_others(self) -> bool:
        """A node that was lost between its last step and its end has a successor whom nobody waits for.

        A report that was there before is of a shorter run, which this one goes on with.
        """
        folder = self._run.folder
        return not self._run.leads and folder.is_finished() and folder.report_stamp() != self._report_before

    def on_notice(self, text: str) -> None:
        """This machine will be taken away; the request to stop that follows is said in these words."""
        self._notice = text
        with EventWriter(self._run.folder.path, self._first_rank) as events:
            events.write("notice", text=text)

    def _on_stop(self, request: str) -> None:
        again = " again" if request == "Ctrl-C" else ""
        self._run.readers.note(f"{self._notice or request}: saving, then stopping; Ctrl-C{again} ends at once")

    def _with_memory(self, outcome: Outcome) -> Outcome:
        """A rank killed for lack of memory, with what it had reached and what was planned for it."""
        rank = outcome.failed_rank
        if rank is None or not outcome.is_out_of_memory:
            return outcome
        tally = self._run.readers.tally.ranks.get(rank)
        note = memory_note(
            outcome.memory_kills,
            rank_peak_bytes=None if tally is None else tally.peak_rss_bytes,
            planned_bytes=self._run.orders.plan.memory.peak.total,
        )
        return replace(outcome, message=f"rank {rank} was ended by SIGKILL{note}")

    def show_events(self) -> None:
        """What ranks said since the last look."""
        self._run.readers.take(self._follower.poll())

    def _tick(self) -> None:
        OWNED.check()
        self._run.readers.take_work(self._hang_detector.readings)
        self.show_events()
        self._steps_done = max(self._steps_done, self._hang_detector.steps_done)
        if self._fault is not None and self._hang_detector.first_step_done_at is not None:
            self._say_resumed(self._fault, self._hang_detector.first_step_done_at)
            self._fault = None

    def on_fault(self, outcome: Outcome, decision: Decision, committed: int) -> None:
        """Say what happened and what follows, once on the screen and once in the events."""
        if not is_worth_a_restart(outcome.exit_code) or outcome.on_request:
            return
        rank = self._first_rank if outcome.failed_rank is None else outcome.failed_rank
        text = self._in_words(outcome, rank)
        with EventWriter(self._run.folder.path, rank) as events:
            events.write(
                "fault",
                cause=cause_of(outcome),
                text=text,
                exit_code=outcome.exit_code,
                signal=outcome.signal,
                attempt=self._attempt,
                hostname=socket.gethostname(),
                launcher_pid=os.getpid(),
                step=self._steps_done,
                committed_step=committed,
                detected_seconds=outcome.unseen_seconds,
                action="restart" if decision.restart else "end",
                why_not=decision.why_not or None,
            )
        if decision.restart:
            where = origin_in_words(self._run.config, self._run.folder.path, self._run.nodes)
            self._run.readers.note(f"{text}: all ranks start again from {where} (restart {decision.number})")
            self._fault = _Fault(outcome, rank, self._steps_done)
        elif decision.why_not and decision.number:
            self._run.readers.note(f"{text}: the run ends, {decision.why_not}")

    def _in_words(self, outcome: Outcome, rank: int) -> str:
        """The rank's own first line where it left one, else what was seen of its end."""
        if outcome.stuck is None and outcome.signal is None:
            for error in errors_of(rank, self._run.folder.path, self.since)[:1]:
                return f"rank {rank}: {str(error.get('message')).splitlines()[0]}"
        return outcome.message

    def _say_resumed(self, fault: _Fault, at: float) -> None:
        origin = self._hang_detector.origin_step or 0
        lost, seconds = max(0, fault.step - origin), at - fault.outcome.failed_at
        with EventWriter(self._run.folder.path, fault.rank) as events:
            events.write(
                "restart",
                attempt=self._attempt,
                cause=cause_of(fault.outcome),
                from_step=origin,
                steps_lost=lost,
                resumed_seconds=seconds,
            )
        steps = "no step" if not lost else "1 step" if lost == 1 else f"{lost} steps"
        self._run.readers.note(f"training again after {seconds:.1f} s from step {origin}: {steps} repeated")

    def _slow_save(self, local_rank: int, seconds: float) -> None:
        rank = self._first_rank + local_rank
        deadline, reading = _save_deadline(self._run.config), self._hang_detector.readings[local_rank]
        with EventWriter(self._run.folder.path, rank) as events:
            events.write(
                "slow_save",
                seconds=seconds,
                deadline_seconds=deadline,
                written_bytes=reading.saved_bytes,
                total_bytes=reading.save_total_bytes,
            )
        far = f"{format_bytes(reading.saved_bytes)} of {format_bytes(reading.save_total_bytes)}"
        limit = f"after {deadline:.0f} s" + (" without a byte" if self._limits.save_may_get_on else "")
        self._run.readers.note(
            f"rank {rank} has been writing a checkpoint for {seconds:.0f} s ({far}): storage is slow or hangs;"
            f" training goes on, and the save is given up {limit}"
        )

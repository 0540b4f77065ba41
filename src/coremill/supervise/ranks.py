"""Start this machine's ranks, watch them, and end them all when one fails or the user wants to stop.

Every rank is a session of its own (Ctrl-C on the terminal reaches the launcher only) and dies with the launcher, even
if that is killed. A failing rank ends the others within seconds: they are asked to end (SIGTERM), then killed. With a
hang detector a rank that is stuck counts as one that failed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from coremill.errors import Stopped
from coremill.plan.layout import Layout
from coremill.plan.types import Plan
from coremill.supervise.descendants import without_strays
from coremill.supervise.fork_client import ForkServer
from coremill.supervise.fork_server import RankStart
from coremill.supervise.hang_detector import HangDetector
from coremill.supervise.rank_environment import (
    Setting,
    cpus_for_rank,
    node_of_launcher,
    rank_environment,
    shared_settings,
)
from coremill.supervise.rank_process import RankProcess, end_all, explained, memory_kills, start_rank
from coremill.supervise.stuck import Stuck
from coremill.supervise.waiting import wait_for_end
from coremill.world.identity import NodeIdentity
from coremill.world.sockets import listen_on_loopback
from coremill.world.stop import StopSignals

GRACE_SECONDS = 5.0  # from SIGTERM to SIGKILL
# A rank that lost its peers may be gone before the rank that failed, which waits for the others to hear why
# (HEARING_SECONDS of world/group.py) and then unwinds torch: up to a second or two, longer on a busy machine.
BLAME_SECONDS = 20.0
GROWN_GRACE_SECONDS = 120.0  # from the last byte that was saved
TICK_SECONDS = 0.2
TOGETHER_SECONDS = 0.1  # ranks that fail alike, with the same exit code, do so within a moment


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How the ranks of this machine ended."""

    exit_code: int
    failed_rank: int | None  # the rank that failed for a reason of its own; None: none did
    signal: int | None  # that ended it, where one did
    message: str  # one line; empty where all went well
    exit_codes: tuple[int, ...]  # by local rank; negative: the signal
    log_tail: str  # of the failed rank
    log_file: Path | None  # of the failed rank
    settings: tuple[Setting, ...]
    on_request: bool = False  # somebody asked this launcher to stop
    stuck: Stuck | None = None  # the failed rank did not end by itself
    failed_at: float = 0.0  # time.monotonic() when that was noticed
    unseen_seconds: float = 0.0  # how long nobody had looked at it, or it had been silent, by then
    memory_kills: int = 0  # by the kernel, for lack of memory, while the ranks ran
    unkillable: tuple[int, ...] = ()  # ranks that even SIGKILL did not end

    @property
    def is_out_of_memory(self) -> bool:
        return self.signal == signal.SIGKILL and self.memory_kills > 0


def run_local_ranks(
    *,
    argv: Sequence[str],
    plan: Plan | Layout,
    environ: Mapping[str, str],
    log_folder: Path,
    on_tick: Callable[[], None] = lambda: None,
    identity_base: NodeIdentity | None = None,
    grace_seconds: float = GRACE_SECONDS,
    stop_grace_seconds: float | None = None,
    grace_may_grow: bool = False,
    on_stop: Callable[[str], None] = lambda reason: None,
    settings: tuple[Setting, ...] | None = None,
    serves_store: bool = True,
    hang_detector: HangDetector | None = None,
    ends_at_once: Callable[[int], bool] = lambda exit_code: False,
    append_logs: bool = False,
    fork_server: ForkServer | None = None,
    stop_signals: StopSignals | None = None,
) -> Outcome:
    """Run `argv` as `plan.ranks_per_node` ranks until all have ended; no process is left whichever way this returns.

    `environ` is what the ranks inherit. `on_tick` is called about five times a second. With `identity_base` the ranks
    are those of one node of several. After a failure the other ranks have `grace_seconds` to end; after a request to
    stop, all have `stop_grace_seconds` (left out: as many) to save, and `on_stop` is called once with its name; where
    `grace_may_grow`, a step slower than planned or a save that gets on is not cut short. Call it from the main thread:
    only there can signals be caught, and ranks die with the thread that started them.

    `settings` replaces what a training run's ranks share. With `serves_store` false rank 0 opens MASTER_PORT itself, as
    programs other than coremill do. `hang_detector` says which rank is stuck. After a failure with an exit code (128 +
    n: by signal n) that `ends_at_once`, the other ranks get no grace: they only wait for the one that is gone. With a
    `fork_server` for `argv` ranks are forked by it. `stop_signals` are those of a caller that listens already.
    """
    kills_before = memory_kills()
    ranks: list[RankProcess] = []
    log_folder.mkdir(parents=True, exist_ok=True)
    with StopSignals() if stop_signals is None else contextlib.nullcontext(stop_signals) as stop:
        if fork_server is not None:  # it is no stray: it outlives the attempt
            fork_server.wait(lambda: stop.first is not None, on_tick)
        if stop.first is not None:
            return _outcome(ranks, None, stop, settings or (), 0)
        with without_strays() as sessions:
            try:
                # Rank 0 inherits a socket that already listens: no port is chosen first and lost to somebody else
                # afterwards, and the others may knock before rank 0 is ready.
                with listen_on_loopback() as listener:
                    node = node_of_launcher(plan, identity_base, listener.getsockname()[1])
                    if settings is None:
                        settings = shared_settings(plan, environ, node)
                    if not serves_store:
                        listener.close()
                    store_fd = listener.fileno() if node.nodes == 1 and serves_store else None
                    launcher_pid = os.getpid() if serves_store else None
                    starts = _rank_starts(argv, plan, environ, node, settings, launcher_pid, store_fd, hang_detector)
                    for rank, start in enumerate(starts, node.node_rank * plan.ranks_per_node.value):
                        log_file = log_folder / f"{start.name}.log"
                        with log_file.open("ab" if append_logs else "wb") as log:
                            begin, process = log.tell(), start_rank(start, log, fork_server)
                        ranks.append(RankProcess(rank, process, log_file, begin))
                        sessions.add(process.pid)
                stop_grace = grace_seconds if stop_grace_seconds is None else stop_grace_seconds

                def grace_after(exit_code: int) -> float:
                    return 0.0 if ends_at_once(exit_code) else grace_seconds

                culprit = _watch(ranks, stop, on_tick, on_stop, grace_after, stop_grace, hang_detector, grace_may_grow)
            finally:
                end_all(ranks)
    return _outcome(ranks, culprit, stop, settings, memory_kills() - kills_before)


def _rank_starts(
    argv: Sequence[str],
    plan: Plan | Layout,
    environ: Mapping[str, str],
    node: NodeIdentity,
    settings: tuple[Setting, ...],
    launcher_pid: int | None,
    store_fd: int | None,
    hang_detector: HangDetector | None,
) -> Iterator[RankStart]:
    """All ranks of this machine; the first of them has the store's socket."""
    local_size = plan.ranks_per_node.value
    inherited = frozenset(os.sched_getaffinity(0))
    for local_rank in range(local_size):
        variables = rank_environment(
            environ,
            settings,
            node,
            local_rank=local_rank,
            local_size=local_size,
            launcher_pid=launcher_pid,
            store_fd=store_fd if local_rank == 0 else None,
        )
        descriptors = [store_fd] if store_fd is not None and local_rank == 0 else []
        if hang_detector is not None:
            variables |= hang_detector.board.variable(local_rank)
            descriptors.append(hang_detector.board.descriptor)
        cpus = cpus_for_rank(plan, local_rank, inherited)
        yield RankStart(
            name=f"rank-{node.node_rank * local_size + local_rank:05d}",
            argv=list(argv),
            environ=variables,
            cpus=None if cpus is None else sorted(cpus),
            descriptors=descriptors,
        )


def _watch(
    ranks: list[RankProcess],
    stop: StopSignals,
    on_tick: Callable[[], None],
    on_stop: Callable[[str], None],
    grace_after: Callable[[int], float],
    stop_grace_seconds: float,
    hang_detector: HangDetector | None,
    grace_may_grow: bool,
) -> RankProcess | None:
    """Wait for all ranks; returns the one to blame, if any failed."""
    culprit: RankProcess | None = None
    kill_at: float | None = None
    saved_bytes = 0
    while True:
        for rank in ranks:
            rank.poll()
        now = time.monotonic()
        running = [rank for rank in ranks if rank.is_running]
        # A rank may be asked to stop without us; then all save and leave, and one that has not joined yet is asked too.
        stopping = stop.first is not None or any(rank.exit_code == Stopped.exit_code for rank in ranks)
        stuck = hang_detector.look([rank.pid for rank in ranks]) if hang_detector is not None else None
        if culprit is None and not stopping:
            culprit = _blamed(ranks, now)
            if culprit is None and stuck is not None and not any(rank.failed for rank in ranks):
                culprit = ranks[stuck.local_rank]
                culprit.is_stuck(stuck)
        if stopping and kill_at is not None and stuck is not None and stuck.by_peers:
            # A peer was lost before the stop: no step ends and nothing is saved any more, however long it may take.
            ranks[stuck.local_rank].is_stuck(stuck)
            kill_at = now
        if (culprit is not None or stopping) and kill_at is None:
            kill_at = now + (stop_grace_seconds if culprit is None else grace_after(explained(culprit)[0]))
            if grace_may_grow and hang_detector is not None and culprit is None:
                kill_at += hang_detector.slower_step_seconds  # the one under way ends first
            if stop.first is not None and running:
                on_stop(stop.name)
            for rank in running:
                rank.ask_to_end()
        if hang_detector is not None and hang_detector.saved_bytes != saved_bytes:
            saved_bytes = hang_detector.saved_bytes
            if grace_may_grow and kill_at is not None and culprit is None:
                kill_at = max(kill_at, now + GROWN_GRACE_SECONDS)
        if stop.at_once or (kill_at is not None and now >= kill_at):
            end_all(running)
            running = []
        on_tick()
        if not running:
            return culprit
        if wait_for_end([rank.pid for rank in running if rank.pid is not None], TICK_SECONDS):
            time.sleep(TOGETHER_SECONDS)


def _blamed(ranks: list[RankProcess], now: float) -> RankProcess | None:
    """The first rank that failed for a reason of its own, of those that failed alike the lowest; one that only followed
    is blamed when no other turns up."""
    failed = sorted((rank for rank in ranks if rank.failed), key=lambda rank: rank.ended_at)
    own = [rank for rank in failed if not rank.only_followed]
    if own:
        return min((rank for rank in own if rank.exit_code == own[0].exit_code), key=lambda rank: rank.rank)
    if failed and (now - failed[0].ended_at >= BLAME_SECONDS or not any(rank.is_running for rank in ranks)):
        return failed[0]
    return None


def _outcome(
    ranks: list[RankProcess],
    culprit: RankProcess | None,
    stop: StopSignals,
    settings: tuple[Setting, ...],
    kills: int,
) -> Outcome:
    codes = tuple(rank.exit_code or 0 for rank in ranks)
    unkillable = tuple(rank.rank for rank in ranks if rank.is_running)
    exit_code, message, number = 0, "", None
    if culprit is not None:
        exit_code, message, number = explained(culprit, kills)
    elif (Stopped.exit_code in codes or not ranks) and not stop.at_once:
        exit_code, message = Stopped.exit_code, "stopped on request"
        if not ranks:
            message += " before a rank had started: there was nothing to save"
    elif stop.first is not None and not stop.at_once and any(rank.stuck is not None for rank in ranks):
        exit_code = Stopped.exit_code
        message = f"stopped on request ({stop.name}), without a save: ranks on other hosts were lost"
    elif (failed := _failed_while_stopping(ranks)) is not None and not stop.at_once:
        culprit = failed
        exit_code, message, number = explained(culprit, kills)
    elif stop.first is not None and (any(codes) or not ranks):
        exit_code = stop.exit_code
        message = "stopped at once (Ctrl-C)" if stop.at_once else f"stopped on request ({stop.name})"
    return Outcome(
        exit_code=exit_code,
        failed_rank=None if culprit is None else culprit.rank,
        signal=number,
        message=message,
        exit_codes=codes,
        log_tail="" if culprit is None else culprit.log_tail(),
        log_file=None if culprit is None else culprit.log_file,
        settings=settings,
        on_request=stop.first is not None,
        stuck=None if culprit is None else culprit.stuck,
        failed_at=0.0 if culprit is None else culprit.ended_at,
        unseen_seconds=0.0 if culprit is None else culprit.unseen_seconds,
        memory_kills=kills,
        unkillable=unkillable,
    )


def _failed_while_stopping(ranks: list[RankProcess]) -> RankProcess | None:
    """A rank that was asked to end and ended badly for a reason of its own, as its exit code says."""
    failed = [rank for rank in ranks if (rank.exit_code or 0) > 0 and not rank.only_followed]
    return min(failed, key=lambda rank: rank.ended_at, default=None)

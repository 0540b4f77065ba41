"""What became of a run: running, finished, stopped or failed, with the exit code that says the same."""

from __future__ import annotations

import socket
from collections.abc import Iterable
from typing import Any

from coremill.report.events import Event
from coremill.report.tally import RunTally

STOPPED_CODES = (75, 130)


def state_of(tally: RunTally, exit_code: int | None) -> dict[str, Any]:
    """running, finished, failed or stopped; the error that made it so; and the exit code that says the same."""
    cause = cause_of(tally)
    # Ranks leave the last step and the export together: where those of the first node, which asks, ended with 0, an end
    # of another host's rank that a shared file system does not show yet changes nothing.
    is_finished = tally.finished if exit_code is None else tally.first_rank_ended
    if cause is None and is_finished and not exit_code:
        return {"state": "finished", "exit_code": 0, "error": None}
    if cause is not None:
        code = exit_code or int(cause.number("exit_code")) or 1
        names = ("message", "traceback", "exit_code")
        error = {"rank": cause.rank, **{name: cause.get(name) for name in names}}
        stopped = code in STOPPED_CODES or bool(cause.get("on_request"))
        return {"state": "stopped" if stopped else "failed", "exit_code": code, "error": error}
    if exit_code is not None:
        message = "the ranks came to their end, but their events do not say so: they were removed while the run went on"
        return _failed(exit_code or 1, message if exit_code == 0 else f"the run ended with exit code {exit_code}")
    if tally.ranks and _nobody_left(_processes(tally)):
        return _failed(
            1, "the run ended without a word: none of its processes is left (killed, or the machine restarted)"
        )
    return {"state": "running", "exit_code": None, "error": None}


def cause_of(tally: RunTally) -> Event | None:
    """The error the others followed from: a lost peer (69) or a request to stop is rarely the origin."""

    def order(event: Event) -> tuple[int, float]:
        if event.get("on_request"):  # by the launcher, which ended the ranks: what they said follows from that
            return -1, event.time
        return {69: 2, 75: 1, 130: 1}.get(int(event.number("exit_code")), 0), event.time

    fault = tally.last_restart_fault
    since = 0.0 if fault is None else fault.time  # what was said before is over: all ranks started again
    current, attempt = {rank.rank for rank in tally.current_ranks}, tally.attempt
    errors = [
        error
        for error in tally.errors
        if error.rank < max(1, tally.world_size)
        and error.time > since
        and (error.rank in current or error.time >= attempt)  # of one that failed before it said that it starts
    ]
    return min(errors, key=order, default=None)


def _failed(exit_code: int, message: str) -> dict[str, Any]:
    error = {"rank": None, "message": message, "traceback": None, "exit_code": None}
    return {"state": "failed", "exit_code": exit_code, "error": error}


def _processes(tally: RunTally) -> Iterable[tuple[Any, Any, float | None]]:
    """Host, process id and a moment at which it ran: of ranks, and of a launcher that is starting them again."""
    for rank in tally.current_ranks:
        if not rank.ended:
            yield rank.start.get("hostname"), rank.start.get("pid"), rank.start_time
    fault = tally.last_restart_fault
    if fault is not None:
        yield fault.get("hostname"), fault.get("launcher_pid"), fault.time


def _nobody_left(processes: Iterable[tuple[Any, Any, float | None]]) -> bool:
    """Whether all of them ran on this machine and are gone; unknown counts as alive."""
    import psutil  # only a run without an end needs it

    here = socket.gethostname()
    for hostname, pid, started in processes:
        if hostname != here or not isinstance(pid, int) or started is None:
            return False
        try:
            process = psutil.Process(pid)
            # a process made after the start event only inherited the number; a second for the kernel's coarse clock
            if process.create_time() <= started + 1 and process.status() != psutil.STATUS_ZOMBIE:
                return False
        except psutil.NoSuchProcess:
            continue
        except psutil.Error:
            return False
    return True

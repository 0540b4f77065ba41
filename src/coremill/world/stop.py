"""Requests to stop: SIGTERM, Ctrl-C, or `coremill stop RUN`, which leaves a file in the run folder.

`listen()` comes before anything slow is imported. Until the first step and after the last one there is nothing to
save, and a request ends the process at once (exit 75). In between it is only noted: the ranks agree on a step, save it
and leave together. A second Ctrl-C ends at once (130); a second SIGTERM changes nothing, and neither does a SIGINT
within a second of the first request: launchers and wrappers (timeout, make, npm, docker) pass on what the terminal has
already sent to all. `StopSignals` counts so too, for launchers and agents while what they started runs;
`ForwardedSignals` hands on what comes. Once the way out is decided (`leave`) signals are ignored to the very end: a
rank that has saved must not die of a signal in Python's own shutdown, which gives signals back to the kernel's default.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from coremill.errors import Interrupted, Stopped
from coremill.files import write_atomically

REQUEST_FILE = "stop-request.json"
SAME_PRESS_SECONDS = 1.0  # one press, two signals


def is_same_press(former_time: float) -> bool:
    """Whether a Ctrl-C that comes now belongs to a request made then (time.monotonic())."""
    return time.monotonic() - former_time <= SAME_PRESS_SECONDS


Handler = Callable[[int, FrameType | None], None]


def _take_signals(
    numbers: Iterable[signal.Signals], handler: Handler, *, ignored_too: bool = False
) -> dict[signal.Signals, Any]:
    """Have these handled from now on, and return how they were; one that is ignored (nohup) stays so, unless asked."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    wanted = [number for number in numbers if ignored_too or signal.getsignal(number) is not signal.SIG_IGN]
    return {number: signal.signal(number, handler) for number in wanted}


class StopRequests:
    """What this process was asked, and whether it may wait for the end of a step."""

    def __init__(self) -> None:
        self.reason: str | None = None  # None: nobody asked
        self._noted_only = False
        self._first_time = 0.0
        self._listens = False

    @property
    def is_listening(self) -> bool:
        """Whether the signals of this process are taken."""
        return self._listens

    def listen(self) -> None:
        """Take SIGTERM and Ctrl-C from now on."""
        if threading.current_thread() is threading.main_thread():
            self._listens = True
            _take_signals((signal.SIGINT, signal.SIGTERM), self._take)
            atexit.register(self.leave)
            # A forked rank is born with both held back: what came since is taken now.
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})

    def between_steps(self) -> None:
        """From here on requests are noted and wait for the end of a step."""
        self._noted_only = True

    def at_once(self) -> None:
        """From here on requests end the process at once; one that came meanwhile does so now."""
        self._noted_only = False
        if self.reason is not None:
            self._stop()

    @contextlib.contextmanager
    def held_back(self) -> Iterator[None]:
        """While a block runs requests are noted; one that came ends the process after it."""
        former, self._noted_only = self._noted_only, True
        try:
            yield
        finally:
            self._noted_only = former
        if not former and self.reason is not None:
            self._stop()

    def leave(self) -> None:
        """How this process ends is decided: no signal changes it any more, however long the way out is."""
        if self._listens and threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN)

    def _take(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGINT and self.reason is not None:
            if not is_same_press(self._first_time):
                raise Interrupted("ended at once", do="the same command goes on from the last checkpoint")
            return
        if self.reason is None:
            self.reason = "Ctrl-C" if number == signal.SIGINT else "SIGTERM"
            self._first_time = time.monotonic()
            if not self._noted_only:
                self._stop()

    def _stop(self) -> NoReturn:
        raise Stopped(
            f"stopped on request ({self.reason}); there was nothing to save",
            do="the same command goes on from the last checkpoint, or from the start where there is none",
        )

    def forget(self) -> None:
        """For the next training of this process: nobody asked, and nothing is taken."""
        self.reason, self._noted_only, self._first_time, self._listens = None, False, 0.0, False


REQUESTS = StopRequests()


@contextlib.contextmanager
def signals_lent() -> Iterator[None]:
    """For a training inside somebody else's program: signals are taken while it runs, and handed back afterwards.

    Off the main thread none can be taken.
    """
    if threading.current_thread() is not threading.main_thread():
        REQUESTS.forget()
        yield
        return
    former = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    REQUESTS.forget()
    REQUESTS.listen()
    try:
        yield
    finally:
        REQUESTS.forget()
        for number, handler in former.items():
            signal.signal(number, handler)  # what was ignored to the end is heard again


class StopSignals:
    """Ctrl-C, SIGTERM and a closed terminal, only noted: from `listen` on, or while a block runs.

    The former handlers come back after the block. Where one came, all that is left to this process is to say how it
    ended: `REQUESTS` takes no further one.
    """

    def __init__(self) -> None:
        self.first: signal.Signals | None = None
        self.at_once = False  # a second Ctrl-C came
        self._first_time = 0.0
        self._former: dict[signal.Signals, Any] = {}

    @property
    def name(self) -> str:
        """Of the first one, as people call it."""
        assert self.first is not None
        return "Ctrl-C" if self.first == signal.SIGINT else self.first.name

    @property
    def exit_code(self) -> int:
        """What a shell expects; a second Ctrl-C ends with Ctrl-C's code, whatever the first request was."""
        assert self.first is not None
        return 128 + (signal.SIGINT if self.at_once else self.first)

    def listen(self) -> None:
        """To the end of the process, also to what its parent ignores: what it starts must not inherit that."""
        _take_signals((signal.SIGINT, signal.SIGTERM, signal.SIGHUP), self._take, ignored_too=True)

    def __enter__(self) -> StopSignals:
        self._former = _take_signals((signal.SIGINT, signal.SIGTERM, signal.SIGHUP), self._take)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)
        if self.first is not None:
            REQUESTS.reason = REQUESTS.reason or self.name
            REQUESTS.leave()

    def _take(self, number: int, _: FrameType | None) -> None:
        if self.first is None:
            self.first, self._first_time = signal.Signals(number), time.monotonic()
        elif number == signal.SIGINT and not is_same_press(self._first_time):
            self.at_once = True


class ForwardedSignals:
    """For a process that stands in front of another one: what it is sent from now on goes on to that one."""

    def __init__(self, send: Callable[[int], None]) -> None:
        self.any_came = False
        self._send, self._last_time = send, 0.0
        _take_signals((signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1), self._take, ignored_too=True)

    def _take(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGINT and self.any_came and is_same_press(self._last_time):
            return  # the terminal's, and once more from torchrun or mpirun
        self.any_came, self._last_time = True, time.monotonic()
        with contextlib.suppress(ProcessLookupError):
            self._send(number)


def request_file(run_folder: Path) -> Path:
    """Where `coremill stop` leaves its request."""
    return run_folder / REQUEST_FILE


def was_asked_to_stop(run_folder: Path) -> bool:
    """Whether `coremill stop` left a request; a run folder that cannot be read says no."""
    with contextlib.suppress(OSError):
        return request_file(run_folder).exists()
    return False


def ask_to_stop(run_folder: Path) -> None:
    """Leave a request; the run sees it at the end of the step it is in."""
    write_atomically(request_file(run_folder), json.dumps({"time": time.time(), "pid": os.getpid()}) + "\n")


def forget_request(run_folder: Path) -> None:
    """A request is for the run that was going when it was made, not for the next one."""
    with contextlib.suppress(OSError):
        request_file(run_folder).unlink(missing_ok=True)

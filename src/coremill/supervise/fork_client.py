"""The launcher's end of the fork server: a process that has imported what ranks need, and forks them (fork_server.py).

It is started once per run. Found dead it is replaced, for a new one costs what ranks started afresh would; one that
never got ready is not, and ranks are then started afresh (rank_process.py). Nothing here waits without an end.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from coremill.supervise.descendants import mark_of_ranks
from coremill.supervise.fork_server import LEAVE_TO_BEGIN, RankStart, receive, send
from coremill.supervise.process import POLL_SECONDS, ForkedProcess, start_process
from coremill.supervise.waiting import wait_for_end

READY_SECONDS = 600.0  # imports from a slow disk take minutes
ANSWER_SECONDS = 60.0  # a fork takes milliseconds; a machine that swaps takes longer
# OpenMP places its threads when it is loaded, within the mask of that moment: the fork server's, which is no rank's.
BINDING_VARIABLES = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
# numpy's OpenBLAS starts its threads when it is loaded, and a process with threads does not fork.
OWN_VARIABLES = {"OPENBLAS_NUM_THREADS": "1"}


class CannotFork(Exception):
    """Why a rank could not be forked; reads on after "the fork server "."""


def why_no_fork_server(environ: Mapping[str, str]) -> str | None:
    """What in this environment asks for ranks started afresh; None: nothing does."""
    if sys.platform != "linux":
        return "ranks are forked on Linux only"
    for name in BINDING_VARIABLES:
        if environ.get(name):
            return f"{name} is set, and OpenMP would bind a forked rank's threads to cores of other ranks"
    return None


class ForkServer:
    """From the first `start` until `close`; `on_loss` hears in one line why there is none."""

    def __init__(
        self, argv: Sequence[str], environ: Mapping[str, str], log_file: Path, on_loss: Callable[[str], None]
    ) -> None:
        self._argv, self._environ, self.log_file, self.on_loss = list(argv), environ, log_file, on_loss
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._is_ready = False
        self._is_given_up = False

    @property
    def pid(self) -> int | None:
        """None where there is none."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Begin to import; call it from the thread that ranks are to die with."""
        ours, theirs = socket.socketpair()
        self.log_file.parent.mkdir(parents=True, exist_ok=True)
        with theirs, self.log_file.open("wb") as log:
            self._process = start_process(
                [*self._argv, str(theirs.fileno())],
                {**self._environ, **OWN_VARIABLES, **mark_of_ranks()},
                stdout=log,
                stderr=subprocess.STDOUT,
                descriptors=[theirs.fileno()],
            )
        self._connection, self._is_ready = ours, False

    def wait(self, is_off: Callable[[], bool], on_tick: Callable[[], None] = lambda: None) -> None:
        """Until it forks ranks, or cannot, or the start `is_off`; a dead one is replaced first."""
        if self._is_ready and self._process is not None and self._process.poll() is not None:
            self._lose(f"{self._end()}: a new one is started")
        if self._process is None and not self._is_given_up:
            self.start()
        deadline = time.monotonic() + READY_SECONDS
        while self._connection is not None and not self._is_ready and not is_off():
            if wait_for_end([], POLL_SECONDS, or_input=self._connection.fileno()):
                self._is_ready = receive(self._connection) is not None
                if not self._is_ready:
                    self._give_up(f"{self._end()} while it imported{self._last_words()}")
            elif time.monotonic() > deadline:
                self._give_up(f"was not ready after {READY_SECONDS:.0f} s")
            on_tick()

    def fork(self, order: RankStart, log: IO[bytes]) -> ForkedProcess:
        """One rank; raises CannotFork, and has told why, where that cannot be: then none begins, however late."""
        if self._connection is None or not self._is_ready:
            raise CannotFork
        leave, ours = os.pipe()
        try:
            pid = self._ask(self._connection, order, [log.fileno(), leave, *order.descriptors])
            # It is ours by now, alive or not; where the kernel does not give orphans to us, it has ended itself.
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            with contextlib.suppress(BrokenPipeError):  # it was killed already: its exit code says so
                os.write(ours, LEAVE_TO_BEGIN)
        except (OSError, CannotFork) as error:
            reason = str(error) if isinstance(error, CannotFork) else f"is of no use: {error}"
            self._lose(f"{reason}: ranks are started afresh")
            raise CannotFork(reason) from error
        finally:
            os.close(leave)
            os.close(ours)
        return ForkedProcess(pid)

    def _ask(self, connection: socket.socket, order: RankStart, descriptors: list[int]) -> int:
        connection.settimeout(ANSWER_SECONDS)
        try:
            send(connection, asdict(order), descriptors)
            answer: Any = receive(connection)
        except TimeoutError:
            raise CannotFork(f"did not answer for {ANSWER_SECONDS:.0f} s") from None
        except ConnectionError:
            answer = None
        if answer is None:
            raise CannotFork(self._end())
        if "error" in answer[0]:
            self._is_given_up = True  # a new one would say the same
            raise CannotFork(f"is of no use: {answer[0]['error']}")
        return int(answer[0]["pid"])

    def _give_up(self, reason: str) -> None:
        self._is_given_up = True
        self._lose(f"{reason}: ranks are started afresh, which takes longer")

    def _lose(self, reason: str) -> None:
        self.close()
        self.on_loss(f"the fork server {reason}")

    def _end(self) -> str:
        """In words; the process has closed its end, or is dead."""
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5.0)
        code = self._process.returncode
        if code is None:
            return "stopped listening"
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

    def _last_words(self) -> str:
        with contextlib.suppress(OSError):
            lines = self.log_file.read_text(errors="replace").strip().splitlines()
            return f" ({lines[-1].strip()})" if lines else ""
        return ""

    def close(self) -> None:
        """End it; ranks it forked are not its own and go on."""
        if self._connection is not None:
            self._connection.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._process, self._connection, self._is_ready = None, None, False

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

"""A reader that is a server in a process of its own, which only reads the run folder: the live page, the metrics.

The launcher binds the port before anything starts, hands it over and holds a pipe; when it closes that, or dies, the
server ends. Nothing it does, nor a slow visitor, can reach the run.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console

from coremill.child import wrapped
from coremill.report.events import Event
from coremill.report.readers.base import Reader
from coremill.report.terminal import print_verbatim

ENDING_SECONDS = 60.0  # it needs well below one, but goes after all others on a machine that is busy; then it is killed


class ServedReader(Reader):
    """Starts the server with the ranks, ends it after the report. `module` is run with the port's descriptor, the run
    folder and `arguments`; what it prints goes to RUN/logs/`log_name`."""

    module: str
    log_name: str

    def __init__(
        self, run_folder: Path, listener: socket.socket, console: Console, arguments: Sequence[str] = ()
    ) -> None:
        self._folder, self._listener, self._console = run_folder, listener, console
        self._arguments = tuple(arguments)
        self._process: subprocess.Popen[bytes] | None = None

    def greeting(self) -> str:
        """What the screen says once it runs."""
        raise NotImplementedError

    def begin(self) -> None:
        """A server that cannot start is said, and the run goes on without it."""
        greeting = self.greeting()
        try:
            self._process = self._start()
        except OSError as error:
            self._say(f"no {self.name.removeprefix('the ')}: {error.strerror or error}; the run goes on without it")
            return
        finally:
            self._listener.close()  # it has its own
        self._say(greeting)

    def _start(self) -> subprocess.Popen[bytes]:
        descriptor = self._listener.fileno()
        argv = [sys.executable, "-m", self.module, str(descriptor), str(self._folder), *self._arguments]
        log = self._folder / "logs" / self.log_name
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            return subprocess.Popen(
                wrapped(argv, launcher_pid=os.getpid(), cpus=None),
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                pass_fds=[descriptor],
                start_new_session=True,  # Ctrl-C is the run's; the server shows how it ends
            )

    def take(self, events: Iterable[Event]) -> None:
        """Say it once where the server is gone."""
        process = self._process
        if process is not None and process.poll() is not None:
            self._process = None
            log = self._folder / "logs" / self.log_name
            self._say(f"{self.name} has ended, see {log}; the run goes on without it")

    def end(self, summary: Mapping[str, Any]) -> None:
        """The last state, then the end."""
        self.close(0)

    def close(self, exit_code: int) -> None:
        """It sees by itself how the run ended."""
        process, self._process = self._process, None
        if process is None:
            return
        try:
            with suppress(OSError):
                process.communicate(timeout=ENDING_SECONDS)  # closes its standard input
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _say(self, text: str) -> None:
        print_verbatim(self._console, text)

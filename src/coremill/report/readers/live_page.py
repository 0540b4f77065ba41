"""`coremill train --page`: the live page of a run, in a process of its own that only reads the run folder.

The launcher binds the port before anything starts, hands it over and holds a pipe; when it closes that, or dies, the
page shows the last state and ends. Nothing the page does, or a slow browser, can reach the run.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console

from coremill.child import wrapped
from coremill.report.page.server import address_of
from coremill.report.readers.base import Reader
from coremill.report.terminal import print_verbatim

ENDING_SECONDS = 10.0  # it needs well below one; then it is killed


class LivePage(Reader):
    """Starts the page with the ranks, ends it after the report."""

    name = "the live page"

    def __init__(self, run_folder: Path, listener: socket.socket, console: Console) -> None:
        self._folder, self._listener, self._console = run_folder, listener, console
        self._process: subprocess.Popen[bytes] | None = None

    def begin(self) -> None:
        """A page that cannot start is said, and the run goes on without it."""
        address, port = address_of(self._listener), self._listener.getsockname()[1]
        try:
            self._process = self._start()
        except OSError as error:
            print_verbatim(self._console, f"no live page: {error.strerror or error}; the run goes on without it")
            return
        finally:
            self._listener.close()  # it has its own
        hint = f"from elsewhere: ssh -L {port}:127.0.0.1:{port} {socket.gethostname()}, then the same address"
        print_verbatim(self._console, f"live page: {address} on this machine; {hint}")

    def _start(self) -> subprocess.Popen[bytes]:
        descriptor = self._listener.fileno()
        argv = [sys.executable, "-m", "coremill.report.page.server", str(descriptor), str(self._folder)]
        log = self._folder / "logs" / "live-page.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            return subprocess.Popen(
                wrapped(argv, launcher_pid=os.getpid(), cpus=None),
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                pass_fds=[descriptor],
                start_new_session=True,  # Ctrl-C is the run's; the page shows how it ends
            )

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

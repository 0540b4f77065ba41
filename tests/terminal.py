"""A command at a terminal of its own: what it shows is read as it comes, and keys are typed."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

_COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r")


class Terminal:
    """Starts the command; `expect` waits for words behind those expected before."""

    def __init__(self, command: Sequence[str], folder: Path, environ: Mapping[str, str]) -> None:
        self._end, other = pty.openpty()
        self.process = subprocess.Popen(
            list(command),
            cwd=folder,
            env={**environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "50"},
            stdin=other,
            stdout=other,
            stderr=other,
            start_new_session=True,
            preexec_fn=lambda: os.close(os.open(os.ttyname(0), os.O_RDWR)),  # makes it the controlling one
        )
        os.close(other)
        self._raw = b""
        self.shown = ""  # without colours
        self._seen = 0

    def __enter__(self) -> Terminal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        os.close(self._end)

    def expect(self, words: str, within_seconds: float = 240) -> None:
        """Until these words are shown."""
        deadline = time.monotonic() + within_seconds
        while words not in self.shown[self._seen :]:
            if not self._read(deadline):
                raise AssertionError(f"{words!r} is not shown; what is:\n{self.shown}")
        self._seen = self.shown.index(words, self._seen) + len(words)

    def type(self, keys: str) -> None:
        """Keys as they are; a newline is Enter."""
        os.write(self._end, keys.encode())

    def wait_until_it_reads(self) -> None:
        """A signal between Python's prompt and its read is kept until the next key: nobody is as quick, tests are."""
        deadline = time.monotonic() + 240
        stat = Path(f"/proc/{self.process.pid}/stat")
        before = ""
        while time.monotonic() < deadline:
            time.sleep(0.2)
            now = stat.read_text().rpartition(")")[2]
            if now == before and now.split()[0] == "S":
                return
            before = now
        raise AssertionError(f"it does not come to rest; what is shown:\n{self.shown}")

    def ended(self, within_seconds: float = 240) -> int:
        """The exit code."""
        deadline = time.monotonic() + within_seconds
        while self._read(deadline):
            pass
        return self.process.wait(timeout=60)

    def _read(self, deadline: float) -> bool:
        ready, _, _ = select.select([self._end], [], [], max(0.0, deadline - time.monotonic()))
        try:
            chunk = os.read(self._end, 65536) if ready else b""
        except OSError:  # how Linux says that nobody has the other end any more
            chunk = b""
        self._raw += chunk  # a sequence of colour or a letter may be cut in two
        self.shown = _COLOURS.sub("", self._raw.decode(errors="replace"))
        return bool(chunk)

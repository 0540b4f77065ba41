"""What ranks print: relayed in whole lines, with the rank in front on demand, and the line by which a rank that failed
tells the launcher, through any number of pipes, what its last words were."""

from __future__ import annotations

import contextlib
import json
import os
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

_MARK = "\x1ecoremill rank failed "
# One write of at most PIPE_BUF bytes stays whole in a pipe that several ranks share.
_TAIL_BYTES = 2400
_KEPT_BYTES = 16384


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The end of a rank that failed."""

    rank: int
    host: str
    exit_code: int
    signal: int | None
    time: float  # unix seconds, by the clock of its host
    follows: bool  # it ended only because another rank did
    tail: str  # its last words

    def to_line(self) -> str:
        """For the pipe to the launcher; people never see it."""
        document = asdict(self)
        while len(line := _MARK + json.dumps(document) + "\n") > 4096 and document["tail"]:
            document["tail"] = document["tail"][len(document["tail"]) // 4 + 1 :]
        return line

    @classmethod
    def from_line(cls, line: bytes) -> Failure | None:
        """The failure in a line, if it is one."""
        _, mark, text = line.decode(errors="replace").partition(_MARK)
        if not mark:
            return None
        try:
            return cls(**json.loads(text))
        except (ValueError, TypeError):  # torn: some other rank wrote in between
            return None


def first_failure(failures: Sequence[Failure]) -> Failure | None:
    """The one to blame: the first that failed for a reason of its own."""
    return min(failures, key=lambda failure: (failure.follows, failure.time, failure.rank), default=None)


class Prefixer:
    """Cuts a stream into whole lines and puts the rank in front of each; without a rank only the lines stay whole."""

    def __init__(self, rank: int | None) -> None:
        self._prefix = b"" if rank is None else f"[{rank}] ".encode()
        self._pending = b""

    def feed(self, chunk: bytes) -> bytes:
        """The lines that are complete by now; a carriage return (progress bars) ends one as well."""
        content = self._pending + chunk
        end = max(content.rfind(b"\n"), content.rfind(b"\r")) + 1
        self._pending = content[end:]
        return self._marked(content[:end])

    def rest(self) -> bytes:
        """What is left at the end, as a line."""
        content, self._pending = self._pending, b""
        return self._marked(content + b"\n") if content else b""

    def _marked(self, content: bytes) -> bytes:
        if not self._prefix or not content:
            return content
        return b"".join(self._prefix + line + b"\n" for line in re.split(rb"\r\n|\r|\n", content)[:-1])


def write_lines(descriptor: int, content: bytes) -> None:
    """One write for each line: up to PIPE_BUF bytes it stays whole in a pipe that others write to as well."""
    with contextlib.suppress(OSError):  # nobody listens any more: the writer goes on, as under nohup
        for line in content.splitlines(keepends=True):
            while line:
                line = line[os.write(descriptor, line) :]


class Tail:
    """The last words of a rank, from both of its streams."""

    def __init__(self) -> None:
        self._content = b""
        self._lock = threading.Lock()

    def add(self, chunk: bytes) -> None:
        with self._lock:
            self._content = (self._content + chunk)[-_KEPT_BYTES:]

    def text(self) -> str:
        """The end, from a whole line on, short enough to travel."""
        return last_words(self._content.decode(errors="replace"))


def last_words(text: str, limit: int = _TAIL_BYTES) -> str:
    """The end of a log: the last traceback where there is one, from a whole line on."""
    text = re.sub(r"^\[rank\d+\]: ?", "", text, flags=re.MULTILINE)  # torch's own mark: the rank is said anyway
    start = text.rfind("Traceback (most recent call last)")
    if start >= 0:
        text = text[start:]
    if len(text) > limit:
        text = text[-limit:]
        text = text[text.find("\n") + 1 :] or text
    return text.strip("\n")


class LogFollower:
    """Shows the log files of local ranks as they grow."""

    def __init__(self, folder: Path, ranks: Sequence[int], write: Callable[[bytes], None], *, prefix: bool) -> None:
        self._files = [(folder / f"rank-{rank:05d}.log", Prefixer(rank if prefix else None)) for rank in ranks]
        self._read = [0] * len(ranks)
        self._write = write

    def poll(self, *, is_end: bool = False) -> None:
        for index, (path, prefixer) in enumerate(self._files):
            try:
                with path.open("rb") as log:
                    log.seek(self._read[index])
                    chunk = log.read()
            except OSError:
                continue
            self._read[index] += len(chunk)
            content = prefixer.feed(chunk) + (prefixer.rest() if is_end else b"")
            if content:
                self._write(content)

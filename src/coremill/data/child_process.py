"""Runs one job of the data stage in a process of its own and waits for it.

Tokenising 11 MB takes 250 MB, which the allocator would keep for the whole run; a process gives it all back. The
child speaks JSON lines:

    stdin   one line: the job; then it stays open, and its end means that the parent is gone
    stdout  {"kind": "progress", ...}*, then one of {"kind": "result", ...}, {"kind": "error", ...}
    stderr  kept in a temporary file, shown only when the child breaks

It cannot outlive its parent: the kernel ends it (PDEATHSIG on Linux), the end of stdin does elsewhere, and any
exception here, Ctrl-C included, kills it before it travels on.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import IO, Any

from coremill.data.packed import Progress
from coremill.errors import CoremillError, InputError, StorageError

CHILD_MODULE = "coremill.data.tokenise_child"
LOG_TAIL_BYTES = 4000
ERROR_CLASSES: dict[str, type[CoremillError]] = {"input": InputError, "storage": StorageError, "other": CoremillError}


def run_in_child(job: dict[str, Any], on_progress: Callable[[Progress], None] | None = None) -> dict[str, Any]:
    """The result of `job`; its error raised here as what it was there."""
    with tempfile.TemporaryFile() as log:
        # -P: a tokenizers.py in the user's folder must not stand in for the library.
        child = subprocess.Popen(
            [sys.executable, "-P", "-m", CHILD_MODULE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log
        )
        try:
            return _converse(child, {**job, "parent_pid": os.getpid()}, log, on_progress)
        finally:
            if child.poll() is None:
                child.kill()
            child.wait()
            for pipe in (child.stdin, child.stdout):
                if pipe is not None:
                    with contextlib.suppress(BrokenPipeError):  # an unread job is still in it
                        pipe.close()


def _converse(
    child: subprocess.Popen[bytes], job: dict[str, Any], log: IO[bytes], on_progress: Callable[[Progress], None] | None
) -> dict[str, Any]:
    assert child.stdin is not None and child.stdout is not None
    try:
        child.stdin.write(json.dumps(job).encode() + b"\n")
        child.stdin.flush()
    except BrokenPipeError:
        raise _broken(child, log) from None
    for line in child.stdout:
        message: dict[str, Any] = json.loads(line)
        kind = message.pop("kind")
        if kind == "result":
            return message
        if kind == "error":
            raise ERROR_CLASSES[message["class"]](
                message["what"], where=message["where"], why=message["why"], do=message["do"]
            )
        if on_progress is not None:
            on_progress(Progress(**message))
    raise _broken(child, log)


def _broken(child: subprocess.Popen[bytes], log: IO[bytes]) -> CoremillError:
    code = child.wait()
    log.seek(0, os.SEEK_END)
    log.seek(max(0, log.tell() - LOG_TAIL_BYTES))
    tail = log.read().decode("utf-8", "replace").strip()
    if code == -signal.SIGKILL:
        return CoremillError(
            "the tokenising process was killed",
            why="most likely by the memory limit of this machine or container",
            do="give it more memory, or cut very long documents",
        )
    return CoremillError(f"the tokenising process ended with status {code}", why=tail or "it left no message")

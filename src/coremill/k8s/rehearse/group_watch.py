"""Takes the memory groups of a rehearsal away when it is over, however it ended.

    python -I -S group_watch.py FOLDER        until standard input ends; then all that is left in FOLDER is ended

It is in a session of its own: neither Ctrl-C nor a SIGKILL of the rehearsal reaches it, and the end of the pipe tells.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

_PATIENCE_SECONDS = 20.0


def remove(folder: Path) -> bool:
    """End what runs in the groups below `folder`, and take them away; False: something is still in them."""
    if not folder.exists():
        return True
    inner = sorted((path for path in folder.rglob("*") if path.is_dir()), reverse=True)
    for group in [*inner, folder]:
        with contextlib.suppress(OSError):
            for pid in (group / "cgroup.procs").read_text().split():
                with contextlib.suppress(OSError):
                    os.kill(int(pid), signal.SIGKILL)
        with contextlib.suppress(OSError):
            group.rmdir()
    return not folder.exists()


def main(folder: Path) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.read()
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while not remove(folder) and time.monotonic() < deadline:
        time.sleep(0.05)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

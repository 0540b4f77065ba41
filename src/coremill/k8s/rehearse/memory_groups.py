"""Memory limits of pods, by cgroups of either version; all of them go when the rehearsal has, however it ends."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

from coremill.k8s.rehearse import group_watch

_PREFIX = "coremill-rehearse-"
_BASE = Path("/sys/fs/cgroup")


class MemoryGroups:
    """A group for each pod, below one of this rehearsal. `why_not` says why there are none, where there are none."""

    def __init__(self) -> None:
        self.why_not: str | None = None
        self._folder: Path | None = None
        self._watch: subprocess.Popen[bytes] | None = None
        found = _parent()
        if found is None:
            self.why_not = "no memory controller is mounted at /sys/fs/cgroup"
            return
        parent, self._limit_name = found
        _remove_stale(parent)
        self._folder = parent / f"{_PREFIX}{os.getpid()}"
        try:
            self._folder.mkdir()
            if self._limit_name == "memory.max":
                (self._folder / "cgroup.subtree_control").write_text("+memory")
        except OSError as error:
            with contextlib.suppress(OSError):
                self._folder.rmdir()
            self.why_not = f"no memory group can be made in {parent}: {error.strerror}"
            self._folder = None
            return
        self._watch = subprocess.Popen(
            [sys.executable, "-I", "-S", group_watch.__file__, str(self._folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def make(self, name: str, limit_bytes: int | None) -> list[str]:
        """The group of a pod, as its first process wants it; empty: there are none."""
        if self._folder is None or limit_bytes is None:
            return []
        group = self._folder / name
        group.mkdir(exist_ok=True)
        (group / self._limit_name).write_text(str(limit_bytes))
        return [str(group)]

    def close(self) -> None:
        if self._watch is not None and self._watch.stdin is not None:
            self._watch.stdin.close()
            self._watch.wait()


def _parent() -> tuple[Path, str] | None:
    """Where groups with a memory limit can be made: below ours (version 1), or at the top (version 2)."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, names, path = line.split(":", 2)
        if "memory" in names.split(",") and (_BASE / "memory").is_dir():
            return _BASE / "memory" / path.lstrip("/"), "memory.limit_in_bytes"
    controllers = _BASE / "cgroup.controllers"
    if controllers.is_file() and "memory" in controllers.read_text().split():
        return _BASE, "memory.max"
    return None


def _remove_stale(parent: Path) -> None:
    """Of rehearsals that were killed together with the process that watched over them."""
    for folder in parent.glob(f"{_PREFIX}*"):
        pid = folder.name.removeprefix(_PREFIX)
        if pid.isdigit() and not Path("/proc", pid).exists():
            group_watch.remove(folder)

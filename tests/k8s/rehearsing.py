"""Rehearsals for tests: rendered manifests with another command in the pods, and what a rehearsal leaves behind."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coremill.errors import InputError
from coremill.k8s.rehearse.machine import require_rights
from coremill.k8s.render import render_objects, to_yaml
from unit.k8s.clusters import job_spec_of, loaded

ROOT = Path(__file__).resolve().parents[2]
Change = Callable[[list[dict[str, Any]]], None]


def why_not() -> str | None:
    """Why nothing can be rehearsed here; None: it can."""
    try:
        require_rights()
    except InputError as error:
        return f"{error.what}: {error.why}"
    if Path(sys.prefix).is_relative_to("/tmp"):
        return f"a pod has a /tmp of its own, and does not see {sys.prefix}"
    return None


def manifests(folder: Path, script: str | None = None, change: Change | None = None, **section: Any) -> Path:
    """All objects of a job of two pods in one file; `script` is run by sh in each pod instead of coremill."""
    values: dict[str, Any] = {"kind": "job", "karpenter": "none", "cpus": 4, "memory_gib": 4, **section}
    objects = render_objects(loaded(folder, values, fleet__nodes=2)).objects
    if script is not None:
        # Kubelet takes $(...) and $$ for its own. The run file is named, so that the run's events are looked for.
        words = ["sh", "-c", script, "/etc/coremill/run.yaml"]
        for spec in job_spec_of(objects):
            spec["template"]["spec"]["containers"][0]["command"] = words
        for one in objects:
            if one["kind"] == "TrainJob":
                one["spec"]["trainer"]["command"] = words
    if change is not None:
        change(objects)
    file = folder / "all.yaml"
    file.write_text(to_yaml(objects))
    return file


@dataclass(frozen=True)
class Rehearsed:
    """A rehearsal that has ended."""

    code: int
    out: str
    err: str
    folder: Path

    def __str__(self) -> str:
        return f"exit code {self.code}\n--- stdout\n{self.out}\n--- stderr\n{self.err}"

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads(self.out)  # type: ignore[no-any-return]

    def log(self, pod: int, life: int = 0) -> str:
        """What a pod printed, in its first life or a later one."""
        name = [one["name"] for one in self.summary["pods"] if one["pod"] == pod][life]
        return (self.folder / "logs" / f"{name}.log").read_text()


def command(source: Path, *words: str) -> list[str]:
    return [sys.executable, "-m", "coremill", "k8s", "rehearse", str(source), *words]


def environment(**changes: str) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "PET_", "OMP_"))}
    return {**clean, "PYTHONPATH": str(ROOT / "src"), **changes}


def rehearse(source: Path, *words: str, timeout: float = 280, **environ: str) -> Rehearsed:
    folder = source.parent / "out"
    done = subprocess.run(
        command(source, "--json", "-o", str(folder), *words),
        capture_output=True,
        text=True,
        cwd=source.parent,
        env=environment(**environ),
        timeout=timeout,
    )
    return Rehearsed(done.returncode, done.stdout, done.stderr, folder)


@dataclass(frozen=True)
class Made:
    """What the kernel holds for a rehearsal: its processes and theirs, their namespaces, its memory groups."""

    folder: Path
    own_pid: int
    processes: frozenset[str]  # pid and start time
    namespaces: frozenset[str]

    def left(self) -> dict[str, Any]:
        """What of it is still there; other tests may run beside this one."""
        processes = _processes()
        everyones = {space for spaces in processes.values() for space in spaces}
        found = {
            "processes": sorted(self.processes & set(processes)),
            "namespaces": sorted(self.namespaces & everyones),
            # Not rglob: groups of others vanish while it looks.
            "groups": [
                path for path, _, _ in os.walk("/sys/fs/cgroup") if path.endswith(f"/coremill-rehearse-{self.own_pid}")
            ],
            "mounts": [
                line for line in Path("/proc/self/mountinfo").read_text().splitlines() if str(self.folder) in line
            ],
            "links": [path.name for path in Path("/sys/class/net").iterdir() if path.name.startswith("pod")],
        }
        return {name: one for name, one in found.items() if one}


def made_by(pid: int, folder: Path) -> Made:
    """By a rehearsal that is under way."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    own = {pid}
    while more := {child for child, parent in parents.items() if parent in own} - own:
        own |= more
    everyone = _processes()
    mine = {name: spaces for name, spaces in everyone.items() if int(name.split()[0]) in own}
    ours = {os.readlink(f"/proc/self/ns/{kind}") for kind in _KINDS}
    return Made(folder, pid, frozenset(mine), frozenset(space for spaces in mine.values() for space in spaces) - ours)


_KINDS = ("net", "mnt", "pid", "uts")


def _processes() -> dict[str, tuple[str, ...]]:
    """Pid and start time of every process, and its namespaces."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            started = (process / "stat").read_text().rpartition(")")[2].split()[19]
            found[f"{process.name} {started}"] = tuple(os.readlink(process / "ns" / kind) for kind in _KINDS)
    return found


def wait_until(condition: Callable[[], bool], within_seconds: float = 240) -> bool:
    deadline = time.monotonic() + within_seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def lines_of(file: Path, words: Sequence[str]) -> list[int]:
    """The lines of a file that hold all of these."""
    return [
        number
        for number, line in enumerate(file.read_text().splitlines(), start=1)
        if all(word in line for word in words)
    ]

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
    return None


def manifests(folder: Path, script: str | None = None, change: Change | None = None, **section: Any) -> Path:
    """All objects of a job of two pods in one file; `script` is run by sh in each pod instead of coremill."""
    values: dict[str, Any] = {"kind": "job", "karpenter": "none", "cpus": 4, "memory_gib": 4, **section}
    objects = render_objects(loaded(folder, values, fleet__nodes=2)).objects
    if script is not None:
        # Kubelet takes $(...) and $$ for its own.
        for spec in job_spec_of(objects):
            spec["template"]["spec"]["containers"][0]["command"] = ["sh", "-c", script]
        for one in objects:
            if one["kind"] == "TrainJob":
                one["spec"]["trainer"]["command"] = ["sh", "-c", script]
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
class Kept:
    """What the kernel holds: every kind of thing that a rehearsal makes."""

    networks: frozenset[str]
    mount_namespaces: frozenset[str]
    mounts: int
    groups: frozenset[str]
    links: frozenset[str]
    processes: frozenset[str]  # those of coremill


def kept() -> Kept:
    spaces: dict[str, set[str]] = {"net": set(), "mnt": set()}
    processes = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            for kind, found in spaces.items():
                found.add(os.readlink(process / "ns" / kind))
            words = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if "rehearse" in words and int(process.name) != os.getpid():
                processes.add(words)
    return Kept(
        networks=frozenset(spaces["net"]),
        mount_namespaces=frozenset(spaces["mnt"]),
        mounts=len(Path("/proc/self/mountinfo").read_text().splitlines()),
        groups=frozenset(str(path) for path in Path("/sys/fs/cgroup").rglob("coremill-rehearse-*")),
        links=frozenset(path.name for path in Path("/sys/class/net").iterdir()),
        processes=frozenset(processes),
    )


def wait_until(condition: Callable[[], bool], within_seconds: float = 60) -> bool:
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

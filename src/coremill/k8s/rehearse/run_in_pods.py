"""The run inside the pods, seen from outside: its run file, what pods print, the events it writes to the volume."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from coremill.k8s.check.lints.reading import at, mapping
from coremill.k8s.rehearse.pods import Container, Mount, Pod
from coremill.redaction import redact

_THREADS = re.compile(r"(\bthreads_per_rank:\s*)\d+")
_EVENTS = "events/rank-00000.jsonl"
_THREAD_VARIABLE = "OMP_NUM_THREADS"
_LONGEST_WORDS = 110


@dataclass(frozen=True, kw_only=True)
class PodRunFile:
    """The run file that a container's command names: where it is in the pod, and what it says."""

    path: str
    values: dict[str, Any]

    @property
    def folder(self) -> str:
        return str(PurePosixPath(self.path).parent)

    def get(self, key: str) -> Any:
        return at(self.values, *key.split("."))


def run_file_of(container: Container) -> PodRunFile | None:
    """None: the command names none, or it cannot be read; then the pod will say so itself."""
    for mount in container.mounts:
        for name, text in mount.files:
            path = f"{mount.path}/{name}"
            if path in container.command:
                try:
                    return PodRunFile(path=path, values=mapping(YAML(typ="safe", pure=True).load(text)))
                except YAMLError:
                    return PodRunFile(path=path, values={})
    return None


def with_fewer_threads(pod: Pod, most: int) -> Pod:
    """The pod with no more threads in a rank than this machine has for one."""
    container = pod.container
    environ = dict(container.environ)
    if environ.get(_THREAD_VARIABLE, "").isdigit():
        environ[_THREAD_VARIABLE] = str(min(most, int(environ[_THREAD_VARIABLE])))
    mounts = tuple(_capped(mount, most) for mount in container.mounts)
    return replace(pod, container=replace(container, environ=environ, mounts=mounts))


def _capped(mount: Mount, most: int) -> Mount:
    def fewer(found: re.Match[str]) -> str:
        return f"{found[1]}{min(most, int(found[0].removeprefix(found[1])))}"

    files = tuple((name, _THREADS.sub(fewer, text) if text else text) for name, text in mount.files)
    return replace(mount, files=files)


def on_this_machine(path: str, container: Container, volumes: Path) -> Path | None:
    """Where a path of the pod lies here; None: on no volume."""
    for mount in container.mounts:
        if mount.kind == "claim" and PurePosixPath(path).is_relative_to(mount.path):
            return volumes / mount.name / PurePosixPath(path).relative_to(mount.path)
    return None


class PodWords:
    """The last line that a pod has printed, where nobody has printed it before."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._offsets: dict[str, int] = {}
        self._told: set[str] = set()

    def begin_anew(self) -> None:
        """A new pod: what others said at their start counts as news again."""
        self._told.clear()

    def of(self, pod: str) -> str:
        """Of the named pod; empty: nothing new. Steps are told by the run's events."""
        try:
            with (self._logs / f"{pod}.log").open("rb") as stream:
                stream.seek(self._offsets.get(pod, 0))
                text = stream.read()
        except OSError:
            return ""
        whole, end, _ = text.rpartition(b"\n")
        self._offsets[pod] = self._offsets.get(pod, 0) + len(whole) + len(end)
        lines = [line for line in whole.decode(errors="replace").splitlines() if line.strip()]
        last = redact(lines[-1].strip()) if lines else ""
        if not last or last in self._told or last.startswith("step "):
            return ""
        self._told.add(last)
        return last if len(last) <= _LONGEST_WORDS else f"{last[: _LONGEST_WORDS - 3]}..."


@dataclass
class RunEvents:
    """Rank 0's events, followed as they are written."""

    folder: Path | None
    step: int = 0  # the last one done
    loss: float | None = None
    steps: list[tuple[float, int]] = field(default_factory=list)  # all that were done, again and again: when, which
    saves: list[dict[str, Any]] = field(default_factory=list)
    _offset: int = 0

    def follow(self) -> None:
        """Whole lines that are new."""
        if self.folder is None or not (file := self.folder / _EVENTS).is_file():
            return
        with file.open("rb") as stream:
            stream.seek(self._offset)
            text = stream.read()
        whole, _, _ = text.rpartition(b"\n")
        self._offset += len(whole) + bool(whole)
        for line in whole.splitlines():
            try:
                event = json.loads(line)
            except ValueError:
                continue  # torn by a kill
            if event.get("kind") == "step":
                self.step, self.loss = int(event["step"]), event.get("loss")
                self.steps.append((float(event["time"]), self.step))
            elif event.get("kind") == "save" and event.get("saved"):
                self.saves.append(event)

    @property
    def done(self) -> int:
        """Steps that are done, each counted once."""
        return len({step for _, step in self.steps})

    def lost(self) -> list[tuple[float, int]]:
        """When work was begun again, and how many steps were done a second time from there."""
        found: list[tuple[float, int]] = []
        furthest = last = 0
        for time, step in self.steps:
            if step <= last:
                found.append((time, furthest - step + 1))
            furthest, last = max(furthest, step), step
        return found

    def report(self) -> dict[str, Any]:
        """What the run says of itself at its end; empty: it has not ended."""
        try:
            return mapping(json.loads((self.folder / "report.json").read_text())) if self.folder else {}
        except (OSError, ValueError):
            return {}

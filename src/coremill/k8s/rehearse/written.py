"""The objects of a job as they are written, and where: every field leads back to its file and line."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from coremill.errors import InputError
from coremill.k8s.check.findings import joined
from coremill.k8s.check.manifests import Manifest


@dataclass(frozen=True)
class Written:
    """A part of an object, with where it stands."""

    manifest: Manifest
    path: str
    value: Any

    def part(self, *keys: str | int) -> Written:
        """A field of it; None where it is not written."""
        value, path = self.value, self.path
        for key in keys:
            path = joined(path, key)
            if isinstance(value, dict):
                value = value.get(str(key))
            elif isinstance(value, list) and isinstance(key, int) and key < len(value):
                value = value[key]
            else:
                value = None
        return Written(self.manifest, path, value)

    def parts(self, *keys: str | int) -> list[Written]:
        """The entries of a list."""
        found = self.part(*keys)
        return [found.part(place) for place in range(len(found.value or []))]

    @property
    def place(self) -> str:
        """job.yaml:23: Job/coremill/tiny spec.backoffLimit."""
        line = self.manifest.line_of(self.path)
        file = self.manifest.file if line is None else f"{self.manifest.file}:{line}"
        return f"{file}: {self.manifest.name}" + (f" {self.path}" if self.path else "")


@dataclass(frozen=True)
class WrittenObjects:
    """All objects of a job."""

    manifests: tuple[Manifest, ...]

    def of_kind(self, kind: str) -> Iterator[Written]:
        for one in self.manifests:
            if one.kind == kind:
                yield Written(one, "", one.object)

    def find(self, kind: str, name: str) -> Written | None:
        """By its name, in whichever namespace: the objects belong to one job."""
        return next((one for one in self.of_kind(kind) if one.part("metadata", "name").value == name), None)

    def the_job(self) -> Written:
        """What makes the pods."""
        found = [one for kind in ("TrainJob", "JobSet", "Job") for one in self.of_kind(kind)]
        files = ", ".join(dict.fromkeys(one.file for one in self.manifests))
        if not found:
            raise InputError(
                "there is no job to rehearse",
                where=files,
                why="no TrainJob, JobSet or Job is among the objects",
                do="name a run file with a section kubernetes, or all files that coremill k8s render wrote for one job",
            )
        if len(found) > 1:
            raise InputError(
                f"there are {len(found)} jobs, and one is rehearsed at a time",
                where=", ".join(one.manifest.name for one in found),
                do="name the files of one job",
            )
        return found[0]

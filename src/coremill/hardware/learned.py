"""What finished runs taught about this machine: a small file beside its calibration, read with it."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from pathlib import Path

from coremill.errors import StorageError
from coremill.files import write_atomically
from coremill.hardware.facts import Observation

# Enough for a median by engine and dtype; older ones go, for the code has moved on since.
MOST_OBSERVATIONS = 20


def read_observations(file: Path) -> tuple[Observation, ...]:
    """All that was learned; whatever cannot be understood is as good as not there."""
    try:
        documents = json.loads(file.read_text(encoding="utf-8"))
        known = {field.name for field in fields(Observation)}
        return tuple(
            Observation(**{name: value for name, value in document.items() if name in known}) for document in documents
        )
    except (OSError, ValueError, TypeError, AttributeError):
        return ()


def add_observation(file: Path, observation: Observation) -> None:
    """A run that is learned from again replaces itself."""
    earlier = [one for one in read_observations(file) if one.run != observation.run]
    documents = [asdict(one) for one in (*earlier, observation)[-MOST_OBSERVATIONS:]]
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, json.dumps(documents, indent=1))
    except OSError as error:
        raise StorageError(f"what was learned cannot be kept: {error.strerror or error}", where=str(file)) from error

"""What finished runs taught about this machine: a small file beside its calibration, read with it."""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict, fields
from pathlib import Path

from coremill.errors import StorageError
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
    """Written beside and renamed, so that a reader sees a whole file or none; a run learned again replaces itself."""
    earlier = [one for one in read_observations(file) if one.run != observation.run]
    documents = [asdict(one) for one in (*earlier, observation)[-MOST_OBSERVATIONS:]]
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=file.parent, suffix=".part", delete=False) as part:
            json.dump(documents, part, indent=1)
        Path(part.name).replace(file)
    except OSError as error:
        raise StorageError(f"what was learned cannot be kept: {error.strerror or error}", where=str(file)) from error

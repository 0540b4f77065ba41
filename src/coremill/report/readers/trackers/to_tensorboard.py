"""TensorBoard: event files in RUN/trackers/tensorboard, written by its own library, without TensorFlow or torch."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.hparams import summary_v2 as hparams
from tensorboard.plugins.text.metadata import create_summary_metadata
from tensorboard.summary.writer.event_file_writer import EventFileWriter
from tensorboard.util import tensor_util

from coremill.report.readers.trackers.base import About, Opened, Point, Tracker, flat, plan_in_short

FLUSH_SECONDS = 5


class TensorBoardTracker(Tracker):
    """A file per attempt in one folder: TensorBoard shows them as one run."""

    can_rewind = True

    def __init__(self) -> None:
        self._writer: EventFileWriter

    def open(self, about: About, folder: Path, run_id: str | None) -> Opened:
        """Begin a file; texts go along with a run that begins."""
        self._writer = EventFileWriter(str(folder), flush_secs=FLUSH_SECONDS)
        self._text("config", f"```yaml\n{about.config_text}\n```")
        self._text("plan", _table(plan_in_short(about.plan)))
        self._text("hardware", _table(about.hardware))
        known = {key: value for key, value in flat(about.config).items() if isinstance(value, bool | int | float | str)}
        self._add(hparams.hparams_pb(known, trial_id=about.name), step=0)
        return Opened(about.name, f"{folder}; to look: tensorboard --logdir {folder}")

    def forget_after(self, step: int) -> None:
        """TensorBoard leaves out what it read of later steps before this mark."""
        self._writer.add_event(
            Event(wall_time=time.time(), step=step + 1, session_log=SessionLog(status=SessionLog.START))
        )

    def log(self, points: Sequence[Point]) -> None:
        """Scalars, as single precision: the format has no other."""
        for point in points:
            values = [Summary.Value(tag=name, simple_value=number) for name, number in point.numbers.items()]
            self._add(Summary(value=values), step=point.step, moment=point.time)
        self._writer.flush()

    def note(self, lines: Sequence[str], step: int) -> None:
        """As a list in the tab Text."""
        self._text("notes", "\n".join(f"- {line}" for line in lines), step)

    def close(self, summary: Mapping[str, Any]) -> None:
        """Flush and close."""
        self._writer.close()

    def _text(self, tag: str, markdown: str, step: int = 0) -> None:
        tensor = tensor_util.make_tensor_proto(markdown)
        metadata = create_summary_metadata(display_name="", description="")
        self._add(Summary(value=[Summary.Value(tag=tag, metadata=metadata, tensor=tensor)]), step=step)

    def _add(self, summary: Summary, *, step: int, moment: float | None = None) -> None:
        self._writer.add_event(Event(wall_time=moment or time.time(), step=step, summary=summary))


def _table(values: Mapping[str, Any]) -> str:
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in values.items())])

"""The folder a run leaves: what lies where, and whether it may be written.

RUN/  config.yaml  plan.json  orders.json  events/  logs/  checkpoints/  export/  trackers/  report.json  report.html
      predictions.json  nbest_predictions.json  null_odds.json        of tasks that have them
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coremill.errors import InputError
from coremill.files import write_whole

# What evaluations of encoders leave (`leave`).
PREDICTION_FILES = ("predictions.json", "nbest_predictions.json", "null_odds.json")


@dataclass(frozen=True)
class RunFolder:
    """Paths inside one run folder."""

    path: Path

    @property
    def config(self) -> Path:
        """The resolved config, loadable again."""
        return self.path / "config.yaml"

    @property
    def plan(self) -> Path:
        """What was decided before the start."""
        return self.path / "plan.json"

    @property
    def orders(self) -> Path:
        """What the launcher found out for its ranks: folders, rows, steps."""
        return self.path / "orders.json"

    def orders_of(self, node_rank: int) -> Path:
        """The same for one of several machines that may share this folder: caches may lie elsewhere there."""
        return self.orders if node_rank == 0 else self.path / f"orders-node-{node_rank}.json"

    @property
    def logs(self) -> Path:
        """One file per rank: its stdout and stderr."""
        return self.path / "logs"

    @property
    def export(self) -> Path:
        """The trained model as a Hugging Face folder."""
        return self.path / "export"

    @property
    def report(self) -> Path:
        """The numbers of the run."""
        return self.path / "report.json"

    def is_finished(self) -> bool:
        """Whether the run in it came to its end."""
        return bool(self._reported("state") == "finished")

    def report_stamp(self) -> tuple[int, int] | None:
        """Changes when a report is written; None: there is none."""
        try:
            status = self.report.stat()
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns

    def is_ended_early(self) -> bool:
        """Whether that was before its last step, by its evaluations."""
        return self._reported("early_stop") is not None

    def last_step(self) -> int | None:
        """The one it ended with; None where that is not known."""
        step = self._reported("steps")
        return step if isinstance(step, int) else None

    def _reported(self, key: str) -> Any:
        """A key of report.json; None where there is none."""
        try:
            return json.loads(self.report.read_text())[key]
        except (OSError, ValueError, KeyError, TypeError):
            return None

    @contextlib.contextmanager
    def writable(self, where: str) -> Iterator[None]:
        """Create the folder and try a file in it, before hours of work depend on it.

        Where the block, which looks at all other input, fails, what was created is taken away again if still empty.
        """
        created = [folder for folder in (self.path, *self.path.parents) if not os.path.exists(folder)]
        try:
            self._try_to_write(where)
            yield
        except BaseException:
            with contextlib.suppress(OSError):  # not empty, or never made
                for folder in created:
                    folder.rmdir()
            raise

    def _try_to_write(self, where: str) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self.path, prefix=".writable-"):
                pass
        except OSError as error:
            raise InputError(
                f"the run folder {self.path} is not writable",
                where=where,
                why=str(error.strerror or error),
                do="set run.folder to a folder you may write, or change its permissions",
            ) from error

    def leave(self, texts: Mapping[str, str]) -> None:
        """What an evaluation leaves to look at, by name; each takes the place of an earlier one."""
        for name, text in texts.items():
            write_whole(self.path / name, text)

    def clear(self, *, keep_events: bool = False, keep_logs: bool = False) -> None:
        """Remove what an earlier run left, and nothing else that may lie there; a run that goes on keeps its events,
        and what trackers know of it.

        Other machines may have opened their logs already.
        """
        kept = {"events", "trackers"} if keep_events else set()
        for name in {"events", "logs", "export", "trackers"} - kept - ({"logs"} if keep_logs else set()):
            shutil.rmtree(self.path / name, ignore_errors=True)
        predictions = () if keep_events else PREDICTION_FILES
        for name in ("config.yaml", "plan.json", "orders.json", "report.json", "report.html", *predictions):
            (self.path / name).unlink(missing_ok=True)

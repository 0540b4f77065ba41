from __future__ import annotations

import errno
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from coremill.config.schema import RunConfig
from coremill.plan.types import Choice
from coremill.run import early_imports
from coremill.world.heartbeat import HeartbeatBoard
from rank_plans import rank_plan


class Server:
    """A fork server that imports nothing."""

    def __init__(
        self, argv: Sequence[str], environ: Mapping[str, str], log_file: Path, on_loss: Callable[[str], None]
    ) -> None:
        self.log_file = log_file

    def start(self) -> None:
        self.log_file.write_text("imported")

    def close(self) -> None:
        pass


def test_where_the_kernel_forbids_files_in_memory_the_disk_serves(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A strict seccomp profile, or vm.memfd_noexec=2."""

    def forbidden(*_: object) -> int:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", forbidden)
    monkeypatch.setattr(early_imports, "ForkServer", Server)
    model: Any = SimpleNamespace(config={"model_type": "llama"})
    plan: Any = rank_plan(2)
    plan.engine = Choice("replicate", "asked for")
    imports, log = early_imports.EarlyImports(RunConfig(), {}, None), tmp_path / "fork-server.log"
    with imports, imports.for_ranks(plan, model, log, lambda text: None), HeartbeatBoard(2) as board:
        assert board.read(1).marks == 0
    assert log.read_text() == "imported"

"""Ranks' libraries are imported while their rows are still being made: what they are forked from starts with the plan.

Importing torch and transformers takes seconds, tokenising too, and neither needs the other. Nothing is left in the run
folder before all input is checked: until ranks have ended, the fork server's log is in memory.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO

from coremill.config.schema import RunConfig
from coremill.files import anonymous_file
from coremill.model.source import ModelFolder
from coremill.plan.types import Plan
from coremill.supervise.fork_client import ForkServer, why_no_fork_server
from coremill.supervise.rank_environment import fork_server_environment, node_of_launcher, shared_settings
from coremill.world.identity import NodeIdentity


class EarlyImports:
    """The fork server of this node, from the plan to the end of the ranks; as a block it is gone after it."""

    def __init__(
        self, config: RunConfig, environ: Mapping[str, str], node: NodeIdentity | None, *, wanted: bool = True
    ) -> None:
        self._config, self._environ, self._node, self._wanted = config, environ, node, wanted
        self._needs: tuple[list[str], dict[str, str]] | None = None
        self._server: ForkServer | None = None
        self._log: IO[bytes] | None = None

    def __enter__(self) -> EarlyImports:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def begin(self, plan: Plan, model: ModelFolder) -> None:
        """Import what ranks of this plan will need; call it from the thread that ranks are to die with."""
        if not self._wanted or not self._config.supervise.fork_ranks or why_no_fork_server(self._environ) is not None:
            return
        needs = self._needs_of(plan, model)
        if needs == self._needs:
            return
        self._end()  # the plan has changed with the rows: another engine, other threads
        self._needs, self._log = needs, os.fdopen(anonymous_file("fork-server-log"), "rb")
        self._server = ForkServer(*needs, Path(f"/proc/self/fd/{self._log.fileno()}"), lambda text: None)
        self._server.start()

    @contextlib.contextmanager
    def for_ranks(
        self, plan: Plan, model: ModelFolder, log_file: Path, note: Callable[[str], None]
    ) -> Iterator[ForkServer | None]:
        """What ranks are forked from, ready or not; None where they are to be started afresh, which is said."""
        reason = why_no_fork_server(self._environ)
        if reason is not None and self._config.supervise.fork_ranks:
            note(f"{reason}: ranks are started afresh, and a restart takes seconds longer")
        self.begin(plan, model)
        if self._server is None:
            yield None
            return
        self._server.on_loss = note
        note("starting ranks: torch and transformers are imported once for all of them, which takes some seconds")
        try:
            yield self._server
        finally:
            with contextlib.suppress(OSError):
                shutil.copyfile(self._server.log_file, log_file)
            self._end()

    def _needs_of(self, plan: Plan, model: ModelFolder) -> tuple[list[str], dict[str, str]]:
        settings = shared_settings(plan, self._environ, node_of_launcher(plan, self._node, port=0))
        imported = [str(model.config["model_type"]), self._config.task, plan.engine.value]
        if self._config.lora.rank is not None:
            imported.append("peft")
        command = [sys.executable, "-m", "coremill.forked_rank", *imported]
        return command, fork_server_environment(self._environ, settings)

    def _end(self) -> None:
        if self._server is not None:
            self._server.close()
        if self._log is not None:
            self._log.close()
        self._server = self._log = self._needs = None

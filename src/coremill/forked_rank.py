"""What ranks are forked from: imports all that `coremill train` as a rank will need, then waits for orders.

    python -m coremill.forked_rank MODEL_TYPE TASK ENGINE DESCRIPTOR    DESCRIPTOR: its end of the launcher's socket

Importing torch and transformers takes seconds, a fork milliseconds. Nothing is computed here: no thread is started, no
OpenMP region entered, nothing drawn by chance. In a rank the very same command line runs as in one started afresh.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import socket
import sys
from typing import Any

from coremill.cli import main as command_line
from coremill.engines import engine_kind
from coremill.hardware.probe import environment_snapshot
from coremill.redaction import guard_output
from coremill.registry import find
from coremill.supervise.fork_server import serve
from coremill.tasks.base import Task

# What the stages of run/story.py import. What else a rank imports is little, but for its model, task and engine.
STAGES = (
    "coremill.run.story",
    "coremill.checkpoint.continuation",
    "coremill.checkpoint.conversions",
    "coremill.checkpoint.dropout",
    "coremill.checkpoint.export",
    "coremill.checkpoint.export_adapter",
    "coremill.checkpoint.export_best",
    "coremill.checkpoint.resume",
    "coremill.checkpoint.saver",
    "coremill.checkpoint.snapshot",
    "coremill.data.loader",
    "coremill.engines",
    "coremill.engines.base",
    "coremill.engines.optimizers",
    "coremill.model.build",
    "coremill.model.changes",
    "coremill.model.trained",
    "coremill.model.fused_layers",
    "coremill.model.load",
    "coremill.train.evaluation",
    "coremill.train.loop",
    "coremill.train.numerics",
    "coremill.train.scores",
)


def import_stages(model_type: str, task: str, engine: str, *others: str) -> None:
    """All that a rank of such a run will use; `others`: modules that not every run has a use for."""
    task_class: type[Task[Any]] = find("coremill.tasks", task)
    for name in (*STAGES, *task_class.training_modules, *engine_kind(engine).modules, *others):
        importlib.import_module(name)
    import transformers

    with contextlib.suppress(Exception):  # ranks will say what is wrong with it
        getattr(transformers, task_class.model_class)._model_mapping[transformers.CONFIG_MAPPING[model_type]]


def main() -> None:
    """Import, fork as asked, and in a rank run the command."""
    launcher_pid, (*imported, descriptor) = os.getppid(), sys.argv[1:]
    guard_output(environment_snapshot())
    gc.disable()  # imports make hardly any garbage: looking for it takes a tenth of their time
    import_stages(*imported)
    order = serve(socket.socket(fileno=int(descriptor)), launcher_pid)
    if order is not None:
        sys.argv = order.argv[2:]  # without python -m
        command_line()


if __name__ == "__main__":
    main()

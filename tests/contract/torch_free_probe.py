"""Run by test_torch_free.py in a process of its own: who asks for the heavy libraries, and when.

    python torch_free_probe.py modules NAME ...     import each, print those that asked
    python torch_free_probe.py command ARGUMENT ... run one coremill command to its end

Importing a heavy library fails here, so nobody gets by unnoticed, and what would have worked with it shows itself.
"""

from __future__ import annotations

import importlib
import importlib.abc
import json
import sys
import traceback
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

HEAVY = ("torch", "transformers", "datasets", "pyarrow", "deepspeed", "accelerate", "boto3")
HEAVY += ("tensorboard", "wandb", "mlflow", "prometheus_client")


class Refusal(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Takes note of who imports a heavy library, and says no; to look where one is installed is allowed."""

    def __init__(self) -> None:
        self.asked: dict[str, str] = {}

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """What the import system asks for first."""
        if name.partition(".")[0] not in HEAVY:
            return None
        found = PathFinder.find_spec(name, path)
        if found is not None:
            found.loader = self
        return found

    def create_module(self, spec: ModuleSpec) -> None:
        """What it asks for next, where it does import."""
        ours = [frame for frame in traceback.extract_stack() if "coremill" in frame.filename]
        self.asked[spec.name] = f"{ours[-1].filename}:{ours[-1].lineno}" if ours else "outside of coremill"
        raise ImportError(f"{spec.name} is too heavy here")

    def exec_module(self, module: ModuleType) -> None:
        """Never reached."""
        raise AssertionError


def import_all(names: list[str], refusal: Refusal) -> dict[str, str]:
    wrong = {}
    for name in names:
        refusal.asked.clear()
        try:
            importlib.import_module(name)
        except ImportError as error:
            wrong[name] = str(error)
        for heavy, place in refusal.asked.items():
            wrong[name] = f"{heavy} from {place}"
    return wrong


def run_command(arguments: list[str], refusal: Refusal) -> int:
    from coremill import cli

    sys.argv = ["coremill", *arguments]
    try:
        cli.main()
    except SystemExit as end:
        return int(end.code or 0)
    finally:
        if refusal.asked:
            print("ASKED " + json.dumps(refusal.asked), file=sys.stderr)
    return 0


if __name__ == "__main__":
    guard = Refusal()
    sys.meta_path.insert(0, guard)
    if sys.argv[1] == "modules":
        print(json.dumps(import_all(sys.argv[2:], guard)))
    else:
        sys.exit(run_command(sys.argv[2:], guard))

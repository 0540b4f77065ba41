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
from typing import Any

HEAVY = ("torch", "transformers", "datasets", "pyarrow", "deepspeed", "accelerate", "boto3")


class Refusal(importlib.abc.MetaPathFinder):
    """Takes note of who asks for a heavy library, and says no."""

    def __init__(self) -> None:
        self.asked: dict[str, str] = {}

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.partition(".")[0] not in HEAVY:
            return
        ours = [frame for frame in traceback.extract_stack() if "coremill" in frame.filename]
        self.asked[name] = f"{ours[-1].filename}:{ours[-1].lineno}" if ours else "outside of coremill"
        raise ImportError(f"{name} is too heavy here")


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

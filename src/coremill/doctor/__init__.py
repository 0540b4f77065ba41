"""`coremill doctor`: what this machine can do, what coremill would choose on it, and a real two-rank self-test."""

from __future__ import annotations

import json
import sys

from rich.console import Console

from coremill.doctor.choices import choices_here
from coremill.doctor.diagnosis import Diagnosis, assemble, diagnose
from coremill.doctor.findings import Finding
from coremill.doctor.screen import render
from coremill.doctor.self_test import Check, SelfTest, self_test

__all__ = ["Check", "Diagnosis", "Finding", "SelfTest", "assemble", "diagnose", "examine", "render", "self_test"]


def examine(*, as_json: bool, run_self_test: bool, console: Console) -> int:
    """The whole command: 0 when all is well, 1 when something failed."""
    progress = Console(stderr=True)
    diagnosis = diagnose(
        choose=choices_here,
        with_self_test=run_self_test,
        progress=lambda text: progress.print(text, style="dim", soft_wrap=True, highlight=False),
    )
    if as_json:
        sys.stdout.write(json.dumps(diagnosis.to_json(), indent=2) + "\n")
    else:
        render(diagnosis, console)
    return 0 if diagnosis.healthy else 1

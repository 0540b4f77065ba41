"""Draws the terminal of a run as an SVG, from what the run left: the picture in the README.

    python scripts/draw_run.py runs/built-in > docs/pictures/run.svg
    python scripts/draw_run.py runs/built-in --step 120 > docs/pictures/run.svg

Three moments under each other: the plan before the start, the progress at one step, the closing screen. Numbers are the
run's own; paths are shortened to what a reader would type.
"""

from __future__ import annotations

import argparse
import io
import json
import re
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

from coremill.report.events import read_events
from coremill.report.plan_screen import render_plan_short
from coremill.report.readers.console import RunConsole
from coremill.report.summary import summarise
from coremill.report.summary_screen import render_summary

WIDTH = 108


def draw(run: Path, command: str, step: int | None) -> str:
    """The picture as SVG text."""
    console = Console(record=True, force_terminal=True, color_system="truecolor", width=WIDTH, file=io.StringIO())
    plan = json.loads((run / "plan.json").read_text())
    console.print(Text.assemble(("$ ", "bold green"), (command, "bold")))
    render_plan_short(plan, console)

    last = float("inf") if step is None else step
    events = [event for event in read_events(run) if event.kind != "step" or event.number("step") <= last]
    # The live display redraws itself; taken once, it is a moment of it.
    with RunConsole(plan.get("steps"), plan, Console(file=io.StringIO())) as screen:
        screen.take(event for event in events if event.kind in ("start", "load", "step"))
        console.print()
        console.print(screen._display())
    console.print()
    summary = json.dumps(summarise(run)).replace(f"{run.absolute().parent.parent}/", "")
    render_summary(json.loads(summary), console)
    svg = console.export_svg(title="coremill")
    # A picture loads nothing: without rich's web font the reader's own fixed-width font serves.
    return re.sub(r"@font-face \{.*?\}\s*|<!--.*?-->\s*", "", svg, flags=re.DOTALL)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Draw the terminal of a run as an SVG.")
    parser.add_argument("run", type=Path)
    parser.add_argument("--command", default="coremill train")
    parser.add_argument("--step", type=int, help="show the progress as it was after this step")
    options = parser.parse_args()
    sys.stdout.write(draw(options.run, options.command, options.step))


if __name__ == "__main__":
    main()

"""docs/plan.md shows what the command shows: its screen and its table of choices are made here.

After a change that is meant: `python tests/unit/plan/test_page.py` writes them anew.
"""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from coremill.config.load import load_config
from coremill.plan.planner import candidates_of
from coremill.run.cards import card_without_weights
from coremill.run.machines import find_fleet
from coremill.run.plan_command import plan_once

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "plan.md"
RUN_FILE = ROOT / "examples" / "llama3-8b-wikitext.yaml"
SETTINGS = ("model.name=examples/cards/llama3-8b", "model.weights=random")
SCREEN = re.compile(r"(<!-- screen:.*?-->\n```text\n).*?(```\n)", re.DOTALL)
CHOICES = re.compile(r"(\| choice \| memory \| step \|\n\|---\|---\|---\|\n).*?(<!-- choices:)", re.DOTALL)


def screen() -> str:
    console = Console(file=io.StringIO(), force_terminal=True, color_system=None, width=108)
    plan_once(load_config(RUN_FILE, SETTINGS), None, as_json=False, console=console)
    assert isinstance(console.file, io.StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines()).strip() + "\n"


def choices() -> str:
    config = load_config(RUN_FILE, SETTINGS).config
    fleet = find_fleet(config, None)
    lines = []
    for one in sorted(candidates_of(config, fleet, card_without_weights(config)), key=lambda one: one.seconds.total):
        shape = one.arrangement
        if shape.engine == "replicate" or shape.micro_batch_rows not in (1, 4, 8):
            continue
        words = [
            "1 row at a time" if shape.micro_batch_rows == 1 else f"{shape.micro_batch_rows} rows at a time",
            "activations recomputed" if shape.activation_checkpointing else "activations kept",
            "weights kept gathered" if shape.keep_gathered else "weights given back",
        ]
        memory = f"{one.memory.steady_step.total / 1e9:.1f} GB" + ("" if one.fits else ", does not fit")
        lines.append(f"| {', '.join(words)} | {memory} | {one.seconds.total:.0f} s |\n")
    return "".join(lines)


def rendered(page: str) -> str:
    page = SCREEN.sub(lambda found: found.group(1) + screen() + found.group(2), page)
    return CHOICES.sub(lambda found: found.group(1) + choices() + found.group(2), page)


def test_the_page_shows_what_the_command_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    page = PAGE.read_text(encoding="utf-8")
    assert SCREEN.search(page) and CHOICES.search(page)
    assert page == rendered(page), "run: python tests/unit/plan/test_page.py"


if __name__ == "__main__":
    import os

    os.chdir(ROOT)
    PAGE.write_text(rendered(PAGE.read_text(encoding="utf-8")), encoding="utf-8")

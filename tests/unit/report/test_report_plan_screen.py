import io
import json
import subprocess
import sys
from dataclasses import replace

import pytest
from rich.console import Console

from coremill.plan.types import Choice
from coremill.report.plan_screen import render_plan, render_plan_short
from unit.report.fake_run import fake_plan

CARD = {"name": "llama", "parameters": 8_030_000_000, "layers": 32, "vocabulary_rows": 128_256}


def shown(render: object, *arguments: object, force_terminal: bool) -> list[str]:
    file = io.StringIO()
    console = Console(file=file, width=80, force_terminal=force_terminal, color_system=None, legacy_windows=False)
    render(*arguments, console)  # type: ignore[operator]
    return [line.rstrip() for line in file.getvalue().splitlines()]


@pytest.mark.parametrize("world_size", [1, 4])
@pytest.mark.parametrize("fits", [True, False])
def test_screen_fits_eighty_columns_and_says_all(world_size: int, fits: bool) -> None:
    plan = json.loads(json.dumps(fake_plan(world_size, fits=fits).to_json()))  # as read back from plan.json
    lines = shown(render_plan, plan, CARD, force_terminal=True)
    text = " ".join(" ".join(lines).split())
    assert all(len(line) <= 80 for line in lines)
    assert lines[0].startswith("llama 8.03 B parameters, 32 layers, vocabulary 128,256 on ")
    assert lines[1].startswith("fits: " if fits else "does not fit: ")
    for words in ("optimizer", "limit 2.00 GB", "one rank per NUMA node", "tokens/s, utilization", "compute 4.10 s"):
        assert words in text
    assert ("--set train.activation_checkpointing=true" in text) == (not fits)
    assert ("$" in text) == (world_size == 4 or not fits)


def test_off_a_terminal_nothing_is_wrapped() -> None:
    plan = fake_plan(4, fits=False).to_json()
    lines = shown(render_plan, plan, CARD, force_terminal=False)
    assert any(len(line) > 80 for line in lines)
    assert all(not line or line[0].isalpha() or line.startswith("- ") for line in lines)  # none is the rest of another
    reasons = [choice["reason"] for choice in plan.values() if isinstance(choice, dict) and "reason" in choice]
    assert all(any(reason in line for line in lines) for reason in reasons)


@pytest.mark.parametrize("force_terminal", [True, False])
def test_short_form_is_short(force_terminal: bool) -> None:
    lines = shown(render_plan_short, fake_plan(4).to_json(), force_terminal=force_terminal)
    assert 4 <= len(lines) <= 8
    assert "shard: 1.25 GB of state over 4 ranks" in lines[1]
    unknown = fake_plan(4, steps=None).to_json()
    assert "steps in" not in " ".join(shown(render_plan_short, unknown, force_terminal=force_terminal))


@pytest.mark.parametrize("force_terminal", [True, False])
def test_what_is_unusual_about_the_model_is_in_the_short_form(force_terminal: bool) -> None:
    plan = fake_plan(4).to_json()
    plain = shown(render_plan_short, plan, force_terminal=force_terminal)
    plan |= {"kept_activations": {"value": "estimated", "reason": "a family that the plan does not know"}}
    plan |= {"attention": {"value": "eager", "reason": "no sdpa form"}}
    unusual = shown(render_plan_short, plan, force_terminal=force_terminal)
    text = " ".join(" ".join(unusual).split())
    assert "does not know" in text and "eager: no sdpa form" in text
    assert "does not know" not in " ".join(plain)


def test_report_imports_no_torch() -> None:
    modules = "import sys; from coremill.report import events, plan_screen, readers, show, summary"
    code = f"{modules}; print([name for name in ('torch', 'jinja2', 'numpy') if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize("force_terminal", [True, False])
def test_optimizer_and_update_are_in_both_forms_where_they_are_not_the_usual(force_terminal: bool) -> None:
    plan = replace(
        fake_plan(4), optimizer=Choice("adamw-8bit", "adamw needs 41 GB"), update=Choice("inside", "so it fits")
    )
    for render, arguments in ((render_plan, (plan.to_json(), CARD)), (render_plan_short, (plan.to_json(),))):
        text = " ".join(" ".join(shown(render, *arguments, force_terminal=force_terminal)).split())
        assert "adamw-8bit" in text and "adamw needs 41 GB" in text and "so it fits" in text

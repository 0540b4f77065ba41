"""Runs side by side: on the screen, as JSON; what a run is about; what happened to it."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from coremill.cli import app
from coremill.errors import InputError
from coremill.report.comparison import compare, config_differences, names_of, render_comparison, verdicts
from coremill.report.page.comparison_page import render_comparison_page
from coremill.report.summary import summarise
from coremill.run.opening import command_line
from unit.report.fake_run import START, fake_plan, make_fake_run, write_line
from unit.report.test_report_page import check


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("runs")
    first = make_fake_run(folder / "one", world_size=1, steps=60, total_steps=60)
    second = make_fake_run(folder / "two", world_size=4, steps=100, total_steps=100, seed=9)
    (first / "config.yaml").write_text("model: {name: a}\ntrain: {steps: 60, learning_rate: 0.001}\nrun: {folder: x}\n")
    (second / "config.yaml").write_text("model: {name: a}\ntrain: {steps: 100, clip: 1}\nrun: {folder: y}\n")
    plan = fake_plan(1, steps=60).to_json()
    (first / "plan.json").write_text(json.dumps({**plan, "tokens_per_second": 4000.0}))
    return [first, second]


def test_what_is_compared(runs: list[Path]) -> None:
    document = compare([summarise(run) for run in runs])
    assert [run["name"] for run in document["runs"]] == ["one", "two"]
    assert document["config_differences"] == [
        {"key": "train.steps", "values": [60, 100]},
        {"key": "train.learning_rate", "values": [0.001, None]},
        {"key": "train.clip", "values": [None, 1]},
    ]
    one, two = document["runs"]
    assert one["plan_error"]["tokens_per_second"] == pytest.approx(one["measured"]["tokens_per_second"] / 4000 - 1)
    assert two["best"] == min(summarise(runs[1])["evaluations"], key=lambda evaluation: evaluation["loss"])
    assert document["lowest_loss"] == {"run": "two", "of": "evaluation"}
    assert document["fastest"]["planned"] == "one" and document["closest_plan"] == "two"


def test_the_lowest_loss_may_be_of_another_step_than_the_best(runs: list[Path]) -> None:
    """The best of a classifier is by accuracy."""
    one, two = (summarise(run) for run in runs)
    for summary, losses, best in ((one, (0.30, 0.45), 0.45), (two, (0.40,), 0.40)):
        summary["evaluations"] = [{"step": step, "loss": loss} for step, loss in enumerate(losses, 1)]
        summary["best"] = {"step": len(losses), "metrics": {"accuracy": 0.9, "loss": best}}
    assert compare([one, two])["lowest_loss"] == {"run": "one", "of": "evaluation"}


def test_the_comparison_on_the_screen_and_through_a_pipe(runs: list[Path]) -> None:
    document = compare([summarise(run) for run in runs])
    pipe, terminal = io.StringIO(), io.StringIO()
    render_comparison(document, Console(file=pipe, width=80))
    render_comparison(document, Console(file=terminal, width=140, force_terminal=True, color_system=None))
    for text in (pipe.getvalue(), terminal.getvalue()):
        for words in ("one", "two", "train.learning_rate", "lowest loss on held-out data: two", "one: speed"):
            assert words in text
    assert "two: the plan was right, speed and memory within 10 %" in pipe.getvalue()


def test_the_page_of_several_runs_is_whole_and_loads_nothing(runs: list[Path]) -> None:
    page = render_comparison_page([summarise(run) for run in runs])
    checker = check(page)
    assert checker.loads == ["data:,"] and page.count('<div class="plot"') == 12
    assert "train.learning_rate" in page and "over tokens" in page


def test_the_command(runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = [str(run) for run in runs]
    app(["report", *names, "--json", "--html", str(tmp_path / "new" / "page.html")], standalone_mode=False)
    assert len(json.loads(capsys.readouterr().out)["runs"]) == 2
    assert (tmp_path / "new" / "page.html").read_text().startswith("<!doctype html>")
    for words, said in (
        ([*names, "--serve"], "follows one run"),
        ([names[0], "--serve", "--json"], "neither with --json"),
        ([names[0], "--port", "8000"], "--port is for the live page"),
        ([names[0], "--serve", "--port", "70000"], "port 70000"),
        ([names[0], names[0]], "named twice"),
        ([str(tmp_path), "--serve"], "not a run folder"),
    ):
        with pytest.raises(InputError, match=said):
            app(["report", *words], standalone_mode=False)


def test_names_tell_runs_apart(tmp_path: Path) -> None:
    assert names_of([tmp_path / "a" / "run", tmp_path / "b" / "run"]) == ["a/run", "b/run"]
    assert names_of([Path("x"), Path("y")]) == ["x", "y"]


def test_configs_that_are_none_differ_in_nothing() -> None:
    assert config_differences([None, "a: [", "just words"]) == []


def test_the_default_of_a_key_that_another_replaces_is_no_difference() -> None:
    one = "data: {source: notes.txt, sources: null}\nmodel: {name: built-in, config: {model_type: llama}}\n"
    other = "data: {source: built-in, sources: [{source: a, share: 0.5}]}\nmodel: {name: gpt2, config: null}\n"
    found = {each["key"]: each["values"] for each in config_differences([one, other])}
    assert found["data.source"] == ["notes.txt", None]
    assert found["data.sources"] == [None, [{"source": "a", "share": 0.5}]]
    assert found["model.name"] == [None, "gpt2"]


@pytest.mark.parametrize(
    ("planned", "measured", "said"),
    [
        ((100, 101), (50, 40), "speed: the plans expected no difference, but a was the fastest"),
        ((100, 101), (50, 50.5), "speed: the plans expected no difference, and there is hardly one"),
        ((100, 200), (50, 80), "fastest: the plans said b, and so it came"),
        ((100, 200), (80, 50), "fastest: the plans said b, but a was"),
        ((100, 200), (50.5, 50), "fastest: the plans said b, but there is hardly a difference"),
        ((199, 200, 100), (80, 50, 40), "fastest: the plans said a or b, and a was"),
    ],
)
def test_what_the_plans_said_of_speed(planned: tuple[float, ...], measured: tuple[float, ...], said: str) -> None:
    names = "abc"[: len(planned)]
    runs: list[dict[str, Any]] = [
        {
            "name": name,
            "plan": {"tokens_per_second": rate},
            "measured": {"tokens_per_second": found},
            "plan_error": {"tokens_per_second": 0.0},
        }
        for name, rate, found in zip(names, planned, measured, strict=True)
    ]
    fastest = {
        "planned": names[planned.index(max(planned))],
        "measured": names[measured.index(max(measured))],
    }
    document = {"runs": runs, "lowest_loss": {"run": None, "of": "training"}, "fastest": fastest, "notes": []}
    assert verdicts(document)[0] == said


def test_the_subject_of_a_run(tmp_path: Path) -> None:
    make_fake_run(tmp_path, steps=3)
    orders = {"parameters": 7, "trainable_parameters": 5, "command": "coremill train x.yaml"}
    (tmp_path / "orders.json").write_text(json.dumps(orders))
    config = "model:\n  name: hub/id\ndata:\n  sources:\n  - {source: a, share: 0.5}\n  - {source: b, share: 0.5}\n"
    (tmp_path / "config.yaml").write_text(config + "train:\n  learning_rate: 1.0e-3\n  schedule: cosine\n")
    subject = summarise(tmp_path)["subject"]
    assert (subject["model"], subject["parameters"], subject["trainable_parameters"]) == ("hub/id", 7, 5)
    assert subject["data"] == ["a", "b"] and subject["command"] == "coremill train x.yaml"
    assert (subject["learning_rate"], subject["schedule"]) == (1e-3, "cosine")
    (tmp_path / "config.yaml").write_text("model:\n  name: built-in\n  config: {model_type: llama}\n")
    assert summarise(tmp_path)["subject"]["model"] == "llama shape of the run file"


def test_what_was_read_from_the_hub_has_its_commit(tmp_path: Path) -> None:
    make_fake_run(tmp_path, steps=3)
    model, tokenizer, data = ("c0ffee" + number * 34 for number in "123")
    orders = {
        "model": {"folder": f"/cache/hub/models--hub--id/snapshots/{model}"},
        "tokenizer": f"/cache/hub/models--hub--words/snapshots/{tokenizer}",
        "data": {"commits": {"hf://hub/set:small@main": data}},
    }
    (tmp_path / "orders.json").write_text(json.dumps(orders))
    (tmp_path / "config.yaml").write_text("model:\n  name: hub/id\n  revision: main\ntokenizer: hub/words\n")
    found = {"hub/id": model, "hub/words": tokenizer, "hf://hub/set:small@main": data}
    assert summarise(tmp_path)["subject"]["commits"] == found
    orders["model"]["folder"], orders["tokenizer"], orders["data"] = "/models/mine", "/models/mine", {}
    (tmp_path / "orders.json").write_text(json.dumps(orders))
    (tmp_path / "config.yaml").write_text("model:\n  name: /models/mine\n")
    assert summarise(tmp_path)["subject"]["commits"] == {}


def test_the_command_line_as_it_was_typed() -> None:
    assert command_line(["/x/bin/coremill", "train", "a b.yaml"]) == "coremill train 'a b.yaml'"
    assert command_line(["/x/coremill/__main__.py", "train"]) == "coremill train"
    assert command_line(["/x/ipykernel_launcher.py", "-f", "y.json"]) is None
    assert "hf_" not in str(command_line(["coremill", "--set", "x=hf_" + "secret" * 5]))


def test_marks_tell_each_moment_once(tmp_path: Path) -> None:
    make_fake_run(tmp_path, world_size=2, steps=10, ending="stopped")
    write_line(tmp_path, 0, "save", START + 30, step=4, saved=True, bytes=1, seconds=1.0)
    write_line(tmp_path, 1, "save", START + 30, step=4, saved=True, bytes=1, seconds=1.0)
    write_line(tmp_path, 0, "save", START + 35, step=5, saved=False, reason="slow")
    for rank in (0, 1):
        write_line(tmp_path, rank, "start", START + 1000, world_size=2, attempt=START + 1000)
        write_line(tmp_path, rank, "resume", START + 1001, step=10, text="continuing")
    fault = {"cause": "killed", "text": "rank 1 was killed", "action": "restart", "step": 12, "why_not": None}
    write_line(tmp_path, 1, "fault", START + 1100, **fault)
    for rank in (0, 1):
        write_line(tmp_path, rank, "resume", START + 1110, step=10, text="continuing")
    marks = summarise(tmp_path)["marks"]
    assert [(mark["kind"], mark["step"]) for mark in marks] == [
        *(("save", 4), ("stop", 10), ("continuation", 10), ("restart", 12))
    ]

"""Which machines `coremill plan` plans for: slots of a hostfile, and none named at all."""

import json
from pathlib import Path

import pytest
from rich.console import Console

from coremill.config.load import load_config
from coremill.config.schema import RunConfig
from coremill.run.machines import with_slots
from coremill.run.plan_command import plan_on_fleets, plan_once


@pytest.mark.parametrize(
    ("lines", "set_ranks", "expected"),
    [
        ("node1 slots=2\nnode2 slots=2\n", "auto", 2),
        ("node1 slots=2\nnode2 slots=2\n", 3, 3),
        ("node1 slots=2\nnode2 slots=4\n", "auto", "auto"),
        ("node1\nnode2\n", "auto", "auto"),
    ],
)
def test_slots_are_ranks_per_node(tmp_path: Path, lines: str, set_ranks: int | str, expected: int | str) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.write_text(lines)
    config = RunConfig.model_validate({"parallel": {"ranks_per_node": set_ranks}})
    assert with_slots(config, str(hostfile)).parallel.ranks_per_node == expected
    assert with_slots(config, "2xc7i.8xlarge") is config and with_slots(config, None) is config


def test_a_comparison_without_fleets_is_of_the_one_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    loaded = load_config(None, ["fleet.instance=c7i.8xlarge", "train.steps=5"])
    plan_on_fleets(loaded, [], as_json=True, console=Console())
    ranked = json.loads(capsys.readouterr().out)
    assert [plan["fleet"] for plan in ranked["by_cost"]] == [plan["fleet"] for plan in ranked["by_time"]]
    assert "c7i.8xlarge" in ranked["by_cost"][0]["fleet"]


def test_a_comparison_says_what_is_assumed_of_which_fleet() -> None:
    console = Console(record=True, width=400)
    plan_on_fleets(
        load_config(None, ["train.steps=5"]), ["4xc7i.8xlarge", "1xc7i.48xlarge"], as_json=False, console=console
    )
    assumed = [line for line in console.export_text().splitlines() if "not measured" in line]
    for fleet in ("4 x c7i.8xlarge", "1 x c7i.48xlarge"):
        assert any(line.startswith(f"assumed for {fleet}, not measured: the rates of the CPU") for line in assumed)


def test_a_shape_of_the_run_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COREMILL_CACHE", str(tmp_path))
    shape = "{model_type: gpt2, n_embd: 64, n_layer: 2, n_head: 2, vocab_size: 500}"
    settings = [f"model.config={shape}", "model.weights=random", "tokenizer=built-in", "train.steps=5"]
    console = Console(record=True, width=200)
    plan_once(load_config(None, settings), "c7i.8xlarge", as_json=False, console=console)
    assert "gpt2 shape of the run file 1" in console.export_text().replace("\n", " ")
    assert "built-in" not in console.export_text()


@pytest.mark.parametrize("length", ["train.steps=5", "train.epochs=1"])
@pytest.mark.parametrize("text", ["title,body\na,some words\n", '{"title": "a", "body": "some words"}\n'])
def test_data_that_train_refuses_is_said_with_its_columns(
    length: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COREMILL_CACHE", str(tmp_path))
    file = tmp_path / ("data.csv" if "," in text[:6] else "data.jsonl")
    file.write_text(text)
    plan_once(load_config(None, [length], data=str(file)), "c7i.8xlarge", as_json=True, console=Console())
    out, err = capsys.readouterr()
    assert json.loads(out)["fits"] is True
    assert f"warning: coremill train would refuse this data here: there is no column 'text' ({file}:1)" in err
    assert "its columns are: title, body" in err and "set data.column" in err
    right = load_config(None, ["train.steps=5", "data.column=body"], data=str(file))
    plan_once(right, "c7i.8xlarge", as_json=True, console=Console())
    assert "refuse" not in capsys.readouterr().err

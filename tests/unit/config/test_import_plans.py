# ruff: noqa: E501 (the tables: one example, one row)
"""With model and data filled in, `coremill plan` accepts what `coremill config import` makes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from coremill import cli
from tiny_models import make_config_folder
from unit.config.brought import BROUGHT, imported

OF_TEXT = ["one_machine.yaml", "four_machines.yaml", "cpu-ds.json", "torchrun_four.sh", "python.sh", "ipex_launcher.sh"]


def planned(path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    monkeypatch.setattr("sys.argv", ["coremill", "plan", str(path), "--fleet", "4xc7i.8xlarge", "--json"])
    try:
        cli.main()
    except SystemExit as ended:
        assert not ended.code, capsys.readouterr().err
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize("name", OF_TEXT)
def test_text_is_planned(name, tmp_path, monkeypatch, capsys):
    model = make_config_folder(tmp_path / "model", "llama", max_position_embeddings=2048)
    (tmp_path / "notes.txt").write_text("A few words to learn from.\n" * 500)
    text = imported(str(BROUGHT / name)).text
    text = re.sub(
        r"^# model: \?", f"tokenizer: built-in\nmodel: {{name: {model}, weights: random}}", text, flags=re.MULTILINE
    )
    text = text.replace("# data:\n#   source: ?", f"data:\n  source: {tmp_path}/notes.txt")
    (tmp_path / "run.yaml").write_text(text)
    plan = planned(tmp_path / "run.yaml", monkeypatch, capsys)
    if "ranks_per_node" in text:
        assert f"ranks_per_node: {plan['ranks_per_node']['value']}" in text


EXAMPLES = {
    "mpirun_qa_two.sh": {"id": "1", "question": "what?", "context": "it is a thing", "answers": {"text": ["a thing"], "answer_start": [6]}},
    "mpirun_accelerate.sh": {"sentence1": "a thing", "sentence2": "another", "label": 1},
}  # fmt: skip


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_are_planned(name, tmp_path, monkeypatch, capsys):
    shape = {
        "model_type": "bert",
        "vocab_size": 131,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({**shape, "intermediate_size": 64}))
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps(EXAMPLES[name])}\n" * 40)
    text = imported(str(BROUGHT / name)).text
    text = re.sub(r"^model: \S+", f"model: {{name: {tmp_path}/model, weights: random}}", text, flags=re.MULTILINE)
    text = re.sub(r"^  source: \S+", f"  source: {tmp_path}/rows.jsonl", text, flags=re.MULTILINE)
    text = re.sub(r"^  evaluation_split: .*\n", "", text, flags=re.MULTILINE)
    (tmp_path / "run.yaml").write_text(text)
    plan = planned(tmp_path / "run.yaml", monkeypatch, capsys)
    assert f"ranks_per_node: {plan['ranks_per_node']['value']}" in text

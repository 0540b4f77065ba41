"""The sample at the end of a run: the training is done, so whatever the export does, there is a report."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from coremill.config.schema import SampleSection
from coremill.report.events import EventWriter
from coremill.report.summary import summarise
from coremill.tasks.causal_lm import sample

OUTCOMES: dict[str, tuple[Any, str]] = {
    "slow": (subprocess.TimeoutExpired("python", 600.0), "within 600 s"),
    "no process": (OSError(12, "Cannot allocate memory"), "Cannot allocate memory"),
    "failed": (SimpleNamespace(returncode=1, stdout="", stderr="Traceback\nKeyError: 3"), "completion: KeyError: 3"),
    "killed": (SimpleNamespace(returncode=-9, stdout="", stderr=""), "status -9"),
    "silent": (SimpleNamespace(returncode=0, stdout="", stderr=""), "IndexError"),
}


def ask(outcome: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    def run(*arguments: Any, **options: Any) -> Any:
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    (tmp_path / "export").mkdir()
    monkeypatch.setattr(subprocess, "run", run)
    section = SampleSection(prompt="mill")
    found = sample.ask_for_sample(tmp_path / "export", section, {}, begin_ids=(), code_sha256=None)
    with EventWriter(tmp_path, 0) as events:
        events.write("sample", **found)
    return summarise(tmp_path)


@pytest.mark.parametrize("name", OUTCOMES)
def test_a_missing_sample_is_a_finding(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome, words = OUTCOMES[name]
    summary = ask(outcome, tmp_path, monkeypatch)
    (finding,) = summary["findings"]
    assert finding.startswith("no sample: the exported model gave no completion") and words in finding
    assert summary["sample"] is None


def test_what_a_models_own_code_prints_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "hello from its code\n" + json.dumps({"completion": " turns"}) + "\n"
    summary = ask(SimpleNamespace(returncode=0, stdout=text, stderr=""), tmp_path, monkeypatch)
    assert summary["sample"] == {"prompt": "mill", "completion": " turns"} and not summary["findings"]


def test_a_large_export_has_the_time_to_be_read(tmp_path: Path) -> None:
    assert sample.timeout_seconds(tmp_path, 48) == 600
    with (tmp_path / "model.safetensors").open("wb") as stream:
        stream.truncate(140 * 10**9)  # a hole: takes no space
    assert sample.timeout_seconds(tmp_path, 48) > 14_000

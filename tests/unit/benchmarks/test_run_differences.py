"""What two runs are compared by: every difference is found, and none where only times differ."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.run_differences import (
    checkpoint_files,
    computed,
    differences,
    event_keys,
    files_of,
    key_paths,
    leaves,
    written_differences,
    written_kinds,
)


def run_folder(folder: Path, *events: dict[str, Any]) -> Path:
    (folder / "events").mkdir(parents=True)
    (folder / "events" / "rank-00000.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return folder


def step(loss: float, **more: Any) -> dict[str, Any]:
    return {"kind": "step", "step": 1, "loss": loss, **more}


def test_the_last_bit_of_a_loss_counts_and_time_does_not(tmp_path: Path):
    before = run_folder(tmp_path / "a", step(0.1 + 0.2, seconds=1.0))
    later = run_folder(tmp_path / "b", step(0.1 + 0.2, seconds=2.0))
    other = run_folder(tmp_path / "c", step(0.3, seconds=1.0))

    assert differences(computed(before, "step"), computed(later, "step")) == []
    assert differences(computed(before, "step"), computed(other, "step")) == [
        "rank-00000 step 0 loss: 0.30000000000000004 -> 0.3"
    ]


def test_kinds_and_keys_of_all_runs_together(tmp_path: Path):
    runs = [run_folder(tmp_path / "a", step(1.0)), run_folder(tmp_path / "b", {"kind": "save", "of": {"bytes": 1}})]

    assert set(event_keys(runs)) == {
        *("step: kind", "step: step", "step: loss"),
        *("save: kind", "save: of", "save: of.bytes"),
    }


def test_files_by_their_bytes_and_json_of_checkpoints_by_its_keys(tmp_path: Path):
    for name, content, train in (("a", b"1", {"steps": 1}), ("b", b"2", {"steps": 2, "optimizer": "adamw"})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights").write_bytes(content)
        (tmp_path / name / "state.json").write_text(json.dumps({"config": {"train": train}}))

    def names(found: list[str]) -> list[str]:
        return [one.partition(":")[0] for one in found]

    sides = (tmp_path / "a", tmp_path / "b")
    assert names(differences(*(checkpoint_files(side, ["train.optimizer"]) for side in sides))) == ["weights"]
    assert names(differences(*(checkpoint_files(side, []) for side in sides))) == ["state.json", "weights"]
    assert names(differences(*map(files_of, sides))) == ["state.json", "weights"]


def test_nested_json():
    document = {"a": {"b": [{"c": 1}, {"d": None}]}, "e": []}

    assert key_paths(document) == {"a", "a.b", "a.b[].c", "a.b[].d", "e"}
    assert leaves(document) == {"a.b[0].c": "1", "a.b[1].d": "null", "e": "[]"}


def test_gone_changed_new():
    assert differences({"a": "1", "b": "1"}, {"b": "2", "c": "3"}) == ["a: gone", "b: 1 -> 2", "c: new"]


def test_events_of_the_source(tmp_path: Path):
    (tmp_path / "a.py").write_text("events.write('fault', cause=1)\nevents.write('step', **fields)\nfile.write(text)\n")
    before = written_kinds(tmp_path)

    assert before == {"fault": {"cause"}, "step": {"**"}}
    assert written_differences(before, {"fault": {"cause"}, "step": {"loss"}}) == []
    assert written_differences(before, {"fault": {"why"}}) == ["step: gone", "fault: cause -> why"]

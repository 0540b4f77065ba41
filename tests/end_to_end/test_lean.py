"""adamw-8bit and updates inside backward from the command line: trained, continued with adamw, refused."""

from __future__ import annotations

import json

from end_to_end.scene import RUN_FILE, Scene

LEAN = ("--set", "train.optimizer=adamw-8bit", "--set", "train.update=inside")


def test_trained_lean_and_continued_by_adamw(scene: Scene) -> None:
    scene.path("lean.yaml").write_text(RUN_FILE.replace("folder: run", "folder: lean"))
    done = scene.coremill("train", "lean.yaml", "--nproc", "2", *LEAN)
    assert done.code == 0 and done.left == [], done
    first = json.loads(scene.path("lean/report.json").read_text())
    chosen = {choice["name"]: choice["value"] for choice in first["choices"]}
    assert (chosen["optimizer"], chosen["update"]) == ("adamw-8bit", "inside")
    assert first["loss_last"] < first["loss_first"]
    done = scene.coremill("train", "lean.yaml", "--nproc", "1", "--set", "train.steps=12")
    assert done.code == 0, done
    assert "train.optimizer: adamw-8bit -> adamw: weights and moments are converted" in done.out
    assert "moments: converted, because the checkpoint holds moments in 8 bits" in done.out
    last = json.loads(scene.path("lean/report.json").read_text())
    assert ("moments", "converted") in {(choice["name"], choice["value"]) for choice in last["choices"]}
    assert last["steps"] == 12 and last["loss_last"] < first["loss_first"]


def test_numbers_that_are_none_end_it_with_70(scene: Scene) -> None:
    scene.path("wild.yaml").write_text(RUN_FILE.replace("folder: run", "folder: wild"))
    wild = ("--set", "train.learning_rate=1e30", "--set", "train.warmup_steps=0", "--set", "train.clip_norm=1e30")
    done = scene.coremill("train", "wild.yaml", "--nproc", "1", *LEAN, *wild)
    assert done.code == 70 and done.left == [], done
    refused = scene.coremill("train", "wild.yaml", *LEAN, "--set", "numerics.on_non_finite=skip")
    assert refused.code == 78 and "train.update is inside" in refused.err, refused

"""Frozen parameters from the command line: trained around, saved and exported, refused where they mean nothing."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from end_to_end.scene import Ended, Scene

LOWER = "train.freeze=[model.embed_tokens.*, model.layers.0.*]"


def train(scene: Scene, *settings: str) -> Ended:
    words = ["run.folder=frozen", "parallel.engine=shard", *settings]
    return scene.coremill("train", "run.yaml", "--nproc", "2", *(w for word in words for w in ("--set", word)))


def exported(scene: Scene) -> dict[str, np.ndarray]:
    return load_file(scene.path("frozen") / "export" / "model.safetensors")


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("train.freeze=[model.layer.0.*]", "model.layer.0.* matches none...did you mean model.layers.0.*?"),
        ("train.no_decay=[lm_heads.weight]", "lm_heads.weight matches none...lm_head"),
        ("train.freeze=['*']", "leaves nothing to train"),
    ],
)
def test_patterns_that_mean_nothing_are_refused_before_ranks_start(scene: Scene, setting: str, words: str) -> None:
    refused = train(scene, setting)
    assert refused.code == 78 and not refused.left, str(refused)
    assert all(part in refused.err for part in words.split("...")), refused.err
    assert f"where: --set {setting}" in refused.err
    assert not scene.path("frozen").exists()


@pytest.mark.skipif(
    not os.environ.get("COREMILL_LONG_TESTS"),
    reason="tests/distributed has frozen parameters on ranks of both engines: COREMILL_LONG_TESTS=1 runs it",
)
def test_what_is_frozen_stays_to_the_bit_and_the_rest_learns(scene: Scene) -> None:
    done = train(scene, LOWER, "checkpoint.every=4steps")
    assert done.code == 0 and not done.left, str(done)
    before = load_file(scene.path("model") / "model.safetensors")
    after = exported(scene)
    frozen = {name for name in before if name.startswith(("model.embed_tokens.", "model.layers.0."))}
    assert frozen and frozen < set(before)
    assert {name for name in before if np.array_equal(before[name], after[name])} == frozen

    trained = sum(tensor.size for name, tensor in before.items() if name not in frozen)
    total = sum(tensor.size for tensor in before.values())
    assert f"train.freeze: {trained:,} of {total:,} parameters are trained" in done.out
    report = json.loads((scene.path("frozen") / "report.json").read_text())
    (choice,) = (choice for choice in report["choices"] if choice["name"] == "trained parameters")
    assert choice["value"] == str(trained) and choice["by"] == "every rank"
    assert 0 < report["utilization"] <= 1
    checkpoint = max((scene.path("frozen") / "checkpoints").glob("step-*"))
    assert not any("model.layers.0." in name for name in moments(checkpoint))

    # It goes on frozen; with something else frozen it does not.
    longer = train(scene, LOWER, "train.steps=10")
    assert longer.code == 0 and "continuing from step 8" in longer.out, str(longer)
    assert np.array_equal(before["model.embed_tokens.weight"], exported(scene)["model.embed_tokens.weight"])
    refused = train(scene, "train.freeze=[model.embed_tokens.*]", "train.steps=12")
    assert refused.code == 78
    assert "train.freeze was [model.embed_tokens.*, model.layers.0.*]" in refused.err, refused.err


def moments(checkpoint: Path) -> set[str]:
    """Names of what the optimizer keeps, in the files of all ranks."""
    tensors = {name for file in checkpoint.glob("rank-*") for name in load_file(file)}
    return {name for name in tensors if not name.startswith("parameters/")}

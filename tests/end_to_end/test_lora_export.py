"""What a run with adapters leaves, from the command line: the best adapter, a merged model, on the hub; and which base
it goes on with.

Three runs: one that keeps the best, one that goes on from its adapter and merges, one in bf16 that is stopped.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from coremill.checkpoint.manifest import open_checkpoint
from coremill.hosts.fingerprint import digest_of_files
from coremill.model.lora_base import digest_of_model
from coremill.model.source import ModelFolder
from coremill.plan.config_file import read_config
from end_to_end.scene import DEADLINE_SECONDS, Ended, Scene
from end_to_end.stand_in_upload_hub import TOKEN, serve_upload_hub
from tiers import long_test

SHARDED = ("parallel.engine=shard", "lora.rank=4", "lora.modules_to_save=[lm_head]", "model=base")
BEST = (
    "run.folder=best", *SHARDED, "sample.prompt=mill", "sample.tokens=4", "evaluation.keep_best=true",
    "evaluation.every_steps=2", "train.steps=4", "train.learning_rate=2.0", "train.schedule=constant",
    "train.warmup_steps=1",
)  # fmt: skip


def words(*settings: str) -> list[str]:
    return [word for setting in settings for word in ("--set", setting)]


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(torch.arange(20).view(2, 10)).logits


def merged_by_peft(scene: Scene, folder: Path) -> Any:
    """Weights that grew large are rounded in either form; merged by peft they are rounded in the same places."""
    base = AutoModelForCausalLM.from_pretrained(scene.path("base"))
    return PeftModel.from_pretrained(base, folder).merge_and_unload()


def report_of(folder: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return document


def adapter_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapter_model.safetensors")


@pytest.fixture(scope="module")
def best(scene: Scene) -> Ended:
    """The run in `best`, by two ranks that share the rows, at a rate at which it soon gets worse."""
    shutil.copytree(scene.path("model"), scene.path("base"))
    settings = words(*BEST)
    before = digest_of_files([scene.path("base") / "model.safetensors"])
    done = scene.coremill("train", "run.yaml", "--nproc", "2", *settings)
    assert done.code == 0 and not done.left, str(done)
    assert digest_of_files([scene.path("base") / "model.safetensors"]) == before
    return done


def test_the_best_adapter_is_exported_with_all_that_loads_it(scene: Scene, best: Ended) -> None:
    folder = scene.path("best")
    report = report_of(folder)
    step, base = report["best"]["step"], str(scene.path("base"))
    assert (report["export"]["step"], report["export"]["form"], report["export"]["base"]) == (step, "adapter", base)
    # At this rate a model soon says nothing at all: that it was asked and answered is what counts.
    assert report["sample"]["completion"] is not None and not report["sample"].get("problem")
    names = {each.name for each in (folder / "export").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "README.md", "tokenizer.json"} <= names
    assert "config.json" not in names and "model.safetensors" not in names
    load = f'PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("{base}"), "{folder / "export"}")'
    assert f"load it with {load}" in best.out and "coremill export" in best.out
    checkpoint = open_checkpoint(folder / "checkpoints" / f"step-{step:08d}")
    model = ModelFolder(Path(base), read_config(Path(base)), "pretrained", base, "AutoModelForCausalLM")
    assert checkpoint.state()["base"] == {"name": base, "revision": None, "digest": digest_of_model(model)}
    assert all("lora_" in name or name == "lm_head.weight" for name in checkpoint.manifest.parameters)
    saved = [load_file(file)["parameters/lm_head.weight"] for file in sorted(checkpoint.folder.glob("rank-*"))]
    assert torch.equal(torch.cat(saved), adapter_of(folder / "export")["base_model.model.lm_head.weight"])
    trained = sum(tensor.numel() for tensor in adapter_of(folder / "export").values())
    assert report["subject"]["trainable_parameters"] == trained
    assert f"{trained:,} numbers trained" in (folder / "export" / "README.md").read_text()
    # The same by one process, and any other step.
    same, other = scene.coremill("export", "best", "same"), next(each for each in (2, 4) if each != step)
    assert same.code == 0 and f"exported the adapter of step {step} (" in same.out, str(same)
    for name in ("adapter_config.json", "adapter_model.safetensors", "tokenizer.json"):
        assert (scene.path("same") / name).read_bytes() == (folder / "export" / name).read_bytes()
    done = scene.coremill("export", "best", "other", "--step", str(other), "--dtype", "bf16")
    assert done.code == 0, str(done)
    assert {tensor.dtype for tensor in adapter_of(scene.path("other")).values()} == {torch.bfloat16}


@long_test("unit tests merge as peft does, test_keep.py pushes")
def test_merged_by_the_command_and_pushed(scene: Scene, best: Ended) -> None:
    done = scene.coremill("export", "best", "merged", "--merged")
    assert done.code == 0 and "exported the model with the adapter of step" in done.out, str(done)
    whole = AutoModelForCausalLM.from_pretrained(scene.path("merged"))
    assert (logits(whole) - logits(merged_by_peft(scene, scene.path("best/export")))).abs().max() < 1e-5
    with serve_upload_hub() as hub:
        environ = {"HF_ENDPOINT": hub.address, "HF_HUB_DISABLE_XET": "1", "HF_TOKEN": TOKEN}
        hub.private["me/adapter"] = False
        hub.files["model.safetensors"] = b"of an earlier push"
        pushed = scene.coremill("export", "best", "pushed", "--push", "me/adapter", environ=environ)
        assert pushed.code == 0, str(pushed)
        assert {"adapter_config.json", "adapter_model.safetensors", "README.md"} <= set(hub.files)
        assert "model.safetensors" not in hub.files
        assert not any(str(scene.folder).encode() in content for content in hub.files.values())
        assert json.loads(hub.files["adapter_config.json"])["base_model_name_or_path"] == "base"
        card = hub.files["README.md"].decode()
        assert 'PeftModel.from_pretrained(base, "me/adapter")' in card and "library_name: peft" in card


@pytest.mark.skipif(
    not os.environ.get("COREMILL_LONG_TESTS"),
    reason="tests/distributed starts from adapters, unit tests merge: COREMILL_LONG_TESTS=1 runs it",
)
def test_an_adapter_to_start_from_and_ranks_that_merge(scene: Scene, best: Ended) -> None:
    start, folder = "lora.start_from=best/export", scene.path("next")
    for settings, said in (
        (("lora.rank=8",), "has r 4, the run file lora.rank 8"),
        (("lora.start_from=bst/export/",), "bst/export"),
    ):
        chosen = words("run.folder=next", *SHARDED, start, *settings)
        refused = scene.coremill("train", "run.yaml", "--dry-run", *chosen)
        assert refused.code == 78 and said in refused.err and "lora.start_from" in refused.err, str(refused)
    done = scene.coremill(
        "train", "run.yaml", "--nproc", "2", *words("run.folder=next", *SHARDED, start, "lora.merge=true")
    )
    assert done.code == 0 and not done.left and "export: merged, because lora.merge is true" in done.out, str(done)
    assert "says that it was made for" not in done.out
    adapter = scene.coremill("export", "next", "next-adapter", "--adapter")
    assert adapter.code == 0, str(adapter)
    whole = AutoModelForCausalLM.from_pretrained(folder / "export")
    assert (logits(whole) - logits(merged_by_peft(scene, scene.path("next-adapter")))).abs().max() < 1e-5
    events = [json.loads(line) for line in (folder / "events" / "rank-00000.jsonl").read_text().splitlines()]
    first = next(event["loss"] for event in events if event["kind"] == "step")
    assert first != pytest.approx(report_of(scene.path("best"))["loss_first"], rel=1e-3)  # it began elsewhere


@pytest.mark.skipif(
    not os.environ.get("COREMILL_LONG_TESTS"),
    reason="tests/distributed has bf16, test_keep.py runs that were stopped: COREMILL_LONG_TESTS=1 runs it",
)
def test_in_bf16_the_adapter_is_exported_as_trained_and_a_stopped_run_too(scene: Scene, best: Ended) -> None:
    settings = ("run.folder=narrow", "model=base", "lora.rank=4", "parallel.dtype=bf16", "parallel.engine=replicate")
    settings += ("train.warmup_steps=1",)
    command = [sys.executable, "-m", "coremill", "train", "run.yaml", "--nproc", "1"]
    done = scene.run([*command, *words(*settings, "train.steps=2")])
    assert done.code == 0, str(done)
    assert scene.coremill("export", "narrow", "narrow-2").code == 0
    ours = adapter_of(scene.path("narrow/export"))
    assert all(torch.equal(tensor, ours[name]) for name, tensor in adapter_of(scene.path("narrow-2")).items())
    assert any(not torch.equal(tensor, tensor.bfloat16().float()) for tensor in ours.values())

    running = scene.start([*command, *words(*settings, "train.steps=100000", "checkpoint.every=3steps")])
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not [each for each in scene.path("narrow/checkpoints").glob("step-*") if not each.name.endswith("00002")]:
        assert time.monotonic() < deadline and running.process.poll() is None
        time.sleep(0.1)
    assert scene.coremill("stop", "narrow").code == 0
    ended = running.end()
    assert ended.code == 75 and not ended.left, str(ended)
    stopped = scene.coremill("export", "narrow", "stopped")
    assert stopped.code == 0, str(stopped)
    assert not all(torch.equal(tensor, ours[name]) for name, tensor in adapter_of(scene.path("stopped")).items())


def test_another_base_is_refused(scene: Scene, best: Ended) -> None:
    file = scene.path("base") / "model.safetensors"
    kept = file.read_bytes()
    tensors = load_file(file)
    try:
        save_file({name: tensor * 1.01 for name, tensor in tensors.items()}, file, {"format": "pt"})
        settings = words(*BEST, "train.steps=6")
        for command in (["train", "run.yaml", *settings], ["export", "best", "never", "--merged"]):
            refused = scene.coremill(*command)
            assert refused.code == 78 and not refused.left, str(refused)
            assert (
                "adapters that were trained beside another model than" in refused.err
                and "bring those weights back" in refused.err
            )
    finally:
        file.write_bytes(kept)
    assert not scene.path("never").exists()

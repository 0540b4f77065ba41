"""Adapters give the same losses however the work is shared, and those of peft under HF Trainer."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch

import ranks
from coremill.data.packed_batches import make_loader
from coremill.data.packed_rows import PackedData
from tiers import IS_LONG, long_test, some_long
from tiny_models import make_model
from training import make_packed, train_here

LENGTH, ROWS, STEPS, ROWS_PER_STEP = 24, 64, 20, 8
RATE = 5e-3  # adapters begin at zero
FAMILIES = ["llama", "llama-tied", "gpt2", "gemma2", "qwen2"]
WHOLE = {"llama-tied": ["lm_head"], "llama": ["lm_head", "norm"]}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("adapters")
    for family in FAMILIES:
        make_model(folder / family, family)
    data = make_packed(folder / "data", rows=ROWS, length=LENGTH, vocabulary=90)
    return {"folder": folder, "data": data.to_json(), "references": {}}


def _run(inputs: dict[str, Any], family: str, world_size: int, **settings: Any) -> list[dict[str, Any]]:
    settings = {"lora": {"rank": 4}, "learning_rate": RATE, "steps": STEPS, **settings}
    model = str(inputs["folder"] / family)
    return ranks.run_ranks(train_here, world_size, model_folder=model, data=inputs["data"], **settings)


def _reference(inputs: dict[str, Any], family: str, **settings: Any) -> dict[str, Any]:
    key = repr((family, sorted(settings.items())))
    if key not in inputs["references"]:
        inputs["references"][key] = _run(inputs, family, 1, **settings)[0]
    return inputs["references"][key]


def _assert_same(results: list[dict[str, Any]], reference: dict[str, Any], relative: float = 1e-5) -> None:
    for result in results:
        assert result["losses"] == pytest.approx(reference["losses"], rel=relative)
        assert result["norms"] == pytest.approx(reference["norms"], rel=100 * relative)


@pytest.mark.parametrize(
    "settings",
    [
        {"world_size": 1, "micro_batch_rows": 2},
        {"world_size": 2, "engine": "replicate", "micro_batch_rows": 2},
        {"world_size": 4, "engine": "shard", "checkpointing": True},
        {"world_size": 2, "engine": "shard", "through_memory": False, "micro_batch_rows": 2},
        *(
            pytest.param(settings, marks=long_test("the four above, and test_same_loss.py"))
            for settings in (
                {"world_size": 1, "checkpointing": True},
                {"world_size": 1, "fused": False},
                {"world_size": 4, "engine": "replicate"},
                {"world_size": 2, "engine": "shard", "micro_batch_rows": 2},
                {"world_size": 4, "engine": "shard", "through_memory": False},
                {"world_size": 2, "engine": "shard", "through_memory": False, "keep_gathered": True},
            )
        ),
    ],
    ids=lambda settings: "-".join(f"{key}={value}" for key, value in settings.items()),
)
def test_the_same_20_losses_however_they_are_shared(inputs, settings):
    reference = _reference(inputs, "llama")
    assert reference["losses"][-1] < reference["losses"][0] - 0.01  # something is learned
    _assert_same(_run(inputs, "llama", **{"micro_batch_rows": 8 // settings["world_size"], **settings}), reference)


@pytest.mark.parametrize(
    "settings",
    [{"engine": "replicate"}, {"engine": "shard"}, {"engine": "shard", "through_memory": False}],
    ids=lambda settings: "-".join(f"{key}={value}" for key, value in settings.items()),
)
@pytest.mark.parametrize("family", FAMILIES[1:])
def test_other_families_and_modules_that_are_trained_whole(inputs, family, settings):
    lora = {"rank": 4, "modules_to_save": WHOLE.get(family, [])}
    reference = _reference(inputs, family, lora=lora, steps=6)
    _assert_same(_run(inputs, family, 2, lora=lora, steps=6, micro_batch_rows=4, **settings), reference)


def train_on_unlike_hosts(identity: Any, **settings: Any) -> dict[str, Any]:
    """The first two ranks as those of one host, the third alone on another."""
    from coremill.world.group import join_world

    local_rank, local_size, node_rank = [(0, 2, 0), (1, 2, 0), (0, 1, 1)][identity.rank]
    placed = dataclasses.replace(identity, local_rank=local_rank, local_size=local_size, node_rank=node_rank)
    with join_world(placed, timeout_seconds=60) as world:
        return {**train_here(world, **settings), "hosts": world.nodes}


@pytest.mark.parametrize("engine", ["replicate", "shard"])
def test_hosts_may_have_unlike_numbers_of_ranks(inputs, engine):
    """All take part where any two ranks meet to have one copy in common, also one that is alone on its host."""
    settings = {"lora": {"rank": 4}, "learning_rate": RATE, "steps": 3, "rows_per_step": 6}
    reference = _reference(inputs, "llama", **settings)
    shared = {"model_folder": str(inputs["folder"] / "llama"), "data": inputs["data"], "micro_batch_rows": 2}
    results = ranks.run_ranks(
        train_on_unlike_hosts, 3, timeout_seconds=90, join=False, engine=engine, **settings, **shared
    )
    assert [result["hosts"] for result in results] == [2, 2, 2]
    _assert_same(results, reference)


def test_in_bf16_masters_of_adapters_are_fp32_and_ranks_agree(inputs):
    """Rounded products differ a little by how they are cut; losses stay beside those in fp32."""
    reference = _reference(inputs, "llama")
    for settings in ({"engine": "replicate"}, {"engine": "shard"}, {"engine": "shard", "through_memory": False}):
        for world_size in (1, 2) if IS_LONG else (2,):
            found = _run(inputs, "llama", world_size, dtype="bf16", micro_batch_rows=4, **settings)
            assert found[0]["losses"] == pytest.approx(reference["losses"], rel=5e-3)


def test_the_base_on_disk_is_untouched(inputs):
    files = sorted((inputs["folder"] / "llama").glob("*.safetensors"))
    before = [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]
    _run(inputs, "llama", 2, engine="shard", steps=2, micro_batch_rows=4)
    assert before == [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]


def test_each_rank_of_a_host_reads_its_part_of_the_base(inputs):
    whole = _run(inputs, "llama", 1, steps=1)[0]["bytes_read"]
    for engine in ("replicate", "shard"):
        parts = [each["bytes_read"] for each in _run(inputs, "llama", 2, steps=1, engine=engine, micro_batch_rows=4)]
        assert sum(parts) == whole and max(parts) <= 0.55 * whole


@pytest.mark.parametrize("family", some_long(["llama", "gpt2"], ["gpt2"], "one of two families"))
def test_peft_under_hf_trainer_has_the_same_losses(inputs, family, tmp_path):
    """From one adapter, on the same rows, at the same rates."""
    _save_adapter(inputs["folder"] / family, tmp_path / "adapter")
    lora = {"rank": 4, "start_from": str(tmp_path / "adapter")}
    ours = _run(inputs, family, 1, lora=lora, weight_decay=0.0, micro_batch_rows=8)[0]["losses"]
    rows = [batch.input_ids for batch in _batches(inputs)]
    theirs = ranks.run_ranks(
        trainer_losses,
        1,
        model_folder=str(inputs["folder"] / family),
        adapter=str(tmp_path / "adapter"),
        rows=[each.tolist() for each in rows],
        output=str(tmp_path / "out"),
    )[0]
    assert len(ours) == len(theirs) == STEPS
    assert ours == pytest.approx(theirs, abs=1e-4)  # Trainer writes its log to four digits


def _batches(inputs: dict[str, Any]) -> list[Any]:
    loader = make_loader(
        PackedData.from_json(inputs["data"]),
        seed=5,
        rows_per_step=ROWS_PER_STEP,
        rank=0,
        world_size=1,
        micro_batch_rows=ROWS_PER_STEP,
        accumulation_steps=1,
        attention_across_documents=True,
    )
    return [loader.next_step().batches[0] for _ in range(STEPS)]


def _save_adapter(base: Path, folder: Path) -> None:
    """Of peft's own making, B not zero."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(1)
    targets = ["c_attn", "c_proj", "c_fc"] if base.name == "gpt2" else "all-linear"
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base), LoraConfig(r=4, lora_alpha=8, target_modules=targets)
    )
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(parameter, std=0.02)
    model.save_pretrained(folder)


def trainer_losses(world: Any, *, model_folder: str, adapter: str, rows: list[Any], output: str) -> list[float]:
    """In a process of a rank, which has transformers imported."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

    from coremill.config.schema import TrainSection
    from coremill.train.schedule import learning_rate_at

    class InOrder(Trainer):
        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model_folder), adapter, is_trainable=True)
    # The first token is nobody's target; for some models Trainer counts it among those the loss is divided by.
    examples = [{"input_ids": row, "labels": [-100, *row[1:]]} for batch in rows for row in batch]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATE, weight_decay=0.0)
    settings = TrainSection(steps=STEPS, learning_rate=RATE, warmup_steps=2)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda done: learning_rate_at(done + 1, STEPS, settings) / RATE
    )
    arguments = TrainingArguments(
        output,
        per_device_train_batch_size=ROWS_PER_STEP,
        max_steps=STEPS,
        max_grad_norm=1.0,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = InOrder(model=model, args=arguments, train_dataset=examples, optimizers=(optimizer, schedule))
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

"""Packed conversations teach what the same conversations teach alone: loss and gradients, in every path of the loss."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from coremill.config.schema import RunConfig
from coremill.data.packed import PackedData
from coremill.data.packed_batches import IGNORED, Batch
from coremill.data.tokenise import prepare_data
from coremill.tasks.base import make_task
from tiny_models import FAMILIES as MODELS
from unit.data.chat_templates import FAMILIES, make_chat_tokenizer

LENGTH = 128
WORDS = ["mill", "turns", "store", "holds", "numbers"]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    folder = tmp_path_factory.mktemp("chat")
    rows = [
        {"instruction": " ".join(WORDS[: 1 + index % 5]), "output": " ".join(WORDS[index % 3 :])} for index in range(12)
    ]
    (folder / "chats.json").write_text(json.dumps(rows))
    section = {"source": str(folder / "chats.json"), "sequence_length": LENGTH}
    return RunConfig.model_validate({"data": section, "train": {"steps": 1}})


@pytest.fixture(scope="module")
def data(config: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> PackedData:
    tokenizer = make_chat_tokenizer(tmp_path_factory.mktemp("tokenizer"), FAMILIES["zephyr"])
    cache = tmp_path_factory.mktemp("cache")
    return prepare_data(config, tokenizer_folder=tokenizer, vocabulary_rows=400, max_positions=None, cache=cache)


def model_of(family: str) -> Any:
    shape = {**MODELS[family], "vocab_size": 400}
    shape |= {"max_position_embeddings": LENGTH} if "max_position_embeddings" in shape else {}
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**shape))
    return model.float()


def alone(batch: Batch) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Every conversation of a batch in a row of its own, with its labels."""
    assert batch.position_ids is not None
    found = []
    for ids, labels, positions in zip(batch.input_ids, batch.labels, batch.position_ids, strict=True):
        starts = [*torch.nonzero(positions == 0).flatten().tolist(), len(ids)]
        parts = [slice(first, last) for first, last in zip(starts, starts[1:], strict=False)]
        found += [
            (ids[part].unsqueeze(0), labels[part].unsqueeze(0)) for part in parts if (labels[part] != IGNORED).any()
        ]
    return found


@pytest.mark.parametrize(
    ("family", "fused"), [("llama", True), ("llama-tied", True), ("llama", False), ("gemma2", True)]
)
def test_the_loss_of_packed_rows_is_that_of_conversations_alone(
    config: RunConfig, data: PackedData, family: str, fused: bool
) -> None:
    model = model_of(family)
    task = make_task(config).training_on(data)
    path = task.prepare(model, fused=fused)
    assert path.value == ("chunked" if fused and family != "gemma2" else "logits")
    assert task.choices(model)["documents"].value == "apart"
    how: dict[str, Any] = {"micro_batch_rows": 2, "rank": 0, "world_size": 1}
    step = task.make_loader(
        data, seed=7, rows_per_step=data.train_rows, accumulation_steps=data.train_rows, **how
    ).next_step()
    assert step.valid_targets == data.conversations.learned_tokens
    scale = 1.0 / step.valid_targets
    losses = [task.loss(model, batch, scale) for batch in step.batches]  # fillers among them
    total = torch.stack(losses).sum()
    actual = torch.autograd.grad(total, list(model.parameters()))

    reference = model_of(family)  # as transformers has it
    conversations = [each for batch in step.batches for each in alone(batch)]
    assert len(conversations) == 12 == data.documents
    sums = [
        reference(input_ids=ids, labels=labels, use_cache=False).loss * (labels[:, 1:] != IGNORED).sum()
        for ids, labels in conversations
    ]
    expected = torch.stack(sums).sum() / step.valid_targets
    torch.testing.assert_close(total, expected, rtol=1e-5, atol=0)
    for ours, theirs in zip(actual, torch.autograd.grad(expected, list(reference.parameters())), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-6)


def test_where_a_model_cannot_keep_them_apart_they_are_joined_and_it_is_said(
    config: RunConfig, data: PackedData
) -> None:
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("bloom", vocab_size=400, hidden_size=24, n_layer=2, n_head=4)
    )
    task = make_task(config).training_on(data)
    task.prepare(model, fused=True)
    choice = task.choices(model)["documents"]
    assert choice.value == "joined" and "does not keep the documents" in choice.reason
    how: dict[str, Any] = {"micro_batch_rows": 2, "rank": 0, "world_size": 1, "accumulation_steps": 1}
    assert task.make_loader(data, seed=7, rows_per_step=2, **how).next_step().batches[0].position_ids is None

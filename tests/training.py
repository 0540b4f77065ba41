"""A whole training run inside one rank process, without launcher and files: for comparing engines and splits."""

from __future__ import annotations

from dataclasses import asdict
from math import ceil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from coremill.data.packed import BOUNDARIES_FILE, FORMAT_VERSION, TOKENS_FILE, PackedData, PackedManifest


def make_packed(
    folder: Path, *, rows: int, length: int, vocabulary: int, seed: int = 1, first_token: int = 0
) -> PackedData:
    """Random rows with an end token (the first) here and there, as prepare_data would leave them."""
    folder.mkdir(parents=True)
    tokens = np.random.default_rng(seed).integers(first_token + 1, vocabulary, size=(rows, length)).astype(np.uint16)
    tokens[:, length // 3] = first_token
    tokens.tofile(folder / TOKENS_FILE)
    np.ones(rows, np.uint32).tofile(folder / BOUNDARIES_FILE)
    manifest = PackedManifest(
        version=FORMAT_VERSION,
        key="test",
        source="random",
        tokenizer="none",
        eos_id=first_token,
        dtype="uint16",
        sequence_length=length,
        rows=rows,
        tokens=rows * length,
        dropped_tokens=0,
        documents=2 * rows,
        empty_documents=0,
        highest_id=int(tokens.max()),
        highest_token="x",
    )
    manifest.write(folder)
    return PackedData(
        folder=folder,
        evaluation_folder=None,
        key="test",
        train_rows=rows,
        evaluation_rows=0,
        sequence_length=length,
        tokens=rows * length,
        dropped_tokens=0,
        documents=2 * rows,
        eos_id=first_token,
        from_cache=False,
        seconds=0.0,
    )


def train_here(
    world: Any,
    *,
    model_folder: str,
    data: dict[str, Any],
    weights: str = "pretrained",
    engine: str = "replicate",
    dtype: str = "fp32",
    wire_dtype: str = "fp32",
    keep_gathered: bool = False,
    checkpointing: bool = False,
    rows_per_step: int = 8,
    micro_batch_rows: int = 8,
    steps: int = 20,
    across_documents: bool = True,
    learning_rate: float = 1e-3,
    weight_decay: float = 0.1,
    adam_epsilon: float = 1e-8,
    clip_norm: float | None = 1.0,
    export_to: str | None = None,
    export_dtype: str = "float32",
    through_memory: bool | None = None,  # None: of shard alone; replicate is tested over the wire
    threads: int = 1,
    fused: bool = True,
    freeze: tuple[str, ...] = (),
    no_decay: tuple[str, ...] = (),
    lora: dict[str, Any] | None = None,
    optimizer: str = "adamw",
    update: str = "after",
) -> dict[str, Any]:
    """Losses, norms and wire use of a run on this rank."""
    import json

    import torch

    from coremill.checkpoint.export import export_model
    from coremill.config.schema import DataSection, LoraSection, ModelSection, RunConfig, TrainSection
    from coremill.data.packed_batches import make_loader
    from coremill.engines import make_engine
    from coremill.engines.optimizers import optimizer_of
    from coremill.model.build import build_on_meta
    from coremill.model.changes import apply_changes
    from coremill.model.load import fill_parameters
    from coremill.model.source import ModelFolder
    from coremill.model.trained import choose_trained
    from coremill.tasks.causal_lm.training import CausalLmTraining
    from coremill.train.loop import train_steps

    torch.set_num_threads(threads)
    folder = Path(model_folder)
    source = ModelFolder(
        folder, json.loads((folder / "config.json").read_text()), weights, str(folder), "AutoModelForCausalLM"
    )
    accumulation_steps = ceil(ceil(rows_per_step / world.size) / micro_batch_rows)
    plan: Any = SimpleNamespace(
        engine=SimpleNamespace(value=engine),
        dtype=SimpleNamespace(value=dtype),
        wire_dtype=SimpleNamespace(value=wire_dtype),
        keep_gathered=SimpleNamespace(value=keep_gathered),
        accumulation_steps=SimpleNamespace(value=accumulation_steps),
    )
    task = CausalLmTraining(DataSection())
    model = build_on_meta(source)
    types = {name: type(module) for name, module in model.named_modules()}
    config = RunConfig(
        model=ModelSection(fused=fused), train=TrainSection(freeze=list(freeze)), lora=LoraSection(**(lora or {}))
    )
    choices = choose_trained(model, config, source) | apply_changes(model, task, config)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    settings = TrainSection(
        steps=steps,
        learning_rate=learning_rate,
        warmup_steps=2,
        weight_decay=weight_decay,
        adam_epsilon=adam_epsilon,
        clip_norm=clip_norm,
        no_decay=list(no_decay),
        optimizer=optimizer,
        update=update,
    )
    made = make_engine(
        plan,
        world,
        optimizer_of(settings),
        model,
        head_in_backward=task.needs_head_in_backward,
        through_memory=engine == "shard" if through_memory is None else through_memory,
        named_rows=fused,
    )
    made.place(model)
    report = fill_parameters(model, source, rank=world.rank, world_size=world.size, seed=3, lora=config.lora)
    made.start()
    loader = make_loader(
        PackedData.from_json(data),
        seed=5,
        rows_per_step=rows_per_step,
        rank=world.rank,
        world_size=world.size,
        micro_batch_rows=micro_batch_rows,
        accumulation_steps=accumulation_steps,
        attention_across_documents=across_documents,
    )
    results = [asdict(result) for result in train_steps(made, task, loader, settings, steps=steps)]
    if export_to is not None:
        export_model(model, source, None, Path(export_to), world=world, dtype=getattr(torch, export_dtype))
    return {
        "losses": [result["loss"] for result in results],
        "norms": [result["gradient_norm"] for result in results],
        "wire_bytes": [result["wire_bytes"] for result in results],
        "shared_bytes": [sum(use["shared_bytes"] for use in result["collectives"].values()) for result in results],
        "seconds": [result["seconds"] for result in results],
        "waited_seconds": [result["communication_seconds"] for result in results],
        "loss_path": choices["loss"].value,
        "layers": choices["layers"].value,
        "choices": {name: choice.reason for name, choice in choices.items()},
        "replaced": [
            n for n, m in model.named_modules() if "forward" in vars(m) or type(m) is not types.get(n, type(m))
        ],
        "own_loss_function": "_loss_function" in vars(model),
        "bytes_read": report.bytes_read,
    }

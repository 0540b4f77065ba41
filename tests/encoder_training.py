"""A whole run of an encoder inside one rank process, without launcher: for comparing engines, splits and restarts."""

from __future__ import annotations

import hashlib
import json
from math import ceil
from pathlib import Path
from types import SimpleNamespace
from typing import Any


def encode(config: Any, folder: Path, cache: Path) -> dict[str, Any]:
    """The rows of a run, as a launcher hands them to ranks."""
    from coremill.tasks.base import make_task

    task = make_task(config)
    rows = task.make_rows(
        tokenizer_folder=folder,
        code_sha256=None,
        vocabulary_rows=10_000,
        max_positions=128,
        cache=cache,
        progress=None,
    )
    document: dict[str, Any] = rows.to_json()
    return document


def train_encoder(
    world: Any,
    *,
    config: dict[str, Any],
    rows: dict[str, Any],
    engine: str = "replicate",
    micro_batch_rows: int = 8,
    steps: int = 20,
    checkpointing: bool = False,
    through_memory: bool | None = None,  # None: of shard alone; replicate is tested over the wire
    dtype: str = "fp32",
    evaluate: bool = False,
) -> dict[str, Any]:
    """Losses, norms and the evaluation of a run on this rank."""
    import torch

    from coremill.checkpoint.snapshot import restore_rng
    from coremill.config.schema import RunConfig
    from coremill.engines import make_engine
    from coremill.engines.optimizers import optimizer_of
    from coremill.model.build import build_on_meta
    from coremill.model.changes import apply_changes
    from coremill.model.load import fill_parameters
    from coremill.model.source import ModelFolder
    from coremill.model.trained import choose_trained
    from coremill.tasks.base import make_task, rows_from_json
    from coremill.train.evaluation import evaluate_rows
    from coremill.train.loop import train_steps

    torch.set_num_threads(1)
    settings = RunConfig.model_validate(config)
    kind = make_task(settings)
    data = rows_from_json(settings.task, rows)
    folder = Path(settings.model.name)
    weights = "pretrained" if (folder / "model.safetensors").is_file() else "random"
    source = ModelFolder(
        folder,
        json.loads((folder / "config.json").read_text()),
        weights,  # type: ignore[arg-type]
        str(folder),
        kind.model_class,
        config_changes=dict(kind.config_changes(data)),
        dropout=settings.model.dropout,
        attention_dropout=settings.model.attention_dropout,
    )
    per_step = settings.train.samples_per_step
    accumulation_steps = ceil(ceil(per_step / world.size) / micro_batch_rows)
    plan: Any = SimpleNamespace(
        engine=SimpleNamespace(value=engine),
        dtype=SimpleNamespace(value=dtype),
        wire_dtype=SimpleNamespace(value="fp32"),
        keep_gathered=SimpleNamespace(value=False),
        accumulation_steps=SimpleNamespace(value=accumulation_steps),
    )
    task = kind.training_on(data)
    model = build_on_meta(source)
    choose_trained(model, settings, source)
    apply_changes(model, task, settings)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    made = make_engine(
        plan,
        world,
        optimizer_of(settings.train),
        model,
        head_in_backward=task.needs_head_in_backward,
        through_memory=engine == "shard" if through_memory is None else through_memory,
        named_rows=True,
    )
    made.place(model)
    report = fill_parameters(
        model, source, rank=world.rank, world_size=world.size, seed=settings.train.seed, lora=settings.lora
    )
    made.start()
    loader = task.make_loader(
        data,
        seed=settings.train.seed,
        rows_per_step=per_step,
        micro_batch_rows=micro_batch_rows,
        accumulation_steps=accumulation_steps,
        rank=world.rank,
        world_size=world.size,
    )
    restore_rng(None, rank=world.rank, world_size=world.size, seed=settings.train.seed)
    results = list(train_steps(made, task, loader, settings.train, steps=steps))
    found: dict[str, Any] = {
        "losses": [result.loss for result in results],
        "norms": [result.gradient_norm for result in results],
        "tokens": [result.tokens for result in results],
        "padding": sum(result.padding_tokens for result in results) / sum(result.tokens for result in results),
        "drawn": list(report.initialised),
        "trained": [name for name, _ in made.trainable()],
        "random_state": hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest(),
    }
    if evaluate:
        batches = task.evaluation_batches(
            data, max_rows=None, micro_batch_rows=micro_batch_rows, rank=world.rank, world_size=world.size
        )
        scored = evaluate_rows(made, task, data, batches, kind.metrics_on(data), world)
        found |= {"evaluation_loss": scored.loss, "metrics": scored.metrics, "files": dict(scored.files)}
    return found

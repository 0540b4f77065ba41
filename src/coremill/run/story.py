"""The story of a run: config -> hardware -> plan -> data -> model -> engine -> train -> export -> report.

`run_as_rank` is what a rank does, whoever started it. The first three stages and the data are usually behind it: our
launcher (launcher.py, no torch) has done them and left orders; under torchrun or mpirun a rank of each node does them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from coremill.config.load import LoadedConfig
from coremill.hardware.probe import affinity_mask
from coremill.hardware.process_memory import memory_now, peak_rss_bytes, reset_peak
from coremill.report.events import EventWriter
from coremill.report.phases import phase
from coremill.run.launcher import Options
from coremill.run.prepare import Orders
from coremill.run.rank import (
    close_run,
    failures_as_events,
    load_together,
    orders_for,
    readers_of_rank,
    set_threads,
    without_launcher,
)
from coremill.run_folder import RunFolder
from coremill.world.group import World, join_world
from coremill.world.identity import RankIdentity


def run_as_rank(config_path: Path | None, overrides: Sequence[str], identity: RankIdentity, options: Options) -> int:
    """Join the others, get orders, train; any failure is written as an event before the process ends with its code."""
    with join_world(identity) as world:
        loaded = load_together(config_path, overrides, world)
        folder = RunFolder(Path(loaded.config.run.folder or f"runs/{loaded.name}").absolute())
        orders = orders_for(loaded, folder, world, options)
        if orders is None:  # a dry run, or finished earlier
            return 0
        readers = readers_of_rank(orders, folder)
        with EventWriter(folder.path, world.rank) as events, failures_as_events(events):
            with without_launcher(world, loaded, orders, folder, events, readers) as show:
                train_rank(loaded, orders, world, folder, events, show)
    return close_run(loaded, orders, world, folder, readers)


def train_rank(
    loaded: LoadedConfig, orders: Orders, world: World, folder: RunFolder, events: EventWriter, show: Callable[[], None]
) -> None:
    """Build, load, train, evaluate, export: the stages that need torch."""
    import torch

    from coremill.checkpoint.continuation import checkpoint_folder
    from coremill.checkpoint.export import export_model
    from coremill.checkpoint.resume import find_origin
    from coremill.checkpoint.saver import Saver
    from coremill.checkpoint.snapshot import Training, files_needed, restore_parameters, restore_progress
    from coremill.data.loader import RowLoader, evaluation_batches
    from coremill.engines import DTYPES, make_engine
    from coremill.model.build import build_on_meta
    from coremill.model.changes import apply_changes
    from coremill.model.load import fill_parameters
    from coremill.tasks.causal_lm.training import CausalLm
    from coremill.train.loop import evaluation_loss, train_steps
    from coremill.train.numerics import NumericsGuard
    from coremill.train.optimizer import make_optimizer

    config, plan = loaded.config, orders.plan
    began = time.perf_counter()
    events.write(
        "start",
        **world.whereabouts(),
        pid=os.getpid(),
        threads=set_threads(orders, world),
        cpus=sorted(affinity_mask()),
        engine=plan.engine.value,
        dtype=plan.dtype.value,
        torch_version=torch.__version__,
    )
    events.write("data", **orders.data.counts())
    torch.manual_seed(config.train.seed)
    task = CausalLm()

    with phase(events, "build"):
        model = build_on_meta(orders.model, attention=config.model.attention)
        choices = apply_changes(model, task, config)
        if plan.activation_checkpointing.value:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
        engine = make_engine(plan, world, head_in_backward=task.needs_head_in_backward, named_rows=config.model.fused)
        for name, choice in [*choices.items(), ("exchange", engine.exchange)]:
            events.write("choice", name=name, value=choice.value, reason=choice.reason)
        engine.place(model)
    here = {"rank": world.rank, "world_size": world.size}
    with phase(events, "load") as before:
        needs, saving = files_needed(model, **here), config.checkpoint.every != "never"
        origin = find_origin(checkpoint_folder(config, folder.path), world, events, saving=saving, needs=needs)
        if origin.checkpoint is not None:
            loaded_weights = restore_parameters(model, origin.checkpoint, **here)
        else:
            loaded_weights = fill_parameters(model, orders.model, seed=config.train.seed, **here)
        events.write("load", **asdict(loaded_weights), peak_rss_bytes=peak_rss_bytes(), rss_before_bytes=before)
    engine.start()
    optimizer = make_optimizer(model, engine.parameters(), config.train)
    across = {"attention_across_documents": config.data.attention_across_documents}
    batch_shape: dict[str, Any] = {**here, **across, "micro_batch_rows": plan.micro_batch_rows.value}
    loader = RowLoader(
        orders.data,
        seed=config.train.seed,
        rows_per_step=plan.rows_per_step,
        accumulation_steps=plan.accumulation_steps.value,
        **batch_shape,
    )
    guard = NumericsGuard(config.numerics, world, events)
    training = Training(engine, model, optimizer, loader, guard)
    restore_progress(origin.checkpoint, training, seed=config.train.seed, **here)
    saver = Saver(config, folder.path, origin, plan.memory, orders.steps, world, training, events)

    def evaluate(step: int) -> None:
        with phase(events, "evaluate"):
            started = time.perf_counter()
            held_out = evaluation_batches(orders.data, max_rows=config.evaluation.rows, **batch_shape)
            part, bad_rows = evaluation_loss(engine, task, held_out)
            numbers = {"loss": world.sum(part), "tokens": held_out.tokens, "seconds": time.perf_counter() - started}
            events.write("evaluation", step=step, perplexity=task.metric(numbers["loss"]), **numbers)
            guard.judge_evaluation(step, numbers["loss"], bad_rows)

    every = config.evaluation.every_steps
    reset_peak()
    with saver:
        how: dict[str, Any] = {"first_step": origin.step + 1, "steps": orders.steps, "agreement": saver, "guard": guard}
        for result in train_steps(engine, task, loader, optimizer, config.train, **how):
            events.write("step", **asdict(result), **memory_now())
            saver.after_step(result.step)
            if orders.data.evaluation_rows and every and result.step % every == 0 and result.step != orders.steps:
                evaluate(result.step)
            show()
    if orders.data.evaluation_rows:
        evaluate(orders.steps)
    show()

    if config.run.export:
        del optimizer, training, saver
        with phase(events, "export"):
            dtype = DTYPES[plan.dtype.value]
            exported = export_model(model, orders.model, orders.tokenizer, folder.export, world=world, dtype=dtype)
        if world.rank == 0:
            events.write("export", folder=str(folder.export), bytes=exported.bytes, seconds=exported.seconds)
    events.write("end", seconds=time.perf_counter() - began)

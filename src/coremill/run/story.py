"""The story of a run: config -> hardware -> plan -> data -> model -> engine -> train -> export -> report.

It is told twice, for the two roles a process can have. `run_as_launcher` is coremill's own launcher, without torch: it
prepares (hardware, plan, data), starts the ranks and reports. `run_as_rank` is a rank, whoever started it: it trains;
under somebody else's launcher the first rank of each node prepares before that, and rank 0 reports after it.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console

from coremill.config.load import LoadedConfig
from coremill.config.schema import RunConfig
from coremill.hardware.probe import affinity_mask, environment_snapshot
from coremill.hardware.process_memory import memory_now, peak_rss_bytes, reset_peak
from coremill.report.events import EventWriter
from coremill.report.phases import phase
from coremill.report.readers import make_readers
from coremill.run.attempts import NodeRun, watch_ranks
from coremill.run.closing import close_launcher, close_rank
from coremill.run.early_imports import EarlyImports
from coremill.run.folder import RunFolder
from coremill.run.late_report import leave_late_report
from coremill.run.opening import (
    Options,
    already_finished,
    begun,
    folder_of,
    listen_for_metrics,
    listen_for_page,
    own_run,
    place_of,
    say_basis,
    say_dry_run,
    with_paths_of_run,
    write_orders,
)
from coremill.run.orders import load_together, orders_of_launcher, prepare_together
from coremill.run.prepare import Orders, prepare_run
from coremill.run.rank import failures_as_events, set_threads, without_launcher
from coremill.tasks.base import TrainingTask, deciding_metric, evaluated_rows, make_task
from coremill.world.group import World, join_world
from coremill.world.identity import COMES_BACK, HEAD, NodeIdentity, RankIdentity
from coremill.world.run_lock import OWNED
from coremill.world.stop import forget_request

if TYPE_CHECKING:
    from torch import nn

    from coremill.checkpoint.resume import ResumePoint
    from coremill.checkpoint.saver import Saver
    from coremill.checkpoint.snapshot import Training
    from coremill.engines.base import Engine


def run_as_launcher(loaded: LoadedConfig, options: Options, node: NodeIdentity | None, console: Console) -> int:
    """Run on this machine, as one node of several where Kubeflow says so; returns the exit code.

    The first node leads: its launcher holds the folders to the end, whatever becomes of ranks and other nodes.
    """
    node_rank = 0 if node is None else node.node_rank
    folder, environ, leads = folder_of(loaded), environment_snapshot(), node_rank == 0
    if not leads and HEAD in environ:
        console = Console(quiet=True)  # the first node speaks for all
    if not options.fresh:
        loaded = with_paths_of_run(loaded, folder, node_rank)
    imports = EarlyImports(loaded.config, environ, node, wanted=not options.dry_run)
    with contextlib.ExitStack() as ownership, imports:
        page = ownership.enter_context(listen_for_page(options, wanted=leads))
        if not options.dry_run:
            ownership.callback(OWNED.release)
            own_run(loaded, folder, console, node)
        say_basis(loaded, console, folder)
        nodes = 1 if node is None else node.nodes
        if already_finished(loaded.config, folder, options, console, nodes=nodes, leads=leads):
            return 0
        if (late := leave_late_report(loaded.config, folder, options, console, node)) is not None:
            return late
        metrics = ownership.enter_context(listen_for_metrics(loaded, wanted=not options.dry_run))

        with contextlib.nullcontext() if options.dry_run else folder.writable(loaded.where("run.folder")):
            if leads and not options.dry_run and environ.get(HEAD) != COMES_BACK:  # to a run that may have been asked
                forget_request(folder.path)
            place = place_of(loaded, node, console)
            before = begun(loaded.config, folder, options)
            orders = prepare_run(  # hardware, plan, data
                loaded, place, console, force=options.force, before=before, on_plan=imports.begin
            )
        if options.dry_run:
            say_dry_run(orders, folder, console)
            return 0

        write_orders(folder, loaded, orders, options, console, node=node)
        plan, trackers = orders.plan.to_json(), loaded.config.run.trackers if leads else ()
        readers = make_readers(
            folder.path, orders.steps, plan, console, page=page, trackers=trackers, metrics=metrics, node_rank=node_rank
        )
        ownership.enter_context(readers.closed_after())
        run = NodeRun(config=loaded.config, orders=orders, folder=folder, environ=environ, node=node, readers=readers)
        ending = watch_ranks(run, imports)  # model, engine, train, export: in the ranks
        return close_launcher(run, ending, console)


def run_as_rank(load: Callable[[], LoadedConfig], identity: RankIdentity, options: Options) -> int:
    """Join the others, get orders, train; any failure is written as an event before the process ends with its code."""
    with contextlib.ExitStack() as readers_closed:
        page = readers_closed.enter_context(listen_for_page(options, wanted=identity.rank == 0))
        with join_world(identity) as world:
            loaded = load_together(load, world)
            folder = folder_of(loaded)
            if identity.launcher == "coremill":
                orders: Orders | None = orders_of_launcher(loaded, folder, world)
            else:
                loaded = loaded if options.fresh else with_paths_of_run(loaded, folder)
                orders = prepare_together(loaded, folder, world, options)  # hardware, plan, data
            if orders is None:  # a dry run, or finished earlier
                return 0
            # Of rank 0 under somebody else's launcher; off the terminal, for its output travels through pipes.
            console, trackers = Console(force_terminal=False), loaded.config.run.trackers
            speaks = identity.rank == 0 and identity.launcher != "coremill"
            metrics = readers_closed.enter_context(listen_for_metrics(loaded, wanted=speaks))
            plan = orders.plan.to_json()
            readers = make_readers(
                folder.path, orders.steps, plan, console, page=page, trackers=trackers, metrics=metrics
            )
            readers_closed.enter_context(readers.closed_after())
            with EventWriter(folder.path, world.rank) as events, failures_as_events(events):
                with without_launcher(world, loaded, orders, folder, events, readers) as show:
                    train_rank(RankRun(loaded.config, orders, world, folder, events), show)
        return close_rank(loaded.config, orders, world, folder, readers)


@dataclass(frozen=True)
class RankRun:
    """What every stage of a rank's work is given."""

    config: RunConfig
    orders: Orders
    world: World
    folder: RunFolder
    events: EventWriter


def train_rank(run: RankRun, show: Callable[[], None]) -> None:
    """The stages that need torch; `show` is called after each step."""
    began = time.perf_counter()
    announce(run)
    task = make_task(run.config).training_on(run.orders.data)
    model, engine = build(run, task)
    origin = load(run, model)
    engine.start()
    training = resume(run, task, engine, model, origin)
    done = train(run, task, training, origin, show)
    if run.config.run.export:
        engine.finish()
        export(run, training, origin, done)
    run.events.write("end", seconds=time.perf_counter() - began)


def announce(run: RankRun) -> None:
    """Who this rank is and what it is going to work on, for all who read the events."""
    import torch

    run.events.write(
        "start",
        **run.world.whereabouts(),
        pid=os.getpid(),
        threads=set_threads(run.orders, run.world),
        cpus=sorted(affinity_mask()),
        engine=run.orders.plan.engine.value,
        dtype=run.orders.plan.dtype.value,
        torch_version=torch.__version__,
    )
    run.events.write("data", **run.orders.data.counts())
    torch.manual_seed(run.config.train.seed)


def build(run: RankRun, task: TrainingTask[Any, Any]) -> tuple[nn.Module, Engine]:
    """The model without weights, made quicker where that changes nothing, and the engine that shares it out."""
    from coremill.engines import make_engine
    from coremill.engines.optimizers import optimizer_of
    from coremill.model.build import build_on_meta
    from coremill.model.changes import apply_changes
    from coremill.model.trained import choose_trained

    config, plan = run.config, run.orders.plan
    with phase(run.events, "build"):
        model = build_on_meta(run.orders.model, attention=config.model.attention)
        choices = choose_trained(model, config, run.orders.model) | apply_changes(model, task, config)
        if plan.activation_checkpointing.value:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
        engine = make_engine(
            plan,
            run.world,
            optimizer_of(config.train, plan),
            model,
            head_in_backward=task.needs_head_in_backward,
            named_rows=config.model.fused,
        )
        choices["exchange"] = engine.exchange
        for name, choice in choices.items():
            run.events.write("choice", name=name, value=choice.value, reason=choice.reason)
        engine.place(model)
    return model, engine


def load(run: RankRun, model: nn.Module) -> ResumePoint:
    """This rank's part of the weights: from the newest whole checkpoint, from the model's files, or drawn."""
    from coremill.checkpoint.continuation import checkpoint_folder
    from coremill.checkpoint.resume import find_resume_point
    from coremill.checkpoint.snapshot import files_needed, load_parameters

    config, world = run.config, run.world
    with phase(run.events, "load") as before:
        needs = files_needed(model, rank=world.rank, world_size=world.size)
        saving = config.checkpoint.every != "never" or bool(config.evaluation.keep_best)
        folder = checkpoint_folder(config, run.folder.path)
        origin = find_resume_point(folder, world, run.events, saving=saving, needs=needs)
        report = load_parameters(
            model,
            run.orders.model,
            origin.checkpoint,
            config.lora,
            run.orders.start_from,
            seed=config.train.seed,
            rank=world.rank,
            world_size=world.size,
        )
        run.events.write("load", **asdict(report), peak_rss_bytes=peak_rss_bytes(), rss_before_bytes=before)
    return origin


def resume(
    run: RankRun, task: TrainingTask[Any, Any], engine: Engine, model: nn.Module, origin: ResumePoint
) -> Training:
    """All that has a state besides the weights, where the checkpoint left it, or at its beginning."""
    from coremill.checkpoint.conversions import conversions
    from coremill.checkpoint.dropout import dropout_of, other_dropout
    from coremill.checkpoint.snapshot import Training, restore_progress
    from coremill.train.numerics import NumericsGuard
    from coremill.train.scores import Scores

    config, plan, world = run.config, run.orders.plan, run.world
    rows = plan.micro_batch_rows.value
    loader = task.make_loader(
        run.orders.data,
        seed=config.train.seed,
        rows_per_step=plan.rows_per_step,
        accumulation_steps=plan.accumulation_steps.value,
        micro_batch_rows=rows,
        rank=world.rank,
        world_size=world.size,
    )
    guard = NumericsGuard(config.numerics, world, run.events)
    steps = run.orders.steps if run.orders.data.evaluation_rows else 0
    metric = deciding_metric(config, make_task(config).metrics_on(run.orders.data))
    scores = Scores(metric, config.evaluation, rows=evaluated_rows(config), steps=steps)
    training = Training(engine, model, loader, guard, scores, base=run.orders.base, micro_batch_rows=rows)
    restore_progress(origin.checkpoint, training, seed=config.train.seed, rank=world.rank, world_size=world.size)
    dropout = other_dropout(origin.checkpoint, dropout_of(model, rows), world.size)
    for name, choice in {"dropout": dropout, **conversions(origin.checkpoint, engine)}.items():
        if choice is not None:
            run.events.write("choice", name=name, value=choice.value, reason=choice.reason)
    return training


def train(
    run: RankRun, task: TrainingTask[Any, Any], training: Training, origin: ResumePoint, show: Callable[[], None]
) -> int:
    """Every step, and between steps what is due: saves, evaluations, what is shown; gives the last step done."""
    from coremill.checkpoint.saver import Saver
    from coremill.train.loop import train_steps

    config, orders, scores, done = run.config, run.orders, training.scores, origin.step
    saver = Saver(config, run.folder.path, origin, orders.plan.memory, orders.steps, run.world, training, run.events)
    reset_peak()
    with saver:
        if scores.is_missing(origin.step):
            catch_up(run, task, training, origin, saver)
        for result in train_steps(
            training.engine,
            task,
            training.loader,
            config.train,
            steps=orders.steps,
            first_step=origin.step + 1,
            agreement=saver,
            guard=training.guard,
            norms=training.norms,
            is_over=scores.is_over,
        ):
            told = {name: value for name, value in asdict(result).items() if value is not None}
            run.events.write("step", **told, **memory_now())
            is_evaluated = scores.is_due(result.step) and not saver.is_stopping
            judge = evaluate(run, task, training, result.step) if is_evaluated else None
            saver.after_step(result.step)  # whatever the evaluation found: its step is saved
            if judge is not None:
                judge()
            show()
            done = result.step
    if (why := scores.why_over()) is not None and run.world.rank == 0:
        run.events.write("early_stop", step=done, text=why)
    show()
    return done


def catch_up(run: RankRun, task: TrainingTask[Any, Any], training: Training, origin: ResumePoint, saver: Saver) -> None:
    """The evaluation that was left out of the step this run goes on from, which is saved again to know of it."""
    is_news = not training.scores.metrics_of(origin.step)
    judge = evaluate(run, task, training, origin.step)
    if is_news and origin.places.is_one:  # over several places a save that fails would take the step with it
        saver.after_step(origin.step)
    judge()


def evaluate(run: RankRun, task: TrainingTask[Any, Any], training: Training, step: int) -> Callable[[], None]:
    """The loss and the metrics of the rows that were held out; gives what raises where the loss is no number."""
    from coremill.train.evaluation import evaluate_rows

    with phase(run.events, "evaluate"):
        started = time.perf_counter()
        held_out = task.evaluation_batches(
            run.orders.data,
            max_rows=evaluated_rows(run.config),
            micro_batch_rows=run.orders.plan.micro_batch_rows.value,
            rank=run.world.rank,
            world_size=run.world.size,
        )
        metrics = make_task(run.config).metrics_on(run.orders.data)
        found = evaluate_rows(training.engine, task, run.orders.data, held_out, metrics, run.world)
        seconds = time.perf_counter() - started
        training.scores.add(step, {"loss": found.loss, **found.metrics})
        if not training.scores.keeps_best or training.scores.best_step == step:
            run.folder.leave(found.files)  # of rank 0
        said = {**found.metrics, "loss": found.loss, "tokens": held_out.tokens, "seconds": seconds}
        run.events.write("evaluation", step=step, **said, best_step=training.scores.best_step)
    return lambda: training.guard.judge_evaluation(step, found.loss, found.bad_rows)


def export(run: RankRun, training: Training, origin: ResumePoint, done: int) -> None:
    """After step `done`: a plain Hugging Face folder, of the best step where that is kept; every rank takes part."""
    from coremill.checkpoint.export_adapter import asked_of
    from coremill.checkpoint.export_best import export_chosen
    from coremill.engines.base import DTYPES

    orders, folder, world, adapters = run.orders, run.folder.export, run.world, asked_of(run.config, run.orders.base)
    with phase(run.events, "export"):
        dtype, sources = DTYPES[orders.plan.dtype.value], (orders.model, orders.tokenizer)
        made, reason = export_chosen(
            training,
            origin,
            done,
            *sources,
            folder,
            world=world,
            dtype=dtype,
            events=run.events,
            adapters=adapters,
            end_ids=orders.answer_end_ids,
        )
    if world.rank == 0:
        about = {"form": made.form.value, "base": None if orders.base is None else orders.base.name}
        run.events.write(
            "export", folder=str(folder), bytes=made.bytes, seconds=made.seconds, step=made.step, reason=reason, **about
        )

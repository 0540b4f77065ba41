"""A training run inside one rank process that saves, stops, dies and goes on, as run/story.py would have it."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import signal
import threading
import time
from math import ceil
from pathlib import Path
from types import SimpleNamespace
from typing import Any


class Events:
    """Keeps what a rank says."""

    def __init__(self) -> None:
        self.said: list[dict[str, Any]] = []

    def write(self, kind: str, /, **fields: Any) -> None:
        self.said.append({"kind": kind, **fields})

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.said if event["kind"] == kind]


def change_storage(folder: Path, what: str) -> None:
    """What happens to disks."""
    checkpoints, away = folder / "checkpoints", folder / "away"
    if what == "hide":
        checkpoints.rename(away)
    elif what == "show":
        away.rename(checkpoints)
    elif what == "free":
        (checkpoints / "filler").unlink()
    else:
        with (checkpoints / "filler").open("wb", buffering=0) as filler, contextlib.suppress(OSError):
            while True:
                filler.write(bytes(1 << 16))


def pretend_hosts(world: Any, disks: list[int] | None) -> None:
    """Make every rank believe in a host of its own."""
    if disks is not None:
        world.nodes, world.node_rank, world.node_of_rank = world.size, world.rank, tuple(range(world.size))
        world.hostnames = tuple(f"host-{rank}" for rank in range(world.size))


def disk_of(folder: str, disks: list[int] | None, rank: int) -> Path:
    """The disk that a rank sees."""
    return Path(folder) if disks is None else Path(folder) / f"disk-{disks[rank]}"


def train_saved(
    world: Any,
    *,
    folder: str,
    model_folder: str,
    data: dict[str, Any],
    engine: str = "replicate",  # over the wire; shard through memory
    dtype: str = "fp32",
    wire_dtype: str = "fp32",
    rows_per_step: int = 8,
    micro_batch_rows: int = 2,
    steps: int = 16,
    every: str = "4steps",
    memory_limit_bytes: int = 10**12,
    stop_at: int | None = None,  # the last rank is asked to stop while it is in this step
    kill_at: int | None = None,  # the last rank is killed at the end of this step
    slow_writes: bool = False,
    stall_at: int | None = None,  # on the last rank the storage hangs when this step is saved, until step 14 is done
    full_at: int | None = None,  # on the last rank the disk is full when this step is saved
    hang_at: int | None = None,  # the storage of rank `hang_rank` hangs for ever when this step is saved
    hang_rank: int = 0,
    deadline: str = "15m",
    deadline_from: int = 0,  # saves of earlier steps have all the time they want, however busy the machine
    settle_before: int = 0,  # the save under way ends before this step
    storage: dict[int, str] | None = None,  # by step: "hide" or "show" the folder, "fill" or "free" its disk
    poison_at: int | None = None,  # weights stop being numbers before this step
    drift_at: int | None = None,  # on the last rank one weight changes by one bit after this step
    model_folder_of_last: str | None = None,  # the last rank loads this one
    bad_loss_at: tuple[int, ...] = (),  # in these steps the last rank's loss is not a number
    bad_gradient_at: tuple[int, ...] = (),  # in these steps the last rank's gradients are not, its loss is
    on_non_finite: str = "stop",
    skip_budget: int = 10,
    disks: list[int] | None = None,  # by rank: each is a host of its own then, and sees the disk of this number
    die_in_commit_at: int | None = None,  # the last rank is killed after rank 0 renamed this step, before it does
    no_commit_at: int | None = None,  # on the last rank this step cannot be renamed
    hang_in_commit_at: int | None = None,  # on the last rank the rename of this step hangs for ever
    export_to: str | None = None,
    frozen: tuple[str, ...] = (),  # parameters whose names begin like this
    late_commit_at: int | None = None,  # right before the rename of this step storage hangs until it is given up
    keep: int = 2,
    pause_seconds: float = 0.0,  # after each step
    hang_in_prune: bool = False,  # on rank 0 the storage does not return from removing old checkpoints
    slow_pieces_seconds: float = 0.0,  # the last rank writes pieces of 16 kB, each in so long
    standing_seconds: float = 600.0,  # deadline auto: without a byte
    optimizer: str = "adamw",
    update: str = "after",
) -> dict[str, Any]:
    """Losses by step, rows by step, digest of the final weights, and what was said."""
    import torch

    from coremill.checkpoint import in_flight, store
    from coremill.checkpoint import saver as saver_module
    from coremill.checkpoint.export import export_model
    from coremill.checkpoint.in_flight import SaveDeadline, save_deadline_of
    from coremill.checkpoint.resume import find_resume_point
    from coremill.checkpoint.saver import Saver
    from coremill.checkpoint.snapshot import Training, files_needed, restore_parameters, restore_progress
    from coremill.config.schema import (
        CheckpointSection,
        DataSection,
        NumericsSection,
        RunConfig,
        SuperviseSection,
        TrainSection,
    )
    from coremill.data.packed import PackedData
    from coremill.data.packed_batches import make_loader
    from coremill.engines import make_engine
    from coremill.engines.optimizers import optimizer_of
    from coremill.errors import Drifted, NonFinite, Stopped, StorageError
    from coremill.model.build import build_on_meta
    from coremill.model.changes import apply_changes
    from coremill.model.load import fill_parameters
    from coremill.model.source import ModelFolder
    from coremill.tasks.causal_lm.training import CausalLmTraining
    from coremill.train.loop import train_steps
    from coremill.train.numerics import NumericsGuard
    from coremill.world.stop import StopRequests

    torch.set_num_threads(1)
    torch.manual_seed(5)
    last = world.rank == world.size - 1
    write_tensors, healed = store.Store.write_tensors, threading.Event()
    # Long where the save before will end, however busy the machine; short where it hangs.
    saver_module.WAIT_FOR_EARLIER_SECONDS = 0.2 if stall_at is not None or hang_in_prune else 60.0

    def write(self: Any, path: Path, *rest: Any) -> Any:
        if slow_writes:
            time.sleep(0.3)
        if stall_at is not None and last and f"{stall_at:08d}" in str(path):
            assert healed.wait(60)
        if full_at is not None and last and f"{full_at:08d}" in str(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        if hang_at is not None and world.rank == hang_rank and f"{hang_at:08d}" in str(path):
            time.sleep(3600)
        return write_tensors(self, path, *rest)

    put = store.Store.put

    def put_here(self: Any, partial: Path, step: int, *rest: Any) -> Any:
        if last and step == no_commit_at:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(partial))
        if last and step == hang_in_commit_at:
            time.sleep(3600)
        if last and step == die_in_commit_at:
            while not (disk_of(folder, disks, 0) / "checkpoints" / f"step-{step:08d}").exists():
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        return put(self, partial, step, *rest)

    sync_folder, write_to_file = store.sync_folder, store.SteadyFile.write

    def sync_late(path: Path) -> None:
        sync_folder(path)
        if late_commit_at is not None and path.name.startswith(f".partial-step-{late_commit_at:08d}"):
            until = time.monotonic() + 60
            while not saver._save.given_up and time.monotonic() < until:
                time.sleep(0.05)

    def write_slowly(self: Any, data: memoryview) -> None:
        if last:
            time.sleep(slow_pieces_seconds)
        write_to_file(self, data)

    if slow_pieces_seconds:
        store.PIECE_BYTES = 16 * 1024
        in_flight.WrittenBytes.EVERY_SECONDS = 0.0
        store.SteadyFile.write = write_slowly  # type: ignore[method-assign]
    if hang_in_prune and world.rank == 0:
        store.Store.prune_to = lambda *_: time.sleep(3600)  # type: ignore[method-assign, assignment]
    in_flight.END_SECONDS = 1.0
    in_flight.STANDING_SECONDS = standing_seconds
    in_flight.GRACE_SECONDS = standing_seconds / in_flight.SHARE_OF_GRACE
    store.sync_folder = sync_late
    store.Store.write_tensors = write  # type: ignore[method-assign]
    store.Store.put = put_here  # type: ignore[method-assign]
    source_folder = Path(model_folder_of_last if last and model_folder_of_last else model_folder)
    source = ModelFolder(
        source_folder,
        json.loads((source_folder / "config.json").read_text()),
        "pretrained",
        str(source_folder),
        "AutoModelForCausalLM",
    )
    accumulation_steps = ceil(ceil(rows_per_step / world.size) / micro_batch_rows)
    plan: Any = SimpleNamespace(
        engine=SimpleNamespace(value=engine),
        dtype=SimpleNamespace(value=dtype),
        wire_dtype=SimpleNamespace(value=wire_dtype),
        keep_gathered=SimpleNamespace(value=False),
        accumulation_steps=SimpleNamespace(value=accumulation_steps),
    )
    memory: Any = SimpleNamespace(limit=memory_limit_bytes, steady_step=SimpleNamespace(total=0))
    events, requests = Events(), StopRequests()
    task = CausalLmTraining(DataSection())
    model = build_on_meta(source)
    apply_changes(model, task, RunConfig())
    model.train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(name.startswith(each) for each in frozen))
    settings = TrainSection(
        steps=steps, learning_rate=1e-3, warmup_steps=2, weight_decay=0.1, seed=5, optimizer=optimizer, update=update
    )
    made = make_engine(
        plan,
        world,
        optimizer_of(settings),
        model,
        head_in_backward=task.needs_head_in_backward,
        through_memory=engine == "shard",
    )
    made.place(model)
    here = {"rank": world.rank, "world_size": world.size}
    pretend_hosts(world, disks)
    checkpoints = disk_of(folder, disks, world.rank) / "checkpoints"
    origin = find_resume_point(checkpoints, world, events, needs=files_needed(model, **here))
    if origin.checkpoint is None:
        fill_parameters(model, source, seed=3, **here)
    else:
        report = restore_parameters(model, origin.checkpoint, **here)
        events.write("load", bytes_read=report.bytes_read, tensor_bytes=report.tensor_bytes)
    made.start()
    config = RunConfig(
        train=settings,
        checkpoint=CheckpointSection(every=every, keep=keep),
        supervise=SuperviseSection(save_deadline=deadline),
    )
    loader = make_loader(
        PackedData.from_json(data),
        seed=5,
        rows_per_step=rows_per_step,
        micro_batch_rows=micro_batch_rows,
        accumulation_steps=accumulation_steps,
        **here,
    )
    now = 0  # the step under way
    bad_rows: dict[int, list[int]] = {}  # by step: this rank's last micro-batch, on the last rank the bad one
    whole_loss = task.loss

    def bad_loss(module: Any, batch: Any, scale: float) -> Any:
        loss = whole_loss(module, batch, scale)
        if last and list(batch.row_ids) == bad_rows.get(now):
            if now in bad_loss_at:
                loss = loss * float("nan")
            if now in bad_gradient_at and loss.requires_grad:
                loss.register_hook(lambda gradient: gradient * float("inf"))
        return loss

    task.loss = bad_loss  # type: ignore[method-assign]
    rows: dict[int, tuple[int, ...]] = {}
    next_step = loader.next_step

    def noted() -> Any:
        nonlocal now
        batches = next_step()
        state = loader.state()
        now = (state["epoch"] * state["rows"] + state["position"]) // rows_per_step
        rows[now] = batches.row_ids
        bad_rows[now] = list(batches.batches[-1].row_ids)
        return batches

    loader.next_step = noted  # type: ignore[method-assign]
    guard = NumericsGuard(NumericsSection(on_non_finite=on_non_finite, skip_budget=skip_budget), world, events)
    training = Training(made, model, loader, guard)
    restore_progress(origin.checkpoint, training, seed=5, **here)
    losses: dict[int, float] = {}
    skipped: list[int] = []
    ended = "done"
    try:
        with Saver(config, Path(folder), origin, memory, steps, world, training, events, requests) as saver:
            if deadline_from > 1:
                saver._deadline = SaveDeadline(3600, "supervise.save_deadline")
            where = {"steps": steps, "first_step": origin.step + 1, "norms": training.norms}
            for result in train_steps(made, task, loader, settings, **where, agreement=saver, guard=guard):
                if result.skipped:
                    skipped.append(result.step)
                losses[result.step] = result.loss
                saver.after_step(result.step)
                time.sleep(pause_seconds)
                if result.step == 14:
                    healed.set()
                if result.step == deadline_from - 1:
                    saver._deadline = save_deadline_of(config)
                if result.step == settle_before - 1 and saver._thread is not None:
                    saver._thread.join(60)
                if world.rank == 0 and storage and result.step in storage:
                    if saver._thread is not None:
                        saver._thread.join(60)
                    change_storage(Path(folder), storage[result.step])
                if last and result.step == kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                if last and stop_at is not None and result.step == stop_at - 1:
                    requests.reason = "SIGTERM"
                if poison_at is not None and result.step == poison_at - 1:
                    with torch.no_grad():
                        for _, weight in made.trainable():
                            weight.fill_(float("nan"))
                if last and result.step == drift_at:
                    # Not the last bit: the rounding of a later update may take that one back.
                    made.trainable()[3][1].detach().view(torch.int32).view(-1)[7] ^= 1 << 10
    except (Stopped, NonFinite, StorageError, Drifted) as error:
        ended = str(error)
    if export_to is not None:
        export_model(model, source, None, Path(export_to), world=world)
    pieces = sorted((piece.name, piece.local.detach().view(torch.uint8).numpy().tobytes()) for piece in made.slices())
    return {
        "first_step": origin.step + 1,
        "fetched": origin.fetched is not None,
        "losses": losses,
        "skipped": skipped,
        "bad_rows": bad_rows,
        "rows": rows,
        "digest": hashlib.sha256(b"".join(data for _, data in pieces)).hexdigest(),
        "ended": ended,
        "events": events.said,
    }

"""A made-up run folder with the files a real run leaves: 1 or 4 ranks, whole, going on, or broken."""

from __future__ import annotations

import json
import math
import os
import random
from pathlib import Path
from typing import Any

from rich.console import Console

from coremill.plan.types import Choice, MemoryPart, MemoryPlan, Plan, Remedy, StepSeconds
from coremill.report.events import event_file
from coremill.report.readers import make_readers

MB = 10**6
START = 1_760_000_000.0
CONFIG = """\
# coremill train demo.yaml
model: built-in
data:
  source: built-in
  sequence_length: 512
train:
  steps: 300
  tokens_per_step: 8192
"""


def fake_memory(scale: float, activations: int) -> MemoryPart:
    return MemoryPart(
        parameters=int(208 * MB * scale),
        gradients=int(208 * MB * scale),
        optimizer=int(416 * MB * scale),
        activations=activations,
        logits=33 * MB,
        buffers=48 * MB,
        data=4 * MB,
        base=440 * MB,
        slack=60 * MB,
    )


def fake_plan(world_size: int = 4, *, steps: int | None = 300, fits: bool = True) -> Plan:
    share = 1 / world_size
    engine: Any = "shard" if world_size > 1 else "replicate"
    return Plan(
        fleet="this machine" if world_size == 1 else f"{world_size} x c7i.8xlarge",
        nodes=world_size,
        engine=Choice(
            engine,
            "the whole state (1.25 GB) is under the limit" if world_size == 1 else "1.25 GB of state over 4 ranks",
        ),
        dtype=Choice("fp32", "this CPU has no bf16 units: bf16 products run 300 times slower here"),
        wire_dtype=Choice("auto", "gradients travel as bf16 with fp32 sums, weights as fp32"),
        ranks_per_node=Choice(1, "one rank per NUMA node: it has all its cores as threads and holds the model once"),
        threads_per_rank=Choice(2, "the physical cores of the NUMA node"),
        cpus_of_rank=((0, 1),),
        sequence_length=512,
        rows_per_step=16,
        micro_batch_rows=Choice(4, "the largest that stays under the memory limit"),
        accumulation_steps=Choice(max(1, 4 // world_size), "16 rows a step over the ranks, 4 at a time"),
        activation_checkpointing=Choice(False, "activations (412 MB) fit beside the rest"),
        keep_gathered=Choice(True, "gathered weights fit: one gather a step instead of two"),
        memory=MemoryPlan(
            load=fake_memory(share, 0),
            first_step=fake_memory(share, 412 * MB),
            steady_step=fake_memory(share, 400 * MB),
            checkpoint=fake_memory(share, 0),
            limit=2_000 * MB,
        ),
        wire_bytes_per_step_per_rank=0 if world_size == 1 else 139 * MB,
        step_seconds=StepSeconds(
            compute=4.1,
            communication=0.0 if world_size == 1 else 0.9,
            exposed_communication=0.0 if world_size == 1 else 0.2,
            optimizer=0.15,
        ),
        tokens_per_second=8192 / (4.25 if world_size == 1 else 4.45),
        steps=steps,
        usd_per_hour=None if world_size == 1 else 5.712,
        fits=fits,
        shortfall_bytes=0 if fits else 700 * MB,
        remedies=()
        if fits
        else (
            Remedy(
                change="recompute activations in backward",
                settings=("train.activation_checkpointing=true",),
                total_bytes_per_rank=900 * MB,
                tokens_per_second=1400.0,
                usd=1.25,
            ),
        ),
        assumptions=() if world_size == 1 else ("link rate 12.5 Gbit/s from the instance table",),
        model_flops_per_token=3.4e8,
        matmul_flops_per_second=8.1e11,
    )


def write_line(folder: Path, rank: int, kind: str, time: float, /, **fields: Any) -> None:
    """An event with a chosen time, in the writer's format."""
    path = event_file(folder, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"kind": kind, "time": time, "rank": rank, **fields}) + "\n")


def make_fake_run(
    folder: Path,
    *,
    world_size: int = 4,
    steps: int = 300,
    total_steps: int = 300,
    ending: str = "finished",
    seed: int = 7,
) -> Path:
    """A realistic run. ending: finished, running, failed (rank 2 or 0 raises), stopped."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "plan.json").write_text(json.dumps(fake_plan(world_size, steps=total_steps).to_json()))
    (folder / "config.yaml").write_text(CONFIG)
    clock = START
    for rank in range(world_size):
        clock = max(clock, _before_training(folder, rank, world_size))
    noise = random.Random(seed)
    for step in range(1, steps + 1):
        seconds = (9.0 if step == 1 else 4.4 + noise.gauss(0, 0.12)) + (1.5 if step % 97 == 0 else 0)
        clock += seconds
        loss = 2.9 + 6.1 * math.exp(-step / 45) + noise.gauss(0, 0.06)
        for rank in range(world_size):
            _step(folder, rank, world_size, step, clock, seconds, loss, noise)
        if step % 50 == 0:
            clock += 6.0
            loss = 2.95 + 6.0 * math.exp(-step / 46)
            perplexity = math.exp(loss)
            write_line(
                folder, 0, "evaluation", clock, step=step, loss=loss, perplexity=perplexity, tokens=32768, seconds=6.0
            )
    _ending(folder, world_size, clock, ending)
    return folder


def _before_training(folder: Path, rank: int, world_size: int) -> float:
    clock = START + 0.1 * rank
    who = {"world_size": world_size, "local_rank": 0, "pid": os.getpid(), "threads": 2, "cpus": [0, 1]}
    who |= {"hostname": f"node-{rank}", "torch_version": "2.13.0"}
    who |= {"engine": "shard" if world_size > 1 else "replicate", "dtype": "fp32"}
    write_line(folder, rank, "start", clock, **who)
    for name, seconds, rss in (("join", 1.2, 410), ("data", 0.4, 420), ("build", 0.8, 430), ("load", 2.6, 640)):
        clock += seconds
        if name == "load":
            read = {"seconds": 2.6, "bytes_read": 208 * MB // world_size, "tensor_bytes": 208 * MB // world_size}
            peaks = {"peak_rss_bytes": (470 + 230 // world_size) * MB, "rss_before_bytes": 430 * MB}
            write_line(folder, rank, "load", clock, **read, **peaks)
        write_line(
            folder, rank, "phase", clock, name=name, seconds=seconds, rss_bytes=rss * MB, peak_rss_bytes=(rss + 20) * MB
        )
    why = "the logits of 8,192 tokens would take 1.07 GB; in chunks of 2,048 they take 33 MB"
    write_line(folder, rank, "choice", clock, name="loss_path", value="chunked", reason=why)
    return clock


def _step(
    folder: Path, rank: int, world_size: int, step: int, clock: float, seconds: float, loss: float, noise: random.Random
) -> None:
    communication = 0.0 if world_size == 1 else 0.25 + noise.random() * 0.1
    peak = 440 + 832 // world_size + 520 + rank * 9
    numbers = {"loss": loss, "learning_rate": 3e-4 * min(1, step / 20), "gradient_norm": 1 + noise.random()}
    numbers |= {"tokens": 8176, "padding_tokens": 16, "wire_bytes": 0 if world_size == 1 else 141 * MB}
    if world_size > 1:
        gather = {"bytes": 94 * MB, "seconds": 0.8, "exposed_seconds": communication * 0.6}
        scatter = {"bytes": 47 * MB, "seconds": 0.5, "exposed_seconds": communication * 0.4}
        numbers["collectives"] = {"gather": gather, "reduce_scatter": scatter}
    times = {"seconds": seconds, "data_seconds": 0.01, "compute_seconds": seconds - communication - 0.2}
    times |= {"communication_seconds": communication, "optimizer_seconds": 0.15}
    memory = {"rss_bytes": (peak - 60) * MB, "peak_rss_bytes": (peak + (25 if step == 1 else 0)) * MB}
    write_line(folder, rank, "step", clock, step=step, **numbers, **times, **memory)


def _ending(folder: Path, world_size: int, clock: float, ending: str) -> None:
    if ending == "finished":
        write_line(folder, 0, "export", clock + 1, folder=str(folder / "export"), bytes=208 * MB, seconds=0.9)
        completion = "lines(self, limit=-1):\n    return [line for line in self]"
        write_line(folder, 0, "sample", clock + 3, prompt="def read_", completion=completion)
        for rank in range(world_size):
            write_line(folder, rank, "end", clock + 3, seconds=clock + 3 - START)
    elif ending == "failed":
        guilty = min(2, world_size - 1)
        trace = (
            'Traceback (most recent call last):\n  File "loop.py", line 88, in train_steps\n    raise NonFinite(what)\n'
        )
        lost = {"message": "a peer was lost", "traceback": "gloo says goodbye", "exit_code": 69}
        nan = {"message": "the loss is nan at step 120", "traceback": trace, "exit_code": 70}
        for rank in range(world_size):
            write_line(
                folder, rank, "error", clock + (0.5 if rank == guilty else 0.2), **(nan if rank == guilty else lost)
            )
    elif ending == "stopped":
        for rank in range(world_size):
            write_line(folder, rank, "error", clock + 0.5, message="ended on request", traceback=None, exit_code=75)


def write_report(run: Path, *, exit_code: int | None = None) -> dict[str, Any]:
    """What the readers of a run leave at its end."""
    return make_readers(run, None, {}, Console(quiet=True)).sum_up(exit_code)

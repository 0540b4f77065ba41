"""The program behind calibrate: measures one part of this machine with torch and prints one line of JSON.

    python -m coremill.hardware.calibrate_child --part rates --cpus 0,1,2,3

It runs in processes of its own because what it does leaves marks: one bf16 product on a CPU without bf16 units switches
oneDNN off for the rest of the process, and large arrays would count as memory that every rank needs. So each part is
a fresh start:

    rates          fp32 (and bf16) products of a training step, and the copy bandwidth
    emulated-bf16  one small bf16 product on a CPU that has no units for it
    base-memory    what an interpreter holds that has imported what a rank imports and has done one tiny step
    splits         how parts of a step scale where several processes share the cores
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

from coremill.child import die_with_parent
from coremill.hardware.probe import BusyWatch, affinity_mask, busy_fraction
from coremill.hardware.process_memory import MAPPED_FILE_BYTES, own_bytes
from coremill.hardware.topology import read_cores

if TYPE_CHECKING:
    import torch

# (tokens, inputs, outputs) of linear layers: attention and feed-forward of models from 50 M to 1 B parameters, with the
# tokens of a usual micro-batch. Small ones are in on purpose: a machine with many cores is slower on them.
TRAINING_SHAPES = ((2048, 512, 512), (2048, 512, 1536), (2048, 1536, 512), (1024, 1024, 2816), (1024, 2048, 2048))
QUICK_SHAPES = ((256, 256, 256),)

# Larger than the last-level cache of any server, so that the copy runs from memory.
COPY_BYTES = 512 * 2**20


def main(arguments: list[str] | None = None) -> int:
    """Measures the part asked for; the last line on stdout is the result."""
    options = _parse(arguments)
    die_with_parent()
    wanted = {int(cpu) for cpu in options.cpus.split(",")} if options.cpus else affinity_mask()
    # With their other hardware threads, as far as they are ours: others that use those disturb as well.
    options.cores = [core for core in read_cores(affinity_mask()) if core.cpus[0] in wanted]
    if options.cpus and hasattr(os, "sched_setaffinity"):
        # Before torch is imported: its threads inherit the mask.
        os.sched_setaffinity(0, wanted)
    parts: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
        "rates": measure_rates,
        "emulated-bf16": measure_emulated_bf16,
        "base-memory": measure_base_memory,
        "splits": measure_scaling,
    }
    result = parts[options.part](options)
    sys.stdout.write(json.dumps(result) + "\n")
    sys.stdout.flush()
    return 0


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m coremill.hardware.calibrate_child", description=__doc__)
    parser.add_argument("--part", choices=("rates", "emulated-bf16", "base-memory", "splits"), required=True)
    parser.add_argument("--cpus", default="", help="cpu numbers to stay on, with commas")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--bf16", action="store_true", help="measure bf16 as well")
    parser.add_argument("--seconds", type=float, default=1.5, help="time for the products of one dtype")
    parser.add_argument("--copy-bytes", type=int, default=COPY_BYTES)
    parser.add_argument("--ways", default="", help="to split the cpus among processes: 0,1;0|1 is one of both, and two")
    parser.add_argument("--quick", action="store_true", help="small shapes: proves that it works, measures little")
    return parser.parse_args(arguments)


def measure_rates(options: argparse.Namespace) -> dict[str, Any]:
    """The rate of a step that is nothing but its matrix products, by dtype, and the copy bandwidth."""
    import torch

    torch.set_num_threads(options.threads)
    shapes = QUICK_SHAPES if options.quick else TRAINING_SHAPES
    watch = BusyWatch(options.cores)
    fp32 = _products_flops_per_second(torch.float32, shapes, options.seconds)
    bf16 = _products_flops_per_second(torch.bfloat16, shapes, options.seconds) if options.bf16 else None
    busy_cores = watch.busy_cores()
    return {
        "fp32_matmul_flops_per_second": fp32,
        "bf16_matmul_flops_per_second": bf16,
        "copy_bytes_per_second": _copy_bytes_per_second(options.copy_bytes, options.seconds / 3),
        "busy_fraction": busy_fraction(busy_cores, len(options.cores), options.threads),
        "torch_version": torch.__version__,
    }


def _products_flops_per_second(
    dtype: torch.dtype, shapes: tuple[tuple[int, int, int], ...], budget_seconds: float
) -> float:
    """FLOPs of the three products of a linear layer (output, gradient of input, gradient of weight) over their time.

    All shapes take turns and the best time of each product counts: on a shared machine a slow second then spoils one
    turn instead of one shape. Results are allocated anew each time, as in training.
    """
    import torch
    from torch.nn.functional import linear

    generator = torch.Generator().manual_seed(0)
    products: list[tuple[int, Callable[[], Any]]] = []
    for tokens, inputs, outputs in shapes:
        x = torch.randn(tokens, inputs, generator=generator).to(dtype)
        weight = torch.randn(outputs, inputs, generator=generator).to(dtype)
        gradient = torch.randn(tokens, outputs, generator=generator).to(dtype)
        flops = 2 * tokens * inputs * outputs
        products += [
            (flops, partial(linear, x, weight)),
            (flops, partial(torch.mm, gradient, weight)),
            (flops, partial(torch.mm, gradient.t(), x)),
        ]
    best_seconds = [float("inf")] * len(products)
    started = time.perf_counter()
    for turn in count():
        for index, (_, run) in enumerate(products):
            before = time.perf_counter()
            run()
            best_seconds[index] = min(best_seconds[index], time.perf_counter() - before)
        if turn >= 1 and time.perf_counter() - started > budget_seconds:  # the first turn warms up
            break
    return sum(flops for flops, _ in products) / sum(best_seconds)


def _copy_bytes_per_second(array_bytes: int, budget_seconds: float) -> float:
    """Bytes read plus bytes written by the best copy of one large array to another."""
    import torch

    source = torch.ones(array_bytes // 4)
    target = torch.zeros_like(source)
    best_seconds, started = float("inf"), time.perf_counter()
    for turn in count():
        before = time.perf_counter()
        target.copy_(source)
        best_seconds = min(best_seconds, time.perf_counter() - before)
        if turn >= 2 and time.perf_counter() - started > budget_seconds:
            break
    return 2 * source.nbytes / best_seconds


def measure_scaling(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of parts of a step, for each way to split the cpus, over those of the first way."""
    from coremill.hardware.splits import measure_splits

    ways = [[[int(cpu) for cpu in process.split(",")] for process in way.split("|")] for way in options.ways.split(";")]
    processor_seconds = 0.0  # of the processes it starts
    watch = BusyWatch(options.cores, own_seconds=lambda: time.process_time() + processor_seconds)
    splits, processor_seconds = measure_splits(ways, "bf16" if options.bf16 else "fp32", quick=options.quick)
    busy = busy_fraction(watch.busy_cores(), len(options.cores), options.threads)
    return {"splits": splits, "busy_fraction": busy}


def measure_emulated_bf16(options: argparse.Namespace) -> dict[str, Any]:
    """What bf16 reaches without units for it: from a small product up to training size, as long as that is quick."""
    import torch

    torch.set_num_threads(options.threads)
    rate = 0.0
    # 64 x 256 x 256 takes 90 ms at 0.1 GFLOP/s (Neoverse-N1) and 0.1 ms where AVX512 converts on the fly; only the
    # larger sizes say something there.
    for tokens, width in ((64, 256), (256, 512), (1024, 1024)):
        x = torch.ones(tokens, width, dtype=torch.bfloat16)
        weight = torch.ones(width, width, dtype=torch.bfloat16)
        best_seconds = float("inf")
        for _ in range(2):
            before = time.perf_counter()
            torch.mm(x, weight)
            best_seconds = min(best_seconds, time.perf_counter() - before)
        rate = 2 * tokens * width * width / best_seconds
        if best_seconds > 0.02 or options.quick:
            break
    return {"bf16_emulated_flops_per_second": rate}


def measure_base_memory(options: argparse.Namespace) -> dict[str, Any]:
    """Resident bytes of a rank after one tiny step: forward, backward, fused AdamW. Pages of libraries as plans count
    them (hardware/process_memory.py); a rank's own are the same whether it was forked or imported for itself."""
    import numpy
    import pydantic
    import safetensors.torch
    import torch
    import torch.distributed
    import torch.distributed.fsdp
    import torch.nn.parallel
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaForCausalLM

    torch.set_num_threads(options.threads)
    shape = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    model = LlamaForCausalLM(shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    tokens = torch.from_numpy(numpy.arange(32, dtype=numpy.int64)).reshape(1, 32)
    model(input_ids=tokens, labels=tokens).loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    imported = [module.__name__ for module in (pydantic, safetensors.torch)]
    return {"base_rss_bytes": own_bytes() + MAPPED_FILE_BYTES, "imported": imported}


if __name__ == "__main__":
    sys.exit(main())

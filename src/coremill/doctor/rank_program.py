"""One rank of the self-test: meets the other, adds numbers over gloo, and trains as a rank of a run does.

Started twice by self_test.py, which leaves a tiny model's config and a plan for each engine in a folder. World,
engines, loss and update are those of a run. The last line on stdout is what was found, as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coremill.child import die_with_parent
from coremill.config.schema import RunConfig
from coremill.errors import Drifted, KnownEnding
from coremill.hardware.probe import environment_snapshot
from coremill.plan.stored import plan_from_json
from coremill.world.group import World, join_world
from coremill.world.identity import LOOPBACK, STORE_FD, RankIdentity

if TYPE_CHECKING:
    from coremill.plan.types import Plan

PAYLOAD_BYTES = 16 * 2**20
STEPS = 2  # the second one's loss tells whether all weights of the first update arrived


@dataclass(frozen=True)
class EngineFound:
    """What two steps with one engine came to."""

    engine: str
    exchange: str  # memory or wire
    dtype: str
    losses: tuple[float, ...]  # of both ranks together
    weights_moved: bool
    weights_are_equal: bool  # where ranks hold the same ones
    step_seconds: float  # the slower one


def main() -> int:
    """Runs all checks of this rank."""
    die_with_parent()
    environ = environment_snapshot()
    identity = RankIdentity(
        rank=int(environ["RANK"]),
        size=int(environ["WORLD_SIZE"]),
        local_rank=int(environ["RANK"]),
        local_size=int(environ["WORLD_SIZE"]),
        node_rank=0,
        master_address=LOOPBACK,
        master_port=int(environ["MASTER_PORT"]),
        launcher="environment",
        store_fd=int(environ[STORE_FD]) if STORE_FD in environ else None,
    )
    import torch

    torch.set_num_threads(int(environ["OMP_NUM_THREADS"]))
    folder = Path(environ["COREMILL_SELF_TEST_FOLDER"])
    try:
        with join_world(identity, timeout_seconds=float(environ["COREMILL_SELF_TEST_SECONDS"])) as world:
            found = _all_reduce(world)
            engines = [_train(plan_from_json(each), folder, world) for each in _plans(folder)]
    except KnownEnding as error:
        sys.stderr.write(f"{str(error).splitlines()[0]}\n")
        return error.exit_code
    result = {
        "rank": identity.rank,
        **found,
        "engines": [asdict(engine) for engine in engines],
        # torch switches oneDNN off for the process after a product it cannot do; from then on all are slow.
        "onednn_was_lost": bool(torch._C._has_mkldnn and not torch.backends.mkldnn.enabled),
    }
    sys.stdout.write(json.dumps(result) + "\n")
    sys.stdout.flush()
    return 0


def _plans(folder: Path) -> list[dict[str, Any]]:
    plans: list[dict[str, Any]] = json.loads((folder / "plans.json").read_text(encoding="utf-8"))
    return plans


def _all_reduce(world: World) -> dict[str, Any]:
    """A sum that every rank can check, and how fast it was."""
    import torch
    import torch.distributed as dist

    # Different on each rank, exact in fp32: element i is i mod 1024 times rank + 1.
    numbers = torch.arange(PAYLOAD_BYTES // 4, dtype=torch.int64).remainder(1024).float()
    expected = numbers * (world.size * (world.size + 1) // 2)
    is_right, best_seconds = True, float("inf")
    for _ in range(3):
        mine = numbers * (world.rank + 1)
        world.barrier()
        started = time.perf_counter()
        dist.all_reduce(mine)
        best_seconds = min(best_seconds, time.perf_counter() - started)
        is_right = is_right and bool(torch.equal(mine, expected))
    return {"all_reduce_is_right": is_right, "all_reduce_bytes_per_second": PAYLOAD_BYTES / best_seconds}


def _train(plan: Plan, folder: Path, world: World) -> EngineFound:
    """Steps of a tiny Llama, each rank with rows of its own; whole replicas must be the same bits afterwards."""
    import torch

    from coremill.data.packed_batches import Batch
    from coremill.engines import engine_kind, make_engine
    from coremill.engines.optimizers import optimizer_of
    from coremill.model.build import build_on_meta
    from coremill.model.changes import apply_changes
    from coremill.model.load import fill_parameters
    from coremill.model.source import ModelFolder
    from coremill.tasks.base import make_task

    config = RunConfig()
    document = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    chosen = make_task(config)
    source = ModelFolder(folder, document, "random", "a tiny Llama", chosen.model_class)
    task = chosen.training()
    model = build_on_meta(source)
    apply_changes(model, task, config)
    engine = make_engine(
        plan,
        world,
        optimizer_of(config.train),
        model,
        head_in_backward=task.needs_head_in_backward,
        through_memory=not engine_kind(plan.engine.value).keeps_replicas,  # by gloo, where replicas are compared
    )
    engine.place(model)
    fill_parameters(model, source, seed=0, rank=world.rank, world_size=world.size)
    engine.start()

    before = [tensor.detach().clone() for _, tensor in engine.trainable()]
    rows = torch.randint(0, document["vocab_size"], (2, 64), generator=torch.Generator().manual_seed(world.rank + 1))
    batch = Batch(rows, rows, None, (0, 1))
    scale = 1.0 / (world.size * rows[:, 1:].numel())
    losses, slowest = [], 0.0
    for _ in range(STEPS):
        started = time.perf_counter()
        loss = engine.forward_backward(lambda module: task.loss(module, batch, scale), is_last=True)
        losses.append(engine.reduce(loss).loss)
        engine.step(1e-3, 1.0)
        slowest = max(slowest, time.perf_counter() - started)
    equal = True
    try:
        engine.require_equal("after the self-test")
    except Drifted:
        equal = False
    moved = any(not torch.equal(old, new) for old, (_, new) in zip(before, engine.trainable(), strict=True))
    return EngineFound(
        engine=engine.name,
        exchange=engine.exchange.value,
        dtype=plan.dtype.value,
        losses=tuple(losses),
        weights_moved=moved,
        weights_are_equal=equal,
        step_seconds=slowest,
    )


if __name__ == "__main__":
    sys.exit(main())

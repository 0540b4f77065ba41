"""AdamW's moments in a checkpoint: of parameters that are frozen, had no use at times, or never had one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from coremill.checkpoint.conversions import conversions  # noqa: E402
from coremill.checkpoint.manifest import Checkpoint, Manifest  # noqa: E402
from coremill.checkpoint.snapshot import Training, file_name, restore_optimizer, take_snapshot  # noqa: E402
from coremill.checkpoint.store import Store  # noqa: E402
from coremill.config.schema import TrainSection  # noqa: E402
from coremill.engines.optimizers import optimizer_of  # noqa: E402
from coremill.engines.update import OptimizerUpdate  # noqa: E402
from coremill.model.slices import RowSlice  # noqa: E402

USED = {"always": (1, 2, 3), "at times": (2,), "never": (), "frozen": ()}  # by step


class Whole(OptimizerUpdate):
    """An engine of one rank, as far as a snapshot looks."""

    module = torch.nn.Module()

    def __init__(self) -> None:
        world: Any = None  # there are no other ranks
        super().__init__(world, optimizer_of(TrainSection(steps=3)))
        self.weights = {name: torch.nn.Parameter(torch.ones(3, 2), requires_grad=name != "frozen") for name in USED}
        self._make_optimizer()

    def trainable(self) -> list[tuple[str, Any]]:
        return [(name, weight) for name, weight in self.weights.items() if weight.requires_grad]

    def slices(self) -> list[RowSlice]:
        return [RowSlice(name, (3, 2), 0, 3, weight) for name, weight in self.weights.items()]

    def skip_step(self) -> None:
        for weight in self.weights.values():
            weight.grad = None

    def train(self, step: int) -> None:
        for name, weight in self.weights.items():
            weight.grad = torch.full_like(weight, float(step)) if step in USED[name] else None
        self.step(1e-3, clip_norm=None)

    def training(self) -> Training:
        parts: Any = (self, self.module, None, None)
        return Training(*parts)


def saved(engine: Whole, folder: Path) -> Checkpoint:
    store = Store(folder, "a1")
    store.make()
    partial, snapshot = store.begin(2, 1), take_snapshot(engine.training(), rank=0, world_size=1, copy=True)
    files = (store.write_tensors(partial / file_name(0, 1), snapshot.tensors, snapshot.rows),)
    shapes = {name: (3, 2) for name in USED}
    manifest = Manifest(
        step=2, attempt="a1", world_size=1, engine="replicate", parameters=shapes, files=files, versions={}
    )
    updates = {"updates": snapshot.updates, "updates_apart": snapshot.updates_apart}
    return store.commit(partial, manifest, updates)


def test_a_run_goes_on_with_the_moments_and_updates_of_each_parameter(tmp_path: Path) -> None:
    one, other = Whole(), Whole()
    for step in (1, 2):
        one.train(step)
    checkpoint = saved(one, tmp_path / "checkpoints")
    with torch.no_grad():
        for name, weight in other.weights.items():
            weight.copy_(one.weights[name])
    restore_optimizer(other, checkpoint)
    for engine in (one, other):
        updates = {each.rows.name: each.updates for each in engine.state()}
        assert updates == {"always": 2, "at times": 1, "never": 0, "frozen": 0}
        for name in ("always", "at times"):
            engine.weights[name].grad = torch.full((3, 2), 0.3)
        engine.step(1e-3, clip_norm=None)
    for name, weight in one.weights.items():
        assert torch.equal(weight, other.weights[name]), name


def test_what_is_held_otherwise_than_it_was_saved_is_said(tmp_path: Path) -> None:
    one, other = Whole(), Whole()
    one.train(1)
    checkpoint = saved(one, tmp_path / "checkpoints")
    assert conversions(None, one) == conversions(checkpoint, one) == {}
    other.weights = {name: torch.nn.Parameter(weight.detach().bfloat16()) for name, weight in one.weights.items()}
    assert {name: each.value for name, each in conversions(checkpoint, other).items()} == {"weights": "rounded"}
    again = saved(other, tmp_path / "narrow")
    assert {name: each.value for name, each in conversions(again, one).items()}["weights"] == "widened"

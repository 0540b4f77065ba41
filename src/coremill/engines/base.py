"""The engine protocol: what the training loop asks of a way to share the work among ranks.

The life of an engine: `place` a model that lies on the meta device, fill its parameters, `start`, where a run goes on
`restore`, then for each step `forward_backward` once per micro-batch, `reduce` once, and `step`, or `skip_step` where
the numbers of `reduce` are not finite. How it moves its weights, by an optimizer of engines/optimizers/ (update.py) or
otherwise, is the engine's own.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import nn

from coremill.engines.wire.exchange import CollectiveUse, Kind, WireMeter
from coremill.errors import InputError
from coremill.model.slices import RowSlice
from coremill.plan.types import Choice
from coremill.world.group import World

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}  # by parallel.dtype

# Of a gradient's norm, for each thread: half a megabyte in double.
SQUARES_AT_ONCE = 2**16

LossFunction = Callable[[nn.Module], torch.Tensor]


@dataclass(frozen=True)
class StepTotals:
    """What all ranks agree on after backward."""

    loss: float  # of the global batch
    gradient_norm: float  # over all parameters, summed in double: independent of the sharding
    votes: tuple[float, ...] = ()  # of all ranks, added up

    @property
    def is_finite(self) -> bool:
        """Whether the optimizer may see this step; the same answer on every rank."""
        return math.isfinite(self.loss) and math.isfinite(self.gradient_norm)


@dataclass(frozen=True)
class WireUse:
    """What the collectives of one step cost this rank."""

    collectives: dict[Kind, CollectiveUse]

    @property
    def bytes_sent(self) -> int:
        return sum(use.bytes for use in self.collectives.values())

    @property
    def exposed_seconds(self) -> float:
        """Time the compute threads stood waiting."""
        return sum(use.exposed_seconds for use in self.collectives.values())


@dataclass(frozen=True)
class ParameterState:
    """What must survive of one parameter on this rank."""

    rows: RowSlice
    optimizer: dict[str, torch.Tensor]  # as many rows, by name in a checkpoint; empty before an update
    updates: int  # of this parameter so far


def require_state_names(state: Mapping[str, torch.Tensor], names: Sequence[str]) -> None:
    """Refuse to go on with what another engine or optimizer held beside a weight."""
    if sorted(state) != sorted(names):
        raise InputError(
            f"the checkpoint holds {' and '.join(sorted(state))} of the weights, not {' and '.join(sorted(names))}:"
            " another engine or optimizer saved it",
            where="parallel.engine, train.optimizer",
            do="bring the old value back, set run.folder to a new folder, or start anew with --fresh",
        )


class Engine(Protocol):
    """How ranks share the work."""

    name: str
    exchange: Choice[Literal["memory", "wire"]]  # how ranks pass on weights and gradients
    module: nn.Module  # what to call for a forward pass, once it is placed

    def place(self, model: nn.Module) -> None:
        """Take a model on the meta device and give each rank its (still empty) share."""

    def start(self) -> None:
        """Parameters are filled: get ready for the first step."""

    def trainable(self) -> list[tuple[str, torch.Tensor]]:
        """What is updated on this rank: names and tensors. Frozen parameters are left out: they have no gradient
        and no state, and nothing of them is reduced.

        After `reduce` their .grad is the sum over all ranks; None, on every rank, where no rank had a use for the
        parameter in this step: the update passes it over, as it would in one process."""

    def slices(self) -> list[RowSlice]:
        """Every parameter that is saved (model/slices.py) with the rows this rank holds, possibly none; `local` is the
        tensor that `trainable` has."""

    def forward_backward(self, loss_function: LossFunction, *, is_last: bool) -> float:
        """One micro-batch: loss and gradients; the last one of a step sends what has to be sent."""

    def reduce(self, loss: float, votes: Sequence[float] = ()) -> StepTotals:
        """Finish the exchange of gradients; this rank's loss in, the global loss and gradient norm out.

        `votes` travel along in the same exchange, so that ranks agree on something every step at no cost.
        """

    def examine(self, loss_function: LossFunction) -> bool:
        """One micro-batch again, between two steps: whether the gradients this rank alone makes of it are finite.

        For finding out whose they were not; every rank calls it as often. Leaves no gradients.
        """

    def step(self, learning_rate: float, clip_norm: float | None) -> None:
        """Clip by the norm that `reduce` found, update, publish the new weights, drop the gradients."""

    def skip_step(self) -> None:
        """Drop the gradients; weights stay as they were."""

    def state(self) -> list[ParameterState]:
        """For a checkpoint, between two steps: of every parameter in `slices`, in its order and where it lies."""

    def restore(self, state: Sequence[ParameterState]) -> None:
        """What `state` gave, as far as this rank holds it now, after `start` and before the first step; the weights are
        there already. Each is read from the checkpoint when it is asked for. Another engine may have given it
        (`require_state_names`)."""

    def finish(self) -> None:
        """Training is over: let go of what only an update needs, before the weights are exported."""

    def state_bytes(self) -> int:
        """Of the state that all ranks together will save."""

    def require_equal(self, moment: str) -> None:
        """Weights that ranks hold in common are the same on all; else Drifted is raised on every rank, naming `moment`.

        Every rank calls it, between two steps."""

    def wire_use(self) -> WireUse:
        """Since the last call."""


@runtime_checkable
class MovesInside(Protocol):
    """An engine that can move each weight inside backward, as soon as its gradient is whole (train.update: inside).

    `reduce` then tells the norm that was, and `step` moves what is left; weights have moved even where the norm is not
    finite, unless the loss was not either."""

    moves_inside: bool

    def begin_step(self, learning_rate: float, factor: float) -> None:
        """Before the first micro-batch: gradients are multiplied by `factor` before they move anything."""

    def take_moving_seconds(self) -> float:
        """Spent inside of backward on moving weights, since the last call."""


class StepAgreement:
    """How an engine's ranks end a step: each one's part in, the totals of all out.

    Gradients that no rank made are dropped, for which ranks must know of each other what they used. As a rule each used
    everything, or what it told last time (a model with a parameter that nothing uses): two numbers in the one exchange
    tell that, and only else do they tell each other which."""

    def __init__(self, world: World, meter: WireMeter) -> None:
        self._world = world
        self._meter = meter
        self._told: list[bool] | None = None  # by this rank, when all ranks last told each other
        self._used_anywhere: list[bool] = []  # what came of that

    def reach(
        self, *, loss: float, squares: float, votes: Sequence[float], is_used: Mapping[nn.Parameter, bool]
    ) -> StepTotals:
        """`is_used`: by trained parameter, all of them and in the same order on every rank, whether this rank's
        backward made a gradient of it."""
        used = list(is_used.values())
        mine = [loss, squares, *votes, float(not all(used)), float(used != self._told)]
        total_loss, squares, *total_votes, with_unused, with_changes = self._sums(mine)
        if with_unused:  # the same numbers on every rank: all go the same way
            if with_changes:
                users = self._sums([float(each) for each in used])
                self._told, self._used_anywhere = used, [count > 0 for count in users]
            drop_gradients(dict(zip(is_used, self._used_anywhere, strict=True)))
        return StepTotals(loss=total_loss, gradient_norm=squares**0.5, votes=tuple(total_votes))

    def _sums(self, values: Sequence[float]) -> list[float]:
        """Over all ranks: the small exchange that ends a step, where the quick wait for the slow."""
        began = time.perf_counter()
        totals = self._world.sums(values)
        seconds, ranks = time.perf_counter() - began, self._world.size
        if ranks > 1:
            sent = 2 * (ranks - 1) * 8 * len(values) // ranks
            self._meter.add("agreement", sent=sent, seconds=seconds, exposed=seconds)
        return totals


def drop_gradients(is_used: Mapping[nn.Parameter, bool]) -> None:
    """Of parameters that had no use: zeros would have AdamW decay them and move them by what earlier steps left."""
    for parameter, used in is_used.items():
        if not used:
            parameter.grad = None


def sum_of_squares(tensors: Iterable[torch.Tensor]) -> float:
    """In double, a block at a time: torch's own norm in double copies the whole tensor and takes nine times as long.

    In fp32 its norm over 12 M values is off by 1e-4 depending on the sharding."""
    at_once = SQUARES_AT_ONCE * torch.get_num_threads()
    work = torch.empty(at_once, dtype=torch.float64)
    total = torch.zeros((), dtype=torch.float64)
    for tensor in tensors:
        for block in tensor.reshape(-1).split(at_once):
            wide = work[: block.numel()].copy_(block)
            total += torch.dot(wide, wide)
    return float(total)

"""Moments in 8 bits and random rounding: how near they are, and that neither cuts nor a resume show in the bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from coremill.config.schema import TrainSection  # noqa: E402
from coremill.engines.optimizers import (  # noqa: E402
    Optimizer,
    optimizer_of,
    place_bits,
)
from coremill.engines.optimizers.moments_8bit import (  # noqa: E402
    FIRST,
    FIRST_LEVELS,
    SECOND,
    SECOND_LEVELS,
    STATE_NAMES,
    Moments8bit,
    RowLayout,
    _levels,
)
from coremill.engines.optimizers.place_bits import PlaceBits  # noqa: E402
from coremill.errors import InputError  # noqa: E402
from coremill.model.slices import RowSlice  # noqa: E402

NAME = "model.weight"


def holder(weight: torch.Tensor) -> nn.Module:
    module = nn.Module()
    module.weight = nn.Parameter(weight)
    return module


def make(
    weights: torch.Tensor, start: int, whole: Sequence[int], name: str = "adamw-8bit"
) -> tuple[Optimizer, nn.Parameter]:
    """An optimizer over these rows of a parameter."""
    module = holder(weights)
    settings = optimizer_of(TrainSection(steps=1, optimizer=name, weight_decay=0.01, seed=3))
    local = module.weight
    piece = RowSlice(NAME, tuple(whole), start, start + (len(weights) if weights.dim() else 1), local)
    return settings.make(module, [("weight", local)], [piece]), local


def step(optimizer: Optimizer, *arguments: Any) -> None:
    """Of its only weight."""
    optimizer.begin_step()
    optimizer.move(*arguments)


def gradients(shape: Sequence[int], steps: int) -> list[torch.Tensor]:
    """Of very different size from row to row and step to step."""
    torch.manual_seed(1)
    rows = torch.logspace(-6, 0, shape[0]).view(-1, *[1] * (len(shape) - 1))
    return [torch.randn(shape) * rows * (1 + step) for step in range(steps)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(37, 300), (64, 256), (9, 40), (50,), (5, 7, 300), (6, 3, 4)])
def test_however_rows_are_cut_bits_are_the_same(monkeypatch, dtype, shape) -> None:
    monkeypatch.setattr(place_bits, "STRETCH_NUMEL", 4096)  # several of them even here
    torch.manual_seed(0)
    weights, steps = torch.randn(shape).to(dtype), gradients(shape, 4)
    outcomes = []
    for cuts in ([shape[0]], [shape[0] // 2, shape[0] - shape[0] // 2], [1, 3, shape[0] - 4]):
        parts, begin = [], 0
        for rows in cuts:
            optimizer, local = make(weights[begin : begin + rows].clone(), begin, shape)
            for gradient in steps:
                step(optimizer, local, gradient[begin : begin + rows].to(dtype).clone(), 1e-2)
            parts.append((local.detach(), optimizer.state_of(local)[0]))
            begin += rows
        outcomes.append(
            {"weight": torch.cat([part for part, _ in parts])}
            | {name: torch.cat([state[name] for _, state in parts]) for name in parts[0][1]}
        )
    for other in outcomes[1:]:
        assert all(torch.equal(outcomes[0][name], other[name]) for name in outcomes[0])
    assert not torch.equal(outcomes[0]["weight"], weights)


def test_what_is_restored_goes_on_with_the_same_bits() -> None:
    shape, steps = (40, 300), gradients((40, 300), 6)
    straight, weight = make(torch.ones(shape, dtype=torch.bfloat16), 0, shape)
    for gradient in steps[:3]:
        step(straight, weight, gradient.clone(), 1e-2)
    state, updates = straight.state_of(weight)
    resumed, again = make(weight.detach().clone(), 0, shape)
    resumed.restore(again, {name: tensor.clone() for name, tensor in state.items()}, updates)
    for gradient in steps[3:]:
        step(straight, weight, gradient.clone(), 1e-2)
        step(resumed, again, gradient.clone(), 1e-2)
    assert torch.equal(weight, again)
    assert resumed.state_of(again)[1] == 6


def test_levels_are_near_what_they_stand_for_and_zeros_stay_zeros() -> None:
    layout = RowLayout.of((4, 600))
    moments = Moments8bit.zeros(4, layout)
    torch.manual_seed(0)
    first, second = torch.zeros(4, layout.width), torch.zeros(4, layout.width)
    first[:2, :600], second[:2, :600] = torch.randn(2, 600), torch.randn(2, 600).square()
    uniform = torch.rand(2, 4 * layout.width)
    moments.write(0, 4, first.clone(), second.clone(), (uniform[0], uniform[1]), torch.empty_like(first))
    read_first, read_second = torch.empty_like(first), torch.empty_like(second)
    moments.read(0, 4, read_first, read_second, torch.empty_like(first))
    for read, meant, root, levels in ((read_first, first, 1 / 2, 127), (read_second, second, 1 / 4, 255)):
        roots = meant.abs().pow(root).view(4, 3, 256)
        off = (read.abs().pow(root).view(4, 3, 256) - roots).abs()
        assert bool((off <= 1.001 * roots.amax(2, keepdim=True) / levels)[:2].all())
        assert bool((read * meant >= 0).all())
    assert bool((read_second[:2, :600] > 0).all()), "an update would be divided by nothing"
    assert bool((read_first[2:] == 0).all()) and float(read_second[2:].max()) == 0
    for levels in (FIRST_LEVELS**2, SECOND_LEVELS):  # what becomes no level must not be not a number either
        assert bool(_levels(torch.zeros(2, 256), levels, torch.empty(2)).isfinite().all())


def test_rounding_by_chance_loses_nothing_in_the_mean() -> None:
    """Steps far below the last bit of bf16: to the nearest, the weights would never move."""
    weights = torch.ones(64, 512, dtype=torch.bfloat16)
    optimizer, local = make(weights.clone(), 0, weights.shape)
    for _ in range(100):
        step(optimizer, local, torch.ones(64, 512), 1e-4)
    nearest = torch.ones(1, dtype=torch.bfloat16) - 1e-4
    assert float(nearest) == 1.0
    assert float(local.detach().float().mean()) == pytest.approx(0.99 - 100 * 1e-4 * 0.01, abs=3e-4)


def test_a_place_has_its_bits_and_another_step_others() -> None:
    def bits(seed: int, step: int, first_row: int, rows: int, name: str = "a") -> torch.Tensor:
        drawn = PlaceBits(seed, largest_numel=64 * 256, widest_row=256)
        return torch.cat([each.bits for each in drawn.stretches(name, step, first_row, rows, 256, 1024)])

    whole = bits(1, 5, 0, 64)
    assert torch.equal(whole[10 * 256 : 30 * 256], bits(1, 5, 10, 20))
    assert int(whole.min()) >= 0 and int(whole.max()) < 2**16
    others = (bits(2, 5, 0, 64), bits(1, 6, 0, 64), bits(1, 5, 0, 64, name="b"))
    assert not any(torch.equal(whole, other) for other in others)


def test_moments_of_adamw_become_8_bits_and_back() -> None:
    shape, steps = (6, 300), gradients((6, 300), 5)
    exact, weight = make(torch.ones(shape), 0, shape, "adamw")
    for gradient in steps:
        step(exact, weight, gradient.clone(), 1e-3)
    state, updates = exact.state_of(weight)
    lean, lean_weight = make(torch.ones(shape), 0, shape)
    lean.restore(lean_weight, state, updates)
    lean_state, lean_updates = lean.state_of(lean_weight)
    assert (sorted(lean_state), lean_updates) == (sorted(STATE_NAMES), updates)
    assert (lean_state[FIRST].dtype, lean_state[SECOND].dtype) == (torch.int8, torch.uint8)
    back, back_weight = make(torch.ones(shape), 0, shape, "adamw")
    back.restore(back_weight, lean_state, lean_updates)
    for name, tensor in back.state_of(back_weight)[0].items():
        largest = state[name].abs().amax(1, keepdim=True)
        assert bool(((tensor - state[name]).abs() <= 0.02 * largest).all())


def test_what_another_engine_held_is_refused() -> None:
    optimizer, weight = make(torch.ones(4, 300), 0, (4, 300))
    with pytest.raises(InputError, match="the checkpoint holds velocity"):
        optimizer.restore(weight, {"velocity": torch.zeros(4, 300)}, 3)


def test_a_gradient_whose_square_is_not_finite_leaves_numbers() -> None:
    shape = (2, 300)
    optimizer, weight = make(torch.ones(shape), 0, shape)
    for size in (1e21, 1.0, 1.0):
        gradient = torch.full(shape, 0.1)
        gradient[0, 3] = size
        step(optimizer, weight, gradient, 1e-2)
        assert weight.isfinite().all()
    assert all(
        tensor.isfinite().all() for tensor in optimizer.state_of(weight)[0].values() if tensor.is_floating_point()
    )

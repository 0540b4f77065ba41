"""Gradients that are frozen, unused, or added up over many passes: on every engine what one plain process has."""

from __future__ import annotations

import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import ranks  # noqa: E402
from coremill.config.schema import TrainSection  # noqa: E402
from coremill.engines.optimizers import optimizer_of  # noqa: E402
from tiers import some_long  # noqa: E402

WIDTH, LENGTH, PASSES = 12, 5, 4
OPTIMIZER = optimizer_of(TrainSection(steps=3, learning_rate=0.05, weight_decay=0.5))
ENGINES: dict[str, dict[str, Any]] = {
    "replicate": {"engine": "replicate"},
    "replicate, wire": {"engine": "replicate", "through_memory": False},
    "memory": {"engine": "shard"},
    "wire": {"engine": "shard", "through_memory": False},
    "wire, kept": {"engine": "shard", "through_memory": False, "keep_gathered": True},
}
# What is frozen: nothing, what a backward never comes to, the other end, all but a little.
FROZEN: dict[str, tuple[str, ...]] = {
    "none": (),
    "the bottom": ("lookup", "positions", "layers.0"),
    "the top": ("top", "norm", "layers.2"),
    "nearly all": ("lookup", "positions", "layers.0", "layers.1", "layers.2.experts", "norm", "top"),
}
# By step, which expert each pass of the global batch uses; the last one's is nobody's, the third's only now and then.
EXPERTS = ((0, 1, 0, 0), (0, 0, 0, 2), (1, 0, 0, 0))


class Experts(torch.nn.Module):
    """A layer of which a pass uses one part."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.adapter = torch.nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, hidden: torch.Tensor, expert: int) -> torch.Tensor:
        return hidden + torch.tanh(self.experts[expert](hidden)) + self.adapter(hidden)


class Top(torch.nn.Module):
    """Has a name of its own for the head's bias (BERT's)."""

    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Linear(WIDTH, 53)
        self.bias = self.head.bias

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head(hidden)


class Mixture(torch.nn.Module):
    """Rows that no number of ranks divides, a lookup, learned positions, and parts without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.lookup = torch.nn.Embedding(51, WIDTH)
        self.positions = torch.nn.Parameter(torch.empty(LENGTH, WIDTH))
        self.layers = torch.nn.ModuleList(Experts() for _ in range(3))
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.top = Top()

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.lookup

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.top.head

    def forward(self, tokens: torch.Tensor, expert: int) -> torch.Tensor:
        hidden = self.lookup(tokens) + self.positions
        for layer in self.layers:
            hidden = layer(hidden, expert)
        return self.top(self.norm(hidden)).float().square().mean()


def filled(frozen: tuple[str, ...] = ()) -> Mixture:
    """The same on every rank."""
    torch.manual_seed(1)
    model = Mixture()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.uniform_(-0.5, 0.5)
            parameter.requires_grad_(not name.startswith(frozen) if frozen else True)
    return model


def started(
    world: Any,
    whole: Mixture,
    *,
    passes: int,
    dtype: str = "fp32",
    wire: str = "fp32",
    update: Any = "after",
    optimizer: str = "adamw",
    **settings: Any,
) -> Any:
    """An engine with the values of `whole`, frozen where it is."""
    from coremill.engines import make_engine

    values = {"engine": "shard", "keep_gathered": False, "dtype": dtype, "wire_dtype": wire, **settings}
    through_memory = values.pop("through_memory", True)
    values["accumulation_steps"] = passes
    plan: Any = SimpleNamespace(**{key: SimpleNamespace(value=value) for key, value in values.items()})
    with torch.device("meta"):
        model = Mixture()
    engine = make_engine(
        plan,
        world,
        replace(OPTIMIZER, name=optimizer, update=update),
        model,
        head_in_backward=True,
        through_memory=through_memory,
    )
    given = dict(whole.named_parameters())
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(given[name].requires_grad)
    engine.place(model)
    from coremill.model.slices import kept, model_name, slice_of

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            piece = slice_of(model_name(name), kept(parameter), world.rank, world.size)
            piece.local.copy_(given[name][piece.start : piece.stop])
    engine.start()
    return engine


def tokens_of(step: int, place: int) -> torch.Tensor:
    return (torch.arange(LENGTH) * (place + 2) + 7 * step) % 51


def reference_run(frozen: tuple[str, ...]) -> dict[str, tuple[Any, int]]:
    """One plain process with the global batch: each parameter and how often AdamW moved it."""
    from coremill.engines.optimizers.adamw import AdamW

    model = filled(frozen)
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    optimizer = AdamW(model, trained, OPTIMIZER)
    for step, experts in enumerate(EXPERTS):
        for place, expert in enumerate(experts):
            model(tokens_of(step, place), expert).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return {name: (p.detach(), optimizer.state_of(p)[1]) for name, p in model.named_parameters()}


def frozen_and_unused(world: Any, update: str = "after") -> list[str]:
    """What is not as in one process, on any engine."""
    wrong = []
    for frozen_name, frozen in FROZEN.items():
        expected = reference_run(frozen)
        for engine_name, settings in ENGINES.items():
            passes = PASSES // world.size
            engine = started(world, filled(frozen), passes=passes, update=update, **settings)
            for step, experts in enumerate(EXPERTS):
                engine.begin_step(OPTIMIZER.learning_rate, 1.0)
                for turn in range(passes):
                    place = world.rank * passes + turn
                    engine.forward_backward(
                        lambda model, s=step, p=place, e=experts[place]: model(tokens_of(s, p), e),  # type: ignore[misc]
                        is_last=turn == passes - 1,
                    )
                engine.reduce(0.0)
                engine.step(OPTIMIZER.learning_rate, None)
            for each in engine.state():
                piece = each.rows
                value, moved = expected[piece.name]
                where = f"{frozen_name}, {engine_name}: {piece.name}"
                if not torch.allclose(piece.local, value[piece.start : piece.stop], atol=1e-6, rtol=1e-5):
                    wrong.append(f"{where} has other values")
                if piece.local.numel() and each.updates != moved:
                    wrong.append(f"{where} was moved {each.updates} times, not {moved}")
            assert engine.examine(lambda model: model(tokens_of(0, 0), world.rank % 3))
    return wrong


@pytest.mark.parametrize("world_size", some_long([1, 2, 4], [4], "of three numbers of ranks the largest"))
def test_frozen_and_unused_parameters_are_as_in_one_process(world_size: int) -> None:
    for wrong in ranks.run_ranks(frozen_and_unused, world_size):
        assert wrong == []


@pytest.mark.parametrize("world_size", some_long([1, 2, 4], [4], "of three numbers of ranks the largest"))
def test_so_they_are_where_weights_move_inside_of_backward(world_size: int) -> None:
    """What a rank had no use for, or only in an earlier pass, moves if any rank had one. Of five positions the last of
    four ranks holds none."""
    for wrong in ranks.run_ranks(frozen_and_unused, world_size, update="inside"):
        assert wrong == []


def inside_in_bf16(world: Any) -> list[str]:
    """What is wrong after steps in bf16 whose weights move inside of backward: weights that did not follow their
    masters, gradients that were kept, and with 8 bits weights that are wider than bf16."""
    wrong = []
    for optimizer in ("adamw", "adamw-8bit"):
        for engine_name, settings in ENGINES.items():
            engine = started(
                world, filled(), passes=1, dtype="bf16", wire="auto", update="inside", optimizer=optimizer, **settings
            )
            for step, experts in enumerate(EXPERTS):
                engine.begin_step(OPTIMIZER.learning_rate, 1.0)
                expert = experts[-1 - world.rank]  # of the second step each rank uses another
                engine.forward_backward(lambda model, s=step, e=expert: model(tokens_of(s, 0), e), is_last=True)  # type: ignore[misc]
                kept = [name for name, weight in engine.module.named_parameters() if weight.grad is not None]
                if kept and world.size == 1:
                    wrong.append(f"{optimizer}, {engine_name}: gradients of {kept}")
                engine.reduce(0.0)
                engine.step(OPTIMIZER.learning_rate, None)
                computed_with = dict(engine.module.named_parameters())
                for piece in engine.slices():
                    where = f"{optimizer}, {engine_name}, step {step}: {piece.name}"
                    if optimizer == "adamw-8bit" and piece.local.dtype != torch.bfloat16:
                        wrong.append(f"{where} is {piece.local.dtype}")
                    weight = computed_with[piece.name].detach()
                    rows = weight[piece.start : piece.stop]
                    if settings["engine"] == "replicate" and not rows.equal(piece.local.detach().to(weight.dtype)):
                        wrong.append(f"{where} is not its master")
    return wrong


@pytest.mark.parametrize("world_size", [1, 2])
def test_inside_in_bf16_nothing_is_kept_nor_left_behind(world_size: int) -> None:
    for wrong in ranks.run_ranks(inside_in_bf16, world_size):
        assert wrong == []


def without_zeros_for_the_unused(world: Any) -> list[str]:
    """As with torch before 2.13: what a step says where all ranks use the same parts, where they do not."""
    from torch.distributed.fsdp import FSDPModule

    from coremill.errors import InputError

    del FSDPModule.set_reduce_scatter_unused_params  # this process is only for this
    said = []
    for frozen, experts in ((("layers.0", "layers.1", "layers.2.experts"), (0, 1)), ((), (0, 1))):
        engine = started(world, filled(frozen), passes=1, **ENGINES["wire"])
        try:
            expert = experts[world.rank]
            engine.forward_backward(lambda model, expert=expert: model(tokens_of(0, 0), expert), is_last=True)
            engine.reduce(0.0)
            said.append("done")
        except InputError as error:
            said.append(str(error))
    return said


def most_left_under_way(world: Any) -> int:
    """Of exchanges that have arrived before the next one starts, how many still hold their gradients behind it."""
    import coremill.engines.replicate.engine as replicate

    replicate.bucket_mib = lambda _: 0  # type: ignore[assignment]  # a bucket for each parameter
    engine = started(world, filled(), passes=1, update="inside", engine="replicate", through_memory=False)
    send_next, found = engine._send_next, []

    def once_all_has_arrived() -> None:
        while not all(exchange._flight.has_arrived for exchange, _ in engine._under_way):
            time.sleep(0.001)
        send_next()
        found.append(len(engine._under_way))

    engine._send_next = once_all_has_arrived
    engine.begin_step(OPTIMIZER.learning_rate, 1.0)
    engine.forward_backward(lambda model: model(tokens_of(0, world.rank), 0), is_last=True)
    assert len(found) > 20
    return max(found)


def test_inside_what_has_arrived_moves_at_once_and_holds_no_gradient() -> None:
    assert ranks.run_ranks(most_left_under_way, 2) == [1, 1]


def test_where_torch_cannot_fill_in_zeros_ranks_that_use_other_parts_are_refused() -> None:
    for done, refused in ranks.run_ranks(without_zeros_for_the_unused, 2):
        assert done == "done" and "torch 2.13" in refused and "parallel.engine=replicate" in refused


MANY = 32


def rounded_sums(world: Any) -> dict[str, float]:
    """How far a step of many bf16 passes is off their sum in fp32, relative to it, by engine."""
    whole = filled()
    narrow = filled().to(torch.bfloat16)

    def sums_of(rank: int) -> dict[str, Any]:
        """Of one rank's passes, each made in bf16 like the engines' and added up in fp32."""
        totals: dict[str, Any] = {}
        for turn in range(MANY):
            narrow(tokens_of(turn, rank), turn % 4).backward()
            for name, parameter in narrow.named_parameters():
                if parameter.grad is not None:
                    totals[name] = totals.get(name, 0) + parameter.grad.float()
            narrow.zero_grad(set_to_none=True)
        return totals

    by_rank = [sums_of(rank) for rank in range(world.size)]
    found = {}
    for name, settings in ENGINES.items():
        engine = started(world, whole, passes=MANY, dtype="bf16", wire="auto", **settings)
        for turn in range(MANY):
            engine.forward_backward(
                lambda model, turn=turn: model(tokens_of(turn, world.rank), turn % 4),  # type: ignore[misc]
                is_last=turn == MANY - 1,
            )
        engine.reduce(0.0)
        apart = together = 0.0
        for piece in engine.slices():
            if piece.local.grad is not None:
                expected = sum(sums[piece.name] for sums in by_rank)[piece.start : piece.stop]
                apart += float((piece.local.grad - expected).double().square().sum())
                together += float(expected.double().square().sum())
        found[name] = (apart / together) ** 0.5
    return found


def test_bf16_passes_are_added_up_in_fp32() -> None:
    (alone,) = ranks.run_ranks(rounded_sums, 1)
    assert all(apart < 1e-6 for apart in alone.values()), alone
    for found in ranks.run_ranks(rounded_sums, 2):
        # What travels in bf16 is rounded once, on its way: at most 2^-9 of a value. A sum in bf16 was off by 0.5 %.
        assert all(apart < 2e-3 for apart in found.values()), found

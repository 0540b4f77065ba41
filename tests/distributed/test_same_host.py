"""Ranks of one host share memory: the numbers of the wire, no leftovers, and a lost one is heard of."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import ranks  # noqa: E402
from tiny_models import make_config_folder  # noqa: E402
from training import make_packed, train_here  # noqa: E402

SHAPE = {"hidden_size": 64, "intermediate_size": 160, "vocab_size": 2048, "num_hidden_layers": 3}
COMMON = {"weights": "random", "steps": 2, "rows_per_step": 12}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "two-passes": {"passes": 2},
    "recomputing": {"checkpointing": True},
    "bf16": {"dtype": "bf16"},
    "replicate": {"engine": "replicate"},
    "replicate, bf16, two passes": {"engine": "replicate", "dtype": "bf16", "passes": 2},
}


def both_ways(world: Any, cases: dict[str, dict[str, Any]], settings: dict[str, Any]) -> dict[str, Any]:
    """Each case through memory, then over the wire; and what of the memory is left open when the engines are gone."""
    import gc

    found: dict[str, Any] = {}
    for name, case in cases.items():
        case = {"engine": "shard", **case}
        rows = settings["rows_per_step"] // world.size // case.pop("passes", 1)
        both = (
            train_here(world, through_memory=through_memory, micro_batch_rows=rows, **settings, **case)
            for through_memory in (True, False)
        )
        found[name] = dict(zip(("memory", "wire"), both, strict=True))
    gc.collect()
    found["left"] = Path("/proc/self/maps").read_text().count("coremill-ranks")
    return found


@pytest.mark.parametrize(
    ("family", "world_size", "names"),
    [
        ("llama-tied", 2, list(CASES)),
        ("llama", 3, ["plain", "bf16", "replicate"]),  # rows that do not divide: padding, and ranks with fewer
        ("llama-tied", 4, ["plain", "two-passes"]),
    ],
)
def test_losses_are_those_of_the_wire(family: str, world_size: int, names: list[str], tmp_path: Path) -> None:
    data = make_packed(tmp_path / "data", rows=48, length=16, vocabulary=500).to_json()
    make_config_folder(tmp_path / family, family, **SHAPE)
    settings = {**COMMON, "model_folder": str(tmp_path / family), "data": data}
    cases = {name: CASES[name] for name in names}
    for found in ranks.run_ranks(both_ways, world_size, cases=cases, settings=settings):
        for name in names:
            memory, wire = found[name]["memory"], found[name]["wire"]
            if (family, name) == ("llama", "bf16"):
                # Over the wire, gradients of equal tokens are added in fp32 before they are rounded (embedding.py).
                assert memory["norms"] == pytest.approx(wire["norms"], rel=1e-5)
            else:
                assert memory["losses"] == wire["losses"], name
                # Over the wire replicate takes norms of other shares of the gradients; what is clipped by one that
                # differs in its last bit makes the next differ a little more.
                for step, (norm, expected) in enumerate(zip(memory["norms"], wire["norms"], strict=True)):
                    exactness = (1e-14, 1e-10)[step] if name.startswith("replicate") else 0
                    assert norm == pytest.approx(expected, rel=exactness, abs=0), name
            assert memory["losses"] == pytest.approx(wire["losses"], rel=1e-6), name
            assert min(memory["shared_bytes"]) > 1000 * max(memory["wire_bytes"]), name
            assert wire["shared_bytes"] == [0, 0], name
        assert found["left"] == 0


class Experts(torch.nn.Module):
    """A layer of which a rank uses one half or the other."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, hidden: torch.Tensor, expert: int) -> torch.Tensor:
        return hidden + torch.tanh(self.experts[expert](hidden))


class Mixture(torch.nn.Module):
    """Small enough to be told by hand: rows that no number of ranks divides, learned positions, a table over a layer's
    size, and parameters without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.lookup = torch.nn.Embedding(101, WIDTH)
        self.positions = torch.nn.Parameter(torch.empty(5, WIDTH))
        self.layers = torch.nn.ModuleList(Experts() for _ in range(3))
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.head = torch.nn.Linear(WIDTH, 103)

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.lookup

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.head

    def forward(self, tokens: torch.Tensor, expert: int) -> torch.Tensor:
        hidden = self.lookup(tokens) + self.positions
        for layer in self.layers:
            hidden = layer(hidden, expert)
        return self.head(self.norm(hidden)).square().mean()


WIDTH = 11


def filled_mixture() -> Mixture:
    """The same on every rank."""
    torch.manual_seed(1)
    model = Mixture()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-1.0, 1.0)
    return model


def loss_of(rank: int, turn: int) -> Any:
    """Of one pass of one rank; where the turn is even, ranks use different experts."""
    tokens = torch.arange(5) * (rank + 2) + turn
    return lambda model: model(tokens, expert=(rank * (turn % 2 == 0)) % 2)


def one_host_here(world: Any, unmaps: bool) -> dict[str, Any]:
    """Two steps of two passes; what this rank's rows were given, and how far they and what is computed with are off."""
    from coremill.config.schema import TrainSection
    from coremill.engines.one_host import engine as one_host
    from coremill.engines.one_host import slots as same_host
    from coremill.engines.one_host.shared_memory import HostPeers, meet_host_peers
    from coremill.engines.optimizers import optimizer_of

    same_host.PASSED_AT_ONCE_NUMEL = 50 * world.size  # this process is only for this
    if unmaps:
        one_host.RESIDENT_UP_TO_BYTES = 0
    peers = meet_host_peers(world)
    assert isinstance(peers, HostPeers)
    engine = one_host.OneHostEngine(
        "shard", world, peers, optimizer_of(TrainSection(steps=2)), compute_dtype=torch.float32
    )
    with torch.device("meta"):
        model = Mixture()
    engine.place(model)
    whole = filled_mixture()
    values = dict(whole.named_parameters())
    with torch.no_grad():
        for piece in engine.slices():
            piece.local.copy_(values[piece.name][piece.start : piece.stop])
    engine.start()
    good = []
    for step in range(2):
        turns = (2 * step, 2 * step + 1)
        for turn in turns:
            engine.forward_backward(loss_of(world.rank, turn), is_last=turn == turns[-1])
        totals = engine.reduce(1.0)
        whole.zero_grad(set_to_none=True)
        for rank in range(world.size):
            for turn in turns:
                loss_of(rank, turn)(whole).backward()
        with torch.no_grad():
            for piece in engine.slices():
                gradient = values[piece.name].grad
                expected = torch.zeros(piece.shape) if gradient is None else gradient
                assert piece.local.grad is not None
                torch.testing.assert_close(piece.local.grad, expected[piece.start : piece.stop])
                piece.local.sub_(0.1 * piece.local.grad)
            for value in values.values():
                if value.grad is not None:
                    value.sub_(0.1 * value.grad)
        norm = sum(float(value.grad.square().sum()) for value in values.values() if value.grad is not None) ** 0.5
        good.append(totals.gradient_norm == pytest.approx(norm) and totals.loss == world.size)
        engine.skip_step()
    finite = engine.examine(loss_of(world.rank, 0))
    broken = engine.examine(lambda model: loss_of(world.rank, 0)(model) * (math.nan if world.rank == 1 else 1.0))
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach(), values[name].detach())
    return {"good": good, "examined": [finite, broken], "left": sum(p.grad is not None for p in model.parameters())}


@pytest.mark.parametrize(("world_size", "unmaps"), [(2, True), (3, False)])
def test_gradients_are_those_of_all_ranks_and_all_compute_with_what_came_of_them(world_size: int, unmaps: bool) -> None:
    for rank, found in enumerate(ranks.run_ranks(one_host_here, world_size, unmaps=unmaps)):
        assert found == {"good": [True, True], "examined": [True, rank != 1], "left": 0}


def lose_a_peer(world: Any) -> None:
    """Rank 1 is killed between an exchange's beginning and its end; the others hear of it where they wait."""
    import os
    import signal

    from coremill.engines.one_host.shared_memory import HostPeers, meet_host_peers
    from coremill.engines.one_host.slots import HostWeights
    from coremill.engines.wire.exchange import WireMeter
    from coremill.errors import PeerLost

    peers = meet_host_peers(world)
    assert isinstance(peers, HostPeers)
    weights = HostWeights(peers, WireMeter(), [[torch.nn.Parameter(torch.empty(9))]], torch.float32)
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    weights.publish()
    try:
        weights.wait()
    except PeerLost as lost:
        assert lost.why is not None and "rank 1" in lost.why
        # Neither leaves before the other has heard: it would be heard of as well.
        if world.rank == 0:  # whose store it is
            world.store.set("heard by 0", "")
            world.store.wait(["heard by 2"])
        else:
            world.store.wait(["heard by 0"])
            world.store.set("heard by 2", "")
        raise ArithmeticError("heard of it") from lost


def test_a_killed_peer_is_heard_of() -> None:
    with pytest.raises(ranks.RankError) as caught:
        ranks.run_ranks(lose_a_peer, 3)
    assert "rank 0: ArithmeticError" in str(caught.value) or caught.value.rank == 0
    assert "rank 2: ArithmeticError" in str(caught.value)


def meet_where_one_cannot(world: Any) -> str:
    """The last rank may not take the file."""
    import socket

    from coremill.engines.one_host.shared_memory import meet_host_peers

    def refuse(*_: Any) -> None:
        raise PermissionError("not here")

    with pytest.MonkeyPatch.context() as patch:
        if world.rank == world.size - 1:
            patch.setattr(socket, "recv_fds", refuse)
        return str(meet_host_peers(world))


def test_where_one_rank_may_not_all_stay_on_the_wire() -> None:
    first, second = ranks.run_ranks(meet_where_one_cannot, 2)
    assert first == second and "cannot share memory with the others" in first

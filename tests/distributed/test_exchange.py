"""Exchanges between real ranks: every piece arrives where it belongs, over one connection or several, and is timed."""

from __future__ import annotations

from typing import Any

import pytest

import ranks


def exchange_here(world: Any, numel: int) -> dict[str, Any]:
    """All-to-all and all-gather of known numbers; what arrived, and what it cost."""
    import torch

    from coremill.engines.wire.exchange import Exchange, WireMeter

    meter = WireMeter()
    exchange = Exchange(meter, world.flows)
    send = torch.arange(world.size * numel, dtype=torch.float32).view(world.size, -1) + 1000 * world.rank
    receive, whole = torch.full_like(send, -1), torch.full_like(send, -1)
    receive[world.rank] = send[world.rank]
    flights = [
        exchange.all_to_all("reduce_scatter", world.group, list(receive), list(send)),
        exchange.all_gather("gather", world.group, whole, send[0]),
    ]
    for flight in reversed(flights):  # waited for in any order
        flight.wait()
    pieces = [torch.arange(numel) + world.rank * numel + 1000 * peer for peer in range(world.size)]
    gathered = [torch.arange(numel) + 1000 * peer for peer in range(world.size)]
    return {
        "scattered": torch.equal(receive.flatten(), torch.cat(pieces).float()),
        "gathered": torch.equal(whole.flatten(), torch.cat(gathered).float()),
        "flows": world.flows,
        "uses": {kind: (use.bytes, use.seconds, use.exposed_seconds) for kind, use in meter.take().items()},
        "left": meter.take(),
    }


@pytest.mark.parametrize("interfaces", ["lo", "lo,lo,lo"])
@pytest.mark.parametrize("numel", [1, 2_000_003])  # one to be sent whole, one to be cut for three flows, unevenly
def test_pieces_arrive_in_place_and_are_counted(interfaces: str, numel: int) -> None:
    found = ranks.run_ranks(exchange_here, 3, environ={"GLOO_SOCKET_IFNAME": interfaces}, numel=numel)
    for rank in found:
        assert rank["scattered"] and rank["gathered"]
        assert rank["flows"] == len(interfaces.split(","))
        assert set(rank["uses"]) == {"reduce_scatter", "gather"} and rank["left"] == {}
        for sent, seconds, exposed in rank["uses"].values():
            assert sent == 2 * numel * 4 and 0 <= exposed <= seconds


def lose_a_peer(world: Any) -> None:
    """Rank 1 leaves; the others hear of it where they wait, as a lost peer."""
    import os

    import torch

    from coremill.engines.wire.exchange import Exchange, WireMeter
    from coremill.errors import PeerLost
    from coremill.world.lost_peers import peer_errors

    world.barrier()
    if world.rank == 1:
        os._exit(0)
    send = torch.zeros(world.size, 50_000)
    flight = Exchange(WireMeter()).all_to_all("gather", world.group, list(torch.empty_like(send)), list(send))
    try:
        with peer_errors():
            flight.wait()
    except PeerLost as lost:
        raise ArithmeticError("heard of it") from lost


def test_a_lost_peer_is_raised_where_its_data_is_waited_for() -> None:
    with pytest.raises(ranks.RankError, match="heard of it") as caught:
        ranks.run_ranks(lose_a_peer, 2)
    assert caught.value.kind == "ArithmeticError"


def link_here(world: Any) -> float:
    """The rate that ranks measure."""
    from coremill.engines.wire.link import measure_link

    return measure_link(world)


def test_all_ranks_measure_the_same_link() -> None:
    first, second = ranks.run_ranks(link_here, 2)
    assert first == second == 0  # both on one host: nothing goes elsewhere


def sums_of_layers(world: Any, room_bytes: int, ahead: int) -> dict[str, Any]:
    """Rank 0 posts the sums of so many layers before the others begin; then all post the rest."""
    import torch

    from coremill.engines.wire import collectives
    from coremill.engines.wire.codec import Plain
    from coremill.engines.wire.exchange import Exchange, WireMeter

    before, collectives.ROOM_IN_FLIGHT_BYTES = collectives.ROOM_IN_FLIGHT_BYTES, room_bytes  # type: ignore[misc]
    exchange = Exchange(WireMeter(), world.flows)
    reduce_scatter = collectives.ReduceScatter(exchange, collectives.BufferPool(), Plain(torch.bfloat16))
    sums = [torch.empty(500) for _ in range(6)]
    first = ahead if world.rank == 0 else 0
    for into in sums[:first]:
        reduce_scatter(into, torch.full((1000,), 3.0), world.group)
    world.sums([0.0])
    for into in sums[first:]:
        reduce_scatter(into, torch.full((1000,), 3.0), world.group)
    in_flight = len(reduce_scatter._in_flight)
    reduce_scatter.flush()
    collectives.ROOM_IN_FLIGHT_BYTES = before  # type: ignore[misc]
    return {"in_flight": in_flight, "right": all(bool((into == 6.0).all()) for into in sums)}


def test_a_quick_rank_may_be_layers_ahead_where_there_is_room() -> None:
    found = ranks.run_ranks(sums_of_layers, 2, room_bytes=2**20, ahead=6)
    assert [(rank["in_flight"], rank["right"]) for rank in found] == [(6, True), (6, True)]


def test_two_layers_are_in_flight_where_there_is_none() -> None:
    found = ranks.run_ranks(sums_of_layers, 2, room_bytes=0, ahead=2)
    assert [(rank["in_flight"], rank["right"]) for rank in found] == [(2, True), (2, True)]

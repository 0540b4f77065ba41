"""How fast the network between the hosts really is: all ranks send to all others for a moment.

What an interface says of itself is a card's rate, not what a switch, a cloud or a shaper lets through; the plan weighs
bytes against memory with this number, so it is measured where ranks have met anyway. Half a second at most.
"""

from __future__ import annotations

import time

import torch

from coremill.engines.wire.exchange import Exchange, WireMeter
from coremill.world.group import World

FIRST_BYTES = 256 * 1024  # sent by a rank; doubled until it takes long enough to be told from a burst
MOST_BYTES = 64 * 2**20
LONG_ENOUGH_SECONDS = 0.2


def measure_link(world: World) -> float:
    """Bits per second that a host gets through to the others while all hosts send; the same number on every rank."""
    exchange = Exchange(WireMeter(), world.flows, FIRST_BYTES // 2)  # all flows, however little is sent
    ranks = world.size
    elsewhere = sum(node != world.node_rank for node in world.node_of_rank)
    size = FIRST_BYTES
    while True:
        piece = max(1, size // max(1, ranks - 1))
        send, receive = torch.zeros(ranks, piece, dtype=torch.uint8), torch.empty(ranks, piece, dtype=torch.uint8)
        world.barrier()
        began = time.perf_counter()
        exchange.all_to_all("agreement", world.group, list(receive), list(send)).wait()
        seconds = max(world.gather(time.perf_counter() - began))
        if seconds >= LONG_ENOUGH_SECONDS or size >= MOST_BYTES:
            rates = world.gather(8.0 * piece * elsewhere * world.local_size / seconds)
            return float(min(rates))
        size *= 2

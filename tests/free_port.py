"""A port for ranks that meet under this machine's own address: free on every address, and of no other test's."""

from __future__ import annotations

import random
import socket

from coremill.world.identity import DERIVED_PORTS


def free_port_for_all_addresses() -> int:
    """Below those that the kernel gives to whoever asks for any: nobody takes it before the ranks are up."""
    for port in random.sample(DERIVED_PORTS, 20):
        try:
            with socket.create_server(("", port)):
                return port
        except OSError:
            continue
    raise AssertionError("none of twenty ports is free")

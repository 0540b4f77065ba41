"""One rank that measures its link to the others as `coremill train` does, and says what came out."""

from __future__ import annotations

from coremill.engines.wire.link import measure_link
from coremill.hardware.probe import environment_snapshot
from coremill.world.group import join_world
from coremill.world.identity import identify


def main() -> None:
    """Meet the others, measure, print bits per second."""
    identity = identify(environment_snapshot())
    assert identity is not None, "to be started by a launcher"
    with join_world(identity) as world:
        rate = measure_link(world)
        if world.rank == 0:
            print(f"LINK {rate:.0f}", flush=True)


if __name__ == "__main__":
    main()

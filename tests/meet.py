"""A rank for any launcher: says who it is, meets the others, prints what it got; `fail` raises on the last rank."""

from __future__ import annotations

import json
import os
import sys

from coremill.errors import CoremillError
from coremill.world.group import World, join_world
from coremill.world.identity import identify


def meet(world: World) -> dict[str, object]:
    """One of each exchange."""
    return {
        "rank": world.rank,
        "size": world.size,
        "local": [world.local_rank, world.local_size],
        "node": [world.node_rank, world.nodes],
        "launcher": world.identity.launcher,
        "gathered": world.gather(f"hello from {world.rank}"),
        "sum": world.sum(world.rank + 1),
        "once": world.once_per_node(lambda: world.rank),
        "restart": int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
    }


def main(mode: str) -> int:
    """The exit code a rank ends with."""
    identity = identify(dict(os.environ))
    if identity is None:
        print("no launcher")
        return 0
    try:
        with join_world(identity, timeout_seconds=200) as world:
            # One write, so that lines of ranks that share a pipe stay whole.
            sys.stdout.write("MET " + json.dumps(meet(world)) + "\n")
            sys.stdout.flush()
            world.barrier()  # whoever ends one for the other's failure finds both lines written
            if mode == "fail" and world.rank == world.size - 1:
                raise ValueError("poisoned batch")
            if mode == "fail once" and world.rank == world.size - 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
                os._exit(1)
            if mode == "fail input":
                from coremill.errors import InputError

                def refuse() -> None:
                    raise InputError("no such column", do="name one of: text")

                world.once_per_node(refuse)
            world.barrier()
    except CoremillError as error:
        if not error.silent:
            print(f"coremill: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(" ".join(sys.argv[1:])))

"""A launcher to send signals to: starts a rank program, says READY, prints the outcome as JSON.

python launch_ranks.py RANKS LOG_FOLDER PROGRAM [ARGUMENT ...]          WAY=fork: ranks are forked, PROGRAM is -c CODE
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path

from coremill.supervise.fork_client import ForkServer
from coremill.supervise.ranks import run_local_ranks
from coremill.world import stop
from coremill.world.identity import identify_node
from rank_plans import rank_plan


def main() -> None:
    """Run until the ranks have ended."""
    stop.SAME_PRESS_SECONDS = float(os.environ.get("SAME_PRESS", stop.SAME_PRESS_SECONDS))
    ranks, folder, program = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
    said = False

    def on_tick() -> None:
        nonlocal said
        if not said and len(list(folder.glob("up-*"))) == ranks:
            said = True
            print("READY", flush=True)

    with contextlib.ExitStack() as stack:
        fork_server = None
        if os.environ.get("WAY") == "fork":
            bare = [sys.executable, str(Path(__file__).with_name("bare_fork_server.py"))]
            fork_server = stack.enter_context(ForkServer(bare, os.environ, folder / "template.log", sys.exit))
            fork_server.start()
            (folder / "template.pid").write_text(str(fork_server.pid))
        outcome = run_local_ranks(
            argv=[sys.executable, *program],
            plan=rank_plan(ranks),
            identity_base=identify_node(os.environ),
            environ={**os.environ, "UP": str(folder)},
            log_folder=folder,
            on_tick=on_tick,
            grace_seconds=float(os.environ.get("GRACE", "5")),
            fork_server=fork_server,
        )
    print(json.dumps({"exit_code": outcome.exit_code, "message": outcome.message, "exit_codes": outcome.exit_codes}))
    sys.exit(outcome.exit_code)


if __name__ == "__main__":
    main()

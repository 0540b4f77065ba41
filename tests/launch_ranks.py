"""A launcher to send signals to: starts a rank program, says READY, prints the outcome as JSON.

python launch_ranks.py RANKS LOG_FOLDER PROGRAM [ARGUMENT ...]
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from coremill.launch.identity import identify_node
from coremill.launch.local import run_local_ranks
from rank_plans import rank_plan


def main() -> None:
    """Run until the ranks have ended."""
    ranks, folder, program = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
    said = False

    def on_tick() -> None:
        nonlocal said
        if not said and len(list(folder.glob("up-*"))) == ranks:
            said = True
            print("READY", flush=True)

    outcome = run_local_ranks(
        argv=[sys.executable, *program],
        plan=rank_plan(ranks),
        identity_base=identify_node(os.environ),
        environ={**os.environ, "UP": str(folder)},
        log_folder=folder,
        on_tick=on_tick,
        grace_seconds=float(os.environ.get("GRACE", "5")),
    )
    print(json.dumps({"exit_code": outcome.exit_code, "message": outcome.message, "exit_codes": outcome.exit_codes}))
    sys.exit(outcome.exit_code)


if __name__ == "__main__":
    main()

"""A template that imports nothing but what it forks ranks with; ranks run the code of `python -c CODE`.

python bare_fork_server.py [thread | late] DESCRIPTOR        thread: it has started one, as some libraries do
                                                             late: it forks, and never comes to say so
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from typing import Any

from coremill.supervise import fork_server
from coremill.supervise.fork_server import send


def _send_but_no_rank(connection: socket.socket, document: dict[str, Any]) -> None:
    if "pid" in document:
        time.sleep(600)
    send(connection, document)


def main() -> None:
    """Serve until the launcher is gone."""
    if sys.argv[1] == "thread":
        threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    if sys.argv[1] == "late":
        fork_server.send = _send_but_no_rank
    order = fork_server.serve(socket.socket(fileno=int(sys.argv[-1])), os.getppid())
    if order is not None:
        exec(compile(order.argv[2], "<rank>", "exec"), {"__name__": "__main__"})


if __name__ == "__main__":
    main()

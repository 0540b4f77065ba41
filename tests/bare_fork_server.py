"""A template that imports nothing but what it forks ranks with; ranks run the code of `python -c CODE`.

python bare_fork_server.py [thread] DESCRIPTOR               thread: it has started one, as some libraries do
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time

from coremill.supervise.fork_server import serve


def main() -> None:
    """Serve until the launcher is gone."""
    if sys.argv[1] == "thread":
        threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    order = serve(socket.socket(fileno=int(sys.argv[-1])), os.getppid())
    if order is not None:
        exec(compile(order.argv[2], "<rank>", "exec"), {"__name__": "__main__"})


if __name__ == "__main__":
    main()

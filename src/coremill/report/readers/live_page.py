"""`coremill train --page`: the live page of a run, in a process of its own that only reads the run folder."""

from __future__ import annotations

import socket

from coremill.report.page.server import address_of
from coremill.report.readers.served import ServedReader


class LivePage(ServedReader):
    """Shows the last state, then ends."""

    name = "the live page"
    module = "coremill.report.page.server"
    log_name = "live-page.log"

    def greeting(self) -> str:
        """Where to look, from here and from elsewhere."""
        port = self._listener.getsockname()[1]
        hint = f"from elsewhere: ssh -L {port}:127.0.0.1:{port} {socket.gethostname()}, then the same address"
        return f"live page: {address_of(self._listener)} on this machine; {hint}"

"""The launcher's side of the metrics: the server's process is started with the ranks, and ends after the report."""

from __future__ import annotations

import socket
from pathlib import Path

from rich.console import Console

from coremill.report.http_service import ANY_INTERFACE
from coremill.report.readers.served import ServedReader

PATH = "/metrics"


class MetricsReader(ServedReader):
    """Serves the run as a whole where rank 0 is among `ranks`, and of single ranks these; None: all there are."""

    name = "the metrics endpoint"
    module = "coremill.report.readers.prometheus.server"
    log_name = "metrics.log"

    def __init__(self, run_folder: Path, listener: socket.socket, console: Console, ranks: range | None = None) -> None:
        of_ranks = () if ranks is None else (str(ranks.start), str(ranks.stop))
        super().__init__(run_folder, listener, console, of_ranks)
        if ranks is not None and ranks.start > 0:  # hosts may share the folder
            self.log_name = f"metrics-rank-{ranks.start:05d}.log"

    def greeting(self) -> str:
        """Where Prometheus finds it."""
        host, port = self._listener.getsockname()[:2]
        if host in ANY_INTERFACE:
            return f"metrics: port {port} on every interface of {socket.gethostname()}, {PATH}"
        return f"metrics: http://{f'[{host}]' if ':' in host else host}:{port}{PATH}"

"""The process that serves a run's metrics: it reads what was appended to the events when somebody scrapes, and else
nothing.

    python -m coremill.report.readers.prometheus.server DESCRIPTOR RUN_FOLDER [FIRST_RANK END_RANK]

    DESCRIPTOR   a listening socket
    FIRST_RANK   the ranks of this node, END_RANK is no more among them; left out: all
    stdin        its end is the end of the run

A scrape never waits for a long look at the run (the first one of a run that is months old): it gets what is known.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from http import HTTPStatus
from pathlib import Path
from urllib.parse import urlsplit

from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from coremill.errors import CoremillError
from coremill.report.http_service import LOOPBACK, BoundedServer, ReadOnlyHandler
from coremill.report.readers.prometheus.families import MeteredRun, families_of
from coremill.report.readers.prometheus.reader import PATH

NICENESS = 10  # the run goes first
FRESH_SECONDS = 1.0  # several who scrape at once are given the same
LOOKING_SECONDS = 5.0  # half of what Prometheus waits for an answer


class RunMetrics(Collector):
    """The metrics of a run as of now; one look at a time."""

    def __init__(self, run_folder: Path, ranks: range | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder, self._ranks, self._clock = run_folder, ranks, clock
        self._run: MeteredRun | None = None
        self._looking = threading.Lock()
        self._looked_at = float("-inf")
        self._known: Sequence[Metric] = ()

    def collect(self) -> Iterable[Metric]:
        """What the client library asks for at each scrape."""
        if self._looking.acquire(timeout=LOOKING_SECONDS):
            try:
                if self._clock() - self._looked_at >= FRESH_SECONDS:
                    self._look()
            finally:
                self._looking.release()
        return self._known

    def _look(self) -> None:
        # No run yet, or a file is being replaced: what was known still holds.
        with contextlib.suppress(CoremillError, OSError):
            leads = self._ranks is None or 0 in self._ranks
            if self._run is None:
                self._run = MeteredRun(self._folder, ranks=None if leads else self._ranks)
            self._run.look()
            self._known = families_of(self._run, self._ranks)
            self._looked_at = self._clock()


class MetricsServer(BoundedServer):
    """Serves one run until it is closed."""

    def __init__(self, listener: socket.socket, metrics: RunMetrics) -> None:
        super().__init__(listener, _Handler)
        self.metrics = metrics
        self.is_loopback = listener.getsockname()[0] in (LOOPBACK, "::1")


class _Handler(ReadOnlyHandler):
    server: MetricsServer

    def do_GET(self) -> None:
        """The metrics, in the form that the scraper prefers."""
        if self.server.is_loopback and not self.names_this_machine():
            self.refuse(HTTPStatus.FORBIDDEN, "these metrics are for this machine, under the name localhost")
            return
        if urlsplit(self.path).path != PATH:
            self.refuse(HTTPStatus.NOT_FOUND, f"metrics of a coremill run are at {PATH}")
            return
        encode, content_type = choose_encoder(self.headers.get("Accept") or "")
        text = encode(self.server.metrics)
        self.begin(HTTPStatus.OK, content_type, len(text))
        self.wfile.write(text)


def _main(descriptor: int, run_folder: Path, *ranks: int) -> None:
    """For a launcher: until its end of a pipe on standard input is closed, by its own will or with its life."""
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
    metrics = RunMetrics(run_folder, range(*ranks) if ranks else None)
    with MetricsServer(socket.socket(fileno=descriptor), metrics) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        sys.stdin.buffer.read()


if __name__ == "__main__":
    _main(int(sys.argv[1]), Path(sys.argv[2]), *(int(rank) for rank in sys.argv[3:]))

"""`run.metrics_port`: the numbers of a run where Prometheus scrapes them, from the launcher of each node.

    http://127.0.0.1:9400/metrics

`reader.py` starts a process for it, `server.py` is that process, `families.py` makes metrics of what events amount to,
`dashboard.py` shows them in Grafana. Nothing but that process imports the client library.
"""

from __future__ import annotations

import importlib.util
import socket

from coremill.config.load import LoadedConfig
from coremill.errors import InputError
from coremill.report.http_service import WHY_NO_PORT, bound

LIBRARY = "prometheus_client"


def listen_for_scrapes(loaded: LoadedConfig) -> socket.socket:
    """Take the port of `run.metrics_port`; one that is taken, or no client library, is refused."""
    host, port = loaded.config.run.metrics_host, loaded.config.run.metrics_port
    assert port is not None
    if importlib.util.find_spec(LIBRARY) is None:
        raise InputError(
            "the client library of Prometheus is not installed here",
            where=loaded.where("run.metrics_port"),
            why=f"there is no module {LIBRARY} in this Python",
            do="pip install 'coremill[metrics]', or leave run.metrics_port out",
        )
    try:
        return bound(host, port)
    except OSError as error:
        is_of_host = WHY_NO_PORT.get(error.errno or 0) is None or "address" in WHY_NO_PORT[error.errno or 0]
        raise InputError(
            f"port {port} on {host} cannot be used for metrics: {error.strerror or error}",
            where=loaded.where("run.metrics_host" if is_of_host else "run.metrics_port"),
            why=WHY_NO_PORT.get(error.errno or 0),
            do="set run.metrics_host to an address of this machine, 127.0.0.1 or 0.0.0.0"
            if is_of_host
            else "set run.metrics_port to another port, or to 0: a free one is taken and printed",
        ) from error

"""The metadata service of an EC2 instance on a local port; `notice` is what it says about the instance's end."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

SESSION = "made-up-session-secret"


@dataclass
class StandIn:
    """What it says and what it was asked."""

    address: str = ""
    notice: dict[str, str] | None = None
    status: int = 200  # of everything but the token
    is_garbled: bool = False
    asked: list[str] = field(default_factory=list)


@contextmanager
def serve_metadata() -> Iterator[StandIn]:
    """IMDSv2: no answer without a session token, 404 while there is no notice."""
    state = StandIn()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            """Quiet."""

        def do_PUT(self) -> None:
            state.asked.append(f"PUT {self.path}")
            lives = self.headers.get("X-aws-ec2-metadata-token-ttl-seconds")
            self._answer(200 if self.path == "/latest/api/token" and lives else 400, SESSION)

        def do_GET(self) -> None:
            state.asked.append(f"GET {self.path}")
            if state.is_garbled:
                self.wfile.write(b"no HTTP at all\r\n\r\n")
            elif self.headers.get("X-aws-ec2-metadata-token") != SESSION:
                self._answer(401, "")
            elif state.status != 200:
                self._answer(state.status, "")
            elif self.path == "/latest/meta-data/spot/instance-action" and state.notice is not None:
                self._answer(200, json.dumps(state.notice))
            else:
                self._answer(404, "")

        def _answer(self, status: int, text: str) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    yield state
    server.shutdown()
    server.server_close()
    thread.join()

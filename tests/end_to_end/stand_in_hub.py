"""A hub on a local port that has one gated model and one gated dataset: their names are public, their files are not."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = ("config.json", "tokenizer.json", "model.safetensors")


class _GatedHub(BaseHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        """Quiet."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        if "/gated/" not in path:
            self._answer(404, {}, "RepoNotFound")
        elif path.startswith("/api/") and "/tree/" in path:
            self._answer(200, [{"type": "file", "path": file, "size": 10, "oid": COMMIT} for file in FILES])
        elif path.startswith("/api/") and "auth-check" not in path:
            siblings = [{"rfilename": file, "size": 10} for file in FILES]
            name = "/".join(path.split("/")[3:5])
            self._answer(200, {"id": name, "sha": COMMIT, "gated": "manual", "private": False, "siblings": siblings})
        else:
            self._answer(403, {"error": "gated"}, "GatedRepo")

    def _answer(self, status: int, document: Any, code: str | None = None) -> None:
        body = json.dumps(document).encode()
        self.send_response(status)
        if code is not None:
            self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@contextmanager
def serve_gated_hub() -> Iterator[str]:
    """Its address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _GatedHub)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()

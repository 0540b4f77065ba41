"""A Hugging Face hub on a local port: the few addresses that its client libraries ask for."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlparse

COMMIT = "c0ffee" + "0" * 34


@dataclass
class Hub:
    """What it serves, and what it was asked."""

    files: dict[str, dict[str, bytes]]  # by dataset, by path: of commit COMMIT
    earlier: dict[str, dict[str, bytes]] = field(default_factory=dict)  # by commit, by path: of any dataset
    cards: dict[str, dict[str, Any]] = field(default_factory=dict)  # by dataset: the head of its README.md
    gated: set[str] = field(default_factory=set)
    requests: list[str] = field(default_factory=list)
    address: str = ""


@contextmanager
def serve(hub: Hub) -> Iterator[Hub]:
    """Run the hub for the length of a with block."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None:
            pass

        def answer(self, status: int, body: bytes, **headers: str) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), value)
            if "Content_Length" not in headers:
                self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def fail(self, status: int, code: str) -> None:
            self.answer(status, json.dumps({"error": code}).encode(), X_Error_Code=code, X_Error_Message=code)

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_POST(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            self.form = self.rfile.read(length).decode()
            self.do_GET()

        def do_GET(self) -> None:
            hub.requests.append(f"{self.command} {self.path}")
            parts = [unquote(part) for part in urlparse(self.path).path.strip("/").split("/")]
            api = parts[0] == "api"
            if parts[api : api + 1] != ["datasets"]:
                return self.fail(404, "EntryNotFound")
            name, rest = "/".join(parts[api + 1 : api + 3]), parts[api + 3 :]
            files = hub.files.get(name)
            if files is None:
                return self.fail(404, "RepoNotFound")
            self.commit = rest[1] if len(rest) > 1 and rest[1] in hub.earlier else COMMIT
            files = hub.earlier.get(self.commit, files)
            if api:
                return self.do_api(name, rest, files)
            if name in hub.gated:
                return self.fail(403, "GatedRepo")
            return self.do_file("/".join(rest[2:]), files)

        def do_api(self, name: str, rest: list[str], files: dict[str, bytes]) -> None:
            action = rest[0] if rest else "revision"
            if len(rest) > 1 and rest[1] not in (COMMIT, "main", *hub.earlier):
                return self.fail(404, "RevisionNotFound")
            if action == "auth-check":
                return self.fail(403, "GatedRepo") if name in hub.gated else self.answer(200, b"{}")
            if action == "revision":
                siblings = [{"rfilename": path} for path in files]
                gated = "auto" if name in hub.gated else False
                info = {
                    "id": name,
                    "sha": self.commit,
                    "gated": gated,
                    "private": False,
                    "tags": [],
                    "siblings": siblings,
                    "cardData": hub.cards.get(name),
                }
                return self.answer(200, json.dumps(info).encode(), Content_Type="application/json")
            if action == "tree":
                return self.answer(200, json.dumps(self.entries(files, "/".join(rest[2:]))).encode())
            if action == "paths-info":
                query = parse_qs(self.form) if not self.form.startswith("{") else json.loads(self.form)
                found = [entry for path in query.get("paths", []) for entry in self.exactly(files, path)]
                return self.answer(200, json.dumps(found).encode())
            return self.fail(404, "EntryNotFound")

        def entry(self, path: str, data: bytes) -> dict[str, Any]:
            return {"type": "file", "path": path, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}

        def entries(self, files: dict[str, bytes], folder: str) -> list[dict[str, Any]]:
            start = f"{folder}/" if folder else ""
            return [self.entry(path, data) for path, data in files.items() if path.startswith(start)]

        def exactly(self, files: dict[str, bytes], path: str) -> list[dict[str, Any]]:
            if path in files:
                return [self.entry(path, files[path])]
            if self.entries(files, path):
                return [{"type": "directory", "path": path, "oid": "0" * 40}]
            return []

        def do_file(self, path: str, files: dict[str, bytes]) -> None:
            if path not in files:
                return self.fail(404, "EntryNotFound")
            data = files[path]
            tag = f'"{hashlib.sha1(data).hexdigest()}"'
            self.answer(
                200,
                data,
                ETag=tag,
                X_Repo_Commit=self.commit,
                X_Linked_Size=str(len(data)),
                Content_Length=str(len(data)),
            )

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    hub.address = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

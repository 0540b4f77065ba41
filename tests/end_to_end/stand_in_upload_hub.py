"""A hub on a local port that takes uploads: who asks, a repository, large files by LFS, one commit with the rest."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_secretOfTheTests1234"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class UploadHub:
    """What it has been given so far."""

    address: str = ""
    private: dict[str, bool] = field(default_factory=dict)  # by repository
    files: dict[str, bytes] = field(default_factory=dict)  # of the last one pushed
    objects: dict[str, bytes] = field(default_factory=dict)  # by LFS oid
    messages: list[str] = field(default_factory=list)
    cards: list[str] = field(default_factory=list)  # README.md as it was shown for approval
    asked: list[str] = field(default_factory=list)


def _handler(hub: UploadHub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            """Quiet."""

        def do_GET(self) -> None:
            path = self._path()
            if not self._is_known():
                return
            if path == "/api/whoami-v2":
                self._answer(
                    200, {"name": "me", "type": "user", "orgs": [], "auth": {"accessToken": {"role": "write"}}}
                )
            elif path.startswith("/api/models/me/"):
                name = "/".join(path.split("/")[3:5])
                if name not in hub.private:
                    self._answer(404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
                elif "/tree/" in path:
                    tree = [{"type": "file", "path": each, "size": 1, "oid": COMMIT} for each in hub.files]
                    self._answer(200, tree)
                else:
                    siblings = [{"rfilename": each} for each in hub.files]
                    private = hub.private[name]
                    self._answer(200, {"id": name, "sha": COMMIT, "private": private, "siblings": siblings})
            else:
                self._answer(404, {"error": "not here"})

        def do_POST(self) -> None:
            path, body = self._path(), self.rfile.read(int(self.headers["Content-Length"] or 0))
            if not self._is_known():
                return
            if path == "/api/repos/create":
                asked = json.loads(body)
                name = f"{asked.get('organization') or 'me'}/{asked['name']}"
                if not name.startswith("me/"):
                    self._answer(403, {"error": "not yours"})
                elif name in hub.private:
                    self._answer(409, {"error": "You already created this model repo", "url": f"{hub.address}/{name}"})
                else:
                    hub.private[name] = bool(asked.get("private")) or asked.get("visibility") == "private"
                    self._answer(200, {"url": f"{hub.address}/{name}"})
            elif path == "/api/validate-yaml":
                hub.cards.append(json.loads(body)["content"])
                self._answer(200, {"errors": [], "warnings": []})
            elif "/preupload/" in path:
                files = [
                    {
                        "path": file["path"],
                        "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular",
                        "shouldIgnore": False,
                    }
                    for file in json.loads(body)["files"]
                ]
                self._answer(200, {"files": files})
            elif path.endswith("/info/lfs/objects/batch"):
                objects = json.loads(body)["objects"]
                for each in objects:
                    each["actions"] = {"upload": {"href": f"{hub.address}/lfs/{each['oid']}", "header": {}}}
                self._answer(200, {"transfer": "basic", "objects": objects})
            elif "/commit/" in path:
                for line in map(json.loads, body.splitlines()):
                    self._take(line["key"], line["value"])
                url = f"{hub.address}/{'/'.join(path.split('/')[3:5])}/commit/{COMMIT}"
                self._answer(200, {"success": True, "commitOid": COMMIT, "commitUrl": url})
            else:
                self._answer(404, {"error": "not here"})

        def do_PUT(self) -> None:
            hub.objects[self._path().removeprefix("/lfs/")] = self.rfile.read(int(self.headers["Content-Length"]))
            self._answer(200, {})

        def _take(self, key: str, value: dict[str, Any]) -> None:
            if key == "header":
                hub.messages.append(value["summary"])
            elif key == "file":
                hub.files[value["path"]] = base64.b64decode(value["content"])
            elif key == "lfsFile":
                hub.files[value["path"]] = hub.objects[value["oid"]]
            elif key == "deletedFile":
                del hub.files[value["path"]]

        def _path(self) -> str:
            hub.asked.append(f"{self.command} {self.path}")
            return self.path.split("?")[0]

        def _is_known(self) -> bool:
            known = self.headers.get("Authorization") == f"Bearer {TOKEN}" or self.path.startswith("/lfs/")
            if not known:
                self._answer(401, {"error": "Invalid username or password."})
            return known

        def _answer(self, status: int, document: Any, headers: dict[str, str] | None = None) -> None:
            body = json.dumps(document).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

    return Handler


@contextmanager
def serve_upload_hub() -> Iterator[UploadHub]:
    """What it was given, and its address."""
    hub = UploadHub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub))
    hub.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    yield hub
    server.shutdown()
    server.server_close()
    thread.join()

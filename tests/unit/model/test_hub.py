"""The hub, played by a small server on this machine: a download, and each failure with its message and no token in it.

The hub's address is read when its library is imported, so the cases run in one process of their own.
"""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from coremill.hub import DEADLINE_SECONDS, REQUEST_SECONDS
from own_code import AUTO_MAP, CONFIGURATION, MODELING
from tiny_models import tiny_config

TOKEN = "hf_secretsecretsecretsecret"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def safetensors_bytes() -> bytes:
    text = json.dumps({"t": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    return len(text).to_bytes(8, "little") + text + bytes(8)


def own_code(auto_map: dict[str, str]) -> dict[str, bytes]:
    config = {**tiny_config("llama"), "model_type": "own-mill", "auto_map": auto_map}
    return {
        "config.json": json.dumps(config).encode(),
        "configuration_own.py": CONFIGURATION.encode(),
        "modeling_own.py": MODELING.encode(),
    }


REPOSITORIES: dict[str, dict[str, bytes]] = {
    "some/model": {
        "config.json": json.dumps(tiny_config("llama")).encode(),
        "tokenizer.json": b"{}",
        "model.safetensors": safetensors_bytes(),
        "pytorch_model.bin": b"\x80" * 50,
        "original/consolidated.safetensors": b"x",
    },
    "some/own": {**own_code(AUTO_MAP), "model.safetensors": safetensors_bytes(), "nested/more.py": b""},
    "some/borrowed": own_code({**AUTO_MAP, "AutoConfig": "other/repo--configuration_own.OwnConfig"}),
    "some/pickle": {"config.json": b"{}", "pytorch_model.bin": b"\x80"},
    "some/empty": {"README.md": b"nothing"},
    "some/adapter": {
        "adapter_config.json": b"{}",
        "adapter_model.safetensors": safetensors_bytes(),
        "checkpoint-9/adapter_model.safetensors": safetensors_bytes(),
    },
}


class Hub(http.server.BaseHTTPRequestHandler):
    """The addresses of the hub that a download needs: information, file tree, files."""

    def log_message(self, *_: Any) -> None:
        pass

    def refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        name = "/".join(path.removeprefix("/api/models/").strip("/").split("/")[:2])
        if name == "some/gated":
            self.refuse(403, "GatedRepo")
        elif name not in REPOSITORIES:
            self.refuse(404, "RepoNotFound")
        elif path.startswith("/api/models/") and "/revision/absent" in path:
            self.refuse(404, "RevisionNotFound")
        elif path.startswith("/api/models/") and "/tree/" in path:
            tree = [
                {"type": "file", "path": file, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for file, data in REPOSITORIES[name].items()
            ]
            self.answer(json.dumps(tree).encode())
        elif path.startswith("/api/models/"):
            siblings = [{"rfilename": file, "size": len(data)} for file, data in REPOSITORIES[name].items()]
            self.answer(json.dumps({"_id": "1", "id": name, "sha": COMMIT, "siblings": siblings}).encode())
        else:
            file = path.split(f"/resolve/{COMMIT}/")[-1]
            self.answer(REPOSITORIES[name][file])

    def answer(self, data: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)


@pytest.fixture(scope="module")
def hub() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def resolve(endpoint: str, cache: Path, *sections: dict[str, Any], request_seconds: float = 10.0) -> list[str]:
    """What resolving each section gives, or of an adapter its name: the files of the folder, or the message."""
    program = """
import json, sys
from pathlib import Path
from coremill.config.schema import ModelSection, RunConfig
from coremill.errors import InputError
from coremill import hub
from coremill.model.adapter_source import FILES, SETTING, download_files
from coremill.model.source import resolve_model
from coremill.tasks.causal_lm import CausalLm
hub.REQUEST_SECONDS = float(sys.argv[3])
for section in json.loads(sys.argv[1]):
    try:
        if "adapter" in section:
            folder = download_files(section["adapter"], FILES, setting=SETTING)
        else:
            folder = resolve_model(ModelSection(**section), CausalLm(RunConfig()), cache=Path(sys.argv[2])).folder
        print(json.dumps(" ".join(sorted(str(p.relative_to(folder)) for p in folder.rglob("*")))))
    except InputError as error:
        print(json.dumps(str(error)))
"""
    environment = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(cache / "hf"), "HF_TOKEN": TOKEN}
    environment |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0", "NO_PROXY": "127.0.0.1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, json.dumps(sections), str(cache), str(request_seconds)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert TOKEN not in done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_download_and_refusals(hub: str, tmp_path: Path) -> None:
    files, gated, absent, revision, pickle, empty = resolve(
        hub,
        tmp_path,
        {"name": "some/model"},
        {"name": "some/gated"},
        {"name": "some/absent"},
        {"name": "some/model", "revision": "absent"},
        {"name": "some/pickle"},
        {"name": "some/empty"},
    )
    assert files == "config.json model.safetensors tokenizer.json"
    assert "some/gated is gated on the hub" in gated and "hf auth login" in gated
    assert "no folder and no hub model named some/absent" in absent
    assert "some/model has no revision 'absent'" in revision
    assert "only a pickle checkpoint (pytorch_model.bin)" in pickle and "python -c" in pickle
    assert "no safetensors weights" in empty

    trusting = {"trust_remote_code": True, "revision": COMMIT}
    code, mistrusted, moved, borrowed = resolve(
        hub,
        tmp_path,
        {"name": "some/own", **trusting},
        {"name": "some/own", "revision": COMMIT},
        {"name": "some/own", **trusting, "revision": "f" * 40},
        {"name": "some/borrowed", **trusting, "weights": "random"},
    )
    assert code == "config.json configuration_own.py model.safetensors modeling_own.py"
    assert "its own code would have to be run" in mistrusted
    assert f"the hub gives commit {COMMIT} of some/own for {'f' * 40}" in moved
    assert "the model's code lies in another repository: other/repo--configuration_own.OwnConfig" in borrowed

    adapter, absent = resolve(hub, tmp_path, {"adapter": "some/adapter"}, {"adapter": "some/absent"})
    assert adapter == "adapter_config.json adapter_model.safetensors"
    assert "no folder and no hub model named some/absent" in absent and "where: lora.start_from" in absent

    # Without the hub, what was downloaded still serves.
    asked = ({"name": "some/model"}, {"name": "some/absent"}, {"adapter": "some/adapter"})
    again, other, adapter_again = resolve("http://127.0.0.1:9", tmp_path, *asked)
    assert again == files and adapter_again == adapter
    assert "some/absent is not a folder here, and the hub cannot be reached" in other


def test_a_silent_network_is_reported(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        (message,) = resolve(endpoint, tmp_path, {"name": "some/model"}, request_seconds=1.0)
    assert "the hub cannot be reached" in message
    # Bad input is reported within 30 s, the start of the process included.
    assert REQUEST_SECONDS < DEADLINE_SECONDS <= 20

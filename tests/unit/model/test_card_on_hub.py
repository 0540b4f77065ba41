"""The card of a hub model, against a stand-in for the hub on this machine."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from coremill.config.schema import RunConfig
from coremill.errors import InputError
from coremill.model.hub_models import card_on_hub, tensor_names_on_hub
from coremill.plan.card import ModelCard, read_card
from coremill.tasks.causal_lm import CausalLm
from unit.plan.shapes import TINY_CONFIGS, llama_tensors, safetensors_bytes


class StandInHub(BaseHTTPRequestHandler):
    """Enough of a model hub: files with ranges, names that do not exist, names that are gated."""

    files: dict[str, bytes] = {}
    bytes_sent = 0

    def log_message(self, *args: Any) -> None:
        """Quiet."""

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        name = self.path.split("?")[0]
        if "/gated/" in name:
            return self._refuse(403, "GatedRepo")
        if name.startswith("/api/models/owner/model"):
            siblings = [{"rfilename": file, "size": len(data)} for file, data in self.files.items()]
            return self._send(200, json.dumps({"id": "owner/model", "sha": "0" * 40, "siblings": siblings}).encode())
        body = self.files.get(name.split("/resolve/main/")[-1]) if "/owner/model/" in name else None
        if body is None:
            return self._refuse(404, "EntryNotFound" if "/owner/model/" in name else "RepoNotFound")
        wanted = self.headers.get("Range")
        if wanted and with_body:
            first, last = wanted.removeprefix("bytes=").split("-")
            return self._send(206, body[int(first) : int(last) + 1])
        self._send(200, body, with_body=with_body)

    def _send(self, status: int, body: bytes, *, with_body: bool = True) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", '"0123456789abcdef0123456789abcdef01234567"')
        self.send_header("X-Repo-Commit", "0" * 40)
        self.end_headers()
        if with_body:
            type(self).bytes_sent += len(body)
            self.wfile.write(body)

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[StandInHub]]:
    import huggingface_hub.constants as constants
    from huggingface_hub import hf_api

    StandInHub.files, StandInHub.bytes_sent = {}, 0
    server = ThreadingHTTPServer(("127.0.0.1", 0), StandInHub)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hf_api.api, "endpoint", endpoint)
    yield StandInHub
    server.shutdown()
    server.server_close()
    thread.join()


def card(name: str) -> ModelCard:
    return card_on_hub(name, CausalLm(RunConfig()), revision=None, weights=True, setting="model")


def test_a_hub_model_is_read_by_range_requests(hub: type[StandInHub]) -> None:
    hub.files = {
        "config.json": json.dumps(TINY_CONFIGS["llama"]).encode(),
        # A header longer than the first request brings, and far more weights than may be sent.
        "model.safetensors": safetensors_bytes(
            {**llama_tensors(tied_copy=True), "model.extra.weight": (4_000_000,)}, pad=200_000
        ),
    }
    assert card("owner/model").parameters == read_card(config=TINY_CONFIGS["llama"]).parameters + 4_000_000
    assert hub.bytes_sent < 1_000_000
    assert tensor_names_on_hub("owner/model", None) == {*llama_tensors(tied_copy=True), "model.extra.weight"}
    assert tensor_names_on_hub("nobody/nothing", None) is None


@pytest.mark.parametrize(
    ("name", "message"),
    [("gated/model", "gated"), ("nobody/nothing", "no hub model"), ("owner/model", "no safetensors")],
)
def test_what_the_hub_refuses_is_one_clear_error(hub: type[StandInHub], name: str, message: str) -> None:
    hub.files = {"config.json": b"{}"}
    with pytest.raises(InputError, match=message):
        card(name)


def test_an_unreachable_hub_is_said_at_once_and_the_cache_serves(
    hub: type[StandInHub], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hub.files = {"config.json": json.dumps(TINY_CONFIGS["llama"]).encode()}
    scratch = card_on_hub("owner/model", CausalLm(RunConfig()), revision=None, weights=False, setting="model")
    with socket.create_server(("127.0.0.1", 0)) as closed:
        nobody = f"http://127.0.0.1:{closed.getsockname()[1]}"
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", nobody)
    monkeypatch.setattr("huggingface_hub.hf_api.api.endpoint", nobody)
    assert card_on_hub("owner/model", CausalLm(RunConfig()), revision=None, weights=False, setting="model") == scratch
    with pytest.raises(InputError, match="owner/other is not a folder here, and the hub cannot be reached"):
        card("owner/other")
    assert "Retrying" not in caplog.text  # the hub's client alone does so for 23 s


def test_the_task_checks_a_cached_model_too(hub: type[StandInHub], monkeypatch: pytest.MonkeyPatch) -> None:
    hub.files = {"config.json": json.dumps({"model_type": "bert"}).encode()}
    with socket.create_server(("127.0.0.1", 0)) as closed:
        nobody = f"http://127.0.0.1:{closed.getsockname()[1]}"
    for is_reached in (True, False):
        if not is_reached:
            monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", nobody)
            monkeypatch.setattr("huggingface_hub.hf_api.api.endpoint", nobody)
        with pytest.raises(InputError, match="owner/model is an encoder"):
            card_on_hub("owner/model", CausalLm(RunConfig()), revision=None, weights=False, setting="model")

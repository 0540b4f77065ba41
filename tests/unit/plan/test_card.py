from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from coremill.errors import InputError
from coremill.plan.card import read_card, read_card_from_hub
from coremill.plan.headers import TensorHeader
from unit.plan.shapes import LLAMA_3_8B, TINY_CONFIGS


def safetensors_bytes(tensors: dict[str, tuple[int, ...]], dtype: str = "BF16", pad: int = 0) -> bytes:
    """A safetensors file without anything in its tensors worth reading."""
    header: dict[str, Any] = {"__metadata__": {"note": "x" * pad}}
    offset = 0
    for name, shape in tensors.items():
        size = 2
        for rows in shape:
            size *= rows
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(offset)


def llama_tensors(*, tied_copy: bool = False) -> dict[str, tuple[int, ...]]:
    tensors: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (250, 64), "model.norm.weight": (64,)}
    for layer in range(3):
        prefix = f"model.layers.{layer}."
        tensors |= {
            prefix + "self_attn.q_proj.weight": (64, 64),
            prefix + "self_attn.k_proj.weight": (32, 64),
            prefix + "self_attn.v_proj.weight": (32, 64),
            prefix + "self_attn.o_proj.weight": (64, 64),
            prefix + "self_attn.rotary_emb.inv_freq": (8,),
            prefix + "mlp.gate_proj.weight": (176, 64),
            prefix + "mlp.up_proj.weight": (176, 64),
            prefix + "mlp.down_proj.weight": (64, 176),
            prefix + "input_layernorm.weight": (64,),
            prefix + "post_attention_layernorm.weight": (64,),
        }
    if tied_copy:
        tensors["lm_head.weight"] = (250, 64)
    return tensors


def headers_of(tensors: dict[str, tuple[int, ...]]) -> dict[str, TensorHeader]:
    return {
        name: TensorHeader(name=name, dtype="BF16", shape=shape, file="model.safetensors", start=0, end=2)
        for name, shape in tensors.items()
    }


def test_llama_3_8b_has_its_published_size() -> None:
    card = read_card(config=LLAMA_3_8B, name="Llama-3-8B")
    assert card.parameters == 8_030_261_248
    assert card.matmul_parameters == 8_030_261_248 - 128256 * 4096 - 65 * 4096  # no lookup, no norms
    assert (card.kv_heads, card.head_dim, card.tied, card.max_positions) == (8, 128, False, 8192)


def test_flops_are_six_per_matmul_parameter_and_causal_attention() -> None:
    card = read_card(config=LLAMA_3_8B)
    attention = 6 * 32 * 512 * 4096
    assert card.flops_per_token(512) == pytest.approx(6 * card.matmul_parameters + attention)
    assert card.flops_per_token(1024) - card.flops_per_token(512) == pytest.approx(attention)


def test_headers_and_config_agree_buffers_and_the_tied_copy_left_out() -> None:
    config = {**TINY_CONFIGS["llama"], "tie_word_embeddings": True}
    from_headers = read_card(config=config, headers=headers_of(llama_tensors(tied_copy=True)))
    from_config = read_card(config=config)
    assert from_headers.parameters == from_config.parameters
    assert from_headers.matmul_parameters == from_config.matmul_parameters
    assert from_headers.groups == from_config.groups
    assert from_headers.disk_dtype == "BF16"


def test_an_unknown_family_is_counted_by_its_headers() -> None:
    config = {**TINY_CONFIGS["llama"], "model_type": "brandnew"}
    card = read_card(config=config, headers=headers_of(llama_tensors(tied_copy=True)))
    assert card.parameters == read_card(config=TINY_CONFIGS["llama"]).parameters
    with pytest.raises(InputError, match="brandnew"):
        read_card(config=config)


def test_of_experts_only_the_routed_ones_are_multiplied() -> None:
    config = {**TINY_CONFIGS["llama"], "model_type": "mixture", "num_local_experts": 4, "num_experts_per_tok": 1}
    tensors = llama_tensors(tied_copy=True)
    plain = read_card(config=config, headers=headers_of(tensors))
    tensors |= {f"model.layers.0.mlp.experts.{expert}.w1.weight": (176, 64) for expert in range(4)}
    mixed = read_card(config=config, headers=headers_of(tensors))
    assert mixed.parameters - plain.parameters == 4 * 176 * 64
    assert mixed.matmul_parameters - plain.matmul_parameters == 176 * 64


def test_a_folder_is_read_by_its_headers(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY_CONFIGS["llama"]))
    (tmp_path / "model.safetensors").write_bytes(safetensors_bytes(llama_tensors(tied_copy=True)))
    card = read_card(tmp_path)
    assert card.parameters == read_card(config=TINY_CONFIGS["llama"]).parameters
    assert card.disk_bytes > 2 * card.parameters
    assert read_card(tmp_path, pretrained=False).disk_bytes == 0


@pytest.mark.parametrize("text", [None, "{", "[]", '{"model_type": "llama", "hidden_size": "big"}'])
def test_a_bad_config_is_one_clear_error(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(InputError):
        read_card(tmp_path)


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
        body = self.files.get(name.split("/resolve/main/")[-1]) if "/owner/model/" in name else None
        if body is None:
            return self._refuse(404, "EntryNotFound" if "/owner/model/" in name else "RepoNotFound")
        total, status = len(body), 200
        wanted = self.headers.get("Range")
        if wanted:
            first, last = wanted.removeprefix("bytes=").split("-")
            body, status = body[int(first) : int(last) + 1], 206
        self.send_response(status)
        self.send_header("Content-Length", str(len(body) if with_body else total))
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


def test_a_hub_model_is_read_by_range_requests(hub: type[StandInHub]) -> None:
    hub.files = {
        "config.json": json.dumps(TINY_CONFIGS["llama"]).encode(),
        # A header longer than the first request brings, and far more weights than may be sent.
        "model.safetensors": safetensors_bytes(
            {**llama_tensors(tied_copy=True), "model.extra.weight": (4_000_000,)}, pad=200_000
        ),
    }
    card = read_card_from_hub("owner/model")
    assert card.parameters == read_card(config=TINY_CONFIGS["llama"]).parameters + 4_000_000
    assert hub.bytes_sent < 1_000_000


@pytest.mark.parametrize(
    ("name", "message"),
    [("gated/model", "gated"), ("nobody/nothing", "no model"), ("owner/model", "safetensors|config.json")],
)
def test_what_the_hub_refuses_is_one_clear_error(hub: type[StandInHub], name: str, message: str) -> None:
    hub.files = {"config.json": b"{}"}
    with pytest.raises(InputError, match=message):
        read_card_from_hub(name)


def test_planning_imports_no_torch() -> None:
    script = """
import json, sys
from coremill.config.schema import RunConfig
from coremill.hardware.instances import fleet_of
from coremill.plan.card import read_card
from coremill.plan.planner import make_plan
plan = make_plan(RunConfig(), fleet_of("4xc7i.8xlarge"), read_card(config=json.loads(sys.argv[1])))
json.dumps(plan.to_json())
print(sorted({"torch", "transformers", "numpy", "huggingface_hub"} & set(sys.modules)))
"""
    done = subprocess.run(
        [sys.executable, "-c", script, json.dumps(LLAMA_3_8B)], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"

"""Safetensors headers: offsets, and every way a folder can be wrong."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from coremill.errors import InputError
from coremill.plan.headers import parse_header, read_headers, weight_files


def raw(document: Any, data: bytes = b"") -> bytes:
    text = document if isinstance(document, bytes) else json.dumps(document).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(shape: list[int], start: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def message_of(folder: Path) -> str:
    with pytest.raises(InputError) as caught:
        read_headers(folder)
    assert caught.value.exit_code == 78
    return str(caught.value)


def test_offsets_are_absolute(tmp_path: Path) -> None:
    document = {"__metadata__": {"format": "pt"}, "b": entry([2], 24, 28, "BF16"), "a": entry([2, 3], 0, 24)}
    content = raw(document, bytes(28))
    (tmp_path / "model.safetensors").write_bytes(content)
    headers = read_headers(tmp_path)
    base = len(content) - 28
    assert (headers["a"].start, headers["a"].end, headers["a"].bytes) == (base, base + 24, 24)
    assert (headers["b"].shape, headers["b"].dtype, headers["b"].file) == ((2,), "BF16", "model.safetensors")
    # The same from a prefix, as a range request brings it.
    assert parse_header(content[: base + 5], "model.safetensors", len(content)) == headers


def test_matches_the_reference_implementation(tmp_path: Path) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    arrays = {"x": np.arange(12, dtype=np.float32).reshape(3, 4), "y": np.arange(5, dtype=np.float16)}
    save_file(arrays, tmp_path / "model.safetensors")
    content = (tmp_path / "model.safetensors").read_bytes()
    for name, header in read_headers(tmp_path).items():
        assert content[header.start : header.end] == arrays[name].tobytes()


def test_indexed_files(tmp_path: Path) -> None:
    for number in (1, 2):
        (tmp_path / f"model-{number}.safetensors").write_bytes(raw({f"t{number}": entry([1], 0, 4)}, bytes(4)))
    weight_map = {"t1": "model-1.safetensors", "t2": "model-2.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert {name: header.file for name, header in read_headers(tmp_path).items()} == weight_map
    assert weight_files(tmp_path) == ("model-1.safetensors", "model-2.safetensors")

    (tmp_path / "model-2.safetensors").unlink()
    assert "1 of 2 weight files are missing: model-2.safetensors" in message_of(tmp_path)


def test_index_that_names_a_tensor_no_file_has(tmp_path: Path) -> None:
    (tmp_path / "m.safetensors").write_bytes(raw({"t": entry([1], 0, 4)}, bytes(4)))
    index = {"weight_map": {"t": "m.safetensors", "u": "m.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "1 tensors named in model.safetensors.index.json are in no file, first u" in message_of(tmp_path)


@pytest.mark.parametrize("file", ["../secret", "/etc/passwd", 3])
def test_index_that_leaves_the_folder(tmp_path: Path, file: Any) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"t": file}}))
    assert "names a file outside the folder" in message_of(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": {}}'])
def test_broken_index(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    assert "model.safetensors.index.json" in message_of(tmp_path)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "it has 0 bytes"),
        (b"\x00" * 6, "it has 6 bytes"),
        (b"\xff" * 40, "this is not a safetensors file"),
        (raw({"t": entry([2], 0, 8)}, bytes(5)), "truncated: its header describes"),
        (raw({"t": entry([2], 0, 8)})[:20], "truncated: the header alone needs"),
        (raw(b"not json at all"), "its header is not JSON"),
        (raw([1, 2]), "its header is not a JSON object"),
        (raw({"t": {"dtype": "F32"}}), "no dtype, shape and data_offsets for t"),
        (raw({"t": entry([2], 0, 4)}, bytes(8)), "needs 8 bytes, its header gives it 4"),
        (raw({"t": entry([-2], 0, 8)}, bytes(8)), "shape [-2]"),
        (raw({"t": entry([2], 8, 0)}, bytes(8)), "at bytes 8 to 0"),
        (raw({"a": entry([2], 0, 8), "b": entry([2], 4, 12)}, bytes(12)), "tensor b overlaps tensor a"),
    ],
)
def test_damaged_files(tmp_path: Path, content: bytes, expected: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    message = message_of(tmp_path)
    assert "model.safetensors is damaged" in message
    assert expected in message
    assert "download or copy the file again" in message
    assert str(tmp_path) in message


def test_unknown_dtype(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(raw({"t": entry([2], 0, 8, "Q3")}, bytes(8)))
    assert "dtype 'Q3', which is not known" in message_of(tmp_path)


def test_pickle_only_gets_the_conversion_command(tmp_path: Path) -> None:
    folder = tmp_path / "it's here"
    folder.mkdir()
    (folder / "pytorch_model.bin").write_bytes(b"\x80")
    message = message_of(folder)
    assert "only a pickle checkpoint (pytorch_model.bin)" in message
    command = next(line for line in message.splitlines() if line.strip().startswith("python -c"))
    program = shlex.split(command)[2]
    compile(program, "command", "exec")
    assert f'AutoModelForCausalLM.from_pretrained("{folder}", dtype="auto")' in program
    assert f'.save_pretrained("{folder}-safetensors")' in program


def test_folders_without_weights(tmp_path: Path) -> None:
    assert "no such model folder" in message_of(tmp_path / "absent")
    (tmp_path / "training_args.bin").write_bytes(b"")
    assert "no weights in the model folder" in message_of(tmp_path)
    (tmp_path / "other.safetensors").write_bytes(raw({}))
    assert "nothing says which files make up the model" in message_of(tmp_path)
    (tmp_path / "other.safetensors").rename(tmp_path / "model.safetensors")
    assert "hold no tensors" in message_of(tmp_path)

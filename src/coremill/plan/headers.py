"""Safetensors headers: which tensor lies where in which file, without reading a single weight.

A safetensors file is 8 bytes of header length (little endian), a JSON header, and the bytes of the tensors, each one
contiguous and row-major: enough for a planner to size a model, and for a rank to read its own rows by byte range.
No torch here, and no safetensors package: its reader maps whole files, and mapped pages count as memory of the process.
"""

from __future__ import annotations

import json
import math
import os
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coremill.errors import InputError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
LENGTH_BYTES = 8
# The reference implementation refuses larger headers too; any other file would be read as a header of exabytes.
MAX_HEADER_BYTES = 100_000_000

_DTYPES_BY_BITS = {
    64: "F64 I64 U64 C64",
    32: "F32 I32 U32",
    16: "F16 BF16 I16 U16",
    8: "I8 U8 BOOL F8_E4M3 F8_E5M2 F8_E4M3FNUZ F8_E5M2FNUZ F8_E8M0",
    6: "F6_E2M3 F6_E3M2",
    4: "F4",
}
DTYPE_BITS = {dtype: bits for bits, dtypes in _DTYPES_BY_BITS.items() for dtype in dtypes.split()}


@dataclass(frozen=True)
class TensorHeader:
    """One tensor in a file; `start` and `end` are absolute byte offsets in that file."""

    name: str
    dtype: str  # in the words of safetensors: F32, BF16, ...
    shape: tuple[int, ...]
    file: str  # name of the file inside the model folder
    start: int
    end: int

    @property
    def bytes(self) -> int:
        return self.end - self.start


def header_bytes_of(prefix: bytes, file: str) -> int:
    """Length of the JSON header, from the first eight bytes of a file."""
    if len(prefix) < LENGTH_BYTES:
        raise _damaged(file, f"it has {len(prefix)} bytes; a safetensors file starts with 8 bytes of header length")
    length = int.from_bytes(prefix[:LENGTH_BYTES], "little")
    if not 2 <= length <= MAX_HEADER_BYTES:
        raise _damaged(file, f"its first 8 bytes say the header has {length:,} bytes: this is not a safetensors file")
    return length


def parse_header(prefix: bytes, file: str, file_size: int) -> dict[str, TensorHeader]:
    """The tensors of one file, from its first bytes (at least 8 + header length) and its size.

    The prefix may come from a disk or from an HTTP range request; bytes after the header are ignored.
    """
    length = header_bytes_of(prefix, file)
    base = LENGTH_BYTES + length
    if file_size < base:
        raise _damaged(file, f"truncated: the header alone needs {base:,} bytes, the file has {file_size:,}")
    if len(prefix) < base:
        raise ValueError(f"{file}: parse_header needs the first {base} bytes, got {len(prefix)}")
    try:
        document = json.loads(prefix[LENGTH_BYTES:base])
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise _damaged(file, f"its header is not JSON ({error})") from None
    if not isinstance(document, dict):
        raise _damaged(file, "its header is not a JSON object")
    tensors = {
        name: _parse_entry(name, entry, file, base) for name, entry in document.items() if name != "__metadata__"
    }
    _check_layout(tensors.values(), file, base, file_size)
    return tensors


def read_file_header(path: Path) -> dict[str, TensorHeader]:
    """The tensors of one safetensors file on disk."""
    try:
        with path.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            prefix = stream.read(LENGTH_BYTES)
            length = header_bytes_of(prefix, path.name)
            prefix += stream.read(min(length, max(size - LENGTH_BYTES, 0)))
        return parse_header(prefix, path.name, size)
    except InputError as error:
        error.where = str(path)
        raise
    except OSError as error:
        raise InputError(f"cannot read {path.name}: {error.strerror}", where=str(path)) from None


def weight_files(folder: Path) -> tuple[str, ...]:
    """Names of the safetensors files that make up the model in this folder."""
    if (folder / SINGLE_FILE).is_file():
        return (SINGLE_FILE,)
    if (folder / INDEX_FILE).is_file():
        files = tuple(sorted(set(read_index(folder).values())))
        missing = [name for name in files if not (folder / name).is_file()]
        if missing:
            raise InputError(
                f"{len(missing)} of {len(files)} weight files are missing: {', '.join(missing[:4])}",
                where=str(folder),
                why=f"{INDEX_FILE} names them",
                do="download or copy the folder again",
            )
        return files
    raise _no_weights(folder)


def read_index(folder: Path) -> dict[str, str]:
    """The weight map of an indexed model: tensor name to file name."""
    path = folder / INDEX_FILE
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        what = f"{INDEX_FILE} cannot be read: {error}"
        raise InputError(what, where=str(path), do="download or copy it again") from None
    return parse_index(document, str(path))


def parse_index(document: Any, where: str) -> dict[str, str]:
    """The weight map of an index document; file names may not leave the folder."""
    weight_map = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise InputError(f"{INDEX_FILE} has no weight_map", where=where, do="download or copy it again")
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            what = f"{INDEX_FILE} names a file outside the folder: {file!r}"
            raise InputError(what, where=where, why=f"for tensor {name}")
    return dict(weight_map)


def read_headers(folder: Path) -> dict[str, TensorHeader]:
    """All tensors of a model folder by name, checked: no file is short, no shard is missing, no two tensors overlap."""
    files = weight_files(folder)
    tensors: dict[str, TensorHeader] = {}
    for file in files:
        for name, header in read_file_header(folder / file).items():
            tensors.setdefault(name, header)
    if files != (SINGLE_FILE,):
        absent = sorted(set(read_index(folder)) - set(tensors))
        if absent:
            raise InputError(
                f"{len(absent)} tensors named in {INDEX_FILE} are in no file, first {absent[0]}",
                where=str(folder),
                do="download or copy the folder again",
            )
    if not tensors:
        raise InputError("the weight files hold no tensors", where=str(folder))
    return tensors


def _parse_entry(name: str, entry: Any, file: str, base: int) -> TensorHeader:
    """One entry of the header, with offsets made absolute."""
    try:
        dtype, shape, (start, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    except (KeyError, TypeError, ValueError):
        raise _damaged(file, f"its header has no dtype, shape and data_offsets for {name}") from None
    if dtype not in DTYPE_BITS:
        raise InputError(f"{file}: tensor {name} has dtype {dtype!r}, which is not known", where=file)
    if not all(type(value) is int and value >= 0 for value in (*shape, start, end)) or end < start:
        raise _damaged(file, f"its header gives tensor {name} shape {list(shape)} at bytes {start} to {end}")
    expected = (math.prod(shape) * DTYPE_BITS[dtype] + 7) // 8
    if end - start != expected:
        needs = f"tensor {name} ({dtype} {list(shape)}) needs {expected:,} bytes"
        raise _damaged(file, f"{needs}, its header gives it {end - start:,}")
    return TensorHeader(name, dtype, shape, file, base + start, base + end)


def _check_layout(tensors: Iterable[TensorHeader], file: str, base: int, file_size: int) -> None:
    """Refuses a file that is shorter than its header says, and tensors that share bytes."""
    position = base
    previous = "the header"
    for tensor in sorted(tensors, key=lambda item: (item.start, item.end)):
        if tensor.start < position:
            raise _damaged(file, f"tensor {tensor.name} overlaps {previous}")
        position, previous = tensor.end, f"tensor {tensor.name}"
    if position > file_size:
        raise _damaged(file, f"truncated: its header describes {position:,} bytes, the file has {file_size:,}")


def _damaged(file: str, why: str) -> InputError:
    return InputError(f"{file} is damaged", where=file, why=why, do="download or copy the file again")


def _no_weights(folder: Path) -> InputError:
    """What to say about a folder without safetensors: a pickle checkpoint gets the command that converts it."""
    if not folder.is_dir():
        return InputError(f"no such model folder: {folder}", do="check the path")
    pickles = pickle_files(path.name for path in folder.iterdir())
    if pickles:
        return pickle_refusal(str(folder), pickles[0], f"{str(folder).rstrip('/')}-safetensors")
    what, why = "no weights in the model folder", f"neither {SINGLE_FILE} nor {INDEX_FILE} is there"
    do = "give a folder with weights, or set model.weights=random to start from scratch"
    if others := sorted(path.name for path in folder.glob("*.safetensors")):
        what = f"no {SINGLE_FILE} and no {INDEX_FILE} in the model folder"
        why = f"it has {', '.join(others[:3])}, but nothing says which files make up the model"
        do = f"add the index, or rename the file to {SINGLE_FILE} if it is the whole model"
    return InputError(what, where=str(folder), why=why, do=do)


def pickle_files(names: Iterable[str]) -> list[str]:
    """The names that are weights in a pickle; what trainers leave with the weights does not count."""
    beside = ("training_args", "optimizer", "scheduler", "rng_state", "scaler")
    return sorted(name for name in names if name.endswith((".bin", ".pt", ".pth")) and not name.startswith(beside))


def pickle_refusal(model: str, file: str, destination: str) -> InputError:
    """The refusal of a pickle checkpoint, with the command that turns it into safetensors."""
    source, target = json.dumps(model), json.dumps(destination)
    program = (
        "from transformers import AutoModelForCausalLM, AutoTokenizer; "
        f'AutoModelForCausalLM.from_pretrained({source}, dtype="auto").save_pretrained({target}); '
        f"AutoTokenizer.from_pretrained({source}).save_pretrained({target})"
    )
    return InputError(
        f"the model has only a pickle checkpoint ({file})",
        where=model,
        why="coremill reads safetensors only: unpickling a file can run any code that someone put into it",
        do=f"if you trust its source, convert it once, then train from {destination}:\n"
        f"    python -c {shlex.quote(program)}",
    )

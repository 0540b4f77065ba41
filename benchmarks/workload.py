"""What every contender trains: one corpus, one tokenizer, one Llama shape with random weights. Made once, no network.

The corpus is coremill's built-in one, the source text of the running Python's standard library: every sixth module,
about 2 MB, so that no contender spends more time tokenising than training. It is written in three forms, because the
contenders read three:

- `paragraphs.jsonl`, one blank-line separated block a row: for the recipe that pads each dataset row to 512;
- `rows.npy`, packed rows of 512 tokens, documents separated by the end token: for the peers that take ready rows;
- `documents.jsonl`, one module a row: for coremill, which tokenises and packs by itself, by the same rule.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from coremill.data.built_in_tokenizer import built_in_tokenizer
from coremill.data.sources import built_in_files

SEQUENCE_LENGTH = 512
MODULE_STRIDE = 6  # every sixth module
SEED = 7
# Raise by one whenever what is written below changes: an older folder is then not taken up again.
LAYOUT_VERSION = 4

LLAMA_SHAPE: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 24_000,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": SEQUENCE_LENGTH,
    "tie_word_embeddings": False,
}
# For slow links: 13 M parameters, most of them in decoder layers as in the large models it stands for.
SMALL_LLAMA_SHAPE: dict[str, Any] = {
    **LLAMA_SHAPE,
    "vocab_size": 4096,
    "hidden_size": 384,
    "intermediate_size": 960,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
}
SHAPES = {"52M": LLAMA_SHAPE, "13M": SMALL_LLAMA_SHAPE}


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A finished workload folder and what was counted while it was made."""

    folder: str
    parameters: int
    documents: int
    tokens: int  # of all documents, end tokens included
    rows: int  # packed rows
    paragraphs: int
    paragraph_tokens: int  # real tokens after truncation to 512: what the padded recipe trains on

    @property
    def real_share_when_padded(self) -> float:
        """Share of real tokens where every paragraph is padded to 512."""
        return self.paragraph_tokens / (self.paragraphs * SEQUENCE_LENGTH)

    @property
    def model(self) -> Path:
        """Hugging Face folder: config, safetensors, tokenizer."""
        return Path(self.folder) / "model"

    @property
    def packed_rows(self) -> Path:
        """Array of int32, [rows, 512]."""
        return Path(self.folder) / "rows.npy"

    @property
    def paragraphs_file(self) -> Path:
        """One paragraph a line, column text."""
        return Path(self.folder) / "paragraphs.jsonl"

    @property
    def documents_file(self) -> Path:
        """One module a line, column text."""
        return Path(self.folder) / "documents.jsonl"


def llama_parameters(shape: dict[str, Any]) -> int:
    """Parameters of an untied Llama shape, counted from its config."""
    hidden, intermediate = shape["hidden_size"], shape["intermediate_size"]
    key_value = hidden // shape["num_attention_heads"] * shape["num_key_value_heads"]
    layer = 2 * hidden * hidden + 2 * hidden * key_value + 3 * hidden * intermediate + 2 * hidden
    return int(shape["num_hidden_layers"] * layer + 2 * shape["vocab_size"] * hidden + hidden)


def modules(stride: int) -> Iterator[str]:
    """Texts of every `stride`-th file of coremill's built-in corpus, in the order of their paths."""
    for path in built_in_files()[::stride]:
        text = path.read_text(encoding="utf-8", errors="ignore")
        if text.strip():
            yield text


def paragraphs_of(text: str) -> list[str]:
    """Blocks between blank lines; a block of one line joins the next, as a heading belongs to what follows.

    Padded to 512 this gives about 12 % real tokens. wikitext-2, which the padded recipe is written for, has 13 %;
    without the joining it would be under 11 %, which would make that recipe look worse than it is.
    """
    paragraphs: list[str] = []
    waiting: list[str] = []
    for block in re.split(r"\n\s*\n", text):
        lines = [line for line in block.splitlines() if line.strip()]
        waiting += lines
        if len(lines) > 1:
            paragraphs.append("\n".join(waiting))
            waiting = []
    if waiting:
        paragraphs.append("\n".join(waiting))
    return paragraphs


def pack(documents: list[list[int]], end_token_id: int, length: int) -> tuple[list[int], int]:
    """Concatenate with an end token after each document; return whole rows laid end to end and the number of rows."""
    stream = [token for document in documents for token in (*document, end_token_id)]
    rows = len(stream) // length
    return stream[: rows * length], rows


def prepare(cache: Path, shape: dict[str, Any] = LLAMA_SHAPE) -> Workload:
    """The workload under `cache`, made now unless it is there already."""
    key = json.dumps([LAYOUT_VERSION, shape, SEQUENCE_LENGTH, MODULE_STRIDE, SEED, sys.version])
    folder = cache / f"workload-{hashlib.sha256(key.encode()).hexdigest()[:12]}"
    summary = folder / "workload.json"
    if not summary.exists():
        folder.mkdir(parents=True, exist_ok=True)
        workload = _make(folder, shape)
        unfinished = folder / "workload.json.partial"
        unfinished.write_text(json.dumps(asdict(workload), indent=1))
        unfinished.rename(summary)
    return Workload(**{**json.loads(summary.read_text()), "folder": str(folder)})


def load(folder: Path) -> Workload:
    """Read back a finished workload folder."""
    return Workload(**{**json.loads((folder / "workload.json").read_text()), "folder": str(folder)})


def _make(folder: Path, shape: dict[str, Any]) -> Workload:
    import numpy as np

    model_folder = folder / "model"
    tokenizer = _make_tokenizer(model_folder, shape["vocab_size"])
    parameters = _make_model(model_folder, shape, tokenizer.eos_token_id)

    documents = list(modules(MODULE_STRIDE))
    paragraphs = [paragraph for document in documents for paragraph in paragraphs_of(document)]
    _write_jsonl(folder / "documents.jsonl", documents)
    _write_jsonl(folder / "paragraphs.jsonl", paragraphs)

    encoded = tokenizer(documents)["input_ids"]
    stream, rows = pack(encoded, tokenizer.eos_token_id, SEQUENCE_LENGTH)
    np.save(folder / "rows.npy", np.asarray(stream, dtype=np.int32).reshape(rows, SEQUENCE_LENGTH))
    truncated = tokenizer(paragraphs, truncation=True, max_length=SEQUENCE_LENGTH)["input_ids"]
    return Workload(
        folder=str(folder),
        parameters=parameters,
        documents=len(documents),
        tokens=sum(map(len, encoded)) + len(documents),
        rows=rows,
        paragraphs=len(paragraphs),
        paragraph_tokens=sum(map(len, truncated)),
    )


def _make_tokenizer(model_folder: Path, vocabulary: int) -> Any:
    """Byte-level BPE, trained on the whole library: the slice alone would have its rarer words cut finer."""
    from transformers import AutoTokenizer

    trained = built_in_tokenizer(model_folder.parent, vocabulary=vocabulary)
    model_folder.mkdir(exist_ok=True)
    for file in trained.iterdir():
        if file.is_file():
            shutil.copy(file, model_folder / file.name)
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    if len(tokenizer) != vocabulary:
        raise RuntimeError(f"the standard library gave {len(tokenizer)} words instead of {vocabulary}")
    return tokenizer


def _make_model(model_folder: Path, shape: dict[str, Any], end_token_id: int) -> int:
    """Random weights in fp32 safetensors; the count of parameters is checked against the shape's arithmetic."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(SEED)
    config = AutoConfig.for_model(**shape, bos_token_id=end_token_id, eos_token_id=end_token_id)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if parameters != llama_parameters(shape):
        raise RuntimeError(f"{parameters} parameters where the shape says {llama_parameters(shape)}")
    model.save_pretrained(model_folder)
    return int(parameters)


def _write_jsonl(path: Path, texts: list[str]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for text in texts:
            file.write(json.dumps({"text": text}) + "\n")


if __name__ == "__main__":
    # A process of its own, so that the driver never holds torch or the corpus in memory.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    print(prepare(Path(sys.argv[1]), SHAPES[sys.argv[2]]).folder)

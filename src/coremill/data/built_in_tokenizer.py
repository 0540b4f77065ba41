"""The built-in tokenizer: byte-level BPE made on the spot from the built-in corpus, as a plain Hugging Face folder.

Byte-level, so that any text can be written with it; deterministic, so that the same Python gives the same ids.
Training takes about 3 s and 160 MB, in a process of its own, once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path

from coremill.config.schema import BUILT_IN
from coremill.data.cache import build_once
from coremill.data.child_process import run_in_child
from coremill.data.packed import Progress
from coremill.data.sources import identity_of, resolve_source
from coremill.errors import InputError

END_TOKEN = "<|end|>"
DEFAULT_VOCABULARY = 4096
SMALLEST_VOCABULARY = 257  # 256 bytes and the end token
VERSION = 1  # part of the key: raise it when training changes


def built_in_tokenizer(
    cache: Path, *, vocabulary: int = DEFAULT_VOCABULARY, progress: Callable[[Progress], None] | None = None
) -> Path:
    """The folder of the tokenizer, trained where it is not there yet."""
    if vocabulary < SMALLEST_VOCABULARY:
        raise InputError(
            f"a byte-level tokenizer cannot have {vocabulary} tokens",
            why="256 bytes and the end token must be among them",
            do=f"use {SMALLEST_VOCABULARY} or more",
        )
    source = resolve_source(BUILT_IN, column="text", split="train")
    key = hashlib.blake2b(repr((VERSION, identity_of(source), vocabulary)).encode(), digest_size=16).hexdigest()
    final = cache.absolute() / "tokenizers" / key

    def build(partial: Path) -> None:
        job = {
            "job": "train tokenizer",
            "files": list(source.files),
            "vocabulary": vocabulary,
            "destination": str(partial),
        }
        run_in_child(job, progress)
        if progress is not None:
            progress(Progress(0, 0, None, 0, "train tokenizer", is_done=True))

    def on_wait() -> None:
        if progress is not None:
            progress(Progress(0, 0, None, 0, "wait"))

    build_once(final, is_whole=_is_whole, build=build, on_wait=on_wait)
    return final


def train_into(folder: Path, vocabulary: int, files: list[str], on_progress: Callable[[Progress], None]) -> None:
    """Train and save; runs in the child."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(files, on_progress), trainer)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_TOKEN,
        "bos_token": None,
        "pad_token": END_TOKEN,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1 << 20,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    tokenizer.save(str(folder / "tokenizer.json"))


def _texts(files: list[str], on_progress: Callable[[Progress], None]) -> Iterator[str]:
    total = sum(Path(file).stat().st_size for file in files)
    done = 0
    for documents, file in enumerate(files, 1):
        data = Path(file).read_bytes()
        done += len(data)
        on_progress(Progress(documents, done, total, 0, "train tokenizer"))
        try:
            yield data.decode("utf-8")
        except UnicodeDecodeError:  # left out of the built-in corpus
            continue


def _is_whole(folder: Path) -> bool:
    try:
        settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        vocabulary = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return bool(settings.get("eos_token") == END_TOKEN and vocabulary.get("model"))

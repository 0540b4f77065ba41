"""A byte-level tokenizer of 300 tokens, made in milliseconds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CORPUS = ["the mill turns and the store holds", "numbers go in\nnumbers come out\n", "ünïcödé ∑ 文字 🙂"]


def make_tokenizer(folder: Path, *, end_token: str | None = "<end>", vocabulary: int = 300) -> Path:
    """A small byte-level tokenizer, so that any text can be encoded."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    if end_token is not None:
        settings["eos_token"] = end_token
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder

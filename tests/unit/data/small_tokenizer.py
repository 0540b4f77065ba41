"""A byte-level tokenizer of 300 tokens, made in milliseconds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CORPUS = ["the mill turns and the store holds", "numbers go in\nnumbers come out\n", "ünïcödé ∑ 文字 🙂"]


def make_tokenizer(
    folder: Path, *, end_token: str | None = "<end>", vocabulary: int = 300, around: str | None = None
) -> Path:
    """A small byte-level tokenizer, so that any text can be encoded; `around`: what it adds, such as `<begin> $A`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<end>"] if around is None else ["<end>", "<begin>", "<mask>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    if around is not None:
        special = [(token, tokenizer.token_to_id(token)) for token in ("<end>", "<begin>", "<mask>")]
        tokenizer.post_processor = processors.TemplateProcessing(single=around, special_tokens=special)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    if end_token is not None:
        settings["eos_token"] = end_token
    if around is not None:
        settings["bos_token"] = "<begin>"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder

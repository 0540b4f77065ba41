"""Whether a tokenizer that the run file names speaks the language of the model: the same id for the same word.

A model's own tokenizer is taken as it is. Another one has to fit the embedding, and where weights are pretrained no id
may mean another word than it did: the model would read other words, learn to, and be exported so. Read from the
tokenizers' files, without loading either; no torch here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from coremill.data.tokenizer_files import tokenizer_identity
from coremill.errors import InputError
from coremill.model.source import ModelFolder, has_tokenizer


def require_fitting_tokenizer(name: str | None, folder: Path, model: ModelFolder, vocabulary_rows: int) -> str | None:
    """Refuse a named tokenizer that was made for another model; in words, what could not be compared."""
    if name is None or folder == model.folder:
        return None
    words = vocabulary_of(folder)
    if words and max(words.values()) >= vocabulary_rows:
        raise InputError(
            f"the tokenizer {name} has more words than {model.description}: ids up to {max(words.values())}",
            where="tokenizer",
            why=f"the model's embedding has {vocabulary_rows} rows, ids 0 to {vocabulary_rows - 1}",
            do="leave the key tokenizer out to use the model's own, or choose a model with as many rows",
        )
    if model.weights != "pretrained":
        return None
    if not has_tokenizer(model.folder):
        return f"{model.description} has no tokenizer of its own: that {name} is the right one could not be checked"
    if tokenizer_identity(folder) == tokenizer_identity(model.folder):
        return None
    own = vocabulary_of(model.folder)
    if words is None or own is None:
        return f"the words of the tokenizer {name} could not be compared with the model's: not in a form we can read"
    differing = differing_words(own, words)
    if differing:
        token_id, theirs, ours = differing[0]
        raise InputError(
            f"the tokenizer {name} was made for another model than {model.description}",
            where="tokenizer",
            why=f"its id {token_id} is {theirs!r}, the model's own tokenizer has {ours!r} there"
            f" ({len(differing):,} of {len(words):,} words differ): pretrained weights would read other words",
            do="leave the key tokenizer out to use the model's own, or train from scratch: model.weights: random",
        )
    return None


def differing_words(own: dict[str, int], named: dict[str, int]) -> list[tuple[int, str, str | None]]:
    """Id, the named tokenizer's word and the model's, wherever one id has two words or one word two ids.

    Words that only one of them has, at ids that the other does not use, are no difference.
    """
    word_of = {token_id: word for word, token_id in own.items()}
    found = [
        (token_id, word, word_of.get(token_id))
        for word, token_id in named.items()
        if word_of.get(token_id, word) != word or own.get(word, token_id) != token_id
    ]
    return sorted(found, key=lambda each: each[0])


def vocabulary_of(folder: Path) -> dict[str, int] | None:
    """Words with their ids, as the files of the folder list them; None where they are in no form we can read."""
    try:
        if (folder / "tokenizer.json").is_file():
            document = _json(folder / "tokenizer.json")
            listed = document["model"]["vocab"]
            if isinstance(listed, list):  # pieces with their scores, the id is the place
                listed = {piece: token_id for token_id, (piece, _) in enumerate(listed)}
            return {**listed, **{added["content"]: added["id"] for added in document.get("added_tokens") or ()}}
        if (folder / "vocab.json").is_file():
            added = folder / "added_tokens.json"
            return {**_json(folder / "vocab.json"), **(_json(added) if added.is_file() else {})}
        if (folder / "vocab.txt").is_file():
            lines = (folder / "vocab.txt").read_text(encoding="utf-8").splitlines()
            return {word: token_id for token_id, word in enumerate(lines)}
    except (OSError, ValueError, KeyError, TypeError):
        return None  # who loads it says what is wrong
    return None


def _json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))

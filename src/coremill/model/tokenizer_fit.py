"""Whether a tokenizer that the run file names speaks the language of the model: the same id for the same word.

A model's own tokenizer is taken as it is, and so is a copy of it. Another one's words have to fit the embedding, and
where weights are pretrained no id may mean another word than it did: the model would read other words, learn to, and be
exported so. Tokens that were added to the words (special ones, chat's, padding) and names kept free for them may
differ: variants of one model do. That is said; an id beyond the embedding is refused where the data has it
(data/packing.py). Read from the tokenizers' files, without loading either; no torch here.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coremill.data.tokenizer_files import tokenizer_identity
from coremill.errors import InputError
from coremill.model.source import ModelFolder, has_tokenizer
from coremill.plan.words import plural

OWN_INSTEAD = "leave the key tokenizer out to use the model's own"
# Names that stand among the ordinary words of some tokenizers (Gemma, BERT, T5) for whoever needs a token later.
_KEPT_FREE = re.compile(r"[<\[].*(unused|reserved|extra_id|placeholder|dummy|control).*[>\]]", re.IGNORECASE)


@dataclass(frozen=True)
class Vocabulary:
    """Words with their ids; which of them were added to those that the tokenizer was trained to."""

    ids: dict[str, int]
    added: frozenset[str] = frozenset()

    def is_ordinary(self, word: str) -> bool:
        """A word of the language, and none of the special, added or free ones."""
        return word not in self.added and not _KEPT_FREE.fullmatch(word)


@dataclass(frozen=True)
class Difference:
    """An id of the named tokenizer whose word the model does not know it by."""

    token_id: int
    named: str
    own: str | None  # None: the model has that word elsewhere, and none here
    is_ordinary: bool


def require_fitting_tokenizer(name: str | None, folder: Path, model: ModelFolder, vocabulary_rows: int) -> str | None:
    """Refuse a named tokenizer that was made for another model; in words, what differs or could not be compared."""
    if name is None or folder == model.folder:
        return None
    has_own = has_tokenizer(model.folder)
    if has_own and tokenizer_identity(folder) == tokenizer_identity(model.folder):
        return None
    words = vocabulary_of(folder)
    own = vocabulary_of(model.folder) if has_own else None
    notes = [] if words is None else [_note_on_rows(name, words, own, model, vocabulary_rows)]
    if model.weights == "pretrained":
        if not has_own:
            notes.append(
                f"{model.description} has no tokenizer of its own: that {name} is the right one could not be checked"
            )
        elif words is None or own is None:
            notes.append(
                f"the words of the tokenizer {name} could not be compared with the model's: not in a form we can read"
            )
        else:
            notes.append(_note_on_words(name, words, own, model))
    return "; ".join(note for note in notes if note is not None) or None


def _note_on_rows(
    name: str, words: Vocabulary, own: Vocabulary | None, model: ModelFolder, vocabulary_rows: int
) -> str | None:
    """Refuse ordinary words beyond the embedding, unless the model's own tokenizer has them there too."""
    beyond = {
        word: token_id
        for word, token_id in words.ids.items()
        if token_id >= vocabulary_rows and (own is None or own.ids.get(word) != token_id)
    }
    if not beyond:
        return None
    rows = f"{vocabulary_rows} rows, ids 0 to {vocabulary_rows - 1}"
    if any(words.is_ordinary(word) for word in beyond):
        raise InputError(
            f"the tokenizer {name} has more words than {model.description}: ids up to {max(beyond.values())}",
            where="tokenizer",
            why=f"the model's embedding has {rows}",
            do=f"{OWN_INSTEAD}, or choose a model with as many rows",
        )
    first = min(beyond, key=lambda word: beyond[word])
    count = plural(len(beyond), "token")
    return (
        f"the tokenizer {name} has {count} added beyond the model's embedding of {rows}, the first {first!r} at"
        f" {beyond[first]}: data that has one is refused"
    )


def _note_on_words(name: str, words: Vocabulary, own: Vocabulary, model: ModelFolder) -> str | None:
    """Refuse where ordinary words differ; in words, where only others do."""
    differing = differences(own, words)
    if not differing:
        return None
    ordinary = [each for each in differing if each.is_ordinary]
    first = (ordinary or differing)[0]
    there = f"has {first.own!r} there" if first.own is not None else f"has it at {own.ids[first.named]}"
    what = f"its id {first.token_id} is {first.named!r}, the model's own tokenizer {there}"
    if ordinary:
        raise InputError(
            f"the tokenizer {name} was made for another model than {model.description}",
            where="tokenizer",
            why=f"{what} ({len(differing):,} of {len(words.ids):,} words differ): pretrained weights would read other"
            " words",
            do=f"{OWN_INSTEAD}, or train from scratch: model.weights: random",
        )
    count = plural(len(differing), "special or added token")
    return f"the tokenizer {name} differs from the model's own in {count}, in no ordinary word: {what}"


def differences(own: Vocabulary, named: Vocabulary) -> list[Difference]:
    """Wherever one id has two words or one word two ids, in the order of ids.

    Words that only one of them has, at ids that the other does not use, are no difference. One is ordinary where an
    ordinary word of the model has lost its id: to another word, or by having moved.
    """
    word_of = {token_id: word for word, token_id in own.ids.items()}
    found = []
    for word, token_id in named.ids.items():
        here = word_of.get(token_id)
        is_replaced = here is not None and here != word
        is_moved = own.ids.get(word, token_id) != token_id
        if is_replaced or is_moved:
            lost = (here is not None and is_replaced and own.is_ordinary(here)) or (is_moved and own.is_ordinary(word))
            found.append(Difference(token_id, word, here, lost))
    return sorted(found, key=lambda each: each.token_id)


def vocabulary_of(folder: Path) -> Vocabulary | None:
    """Words with their ids, as the files of the folder list them; None where they are in no form we can read."""
    try:
        if (folder / "tokenizer.json").is_file():
            document = _json(folder / "tokenizer.json")
            listed = document["model"]["vocab"]
            if isinstance(listed, list):  # pieces with their scores, the id is the place
                listed = {piece: token_id for token_id, (piece, _) in enumerate(listed)}
            added = {each["content"]: int(each["id"]) for each in document.get("added_tokens") or ()}
            return Vocabulary({**listed, **added}, frozenset(added))
        if (folder / "vocab.json").is_file():
            more = folder / "added_tokens.json"
            added = dict(_json(more)) if more.is_file() else {}
            return Vocabulary({**_json(folder / "vocab.json"), **added}, frozenset(added))
        if (folder / "vocab.txt").is_file():
            lines = (folder / "vocab.txt").read_text(encoding="utf-8").splitlines()
            return Vocabulary({word: token_id for token_id, word in enumerate(lines)})
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # who loads it says what is wrong
    return None


def _json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))

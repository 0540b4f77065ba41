"""The tokenizer of an encoder: one text or a pair to ids, by its own rule for special tokens and token types.

`load_pair_tokenizer` reads a folder. `PairLayout` is what its rule for two texts puts around them, asked once, so that
a context that many questions share is encoded once.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from coremill.data.tokenizer_files import read_backend, transformers_tokenizer
from coremill.errors import InputError

PAD_TOKENS = ("[PAD]", "<pad>")  # where no file of the folder names it
CLS_TOKENS = ("[CLS]", "<s>", "<cls>")
PROBE = ("a", "b")  # texts, to see what stands around them


@dataclass(frozen=True)
class Around:
    """Special tokens, with their token types."""

    ids: tuple[int, ...]
    types: tuple[int, ...]


@dataclass(frozen=True)
class PairLayout:
    """What stands around two texts, and of which type the tokens of each are."""

    before: Around
    first_type: int
    between: Around
    second_type: int
    behind: Around
    null_position: int  # the token that stands for no answer: CLS, the first

    @property
    def special(self) -> int:
        """How many tokens stand around them."""
        return len(self.before.ids) + len(self.between.ids) + len(self.behind.ids)


@dataclass(frozen=True)
class PairTokenizer:
    """What encoding examples needs of a tokenizer."""

    name: str
    backend: Any  # of the tokenizers library
    pad_id: int
    padding_side: Literal["right", "left"]
    highest_id: int

    def token_of(self, token_id: int) -> str:
        return str(self.backend.id_to_token(token_id))

    def pair_layout(self) -> PairLayout:
        """Asked of a pair of short texts; InputError where its rule for two texts cannot be told."""
        encoding = self.backend.encode(*PROBE)
        sides = encoding.sequence_ids
        first, second = ([at for at, side in enumerate(sides) if side == which] for which in (0, 1))
        if not first or not second or first[-1] > second[0]:
            raise InputError(
                "the tokenizer has no rule for a question with its context",
                where=f"tokenizer: {self.name}",
                why="what it makes of two texts is not the first followed by the second",
                do="choose a model whose tokenizer encodes pairs (BERT's, RoBERTa's)",
            )
        ids, types = encoding.ids, encoding.type_ids

        def around(start: int, end: int) -> Around:
            return Around(tuple(ids[start:end]), tuple(types[start:end]))

        before = around(0, first[0])
        known = {self.backend.token_to_id(token) for token in CLS_TOKENS}
        return PairLayout(
            before=before,
            first_type=types[first[0]],
            between=around(first[-1] + 1, second[0]),
            second_type=types[second[0]],
            behind=around(second[-1] + 1, len(ids)),
            null_position=next((at for at, token in enumerate(before.ids) if token in known), 0),
        )


def load_pair_tokenizer(folder: Path, *, code_sha256: str | None = None, cache: Path | None = None) -> PairTokenizer:
    """The fast tokenizer of tokenizer.json where there is one, else what transformers makes of the folder."""
    settings = _settings_of(folder)
    if (folder / "tokenizer.json").is_file():
        backend = read_backend(folder)
    else:
        made = transformers_tokenizer(folder, code_sha256, cache)
        backend = getattr(made, "backend_tokenizer", None)
        if backend is None:
            raise InputError(
                "this tokenizer does not say where in a text its tokens stand",
                where=f"tokenizer: {folder}",
                why="it is one of transformers' slow ones",
                do="name a tokenizer that has a tokenizer.json",
            )
        settings = {"pad_token": made.pad_token, "padding_side": made.padding_side}
    pad_id = _pad_id(backend, settings, folder)
    backend.no_truncation()
    backend.no_padding()
    return PairTokenizer(
        name=str(folder),
        backend=backend,
        pad_id=pad_id,
        padding_side="left" if settings.get("padding_side") == "left" else "right",
        highest_id=max(backend.get_vocab(with_added_tokens=True).values()),
    )


def _pad_id(backend: Any, settings: dict[str, Any], folder: Path) -> int:
    """Of the token that fills rows up; a model does not look at it, so the end token will do."""
    named = [settings.get(name) for name in ("pad_token", "eos_token")]
    written = [token.get("content") if isinstance(token, dict) else token for token in named]
    if written[0] is None and backend.padding is not None:
        return int(backend.padding["pad_id"])
    for token in (written[0], *PAD_TOKENS, written[1]):
        if isinstance(token, str) and (token_id := backend.token_to_id(token)) is not None:
            return int(token_id)
    raise InputError(
        "the tokenizer has no padding token",
        where=f"tokenizer: {folder}",
        why="rows of a batch are filled up with it to the longest of them",
        do='name one of its tokens as "pad_token" in its tokenizer_config.json',
    )


def _settings_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        try:
            found |= json.loads((folder / name).read_text(encoding="utf-8"))
        except FileNotFoundError:
            continue
        except (ValueError, TypeError) as error:
            raise InputError("not the JSON of a tokenizer", where=str(folder / name), why=str(error)) from None
    return found

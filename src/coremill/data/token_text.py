"""Token ids back to text, for people: stretches of a row as they read, special tokens by their names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from coremill.remote_code import checked_copy


@dataclass(frozen=True)
class Segment:
    """Tokens of a row that belong together: of one document, all learned or none, words or one special token."""

    text: str
    ids: tuple[int, ...]
    learned: bool
    special: bool
    starts_document: bool  # a later one of the row


@dataclass(frozen=True)
class TokenText:
    """What is needed of a tokenizer to read rows."""

    decode: Callable[[list[int]], str]  # special tokens included
    token_of: Callable[[int], str]
    special_ids: frozenset[int]
    anchor: tuple[int, ...]  # ids of a short word

    def segments(
        self, ids: Sequence[int], learned: Sequence[bool], document_starts: Sequence[int]
    ) -> Iterator[Segment]:
        """The row, in order."""
        starts, document = set(document_starts), 0
        marks: list[tuple[int, bool, int | None]] = []
        for position, token in enumerate(ids):
            document += position in starts
            marks.append((document, learned[position], position if token in self.special_ids else None))
        position = 0
        for (_, is_learned, special), group in groupby(marks):
            part = tuple(ids[position : position + len(list(group))])
            text = self.text_of(part) if special is None else self.token_of(part[0])
            yield Segment(text, part, is_learned, special is not None, position in starts)
            position += len(part)

    def text_of(self, ids: Sequence[int]) -> str:
        """Words in the middle of a text: at its beginning many a decoder drops a blank."""
        before, whole = self.decode(list(self.anchor)), self.decode([*self.anchor, *ids])
        return whole.removeprefix(before) if self.anchor and whole.startswith(before) else self.decode(list(ids))


def load_token_text(folder: Path, *, code_sha256: str | None, cache: Path) -> TokenText:
    """From tokenizer.json where there is one, else from what transformers makes of the folder, which takes seconds."""
    if (folder / "tokenizer.json").is_file():
        from tokenizers import Tokenizer

        plain = Tokenizer.from_file(str(folder / "tokenizer.json"))
        added = plain.get_added_tokens_decoder()
        return TokenText(
            decode=lambda ids: str(plain.decode(ids, skip_special_tokens=False)),
            token_of=lambda token: str(plain.id_to_token(token)),
            special_ids=frozenset(token for token, about in added.items() if about.special),
            anchor=tuple(plain.encode("a", add_special_tokens=False).ids),
        )
    from transformers import AutoTokenizer

    here = folder if code_sha256 is None else checked_copy(folder.absolute(), code_sha256, cache)
    trusted = code_sha256 is not None
    tokenizer = AutoTokenizer.from_pretrained(str(here), local_files_only=True, trust_remote_code=trusted)
    return TokenText(
        decode=lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False)),
        token_of=lambda token: str(tokenizer.convert_ids_to_tokens(token)),
        special_ids=frozenset(tokenizer.all_special_ids),
        anchor=tuple(tokenizer("a", add_special_tokens=False)["input_ids"]),
    )

"""Writes the files of an encoding (encoded.py says which): rows as they come, questions beside them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
import numpy.typing as npt

from coremill.data.encoded import (
    EXAMPLE_PLACES_FILE,
    EXAMPLES_FILE,
    GROUPS_FILE,
    LENGTHS_FILE,
    TOKENS_FILE,
    TYPES_FILE,
)
from coremill.data.packed import require_id_in_vocabulary
from coremill.data.pair_tokenizer import PairTokenizer
from coremill.data.questions import Question
from coremill.files import sync_file


class RowWriter:
    """Appends rows to the files that are large, keeps what there is of each row, and counts."""

    def __init__(self, destination: Path, tokenizer: PairTokenizer, vocabulary_rows: int) -> None:
        self._destination, self._tokenizer, self._vocabulary_rows = destination, tokenizer, vocabulary_rows
        self.dtype: Literal["uint16", "uint32"] = "uint16" if tokenizer.highest_id < 1 << 16 else "uint32"
        self._files: dict[str, IO[bytes]] = {}
        self._has_types = False
        self._lengths: list[int] = []
        self._highest_id = 0
        self.tokens = 0

    def __enter__(self) -> RowWriter:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()

    @property
    def rows(self) -> int:
        return len(self._lengths)

    def add(
        self, ids: npt.NDArray[np.uint32], types: npt.NDArray[np.uint8], lengths: list[int], places: Sequence[str]
    ) -> None:
        """Rows of a batch, one after the other; `places`: where each comes from."""
        self._require_known(ids, lengths, places)
        self._has_types = self._has_types or bool(types.any())
        self.write(TOKENS_FILE, ids.astype(self.dtype, copy=False))
        self.write(TYPES_FILE, types)
        self._lengths += lengths
        self.tokens += len(ids)

    def write(self, name: str, values: npt.NDArray[Any] | bytes) -> None:
        if name not in self._files:
            self._files[name] = (self._destination / name).open("wb")
        self._files[name].write(values if isinstance(values, bytes) else values.tobytes())

    def save(self, name: str, values: npt.NDArray[Any]) -> None:
        """A small one, whole."""
        with (self._destination / name).open("wb") as stream:
            np.save(stream, values)
            sync_file(stream)

    def close(self) -> dict[str, Any]:
        lengths = np.array(self._lengths, dtype=np.int32)
        self.save(LENGTHS_FILE, lengths)
        for file in self._files.values():
            sync_file(file)
        if not self._has_types:
            (self._destination / TYPES_FILE).unlink()
        return {
            "rows": self.rows,
            "tokens": self.tokens,
            "dtype": self.dtype,
            "has_types": self._has_types,
            "longest_row": int(lengths.max()),
            "highest_id": self._highest_id,
            "highest_token": self._tokenizer.token_of(self._highest_id),
        }

    def _require_known(self, ids: npt.NDArray[np.uint32], lengths: list[int], places: Sequence[str]) -> None:
        highest = int(ids.max(initial=0))
        if highest > self._highest_id:
            self._highest_id = highest
            row = int(np.searchsorted(np.cumsum(lengths), int(ids.argmax()), side="right"))
            token, rows = self._tokenizer.token_of(highest), self._vocabulary_rows
            require_id_in_vocabulary(highest, token, rows, self._tokenizer.name, places[row])


class QuestionWriter:
    """Appends questions to examples.jsonl, numbers their contexts, and gives every one an id of its own."""

    def __init__(self, writer: RowWriter) -> None:
        self._writer = writer
        self._places: list[int] = []
        self._bytes = 0
        self._contexts: dict[bytes, int] = {}  # by hash: there may be millions
        self._groups: list[int] = []
        self._ids: dict[str, int] = {}  # given out, with the number that was last tried behind it
        self._renamed = self._unanswerable = 0

    @property
    def count(self) -> int:
        return len(self._places)

    def add(self, question: Question) -> int:
        """Its number."""
        name, number = question.id, self._ids.get(question.id, 1)
        while name in self._ids:  # ID#2 may be the id of another question
            number += 1
            name = f"{question.id}#{number}"
        self._ids[name] = 1
        self._ids[question.id] = number
        self._renamed += name != question.id
        self._unanswerable += not question.answers
        document = {
            "id": name,
            "question": question.question,
            "context": question.context,
            "answers": [answer.text for answer in question.answers],
        }
        line = json.dumps(document, ensure_ascii=False).encode() + b"\n"
        self._writer.write(EXAMPLES_FILE, line)
        self._places.append(self._bytes)
        self._bytes += len(line)
        context = hashlib.blake2b(question.context.encode(), digest_size=16).digest()
        self._groups.append(self._contexts.setdefault(context, len(self._contexts)))
        return len(self._places) - 1

    def close(self) -> dict[str, Any]:
        self._writer.save(EXAMPLE_PLACES_FILE, np.array(self._places, dtype=np.uint64))
        self._writer.save(GROUPS_FILE, np.array(self._groups, dtype=np.int32))
        return {"examples": self.count, "groups": len(self._contexts), "unanswerable": self._unanswerable}

    def notes(self) -> list[str]:
        if not self._renamed:
            return []
        return [f"{self._renamed:,} questions have the id of an earlier one: in predictions they are ID#2, ID#3, ..."]

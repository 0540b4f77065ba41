from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_tokenizer import make_tokenizer

from coremill.data import packing
from coremill.data.packed import Progress
from coremill.data.packing import pack_text
from coremill.data.pieces import Piece, pieces_of_text
from coremill.data.sources import OpenedText
from coremill.data.tokenizer_files import TextTokenizer, load_tokenizer
from coremill.errors import InputError


def text_of(documents: list[str]) -> OpenedText:
    pieces = [
        piece
        for row, document in enumerate(documents, 1)
        for piece in pieces_of_text(document, file="x.jsonl", row=row, source_bytes=len(document))
    ]
    return OpenedText(iter(pieces), sum(map(len, documents)))


def pack(
    text: OpenedText, tokenizer: TextTokenizer, folder: Path, length: int, rows: int = 1 << 20, **more: Any
) -> dict[str, Any]:
    told = more.get("told", [])
    return pack_text(
        text,
        tokenizer,
        destination=folder,
        sequence_length=length,
        vocabulary_rows=rows,
        where="data.source: x.jsonl",
        on_progress=told.append,
    )


@pytest.fixture(scope="module")
def tokenizer(tokenizer_folder: Path) -> TextTokenizer:
    return load_tokenizer(tokenizer_folder)


@settings(max_examples=60, deadline=None)
@given(
    documents=st.lists(st.text(max_size=60), min_size=1, max_size=12),
    length=st.integers(2, 9),
    batch=st.integers(1, 80),
)
def test_packing_equals_the_plain_way(
    documents: list[str],
    length: int,
    batch: int,
    tokenizer: TextTokenizer,
    tokenizer_folder: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    from tokenizers import Tokenizer

    plain = Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    expected: list[int] = []
    for document in documents:
        if document.strip():
            expected += [*plain.encode(document, add_special_tokens=False).ids, tokenizer.eos_id]
    rows = len(expected) // length
    folder = tmp_path_factory.mktemp("packing")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "BATCH_CHARACTERS", batch)
        if rows == 0:
            with pytest.raises(InputError):
                pack(text_of(documents), tokenizer, folder, length)
            return
        counts = pack(text_of(documents), tokenizer, folder, length)
    found = np.fromfile(folder / "tokens.bin", counts["dtype"])
    assert found.tolist() == expected
    found = found[: rows * length]
    assert counts["rows"] == rows
    assert counts["tokens"] + counts["dropped_tokens"] == len(expected)
    assert counts["documents"] + counts["empty_documents"] == len(documents)
    assert counts["highest_id"] == max(expected)
    boundaries = np.fromfile(folder / "boundaries.bin", np.uint32)
    assert boundaries.tolist() == (found.reshape(rows, length)[:, :-1] == tokenizer.eos_id).sum(axis=1).tolist()


def test_pieces_of_one_document_get_one_end_token(tokenizer: TextTokenizer, tmp_path: Path) -> None:
    pieces = [
        Piece("one\n", "x.txt", 1, False, 4),
        Piece("two\n", "x.txt", 2, False, 4),
        Piece("three", "x.txt", 3, True, 5),
    ]
    counts = pack(OpenedText(iter(pieces), 13), tokenizer, tmp_path, 2)
    tokens = np.fromfile(tmp_path / "tokens.bin", np.uint16)
    assert counts["documents"] == 1
    assert (tokens == tokenizer.eos_id).sum() + counts["dropped_tokens"] >= 1
    assert (tokens[:-1] != tokenizer.eos_id).all()


def test_a_text_may_spell_the_end_token(tokenizer: TextTokenizer, tmp_path: Path) -> None:
    pack(text_of(["one<end>two"]), tokenizer, tmp_path, 2)
    assert (np.fromfile(tmp_path / "tokens.bin", np.uint16) == tokenizer.eos_id).any()


def test_large_vocabularies_are_kept_in_four_bytes(tmp_path: Path) -> None:
    big = TextTokenizer("big", lambda texts: [[70_000, 5] for _ in texts], str, eos_id=1, highest_id=70_000)
    counts = pack(text_of(["a", "b"]), big, tmp_path, 3)
    assert counts["dtype"] == "uint32"
    assert np.fromfile(tmp_path / "tokens.bin", np.uint32).tolist() == [70_000, 5, 1] * 2


def test_progress_counts_up_to_everything(
    tokenizer: TextTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "BATCH_PIECES", 3)
    told: list[Progress] = []
    counts = pack(text_of([f"document {index}" for index in range(10)]), tokenizer, tmp_path, 4, told=told)
    assert [progress.documents_done for progress in told] == [3, 6, 9, 10]
    assert told[-1].bytes_done == told[-1].bytes_total
    assert told[-1].tokens == counts["tokens"] + counts["dropped_tokens"]


def test_ids_beyond_the_embedding(tokenizer: TextTokenizer, tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        pack(text_of(["abc", "the numbers"]), tokenizer, tmp_path, 4, rows=260)
    message = str(caught.value)
    assert (
        "beyond the model's embedding of 260 rows" in message and tokenizer.name in message and "x.jsonl:2" in message
    )
    assert "token id 2" in message and "leave the key tokenizer out" in message


def test_an_end_token_beyond_the_embedding(tmp_path: Path) -> None:
    odd = TextTokenizer("odd", lambda texts: [[1] for _ in texts], str, eos_id=50, highest_id=50)
    with pytest.raises(InputError, match="token id 50 .* embedding of 10 rows"):
        pack(text_of(["a"]), odd, tmp_path, 2, rows=10)


def test_no_text_and_too_little_text(tokenizer: TextTokenizer, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="the dataset is empty") as caught:
        pack(text_of([]), tokenizer, tmp_path, 4)
    assert "it holds no documents" in str(caught.value)
    with pytest.raises(InputError, match="the dataset is empty") as caught:
        pack(text_of(["", " \n"]), tokenizer, tmp_path, 4)
    assert "its 2 documents hold no text" in str(caught.value)
    with pytest.raises(InputError, match="fills no row: 2 tokens, and a row has 500"):
        pack(text_of(["x"]), tokenizer, tmp_path, 500)


def test_a_tokenizer_without_an_end_token(tmp_path: Path) -> None:
    folder = make_tokenizer(tmp_path / "endless", end_token=None)
    with pytest.raises(InputError) as caught:
        load_tokenizer(folder)
    assert "the tokenizer has no end token" in str(caught.value) and '"eos_token"' in str(caught.value)


def test_a_damaged_tokenizer(tmp_path: Path) -> None:
    folder = make_tokenizer(tmp_path / "damaged")
    (folder / "tokenizer.json").write_text('{"version": ')
    with pytest.raises(InputError, match="the tokenizer cannot be read"):
        load_tokenizer(folder)

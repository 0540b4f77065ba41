"""Documents held out for evaluation: none on both sides, the same ones every time, about as much as was asked for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coremill.data.holding_out import documents_held_out, hold_out
from coremill.data.packed import FORMAT_VERSION, Manifest
from coremill.errors import InputError

LENGTH, END = 4, 0


def whole_packing(folder: Path, lengths: list[int], *, tokens: np.ndarray | None = None) -> Path:
    """Document d holds the number d + 1 all over, then the end token."""
    folder.mkdir(parents=True, exist_ok=True)
    ends = np.cumsum(lengths)
    if tokens is None:
        tokens = np.repeat(np.arange(len(lengths)) + 1, lengths)
        tokens[ends - 1] = END
    tokens.astype(np.uint16).tofile(folder / "tokens.bin")
    ends.astype(np.uint64).tofile(folder / "documents.bin")
    rows = len(tokens) // LENGTH
    np.zeros(rows, np.uint32).tofile(folder / "boundaries.bin")
    Manifest(
        version=FORMAT_VERSION,
        key="k",
        source="x",
        tokenizer="t",
        eos_id=END,
        dtype="uint16",
        sequence_length=LENGTH,
        rows=rows,
        tokens=rows * LENGTH,
        dropped_tokens=len(tokens) - rows * LENGTH,
        documents=len(lengths),
        empty_documents=0,
        highest_id=int(tokens.max()),
        highest_token="x",
    ).write(folder)
    return folder


def sides(destination: Path) -> tuple[list[int], list[int]]:
    train, held = (np.fromfile(destination / name / "tokens.bin", np.uint16) for name in ("train", "evaluation"))
    return train.tolist(), held.tolist()


@settings(max_examples=100, deadline=None)
@given(
    lengths=st.lists(st.integers(2, 30), min_size=2, max_size=40),
    fraction=st.floats(0.001, 0.9),
    seed=st.integers(0, 5),
)
def test_no_document_is_on_both_sides(
    lengths: list[int], fraction: float, seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("held")
    whole = whole_packing(folder / "whole", lengths)
    (folder / "split").mkdir()
    try:
        counts = hold_out(whole, folder / "split", fraction=fraction, seed=seed)
    except InputError:
        return  # where it may: see below
    train, held = sides(folder / "split")
    assert not set(train) & set(held) - {END} and len(train) + len(held) == sum(lengths)
    assert sorted(set(train) | set(held)) == list(range(len(lengths) + 1))
    for name, tokens in (("train", train), ("evaluation", held)):
        count = counts[name]
        assert count["rows"] >= 1 and count["tokens"] == count["rows"] * LENGTH
        assert count["tokens"] + count["dropped_tokens"] == len(tokens)
        assert count["documents"] == len(set(tokens) - {END})
        rows = np.array(tokens[: count["tokens"]]).reshape(-1, LENGTH)
        boundaries = np.fromfile(folder / "split" / name / "boundaries.bin", np.uint32)
        assert boundaries.tolist() == (rows[:, :-1] == END).sum(axis=1).tolist()


def held_tokens(lengths: list[int], fraction: float, seed: int = 7) -> int:
    ends = np.cumsum(lengths)
    held = documents_held_out(ends, length=LENGTH, fraction=fraction, seed=seed)
    assert (held == documents_held_out(ends, length=LENGTH, fraction=fraction, seed=seed)).all()
    return int(np.array(lengths)[held].sum())


def test_about_the_share_that_was_asked_for() -> None:
    lengths = np.random.default_rng(1).integers(3, 60, 2000).tolist()
    for fraction in (0.01, 0.1, 0.5):
        assert held_tokens(lengths, fraction) == pytest.approx(fraction * sum(lengths), abs=60)
    chosen = {tuple(documents_held_out(np.cumsum(lengths), length=4, fraction=0.1, seed=seed)) for seed in range(3)}
    assert len(chosen) == 3


def test_a_few_documents() -> None:
    assert held_tokens([40] * 5, 0.1) == 40  # one of five: the least there is
    assert held_tokens([500, 9, 300, 400], 0.01) == 9  # a long one does not take the place of a short one
    assert held_tokens([500, 400], 0.01) == 400  # the shorter of two, and it is said how much that is
    assert held_tokens([8, 8], 0.9) == 8  # something is left to train on


@pytest.mark.parametrize("lengths", [[7, 2], [3, 3, 3]])
def test_documents_that_cannot_be_shared(lengths: list[int]) -> None:
    """Both sides need a row of four."""
    with pytest.raises(InputError, match="cannot be shared") as caught:
        held_tokens(lengths, 0.1)
    assert "data.evaluation_source" in str(caught.value) and f"{len(lengths)} documents" in str(caught.value)


def test_of_one_document_its_tail(tmp_path: Path) -> None:
    tokens = np.arange(1, 104)
    (tmp_path / "split").mkdir()
    counts = hold_out(whole_packing(tmp_path, [103], tokens=tokens), tmp_path / "split", fraction=0.1, seed=7)
    train, held = sides(tmp_path / "split")
    assert train + held == tokens.tolist() and len(held) == 12 and counts["evaluation"]["rows"] == 3


def test_the_tail_begins_after_an_end_token_that_the_text_spells(tmp_path: Path) -> None:
    tokens = np.arange(1, 104)
    tokens[[20, 88, 95]] = END  # the tail of three rows would begin at 91
    (tmp_path / "split").mkdir()
    hold_out(whole_packing(tmp_path, [103], tokens=tokens), tmp_path / "split", fraction=0.1, seed=7)
    assert sides(tmp_path / "split")[1] == tokens[89:].tolist()

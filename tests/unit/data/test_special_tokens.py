"""What stands around a document: the tokenizer's own rule, once, and nothing where it is left aside."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_tokenizer import make_tokenizer

from coremill.config.schema import RunConfig
from coremill.data import packing, pieces
from coremill.data import tokenise as prepare
from coremill.data.packed import PackedData
from coremill.data.packing import pack_text
from coremill.data.pieces import pieces_of_text
from coremill.data.sources import OpenedText, identity_of, resolve_source
from coremill.data.tokenise import prepare_data
from coremill.data.tokenizer_files import SpecialIds, ids_around_a_text, load_tokenizer, tokenizer_identity
from coremill.errors import InputError

END, BEGIN, MASK = 0, 1, 2
RULES: dict[str, SpecialIds] = {  # as the tokenizers of real models have them
    "$A": SpecialIds(),  # GPT-2, Qwen
    "<begin> $A": SpecialIds((BEGIN,)),  # Llama-3, Gemma, Mistral
    "<begin> $A <end>": SpecialIds((BEGIN,), (END,)),
    "<mask> <begin> $A": SpecialIds((MASK, BEGIN)),  # ChatGLM
    "$A <mask>": SpecialIds((), (MASK,)),
}
SHARED = "<end> $A"  # OPT, XGLM: the begin token is the end token


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tokenizers")
    return {rule: make_tokenizer(root / str(index), around=rule) for index, rule in enumerate([*RULES, SHARED])}


def packed_ids(documents: list[str], folder: Path, special: Any, destination: Path) -> tuple[list[int], dict[str, Any]]:
    """All ids, also those of the tail, and the counts."""
    found = [
        piece
        for row, document in enumerate(documents, 1)
        for piece in pieces_of_text(document, file="x.jsonl", row=row, source_bytes=1)
    ]
    counts = pack_text(
        OpenedText(iter(found), None),
        load_tokenizer(folder, special),
        destination=destination,
        sequence_length=2,
        vocabulary_rows=1000,
        where="x.jsonl",
        on_progress=lambda progress: None,
    )
    return np.fromfile(destination / "tokens.bin", counts["dtype"]).tolist(), counts


@pytest.mark.parametrize("rule", RULES)
def test_documents_are_what_transformers_makes_of_them(rule: str, folders: dict[str, Path], tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(folders[rule])
    documents = ["the mill turns", "a\nb ünï", "x"]
    expected: list[int] = []
    for document in documents:
        ids = theirs(document)["input_ids"]
        expected += ids if ids[-1] == END else [*ids, END]
    found, counts = packed_ids(documents, folders[rule], "auto", tmp_path)
    assert found == expected
    assert load_tokenizer(folders[rule]).around == RULES[rule]
    assert counts["begin_ids"] == list(RULES[rule].begin)
    assert counts["is_plain"] == (rule == "$A")
    ends = np.fromfile(tmp_path / "documents.bin", np.uint64).tolist()
    assert len(ends) == 3 and ends[-1] == len(found) and all(found[end - 1] == END for end in ends)


def test_none_is_what_0_1_0_did(folders: dict[str, Path], tmp_path: Path) -> None:
    found, counts = packed_ids(["a<end>", "<begin>b"], folders["<begin> $A"], "none", tmp_path)
    letters = load_tokenizer(folders["<begin> $A"], "none").encode(["a", "b"])
    assert found == [*letters[0], END, END, BEGIN, *letters[1], END]
    assert counts["is_plain"] and counts["begin_ids"] == []


def test_a_begin_token_that_is_the_end_token_stands_once_between_documents(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    documents = ["ab", "<end>c", "<end>", "d<end>", "e"]
    a, c, d, e = (list(ids) for ids in load_tokenizer(folders[SHARED], "none").encode(["ab", "c", "d", "e"]))
    found, counts = packed_ids(documents, folders[SHARED], "auto", tmp_path)
    assert found == [END, *a, END, *c, END, *d, END, *e, END]
    assert counts["begin_ids"] == [END] and not counts["is_plain"]
    assert counts["documents"] == 4 and counts["empty_documents"] == 1
    assert not np.fromfile(tmp_path / "boundaries.bin", np.uint32).any()


@settings(max_examples=80, deadline=None)
@given(
    documents=st.lists(
        st.lists(st.sampled_from(["<begin>", "<end>", "<mask>", "word", " ", "\n"]), max_size=8).map("".join),
        min_size=1,
        max_size=6,
    ),
    rule=st.sampled_from(sorted(RULES)),
    piece_size=st.integers(8, 30),
)
def test_never_twice(
    documents: list[str],
    rule: str,
    piece_size: int,
    folders: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    begin, end = list(RULES[rule].begin), list(RULES[rule].end)
    end = end if end[-1:] == [END] else [*end, END]
    tokenizer = load_tokenizer(folders[rule])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "PIECE_BYTES", piece_size)
        patch.setattr(packing, "BATCH_PIECES", 2)
        expected: list[int] = []
        differs = False
        for document in documents:
            parts = [piece.text for piece in pieces_of_text(document, file="x", row=1, source_bytes=1)]
            while parts and not parts[0].strip():  # white space in front of all text
                parts.pop(0)
            ids = [token for part in tokenizer.encode(parts) for token in part]
            if ids:
                head = [] if ids[: len(begin)] == begin else begin
                tail = [] if ids[-len(end) :] == end else end
                differs = differs or bool(head) or tail != [END]
                expected += [*head, *ids, *tail]
        folder = tmp_path_factory.mktemp("packing")
        if len(expected) < 2:
            with pytest.raises(InputError):
                packed_ids(documents, folders[rule], "auto", folder)
            return
        found, counts = packed_ids(documents, folders[rule], "auto", folder)
    assert found == expected
    assert counts["is_plain"] or differs or begin or len(end) > 1


def test_a_rule_that_cannot_be_told_has_a_cure(tmp_path: Path) -> None:
    def doubled(text: str, added: bool) -> list[int]:
        ids = [ord(letter) for letter in text]
        return [BEGIN, *reversed(ids), *ids] if added else ids

    with pytest.raises(InputError, match=r"data\.special_tokens=none"):
        ids_around_a_text(doubled, tmp_path)


def test_a_begin_token_beyond_the_embedding(folders: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"(?s)token id 1 \('<begin>'\) .* its begin token"):
        pack_text(
            OpenedText(iter([]), None),
            load_tokenizer(folders["<begin> $A"]),
            destination=tmp_path,
            sequence_length=2,
            vocabulary_rows=1,
            where="x",
            on_progress=lambda progress: None,
        )


def key_of_0_1_0(source: Path, tokenizer: Path, length: int) -> str:
    """The name that 0.1.0 gave to the data of a run without evaluation."""

    def named(*parts: object) -> str:
        return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()

    text = identity_of(resolve_source(str(source), column="text", split="train"))
    return named(named(1, text, tokenizer_identity(tokenizer), length), 0, 0)


def test_the_key_is_that_of_0_1_0_where_its_tokens_are(
    folders: dict[str, Path],
    texts: Callable[..., Path],
    run_config: Callable[..., RunConfig],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from coremill.data.tokenise_child import Speaker, do_job

    def run(job: dict[str, Any], on_progress: object = None) -> dict[str, Any]:
        with Path("/dev/null").open("wb") as nowhere:
            return do_job(job, Speaker(nowhere))

    monkeypatch.setattr(prepare, "run_in_child", run)

    def prepared(source: Path, rule: str, special: str) -> PackedData:
        return prepare_data(
            run_config(source, special_tokens=special),
            tokenizer_folder=folders[rule],
            vocabulary_rows=1000,
            max_positions=None,
            cache=tmp_path / "cache",
        )

    plain = texts("some words of a document", "and another")
    for rule in ("$A", "<begin> $A"):
        old = key_of_0_1_0(plain, folders[rule], 8)
        assert prepared(plain, rule, "none").key == old
        assert (prepared(plain, rule, "auto").key == old) == (rule == "$A")
    added = prepared(plain, "<begin> $A", "auto")
    assert added.begin_ids == (BEGIN,) and not added.is_plain
    assert added.folder != prepared(plain, "<begin> $A", "none").folder
    spelled = texts("some words of a document<end>", "and another", name="spelled.jsonl")
    assert prepared(spelled, "$A", "auto").key != key_of_0_1_0(spelled, folders["$A"], 8)
    assert prepared(spelled, "$A", "none").key == key_of_0_1_0(spelled, folders["$A"], 8)


def test_a_sample_begins_as_a_document_does(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    from coremill.tasks.causal_lm.sample import complete

    asked: list[list[int]] = []

    class Model:
        def generate(self, inputs: Any, **options: Any) -> Any:
            asked.append(inputs[0].tolist())
            return inputs

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", lambda *_, **__: Model())
    folder = folders["<begin> $A"]
    letter = list(load_tokenizer(folder, "none").encode(["a"])[0])
    for prompt, begin_ids in (("a", [BEGIN]), ("<begin>a", [BEGIN]), ("a", [])):
        assert complete(str(folder), prompt, 1, begin_ids) == ""
    assert asked == [[BEGIN, *letter], [BEGIN, *letter], letter]
    assert complete(str(folder), "", 1, []) == ""
    assert asked[-1] == [END]  # a document may follow


def test_a_vocabulary_of_any_name_is_part_of_what_a_tokenizer_is(tmp_path: Path) -> None:
    """DeBERTa-v3 and mDeBERTa differ in spm.model alone; a template is none of it."""
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"words_file": "mine.bin"}))
    for name in ("spm.model", "mine.bin"):
        before = tokenizer_identity(tmp_path)
        (tmp_path / name).write_bytes(b"one")
        one = tokenizer_identity(tmp_path)
        (tmp_path / name).write_bytes(b"two")
        assert len({before, one, tokenizer_identity(tmp_path)}) == 3, name
    two = tokenizer_identity(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    assert tokenizer_identity(tmp_path) == two

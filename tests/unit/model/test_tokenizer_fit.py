"""A tokenizer named instead of the model's own: refused where its ids mean other words, and its chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import pytest

from coremill.data.tokenizer_files import chat_template_of, write_chat_templates
from coremill.errors import InputError
from coremill.model.source import ModelFolder
from coremill.model.tokenizer_fit import Difference, Vocabulary, differences, require_fitting_tokenizer, vocabulary_of

OWN = {"<end>": 0, "a": 1, "b": 2, "c": 3}


def tokenizer(folder: Path, words: dict[str, int], added: dict[str, int] | None = None) -> Path:
    folder.mkdir()
    more = [{"id": token_id, "content": word} for word, token_id in (added or {}).items()]
    document: dict[str, Any] = {"model": {"type": "BPE", "vocab": words}, "added_tokens": more}
    (folder / "tokenizer.json").write_text(json.dumps(document))
    return folder


def model(folder: Path, weights: Literal["pretrained", "random"] = "pretrained") -> ModelFolder:
    return ModelFolder(folder, {"model_type": "llama"}, weights, "my-model", "AutoModelForCausalLM")


def test_the_models_own_is_taken_as_it_is(tmp_path: Path) -> None:
    own = tokenizer(tmp_path / "m", {**OWN, "image": 1000})  # some have words beyond the embedding that no text uses
    assert require_fitting_tokenizer(None, own, model(own), vocabulary_rows=8) is None
    copy = tokenizer(tmp_path / "copy", {**OWN, "image": 1000})
    assert require_fitting_tokenizer("copy", copy, model(own), vocabulary_rows=8) is None
    (copy / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    assert require_fitting_tokenizer("copy", copy, model(own), vocabulary_rows=8) is None


def test_another_one_with_other_words_is_refused_for_pretrained_weights_only(tmp_path: Path) -> None:
    own = tokenizer(tmp_path / "m", OWN)
    foreign = tokenizer(tmp_path / "t", {"<end>": 0, "b": 1, "a": 2, "c": 3})
    with pytest.raises(InputError) as refused:
        require_fitting_tokenizer("t", foreign, model(own), vocabulary_rows=8)
    assert refused.value.what == "the tokenizer t was made for another model than my-model"
    assert "its id 1 is 'b', the model's own tokenizer has 'a' there (2 of 4 words differ)" in (refused.value.why or "")
    assert refused.value.where == "tokenizer" and refused.value.exit_code == 78
    assert require_fitting_tokenizer("t", foreign, model(own, "random"), vocabulary_rows=8) is None


def test_words_added_at_free_ids_are_no_other_language(tmp_path: Path) -> None:
    own = tokenizer(tmp_path / "m", OWN)
    longer = tokenizer(tmp_path / "t", OWN, {"<user>": 4})
    assert require_fitting_tokenizer("t", longer, model(own), vocabulary_rows=8) is None
    moved = Vocabulary({**OWN, "a": 7})  # a word the model knows, elsewhere
    assert differences(Vocabulary(OWN), moved) == [Difference(7, "a", None, True)]
    with pytest.raises(InputError) as refused:
        require_fitting_tokenizer("n", tokenizer(tmp_path / "n", moved.ids), model(own), vocabulary_rows=8)
    assert "its id 7 is 'a', the model's own tokenizer has it at 1" in (refused.value.why or "")


@pytest.mark.parametrize("weights", ["pretrained", "random"])
def test_more_words_than_rows_are_refused(tmp_path: Path, weights: Literal["pretrained", "random"]) -> None:
    own = tokenizer(tmp_path / "m", OWN)
    longer = tokenizer(tmp_path / "t", {**OWN, "d": 8})
    with pytest.raises(InputError, match="has more words than my-model: ids up to 8"):
        require_fitting_tokenizer("t", longer, model(own, weights), vocabulary_rows=8)


@pytest.mark.parametrize("weights", ["pretrained", "random"])
def test_a_token_added_beyond_the_embedding_is_said(tmp_path: Path, weights: Literal["pretrained", "random"]) -> None:
    """Llama 2 with <pad> at 32000: packed rows have no padding, and data with such an id is refused later."""
    own = tokenizer(tmp_path / "m", OWN)
    longer = tokenizer(tmp_path / "t", OWN, {"<pad>": 8})
    said = require_fitting_tokenizer("t", longer, model(own, weights), vocabulary_rows=8)
    assert (
        said is not None and "1 token added beyond the model's embedding of 8 rows" in said and "'<pad>' at 8" in said
    )


@pytest.mark.parametrize(
    ("own_added", "own_words", "named_added", "named_words"),
    [
        # Llama 3 and 3.1
        ({"<|reserved_special_token_2|>": 4}, OWN, {"<|finetune_right_pad_id|>": 4}, OWN),
        # Gemma: a name kept free among the words becomes one of chat's
        ({}, {**OWN, "<unused7>": 4}, {"<start_of_turn>": 4}, {**OWN, "<start_of_turn>": 4}),
        # the end token at another place
        ({"<eos>": 4}, OWN, {"<eos>": 5}, OWN),
    ],
)
def test_other_special_tokens_are_said_not_refused(
    tmp_path: Path,
    own_added: dict[str, int],
    own_words: dict[str, int],
    named_added: dict[str, int],
    named_words: dict[str, int],
) -> None:
    own = tokenizer(tmp_path / "m", own_words, own_added)
    named = tokenizer(tmp_path / "t", named_words, named_added)
    said = require_fitting_tokenizer("t", named, model(own), vocabulary_rows=8)
    assert said is not None and "differs from the model's own in 1 special or added token, in no ordinary word" in said


def test_an_added_token_in_the_place_of_an_ordinary_word_is_refused(tmp_path: Path) -> None:
    own = tokenizer(tmp_path / "m", OWN)
    named = tokenizer(tmp_path / "t", {"<end>": 0, "a": 1, "b": 2}, {"<pad>": 3})
    with pytest.raises(InputError, match="was made for another model"):
        require_fitting_tokenizer("t", named, model(own), vocabulary_rows=8)


def test_what_cannot_be_compared_is_said(tmp_path: Path) -> None:
    named, bare, opaque = tokenizer(tmp_path / "t", OWN), tmp_path / "bare", tmp_path / "opaque"
    bare.mkdir()
    opaque.mkdir()
    (opaque / "tokenizer.model").write_bytes(b"pieces")
    for folder, words in ((bare, "has no tokenizer of its own"), (opaque, "could not be compared")):
        said = require_fitting_tokenizer("t", named, model(folder), vocabulary_rows=8)
        assert said is not None and words in said


def test_vocabularies_in_all_their_forms(tmp_path: Path) -> None:
    assert vocabulary_of(tokenizer(tmp_path / "json", OWN, {"<user>": 4})) == Vocabulary(
        {**OWN, "<user>": 4}, frozenset(["<user>"])
    )
    for name, text in (("vocab.json", json.dumps(OWN)), ("vocab.txt", "\n".join(OWN))):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).write_text(text)
        assert vocabulary_of(tmp_path / name) == Vocabulary(OWN)
    unigram = tmp_path / "unigram"
    unigram.mkdir()
    pieces = {"model": {"vocab": [[word, -1.0] for word in OWN]}}
    (unigram / "tokenizer.json").write_text(json.dumps(pieces))
    assert vocabulary_of(unigram) == Vocabulary(OWN)
    (unigram / "tokenizer.json").write_text("{")
    assert vocabulary_of(unigram) is None


def test_a_chat_template_goes_along(tmp_path: Path) -> None:
    with_one, without, export = tmp_path / "m", tmp_path / "t", tmp_path / "export"
    for folder in (with_one, without, export):
        folder.mkdir()
    (with_one / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    (with_one / "additional_chat_templates").mkdir()
    (with_one / "additional_chat_templates" / "tools.jinja").write_text("tools")
    (without / "tokenizer_config.json").write_text("{}")
    write_chat_templates(export, without, None)  # made from scratch: the words are not the model's
    assert chat_template_of(export) is None
    write_chat_templates(export, without, with_one)
    assert chat_template_of(export) == "{{ messages }}"
    assert (export / "additional_chat_templates" / "tools.jinja").read_text() == "tools"
    (with_one / "chat_template.jinja").write_text("newer")
    assert chat_template_of(with_one) == "newer"

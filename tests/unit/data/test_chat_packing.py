"""Packed conversations: whole ones in full rows, marks beside tokens, keys that follow all they were made of."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_templates import FAMILIES, Family, make_chat_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from coremill.config.schema import RunConfig
from coremill.data import counting
from coremill.data import tokenise as prepare
from coremill.data.best_fit import rows_of
from coremill.data.counting import count_rows
from coremill.data.loader import FILLER
from coremill.data.packed import LEARNED, STARTS, PackedData, read_manifest
from coremill.data.packed_batches import IGNORED, evaluation_batches, make_loader
from coremill.data.packed_rows import PackedRows
from coremill.data.tokenise import prepare_data
from coremill.data.tokenizer_files import with_chat_template
from coremill.errors import InputError

LENGTH = 160


def chats(count: int, *, words: int = 6, tag: str = "") -> list[dict[str, Any]]:
    """Conversations of different lengths."""
    return [
        {"messages": [{"role": "user", "content": f"count {tag}{index}"}, {"role": "assistant", "content": answer}]}
        for index, answer in ((index, "mill " * (1 + index % words)) for index in range(count))
    ]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_chat_tokenizer(tmp_path_factory.mktemp("tokenizer"), FAMILIES["llama3"])


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Jobs run here instead of in a child."""
    from coremill.data.tokenise_child import Speaker, do_job

    done: list[str] = []

    def run(job: dict[str, Any], on_progress: object = None) -> dict[str, Any]:
        done.append(job["job"])
        with open(os.devnull, "wb") as nowhere:  # noqa: PTH123
            return dict(json.loads(json.dumps(do_job(job, Speaker(nowhere)))))

    monkeypatch.setattr(prepare, "run_in_child", run)
    monkeypatch.setattr(counting, "run_in_child", run)
    return done


@pytest.fixture
def packed(tmp_path: Path, tokenizer: Path, jobs: list[str]) -> Any:
    def make(
        rows: list[dict[str, Any]] | None = None, *, name: str = "chats.jsonl", folder: Path = tokenizer, **data: Any
    ) -> PackedData:
        path = tmp_path / name
        if rows is not None:
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        section = {"source": str(path), "sequence_length": LENGTH, **data}
        if "sources" in data:
            del section["source"]
        config = RunConfig.model_validate({"data": section, "train": {"steps": 1}})
        return prepare_data(
            config, tokenizer_folder=folder, vocabulary_rows=400, max_positions=None, cache=tmp_path / "cache"
        )

    return make  # fmt: skip


def rows_and_marks(data: PackedData, split: Any = "train") -> tuple[np.ndarray, np.ndarray]:
    rows = PackedRows(data, split)
    every = np.arange(rows.count)
    return rows.tokens(every), rows.marks(every)


def learned_ids(data: PackedData, split: Any = "train") -> list[tuple[int, ...]]:
    """Of each conversation, sorted."""
    found = []
    for ids, marks in zip(*rows_and_marks(data, split), strict=True):
        starts = [*np.flatnonzero(marks & STARTS).tolist(), len(ids)]
        parts = [slice(first, last) for first, last in zip(starts, starts[1:], strict=False)]
        found += [tuple(ids[part][(marks[part] & LEARNED) != 0].tolist()) for part in parts]
    return sorted(each for each in found if each)


@settings(deadline=None)
@given(lengths=st.lists(st.integers(1, 50), max_size=60))
def test_whole_ones_into_as_few_rows_as_will_hold_them(lengths: list[int]) -> None:
    rows = rows_of(lengths, 50)
    assert sorted(number for row in rows for number in row) == list(range(len(lengths)))
    filled = [sum(lengths[number] for number in row) for row in rows]
    assert all(0 < each <= 50 for each in filled)
    assert len(rows) <= 11 / 9 * -(-sum(lengths) // 50) + 1 or max(lengths) > 25


def test_conversations_fill_rows_and_are_marked(packed: Any) -> None:
    data = packed(chats(40))
    counts = data.conversations
    assert data.documents == 40 and counts is not None and counts.learn == "answers" and counts.cut == 0
    ids, marks = rows_and_marks(data)
    assert ids.shape == (data.train_rows, LENGTH) and np.count_nonzero(marks & LEARNED) == counts.learned_tokens
    assert (marks[:, 0] == STARTS).all()  # the first of a conversation is never learned
    assert len(learned_ids(data)) == 40 and ((marks & LEARNED) != 0).any(axis=1).all()
    assert data.tokens == counts.real_tokens and data.row_padding_tokens == ids.size - data.tokens
    assert data.row_padding_tokens < 0.2 * ids.size
    assert counts.end_ids and all((marks[row] & LEARNED).any() for row in range(data.train_rows))
    said = data.counts()
    assert said["learned_tokens"] == counts.learned_tokens and said["learn"] == "answers" and said["notes"]
    assert PackedData.from_json(json.loads(json.dumps(data.to_json()))) == data
    assert sorted(path.name for path in data.folder.iterdir()) == [
        "documents.bin", "manifest.json", "marks.bin", "rows.bin", "tokens.bin",
    ]  # fmt: skip
    assert packed().from_cache and packed().key == data.key
    (data.folder / "marks.bin").write_bytes(b"x")
    assert read_manifest(data.folder) is None and not packed().from_cache


def test_tokens_that_only_the_class_knows_are_written_and_part_of_the_key(
    packed: Any, tokenizer: Path, tmp_path: Path, jobs: list[str]
) -> None:
    from transformers import AutoTokenizer

    folder, template = tmp_path / "as GPT-2", tmp_path / "chat.jinja"
    make_chat_tokenizer(folder, Family("gpt2", "", "", ("<|endoftext|>",), "<|endoftext|>"), template=False)
    (folder / "tokenizer_config.json").write_text('{"model_max_length": 1024}')
    (folder / "config.json").write_text('{"model_type": "gpt2"}')
    template.write_text(
        "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
    )
    folder = with_chat_template(folder, str(template), tmp_path / "cache")
    row = chats(1)[0]
    data = packed([row], folder=folder)
    (ids,), _ = rows_and_marks(data)
    theirs = AutoTokenizer.from_pretrained(str(folder))
    expected = theirs.apply_chat_template(row["messages"], tokenize=True, return_dict=False)
    assert ids[: data.tokens].tolist() == expected and expected[0] == expected[-1] == theirs.eos_token_id
    assert jobs == ["tokens of class", "tokenise"]
    assert packed([row], folder=folder).from_cache and jobs == ["tokens of class", "tokenise"]  # it is remembered
    (remembered,) = (tmp_path / "cache" / "data").glob("class-tokens-*.json")
    assert json.loads(remembered.read_text()) == {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}
    remembered.write_text('{"eos_token": "<|endoftext|>"}')  # as another class would have it
    assert packed([row], folder=folder).key != data.key
    packed([row])
    assert jobs == ["tokens of class", "tokenise", "tokenise", "tokenise"]  # files that name theirs are enough


def test_the_key_follows_template_form_and_what_is_learned(
    packed: Any, tokenizer: Path, tmp_path: Path, jobs: list[str]
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for file in tokenizer.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    (other / "chat_template.jinja").write_text(FAMILIES["llama3"].template + "{# another #}")
    rows = [{**row, "turns": row["messages"]} for row in chats(10)]
    found = [
        packed(rows),
        packed(learn="all"),
        packed(learn="last-answer"),
        packed(messages_column="turns"),
        packed(folder=other),
    ]
    assert len({data.key for data in found}) == len({data.folder for data in found}) == 5 == len(jobs)
    assert found[1].conversations.learned_tokens > found[0].conversations.learned_tokens


def test_whole_conversations_are_held_out(packed: Any, jobs: list[str]) -> None:
    whole = packed(chats(40))
    data = packed(evaluation_fraction=0.2)
    assert data.documents == 40 and 4 <= data.evaluation_documents <= 12 and data.evaluation_rows
    assert data.tokens == whole.tokens and data.conversations.learned_tokens == whole.conversations.learned_tokens
    both = sorted(learned_ids(data) + learned_ids(data, "evaluation"))
    assert both == learned_ids(whole) and jobs == ["tokenise", "hold out"]
    assert data.evaluation_words.startswith(f"held out for evaluation: {data.evaluation_documents} of 40 conversations")
    trained = sum(PackedRows(data, "train").learned_and_real([row])[1] for row in range(data.train_rows))
    share = 1 - trained / (data.train_rows * LENGTH)
    assert f"; {trained:,} tokens, " in data.train_in_words() and trained < data.tokens
    assert f" {share:.1%} of the rows is padding" in data.train_in_words()
    assert f"; {data.tokens:,} tokens, " in data.in_words() and PackedData.from_json(data.to_json()) == data
    two = packed(chats(2), name="two.jsonl", evaluation_fraction=0.01)
    assert two.evaluation_documents == 1 and two.train_rows == two.evaluation_rows == 1
    with pytest.raises(InputError, match="one conversation cannot be shared"):
        packed(chats(1), name="one.jsonl", evaluation_fraction=0.1)


def test_what_is_longer_than_a_row_is_cut_counted_and_said(packed: Any) -> None:
    long = {"messages": [{"role": "user", "content": "go on"}, {"role": "assistant", "content": "mill " * 190}]}
    asked = {"messages": [{"role": "user", "content": "mill " * 190}, {"role": "assistant", "content": "no"}]}
    data = packed([*chats(20), long, asked])
    counts = data.conversations
    assert counts.cut == 2 and counts.left_out == 1 and data.documents == 21 and counts.cut_learned > 30
    (note,) = [note for note in data.notes if "beyond a row" in note]
    assert note.startswith("warning: 2 of 22 conversations (9.1%)") and "data.sequence_length 256 keeps 95%" in note
    assert "1 is left out" in note
    with pytest.raises(InputError) as caught:
        packed([asked], name="none.jsonl")
    assert "no answer is left to learn" in caught.value.what and "sequence_length to 256" in str(caught.value.do)


def test_batches_learn_what_is_marked_and_keep_conversations_apart(packed: Any) -> None:
    data = packed(chats(40))
    how = {"rank": 0, "world_size": 1, "micro_batch_rows": 3}
    loader = make_loader(data, seed=7, rows_per_step=4, accumulation_steps=2, attention_across_documents=False, **how)
    step = loader.next_step()
    rows = PackedRows(data, "train")
    learned, real = rows.learned_and_real(np.array(step.row_ids))
    assert (step.valid_targets, step.tokens) == (learned, real) and step.padding_tokens == 6 * LENGTH - real
    assert sum(int((batch.labels != IGNORED).sum()) for batch in step.batches) == learned
    for batch in step.batches:
        for index, row in enumerate(batch.row_ids):
            if row == FILLER:
                assert (batch.labels[index] == IGNORED).all()
                continue
            marks = rows.marks(np.array([row]))[0]
            assert batch.position_ids is not None
            assert (batch.position_ids[index].numpy() == 0).tolist() == ((marks & STARTS) != 0).tolist()
            kept = batch.labels[index] != IGNORED
            assert kept.tolist() == ((marks & LEARNED) != 0).tolist()
            assert batch.labels[index][kept].tolist() == batch.input_ids[index][kept].tolist()
    joined = make_loader(data, seed=7, rows_per_step=4, accumulation_steps=2, **how).next_step()
    assert joined.batches[0].position_ids is None and joined.valid_targets == learned
    held_out = packed(evaluation_fraction=0.2)
    batches = evaluation_batches(held_out, max_rows=64, **how)
    assert batches.valid_targets == sum(int((batch.labels != IGNORED).sum()) for batch in batches) > 0


def test_sources_are_known_each_by_itself_and_not_mixed_with_text(packed: Any, tmp_path: Path) -> None:
    packed(chats(20), name="a.jsonl")
    rows = [{"instruction": f"count {index}", "output": "mill"} for index in range(20)]
    packed(rows, name="b.jsonl")
    names = [str(tmp_path / name) for name in ("a.jsonl", "b.jsonl")]
    data = packed(sources=[{"source": name, "share": 0.5} for name in names])
    assert data.documents == 40 and [note.split(" holds")[0] for note in data.notes] == names
    every = np.arange(data.train_rows)
    assert PackedRows(data, "train").marks(every).shape == (data.train_rows, LENGTH)
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": "mill " * 200}) + "\n")
    with pytest.raises(InputError, match="holds text, and .* conversations"):
        packed(sources=[{"source": names[0]}, {"source": str(tmp_path / "text.jsonl")}])
    with pytest.raises(InputError, match="data.learn is given, but .*text.jsonl holds text"):
        packed(name="text.jsonl", learn="all")


def test_without_a_template_nothing_is_made(packed: Any, tmp_path: Path, jobs: list[str]) -> None:
    bare = make_chat_tokenizer(tmp_path / "bare", FAMILIES["llama3"], template=False)
    with pytest.raises(InputError) as caught:
        packed(chats(3), folder=bare)
    assert caught.value.what == "the tokenizer has no chat template" and caught.value.exit_code == 78
    assert "data.chat_template" in str(caught.value.do) and jobs == []


def test_bad_ones_are_left_out_and_listed(packed: Any) -> None:
    bad = {"messages": [{"role": "user", "content": "who?"}]}
    with pytest.raises(InputError, match="no answer of the assistant"):
        packed([*chats(5), bad])
    data = packed(on_bad_rows="skip")
    assert data.documents == 5 and data.bad_rows == 1 and "no answer of the assistant (1)" in data.bad_rows_words


def test_a_plan_counts_or_estimates_their_rows(
    packed: Any, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = packed(chats(400, words=3))
    config = RunConfig.model_validate(
        {"data": {"source": str(tmp_path / "chats.jsonl"), "sequence_length": LENGTH}, "train": {"epochs": 1}}
    )

    def counted(cache: str) -> Any:
        options: dict[str, Any] = {"cache": tmp_path / cache, "progress": lambda progress: None, "vocabulary_rows": 400}
        return count_rows(config, tokenizer_folder=tokenizer, **options)

    assert counted("cache").rows == whole.train_rows
    monkeypatch.setattr(counting, "PACKED_NOW_BYTES", 1)
    estimate = counted("another")
    assert estimate.is_estimate and estimate.rows == pytest.approx(whole.train_rows, rel=0.1)


@pytest.mark.parametrize("learn", ["answers", "last-answer", "all"])
def test_the_token_that_ends_answers_is_known_whatever_is_learned(packed: Any, tmp_path: Path, learn: str) -> None:
    """ChatML writes a line end behind it, which is learned with `all`."""
    folder = make_chat_tokenizer(tmp_path / "chatml", FAMILIES["chatml"])
    tokens = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    ids = {token["content"]: token["id"] for token in tokens}
    rows = chats(5)
    rows.append({"messages": [*rows[0]["messages"], {"role": "user", "content": "and?"}]})  # ends with no answer
    assert packed(rows, folder=folder, learn=learn).conversations.end_ids == (ids["<|im_end|>"],)


def test_the_end_of_a_question_is_not_taken_for_that_of_an_answer(packed: Any, tmp_path: Path) -> None:
    folder = make_chat_tokenizer(tmp_path / "mistral", FAMILIES["mistral"])
    tokens = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    rows = chats(5)
    rows.append({"messages": [*rows[0]["messages"], {"role": "user", "content": "and?"}]})  # ends with [/INST]
    ended = {
        token["content"]
        for token in tokens
        if token["id"] in packed(rows, folder=folder, learn="all").conversations.end_ids
    }
    assert ended == {"</s>"}

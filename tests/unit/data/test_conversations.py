"""Conversations in rows: the forms that are known, and what is said of one that cannot be trained on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from coremill.config.schema import DataSection
from coremill.data.conversations import ConversationForm
from coremill.data.run_sources import sources_of
from coremill.data.sources import TextSource, open_text
from coremill.errors import InputError

ASKED, SAID = {"role": "user", "content": "who?"}, {"role": "assistant", "content": "I."}
SHARED = {"conversations": [{"from": "human", "value": "who?"}, {"from": "gpt", "value": "I."}]}
MESSAGES = ConversationForm(kind="messages", columns=("messages",))


def write(folder: Path, *rows: Any, name: str = "chats.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def source_of(path: Path, **section: Any) -> TextSource:
    ((source,), _) = sources_of(DataSection(source=str(path), **section))
    return source


def messages_of(source: TextSource) -> list[list[dict[str, Any]]]:
    found = [piece.conversation for piece in open_text(source).pieces]
    assert all(found)
    return [[dict(message) for message in each.messages] for each in found if each is not None]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [ASKED, SAID]},
        SHARED,
        {"conversation": SHARED["conversations"]},
        {"instruction": "who?", "output": "I."},
        {"instruction": "who?", "input": "", "output": "I."},
        {"messages": json.dumps([ASKED, SAID])},
        {"messages": {"role": ["user", "assistant"], "content": ["who?", "I."]}},
        {"messages": [ASKED, {**SAID, "content": [{"type": "text", "text": "I"}, {"type": "text", "text": "."}]}]},
        {"messages": [{**ASKED, "tool_calls": None}, {"role": "GPT", "content": "I."}]},
    ],
)
def test_the_common_forms_are_known_by_their_columns(tmp_path: Path, row: dict[str, Any]) -> None:
    source = source_of(write(tmp_path, row))
    assert source.conversations is not None and source.conversations.words
    assert messages_of(source) == [[ASKED, SAID]]
    assert TextSource.from_json(json.loads(json.dumps(source.to_json()))) == source


def test_an_input_and_a_system_prompt_are_part_of_it(tmp_path: Path) -> None:
    row = {"instruction": "add", "input": "1 and 2", "output": "3", "system": "be brief"}
    ((system, asked, said),) = messages_of(source_of(write(tmp_path, row)))
    assert system == {"role": "system", "content": "be brief"}
    assert asked["content"] == "add\n\n1 and 2" and said["content"] == "3"


def test_text_stays_text_and_a_named_column_is_what_is_read(tmp_path: Path) -> None:
    both = write(tmp_path, {"text": "a text", "messages": [ASKED, SAID]})
    assert source_of(both).conversations is None  # as it always was
    assert messages_of(source_of(both, messages_column="messages")) == [[ASKED, SAID]]
    pairs = write(tmp_path, {"asked": "who?", "said": "I.", "messages": "none"}, name="pairs.jsonl")
    assert messages_of(source_of(pairs, prompt_column="asked", answer_column="said")) == [[ASKED, SAID]]
    other = write(tmp_path, {"body": "a text", "messages": [ASKED, SAID]}, name="other.jsonl")
    assert source_of(other, column="body").conversations is None


def test_every_kind_of_file(tmp_path: Path) -> None:
    rows = [SHARED] * 3
    (tmp_path / "a.json").write_text(json.dumps(rows, indent=1))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    (tmp_path / "a.csv").write_text("instruction,output\nwho?,I.\nwho?,I.\nwho?,I.\n")
    (tmp_path / "b.csv").write_text("id;instruction;output\n" + "1;who?;I.\n" * 3)
    (tmp_path / "a.tsv").write_text("instruction\toutput\n" + "who?\tI.\n" * 3)
    for name in ("a.json", "a.parquet", "a.csv", "b.csv", "a.tsv"):
        assert messages_of(source_of(tmp_path / name)) == [[ASKED, SAID]] * 3, name
    (tmp_path / "a.txt").write_text("who?")
    with pytest.raises(InputError, match="plain text and has no columns"):
        source_of(tmp_path / "a.txt", messages_column="messages")


def test_keys_that_only_arrow_gives_a_call_are_left_out(tmp_path: Path) -> None:
    calls = [{"function": {"name": name, "arguments": {key: 1}}} for name, key in (("turn", "by"), ("stop", "at"))]
    called = [ASKED, {"role": "assistant", "content": "", "tool_calls": calls}]
    tools = [{"name": "turn", "parameters": {"by": {"type": "int"}}}, {"name": "stop", "parameters": {"at": {"x": 1}}}]
    rows = [{"messages": called, "tools": tools}, {"messages": [ASKED, SAID], "tools": tools}]
    table = pyarrow.Table.from_pylist(rows)
    assert "null" not in json.dumps(rows) and "null" in json.dumps(table.to_pylist())
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    source = source_of(tmp_path / "a.parquet")
    assert messages_of(source) == [called, [ASKED, SAID]]
    assert [piece.conversation.tools for piece in open_text(source).pieces if piece.conversation] == [tuple(tools)] * 2
    calls[0]["function"]["arguments"] = {"by": None}  # said so in JSON
    assert messages_of(source_of(write(tmp_path, {"messages": called}))) == [called]


@pytest.mark.parametrize(
    ("messages", "what"),
    [
        ([], "the conversation is empty"),
        ("I.", "text that is not JSON"),
        (7, "no list of messages"),
        (["I."], "message 1 is no object"),
        ([{"content": "who?"}, SAID], "message 1 has no role"),
        ([ASKED, {"role": "narrator", "content": "he said"}], "the role 'narrator', which is not known"),
        ([ASKED, {"role": "assistant"}], "message 2 has no text"),
        ([ASKED, {"role": "assistant", "content": [{"type": "image"}]}], "message 2 has no text"),
        ([ASKED, {"role": "assistant", "content": " \n"}], "the answer is empty (message 2)"),
        ([ASKED], "no answer of the assistant"),
        ([SAID, ASKED], "turns out of order: message 1 (assistant) answers nobody"),
        ([ASKED, ASKED, SAID], "message 2 (user) follows another of the user"),
        ([ASKED, SAID, SAID], "message 3 (assistant) follows another of the assistant"),
        ([ASKED, {"role": "system", "content": "be brief"}, SAID], "message 2 (system) does not come first"),
        ([ASKED, {"role": "tool", "content": "1"}, SAID], "message 2 (tool) answers no call"),
        ([ASKED, {"role": "assistant", "content": "\ud800"}], "half a character"),
        ([ASKED, {"role": "assistant", "content": "a\0b"}], "a NUL character"),
    ],
)
def test_bad_conversations_are_told_like_bad_rows(tmp_path: Path, messages: Any, what: str) -> None:
    path = write(tmp_path, {"messages": [ASKED, SAID]}, {"messages": messages}, {"messages": [ASKED, SAID]})
    with pytest.raises(InputError) as caught:
        messages_of(source_of(path))
    problem = caught.value
    assert what in problem.what and problem.where == f"{path}:2" and problem.exit_code == 78
    assert "data.on_bad_rows=skip leaves such rows out" in str(problem.do)
    opened = open_text(source_of(path, on_bad_rows="skip"))
    assert len(list(opened.pieces)) == 2 and opened.bad.count == 1


def test_a_missing_column_says_what_could_be_meant(tmp_path: Path) -> None:
    path = write(tmp_path, {"prompt": "who?", "completion": "I."})
    with pytest.raises(InputError) as caught:
        list(open_text(source_of(path)).pieces)
    assert "data.prompt_column: prompt and data.answer_column: completion" in str(caught.value.do)
    with pytest.raises(InputError) as caught:
        list(open_text(source_of(path, messages_column="turns")).pieces)
    assert "there is no column 'turns'" in caught.value.what and "data.messages_column" in str(caught.value.do)
    assert MESSAGES.in_words() == "column 'messages'"


def test_a_column_that_no_row_has_is_no_bad_row(tmp_path: Path) -> None:
    path = write(tmp_path, {"messages": [ASKED, SAID]}, {"messages": [ASKED, SAID]})
    with pytest.raises(InputError) as caught:
        list(open_text(source_of(path, messages_column="message")).pieces)
    assert "no column 'message'; did you mean 'messages'?" in caught.value.what
    assert "set data.messages_column" in str(caught.value.do) and "on_bad_rows" not in str(caught.value.do)
    path = write(tmp_path, {"messages": [ASKED, SAID]}, {"turns": [ASKED, SAID]})
    with pytest.raises(InputError, match="there is no column") as caught:
        list(open_text(source_of(path)).pieces)
    assert "data.on_bad_rows=skip" in str(caught.value.do)


def test_reasons_that_are_not_shown_are_counted(tmp_path: Path) -> None:
    bad: list[Any] = [[], "I.", 7, ["I."], [ASKED]]
    path = write(tmp_path, {"messages": [ASKED, SAID]}, *({"messages": messages} for messages in bad))
    opened = open_text(source_of(path, on_bad_rows="skip"))
    list(opened.pieces)
    assert opened.bad.words().startswith("5 bad rows left out: ") and opened.bad.words().endswith(", others (2)")

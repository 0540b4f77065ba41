"""Which tokens of a conversation are learned, for the templates of well-known models: exactly the assistant's words and
the token that ends them, wherever the template puts them, and never by guessing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_templates import FAMILIES, REASONING, Family, make_chat_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from coremill.data.chat_packing import ChatJob, ChatTokenizer
from coremill.data.chat_template import ChatTemplate, special_tokens_of
from coremill.data.conversations import Conversation, ConversationForm
from coremill.data.pieces import Piece
from coremill.data.tokenizer_files import load_tokenizer
from coremill.errors import InputError

MESSAGES = ConversationForm(kind="messages", columns=("messages",))
TALK = [
    ("system", "be brief"),
    ("user", "who are you?"),
    ("assistant", "I am a mill."),
    ("user", "and?"),
    ("assistant", "I turn."),
]


class Chat:
    """One family's tokenizer, as packing uses it."""

    def __init__(self, folder: Path, family: Family) -> None:
        self.family, self.folder = family, folder
        make_chat_tokenizer(folder, family)
        self.tokenizer = load_tokenizer(folder)
        self._jobs = {
            learn: ChatTokenizer(self.tokenizer, folder, ChatJob(family.template, learn, 512, 400))
            for learn in ("answers", "last-answer", "all")
        }

    def tokens(self, conversation: Conversation, learn: str = "answers") -> tuple[np.ndarray, np.ndarray]:
        job, piece = self._jobs[learn], Piece("", "x.jsonl", 1, True, 0, conversation)
        ((ids, learned),) = job.tokens([job.written(piece)], [piece])
        return ids, learned

    def learned_texts(self, conversation: Conversation, learn: str = "answers") -> list[str]:
        """What is learned, a text for each stretch of tokens that follow each other."""
        ids, learned = self.tokens(conversation, learn)
        edges = np.flatnonzero(np.diff(learned.astype(np.int8), prepend=0, append=0)).reshape(-1, 2)
        return [self.decoded(ids[first:last]) for first, last in edges]

    def decoded(self, ids: Any) -> str:
        return str(self.tokenizer.backend.decode([int(each) for each in ids], skip_special_tokens=False))

    def whole(self, conversation: Conversation) -> str:
        return self.decoded(self.tokens(conversation)[0])


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Chat]:
    root = tmp_path_factory.mktemp("chats")
    return {name: Chat(root / name, family) for name, family in (FAMILIES | REASONING).items()}


def conversation(*turns: tuple[str, str], **more: Any) -> Conversation:
    return MESSAGES.read({"messages": [{"role": role, "content": text} for role, text in turns], **more}, "x.jsonl:1")


def talk_for(family: Family) -> list[tuple[str, str]]:
    return TALK if family.has_system else TALK[1:]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_words_and_the_end_token_of_every_answer(chats: dict[str, Chat], name: str) -> None:
    chat = chats[name]
    blank = " " if chat.family.blank_in_front else ""
    expected = [f"{blank}{words}{chat.family.end}" for words in ("I am a mill.", "I turn.")]
    asked = conversation(*talk_for(chat.family))
    assert chat.learned_texts(asked) == expected
    assert chat.learned_texts(asked, "last-answer") == expected[1:]
    ids, learned = chat.tokens(asked, "all")
    assert learned[1:].all() and not learned[0]
    if chat.family.bos is not None:  # which the template writes, and the tokenizer would put there too
        assert chat.whole(asked).count(chat.family.bos) == (name != "zephyr")


@pytest.mark.parametrize("name", FAMILIES)
def test_the_text_is_what_transformers_makes_of_it(chats: dict[str, Chat], name: str) -> None:
    from transformers import AutoTokenizer

    chat, turns = chats[name], talk_for(chats[name].family)
    theirs = AutoTokenizer.from_pretrained(str(chat.folder))
    messages = [{"role": role, "content": text} for role, text in turns]
    assert (
        theirs.apply_chat_template(messages, tokenize=True, return_dict=False)
        == chat.tokens(conversation(*turns))[0].tolist()
    )


words = st.text(
    st.characters(exclude_categories=("Cs",), exclude_characters="\0<>[]|"), min_size=1, max_size=30
).filter(lambda text: bool(text.strip()))


@settings(max_examples=60, deadline=None)
@given(pairs=st.lists(st.tuples(words, words), min_size=1, max_size=4), name=st.sampled_from(sorted(FAMILIES)))
def test_what_is_learned_decodes_to_the_answers(
    chats: dict[str, Chat], pairs: list[tuple[str, str]], name: str
) -> None:
    chat = chats[name]
    turns = [turn for asked, answer in pairs for turn in (("user", asked), ("assistant", answer))]
    found = chat.learned_texts(conversation(*turns))
    assert len(found) == len(pairs)
    trims = name in ("llama3", "gemma")
    for text, (_, answer) in zip(found, pairs, strict=True):
        written = answer.strip() if trims else answer
        # A blank of the template may be one token with the first word.
        assert text in (written + chat.family.end, f" {written}{chat.family.end}")


def test_an_answer_like_its_header_or_the_question_is_not_mistaken(chats: dict[str, Chat]) -> None:
    for name, chat in chats.items():
        for same in ("assistant", "a", "user", "model"):
            texts = chat.learned_texts(conversation(("user", same), ("assistant", same)))
            assert [text.strip().removesuffix(chat.family.end) for text in texts][-1].endswith(same), (name, texts)
            assert len("".join(texts)) < len(same) + 40


def test_thoughts_are_learned_where_the_template_writes_them(chats: dict[str, Chat]) -> None:
    asked = conversation(
        ("user", "one?"), ("assistant", "<think>\nhm\n</think>\n\n1"), ("user", "two?"), ("assistant", "2")
    )
    assert chats["qwen3"].learned_texts(asked) == ["1<|im_end|>", "<think>\n\n</think>\n\n2<|im_end|>"]
    asked = conversation(("user", "one?"), ("assistant", "<think>\nhm\n</think>\n\n1"))
    assert chats["qwen3"].learned_texts(asked) == ["<think>\nhm\n</think>\n\n1<|im_end|>"]


def test_a_header_that_only_an_answer_to_come_has(chats: dict[str, Chat]) -> None:
    asked = conversation(("user", "one?"), ("assistant", "<1>"), ("user", "two?"), ("assistant", "2"))
    assert chats["r1"].learned_texts(asked) == ["<1><|eos|>", "2<|eos|>"]


def test_a_template_that_marks_its_answers_is_followed(chats: dict[str, Chat]) -> None:
    asked = conversation(("user", "one?"), ("assistant", "1"), ("user", "two?"), ("assistant", "2"))
    assert chats["marked"].learned_texts(asked) == ["1</s>", "2</s>"]
    assert chats["marked"].learned_texts(asked, "last-answer") == ["2</s>"]


def test_calls_of_tools_are_learned_and_their_results_are_not(chats: dict[str, Chat]) -> None:
    call = {"function": {"name": "turn", "arguments": {"by": 1}}}
    messages = [
        {"role": "user", "content": "turn it"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "turned"},
        {"role": "assistant", "content": [{"type": "text", "text": "It has "}, {"type": "text", "text": "turned."}]},
    ]
    asked = MESSAGES.read({"messages": messages, "tools": '[{"name": "turn"}]'}, "x.jsonl:1")
    called = '<tool_call>\n{"name": "turn", "arguments": {"by": 1}}\n</tool_call><|im_end|>'
    assert chats["chatml"].learned_texts(asked) == [called, "It has turned.<|im_end|>"]
    assert '# Tools\n[{"name": "turn"}]' in chats["chatml"].whole(asked)


@pytest.mark.parametrize("form", ["function", "plain"])
def test_a_call_is_learned_whole_where_a_last_turn_is_written_otherwise(chats: dict[str, Chat], form: str) -> None:
    named = [{"name": name, "arguments": {"city": "Ulm"}} for name in ("weather", "time")]
    calls = [{"function": call} if form == "function" else call for call in named]
    messages = [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "content": "weather: sunny, time: 7"},
        {"role": "assistant", "content": "It is sunny.", "reasoning_content": "so"},
        {"role": "user", "content": "and?"},
        {"role": "assistant", "content": "Bye."},
    ]
    chat = chats["qwen3 calls"]
    written = "".join(
        f'<tool_call>\n{{"name": "{call["name"]}", "arguments": {{"city": "Ulm"}}}}\n</tool_call>' for call in named
    )
    assert chat.learned_texts(MESSAGES.read({"messages": messages}, "x:1")) == [
        f"{written}<|im_end|>",
        "<think>\nso\n</think>\n\nIt is sunny.<|im_end|>",
        "<think>\n\n</think>\n\nBye.<|im_end|>",
    ]


@pytest.mark.parametrize(
    "turn",
    [
        "",  # the call is not written at all
        "{% if loop.last %}last {% endif %}",
        "{% for c in m.tool_calls or [] %}{{ c.name }}{{ ' at last' if loop.last and m == messages[-1] }}{% endfor %}",
    ],
)
def test_a_call_whose_end_cannot_be_told_is_refused(turn: str) -> None:
    lines = "{% for m in messages %}<s>{{ m.role }}: " + turn + "{{ m.content }}</s>{% endfor %}"
    template = ChatTemplate(lines + "{% if add_generation_prompt %}<s>assistant: {% endif %}", {}, ["<s>", "</s>"])
    call = {"role": "assistant", "content": "", "tool_calls": [{"name": "turn"}]}
    messages = [{"role": "user", "content": "turn it"}, call, {"role": "tool", "content": "turned"}]
    with pytest.raises(InputError, match="cannot be told"):
        template.written(MESSAGES.read({"messages": messages}, "x:1"), "answers", "x:1")


@pytest.mark.parametrize("closing", ["", "{% if not add_generation_prompt %}{{ eos_token }}{% endif %}"])
def test_the_header_of_the_next_turn_ends_no_answer(closing: str) -> None:
    lines = "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '\n' }}{% endfor %}" + closing
    header = "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
    template = ChatTemplate(lines + header, {"eos_token": "</s>"}, ["<|user|>", "<|assistant|>", "</s>"])
    asked = conversation(("user", "one?"), ("assistant", "1"), ("user", "two?"), ("assistant", "2"))
    written = template.written(asked, "answers", "x:1")
    last = "2\n</s>" if closing else "2"
    assert [written.text[first:end] for first, end in written.learned] == ["1", last] and written.end_mark == ""


def test_an_end_that_is_no_token_and_none_at_all_are_told(tmp_path: Path) -> None:
    folder = make_chat_tokenizer(tmp_path, FAMILIES["zephyr"])
    asked = conversation(("user", "one?"), ("assistant", "1"), ("user", "two?"), ("assistant", "2"))
    tokens = ("</s>",)
    plain = ChatTemplate(FAMILIES["chatml"].template, special_tokens_of(folder), tokens)
    written = plain.written(asked, "answers", "x:1")
    assert [written.text[first:last] for first, last in written.learned] == ["1<|im_end|>", "2<|im_end|>"]
    assert written.end_mark == "<|im_end|>"
    lines = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    endless = ChatTemplate(lines, {}, tokens)
    for same in ("assistant", "assistant: ", "user: "):  # it writes no header for an answer to come
        written = endless.written(conversation(("user", "as"), ("assistant", same)), "answers", "x:1")
        assert written.learned == ((len("user: as\nassistant: "), len(f"user: as\nassistant: {same}")),)
    headed = lines + "{% if add_generation_prompt %}assistant: {% endif %}"
    written = ChatTemplate(headed, {}, tokens).written(asked, "answers", "x:1")
    assert [written.text[first:last] for first, last in written.learned] == ["1", "2"] and written.end_mark == ""


@pytest.mark.parametrize(("inside", "end_mark"), [("", ""), ("<|im_end|>", None)])
def test_marks_that_close_before_the_end_token_are_told(inside: str, end_mark: str | None) -> None:
    behind = "" if inside else "<|im_end|>"
    answer = "{% generation %}{{ m.content }}" + inside + "{% endgeneration %}" + behind
    lines = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }} {% else %}"
        + answer
        + "{% endif %}{% endfor %}"
    )
    asked = conversation(("user", "one?"), ("assistant", "1"))
    written = ChatTemplate(lines, {}, ["<|im_end|>"]).written(asked, "answers", "x:1")
    assert written.end_mark == end_mark
    assert [written.text[first:last] for first, last in written.learned] == ["1" + inside]


def test_a_template_that_writes_earlier_turns_anew_is_refused() -> None:
    counting = "{% for m in messages %}[{{ messages | length }} {{ m.role }}]{{ m.content | upper }}</s>{% endfor %}"
    template = ChatTemplate(counting, {}, ["</s>"])
    with pytest.raises(InputError) as caught:
        template.written(conversation(("user", "one?"), ("assistant", "one")), "answers", "x.jsonl:7")
    assert "cannot be told" in caught.value.what and caught.value.where == "x.jsonl:7" and caught.value.do


def test_a_template_that_raises_is_told_with_its_words(chats: dict[str, Chat]) -> None:
    with pytest.raises(InputError) as caught:
        chats["gemma"].tokens(conversation(*TALK))
    assert "cannot write this conversation" in caught.value.what and "System role not supported" in str(
        caught.value.why
    )
    with pytest.raises(InputError, match="cannot write"):
        ChatTemplate("{{ messages[", {}, []).written(conversation(*TALK), "answers", "x:1")

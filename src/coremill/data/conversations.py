"""Conversations in rows of data: which columns hold them, in which of the common forms, and what is wrong with one.

Three forms, whatever the columns are called:

    messages           a list of messages, each {role, content} (OpenAI, Hugging Face) or {from, value} (ShareGPT)
    prompt and answer  two columns of text
    Alpaca             instruction and output, with or without an input

What is read becomes a list of {role, content}, which chat templates of Hugging Face take. Roles are written as these
write them, contents as they are; whatever else a message has (tool_calls, name, reasoning_content) goes to the template
with it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from coremill.errors import InputError

FormKind = Literal["messages", "prompt and answer", "Alpaca"]
Message = Mapping[str, Any]

USER, ASSISTANT, SYSTEM, TOOL = "user", "assistant", "system", "tool"
ROLES = {
    **dict.fromkeys(("user", "human", "prompter", "question"), USER),
    **dict.fromkeys(
        ("assistant", "gpt", "chatgpt", "bing", "bard", "model", "bot", "answer", "function_call"), ASSISTANT
    ),
    **dict.fromkeys(("system", "developer"), SYSTEM),
    **dict.fromkeys(("tool", "observation", "function_response", "function", "ipython"), TOOL),
}
# Columns by which a form is known, the first that fits.
KNOWN_FORMS: tuple[tuple[FormKind, tuple[str, ...], str], ...] = (
    ("messages", ("messages",), "messages of role and content"),
    ("messages", ("conversations",), "the form of ShareGPT"),
    ("messages", ("conversation",), "the form of ShareGPT"),
    ("Alpaca", ("instruction", "output"), "the form of Alpaca"),
)
# Pairs that are no form of their own: too many mean other things by them. Named in a refusal.
LIKELY_PAIRS = (
    *(("prompt", "completion"), ("prompt", "response"), ("prompt", "answer"), ("question", "answer")),
    *(("instruction", "response"), ("instruction", "completion"), ("query", "response"), ("input", "output")),
)
DROP = "remove the row"


@dataclass(frozen=True)
class Conversation:
    """What a chat template is given."""

    messages: tuple[Message, ...]
    tools: tuple[Any, ...] | None = None

    @property
    def answers(self) -> list[int]:
        """Which messages are the assistant's."""
        return [place for place, message in enumerate(self.messages) if message["role"] == ASSISTANT]

    @property
    def ends_with_answer(self) -> bool:
        return bool(self.messages[-1]["role"] == ASSISTANT)


@dataclass(frozen=True, kw_only=True)
class ConversationForm:
    """How rows hold conversations."""

    kind: FormKind
    columns: tuple[str, ...]  # that every row has
    words: str = ""  # how it was known, where the run file does not name it

    @property
    def optional(self) -> tuple[str, ...]:
        """Columns that are read where they are there."""
        return ("input", "system", "tools") if self.kind == "Alpaca" else ("system", "tools")

    @property
    def identity(self) -> tuple[str, ...]:
        """What the conversations depend on, for a cache key."""
        return (self.kind, *self.columns)

    def in_words(self) -> str:
        names = " and ".join(f"'{column}'" for column in self.columns)
        return f"column{'s' if len(self.columns) > 1 else ''} {names}"

    def read(self, values: Mapping[str, Any], where: str) -> Conversation:
        """The conversation of a row; InputError where it cannot be trained on."""
        if self.kind == "messages":
            messages = _messages_of(values[self.columns[0]], self.columns[0], where)
        else:
            prompt, answer = (_text_of(values[column], column, where) for column in self.columns)
            if self.kind == "Alpaca" and (more := values.get("input")):
                prompt = f"{prompt}\n\n{_text_of(more, 'input', where)}"
            if not prompt.strip():
                what = f"the prompt is empty (column '{self.columns[0]}')"
                raise InputError(what, where=where, why="an answer to nothing teaches nothing", do=DROP)
            messages = [{"role": USER, "content": prompt}, {"role": ASSISTANT, "content": answer}]
        if (system := values.get("system")) and messages[0]["role"] != SYSTEM:
            messages = [{"role": SYSTEM, "content": _text_of(system, "system", where)}, *messages]
        _require_turns(messages, where)
        return Conversation(tuple(messages), _tools_of(values.get("tools"), where))


def form_known_by(columns: Sequence[str], *, unless: str) -> ConversationForm | None:
    """The form that the columns of the data speak of; None where they do not, or have the column of plain text."""
    if unless in columns:
        return None
    for kind, needed, words in KNOWN_FORMS:
        if set(needed) <= set(columns):
            return ConversationForm(kind=kind, columns=needed, words=words)
    return None


def pair_among(columns: Sequence[str]) -> tuple[str, str] | None:
    """Columns that look like prompts and answers."""
    return next((pair for pair in LIKELY_PAIRS if set(pair) <= set(columns)), None)


def _messages_of(value: Any, column: str, where: str) -> list[dict[str, Any]]:
    if isinstance(value, str):  # as a csv or a column of text has it
        value = _parsed(value, column, where)
    if isinstance(value, Mapping) and value and all(isinstance(each, list) for each in value.values()):
        # One list for each key instead of one object for each message: older datasets of the hub.
        value = [dict(zip(value, each, strict=False)) for each in zip(*value.values(), strict=False)]
    if not isinstance(value, list):
        raise InputError(
            f"column '{column}' holds no list of messages",
            where=where,
            why='a conversation is a list: [{"role": "user", "content": "..."}, {"role": "assistant", ...}]',
            do="name the column that holds the messages in data.messages_column, or remove the row",
        )
    if not value:
        raise InputError("the conversation is empty", where=where, do=DROP)
    return [_message_of(message, number, where) for number, message in enumerate(value, 1)]


def _message_of(message: Any, number: int, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InputError(
            f"message {number} is no object",
            where=where,
            why="a message has a role and a content (or, as in ShareGPT, from and value)",
            do='write it as {"role": "user", "content": "..."}',
        )
    role_key, content_key = ("from", "value") if "role" not in message and "from" in message else ("role", "content")
    role = message.get(role_key)
    if not isinstance(role, str):
        keys = ", ".join(map(str, message)) or "none"
        raise InputError(
            f"message {number} has no role",
            where=where,
            why=f"who speaks is said by role (or from): user, assistant, system or tool; its keys are: {keys}",
            do='write it as {"role": "user", "content": "..."}',
        )
    if role.lower() not in ROLES:
        raise InputError(
            f"message {number} has the role '{role}', which is not known",
            where=where,
            why=f"known are: {', '.join(ROLES)}",
            do="write user, assistant, system or tool",
        )
    content = _content_of(message.get(content_key), number, where, or_else=bool(message.get("tool_calls")))
    more = {key: each for key, each in message.items() if key not in (role_key, content_key) and each is not None}
    return {**more, "role": ROLES[role.lower()], "content": content}


def without_nulls(value: Any) -> Any:
    """A value of Arrow without the keys that are there only because another row has them, however deep they are."""
    if isinstance(value, Mapping):
        return {key: without_nulls(each) for key, each in value.items() if each is not None}
    return [without_nulls(each) for each in value] if isinstance(value, list) else value


def _content_of(content: Any, number: int, where: str, *, or_else: bool) -> str:
    """Text, also in parts; `or_else`: the message says something else, and need have none."""
    if content is None and or_else:
        return ""
    if isinstance(content, list):
        kinds = [part.get("type") if isinstance(part, Mapping) else None for part in content]
        if all(kind == "text" for kind in kinds):
            content = "".join(str(part.get("text") or "") for part in content)
    if not isinstance(content, str):
        raise InputError(
            f"message {number} has no text",
            where=where,
            why="its content (or value) must be text, or a list of parts of the type text: images and sound are not"
            " trained on",
            do=DROP,
        )
    return checked_text(content, f"message {number}", where)


def _text_of(value: Any, column: str, where: str) -> str:
    if not isinstance(value, str):
        raise InputError(f"column '{column}' holds no text", where=where, do=f"put text there, or {DROP}")
    return checked_text(value, f"column '{column}'", where)


def checked_text(text: str, place: str, where: str) -> str:
    """A NUL and half a character are no text, here as in plain text."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        why = f"{error.reason} at character {error.start}"
        raise InputError(f"{place} holds half a character", where=where, why=why, do=DROP) from None
    if "\0" in text:
        raise InputError(f"{place} holds a NUL character", where=where, do=DROP)
    return text


def _tools_of(value: Any, where: str) -> tuple[Any, ...] | None:
    """What the assistant may call, for templates that write it down."""
    if isinstance(value, str):
        value = _parsed(value, "tools", where) if value.strip() else None
    if not value:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, Mapping) for tool in value):
        do = "write it as a list of JSON schemas, or rename the column"
        raise InputError("column 'tools' holds no list of tools", where=where, do=do)
    return tuple(value)


def _parsed(text: str, column: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        why = "in a column of text a list is written as JSON"
        raise InputError(f"column '{column}' holds text that is not JSON", where=where, why=why, do=DROP) from None


def _require_turns(messages: Sequence[Message], where: str) -> None:
    """Someone asks, the assistant answers: refuse what has no answer, an empty one, or turns out of order."""
    before = ""
    for number, message in enumerate(messages, 1):
        role = message["role"]
        if (problem := _out_of_order(role, before, number)) is not None:
            raise InputError(
                f"turns out of order: message {number} ({role}) {problem}",
                where=where,
                why="a conversation is a system prompt or none, then user and assistant in turns (tools answer calls)",
                do=f"mend or {DROP}",
            )
        if role == ASSISTANT and not message["content"].strip() and not message.get("tool_calls"):
            why = "the model would learn to say nothing"
            raise InputError(f"the answer is empty (message {number})", where=where, why=why, do=DROP)
        before = role
    if not any(message["role"] == ASSISTANT for message in messages):
        why = f"its messages are from: {', '.join(message['role'] for message in messages)}"
        raise InputError("the conversation has no answer of the assistant", where=where, why=why, do=DROP)


def _out_of_order(role: str, before: str, number: int) -> str | None:
    if role == SYSTEM and number > 1:
        return "does not come first"
    if role == ASSISTANT and before in ("", SYSTEM):
        return "answers nobody"
    if role in (USER, ASSISTANT) and role == before:
        return f"follows another of the {role}"
    if role == TOOL and before not in (ASSISTANT, TOOL):
        return "answers no call of the assistant"
    return None

"""Conversations written down by a chat template, and which stretches of what it writes the model learns to say.

A template writes everything: special tokens, headers, system prompt, tools. Nothing is added to it and nothing taken
away. What is learned of it are the answers: the assistant's words with the token that ends them, without the header in
front. Where an answer stands is never guessed:

    where the template marks answers ({% generation %}), by its marks, as transformers does;
    else an answer begins where the conversation up to it ends, written with the header of an answer behind
    (add_generation_prompt), which has to be, letter for letter, how the whole text begins;
    where a template writes no header for an answer to come (Mistral), or another one than before an answer that is
    there (DeepSeek R1 opens a thought), the conversation is written again with a mark in place of the answer.
    It ends where the conversation up to it does, which has to be how the whole begins; where the last turn is written
    otherwise (Qwen3 thinks there), what stands behind a mark in it has to be what stands there in the whole.

A template that fits none of these ends the run (or the row is left out, data.on_bad_rows): better than learning the
wrong words. All of this is about text; which tokens that means is decided where the whole text is tokenised, once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from coremill.data.conversations import Conversation
from coremill.errors import InputError

Learn = Literal["answers", "last-answer", "all"]
Span = tuple[int, int]

MARK = "\ue0f0answer\ue0f1"  # letters for private use, which no conversation has
END_OF_THOUGHT = "</think>"
# Those that transformers hands to a template.
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


@dataclass(frozen=True)
class Written:
    """A conversation as the model reads it."""

    text: str
    learned: tuple[Span, ...]  # in characters
    end_mark: str | None = None  # behind the first answer that ends with no single token; empty: there is none


class ChatTemplate:
    """One template with the special tokens of one tokenizer."""

    def __init__(self, template: str, special_tokens: Mapping[str, str], single_tokens: Iterable[str]) -> None:
        """`single_tokens`: the texts that are one token wherever they stand (added and special ones)."""
        from transformers.utils.chat_template_utils import render_jinja_template  # which imports no torch

        self._render_jinja, self._template, self._special_tokens = render_jinja_template, template, dict(special_tokens)
        self._writes_header: bool | None = None  # for an answer to come; None: not known yet
        self._marks_answers = _GENERATION.search(template) is not None
        longest_first = sorted((token for token in single_tokens if token), key=len, reverse=True)
        tokens = "|".join(map(re.escape, longest_first)) or r"(?!)"
        self._token, self._end_token = re.compile(tokens), re.compile(rf"\s*(?:{tokens})")

    def written(self, conversation: Conversation, learn: Learn, where: str) -> Written:
        """InputError where the template cannot write it, or its answers cannot be told."""
        try:
            return self._written(conversation, learn)
        except _NotTold:
            raise InputError(
                "which part of this conversation is the answer cannot be told",
                where=where,
                why="the chat template writes an answer otherwise, or in another place, once the conversation goes on",
                do="mark answers in the template with {% generation %} and {% endgeneration %} (data.chat_template)",
            ) from None
        except Exception as error:  # a template is a program: it may raise anything
            raise InputError(
                "the chat template cannot write this conversation",
                where=where,
                why=" ".join(str(error).split())[:400] or type(error).__name__,
                do="remove the row, or name another template in data.chat_template",
            ) from None

    def _written(self, conversation: Conversation, learn: Learn) -> Written:
        messages, tools = conversation.messages, conversation.tools
        text, marked = self._render(messages, tools, marked=self._marks_answers)
        if learn == "all":
            return Written(text, ((0, len(text)),))
        answers = conversation.answers
        if self._marks_answers:
            earlier = 0
            if learn == "last-answer":
                earlier = len(self._render(messages[: answers[-1]], tools, marked=True)[1])
            if not marked[earlier:]:
                raise _NotTold
            start, end = marked[-1]
            end = start + len(text[start:end].rstrip())
            return Written(text, tuple(marked[earlier:]), self._mark_of_end(text, start, end))
        spans, end_mark = [], None
        for place in answers[-1:] if learn == "last-answer" else answers:
            span, mark = self._answer(text, conversation, place)
            spans.append(span)
            end_mark = mark if end_mark is None else end_mark
        return Written(text, tuple(spans), end_mark)

    def _render(
        self, messages: Sequence[Mapping[str, Any]], tools: Any, *, header: bool = False, marked: bool = False
    ) -> tuple[str, list[Span]]:
        texts, marks = self._render_jinja(
            conversations=[list(messages)],
            tools=None if tools is None else list(tools),
            chat_template=self._template,
            return_assistant_tokens_mask=marked,
            add_generation_prompt=header,
            **self._special_tokens,
        )
        return texts[0], marks[0] if marked else []

    def _mark_of_end(self, text: str, start: int, end: int) -> str | None:
        """None where what is learned ends with a special token."""
        return None if any(token.end() == end for token in self._token.finditer(text, start, end)) else ""

    def _answer(self, text: str, conversation: Conversation, place: int) -> tuple[Span, str | None]:
        """Where an answer begins, and where it ends with its end token; the end mark where that is no token."""
        start, words = self._start(text, conversation, place)
        known, behind = self._behind(text, conversation, place, start if words is None else words[1], words)
        if words is None:
            rest = behind.rstrip()
            end = known + len(rest)
            if not text.startswith(rest, known) or not self._token.sub("", text[start:end]).strip():
                raise _NotTold  # the turn is written otherwise once the conversation goes on, or says nothing
            return (start, end), self._mark_of_end(text, start, end)
        token = self._end_token.match(behind)
        if token is not None and text.startswith(token.group(), known):
            return (words[0], known + token.end()), None
        end_mark = behind.rstrip()
        if not text.startswith(end_mark, known):  # what ends a conversation, and no answer
            end_mark = ""
        return (words[0], known + len(end_mark)), end_mark.strip()

    def _behind(
        self, text: str, conversation: Conversation, place: int, known: int, words: Span | None
    ) -> tuple[int, str]:
        """A known place in an answer, and what its turn has behind it: what is written where the conversation ends
        with this turn, so that nothing of the next one is taken for its end."""
        messages, tools = list(conversation.messages), conversation.tools
        if place == len(messages) - 1:
            return known, text[known:]
        closed = self._render(messages[: place + 1], tools)[0]
        if len(closed) >= known and text.startswith(closed):
            return known, closed[known:]
        # The last turn of a conversation is written otherwise than the same turn before others: by a mark in it.
        messages[place], said = _with_mark(messages[place])
        closed_parts = self._render(messages[: place + 1], tools)[0].split(MARK)
        marks = len(closed_parts) - 1
        if marks and words is not None:
            return known, closed_parts[marks]
        parts = self._render(messages, tools)[0].split(MARK)
        for each in (said, said.strip()):
            if 0 < marks < len(parts) and each.join(parts) == text:
                return len(each.join(parts[:marks])) + len(each), closed_parts[marks]
        raise _NotTold

    def _start(self, text: str, conversation: Conversation, place: int) -> tuple[int, Span | None]:
        """Where an answer begins, and its words; None where it has other parts too: calls, or thoughts apart."""
        messages, tools = conversation.messages, conversation.tools
        message = messages[place]
        before = self._render(messages[:place], tools, header=True)[0]
        if self._writes_header is None:
            self._writes_header = before != self._render(messages[:place], tools)[0]
        continues, calls, words = text.startswith(before), bool(message.get("tool_calls")), None
        if continues and self._writes_header:
            words = None if calls else _find_words(text, len(before), message["content"])
        elif not calls:
            words = self._words_by_mark(text, conversation, place)
        if words is not None and continues and not text[len(before) : words[0]].strip():
            words = len(before), words[1]  # a blank behind what the model is given: it has to say it
        if words is not None or (continues and self._writes_header):
            return len(before) if words is None else words[0], words
        # A call without a header in front, as Mistral writes it, begins with a token that says so.
        if continues and self._end_token.match(text, len(before)) is not None:
            return len(before), None
        raise _NotTold

    def _words_by_mark(self, text: str, conversation: Conversation, place: int) -> Span | None:
        """The answer stands where a mark does that is written in its place; all around it is the same."""
        messages = list(conversation.messages)
        content = messages[place]["content"]
        messages[place] = {**messages[place], "content": MARK}
        before, found, behind = self._render(messages, conversation.tools)[0].partition(MARK)
        words = _find_words(text, len(before), content) if found and text.startswith(before) else None
        return words if words is not None and text[words[1] :].strip() == behind.strip() else None


class _NotTold(Exception):
    """Where an answer stands cannot be told."""


def _find_words(text: str, start: int, content: str) -> Span | None:
    """The answer's words where they stand: as they are, without the blanks around them, or without its thoughts."""
    first = start
    while first < len(text) and text[first].isspace():
        first += 1
    for words in (content, content.strip(), content.rpartition(END_OF_THOUGHT)[2].strip()):
        for place in range(start, first + 1):
            if words.strip() and text.startswith(words, place):
                return place, place + len(words)
    return None


def _with_mark(message: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """A message with a mark in place of what it says, which is the name of its last call, or its words; and that."""
    if not message.get("tool_calls"):
        return {**message, "content": MARK}, message["content"]
    *earlier, call = message["tool_calls"]
    function = call.get("function")
    name = call.get("name") if function is None else function.get("name")
    if not isinstance(name, str):
        raise _NotTold
    marked = {"name": MARK} if function is None else {"function": {**function, "name": MARK}}
    return {**message, "tool_calls": [*earlier, {**call, **marked}]}, name


def special_tokens_of(folder: Path) -> dict[str, str]:
    """The tokenizer's special tokens by their names, as its files have them."""
    return {key: token for key, token in _told_tokens(folder).items() if token is not None}


def untold_tokens(template: str, folder: Path) -> list[str]:
    """Special tokens that a template names and no file of the tokenizer does: they are its class's, or there are none.
    GPT-2's files leave all of them to the class."""
    told = _told_tokens(folder)
    return [key for key in SPECIAL_TOKENS if key not in told and re.search(rf"\b{key}\b", template)]


def _told_tokens(folder: Path) -> dict[str, str | None]:
    """What the files say of special tokens; None: that there is none."""
    found: dict[str, str | None] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        try:
            document = json.loads((folder / name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if not isinstance(document, dict):
            continue
        for key in SPECIAL_TOKENS:
            token = document.get(key)
            token = token.get("content") if isinstance(token, dict) else token
            if isinstance(token, str):
                found[key] = token
            elif key in document:
                found.setdefault(key, None)
    return found

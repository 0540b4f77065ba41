"""Questions with a context and answers in it (the form of SQuAD), and what is wrong with one.

    question, context   text
    answers             {"text": [...], "answer_start": [...]} as the hub has it, or a list of {text, answer_start};
                        empty: the context has no answer (SQuAD 2.0)
    id                  text or a number; left out or empty: the number of the row

`answer_start` counts characters (code points). Where it does not fit, the likely cause is looked for and said: bytes
and UTF-16 units are what other languages count in.
"""

from __future__ import annotations

import json
import math
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from coremill.data.conversations import DROP, checked_text
from coremill.errors import InputError

IMPOSSIBLE_COLUMN = "is_impossible"  # of SQuAD 2.0 as it was published
ANSWERS_FORM = 'answers are {"text": ["..."], "answer_start": [0]} or [{"text": "...", "answer_start": 0}]'
SHOWN_CHARACTERS = 40


@dataclass(frozen=True, slots=True)
class Answer:
    """A stretch of the context."""

    text: str
    start: int  # in characters


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked of a context; no answers: it has none."""

    id: str
    question: str
    context: str
    answers: tuple[Answer, ...]


def question_of(values: Mapping[str, Any], columns: Sequence[str], id_column: str, where: str, row: int) -> Question:
    """The question of a row; InputError where it cannot be used."""
    question, context = (_text_of(values[column], column, where) for column in columns[:2])
    for name, text in (("question", question), ("context", context)):
        if not text.strip():
            raise InputError(f"the {name} is empty", where=where, do=DROP)
    impossible = str(values.get(IMPOSSIBLE_COLUMN)).lower() in ("true", "1")  # a csv has it as text
    found = () if impossible else _answers_of(values[columns[2]], columns[2], where)
    for answer in found:
        _require_in_context(answer, context, where)
    return Question(_id_of(values.get(id_column), id_column, where) or str(row), question, context, found)


def nested_questions(
    document: Mapping[str, Any], columns: Sequence[str], id_column: str
) -> Iterator[tuple[str, Any]] | None:
    """The rows of SQuAD's own file, each with its place; None where the object is no such file."""
    articles = document.get("data")
    if not isinstance(articles, list):
        return None
    return _rows_of_articles(articles, columns, id_column)


def _rows_of_articles(articles: list[Any], columns: Sequence[str], id_column: str) -> Iterator[tuple[str, Any]]:
    names = {"question": columns[0], "answers": columns[2], "id": id_column}
    for number, article in enumerate(articles):
        if not isinstance(article, Mapping) or not isinstance(article.get("paragraphs"), list):
            yield f"data[{number}]", article  # a row itself
            continue
        for at, paragraph in enumerate(article["paragraphs"]):
            place = f"data[{number}].paragraphs[{at}]"
            if not isinstance(paragraph, Mapping) or not isinstance(paragraph.get("qas"), list):
                yield place, paragraph
                continue
            for index, asked in enumerate(paragraph["qas"]):
                row = asked
                if isinstance(asked, Mapping):
                    row = {names.get(key, key): value for key, value in asked.items()}
                    row[columns[1]] = paragraph.get("context")
                yield f"{place}.qas[{index}]", row


def _id_of(value: Any, column: str, where: str) -> str:
    """Empty where the row has none: pandas writes NaN there, a csv nothing."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if not isinstance(value, str | int | float) or isinstance(value, bool):
        why = f"its value is {value!r:.60}; an id is text or a number"
        raise InputError(f"column '{column}' holds no id", where=where, why=why, do=f"set data.id_column, or {DROP}")
    text = checked_text(str(value), f"column '{column}'", where)
    return text if text.strip() else ""


def _text_of(value: Any, column: str, where: str) -> str:
    if not isinstance(value, str):
        do = f"put text there, or {DROP}"
        raise InputError(f"column '{column}' holds no text", where=where, why=f"its value is {value!r:.60}", do=do)
    return checked_text(value, f"column '{column}'", where)


def _answers_of(value: Any, column: str, where: str) -> tuple[Answer, ...]:
    if isinstance(value, str):  # as a csv has it
        value = _parsed(value, column, where)
    if isinstance(value, Mapping) and not value:
        value = []
    if isinstance(value, Mapping):
        texts, starts = value.get("text"), value.get("answer_start")
        if isinstance(texts, str):  # one answer, not in lists
            texts, starts = [texts], [starts]
        if texts is None and starts is None:
            value = None
        elif not isinstance(texts, list) or not isinstance(starts, list):
            value = value if not isinstance(texts, list) else [{"text": text} for text in texts]
        elif len(texts) != len(starts):
            what = f"there are {len(texts)} answer texts and {len(starts)} values of answer_start"
            raise InputError(what, where=where, why=ANSWERS_FORM, do=f"mend or {DROP}")
        else:
            value = [{"text": text, "answer_start": start} for text, start in zip(texts, starts, strict=True)]
    if value is None:
        why = f"{ANSWERS_FORM}; a question without an answer has an empty list"
        raise InputError(f"there is nothing in column '{column}'", where=where, why=why, do=f"mend or {DROP}")
    if not isinstance(value, list) or not all(isinstance(each, Mapping) for each in value):
        what = f"column '{column}' holds no answers"
        raise InputError(what, where=where, why=f"{ANSWERS_FORM}; it is {value!r:.60}", do=f"mend or {DROP}")
    return tuple(_answer_of(each, number, where) for number, each in enumerate(value, 1))


def _answer_of(value: Mapping[str, Any], number: int, where: str) -> Answer:
    text, start = value.get("text"), value.get("answer_start")
    if not isinstance(text, str):
        raise InputError(f"answer {number} has no text", where=where, why=ANSWERS_FORM, do=f"mend or {DROP}")
    if not text.strip():
        why = "a question that the context does not answer has an empty list of answers"
        raise InputError(f"answer {number} is empty", where=where, why=why, do="write [] where there is no answer")
    if isinstance(start, float) and start.is_integer():
        start = int(start)
    if not isinstance(start, int) or isinstance(start, bool):
        why = f"{ANSWERS_FORM}; answer_start is {start!r:.40}"
        do = "add where in the context the answer begins: context.find(text)"
        raise InputError(f"answer {number} does not say where it begins", where=where, why=why, do=do)
    return Answer(checked_text(text, f"answer {number}", where), start)


def _parsed(text: str, column: str, where: str) -> Any:
    try:
        return json.loads(text) if text.strip() else None
    except (ValueError, RecursionError):
        why = f"in a column of text answers are written as JSON: {ANSWERS_FORM}"
        do = "write the column with json.dumps, or use .jsonl or .parquet"
        raise InputError(f"column '{column}' holds text that is not JSON", where=where, why=why, do=do) from None


def _require_in_context(answer: Answer, context: str, where: str) -> None:
    text, start = answer.text, answer.start
    if start >= 0 and context.startswith(text, start):
        return
    shown = text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."
    places = _places(text, context)
    if not places:
        raise InputError(
            f"the answer {shown!r} is not in the context",
            where=where,
            why=_why_not_found(text, context) or "no stretch of the context reads like it",
            do=f"mend the answer, or {DROP}",
        )
    nearest = min(places, key=lambda place: abs(place - start))
    raise InputError(
        "answer_start is not where the answer begins",
        where=where,
        why=f"{shown!r} stands at character {nearest:,}, and answer_start is {start:,}"
        + (f": {cause[0]}" if (cause := _cause(text, start, context)) else ""),
        do=cause[1] if cause else "set answer_start to context.find(text), or remove the row",
    )


def _cause(text: str, start: int, context: str) -> tuple[str, str] | None:
    """What was counted instead of characters, and how to mend it."""
    if start < 0:
        return "it is negative", "set answer_start to context.find(text), or write [] where there is no answer"
    if context.encode()[start : start + len(text.encode())] == text.encode():
        return "it counts bytes of UTF-8", "count characters: len(context.encode()[:answer_start].decode())"
    wide = context.encode("utf-16-le")
    if wide[2 * start :].startswith(text.encode("utf-16-le")):
        cure = "count characters: len(context.encode('utf-16-le')[:2 * answer_start].decode('utf-16-le'))"
        return "it counts UTF-16 units, as JavaScript and Java do", cure
    if context.replace("\n", "\r\n").startswith(text, start):
        return "it counts line ends as two characters", "count in the text as it is here, with \\n"
    stripped = len(context) - len(context.lstrip())
    for change in (1, -1, stripped, -stripped):
        if change and start + change >= 0 and context.startswith(text, start + change):
            if abs(change) == 1:
                way = "count from 0" if change == -1 else "add 1 to answer_start"
                return f"it is one too {'large' if change == -1 else 'small'}", way
            return "it counts from behind the blanks that the context begins with", "count from its first character"
    for form in ("NFC", "NFD"):
        other = unicodedata.normalize(form, context)  # type: ignore[arg-type]
        if other.startswith(unicodedata.normalize(form, text), start):  # type: ignore[arg-type]
            return f"it counts in the {form} form of the text", f"write context and answers in {form}, or count anew"
    return None


def _why_not_found(text: str, context: str) -> str | None:
    """In what other writing the context has it."""
    if text.lower() in context.lower():
        return "the context has it in other capitals"
    if text.strip() in context:
        return "the context has it without the blanks around it"
    if " ".join(text.split()) in " ".join(context.split()):
        return "the context has it with other blanks or line breaks"
    if unicodedata.normalize("NFKC", text) in unicodedata.normalize("NFKC", context):
        return "the context has it in another Unicode form (NFC, NFD, full width)"
    return None


def _places(text: str, context: str) -> list[int]:
    places, at = [], context.find(text)
    while at >= 0:
        places.append(at)
        at = context.find(text, at + 1)
    return places

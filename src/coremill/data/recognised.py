"""What kind of rows a source has, told by its columns: plain text, or conversations in one of the common forms.

The run file may say it (data.messages_column, or data.prompt_column and data.answer_column). Else the columns do, where
data.column is left as it is and there is no such column. Of files the first row is looked at; what a dataset of the hub
has is known once it is on this machine (tokenise.py asks for it).
"""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from coremill.config.schema import DataSection
from coremill.data.compressed import is_compressed, open_bytes
from coremill.data.conversations import ConversationForm, form_known_by
from coremill.data.csv_files import SEPARATORS
from coremill.data.files import BYTE_ORDER_MARK
from coremill.data.json_arrays import first_element
from coremill.data.sources import TextSource
from coremill.errors import InputError

FIRST_LINE_BYTES = 1 << 25
TEXT_COLUMN = str(DataSection.model_fields["column"].default)


def form_set(section: DataSection) -> ConversationForm | None:
    """What the run file says."""
    if section.messages_column is not None:
        return ConversationForm(kind="messages", columns=(section.messages_column,))
    if section.prompt_column is not None and section.answer_column is not None:
        return ConversationForm(kind="prompt and answer", columns=(section.prompt_column, section.answer_column))
    return None


def recognised(source: TextSource, section: DataSection) -> TextSource:
    """The source with the form of its conversations, where it holds them; a dataset of the hub as it is."""
    form = form_set(section)
    if form is None and source.kind not in ("hub", "txt", "built-in") and source.column == TEXT_COLUMN:
        form = form_known_by(first_columns(source), unless=source.column)
    if form is None:
        return source
    require_columns(source, f"conversations are read from {form.in_words()}")
    return replace(source, conversations=form)


def require_columns(source: TextSource, why: str) -> None:
    """Refuse plain text where columns are needed."""
    if source.kind in ("txt", "built-in"):
        raise InputError(
            f"{source.name} is plain text and has no columns",
            where=source.where,
            why=why,
            do="name .jsonl, .json, .csv, .tsv or .parquet files, or an hf:// dataset",
        )


def first_columns(source: TextSource) -> list[str]:
    """Of the first row; none where that cannot be read: who reads it all says why."""
    path = Path(source.files[0])
    try:
        if source.kind == "parquet":
            import pyarrow.parquet

            return [] if is_compressed(path) else list(pyarrow.parquet.read_schema(path).names)
        with open_bytes(path) as stream:
            if source.kind == "json" and stream.peek(1).removeprefix(BYTE_ORDER_MARK).lstrip()[:1] != b"{":
                first = first_element(stream, path)
            else:
                line = stream.readline(FIRST_LINE_BYTES)
                while line.isspace():
                    line = stream.readline(FIRST_LINE_BYTES)
                text = line.removeprefix(BYTE_ORDER_MARK).decode("utf-8")
                if source.kind in ("csv", "tsv"):
                    return _names_in_header(text, SEPARATORS[source.kind])
                first = json.loads(text)
    except (InputError, OSError, ValueError, RecursionError):  # Arrow's errors are ValueErrors
        return []
    return list(first) if isinstance(first, dict) else []


def _names_in_header(line: str, separator: str) -> list[str]:
    names = [next(csv.reader([line], delimiter=sign), []) for sign in (separator, ";")]
    return [name.strip() for name in max(names, key=len)]


def words_of_forms(sources: Sequence[TextSource]) -> list[str]:
    """What was known by its columns alone."""
    forms = {source.name: source.conversations for source in sources if source.conversations is not None}
    return [
        f"{name} holds conversations: {form.words}, known by {form.in_words()}"
        for name, form in forms.items()
        if form.words
    ]


def require_one_kind(section: DataSection, training: Sequence[TextSource], evaluation: TextSource | None) -> None:
    """Refuse text beside conversations, and what is said of conversations where there are none."""
    sources = [*training, *([] if evaluation is None else [evaluation])]
    texts = [source for source in sources if source.conversations is None]
    if len(texts) == len(sources):
        given = [f"data.{name}" for name in ("chat_template", "learn") if name in _set_beside(section)]
        if given:
            raise InputError(
                f"{' and '.join(given)} {'is' if len(given) == 1 else 'are'} given, but {texts[0].name} holds text",
                where=given[0],
                why=f"conversations are known by their columns; this is read from the column '{section.column}'",
                do="set data.messages_column, or data.prompt_column and data.answer_column, or leave it out",
            )
    elif texts:
        others = [source for source in sources if source.conversations is not None]
        raise InputError(
            f"{texts[0].name} holds text, and {others[0].name} conversations",
            where=texts[0].where,
            why="a run trains and evaluates on one of the two: their losses are on different things",
            do="make both of one kind: a text as a conversation has a prompt and an answer",
        )


def _set_beside(section: DataSection) -> set[str]:
    plain = DataSection()
    return {name for name in ("chat_template", "learn") if getattr(section, name) != getattr(plain, name)}

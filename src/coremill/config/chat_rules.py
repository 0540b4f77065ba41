"""Rules between keys about conversations; the form is that of rules.py."""

from __future__ import annotations

from coremill.config.rule import Breach, Rule
from coremill.config.schema import BUILT_IN, DataSection, RunConfig

_TEXT_COLUMN = DataSection.model_fields["column"].default


def _prompts_have_answers(config: RunConfig) -> Breach | None:
    """`data.prompt_column` and `data.answer_column` go together."""
    named = {"data.prompt_column": config.data.prompt_column, "data.answer_column": config.data.answer_column}
    given = [key for key, value in named.items() if value is not None]
    if len(given) != 1:
        return None
    missing = next(key for key in named if key not in given)
    return Breach(
        given[0],
        f"{given[0]} is given without {missing}",
        "an example is a prompt and its answer",
        f"set {missing} too; for one column of text set data.column instead",
    )


def _one_form_of_conversations(config: RunConfig) -> Breach | None:
    """`data.messages_column`, `data.prompt_column` and a `data.column` of text exclude each other."""
    data = config.data
    named = {"data.messages_column": data.messages_column, "data.prompt_column": data.prompt_column}
    if data.column != _TEXT_COLUMN:
        named["data.column"] = data.column
    given = [key for key, value in named.items() if value is not None]
    if len(given) < 2:
        return None
    return Breach(
        given[0],
        f"{' and '.join(given)} are given together",
        "each of them says where the examples are",
        "keep one: messages_column for conversations, prompt_column with answer_column for pairs, column for text",
        others=tuple(given[1:]),
    )


def _conversations_of_a_source(config: RunConfig) -> Breach | None:
    """Columns of conversations go with a `data.source` or `data.sources`: the built-in text has none."""
    data = config.data
    named = {"data.messages_column": data.messages_column, "data.prompt_column": data.prompt_column}
    given = [key for key, value in named.items() if value is not None]
    if not given or data.sources is not None or data.source != BUILT_IN:
        return None
    return Breach(
        given[0],
        f"{given[0]} is given, but data.source is {BUILT_IN}",
        "the built-in text has no columns",
        "set data.source to files (chats.jsonl) or to a dataset (hf://owner/name)",
        others=("data.source",),
    )


CHAT_RULES = [
    Rule(("data.prompt_column", "data.answer_column"), _prompts_have_answers),
    Rule(("data.messages_column", "data.prompt_column", "data.column"), _one_form_of_conversations),
    Rule(("data.messages_column", "data.prompt_column", "data.source", "data.sources"), _conversations_of_a_source),
]

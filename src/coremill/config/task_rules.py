"""Rules between the task and other keys; the form is that of rules.py.

Our tasks are named here because a key that a task does not read would be left unheard: that is refused. Tasks of other
packages may read any key.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from coremill.config.rule import Breach, Rule
from coremill.config.schema import BUILT_IN, RunConfig
from coremill.registry import BUILT_IN as OUR_TASKS

CAUSAL_LM, QUESTION_ANSWERING, CLASSIFICATION = "causal-lm", "question-answering", "sequence-classification"
ENCODERS = (QUESTION_ANSWERING, CLASSIFICATION)
_INSTEAD = {
    "train.tokens_per_step": "train.samples_per_step says how many rows a step has",
    "train.samples_per_step": "train.tokens_per_step says how much a step learns from",
    "data.column": "data.text_columns names the columns of sequence-classification, data.context_column and the like"
    " those of question-answering",
    "data.sources": "data.source takes several files: a folder or a pattern",
    "data.text_columns": "data.column names the column of causal-lm",
}

# Keys that are not for every task of ours: which read them.
READ_BY: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(
        (
            "train.tokens_per_step",
            "data.sources",
            "data.column",
            "data.messages_column",
            "data.prompt_column",
            "data.answer_column",
            "data.chat_template",
            "data.learn",
            "data.special_tokens",
            "data.attention_across_documents",
        ),
        (CAUSAL_LM,),
    ),
    **dict.fromkeys(
        ("train.samples_per_step", "model.dropout", "model.attention_dropout", "sample.context"),
        ENCODERS,
    ),
    **dict.fromkeys(("model.labels", "data.text_columns", "data.label_column"), (CLASSIFICATION,)),
    **dict.fromkeys(
        (
            "data.question_column",
            "data.context_column",
            "data.answers_column",
            "data.id_column",
            "data.doc_stride",
            "evaluation.n_best",
            "evaluation.max_answer_tokens",
            "evaluation.null_threshold",
        ),
        (QUESTION_ANSWERING,),
    ),
}


def _keys_of_the_task(config: RunConfig) -> Breach | None:
    if config.task not in OUR_TASKS["coremill.tasks"]:
        return None
    wrong = [key for key in _changed(config) if config.task not in READ_BY[key]]
    if not wrong:
        return None
    key, readers = wrong[0], READ_BY[wrong[0]]
    instead = _INSTEAD.get(key)
    return Breach(
        key,
        f"{key} is given, but task is {config.task}",
        f"only {' and '.join(readers)} {'reads' if len(readers) == 1 else 'read'} it",
        f"remove it{f'; {instead}' if instead else ''}, or set task: {readers[0]}",
        others=("task", *wrong[1:]),
    )


_keys_of_the_task.__doc__ = (
    "A key that some tasks do not read goes with one that does: "
    + "; ".join(
        f"{', '.join(f'`{key}`' for key in READ_BY if READ_BY[key] == readers)} with "
        + " or ".join(f"`{name}`" for name in readers)
        for readers in dict.fromkeys(READ_BY.values())
    )
    + "."
)


def _changed(config: RunConfig) -> Iterator[str]:
    """Keys of the table that are not at their default."""
    for key in READ_BY:
        section, _, name = key.partition(".")
        values = getattr(config, section)
        if getattr(values, name) != type(values).model_fields[name].default:
            yield key


def _stride_below_the_length(config: RunConfig) -> Breach | None:
    """`data.doc_stride` is below `data.sequence_length`: rows of a context that is cut begin at different places."""
    stride, length = config.data.doc_stride, config.data.sequence_length
    if config.task != QUESTION_ANSWERING or stride < length:
        return None
    return Breach(
        "data.doc_stride",
        f"data.doc_stride ({stride}) is not below data.sequence_length ({length})",
        "rows of a long context overlap by so many tokens: they would never get on",
        f"set data.doc_stride to {max(1, length // 3)} or so, or make the rows longer",
        others=("data.sequence_length",),
    )


def _two_columns_are_two(config: RunConfig) -> Breach | None:
    """The columns of an example (`data.text_columns`, `data.label_column`; of questions likewise) differ."""
    data = config.data
    named = {
        CLASSIFICATION: ("data.text_columns", [*data.text_columns, data.label_column]),
        QUESTION_ANSWERING: (
            "data.question_column",
            [data.question_column, data.context_column, data.answers_column, data.id_column],
        ),
    }
    key, columns = named.get(config.task, ("", []))
    twice = next((column for column in columns if columns.count(column) > 1), None)
    if twice is None:
        return None
    return Breach(
        key,
        f"the column {twice} is named twice",
        "each holds another part of an example",
        "name each column once",
    )


def _each_class_once(config: RunConfig) -> Breach | None:
    """The names in `model.labels` differ."""
    names = config.model.labels if isinstance(config.model.labels, list) else []
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is None:
        return None
    return Breach(
        "model.labels",
        f"model.labels has {twice} twice",
        "each is a class of its own, which rows are given by its name",
        "name each class once",
    )


def _encoders_are_not_built_in(config: RunConfig) -> Breach | None:
    """`task: question-answering` and `task: sequence-classification` need a `model` and a `data.source`."""
    if config.task not in ENCODERS:
        return None
    if config.model.name == BUILT_IN and config.model.config is None:
        return Breach(
            "task",
            f"task is {config.task}, but no model is named",
            "the built-in model continues text, it is no encoder",
            "set model: bert-base-uncased, or another encoder of the hub or in a folder",
        )
    if config.data.source == BUILT_IN:
        examples = "questions and answers" if config.task == QUESTION_ANSWERING else "labels"
        return Breach(
            "task",
            f"task is {config.task}, but no data is named",
            f"the built-in text has no {examples}",
            "set data.source to files (train.jsonl) or to a dataset (hf://owner/name)",
        )
    return None


def _context_of_a_prompt(config: RunConfig) -> Breach | None:
    """`sample.context` goes with `sample.prompt`, and with one: a question needs a text that its answer is in."""
    sample = config.sample
    if config.task == QUESTION_ANSWERING and sample.prompt is not None and sample.context is None:
        return Breach(
            "sample.prompt",
            "sample.prompt is given without sample.context",
            "the answer to a question is a part of a text",
            "set sample.context to a text, or remove sample.prompt",
        )
    if sample.context is None or sample.prompt is not None:
        return None
    return Breach(
        "sample.context",
        "sample.context is given without sample.prompt",
        "a context is that of a question, or the second text of a pair",
        "set sample.prompt too, or remove sample.context",
    )


def _pairs_have_both_texts(config: RunConfig) -> Breach | None:
    """`sample.context` is there where `data.text_columns` names two columns, and only there."""
    if config.task != CLASSIFICATION or config.sample.prompt is None:
        return None
    pairs = len(config.data.text_columns) == 2
    if pairs == (config.sample.context is not None):
        return None
    return Breach(
        "sample.context" if not pairs else "sample.prompt",
        "sample.context is given, but data.text_columns names one column"
        if not pairs
        else "sample.prompt is given without sample.context, and data.text_columns names two columns",
        "a sample has the texts of an example: sample.prompt is the first, sample.context the second",
        "remove sample.context" if not pairs else "set sample.context to the second text",
        others=("data.text_columns",),
    )


TASK_RULES = [
    Rule(("task", *READ_BY), _keys_of_the_task),
    Rule(("task", "data.doc_stride", "data.sequence_length"), _stride_below_the_length),
    Rule(
        (
            "task",
            "data.text_columns",
            "data.label_column",
            "data.question_column",
            "data.context_column",
            "data.answers_column",
            "data.id_column",
        ),
        _two_columns_are_two,
    ),
    Rule(("model.labels",), _each_class_once),
    Rule(("task", "model.name", "model.config", "data.source"), _encoders_are_not_built_in),
    Rule(("task", "sample.prompt", "sample.context"), _context_of_a_prompt),
    Rule(("task", "sample.prompt", "sample.context", "data.text_columns"), _pairs_have_both_texts),
]

"""The section `data` of the run file: which examples to train and to evaluate on, and how they become rows."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from coremill.config.section import AUTO, BUILT_IN, PositiveInt, Section

ColumnName = Annotated[str, Field(min_length=1)]


class SourceSection(Section):
    """One of several sources."""

    source: str = Field(min_length=1, description="in the form of data.source")
    share: Annotated[float, Field(gt=0, le=1)] | None = Field(
        None,
        description="part of the rows of a run; all sources have one, together 1, or none has: then their sizes decide",
    )
    column: str | None = Field(None, description="left out: data.column")
    split: str | None = Field(None, description="of an hf:// source; left out: data.split")


def _source_only(value: Any) -> Any:
    """`sources: [a.txt, b.csv]` is short for `sources: [{source: a.txt}, {source: b.csv}]`."""
    return {"source": value} if isinstance(value, str) else value


ListedSource = Annotated[SourceSection, BeforeValidator(_source_only, json_schema_input_type=str | SourceSection)]


class DataSection(Section):
    """Which text to train on, and how it becomes rows."""

    source: str = Field(
        BUILT_IN,
        min_length=1,
        description="hf://[owner/]name[:config][@revision], a path, glob or folder of .txt, .jsonl, .json, .csv, .tsv"
        " or .parquet files (also .gz, .zst), or built-in",
    )
    sources: Annotated[list[ListedSource], Field(min_length=1)] | None = Field(
        None, description="several sources instead of one, mixed by their shares: [{source: a.csv, share: 0.7}, ...]"
    )
    column: str = Field("text", description="the column (all files but txt, and hf) that holds the text")
    messages_column: str | None = Field(None, description="the column of conversations; left out: known by its name")
    prompt_column: str | None = Field(None, description="the column that holds prompts; goes with answer_column")
    answer_column: str | None = Field(None, description="the column that holds the answers to them")
    chat_template: str | None = Field(
        None, description="a file with a Jinja chat template, which the export gets too; left out: the tokenizer's own"
    )
    learn: Literal["answers", "last-answer", "all"] = Field(
        "answers", description="what the loss of a conversation is on: answers with their end tokens, the last one, all"
    )
    text_columns: Annotated[list[ColumnName], Field(min_length=1, max_length=2)] = Field(
        ["text"],
        json_schema_extra={"x-form": "a list of one or two columns: [sentence1, sentence2]"},
        description="of sequence-classification: the column that holds the text, or two, whose texts are judged as one",
    )
    label_column: ColumnName = Field("label", description="the column that holds the class, or the number to come to")
    question_column: ColumnName = Field("question", description="of question-answering: the column of questions")
    context_column: ColumnName = Field("context", description="the column of texts that answers are found in")
    answers_column: ColumnName = Field(
        "answers",
        description="the column of answers: {text: [...], answer_start: [...]}, in characters; none: [] in both",
    )
    id_column: ColumnName = Field(
        "id", description="the column that names a question in predictions.json; not there: rows are numbered"
    )
    doc_stride: PositiveInt = Field(
        128, description="a context that does not fit into a row is cut into rows that overlap by so many tokens"
    )
    split: str = Field("train", description="the split of an hf:// source to train on")
    evaluation_source: str | None = Field(None, description="files to evaluate on, in the form of source")
    evaluation_split: str | None = Field(None, description="the split of an hf:// source to evaluate on")
    evaluation_fraction: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0,
        description="share of the text held out for evaluation where no evaluation source or split is named: whole"
        " documents, chosen by train.seed; where none come near the share, the tail of one",
    )
    sequence_length: PositiveInt = Field(
        512, description="tokens per row; where rows are padded (question-answering, sequence-classification) at most"
    )
    on_bad_rows: Literal["stop", "skip"] = Field(
        "stop",
        description="stop: end with 78 at the first row that cannot be used (not UTF-8, broken JSON, no text);"
        " skip: leave such rows out, count and list them",
    )
    special_tokens: Literal["auto", "none"] = Field(
        AUTO,
        description="auto: around each document what its tokenizer puts around a text (Llama-3, Gemma, Mistral: BOS in"
        " front), once; none: no such tokens; the end token between documents is there either way",
    )
    attention_across_documents: bool = Field(
        True,
        description="false: a token attends only to its own document, at some cost in speed; refused (78) for families"
        " that do not keep documents apart (docs/families.md). Conversations are kept apart wherever the family can",
    )

"""Encoded examples: what they look like on disk, and the rows of a run made of them.

An encoding is a folder:

    tokens.bin          ids of all rows one after the other, uint16 or uint32; a row has as many as it needs
    types.bin           uint8 per token: its token type; left out where all are 0
    lengths.npy         int32 per row
    labels.npy          int64 (a class) or float32 (a number) per row; of questions instead
    start_positions.npy, end_positions.npy      int32 per row: the tokens the answer begins and ends with
    examples.npy        int32 per row, ascending: which example it is of, from 0; of questions there may be several rows
    origins.npy         labelled texts: int64 x 2 per row: which file of the source, from 0, and which row of it, from 1
    groups.npy          int32 per example: those of one context are held out together
    offsets.bin         questions: int32 x 2 per token: the stretch of the context it stands for; -1: of none
    examples.jsonl      questions: id, question, context and answers, one a line
    example_places.npy  questions: uint64 per example: where its line begins
    manifest.json       `EncodedManifest`

What is held out for evaluation is a choice of examples, made anew from the seed wherever it is asked for: no copy.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from coremill.config.schema import RunConfig
from coremill.data.labels import Labels
from coremill.errors import InputError

ENCODED_VERSION = 3  # part of every key: raise it when the meaning of the files, or what is made of examples, changes
MANIFEST_FILE = "manifest.json"
TOKENS_FILE, TYPES_FILE, OFFSETS_FILE = "tokens.bin", "types.bin", "offsets.bin"
LENGTHS_FILE, ROW_EXAMPLES_FILE, GROUPS_FILE = "lengths.npy", "examples.npy", "groups.npy"
EXAMPLES_FILE, EXAMPLE_PLACES_FILE, ORIGINS_FILE = "examples.jsonl", "example_places.npy", "origins.npy"
CLASSIFICATION_TARGETS, QUESTION_TARGETS = ("labels",), ("start_positions", "end_positions")

ExampleKind = Literal["labelled texts", "questions"]


def target_file(name: str) -> str:
    return f"{name}.npy"


@dataclass(frozen=True, kw_only=True)
class EncodedManifest:
    """What one encoding holds."""

    version: int
    key: str
    source: str
    tokenizer: str  # folder name, for people
    kind: ExampleKind
    sequence_length: int  # no row is longer
    rows: int
    examples: int
    groups: int
    tokens: int  # of all rows
    dtype: Literal["uint16", "uint32"]
    has_types: bool
    longest_row: int
    pad_id: int
    padding_side: Literal["right", "left"]
    null_position: int  # questions: the token that stands for no answer
    cut_rows: int  # texts: longer than a row, and cut
    unanswerable: int  # questions: examples without an answer
    outside_rows: int  # questions: windows of answerable ones that do not hold the answer
    labels: Labels | None  # of labelled texts
    highest_id: int
    highest_token: str
    sizes: dict[str, int]  # in bytes, of the files
    bad_rows: int = 0  # left out
    bad_rows_words: str = ""
    notes: tuple[str, ...] = ()  # what people must hear of how examples were read

    @property
    def targets(self) -> tuple[str, ...]:
        return CLASSIFICATION_TARGETS if self.kind == "labelled texts" else QUESTION_TARGETS

    def write(self, folder: Path) -> None:
        (folder / MANIFEST_FILE).write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def from_counts(cls, counts: Mapping[str, Any]) -> EncodedManifest:
        """As they come out of JSON."""
        labels = counts.get("labels")
        found = None if labels is None else Labels.from_json(labels)
        return cls(**{**counts, "labels": found, "notes": tuple(counts["notes"])})


def read_encoded_manifest(folder: Path) -> EncodedManifest | None:
    """Of a whole encoding; None where it is missing, damaged, outdated, or does not fit its files."""
    try:
        manifest = EncodedManifest.from_counts(json.loads((folder / MANIFEST_FILE).read_text(encoding="utf-8")))
        whole = manifest.version == ENCODED_VERSION and all(
            (folder / name).stat().st_size == size for name, size in manifest.sizes.items()
        )
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return manifest if whole else None


@dataclass(frozen=True, kw_only=True)
class EncodedRows:
    """Rows of examples, ready to be read by any number of ranks (encoded_split.py opens them)."""

    kind: ExampleKind
    folder: Path  # the encoding to train on, or all of it where some is held out
    evaluation_folder: Path | None  # the encoding to evaluate on; None: what is held out, or nothing
    evaluation_fraction: float  # of `folder`, held out; 0: nothing
    seed: int  # that chooses what is held out
    key: str  # changes with examples, tokenizer, length, labels and split
    train_rows: int
    evaluation_rows: int
    train_examples: int
    evaluation_examples: int
    sequence_length: int  # no row is longer
    longest_row: int  # of those to train on
    train_tokens: int
    tokens: int  # both splits together
    padding_side: Literal["right", "left"]
    labels: Labels | None  # of labelled texts
    unanswerable: int  # questions without an answer, in both splits
    cut_rows: int
    from_cache: bool
    seconds: float
    bad_rows: int = 0  # left out of both
    bad_rows_words: str = ""  # how many, why, and where they are listed
    evaluation_words: str = ""  # what was held out
    evaluation_files: tuple[str, ...] = ()  # what the rows to evaluate on come from, by the numbers in origins.npy
    notes: tuple[str, ...] = ()
    commits: Mapping[str, str] = field(default_factory=dict)  # of datasets of the hub, by their names in the run file

    @property
    def mean_row_tokens(self) -> float:
        """Of the rows to train on."""
        return self.train_tokens / max(1, self.train_rows)

    def counts(self) -> dict[str, Any]:
        """The fields of the event `data`."""
        found: dict[str, Any] = {
            "train_rows": self.train_rows,
            "evaluation_rows": self.evaluation_rows,
            "tokens": self.tokens,
            "dropped_tokens": 0,
            "documents": self.train_examples + self.evaluation_examples,
            "evaluation_documents": self.evaluation_examples,
            "evaluation_words": self.evaluation_words,
            "bad_rows": self.bad_rows,
            "bad_rows_words": self.bad_rows_words,
            "mean_row_tokens": self.mean_row_tokens,
            "longest_row": self.longest_row,
        }
        if self.kind == "questions":
            found["unanswerable"] = self.unanswerable
        else:
            found["cut_rows"] = self.cut_rows
        if self.labels is not None:
            found["labels"] = list(self.labels.names) or self.labels.count
        return found | ({"notes": list(self.notes)} if self.notes else {})

    def files(self) -> list[Path]:
        """What hosts must have alike."""
        targets = CLASSIFICATION_TARGETS if self.kind == "labelled texts" else QUESTION_TARGETS
        names = (TOKENS_FILE, LENGTHS_FILE, ROW_EXAMPLES_FILE, GROUPS_FILE, *map(target_file, targets))
        folders = [self.folder, *([] if self.evaluation_folder is None else [self.evaluation_folder])]
        return [folder / name for folder in folders for name in names]

    def in_words(self) -> str:
        evaluated = f"{self.evaluation_rows:,}"
        if self.kind == "questions" and self.evaluation_rows:
            evaluated = self._side(self.evaluation_rows, self.evaluation_examples)
        return f"{self._side(self.train_rows, self.train_examples)} to train and {evaluated} to evaluate on"

    def train_in_words(self) -> str:
        """How much there is to train on."""
        words = f"{self._side(self.train_rows, self.train_examples)}, {self.mean_row_tokens:,.0f} tokens on average"
        if self.labels is not None:
            words += f"; {self.labels.in_words()}"
        return words

    def _side(self, rows: int, examples: int) -> str:
        if self.kind == "labelled texts":
            return f"{rows:,} row{'s' if rows != 1 else ''}"
        return f"{rows:,} window{'s' if rows != 1 else ''} of {examples:,} question{'s' if examples != 1 else ''}"

    def explain_change(self, config: RunConfig, earlier: Mapping[str, Any], *, what: str, anew: str) -> InputError:
        """Why a run whose config was `earlier` finds other rows than it began with."""
        why = "the examples, their labels, the tokenizer or the length of rows have changed since"
        return InputError(what, where="data", why=why, do=f"bring the old examples and tokenizer back; or {anew}")

    def to_json(self) -> dict[str, Any]:
        """What a rank is handed: there `from_json` costs no hashing."""
        evaluation = None if self.evaluation_folder is None else str(self.evaluation_folder)
        return {**asdict(self), "folder": str(self.folder), "evaluation_folder": evaluation}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> EncodedRows:
        """The inverse of `to_json`."""
        values = {field.name: document[field.name] for field in fields(cls) if field.name in document}
        values["folder"] = Path(values["folder"])
        values |= {name: tuple(values[name]) for name in ("notes", "evaluation_files") if name in values}
        if values["evaluation_folder"] is not None:
            values["evaluation_folder"] = Path(values["evaluation_folder"])
        if values["labels"] is not None:
            values["labels"] = Labels.from_json(values["labels"])
        return cls(**values)

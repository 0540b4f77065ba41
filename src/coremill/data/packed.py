"""The values of the data stage: what is being prepared, and what packed rows look like on disk.

A packing is a folder with these files:

    tokens.bin      rows x sequence_length token ids, uint16 or uint32, row after row; then the tail that fills no row
    boundaries.bin  uint32 per row: how many targets a row loses when documents may not see each other
    documents.bin   uint64 per document of a whole source: how many tokens there are up to its end
    manifest.json   `PackedManifest`: the sizes of the others, and what they were made from

One of conversations has whole ones in each row, which is filled up, so that nothing follows from ids alone:

    marks.bin       uint8 per token of tokens.bin: LEARNED, STARTS (the first of a conversation, and of what fills up)
    rows.bin        2 x uint32 per row: how many of its tokens are learned, how many are real
    documents.bin   2 x uint64 per conversation: where in tokens.bin it stands, how long it is
                    (and no boundaries.bin)

Documents held out for evaluation make a folder of two packings, `train` and `evaluation` (holdout.py).

Positions inside a document need no file: a document ends with the end token, so they follow from the ids. Where a
tokenizer begins a text with its end token (OPT), one token stands between two documents: the second begins with it, and
to the first it is what comes after its last word.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from coremill.config.schema import RunConfig
from coremill.errors import InputError

FORMAT_VERSION = 3  # part of every cache key: raise it when the meaning of the files changes
TOKENS_FILE = "tokens.bin"
BOUNDARIES_FILE = "boundaries.bin"
DOCUMENTS_FILE = "documents.bin"
MANIFEST_FILE = "manifest.json"
BOUNDARY_BYTES, DOCUMENT_BYTES = 4, 8
MARKS_FILE = "marks.bin"
ROWS_FILE = "rows.bin"
ROW_BYTES, CONVERSATION_BYTES = 8, 16
LEARNED, STARTS = 1, 2  # of a token, in marks.bin

Split = Literal["train", "evaluation"]
Stage = Literal["hash", "wait", "download", "tokenise", "encode", "hold out", "train tokenizer"]


@dataclass(frozen=True)
class Progress:
    """How far preparing has come; `wait` means that another process is at the same work."""

    documents_done: int
    bytes_done: int
    bytes_total: int | None
    tokens: int
    stage: Stage
    is_done: bool = False  # the last word on this stage
    counted: str = "documents"  # or conversations, examples


@dataclass(frozen=True, kw_only=True)
class ConversationCounts:
    """What packed conversations hold besides rows."""

    learn: str  # as data.learn has it
    real_tokens: int  # without those that fill rows up
    learned_tokens: int  # of these
    cut: int = 0  # conversations of which a row cuts off learned tokens
    cut_learned: int = 0  # these tokens
    left_out: int = 0  # conversations of which nothing learned is left
    end_ids: tuple[int, ...] = ()  # the tokens that answers end with

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> ConversationCounts:
        return cls(**{**document, "end_ids": tuple(document["end_ids"])})

    def __add__(self, other: ConversationCounts) -> ConversationCounts:
        summed = ("real_tokens", "learned_tokens", "cut", "cut_learned", "left_out")
        sums = {name: getattr(self, name) + getattr(other, name) for name in summed}
        return ConversationCounts(**sums, learn=self.learn, end_ids=tuple(sorted({*self.end_ids, *other.end_ids})))


@dataclass(frozen=True, kw_only=True)
class PackedManifest:
    """What one packing holds."""

    version: int
    key: str
    source: str
    tokenizer: str  # folder name, for people
    eos_id: int
    dtype: Literal["uint16", "uint32"]
    sequence_length: int
    rows: int
    tokens: int  # in full rows
    dropped_tokens: int  # the tail that fills no row
    documents: int
    empty_documents: int  # left out: nothing but white space
    highest_id: int
    highest_token: str
    bad_rows: int = 0  # left out
    bad_rows_words: str = ""  # how many and why
    begin_ids: tuple[int, ...] = ()  # put in front of every document
    is_plain: bool = True  # special tokens made no difference: the tokens are those of data.special_tokens: none
    notes: tuple[str, ...] = ()  # how files were read, where that needs words
    conversations: ConversationCounts | None = None  # None: it is text

    @property
    def kind(self) -> str:
        """What its documents are called, for people."""
        return "documents" if self.conversations is None else "conversations"

    @property
    def real_tokens(self) -> int:
        """In full rows, without those that fill them up."""
        return self.tokens if self.conversations is None else self.conversations.real_tokens

    @property
    def documents_bytes(self) -> int:
        """Of documents.bin."""
        return self.documents * (DOCUMENT_BYTES if self.conversations is None else CONVERSATION_BYTES)

    def sizes(self) -> dict[str, int]:
        """In bytes, of the files that ranks read."""
        if self.conversations is None:
            return {TOKENS_FILE: self.tokens_bytes, BOUNDARIES_FILE: self.rows * BOUNDARY_BYTES}
        return {TOKENS_FILE: self.tokens_bytes, MARKS_FILE: self.tokens, ROWS_FILE: self.rows * ROW_BYTES}

    @property
    def end_begins_next(self) -> bool:
        """The token that ends a document is the one that begins the next."""
        return list(self.begin_ids[:1]) == [self.eos_id]

    @property
    def all_tokens(self) -> int:
        """Those of full rows and the tail."""
        return self.tokens + self.dropped_tokens

    @property
    def tokens_bytes(self) -> int:
        return self.all_tokens * (2 if self.dtype == "uint16" else 4)

    def write(self, folder: Path) -> None:
        document = asdict(self)
        if self.conversations is None:  # that of text is as it always was
            del document["conversations"]
        (folder / MANIFEST_FILE).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def with_conversation_counts(counts: Mapping[str, Any]) -> dict[str, Any]:
    """Counts as they come out of JSON, those of conversations as what they are."""
    if (found := counts.get("conversations")) is None:
        return dict(counts)
    return {**counts, "conversations": ConversationCounts.from_json(found)}


def read_manifest(folder: Path) -> PackedManifest | None:
    """The manifest of a whole packing; None where it is missing, damaged, outdated, or does not fit its files."""
    try:
        document = json.loads((folder / MANIFEST_FILE).read_text(encoding="utf-8"))
        manifest = PackedManifest(**with_conversation_counts(document))
        whole = (
            manifest.version == FORMAT_VERSION
            and manifest.rows > 0
            and manifest.tokens == manifest.rows * manifest.sequence_length
            and all((folder / name).stat().st_size == size for name, size in manifest.sizes().items())
        )
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return manifest if whole else None


@dataclass(frozen=True, kw_only=True)
class SourceRows:
    """One of several sources whose rows are mixed."""

    name: str  # as the run file has it
    folder: Path  # the packing to train on
    rows: int  # in it
    tokens: int  # in these
    documents: int  # in these
    share_asked: float | None  # None: as large as it is
    share: float  # of the rows of the run
    evaluation_folder: Path | None = None  # what was held out of it
    evaluation_rows: int = 0
    evaluation_documents: int = 0

    def counts(self, rows_per_epoch: int) -> dict[str, Any]:
        """For the event `data`."""
        plain = ("name", "documents", "rows", "tokens", "evaluation_documents", "evaluation_rows")
        passes = self.share * rows_per_epoch / self.rows
        shares = {"share_asked": self.share_asked, "share": self.share, "passes_per_epoch": passes}
        return {name: getattr(self, name) for name in plain} | shares

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> SourceRows:
        """The inverse of `PackedData.to_json`."""
        values = {field.name: document[field.name] for field in fields(cls)}
        for name in ("folder", "evaluation_folder"):
            values[name] = None if values[name] is None else Path(values[name])
        return cls(**values)


@dataclass(frozen=True, kw_only=True)
class PackedData:
    """Rows ready to be read by any number of ranks."""

    folder: Path  # the packing to train on; of several sources the first
    evaluation_folder: Path | None  # the packing to evaluate on, where there is one; likewise
    key: str  # changes with text, tokenizer, length and split
    train_rows: int
    evaluation_rows: int
    sequence_length: int
    tokens: int  # both splits together
    dropped_tokens: int
    documents: int
    eos_id: int
    from_cache: bool
    seconds: float
    bad_rows: int = 0  # left out of both
    bad_rows_words: str = ""  # how many, why, and where they are listed
    evaluation_documents: int = 0  # of `documents`
    train_documents: int | None = None  # likewise; one whose tail is held out is in both. None: all the others
    evaluation_words: str = ""  # what was held out of the training text
    begin_ids: tuple[int, ...] = ()  # the special tokens in front of every document; a sample's prompt gets them too
    is_plain: bool = True  # special tokens made no difference
    sources: tuple[SourceRows, ...] = ()  # where several are mixed; their rows are numbered one source after the other
    notes: tuple[str, ...] = ()  # how files were read, where that needs words
    conversations: ConversationCounts | None = None  # of both splits; None: it is text
    evaluation_conversations: ConversationCounts | None = None  # of these; None: no rows of them are evaluated on
    commits: Mapping[str, str] = field(default_factory=dict)  # of datasets of the hub, by their names in the run file

    @property
    def end_begins_next(self) -> bool:
        """The token that ends a document is the one that begins the next."""
        return self.begin_ids[:1] == (self.eos_id,)

    def folders(self, split: Split) -> tuple[Path, ...]:
        """The packings whose rows, one after the other, are those of a split."""
        if split == "train":
            return tuple(source.folder for source in self.sources) or (self.folder,)
        held_out = tuple(source.evaluation_folder for source in self.sources if source.evaluation_folder is not None)
        return held_out or (self.evaluation_folder or self.folder,)

    def counts(self) -> dict[str, Any]:
        rows = ("train_rows", "evaluation_rows", "tokens", "dropped_tokens", "documents", "evaluation_documents")
        words = ("bad_rows", "bad_rows_words", "evaluation_words")
        plain = {name: getattr(self, name) for name in (*rows, *words)}
        sources = [source.counts(self.train_rows) for source in self.sources]
        if (chat := self.conversations) is not None:
            names = {
                "cut": "cut_conversations",
                "cut_learned": "cut_learned_tokens",
                "left_out": "left_out_conversations",
            }
            plain |= {"learn": chat.learn, "learned_tokens": chat.learned_tokens}
            plain |= {"row_padding_tokens": self.row_padding_tokens}
            plain |= {said: getattr(chat, name) for name, said in names.items()}
        return plain | ({"sources": sources} if sources else {}) | ({"notes": list(self.notes)} if self.notes else {})

    def files(self) -> list[Path]:
        folders = [*self.folders("train"), *(self.folders("evaluation") if self.evaluation_rows else ())]
        beside = (BOUNDARIES_FILE,) if self.conversations is None else (MARKS_FILE, ROWS_FILE)
        return [folder / name for folder in folders for name in (TOKENS_FILE, *beside)]

    @property
    def row_padding_tokens(self) -> int:
        """Those that fill up rows of conversations, in both splits."""
        return (self.train_rows + self.evaluation_rows) * self.sequence_length - self.tokens

    def in_words(self) -> str:
        rows = f"{self.train_rows:,} rows to train and {self.evaluation_rows:,} to evaluate on"
        if self.conversations is None:
            return f"{rows}, {self.documents:,} documents"
        all_rows = self.train_rows + self.evaluation_rows
        learned = self._learned_in_words(all_rows, self.tokens, self.conversations.learned_tokens)
        return f"{rows}, {_many(self.documents, 'conversation')}; {learned}"

    def _learned_in_words(self, rows: int, tokens: int, learned: int) -> str:
        assert self.conversations is not None
        what = {"answers": "answers", "last-answer": "the last answers", "all": "all"}[self.conversations.learn]
        return (
            f"{tokens:,} tokens, {learned:,} of them learned ({learned / tokens:.1%}: {what}),"
            f" {1 - tokens / (rows * self.sequence_length):.1%} of the rows is padding"
        )

    def train_in_words(self) -> str:
        """How much there is to train on."""
        documents = self.train_documents or self.documents - self.evaluation_documents
        if self.conversations is not None:
            tokens, learned = self.tokens, self.conversations.learned_tokens
            if (held_out := self.evaluation_conversations) is not None:
                tokens, learned = tokens - held_out.real_tokens, learned - held_out.learned_tokens
            rows = f"{_many(self.train_rows, 'row')} of {self.sequence_length:,} tokens"
            of = _many(documents, "conversation")
            return f"{rows} from {of}; {self._learned_in_words(self.train_rows, tokens, learned)}"
        of_documents = _many(documents, "document")
        tokens = self.train_rows * self.sequence_length
        return f"{self.train_rows:,} rows of {self.sequence_length:,} tokens ({tokens:,} in all) from {of_documents}"

    def explain_change(self, config: RunConfig, earlier: Mapping[str, Any], *, what: str, anew: str) -> InputError:
        """Why a run whose config was `earlier` does not find its rows any more; `anew`: how to begin another one."""
        older = is_without_special_tokens(earlier)
        where, do = "data", f"bring the old text and tokenizer back; or {anew}"
        why = "the text, the tokenizer or the packing of its rows has changed since"
        if older and config.data.evaluation_fraction:
            where, do = "data.evaluation_fraction", f"{anew}; or finish this one with coremill 0.1.0"
            why = (
                "it was begun by coremill 0.1.0, which held out rows; now whole documents are held out, so that none is"
                " trained and evaluated on"
            )
        elif older and not self.is_plain:
            where, do = "data.special_tokens", f"go on as before with --set data.special_tokens=none; or {anew}"
            why = (
                "it was begun by coremill 0.1.0, which left out the special tokens that this tokenizer puts around a"
                " text"
            )
        return InputError(what, where=where, why=why, do=do)

    def to_json(self) -> dict[str, Any]:
        """What a rank is handed: there `from_json` costs no hashing."""
        document = asdict(self)
        document["folder"] = str(self.folder)
        document["evaluation_folder"] = None if self.evaluation_folder is None else str(self.evaluation_folder)
        for source in document["sources"]:
            source["folder"] = str(source["folder"])
            source["evaluation_folder"] = source["evaluation_folder"] and str(source["evaluation_folder"])
        return document

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> PackedData:
        """The inverse of `to_json`."""
        values = {field.name: document[field.name] for field in fields(cls) if field.name in document}
        values["folder"] = Path(values["folder"])
        for name in ("conversations", "evaluation_conversations"):
            if values.get(name) is not None:
                values[name] = ConversationCounts.from_json(values[name])
        values["begin_ids"], values["notes"] = tuple(values["begin_ids"]), tuple(values["notes"])
        values["sources"] = tuple(SourceRows.from_json(source) for source in values["sources"])
        if values["evaluation_folder"] is not None:
            values["evaluation_folder"] = Path(values["evaluation_folder"])
        return cls(**values)


def _many(count: int, word: str) -> str:
    return f"{count:,} {word}{'' if count == 1 else 's'}"


def is_without_special_tokens(earlier: Mapping[str, Any]) -> bool:
    """A config of 0.1.0: it put the end token behind every document, and nothing else."""
    return "special_tokens" not in earlier.get("data", {})


def require_id_in_vocabulary(token_id: int, token: str, vocabulary_rows: int, tokenizer_name: str, place: str) -> None:
    """Refuse ids the model has no embedding for, which would be an index error, or worse, in the middle of training."""
    if token_id >= vocabulary_rows:
        raise InputError(
            f"token id {token_id} ({token!r}) is beyond the model's embedding of {vocabulary_rows} rows",
            where=f"tokenizer: {tokenizer_name}, at {place}",
            why=f"the model knows ids 0 to {vocabulary_rows - 1}: this tokenizer was made for another model",
            do="leave the key tokenizer out to use the model's own, or choose a model with as many rows",
        )

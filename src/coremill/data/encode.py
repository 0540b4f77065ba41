"""Examples to encoded rows on disk, once per source, tokenizer, length and labels: `prepare_examples`.

Runs without torch in the launcher, as tokenise.py does for text: what was encoded before is found in the cache, else a
process of its own makes it. Labels are those of the examples to train on; those to evaluate on must be among them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from coremill.config.schema import RunConfig
from coremill.data.bad_rows import LISTING_FILE
from coremill.data.cache import build_once
from coremill.data.child_process import run_in_child
from coremill.data.encoded import ENCODED_VERSION, EncodedManifest, EncodedRows, read_encoded_manifest
from coremill.data.encoded_split import HeldOut, share_out
from coremill.data.examples import ExampleForm
from coremill.data.labels import Labels
from coremill.data.packed import Progress, require_id_in_vocabulary
from coremill.data.run_sources import commits_of, sources_of
from coremill.data.source_identity import Stamps, hash_of, require_unchanged, told_identity
from coremill.data.sources import TextSource, open_text, stamps_of
from coremill.data.tokenizer_files import tokenizer_identity
from coremill.errors import InputError
from coremill.plan.card import require_positions

OF_TRAINING = "the labels of the training data"


@dataclass(frozen=True)
class Encoding:
    """Encoded examples in the cache."""

    folder: Path
    manifest: EncodedManifest
    from_cache: bool


@dataclass(frozen=True)
class AskedLabels:
    """Classes or a number, where the run file or the model says it."""

    labels: Labels
    setting: str  # who says it, for messages: model.labels
    may_name: bool = True  # where only their number is known, the labels of the data may name them


@dataclass(frozen=True)
class Encoder:
    """Encodes one source after the other with the same tokenizer and length."""

    sequence_length: int
    doc_stride: int
    tokenizer_folder: Path
    vocabulary_rows: int
    cache: Path
    progress: Callable[[Progress], None]
    code_sha256: str | None

    def encode(self, source: TextSource, asked: AskedLabels | None) -> Encoding:
        stamps = stamps_of(source)
        key = self._key_of(source, stamps, asked)
        final = self.cache / key
        from_cache = build_once(
            final,
            is_whole=lambda folder: read_encoded_manifest(folder) is not None,
            build=lambda partial: self._build(source, stamps, asked, key, partial),
            on_wait=lambda: self.progress(Progress(0, 0, None, 0, "wait")),
        )
        manifest = read_encoded_manifest(final)
        assert manifest is not None, "build_once returns only when the encoding is whole"
        require_id_in_vocabulary(
            manifest.highest_id, manifest.highest_token, self.vocabulary_rows, str(self.tokenizer_folder), source.where
        )
        return Encoding(final, manifest, from_cache)

    def encoded_before(self, source: TextSource, asked: AskedLabels | None) -> EncodedManifest | None:
        """What the cache holds of these examples; nothing is made."""
        return read_encoded_manifest(self.cache / self._key_of(source, stamps_of(source), asked))

    def _key_of(self, source: TextSource, stamps: Stamps, asked: AskedLabels | None) -> str:
        assert source.examples is not None
        return hash_of(
            "examples",
            ENCODED_VERSION,
            told_identity(source, stamps, self.progress),
            tokenizer_identity(self.tokenizer_folder),
            self.sequence_length,
            self.doc_stride if source.examples.kind == "questions" else 0,
            source.on_bad_rows,
            self.code_sha256,
            None if asked is None else (asked.labels, asked.may_name, asked.setting),
        )

    def job_of(self, source: TextSource, asked: AskedLabels | None) -> dict[str, Any]:
        """What the process that encodes needs to know."""
        return {
            "job": "encode",
            "source": source.to_json(),
            "tokenizer_folder": str(self.tokenizer_folder),
            "code_sha256": self.code_sha256,
            "cache": str(self.cache.parent),
            "sequence_length": self.sequence_length,
            "doc_stride": self.doc_stride,
            "vocabulary_rows": self.vocabulary_rows,
            "labels": None if asked is None else asked.labels.to_json(),
            "labels_setting": "" if asked is None else asked.setting,
            "may_name": asked is None or asked.may_name,
        }

    def _build(self, source: TextSource, stamps: Stamps, asked: AskedLabels | None, key: str, partial: Path) -> None:
        size = sum(size for size, _ in stamps) or None
        last = Progress(0, 0, size, 0, "encode" if source.dataset is None else "download")

        def on_progress(progress: Progress) -> None:
            nonlocal last
            last = progress
            self.progress(progress)

        self.progress(last)  # from here on it takes time: the process has to start, and the tokenizer to be read
        counts = run_in_child({**self.job_of(source, asked), "destination": str(partial)}, on_progress)
        require_unchanged(source, stamps)
        assert source.examples is not None
        manifest = EncodedManifest.from_counts(
            {
                **counts,
                "version": ENCODED_VERSION,
                "key": key,
                "source": source.name,
                "tokenizer": self.tokenizer_folder.name,
                "kind": source.examples.kind,
                "sequence_length": self.sequence_length,
            }
        )
        read = last.bytes_total or last.bytes_done
        self.progress(
            Progress(
                manifest.examples, read, last.bytes_total, manifest.tokens, "encode", is_done=True, counted="examples"
            )
        )
        manifest.write(partial)


def prepare_examples(
    config: RunConfig,
    *,
    form: ExampleForm,
    doc_stride: int = 0,
    asked: AskedLabels | None = None,
    tokenizer_folder: Path,
    vocabulary_rows: int,
    max_positions: int | None,
    cache: Path,
    progress: Callable[[Progress], None] | None = None,
    code_sha256: str | None = None,
) -> EncodedRows:
    """The rows of a run, from the cache where they were encoded before.

    `asked`: what the labels are, where the run file or the model says it; else the training data does.
    """
    started = time.perf_counter()
    section = config.data
    require_positions(section.sequence_length, max_positions)
    encoder = Encoder(
        section.sequence_length,
        doc_stride,
        tokenizer_folder.absolute(),
        vocabulary_rows,
        cache.absolute() / "data",
        progress or (lambda _: None),
        code_sha256,
    )
    (source, *more), evaluated = sources_of(section, form)
    if more:
        raise InputError(
            f"task {config.task} reads one source",
            where="data.sources",
            why="mixing in shares is for text that is packed into rows",
            do="name the files in data.source, as a glob or folder where there are several",
        )
    training = encoder.encode(source, asked)
    labels = training.manifest.labels
    evaluation = None
    if evaluated is not None:
        setting = OF_TRAINING if asked is None or asked.labels != labels else asked.setting
        known = None if labels is None else AskedLabels(labels, setting, may_name=False)
        evaluation = encoder.encode(evaluated, known)
    shares = share_out(training.folder, training.manifest, section.evaluation_fraction, config.train.seed)
    files = (source if evaluated is None else evaluated).file_names
    rows = _rows(config, training, evaluation, shares, files, time.perf_counter() - started)
    return replace(rows, commits=commits_of([source, evaluated]))


def _rows(
    config: RunConfig,
    training: Encoding,
    evaluation: Encoding | None,
    shares: HeldOut,
    files: tuple[str, ...],
    seconds: float,
) -> EncodedRows:
    fraction, seed = config.data.evaluation_fraction, config.train.seed
    whole, other = training.manifest, None if evaluation is None else evaluation.manifest
    used = [training, *([] if evaluation is None else [evaluation])]
    return EncodedRows(
        kind=whole.kind,
        folder=training.folder,
        evaluation_folder=None if evaluation is None else evaluation.folder,
        evaluation_fraction=fraction,
        seed=seed,
        key=hash_of(*(each.manifest.key for each in used), fraction, seed if fraction else 0),
        train_rows=shares.train_rows,
        evaluation_rows=shares.evaluation_rows if other is None else other.rows,
        train_examples=shares.train_examples,
        evaluation_examples=shares.evaluation_examples if other is None else other.examples,
        sequence_length=whole.sequence_length,
        longest_row=shares.longest_row,
        train_tokens=shares.train_tokens,
        tokens=sum(each.manifest.tokens for each in used),
        padding_side=whole.padding_side,
        labels=whole.labels,
        unanswerable=sum(each.manifest.unanswerable for each in used),
        cut_rows=sum(each.manifest.cut_rows for each in used),
        from_cache=all(each.from_cache for each in used),
        seconds=seconds,
        bad_rows=sum(each.manifest.bad_rows for each in used),
        bad_rows_words="; ".join(
            f"{'to evaluate on: ' if each is evaluation else ''}{each.manifest.bad_rows_words}"
            f"; listed in {each.folder / LISTING_FILE}"
            for each in used
            if each.manifest.bad_rows
        ),
        evaluation_words=shares.words,
        evaluation_files=files,
        notes=(*whole.notes, *(f"to evaluate on: {note}" for note in (other.notes if other is not None else ()))),
    )


def check_examples(config: RunConfig, form: ExampleForm, *, max_positions: int | None) -> None:
    """Find what can be wrong with the data in a second: names, the length of rows, the first row of local files."""
    require_positions(config.data.sequence_length, max_positions)
    training, evaluation = sources_of(config.data, form)
    for source in (*training, evaluation):
        if source is not None and source.dataset is None:
            next(open_text(source).pieces, None)

"""How many rows examples become and how long these are, for a plan: counted where that is quick, else estimated from a
sample, as counting.py does for text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from coremill.config.schema import RunConfig
from coremill.data.child_process import run_in_child
from coremill.data.counting import HASHED_BYTES, PACKED_NOW_BYTES, SAMPLE_BYTES, SAMPLE_FILES, sample_of
from coremill.data.encode import AskedLabels, Encoder
from coremill.data.encoded import EncodedManifest
from coremill.data.encoded_split import share_out
from coremill.data.examples import ExampleForm, LabelledText
from coremill.data.packed import Progress
from coremill.data.questions import Question
from coremill.data.run_sources import sources_of
from coremill.data.sources import TextSource, stamps_of
from coremill.errors import InputError
from coremill.plan.types import RowCount, RowLengths
from coremill.plan.words import size

SAMPLE_JOB = "sample examples"


def count_examples(
    config: RunConfig,
    *,
    form: ExampleForm,
    doc_stride: int,
    asked: AskedLabels | None,
    tokenizer_folder: Path | None,
    vocabulary_rows: int,
    cache: Path,
    progress: Callable[[Progress], None],
    code_sha256: str | None = None,
) -> RowCount:
    """The rows to train on in an epoch, and how long they are."""
    (source, *_), _ = sources_of(config.data, form)
    if tokenizer_folder is None:
        return _not_known(config, "not known: the tokenizer is not to be had here")
    encoder = Encoder(
        config.data.sequence_length,
        doc_stride,
        tokenizer_folder.absolute(),
        vocabulary_rows,
        cache.absolute() / "data",
        progress,
        code_sha256,
    )
    source_bytes = sum(file_bytes for file_bytes, _ in stamps_of(source))
    if source.dataset is None and source_bytes <= PACKED_NOW_BYTES:
        found = encoder.encode(source, asked)
        return _of_encoded(config, found.folder, found.manifest)
    if source_bytes <= HASHED_BYTES and (before := encoder.encoded_before(source, asked)) is not None:
        return _of_encoded(config, encoder.cache / before.key, before)
    if source.dataset is not None:
        return _not_known(config, "not known: the dataset is not on this machine yet; train --dry-run counts it")
    return _of_sample(config, source, encoder, asked, source_bytes)


def _not_known(config: RunConfig, words: str) -> RowCount:
    return RowCount(rows=None, row_tokens=config.data.sequence_length, is_estimate=True, words=words)


def _of_encoded(config: RunConfig, folder: Path, manifest: EncodedManifest) -> RowCount:
    shares = share_out(folder, manifest, config.data.evaluation_fraction, config.train.seed)
    rows, examples = shares.train_rows, shares.train_examples
    return RowCount(
        rows=rows,
        row_tokens=config.data.sequence_length,
        is_estimate=False,
        words=f"windows of {examples:,} questions" if manifest.kind == "questions" else "",
        lengths=RowLengths(mean=shares.train_tokens / max(1, rows), longest=shares.longest_row),
    )


def _of_sample(
    config: RunConfig, source: TextSource, encoder: Encoder, asked: AskedLabels | None, source_bytes: int
) -> RowCount:
    files = [source.files[at * len(source.files) // SAMPLE_FILES] for at in range(SAMPLE_FILES)]
    job = encoder.job_of(replace(source, files=tuple(dict.fromkeys(files))), asked)
    counts = run_in_child({**job, "job": SAMPLE_JOB, "sample_bytes": SAMPLE_BYTES}, encoder.progress)
    if not counts["rows"] or not counts["source_bytes"]:
        return _not_known(config, "not known: a sample of it holds no examples")
    trained_on, length = 1 - config.data.evaluation_fraction, config.data.sequence_length
    rows = max(1, int(source_bytes / counts["source_bytes"] * counts["rows"] * trained_on))
    mean = counts["tokens"] / counts["rows"]
    return RowCount(
        rows=rows,
        row_tokens=length,
        is_estimate=True,
        words=f"{size(source_bytes)} of examples, of which a sample of {size(counts['source_bytes'])} became"
        f" {counts['rows']:,} rows of {mean:.0f} tokens in the mean",
        lengths=RowLengths(mean=mean, longest=length),  # a sample does not know the longest
    )


def count_sample(job: Mapping[str, Any]) -> dict[str, Any]:
    """Do the job: rows and tokens that the first examples of each file become. Runs in the process that tokenises."""
    from coremill.data.encoding import batches_of
    from coremill.data.pair_tokenizer import load_pair_tokenizer
    from coremill.data.windows import Windows

    source, length = TextSource.from_json(job["source"]), job["sequence_length"]
    tokenizer = load_pair_tokenizer(
        Path(job["tokenizer_folder"]), code_sha256=job["code_sha256"], cache=Path(job["cache"])
    )
    lengths: list[int] = []
    read = 0
    windows: Windows | None = None
    for batch in batches_of(sample_of(source, job["sample_bytes"])):
        read += sum(piece.source_bytes for piece in batch)
        questions = [piece.example for piece in batch if isinstance(piece.example, Question)]
        texts = [piece.example.texts for piece in batch if isinstance(piece.example, LabelledText)]
        if questions:
            windows = windows or Windows(tokenizer, sequence_length=length, doc_stride=job["doc_stride"])
            made = (each for each in windows.of(questions) if not isinstance(each, InputError))
            lengths += [len(window.ids) for rows in made for window in rows]
        if texts:
            tokenizer.backend.enable_truncation(length, strategy="longest_first")
            pairs = [each if len(each) > 1 else each[0] for each in texts]
            lengths += [len(encoding) for encoding in tokenizer.backend.encode_batch_fast(pairs)]
    return {"rows": len(lengths), "tokens": sum(lengths), "source_bytes": read}

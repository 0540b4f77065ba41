"""How many rows an epoch has, for a plan: counted where that is quick, else estimated from a sample of the text.

Text that was packed before is counted in its manifest. Local text of a few megabytes is packed now, and training finds
it in the cache. Of more only a sample is tokenised: what it has in tokens a byte, times the bytes there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from coremill.config.schema import RunConfig
from coremill.data.child_process import run_in_child
from coremill.data.compressed import BUFFER_BYTES, is_compressed
from coremill.data.hub_datasets import bytes_on_card
from coremill.data.packed import PackedManifest, Progress
from coremill.data.parts import pack_part
from coremill.data.pieces import Piece
from coremill.data.run_sources import sources_of
from coremill.data.sources import TextSource, open_text, stamps_of
from coremill.data.tokenise import Packer, packer_of
from coremill.plan.types import RowCount
from coremill.plan.words import size

PACKED_NOW_BYTES = 16 * 2**20  # 3 s of tokenising on two slow cores
HASHED_BYTES = 4 * 2**30  # to know whether text was packed before it has to be read: 8 s of it
SAMPLE_BYTES = 2**20
SAMPLE_FILES = 16
SAMPLE_COMPRESSED_FILES = 4  # of which some blocks have to be read, for one piece accounts for a block
SAMPLE_COMPRESSED_BYTES = 3 * BUFFER_BYTES
ASSUMED_BYTES_PER_TOKEN = 4.0  # English prose in the tokenizers of Llama, Qwen or GPT


def count_rows(
    config: RunConfig,
    *,
    tokenizer_folder: Path | None,
    vocabulary_rows: int,
    cache: Path,
    progress: Callable[[Progress], None],
    code_sha256: str | None = None,
) -> RowCount:
    """The rows to train on in an epoch; without a tokenizer an estimate from the bytes of the text alone."""
    sources, _ = sources_of(config.data)
    if tokenizer_folder is None:
        found = [_by_bytes_alone(config, source) for source in sources]
    else:
        packer = packer_of(config.data, tokenizer_folder, vocabulary_rows, cache, progress, code_sha256)
        found = [_count_source(config, packer.recognised(source, download=False), packer) for source in sources]
    rows = [count.rows for count in found if count.rows is not None]
    return RowCount(
        rows=sum(rows) if len(rows) == len(found) else None,
        row_tokens=config.data.sequence_length,
        is_estimate=any(count.is_estimate for count in found),
        words="; ".join(
            f"{source.name}: {count.words}" if len(sources) > 1 else count.words
            for source, count in zip(sources, found, strict=True)
            if count.words
        ),
    )


def _count_source(config: RunConfig, source: TextSource, packer: Packer) -> RowCount:
    length, text_bytes = config.data.sequence_length, _bytes_of(source)
    if source.dataset is None and text_bytes <= PACKED_NOW_BYTES:
        packed = pack_part(packer, source, config.data, config.train.seed).training.manifest
        return RowCount(rows=packed.rows, row_tokens=length, is_estimate=False, words="")
    manifest = packer.packed_before(source) if text_bytes <= HASHED_BYTES else None
    if manifest is not None:
        return _of_packed(config, manifest, packer)
    if source.dataset is not None:
        return _by_bytes_alone(config, source)
    most = SAMPLE_COMPRESSED_FILES if is_compressed(Path(source.files[0])) else SAMPLE_FILES
    sampled = [source.files[at * len(source.files) // most] for at in range(most)]
    job = packer.job_of(replace(source, files=tuple(dict.fromkeys(sampled))))
    counts = run_in_child({**job, "job": "sample", "sample_bytes": SAMPLE_BYTES}, packer.progress)
    if not counts["tokens"] or not counts["source_bytes"]:
        return RowCount(rows=None, row_tokens=length, is_estimate=True, words="not known: a sample of it holds no text")
    tokens = text_bytes * counts["tokens"] / counts["source_bytes"]
    found = f"{counts['source_bytes'] / counts['tokens']:.2g} bytes a token in a sample of"
    return _estimate(config, tokens, f"{size(text_bytes)} of text, {found} {size(counts['source_bytes'])}")


def _bytes_of(source: TextSource) -> int:
    return sum(file_bytes for file_bytes, _ in stamps_of(source))


def sample_of(source: TextSource, sample_bytes: int) -> Iterator[Piece]:
    """The first of each file, up to so many bytes together; whole documents where only their end says how many."""
    each = max(1, sample_bytes // len(source.files))
    for file in source.files:
        taken, reads_ahead = 0, is_compressed(Path(file))
        wanted = max(each, SAMPLE_COMPRESSED_BYTES) if reads_ahead else each
        for piece in open_text(replace(source, files=(file,))).pieces:
            if reads_ahead and taken >= wanted and piece.source_bytes:  # of the next block
                break
            yield piece
            taken += piece.source_bytes
            if taken >= wanted and not reads_ahead:
                break


def _of_packed(config: RunConfig, manifest: PackedManifest, packer: Packer) -> RowCount:
    length, held_out = config.data.sequence_length, config.data.evaluation_fraction
    left = packer.split_before(manifest, held_out, config.train.seed) if held_out else manifest
    if left is not None:
        return RowCount(rows=left.rows, row_tokens=length, is_estimate=False, words="")
    rows = max(1, round(manifest.rows * (1 - held_out)))
    words = f"{manifest.rows:,} rows counted, {held_out:.1%} of them to be held out"
    return RowCount(rows=rows, row_tokens=length, is_estimate=True, words=words)


def _by_bytes_alone(config: RunConfig, source: TextSource) -> RowCount:
    """Where there is no tokenizer, or the text is still on the hub, which may say how large it is."""
    where, text_bytes = "of text", _bytes_of(source)
    if source.dataset is not None:
        where = "by the dataset's card"
        text_bytes = 0 if source.dataset.offline else bytes_on_card(source.dataset) or 0
    if not text_bytes:
        words = "not known: the dataset is not on this machine yet, and its card has no size; train --dry-run counts it"
        return RowCount(rows=None, row_tokens=config.data.sequence_length, is_estimate=True, words=words)
    tokens = text_bytes / ASSUMED_BYTES_PER_TOKEN
    return _estimate(config, tokens, f"{size(text_bytes)} {where}, an assumed 4 bytes a token")


def _estimate(config: RunConfig, tokens: float, words: str) -> RowCount:
    length, trained_on = config.data.sequence_length, 1 - (config.data.evaluation_fraction or 0.0)
    rows = max(1, int(tokens * trained_on / length))
    return RowCount(rows=rows, row_tokens=length, is_estimate=True, words=words)

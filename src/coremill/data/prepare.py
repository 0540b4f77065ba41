"""Text to packed rows on disk, once per text, tokenizer and length: `prepare_data`.

Runs without torch in the launcher. It finds the text, hashes it (11 MB in 20 ms), and either finds the packing under
that key or has a process of its own make it. Training and evaluation text are packed apart, so a changed evaluation
source leaves the other alone; held-out rows are chosen by seed from the packed rows, so a changed seed or fraction
tokenises nothing again.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from coremill.config.schema import DataSection, RunConfig
from coremill.data.bad_rows import LISTING_FILE
from coremill.data.cache import build_once
from coremill.data.child_process import run_in_child
from coremill.data.hub import PREFIX as HUB_PREFIX
from coremill.data.packed import FORMAT_VERSION, Manifest, PackedData, Progress, read_manifest, require_id_in_vocabulary
from coremill.data.sources import TextSource, identity_of, open_text, resolve_source, stamps_of
from coremill.data.tokenizer_files import tokenizer_identity
from coremill.errors import InputError

HASH_PROGRESS_SECONDS = 0.1
OnProgress = Callable[[Progress], None] | None


def prepare_data(
    config: RunConfig,
    *,
    tokenizer_folder: Path,
    vocabulary_rows: int,
    max_positions: int | None,
    cache: Path,
    progress: OnProgress = None,
    code_sha256: str | None = None,
) -> PackedData:
    """The rows of a run, from the cache where they were packed before.

    With `code_sha256` the tokenizer's folder has code that may be run, of this hash.
    """
    started = time.perf_counter()
    section = config.data
    _require_positions(section, max_positions)
    packer = _Packer(
        section.sequence_length,
        tokenizer_folder.absolute(),
        vocabulary_rows,
        cache.absolute() / "data",
        progress,
        code_sha256,
    )
    training_source = _training_source(section)
    evaluation_source = _evaluation_source(section)
    training = packer.pack(training_source)
    evaluation = None if evaluation_source is None else packer.pack(evaluation_source)
    if evaluation is not None:
        train_rows, evaluation_rows = training.manifest.rows, evaluation.manifest.rows
    else:
        evaluation_rows = _held_out_rows(training.manifest.rows, section)
        train_rows = training.manifest.rows - evaluation_rows
    packings = [training] if evaluation is None else [training, evaluation]
    return PackedData(
        folder=training.folder,
        evaluation_folder=None if evaluation is None else evaluation.folder,
        key=_hash(
            *(packing.manifest.key for packing in packings),
            evaluation_rows,
            config.train.seed if evaluation_rows else 0,
        ),
        train_rows=train_rows,
        evaluation_rows=evaluation_rows,
        split_seed=config.train.seed,
        sequence_length=section.sequence_length,
        tokens=sum(packing.manifest.tokens for packing in packings),
        dropped_tokens=sum(packing.manifest.dropped_tokens for packing in packings),
        documents=sum(packing.manifest.documents for packing in packings),
        eos_id=training.manifest.eos_id,
        from_cache=all(packing.from_cache for packing in packings),
        seconds=time.perf_counter() - started,
        bad_rows=sum(packing.manifest.bad_rows for packing in packings),
        bad_rows_words="; ".join(
            f"{packing.manifest.bad_rows_words}; listed in {packing.folder / LISTING_FILE}"
            for packing in packings
            if packing.manifest.bad_rows
        ),
    )


def check_sources(section: DataSection, *, max_positions: int | None) -> None:
    """Find what can be wrong with the data in a second: names, the length of rows, the first row of local files."""
    _require_positions(section, max_positions)
    for source in (_training_source(section), _evaluation_source(section)):
        if source is not None and source.kind in ("txt", "jsonl", "parquet"):
            next(open_text(source).pieces, None)


def require_rows_for_ranks(data: PackedData, world_size: int) -> None:
    """Refuse a run in which some rank would never see a row."""
    if data.train_rows < world_size:
        raise InputError(
            f"the data has fewer rows than there are ranks: {data.train_rows} rows, {world_size} ranks",
            where="data.source and parallel.ranks_per_node",
            why=f"a row has {data.sequence_length} tokens and goes to one rank",
            do=f"start at most {data.train_rows} ranks, add text, or make data.sequence_length smaller",
        )


@dataclass(frozen=True)
class _Packing:
    folder: Path
    manifest: Manifest
    from_cache: bool


@dataclass(frozen=True)
class _Packer:
    """Packs one source after the other with the same tokenizer and length."""

    sequence_length: int
    tokenizer_folder: Path
    vocabulary_rows: int
    cache: Path
    progress: OnProgress
    code_sha256: str | None

    def pack(self, source: TextSource) -> _Packing:
        stamps = stamps_of(source)
        key = _hash(
            FORMAT_VERSION,
            self._identity(source, stamps),
            tokenizer_identity(self.tokenizer_folder),
            self.sequence_length,
            *([source.on_bad_rows] if source.on_bad_rows != "stop" else []),
            *([self.code_sha256] if self.code_sha256 is not None else []),
        )
        final = self.cache / key
        from_cache = build_once(
            final,
            is_whole=lambda folder: read_manifest(folder) is not None,
            build=lambda partial: self._tokenise(source, stamps, key, partial),
            on_wait=lambda: self._tell(Progress(0, 0, None, 0, "wait")),
        )
        manifest = read_manifest(final)
        assert manifest is not None, "build_once returns only when the packing is whole"
        require_id_in_vocabulary(
            manifest.highest_id, manifest.highest_token, self.vocabulary_rows, str(self.tokenizer_folder), source.where
        )
        return _Packing(final, manifest, from_cache)

    def _tell(self, progress: Progress) -> None:
        if self.progress is not None:
            self.progress(progress)

    def _identity(self, source: TextSource, stamps: tuple[tuple[int, int], ...]) -> str:
        total = sum(size for size, _ in stamps)
        done, last_told = 0, time.perf_counter()

        def on_bytes(count: int) -> None:
            nonlocal done, last_told
            done += count
            if time.perf_counter() - last_told >= HASH_PROGRESS_SECONDS:
                last_told = time.perf_counter()
                self._tell(Progress(0, done, total, 0, "hash"))

        return identity_of(source, on_bytes)

    def _tokenise(self, source: TextSource, stamps: tuple[tuple[int, int], ...], key: str, partial: Path) -> None:
        job = {
            "job": "tokenise",
            "source": source.to_json(),
            "tokenizer_folder": str(self.tokenizer_folder),
            "code_sha256": self.code_sha256,
            "cache": str(self.cache.parent),
            "sequence_length": self.sequence_length,
            "vocabulary_rows": self.vocabulary_rows,
            "destination": str(partial),
        }
        counts = run_in_child(job, self.progress)
        if stamps_of(source) != stamps:
            raise InputError(
                "the files changed while they were read",
                where=source.where,
                why="what was packed belongs to neither the old nor the new text",
                do="run again once nothing writes to them",
            )
        manifest = Manifest(
            version=FORMAT_VERSION,
            key=key,
            source=source.name,
            tokenizer=self.tokenizer_folder.name,
            sequence_length=self.sequence_length,
            **counts,
        )
        manifest.write(partial)


def _training_source(section: DataSection) -> TextSource:
    return resolve_source(section.source, column=section.column, split=section.split, on_bad_rows=section.on_bad_rows)


def _evaluation_source(section: DataSection) -> TextSource | None:
    if section.evaluation_source is not None:
        return resolve_source(
            section.evaluation_source,
            column=section.column,
            split=section.evaluation_split or section.split,
            setting="data.evaluation_source",
            on_bad_rows=section.on_bad_rows,
        )
    if section.evaluation_split is None:
        return None
    if not section.source.startswith(HUB_PREFIX):
        raise InputError(
            "only a dataset of the hub has splits",
            where=f"data.evaluation_split: {section.evaluation_split}",
            why=f"data.source is {section.source}",
            do="name files in data.evaluation_source, or a share of the rows in data.evaluation_fraction",
        )
    return resolve_source(
        section.source, column=section.column, split=section.evaluation_split, on_bad_rows=section.on_bad_rows
    )


def _held_out_rows(rows: int, section: DataSection) -> int:
    if section.evaluation_fraction == 0:
        return 0
    if rows < 2:
        raise InputError(
            "one row cannot be shared between training and evaluation",
            where=f"data.evaluation_fraction: {section.evaluation_fraction}",
            why=f"the text fills one row of {section.sequence_length} tokens",
            do="add text, make data.sequence_length smaller, or set data.evaluation_fraction to 0",
        )
    return min(rows - 1, max(1, round(rows * section.evaluation_fraction)))


def _require_positions(section: DataSection, max_positions: int | None) -> None:
    if max_positions is not None and section.sequence_length > max_positions:
        raise InputError(
            f"rows of {section.sequence_length} tokens are longer than the model's {max_positions} positions",
            where=f"data.sequence_length: {section.sequence_length}",
            why="the model has no position for the tokens beyond",
            do=f"set data.sequence_length to {max_positions} or less",
        )
    if section.sequence_length < 2:
        raise InputError(
            "a row of one token has nothing to predict",
            where=f"data.sequence_length: {section.sequence_length}",
            do="set data.sequence_length to 2 or more",
        )


def _hash(*parts: object) -> str:
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()

"""Text to packed rows on disk, once per text, tokenizer and length: `prepare_data`.

Runs without torch in the launcher. It finds the text, hashes it (11 MB in 20 ms), and either finds the packing under
that key or has a process of its own make it. Training and evaluation text are packed apart, so a changed evaluation
source leaves the other alone; held-out documents are copied out of the packed ones, so a changed seed or fraction
tokenises nothing again.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from coremill.config.schema import DataSection, RunConfig
from coremill.data.bad_rows import LISTING_FILE
from coremill.data.cache import build_once, drop_unused, keep_in_use
from coremill.data.chat_template import untold_tokens
from coremill.data.child_process import run_in_child
from coremill.data.conversations import form_known_by
from coremill.data.mixing import shares_of
from coremill.data.packed import (
    DOCUMENTS_FILE,
    FORMAT_VERSION,
    PackedData,
    PackedManifest,
    Progress,
    read_manifest,
    require_id_in_vocabulary,
    with_conversation_counts,
)
from coremill.data.parts import Packing, counts_of, pack_part
from coremill.data.recognised import TEXT_COLUMN, require_one_kind, words_of_forms
from coremill.data.run_sources import commits_of, sources_of
from coremill.data.source_identity import hash_of, require_unchanged, told_identity
from coremill.data.sources import TextSource, open_text, stamps_of
from coremill.data.tokenizer_files import SpecialTokens, required_chat_template, tokenizer_identity
from coremill.errors import InputError
from coremill.files import write_atomically
from coremill.plan.card import require_positions

SPLITS_KEPT = 3  # of one packing, each as large as it
# Part of what names the data of a run in its checkpoints: raise it when the same text gives other tokens. It is that of
# 0.1.0, whose runs go on where their tokens are the same.
TOKENS_VERSION = 1
CHAT_VERSION = 2  # of how conversations become tokens: the same for these
HELD_OUT = "documents or a tail held out"  # the same for what is held out


def prepare_data(
    config: RunConfig,
    *,
    tokenizer_folder: Path,
    vocabulary_rows: int,
    max_positions: int | None,
    cache: Path,
    progress: Callable[[Progress], None] | None = None,
    code_sha256: str | None = None,
) -> PackedData:
    """The rows of a run, from the cache where they were packed before.

    With `code_sha256` the tokenizer's folder has code that may be run, of this hash.
    """
    started = time.perf_counter()
    section = config.data
    _require_row_length(section, max_positions)
    packer = packer_of(section, tokenizer_folder, vocabulary_rows, cache, progress or (lambda _: None), code_sha256)
    named, evaluated = sources_of(section)
    training_sources = [packer.recognised(source) for source in named]
    evaluation_source = None if evaluated is None else packer.recognised(evaluated)
    require_one_kind(section, training_sources, evaluation_source)
    parts = [pack_part(packer, source, section, config.train.seed) for source in training_sources]
    evaluation = [part.held_out for part in parts if part.held_out is not None]
    if evaluation_source is not None:
        evaluation = [packer.pack(evaluation_source)]
    training = [part.training for part in parts]
    packings = [part.whole for part in parts] + (evaluation if evaluation_source is not None else [])
    used = [*training, *evaluation]
    evaluation_rows = sum(each.manifest.rows for each in evaluation)
    shares = shares_of(
        [entry.share for entry in section.sources or []] or [None], [each.manifest.rows for each in training]
    )
    first = training[0].manifest
    return PackedData(
        folder=training[0].folder,
        evaluation_folder=evaluation[0].folder if evaluation else None,
        key=_key_of_data(section, packings, evaluation_rows, config.train.seed, shares if section.sources else ()),
        train_rows=sum(each.manifest.rows for each in training),
        evaluation_rows=evaluation_rows,
        sequence_length=section.sequence_length,
        tokens=sum(each.manifest.real_tokens for each in used),
        dropped_tokens=sum(each.manifest.dropped_tokens for each in used),
        documents=sum(each.manifest.documents for each in packings),
        evaluation_documents=sum(each.manifest.documents for each in evaluation),
        train_documents=sum(each.manifest.documents for each in training),
        evaluation_words="; ".join(part.words for part in parts if part.words),
        eos_id=first.eos_id,
        begin_ids=tuple(first.begin_ids),
        is_plain=all(each.manifest.is_plain for each in packings),
        from_cache=all(each.from_cache for each in [*packings, *used]),
        seconds=time.perf_counter() - started,
        bad_rows=sum(each.manifest.bad_rows for each in packings),
        bad_rows_words="; ".join(
            f"{'to evaluate on: ' if number >= len(parts) else ''}{each.manifest.bad_rows_words}"
            f"; listed in {each.folder / LISTING_FILE}"
            for number, each in enumerate(packings)
            if each.manifest.bad_rows
        ),
        sources=tuple(
            part.mixed_in(entry.share, share)
            for part, entry, share in zip(parts, section.sources or [], shares, strict=False)
        ),
        notes=(*words_of_forms(training_sources), *(note for each in packings for note in each.manifest.notes)),
        conversations=counts_of(used, packings),
        evaluation_conversations=counts_of(evaluation, evaluation),
        commits=commits_of([*named, evaluated]),
    )


def _key_of_data(
    section: DataSection, packings: Sequence[Packing], evaluation_rows: int, seed: int, shares: tuple[float, ...]
) -> str:
    """The name of a run's rows; `shares` where sources are mixed."""
    mixed = ("mixed in shares", shares) if shares else ()
    if section.evaluation_fraction:
        return hash_of(*(each.key for each in packings), HELD_OUT, section.evaluation_fraction, seed, *mixed)
    return hash_of(*(each.key for each in packings), evaluation_rows, seed if evaluation_rows else 0, *mixed)


def check_sources(section: DataSection, *, max_positions: int | None) -> None:
    """Find what can be wrong with the data in a second: names, the length of rows, the first row of local files."""
    _require_row_length(section, max_positions)
    training, evaluation = sources_of(section)
    for source in (*training, evaluation):
        if source is not None and source.kind not in ("hub", "built-in"):
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
class Packer:
    """Packs one source after the other with the same tokenizer and length."""

    sequence_length: int
    special_tokens: SpecialTokens
    tokenizer_folder: Path
    vocabulary_rows: int
    cache: Path
    progress: Callable[[Progress], None]
    code_sha256: str | None
    learn: str = "answers"  # of conversations

    def recognised(self, source: TextSource, *, download: bool = True) -> TextSource:
        """With the form of conversations where a dataset of the hub holds them, which it is downloaded to know."""
        if source.dataset is None or source.conversations is not None or source.column != TEXT_COLUMN:
            return source
        remembered = self.cache / f"columns-{hash_of(source.dataset.identity)}.json"
        columns = _recalled(remembered)
        if columns is None:
            if not download or self.packed_before(source) is not None:  # as text
                return source
            self.progress(Progress(0, 0, None, 0, "download"))
            columns = run_in_child({**self.job_of(source), "job": "columns"}, self.progress)["columns"]
            _remember(remembered, columns)
        return replace(source, conversations=form_known_by(columns, unless=source.column))

    def _class_tokens(self) -> dict[str, str]:
        """Special tokens that the chat template writes and the tokenizer has by its class alone: asked in a process,
        as transformers imports torch to say it, and remembered."""
        folder = self.tokenizer_folder
        names = untold_tokens(required_chat_template(folder), folder)
        if not names:
            return {}
        config = folder / "config.json"  # the model's, which decides the class where the tokenizer's does not
        decided_by = (tokenizer_identity(folder), config.read_bytes() if config.is_file() else b"", self.code_sha256)
        remembered = self.cache / f"class-tokens-{hash_of(names, *decided_by, version('transformers'))}.json"
        tokens: dict[str, str] | None = _recalled(remembered)
        if tokens is None:
            self.progress(Progress(0, 0, None, 0, "tokenise"))
            job = {"job": "tokens of class", "names": names, "tokenizer_folder": str(folder)}
            tokens = run_in_child({**job, "code_sha256": self.code_sha256, "cache": str(self.cache.parent)})
            _remember(remembered, tokens)
        return tokens

    def _identity_of_chat(self) -> list[object]:
        tokens = sorted(self._class_tokens().items())  # those of its files are part of what identifies the tokenizer
        template = required_chat_template(self.tokenizer_folder)
        return ["conversations", CHAT_VERSION, self.learn, template, *([tokens] if tokens else [])]

    def _made_from(self, source: TextSource, stamps: tuple[tuple[int, int], ...]) -> tuple[object, ...]:
        return (
            told_identity(source, stamps, self.progress),
            tokenizer_identity(self.tokenizer_folder),
            self.sequence_length,
            *([source.on_bad_rows] if source.on_bad_rows != "stop" else []),
            *([self.code_sha256] if self.code_sha256 is not None else []),
            *(self._identity_of_chat() if source.conversations else []),
        )

    def _key_of(self, made_from: tuple[object, ...]) -> str:
        return hash_of(FORMAT_VERSION, *made_from, f"special tokens {self.special_tokens}")

    def packed_before(self, source: TextSource) -> PackedManifest | None:
        """What the cache holds of this text; nothing is made."""
        return read_manifest(self.cache / self._key_of(self._made_from(source, stamps_of(source))))

    def pack(self, source: TextSource) -> Packing:
        stamps = stamps_of(source)
        made_from = self._made_from(source, stamps)
        key = self._key_of(made_from)
        final = self.cache / key
        from_cache = build_once(
            final,
            is_whole=_is_whole_source,
            build=lambda partial: self._tokenise(source, stamps, key, partial),
            on_wait=lambda: self.progress(Progress(0, 0, None, 0, "wait")),
        )
        manifest = read_manifest(final)
        assert manifest is not None, "build_once returns only when the packing is whole"
        require_id_in_vocabulary(
            manifest.highest_id, manifest.highest_token, self.vocabulary_rows, str(self.tokenizer_folder), source.where
        )
        added = [] if manifest.is_plain else [f"special tokens {self.special_tokens}"]
        if manifest.end_begins_next:
            added.append("one token between documents")
        return Packing(final, manifest, from_cache, hash_of(TOKENS_VERSION, *made_from, *added))

    def _split_folder(self, whole: PackedManifest, fraction: float, seed: int) -> Path:
        return self.cache / f"{whole.key}-{hash_of(FORMAT_VERSION, whole.key, HELD_OUT, fraction, seed)}"

    def split_before(self, whole: PackedManifest, fraction: float, seed: int) -> PackedManifest | None:
        """What is left to train on of text that was shared out before; nothing is made."""
        return read_manifest(self._split_folder(whole, fraction, seed) / "train")

    def hold_out(self, whole: Packing, fraction: float, seed: int) -> tuple[Packing, Packing]:
        """The packings to train and to evaluate on, of documents of a whole one."""
        key = hash_of(FORMAT_VERSION, whole.manifest.key, HELD_OUT, fraction, seed)
        final = self._split_folder(whole.manifest, fraction, seed)
        keep_in_use(final)

        def build(partial: Path) -> None:
            job = {"job": "hold out", "whole": str(whole.folder), "destination": str(partial)}
            counts = run_in_child({**job, "fraction": fraction, "seed": seed}, self.progress)
            manifest = whole.manifest
            size = manifest.tokens_bytes
            self.progress(Progress(manifest.documents, size, size, manifest.all_tokens, "hold out", is_done=True))
            for name in ("train", "evaluation"):
                side = with_conversation_counts(counts[name])
                replace(whole.manifest, key=key, bad_rows=0, bad_rows_words="", **side).write(partial / name)

        from_cache = build_once(
            final,
            is_whole=lambda folder: all(read_manifest(folder / name) is not None for name in ("train", "evaluation")),
            build=build,
            on_wait=lambda: self.progress(Progress(0, 0, None, 0, "wait")),
        )
        if not from_cache:
            drop_unused(self.cache, f"{whole.folder.name}-*", keep=SPLITS_KEPT)
        train, evaluation = read_manifest(final / "train"), read_manifest(final / "evaluation")
        assert train is not None and evaluation is not None, "build_once returns only when both are whole"
        return (
            Packing(final / "train", train, from_cache, key),
            Packing(final / "evaluation", evaluation, from_cache, key),
        )

    def job_of(self, source: TextSource) -> dict[str, Any]:
        """What the process that tokenises needs to know."""
        chat: dict[str, Any] = {}
        if source.conversations is not None:
            template = required_chat_template(self.tokenizer_folder)
            chat = {"chat_template": template, "learn": self.learn, "class_tokens": self._class_tokens()}
        return {
            **chat,
            "source": source.to_json(),
            "tokenizer_folder": str(self.tokenizer_folder),
            "special_tokens": self.special_tokens,
            "code_sha256": self.code_sha256,
            "cache": str(self.cache.parent),
            "sequence_length": self.sequence_length,
            "vocabulary_rows": self.vocabulary_rows,
        }

    def _tokenise(self, source: TextSource, stamps: tuple[tuple[int, int], ...], key: str, partial: Path) -> None:
        job = {**self.job_of(source), "job": "tokenise", "destination": str(partial)}
        size = sum(size for size, _ in stamps) or None
        last = Progress(0, 0, size, 0, "tokenise" if source.dataset is None else "download")

        def on_progress(progress: Progress) -> None:
            nonlocal last
            last = progress
            self.progress(progress)

        self.progress(last)  # from here on it takes time: the process has to start, and the tokenizer to be read
        counts = run_in_child(job, on_progress)
        require_unchanged(source, stamps)
        manifest = PackedManifest(
            version=FORMAT_VERSION,
            key=key,
            source=source.name,
            tokenizer=self.tokenizer_folder.name,
            sequence_length=self.sequence_length,
            **with_conversation_counts(counts),
        )
        tokens, read = manifest.real_tokens + manifest.dropped_tokens, last.bytes_total or last.bytes_done
        done = Progress(manifest.documents, read, last.bytes_total, tokens, "tokenise", is_done=True)
        self.progress(replace(done, counted=manifest.kind))
        manifest.write(partial)


def packer_of(
    section: DataSection,
    tokenizer_folder: Path,
    vocabulary_rows: int,
    cache: Path,
    progress: Callable[[Progress], None],
    code_sha256: str | None,
) -> Packer:
    """What packs the text of a run."""
    return Packer(
        section.sequence_length,
        section.special_tokens,
        tokenizer_folder.absolute(),
        vocabulary_rows,
        cache.absolute() / "data",
        progress,
        code_sha256,
        section.learn,
    )


def _is_whole_source(folder: Path) -> bool:
    manifest = read_manifest(folder)
    try:
        return manifest is not None and (folder / DOCUMENTS_FILE).stat().st_size == manifest.documents_bytes
    except OSError:
        return False


def _require_row_length(section: DataSection, max_positions: int | None) -> None:
    require_positions(section.sequence_length, max_positions)
    if section.sequence_length < 2:
        raise InputError(
            "a row of one token has nothing to predict",
            where=f"data.sequence_length: {section.sequence_length}",
            do="set data.sequence_length to 2 or more",
        )


def _recalled(path: Path) -> Any:
    """What was remembered there; None: nothing."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _remember(path: Path, value: Any) -> None:
    with contextlib.suppress(OSError):  # then it is asked again
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(value))

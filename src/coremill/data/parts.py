"""One source of a run, packed: all of it, what is trained on, and what is held out of it."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from coremill.config.schema import DataSection
from coremill.data.packed import ConversationCounts, PackedManifest, SourceRows
from coremill.data.sources import TextSource
from coremill.errors import InputError

if TYPE_CHECKING:
    from coremill.data.tokenise import Packer


@dataclass(frozen=True)
class Packing:
    """Packed rows in the cache."""

    folder: Path
    manifest: PackedManifest
    from_cache: bool
    key: str  # names its tokens, whatever the folder is called


@dataclass(frozen=True)
class Part:
    """One source, packed: all of it, what is trained on, what is held out of it."""

    name: str
    whole: Packing
    training: Packing
    held_out: Packing | None = None
    words: str = ""

    def mixed_in(self, share_asked: float | None, share: float) -> SourceRows:
        trained, held_out = self.training.manifest, self.held_out
        return SourceRows(
            name=self.name,
            folder=self.training.folder,
            rows=trained.rows,
            tokens=trained.real_tokens,
            documents=trained.documents,
            share_asked=share_asked,
            share=share,
            evaluation_folder=None if held_out is None else held_out.folder,
            evaluation_rows=0 if held_out is None else held_out.manifest.rows,
            evaluation_documents=0 if held_out is None else held_out.manifest.documents,
        )


def pack_part(packer: Packer, source: TextSource, section: DataSection, seed: int) -> Part:
    """Pack one of the sources to train on, and hold out of it what is to be evaluated on."""
    whole = packer.pack(source)
    if not section.evaluation_fraction:
        return Part(source.name, whole, whole)
    _require_two(whole.manifest, section)
    training, held_out = packer.hold_out(whole, section.evaluation_fraction, seed)
    words = _words_of_held_out(whole, training, held_out)
    if section.sources is not None:
        words = f"{source.name}: {words}"
    return Part(source.name, whole, training, held_out, words)


def _require_two(whole: PackedManifest, section: DataSection) -> None:
    """Each side gets a row; of conversations, whole ones."""
    setting = f"data.evaluation_fraction: {section.evaluation_fraction}"
    if whole.conversations is not None and whole.documents < 2:
        raise InputError(
            "one conversation cannot be shared between training and evaluation",
            where=setting,
            do="add conversations, or set data.evaluation_fraction to 0",
        )
    if whole.conversations is None and whole.rows < 2:
        raise InputError(
            "one row cannot be shared between training and evaluation",
            where=setting,
            why=f"the text fills one row of {section.sequence_length} tokens",
            do="add text, make data.sequence_length smaller, or set data.evaluation_fraction to 0",
        )


def _words_of_held_out(whole: Packing, training: Packing, evaluation: Packing) -> str:
    if whole.manifest.conversations is not None:
        held = evaluation.manifest
        share = f"{held.documents:,} of {whole.manifest.documents:,} conversations ({held.real_tokens:,} tokens)"
        return f"held out for evaluation: {share}"
    held, rows = evaluation.manifest, evaluation.manifest.rows + training.manifest.rows
    share = f"{held.rows:,} of {rows:,} rows ({held.rows / rows:.1%})"
    if whole.manifest.documents == 1:
        return f"held out for evaluation: the tail of the text, which is one document: {share}"
    if held.documents + training.manifest.documents > whole.manifest.documents:
        return (
            f"held out for evaluation: the tail of one of {whole.manifest.documents:,} documents, for no choice of"
            f" whole ones comes near data.evaluation_fraction: {share}"
        )
    return f"held out for evaluation: {held.documents:,} of {whole.manifest.documents:,} documents, {share}"


def counts_of(used: Sequence[Packing], packings: Sequence[Packing]) -> ConversationCounts | None:
    """Of all conversations; what was cut off is known of the whole packings only, from which others are made."""
    counts, whole = ([each.manifest.conversations for each in those] for those in (used, packings))
    found, cut = ([each for each in those if each is not None] for those in (counts, whole))
    if not found:
        return None
    summed, at_first = (functools.reduce(operator.add, those) for those in (found, cut))
    return replace(summed, cut=at_first.cut, cut_learned=at_first.cut_learned, left_out=at_first.left_out)

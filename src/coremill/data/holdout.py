"""Documents held out for evaluation: which ones, and the two packings made of a whole one without tokenising again.

Whole documents, so that none is on both sides; in an order of the seed's, until their tokens come nearest to the share
that was asked for. Where no such choice comes near it (one document, a book beside a note), one gives its tail. Runs in
the tokenising process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from coremill.data.chat_packing import Unpacked, write_rows
from coremill.data.order import order_key, shuffled
from coremill.data.packed import (
    DOCUMENTS_FILE,
    MARKS_FILE,
    TOKENS_FILE,
    ConversationCounts,
    PackedManifest,
    Progress,
    read_manifest,
)
from coremill.data.packing import write_boundaries
from coremill.data.row_orders import HOLD_OUT_ORDER
from coremill.errors import InputError, StorageError
from coremill.files import sync_file

COPY_TOKENS = 1 << 22
NEAR = 2  # as many times more or less than the share that was asked for
SIDES = ("train", "evaluation")
Ends = npt.NDArray[np.int64]


def hold_out(
    whole: Path, destination: Path, *, fraction: float, seed: int, on_progress: Callable[[Progress], None]
) -> dict[str, Any]:
    """Write the packings `train` and `evaluation` into `destination`; by name what each holds.

    A document that is cut counts on both sides.
    """
    manifest = read_manifest(whole)
    if manifest is None:
        raise StorageError("the packed data is gone or damaged", where=str(whole), do="run again: it will be made anew")
    tokens = np.memmap(whole / TOKENS_FILE, manifest.dtype, mode="r", shape=(manifest.all_tokens,))
    if manifest.conversations is not None:
        return _hold_out_conversations(whole, destination, manifest, tokens, fraction=fraction, seed=seed)
    ends = np.fromfile(whole / DOCUMENTS_FILE, np.uint64).astype(np.int64)
    ends, held = _sides_of(tokens, ends, manifest, fraction, seed)
    shared = manifest.eos_id if manifest.end_begins_next else None
    done = 0

    def on_copied(count: int) -> None:
        nonlocal done
        done += count
        on_progress(Progress(0, done * tokens.itemsize, manifest.tokens_bytes, done, "hold out"))

    counts = {}
    for side, name in enumerate(SIDES):
        folder = destination / name
        folder.mkdir()
        chosen = held == bool(side)
        with (folder / TOKENS_FILE).open("wb") as stream:
            count = _copy(tokens, ends, chosen, stream, shared, on_copied)
            sync_file(stream)
        rows, left_over = divmod(count, manifest.sequence_length)
        write_boundaries(
            folder, manifest.dtype, rows, manifest.sequence_length, None if shared is not None else manifest.eos_id
        )
        counts[name] = {
            "rows": rows,
            "tokens": count - left_over,
            "dropped_tokens": left_over,
            "documents": int(np.count_nonzero(chosen)),
        }
    return counts


def _hold_out_conversations(
    whole: Path, destination: Path, manifest: PackedManifest, tokens: npt.NDArray[Any], *, fraction: float, seed: int
) -> dict[str, Any]:
    """Rows made anew, of whole conversations on either side; by name what each side holds."""
    assert manifest.conversations is not None
    places = np.fromfile(whole / DOCUMENTS_FILE, np.uint64).astype(np.int64).reshape(-1, 2)
    marks = np.memmap(whole / MARKS_FILE, np.uint8, mode="r", shape=tokens.shape)
    unpacked = Unpacked(tokens, marks, lengths=places[:, 1], starts=places[:, 0])
    held = documents_held_out(np.cumsum(unpacked.lengths), length=1, fraction=fraction, seed=seed)
    if held is None:  # no choice comes near the share: the shortest, so that most is trained on
        held = np.arange(len(places)) == int(np.argmin(unpacked.lengths))
    counts = {}
    for side, name in enumerate(SIDES):
        (destination / name).mkdir()
        chosen = unpacked.chosen(held == bool(side))
        made = write_rows(destination / name, chosen, manifest.sequence_length, manifest.eos_id)
        found = ConversationCounts(
            learn=manifest.conversations.learn, end_ids=manifest.conversations.end_ids, **made["conversations"]
        )
        counts[name] = {**made, "conversations": asdict(found)}
    return counts


def _sides_of(
    tokens: npt.NDArray[Any], ends: Ends, manifest: PackedManifest, fraction: float, seed: int
) -> tuple[Ends, npt.NDArray[np.bool_]]:
    """Where documents end, the tail of a cut one being one of its own, and which are held out."""
    length = manifest.sequence_length
    held = documents_held_out(ends, length=length, fraction=fraction, seed=seed)
    if held is not None:
        return ends, held
    document, rows = document_to_cut(ends, length=length, fraction=fraction, seed=seed)
    start, end = int(ends[document - 1]) if document else 0, int(ends[document])
    cut = end - rows * length
    # After an end token that the text spells, where one is near; what is left to train on fills a row.
    first = max(start, cut - length, length - (int(ends[-1]) - end))
    spelled = np.flatnonzero(tokens[first:cut] == manifest.eos_id)
    cut = first + int(spelled[-1]) + 1 if len(spelled) else cut
    held = np.zeros(len(ends) + 1, dtype=bool)
    held[document + 1] = True
    return np.insert(ends, document, cut), held


def documents_held_out(ends: Ends, *, length: int, fraction: float, seed: int) -> npt.NDArray[np.bool_] | None:
    """Which whole documents are kept for evaluation; both sides fill a row. None: no choice comes near the share."""
    lengths = np.diff(ends, prepend=0)
    total = int(ends[-1])
    target = _target(total, length, fraction)
    order = _order(len(ends), seed)
    # A document longer than all that is wanted would take its place alone; the others come first.
    fitting = order[lengths[order] <= target]
    sums = np.cumsum(lengths[fitting])
    held = np.zeros(len(ends), dtype=bool)
    possible = _is_near(sums, target) & (sums >= length) & (total - sums >= length)
    if possible.any():
        held[fitting[: int(np.argmin(np.where(possible, np.abs(sums - target), np.inf))) + 1]] = True
        return held
    possible = _is_near(lengths, target) & (lengths >= length) & (total - lengths >= length)
    alone = order[possible[order]]
    if len(alone) == 0:
        return None
    held[alone[int(np.argmin(lengths[alone]))]] = True
    return held


def document_to_cut(ends: Ends, *, length: int, fraction: float, seed: int) -> tuple[int, int]:
    """Which document gives its tail, and of how many rows: one that keeps half of itself, else the longest."""
    lengths = np.diff(ends, prepend=0)
    total = int(ends[-1])
    order = _order(len(ends), seed)
    rows = min((total - length) // length, max(1, round(_target(total, length, fraction) / length)))
    long = order[lengths[order] >= 2 * rows * length]
    document = int(long[0]) if len(long) else int(order[int(np.argmax(lengths[order]))])
    rows = min(rows, (int(lengths[document]) - 1) // length)
    if rows < 1:
        raise InputError(
            "these documents cannot be shared between training and evaluation",
            where=f"data.evaluation_fraction: {fraction}",
            why=f"each side needs a row of {length} tokens, and there are {len(ends):,} documents of {total:,} tokens,"
            " none longer than a row",
            do="add text, make data.sequence_length smaller, name other text in data.evaluation_source, or set"
            " data.evaluation_fraction to 0",
        )
    return document, rows


def _target(total: int, length: int, fraction: float) -> float:
    return min(max(fraction * total, length), total - length)


def _order(documents: int, seed: int) -> Ends:
    return shuffled(np.arange(documents, dtype=np.int64), documents, order_key(seed, HOLD_OUT_ORDER))


def _is_near(held: Ends, target: float) -> npt.NDArray[np.bool_]:
    return (held * NEAR >= target) & (held <= target * NEAR)


def _copy(
    tokens: npt.NDArray[Any],
    ends: Ends,
    chosen: npt.NDArray[np.bool_],
    stream: IO[bytes],
    shared: int | None,
    on_copied: Callable[[int], None],
) -> int:
    """Append the chosen documents, adjacent ones in one go; how many tokens that are.

    The token that a document shares with the one before it is not its own: the first of a side is given it.
    """
    edges = np.flatnonzero(np.diff(chosen.astype(np.int8), prepend=0, append=0)).reshape(-1, 2)
    starts = np.concatenate([[0], ends])
    count = 0
    for first, last in zip(starts[edges[:, 0]].tolist(), starts[edges[:, 1]].tolist(), strict=True):
        if count == 0 and first > 0 and int(tokens[first - 1]) == shared:
            first -= 1
        for start in range(first, last, COPY_TOKENS):
            block = tokens[start : min(start + COPY_TOKENS, last)]
            stream.write(block.tobytes())
            on_copied(len(block))
        count += last - first
    return count

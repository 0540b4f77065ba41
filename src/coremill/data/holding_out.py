"""Documents held out for evaluation: which ones, and the two packings made of a whole one without tokenising again.

Whole documents, so that none is on both sides; in an order of the seed's, until their tokens come nearest to the share
that was asked for. A text of one document has no other way than to give its tail. Runs in the tokenising process.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from coremill.data.order import order_key, shuffled
from coremill.data.packed import DOCUMENTS_FILE, TOKENS_FILE, Manifest, read_manifest
from coremill.data.packing import write_boundaries
from coremill.errors import InputError, StorageError

HOLD_OUT_ORDER = 1  # purpose of an order; the loader's epochs have 2
COPY_TOKENS = 1 << 22
SIDES = ("train", "evaluation")
Ends = npt.NDArray[np.int64]


def hold_out(whole: Path, destination: Path, *, fraction: float, seed: int) -> dict[str, Any]:
    """Write the packings `train` and `evaluation` into `destination`; by name what each holds."""
    manifest = read_manifest(whole)
    if manifest is None:
        raise StorageError("the packed data is gone or damaged", where=str(whole), do="run again: it will be made anew")
    tokens = np.memmap(whole / TOKENS_FILE, manifest.dtype, mode="r", shape=(manifest.all_tokens,))
    ends = np.fromfile(whole / DOCUMENTS_FILE, np.uint64).astype(np.int64)
    if len(ends) == 1:
        held = np.array([False, True])
        ends = np.array([_start_of_tail(tokens, manifest, fraction), manifest.all_tokens])
    else:
        held = documents_held_out(ends, length=manifest.sequence_length, fraction=fraction, seed=seed)
    counts = {}
    for side, name in enumerate(SIDES):
        folder = destination / name
        folder.mkdir()
        chosen = held == bool(side)
        with (folder / TOKENS_FILE).open("wb") as stream:
            count = _copy(tokens, ends, chosen, stream)
            stream.flush()
            os.fsync(stream.fileno())
        rows, left_over = divmod(count, manifest.sequence_length)
        write_boundaries(folder, manifest.dtype, rows, manifest.sequence_length, manifest.eos_id)
        counts[name] = {
            "rows": rows,
            "tokens": count - left_over,
            "dropped_tokens": left_over,
            "documents": int(np.count_nonzero(chosen)),
        }
    return counts


def documents_held_out(ends: Ends, *, length: int, fraction: float, seed: int) -> npt.NDArray[np.bool_]:
    """Which of several documents are kept for evaluation; both sides fill a row, or it is refused."""
    lengths = np.diff(ends, prepend=0)
    total = int(ends[-1])
    target = max(fraction * total, length)
    order = shuffled(np.arange(len(ends), dtype=np.int64), len(ends), order_key(seed, HOLD_OUT_ORDER))
    # A document longer than all that is wanted would take its place alone; the others come first.
    fitting = order[lengths[order] <= target]
    sums = np.cumsum(lengths[fitting])
    possible = (sums >= length) & (total - sums >= length)
    held = np.zeros(len(ends), dtype=bool)
    if possible.any():
        held[fitting[: int(np.argmin(np.where(possible, np.abs(sums - target), np.inf))) + 1]] = True
        return held
    alone = order[(lengths[order] >= length) & (total - lengths[order] >= length)]
    if len(alone) == 0:
        raise InputError(
            "these documents cannot be shared between training and evaluation",
            where=f"data.evaluation_fraction: {fraction}",
            why=f"whole documents are held out, each side needs a row of {length} tokens, and there are {len(ends):,}"
            f" documents of {total:,} tokens",
            do="add text, make data.sequence_length smaller, name other text in data.evaluation_source, or set"
            " data.evaluation_fraction to 0",
        )
    held[alone[int(np.argmin(lengths[alone]))]] = True
    return held


def _start_of_tail(tokens: npt.NDArray[Any], manifest: Manifest, fraction: float) -> int:
    """Where the tail of the only document begins: after an end token that the text spells, where one is near."""
    length, total = manifest.sequence_length, manifest.all_tokens
    cut = total - min(manifest.rows - 1, max(1, round(fraction * total / length))) * length
    first = max(length, cut - length)
    spelled = np.flatnonzero(tokens[first:cut] == manifest.eos_id)
    return first + int(spelled[-1]) + 1 if len(spelled) else cut


def _copy(tokens: npt.NDArray[Any], ends: Ends, chosen: npt.NDArray[np.bool_], stream: IO[bytes]) -> int:
    """Append the chosen documents, neighbours in one go; how many tokens that are."""
    edges = np.flatnonzero(np.diff(chosen.astype(np.int8), prepend=0, append=0)).reshape(-1, 2)
    starts = np.concatenate([[0], ends])
    count = 0
    for first, last in zip(starts[edges[:, 0]].tolist(), starts[edges[:, 1]].tolist(), strict=True):
        for start in range(first, last, COPY_TOKENS):
            stream.write(tokens[start : min(start + COPY_TOKENS, last)].tobytes())
        count += last - first
    return count

"""What packing conversations into full rows brings, beside one conversation a row padded to the maximum.

    python -m benchmarks.chat_packing [--conversations N] [--length TOKENS] [--json]

Both sides are coremill's own rows, batches, loss and update, on the same small Llama and the same conversations, in
turns in one process: the only difference is which conversations share a row. The padded side is what a Trainer with a
collator that pads to the maximum computes. Lengths are drawn like those of public chat data (log-normal); of each
conversation the latter part is learned. Both learn the same tokens in an epoch, which is checked.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from coremill.config.schema import DataSection
from coremill.data.chat_packing import Unpacked, write_rows
from coremill.data.packed import FORMAT_VERSION, LEARNED, STARTS, ConversationCounts, PackedData, PackedManifest
from coremill.tasks.causal_lm.training import CausalLmTraining

VOCABULARY, FILLER_ID = 8192, 0
MEDIAN_TOKENS, SPREAD = 160, 0.7  # of a conversation; of the logarithm
LEARNED_SHARE = 0.6
BATCH_ROWS, TURNS = 4, 3


@dataclass(frozen=True)
class Side:
    """One way to make rows, after all turns."""

    rows: int
    padding_fraction: float
    learned_tokens: int
    conversations_per_second: float  # the median of turns
    epoch_seconds: float


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--conversations", type=int, default=64)
    options.add_argument("--length", type=int, default=512)
    options.add_argument("--json", action="store_true")
    asked = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        unpacked = made_up(asked.conversations, asked.length)
        sides = {
            "packed": rows_on_disk(Path(folder, "packed"), unpacked, asked.length, padded=False),
            "padded": rows_on_disk(Path(folder, "padded"), unpacked, asked.length, padded=True),
        }
        seconds: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(TURNS):
            for name, data in sides.items():
                seconds[name].append(epoch_seconds(data))
    found = {name: side_of(data, asked.conversations, seconds[name]) for name, data in sides.items()}
    assert found["packed"].learned_tokens == found["padded"].learned_tokens
    if asked.json:
        print(json.dumps({name: asdict(side) for name, side in found.items()}, indent=2))
        return
    learned = found["packed"].learned_tokens
    print(f"{asked.conversations} conversations, rows of {asked.length} tokens, {learned:,} learned")
    for name, side in found.items():
        print(
            f"{name}  {side.rows:5,} rows  padding {side.padding_fraction:6.1%}"
            f"  {side.conversations_per_second:7.2f} conversations/s"
        )
    ratio = found["packed"].conversations_per_second / found["padded"].conversations_per_second
    print(f"packed is {ratio:.2f} times as fast")


def made_up(count: int, longest: int) -> Unpacked:
    """Conversations of random words."""
    draw, words = random.Random(1), np.random.default_rng(1)
    lengths = [min(longest, max(16, round(draw.lognormvariate(np.log(MEDIAN_TOKENS), SPREAD)))) for _ in range(count)]
    marks = []
    for length in lengths:
        mark = np.zeros(length, dtype=np.uint8)
        mark[-round(length * LEARNED_SHARE) :] = LEARNED
        mark[0] |= STARTS
        marks.append(mark)
    tokens = words.integers(1, VOCABULARY, sum(lengths)).astype(np.uint16)
    return Unpacked(tokens, np.concatenate(marks), np.array(lengths, dtype=np.int64))


def rows_on_disk(folder: Path, unpacked: Unpacked, length: int, *, padded: bool) -> PackedData:
    """A packing as training reads it; `padded`: each conversation is given a row, by being filled up to its length."""
    folder.mkdir()
    if padded:
        tokens = np.full((len(unpacked.lengths), length), FILLER_ID, dtype=unpacked.tokens.dtype)
        marks = np.zeros(tokens.shape, dtype=np.uint8)
        for row, place in enumerate(unpacked.each()):
            real = place.stop - place.start
            tokens[row, :real], marks[row, :real] = unpacked.tokens[place], unpacked.marks[place]
        whole = np.full(len(tokens), length, dtype=np.int64)
        counts = write_rows(folder, Unpacked(tokens.reshape(-1), marks.reshape(-1), whole), length, FILLER_ID)
        counts["conversations"]["real_tokens"] = int(unpacked.lengths.sum())
    else:
        counts = write_rows(folder, unpacked, length, FILLER_ID)
    chat = ConversationCounts(learn="answers", **counts.pop("conversations"))
    manifest = PackedManifest(
        version=FORMAT_VERSION, key=folder.name, source="made up", tokenizer="none", eos_id=FILLER_ID, dtype="uint16",
        sequence_length=length, empty_documents=0, highest_id=VOCABULARY - 1, highest_token="", conversations=chat,
        **counts,
    )  # fmt: skip
    manifest.write(folder)
    return PackedData(
        folder=folder, evaluation_folder=None, key=folder.name, train_rows=manifest.rows, evaluation_rows=0,
        sequence_length=length, tokens=chat.real_tokens, dropped_tokens=0, documents=manifest.documents,
        eos_id=FILLER_ID, from_cache=False, seconds=0.0, conversations=chat,
    )  # fmt: skip


def epoch_seconds(data: PackedData) -> float:
    """One pass over all rows: forward, backward, AdamW."""
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=192, intermediate_size=512, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=data.sequence_length,
    )  # fmt: skip
    model: Any = LlamaForCausalLM(shape)
    model.train()
    task = CausalLmTraining(DataSection(sequence_length=data.sequence_length), conversations=True)
    task.prepare(model)
    task.choices(model)
    optimizer = torch.optim.AdamW(model.parameters())
    steps = -(-data.train_rows // BATCH_ROWS)
    loader = task.make_loader(
        data, seed=7, rows_per_step=BATCH_ROWS, micro_batch_rows=BATCH_ROWS, accumulation_steps=1, rank=0, world_size=1
    )
    seconds = 0.0
    for index in range(steps + 1):
        began = time.perf_counter()
        work = loader.next_step()
        loss = task.loss(model, work.batches[0], 1.0 / work.valid_targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if index:  # the first one finds everything cold
            seconds += time.perf_counter() - began
    return seconds * data.train_rows / (steps * BATCH_ROWS)


def side_of(data: PackedData, conversations: int, seconds: list[float]) -> Side:
    assert data.conversations is not None
    median = statistics.median(seconds)
    padding = data.row_padding_tokens / (data.train_rows * data.sequence_length)
    return Side(data.train_rows, padding, data.conversations.learned_tokens, conversations / median, median)


if __name__ == "__main__":
    main()

"""What a rank of a peer writes down, in the form of coremill's events: one rig reads all. And the tiny workload."""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

SHAPE: dict[str, Any] = {
    "vocab_size": 257,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
ROWS, LENGTH, ROWS_PER_RANK = 256, 32, 4


@dataclass(frozen=True)
class Orders:
    """The command line of a peer's script."""

    out: Path
    steps: int
    save_every: int
    nan_at: int  # 0: never; on the last rank


def parse() -> Orders:
    """Read it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--nan-at", type=int, default=0)
    return Orders(**vars(parser.parse_args()))


class Diary:
    """One rank's events."""

    def __init__(self, out: Path) -> None:
        self.rank = int(os.environ["RANK"])
        (out / "events").mkdir(parents=True, exist_ok=True)
        self._path = out / "events" / f"rank-{self.rank:05d}.jsonl"

    def write(self, kind: str, **fields: Any) -> None:
        """One line."""
        line = {"kind": kind, "time": time.time(), "rank": self.rank, **fields}
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def rows() -> torch.Tensor:
    """The same for everybody."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(1, SHAPE["vocab_size"], (ROWS, LENGTH), generator=generator)


def poison(model: torch.nn.Module, orders: Orders) -> None:
    """The logits of the last rank stop being numbers in one forward pass: the fault, not the script."""
    if not orders.nan_at or int(os.environ["RANK"]) != int(os.environ["WORLD_SIZE"]) - 1:
        return
    calls = 0

    def spoil(_module: Any, _inputs: Any, output: torch.Tensor) -> torch.Tensor | None:
        nonlocal calls
        calls += 1
        return output * float("nan") if calls == orders.nan_at else None

    model.get_output_embeddings().register_forward_hook(spoil)  # type: ignore[operator]

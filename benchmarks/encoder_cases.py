"""The runs of encoders that the plan is held to: samples of different lengths, attention with dropout and without."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks import encoder_work

FOLDER = Path(__file__).resolve().parent.parent / "runs" / "plan-table" / "encoders"
EPOCH_STEPS = 8  # a run sees every row, the longest too


@dataclass(frozen=True, kw_only=True)
class EncoderCase:
    """One short run, of an epoch."""

    name: str
    shape: str  # of benchmarks/encoder_work.py
    task: Literal["question-answering", "sequence-classification"] = "question-answering"
    ranks: int = 1
    engine: str = "replicate"
    checkpointing: bool = False
    samples: int = 8  # of a step
    mean: int = encoder_work.MEAN  # tokens of a row
    longest: int = encoder_work.LONGEST
    dropout: float = 0.1
    attention_dropout: float = 0.0
    micro_batch_rows: int | str = "auto"
    quick: bool = False

    @property
    def _data(self) -> Path:
        return FOLDER / f"{self.samples * EPOCH_STEPS}-of-{self.mean}-{self.longest}.jsonl"

    def prepare(self) -> None:
        """Questions and a tokenizer."""
        FOLDER.mkdir(parents=True, exist_ok=True)
        encoder_work.write_tokenizer(FOLDER)
        rows = encoder_work.questions_of(self.samples * EPOCH_STEPS, 1, mean=self.mean, longest=self.longest)
        self._data.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def run_file(self, run: Path, steps: int) -> str:
        """JSON is YAML."""
        data: dict[str, Any] = {"source": str(self._data), "sequence_length": self.longest}
        if self.task == "question-answering":
            data["doc_stride"] = self.longest // 3
        else:
            data |= {"text_columns": ["question", "context"], "label_column": "kind"}
        document = {
            "task": self.task,
            "model": {
                "weights": "random",
                "config": encoder_work.config_of(self.shape, self.dropout),
                "attention_dropout": self.attention_dropout,
            },
            "tokenizer": str(FOLDER),
            "data": data,
            "train": {
                "steps": max(steps, EPOCH_STEPS + 1),
                "samples_per_step": self.samples,
                "learning_rate": 1.0e-4,
                "micro_batch_rows": self.micro_batch_rows,
                "activation_checkpointing": self.checkpointing,
            },
            "parallel": {"engine": self.engine, "ranks_per_node": self.ranks},
            "checkpoint": {"every": "never"},
            "run": {"folder": str(run), "export": False},
        }
        return json.dumps(document, indent=1) + "\n"


SHORT: dict[str, Any] = {"mean": 60, "longest": 128}

HERE = (
    EncoderCase(name="11M answers, replicate 1", shape="mini", quick=True),
    EncoderCase(name="11M answers, dropout of attention, replicate 1", shape="mini", attention_dropout=0.1),
    EncoderCase(name="11M classes, short, replicate 2", shape="mini", task="sequence-classification", ranks=2, **SHORT),
    EncoderCase(name="28M answers, replicate 1 recomputing", shape="small", checkpointing=True),
    EncoderCase(name="28M answers, shard 2", shape="small", engine="shard", ranks=2),
    EncoderCase(
        name="28M answers, dropout of attention, shard 2 recomputing",
        shape="small",
        engine="shard",
        ranks=2,
        checkpointing=True,
        attention_dropout=0.1,
    ),
    EncoderCase(name="28M answers, short, replicate 2", shape="small", ranks=2, samples=16, **SHORT),
    EncoderCase(name="109M answers, short, replicate 1", shape="bert-base", **SHORT),
    EncoderCase(name="109M answers, replicate 1", shape="bert-base", samples=4, micro_batch_rows=4),
)

AMX = (
    EncoderCase(name="109M answers, replicate 1", shape="bert-base", samples=32, quick=True),
    EncoderCase(
        name="109M classes, short, replicate 1",
        shape="bert-base",
        task="sequence-classification",
        samples=64,
        **SHORT,
    ),
    EncoderCase(name="334M answers, replicate 1", shape="bert-large", samples=12),
    EncoderCase(
        name="334M answers, dropout of attention, replicate 1", shape="bert-large", samples=12, attention_dropout=0.1
    ),
    EncoderCase(name="334M answers, replicate 1 recomputing", shape="bert-large", samples=12, checkpointing=True),
    EncoderCase(name="334M answers, replicate 2", shape="bert-large", ranks=2, samples=24),
    EncoderCase(
        name="334M answers, shard 2 recomputing",
        shape="bert-large",
        engine="shard",
        ranks=2,
        samples=24,
        checkpointing=True,
    ),
    EncoderCase(name="334M answers, short, shard 4", shape="bert-large", engine="shard", ranks=4, samples=64, **SHORT),
)

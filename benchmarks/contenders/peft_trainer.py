"""peft's adapters under HF Trainer, one process on all cores, as its users run it; benchmarks/lora.py reads the record.

Rows are random tokens: what is measured does not depend on them.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments


class _Stopwatch(TrainerCallback):
    """A step lasts from the end of the one before to its own end."""

    def __init__(self) -> None:
        self.step_seconds: list[float] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._last = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        now = time.perf_counter()
        self.step_seconds.append(now - self._last)
        self._last = now


class _RandomRows(torch.utils.data.Dataset):
    def __init__(self, count: int, length: int, vocabulary: int) -> None:
        self._rows = torch.randint(0, vocabulary, (count, length), generator=torch.Generator().manual_seed(7))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": self._rows[index], "labels": self._rows[index]}


def main() -> None:
    """Train for a few steps and leave the record."""
    options = _parse()
    dtype = torch.bfloat16 if options.dtype == "bf16" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype)
    config = LoraConfig(r=options.rank, lora_alpha=2 * options.rank, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted = get_peft_model(model, config)
    arguments = TrainingArguments(
        output_dir=str(options.out.with_suffix("")),
        use_cpu=True,
        bf16=options.dtype == "bf16",
        per_device_train_batch_size=options.rows,
        gradient_accumulation_steps=options.passes,
        gradient_checkpointing=options.recomputing,
        gradient_checkpointing_kwargs={"use_reentrant": False} if options.recomputing else None,
        learning_rate=1e-4,
        max_steps=options.steps,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        seed=7,
    )
    stopwatch = _Stopwatch()
    rows = _RandomRows(options.rows * options.passes * options.steps, options.length, options.vocabulary)
    Trainer(model=adapted, args=arguments, train_dataset=rows, callbacks=[stopwatch]).train()
    record = {
        "step_seconds": stopwatch.step_seconds,
        "tokens_per_step": options.rows * options.passes * options.length,
        "trained": sum(each.numel() for each in adapted.parameters() if each.requires_grad),
        "dtype": options.dtype,
        "threads": torch.get_num_threads(),
        "peak_rss_bytes": _peak_rss_bytes(),
    }
    options.out.write_text(json.dumps(record, indent=1))


def _peak_rss_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    for name in ("rows", "passes", "length", "steps", "rank", "vocabulary"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), required=True)
    parser.add_argument("--recomputing", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()

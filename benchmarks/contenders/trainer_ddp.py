"""(b) HF Trainer with DDP over gloo on packed rows, its defaults otherwise (fused AdamW, clipping at 1.0)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, TrainingArguments

from benchmarks import workload
from benchmarks.contenders.measure import StepRecorder, parse_arguments
from benchmarks.contenders.timed_trainer import TimedTrainer


class PackedRows(torch.utils.data.Dataset):
    """Ready rows, memory-mapped."""

    def __init__(self, work: workload.Workload) -> None:
        self._rows = np.load(work.packed_rows, mmap_mode="r")

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = torch.from_numpy(self._rows[index].astype(np.int64))
        return {"input_ids": row, "labels": row}


def main() -> None:
    """Train for a few steps and leave the record."""
    arguments = parse_arguments(__doc__ or "")
    work = workload.load(arguments.workload)
    training_arguments = TrainingArguments(
        output_dir=str(arguments.out / "output"),
        use_cpu=True,
        ddp_backend="gloo",
        bf16=arguments.dtype == "bf16",
        per_device_train_batch_size=arguments.rows_per_rank,
        learning_rate=2e-5,
        logging_steps=1,
        max_steps=arguments.steps,
        save_strategy="no",
        seed=arguments.seed,
        report_to="none",
    )
    recorder = StepRecorder()
    trainer = TimedTrainer(
        recorder,
        model=AutoModelForCausalLM.from_pretrained(work.model, dtype=torch.float32),
        args=training_arguments,
        train_dataset=PackedRows(work),
    )
    trainer.train()
    recorder.write(arguments.out)


if __name__ == "__main__":
    main()

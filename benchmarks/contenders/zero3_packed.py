"""HF Trainer with DeepSpeed ZeRO-3 on packed rows: the recipe's JSON, but no padding and every core used.

Unlike `zero3_padded` this is ZeRO-3 at its best on CPU: what it sends is then its own doing, not the recipe's.
"""

from __future__ import annotations

import os

import deepspeed
import torch
from transformers import TrainingArguments

from benchmarks import workload
from benchmarks.contenders.measure import StepRecorder, parse_arguments
from benchmarks.contenders.timed_trainer import PackedRows, TimedTrainer, make_model
from benchmarks.contenders.zero3_padded import deepspeed_config


def main() -> None:
    """Train for a few steps and leave the record."""
    arguments = parse_arguments(__doc__ or "")
    work = workload.load(arguments.workload)
    training_arguments = TrainingArguments(
        output_dir=str(arguments.out / "output"),
        use_cpu=True,
        ddp_backend="gloo",
        bf16=arguments.dtype == "bf16",
        deepspeed=deepspeed_config(arguments.dtype),
        per_device_train_batch_size=arguments.rows_per_rank,
        learning_rate=arguments.learning_rate,
        lr_scheduler_type="constant" if arguments.ordered_rows else "linear",
        logging_steps=1,
        max_steps=arguments.steps,
        save_strategy="no",
        seed=arguments.seed,
        report_to="none",
    )
    deepspeed.init_distributed(dist_backend="gloo")  # as in zero3_padded: the Trainer leaves it unset on CPU
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    recorder = StepRecorder()
    recorder.loading()
    trainer = TimedTrainer(
        recorder,
        model=make_model(arguments, work, torch.bfloat16 if arguments.dtype == "bf16" else torch.float32),
        args=training_arguments,
        train_dataset=PackedRows(arguments.ordered_rows or work.packed_rows),
        in_order=arguments.ordered_rows is not None,
    )
    trainer.train()
    recorder.write(arguments.out)


if __name__ == "__main__":
    main()

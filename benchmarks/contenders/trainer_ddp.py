"""(b) HF Trainer with DDP over gloo on packed rows, its defaults otherwise (fused AdamW, clipping at 1.0)."""

from __future__ import annotations

import torch
from transformers import TrainingArguments

from benchmarks import workload
from benchmarks.contenders.measure import StepRecorder, parse_arguments
from benchmarks.contenders.timed_trainer import PackedRows, TimedTrainer, make_model


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
        learning_rate=arguments.learning_rate,
        lr_scheduler_type="constant" if arguments.ordered_rows else "linear",
        logging_steps=1,
        max_steps=arguments.steps,
        save_strategy="no",
        seed=arguments.seed,
        report_to="none",
    )
    recorder = StepRecorder()
    recorder.loading()
    trainer = TimedTrainer(
        recorder,
        model=make_model(arguments, work, torch.float32),
        args=training_arguments,
        train_dataset=PackedRows(arguments.ordered_rows or work.packed_rows),
        in_order=arguments.ordered_rows is not None,
    )
    trainer.train()
    recorder.write(arguments.out)


if __name__ == "__main__":
    main()

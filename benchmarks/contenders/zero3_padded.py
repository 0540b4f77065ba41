"""(a) The tutorials' recipe: HF Trainer, DeepSpeed ZeRO-3, every dataset row padded to 512, batch 1, accumulation 4.

`cpu-ds.json` beside this file is the recipe's own, unchanged. What today's versions force, and nothing more, is
adapted; every adaptation is marked ADAPTED with its reason.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import deepspeed
import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling, TrainingArguments

from benchmarks import workload
from benchmarks.contenders.measure import StepRecorder, parse_arguments
from benchmarks.contenders.timed_trainer import TimedTrainer


def deepspeed_config(dtype: str) -> dict[str, Any]:
    """The recipe's JSON."""
    config: dict[str, Any] = json.loads((Path(__file__).parent / "cpu-ds.json").read_text())
    # ADAPTED: bf16 off where the CPU has no bf16 units; products there are some 300 times slower than fp32.
    config["bf16"]["enabled"] = dtype == "bf16"
    return config


def main() -> None:
    """Train for a few steps and leave the record."""
    arguments = parse_arguments(__doc__ or "")
    work = workload.load(arguments.workload)

    tokenizer = AutoTokenizer.from_pretrained(work.model)
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side = "right"

    # ADAPTED: the paragraphs of the benchmark's corpus instead of wikitext-2, which needs a network.
    dataset = load_dataset("json", data_files=str(work.paragraphs_file), split="train")

    def tokenize(examples: dict[str, list[str]]) -> Any:
        return tokenizer(examples["text"], truncation=True, max_length=512, padding="max_length")

    tokenized = dataset.map(
        tokenize,
        batched=True,
        remove_columns=["text"],
        num_proc=max(1, (os.cpu_count() or 1) // 2),  # ADAPTED: the recipe's cpu_count() // 2 is 0 on one core
    )

    training_arguments = TrainingArguments(
        output_dir=str(arguments.out / "output"),
        # ADAPTED: overwrite_output_dir, no_cuda and use_ipex are gone from transformers; use_cpu alone says it.
        do_train=True,
        use_cpu=True,
        bf16=arguments.dtype == "bf16",  # ADAPTED: as in deepspeed_config
        deepspeed=deepspeed_config(arguments.dtype),
        per_device_train_batch_size=1,
        gradient_accumulation_steps=4,
        learning_rate=2e-5,
        num_train_epochs=1,
        logging_steps=1,
        ddp_backend="gloo",
        max_steps=arguments.steps,  # ADAPTED: a few steps instead of an epoch
        save_strategy="no",  # ADAPTED: saving is measured for nobody here
        seed=arguments.seed,
        report_to="none",  # ADAPTED: no experiment tracker
    )
    # ADAPTED: with use_cpu today's Trainer leaves DeepSpeed's own communicator unset; DeepSpeed then counts one rank
    # and refuses its own batch size ("8 != 1 * 4 * 1").
    deepspeed.init_distributed(dist_backend="gloo")
    model = AutoModelForCausalLM.from_pretrained(
        work.model,
        dtype=torch.bfloat16 if arguments.dtype == "bf16" else torch.float32,  # ADAPTED: torch_dtype was renamed
        device_map=None,
    )
    recorder = StepRecorder()
    trainer = TimedTrainer(
        recorder,
        model=model,
        args=training_arguments,
        train_dataset=tokenized,
        processing_class=tokenizer,  # ADAPTED: tokenizer= was renamed
        # ADAPTED: without labels the model returns no loss and the Trainer refuses; this stock collator makes them.
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    )
    trainer.train()
    recorder.write(arguments.out)


if __name__ == "__main__":
    main()

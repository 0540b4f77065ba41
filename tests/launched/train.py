"""Llama 3 with the HF Trainer and DeepSpeed ZeRO-3 on CPUs, as a tutorial has it; it knows nothing of coremill.

What today's versions force is marked ADAPTED; model, text and cpu-ds.json are found where it is started.
"""

import os

import deepspeed
import torch
from datasets import load_dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
)


def main():
    """Train for an epoch and save."""
    model_name = "meta-llama/Meta-Llama-3-8B"
    output_dir = "llama3-training-output"  # ADAPTED: the tutorial says to name a folder of one's own here

    tokenizer = AutoTokenizer.from_pretrained(model_name)
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side = "right"

    dataset = load_dataset("wikitext", "wikitext-2-raw-v1", split="train")

    def tokenize_function(examples):
        return tokenizer(examples["text"], truncation=True, max_length=512, padding="max_length")

    tokenized_datasets = dataset.map(
        tokenize_function,
        batched=True,
        remove_columns=["text"],
        num_proc=max(1, os.cpu_count() // 2),  # ADAPTED: 0 on one core
    )

    training_args = TrainingArguments(
        output_dir=output_dir,
        # ADAPTED: overwrite_output_dir, no_cuda and use_ipex are gone from transformers 5.
        do_train=True,
        use_cpu=True,
        bf16=True,
        deepspeed="cpu-ds.json",
        per_device_train_batch_size=1,
        gradient_accumulation_steps=4,
        learning_rate=2e-5,
        num_train_epochs=1,
        logging_steps=1,
        save_steps=100,
        ddp_backend="gloo",
        report_to="none",  # ADAPTED: today's default is to ask every tracker that is installed
    )
    # ADAPTED: with use_cpu today's Trainer leaves DeepSpeed's own communicator unset; it then counts one rank.
    deepspeed.init_distributed(dist_backend="gloo")

    model = AutoModelForCausalLM.from_pretrained(
        model_name,
        dtype=torch.bfloat16,  # ADAPTED: torch_dtype was renamed
        device_map=None,
    )
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=tokenized_datasets,
        processing_class=tokenizer,  # ADAPTED: tokenizer= was renamed
        # ADAPTED: without labels there is no loss, which the Trainer refuses.
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    )

    print("--- training starts ---")
    trainer.train()

    trainer.save_model(output_dir)


if __name__ == "__main__":
    main()

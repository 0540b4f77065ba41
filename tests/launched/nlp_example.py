"""Pairs of sentences, same meaning or not, with accelerate, in the manner of its nlp_example.py.

It knows nothing of coremill. `python nlp_example.py [--cpu] [--mixed_precision bf16]`, where bert-base-cased and
pairs.csv are folder and file beside it. As older ones of its kind it ends without end_training(): with torch 2.13 a
rank may then hang for good in the destructor of the model's process group, whoever started it.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from accelerate import Accelerator
from datasets import load_dataset
from torch.optim import AdamW
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification, AutoTokenizer, get_linear_schedule_with_warmup, set_seed

EVAL_BATCH_SIZE = 16


def get_dataloaders(accelerator: Accelerator, batch_size: int) -> tuple[DataLoader, DataLoader]:
    """Of the pairs, tokenised."""
    tokenizer = AutoTokenizer.from_pretrained("bert-base-cased")
    datasets = load_dataset("csv", data_files="pairs.csv", split="train").train_test_split(0.25, seed=0)

    def tokenize_function(examples: dict[str, Any]) -> Any:
        return tokenizer(examples["sentence1"], examples["sentence2"], truncation=True, max_length=64)

    with accelerator.main_process_first():
        tokenized = datasets.map(tokenize_function, batched=True, remove_columns=["sentence1", "sentence2"])
    tokenized = tokenized.rename_column("label", "labels")

    def collate(examples: list[dict[str, Any]]) -> Any:
        return tokenizer.pad(examples, padding="longest", return_tensors="pt")

    train = DataLoader(tokenized["train"], shuffle=True, collate_fn=collate, batch_size=batch_size, drop_last=True)
    return train, DataLoader(tokenized["test"], collate_fn=collate, batch_size=EVAL_BATCH_SIZE)


def training_function(config: dict[str, Any], args: argparse.Namespace) -> None:
    """Train for some epochs, and evaluate after each."""
    accelerator = Accelerator(cpu=args.cpu, mixed_precision=args.mixed_precision)
    set_seed(config["seed"])
    train_dataloader, eval_dataloader = get_dataloaders(accelerator, config["batch_size"])
    model = AutoModelForSequenceClassification.from_pretrained("bert-base-cased").to(accelerator.device)
    optimizer = AdamW(params=model.parameters(), lr=config["lr"])
    steps = len(train_dataloader) * config["num_epochs"]
    schedule = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=2, num_training_steps=steps)
    model, optimizer, train_dataloader, eval_dataloader, schedule = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, schedule
    )
    for epoch in range(config["num_epochs"]):
        model.train()
        for batch in train_dataloader:
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        model.eval()
        right, losses = [], []
        for batch in eval_dataloader:
            with torch.no_grad():
                outputs = model(**batch)
            predictions, references = accelerator.gather_for_metrics((outputs.logits.argmax(dim=-1), batch["labels"]))
            right += (predictions == references).tolist()
            losses += accelerator.gather(outputs.loss.reshape(1)).tolist()
        accelerator.print(
            f"epoch {epoch}: {{'accuracy': {sum(right) / len(right):.4f}}} of {len(right)} pairs,"
            f" loss {sum(losses) / len(losses):.6f} on {accelerator.num_processes} processes"
        )


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Simple example of training script.")
    parser.add_argument("--mixed_precision", default=None, choices=["no", "fp16", "bf16", "fp8"])
    parser.add_argument("--cpu", action="store_true", help="If passed, will train on the CPU.")
    training_function({"lr": 2e-3, "num_epochs": 2, "seed": 42, "batch_size": 8}, parser.parse_args())


if __name__ == "__main__":
    main()

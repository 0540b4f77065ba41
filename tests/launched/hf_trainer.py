"""An HF Trainer script as its users write them; it knows nothing of coremill.

python hf_trainer.py OUTPUT_FOLDER
"""

from __future__ import annotations

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


class Rows(torch.utils.data.Dataset):
    """Sixteen rows that repeat three numbers."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = torch.arange(index, index + 16) % 3
        return {"input_ids": row, "labels": row}


def main() -> None:
    """Train for three steps."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=16, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=32,
    )  # fmt: skip
    arguments = TrainingArguments(
        output_dir=sys.argv[1], max_steps=3, per_device_train_batch_size=2, use_cpu=True, logging_steps=1,
        save_strategy="no", report_to=[], disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(model=LlamaForCausalLM(config), args=arguments, train_dataset=Rows())
    outcome = trainer.train()
    where = f"rank {arguments.process_index} of {arguments.world_size}"
    print(f"TRAINED {where}, loss {outcome.training_loss:.6f}", flush=True)


if __name__ == "__main__":
    main()

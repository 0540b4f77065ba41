"""Question answering with the HF Trainer, in the manner of transformers' run_qa.py; it knows nothing of coremill.

python run_qa.py --model_name_or_path FOLDER --train_file squad.json --do_train --do_eval --max_seq_length 64 \
    --doc_stride 16 --per_device_train_batch_size 4 --num_train_epochs 1 --output_dir OUT --use_cpu
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from datasets import Dataset
from transformers import (
    AutoModelForQuestionAnswering,
    AutoTokenizer,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)


@dataclass
class ModelArguments:
    """Which model."""

    model_name_or_path: str = field(metadata={"help": "folder or id of the hub"})


@dataclass
class DataArguments:
    """Which text, and how it is cut."""

    train_file: str = field(metadata={"help": "JSON in SQuAD's form"})
    max_seq_length: int = 384
    doc_stride: int = 128


def read_squad(path: str) -> Dataset:
    """Articles, paragraphs and their questions, flat."""
    with open(path, encoding="utf-8") as file:  # noqa: PTH123
        articles = json.load(file)["data"]
    return Dataset.from_list(
        [
            {"context": paragraph["context"], "question": entry["question"], "answers": entry["answers"][0]}
            for article in articles
            for paragraph in article["paragraphs"]
            for entry in paragraph["qas"]
        ]
    )


def main() -> None:
    """Fine-tune and evaluate."""
    parser = HfArgumentParser((ModelArguments, DataArguments, TrainingArguments))
    model_args, data_args, training_args = parser.parse_args_into_dataclasses()
    set_seed(training_args.seed)
    tokenizer = AutoTokenizer.from_pretrained(model_args.model_name_or_path)
    model = AutoModelForQuestionAnswering.from_pretrained(model_args.model_name_or_path)

    def prepare_features(examples: dict[str, list[Any]]) -> Any:
        """Windows of each context, with the tokens at which the answer begins and ends; 0 where it is elsewhere."""
        features = tokenizer(
            examples["question"],
            examples["context"],
            truncation="only_second",
            max_length=data_args.max_seq_length,
            stride=data_args.doc_stride,
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
            padding="max_length",
        )
        owners, offsets = features.pop("overflow_to_sample_mapping"), features.pop("offset_mapping")
        features["start_positions"], features["end_positions"] = [], []
        for window, (owner, places) in enumerate(zip(owners, offsets, strict=True)):
            answer = examples["answers"][owner]
            first, last = answer["answer_start"], answer["answer_start"] + len(answer["text"])
            inside = [
                token
                for token, (begin, end) in enumerate(places)
                if features.sequence_ids(window)[token] == 1 and begin >= first and end <= last
            ]
            features["start_positions"].append(inside[0] if inside else 0)
            features["end_positions"].append(inside[-1] if inside else 0)
        return features

    examples = read_squad(data_args.train_file)
    with training_args.main_process_first(desc="features"):
        features = examples.map(prepare_features, batched=True, remove_columns=examples.column_names)
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=features if training_args.do_train else None,
        eval_dataset=features.select(range(16)) if training_args.do_eval else None,
        processing_class=tokenizer,
        data_collator=default_data_collator,
    )
    if training_args.do_train:
        trainer.save_metrics("train", trainer.train().metrics)
        trainer.save_model()
    if training_args.do_eval:
        trainer.save_metrics("eval", trainer.evaluate())


if __name__ == "__main__":
    main()

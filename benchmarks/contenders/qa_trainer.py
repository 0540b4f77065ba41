"""Question answering under HF Trainer in the manner of transformers' run_qa example, one process on all cores.

Rows are padded to the maximum, as the example has it by default (`pad`), or to the longest of a batch, batches being
of like lengths by the Trainer's own sampler (`group`). Writes the events that benchmarks/turns.py reads, and with
`--evaluate` answers the questions of a file at the end; these are scored as coremill scores its own.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    AutoModelForQuestionAnswering,
    DataCollatorWithPadding,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
)

from coremill.data.encoded_split import AskedQuestion
from coremill.tasks.question_answering.post_processing import AnswerRules, ScoredWindow, answer
from coremill.tasks.question_answering.squad_metrics import squad_scores


def main() -> None:
    """Train for so many steps; leave events, and the metrics of an evaluation."""
    options = _parse()
    torch.manual_seed(options.seed)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(options.model)
    model = AutoModelForQuestionAnswering.from_pretrained(options.model, dtype=torch.float32)
    rows = [json.loads(line) for line in options.data.read_text().splitlines()]
    features = training_features(rows, tokenizer, options.length, options.stride, pads=options.how == "pad")
    trainer = _CountingTrainer(
        model=model,
        args=_arguments(options),
        train_dataset=features,  # type: ignore[arg-type]
        data_collator=default_data_collator if options.how == "pad" else DataCollatorWithPadding(tokenizer),
        processing_class=tokenizer,
    )
    trainer.add_callback(_Events(options.out / "events" / "rank-00000.jsonl", trainer))
    trainer.train()
    record: dict[str, Any] = {"threads": torch.get_num_threads(), "peak_rss_bytes": _peak_rss_bytes()}
    if options.evaluate is not None:
        record["metrics"] = evaluate(trainer.model, tokenizer, options)
    (options.out / "record.json").write_text(json.dumps(record, indent=1))


def _arguments(options: argparse.Namespace) -> TrainingArguments:
    grouped: dict[str, Any] = {}
    if options.how == "group":
        names = {field.name for field in fields(TrainingArguments)}
        by_name = "train_sampling_strategy" in names  # older ones have a switch
        grouped = {"train_sampling_strategy": "group_by_length"} if by_name else {"group_by_length": True}
    return TrainingArguments(
        output_dir=str(options.out / "trainer"),
        use_cpu=True,
        bf16=options.dtype == "bf16",
        per_device_train_batch_size=options.samples,
        learning_rate=options.learning_rate,
        max_steps=options.steps,
        logging_steps=100,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=options.seed,
        **grouped,
    )


def training_features(
    rows: list[dict[str, Any]], tokenizer: Any, length: int, stride: int, *, pads: bool
) -> list[dict[str, Any]]:
    """Windows with the tokens that answers begin and end with; CLS where a window does not hold them."""
    found = []
    for row in rows:
        made = tokenizer(
            row["question"].lstrip(),
            row["context"],
            truncation="only_second",
            max_length=length,
            stride=stride,
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
            padding="max_length" if pads else False,
        )
        first = row["answers"]["answer_start"][0]
        last = first + len(row["answers"]["text"][0])
        for window, ids in enumerate(made["input_ids"]):
            sides, offsets = made.sequence_ids(window), made["offset_mapping"][window]
            context = [at for at, side in enumerate(sides) if side == 1]
            start = end = ids.index(tokenizer.cls_token_id)
            if offsets[context[0]][0] <= first and offsets[context[-1]][1] >= last:
                start = max(at for at in context if offsets[at][0] <= first)
                end = min(at for at in context if offsets[at][1] >= last)
            inputs = {name: made[name][window] for name in ("input_ids", "attention_mask", "token_type_ids")}
            found.append({**inputs, "start_positions": start, "end_positions": end})
    return found


class _CountingTrainer(Trainer):
    """Counts the tokens of each step, and trains as the plain one does."""

    tokens = positions = 0

    def training_step(self, model: Any, inputs: Any, *more: Any, **named: Any) -> Any:
        self.tokens += int(inputs["attention_mask"].sum())
        self.positions += inputs["attention_mask"].numel()
        return super().training_step(model, inputs, *more, **named)


class _Events(TrainerCallback):
    """When each step ended, in coremill's words."""

    def __init__(self, path: Path, counted: _CountingTrainer) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._stream = path.open("w", buffering=1)
        self._counted = counted
        self._write(kind="start", pid=os.getpid())

    def _write(self, **fields_: Any) -> None:
        self._stream.write(json.dumps({**fields_, "time": time.time(), "rank": 0}) + "\n")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        tokens, positions = self._counted.tokens, self._counted.positions
        self._counted.tokens = self._counted.positions = 0
        self._write(kind="step", step=state.global_step, tokens=tokens, padding_tokens=positions - tokens)


def evaluate(model: Any, tokenizer: Any, options: argparse.Namespace) -> dict[str, float]:
    """Exact match and F1, by windows that transformers made."""
    model.eval()
    given, right = [], []
    for line in options.evaluate.read_text().splitlines():
        row = json.loads(line)
        made = tokenizer(
            row["question"].lstrip(),
            row["context"],
            truncation="only_second",
            max_length=options.length,
            stride=options.stride,
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
        )
        windows = []
        for window, ids in enumerate(made["input_ids"]):
            names = ("input_ids", "attention_mask", "token_type_ids")
            with torch.no_grad():
                out = model(**{name: torch.tensor([made[name][window]]) for name in names})
            of_context = np.array(made.sequence_ids(window)) == 1
            offsets = np.where(of_context[:, None], np.array(made["offset_mapping"][window]), -1).astype(np.int32)
            logits = (each[0].float().numpy() for each in (out.start_logits, out.end_logits))
            windows.append(ScoredWindow(offsets, *logits, null_position=ids.index(tokenizer.cls_token_id)))
        answers = tuple(row["answers"]["text"])
        asked = AskedQuestion(row["id"], row["question"], row["context"], answers)
        given.append(answer(asked, windows, AnswerRules()).text)
        right.append(answers)
    scores = squad_scores(given, right, version_2=False)
    return {"exact_match": scores.exact_match, "f1": scores.f1}


def _peak_rss_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("how", choices=("pad", "group"))
    for name in ("model", "data", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    for name in ("samples", "steps", "length", "stride", "seed"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--learning-rate", type=float, required=True)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), required=True)
    parser.add_argument("--evaluate", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()

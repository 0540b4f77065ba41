"""The HF Trainer with a stopwatch: it counts tokens, marks the end of each step, and trains as the plain one does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainerCallback

from benchmarks.contenders.measure import ContenderArguments, StepRecorder
from benchmarks.workload import Workload


class _Stopwatch(TrainerCallback):
    def __init__(self, recorder: StepRecorder) -> None:
        self.recorder = recorder

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.recorder.begin()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.recorder.end_step()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if logs and "loss" in logs:
            self.recorder.losses.append(float(logs["loss"]))


class PackedRows(torch.utils.data.Dataset):
    """Ready rows, memory-mapped."""

    def __init__(self, file: Path) -> None:
        self._rows = np.load(file, mmap_mode="r")

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = torch.from_numpy(self._rows[index].astype(np.int64))
        return {"input_ids": row, "labels": row}


def make_model(arguments: ContenderArguments, work: Workload, dtype: torch.dtype) -> Any:
    """The workload's, or one of random weights. Under the Trainer's ZeRO-3 both make only a rank's share."""
    if arguments.random_weights is None:
        return AutoModelForCausalLM.from_pretrained(work.model, dtype=dtype)
    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(arguments.random_weights), dtype=dtype)


class TimedTrainer(Trainer):
    """`Trainer`, plus a recorder; with `in_order` it takes rows as they lie: all contenders then train on the same."""

    def __init__(self, recorder: StepRecorder, *, in_order: bool = False, **keywords: Any) -> None:
        super().__init__(**keywords)
        self._recorder = recorder
        self._in_order = in_order
        self.add_callback(_Stopwatch(recorder))

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        if not self._in_order:
            return super()._get_train_sampler(train_dataset)
        return torch.utils.data.SequentialSampler(train_dataset or self.train_dataset)

    def training_step(self, model: Any, inputs: Any, *rest: Any, **keywords: Any) -> Any:
        """Count, then train."""
        mask = inputs.get("attention_mask")
        positions = inputs["input_ids"].numel()
        self._recorder.count(positions if mask is None else int(mask.sum()), positions)
        return super().training_step(model, inputs, *rest, **keywords)

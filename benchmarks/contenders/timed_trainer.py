"""The HF Trainer with a stopwatch: it counts tokens, marks the end of each step, and trains as the plain one does."""

from __future__ import annotations

from typing import Any

from transformers import Trainer, TrainerCallback

from benchmarks.contenders.measure import StepRecorder


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


class TimedTrainer(Trainer):
    """`Trainer`, plus a recorder."""

    def __init__(self, recorder: StepRecorder, **keywords: Any) -> None:
        super().__init__(**keywords)
        self._recorder = recorder
        self.add_callback(_Stopwatch(recorder))

    def training_step(self, model: Any, inputs: Any, *rest: Any, **keywords: Any) -> Any:
        """Count, then train."""
        mask = inputs.get("attention_mask")
        positions = inputs["input_ids"].numel()
        self._recorder.count(positions if mask is None else int(mask.sum()), positions)
        return super().training_step(model, inputs, *rest, **keywords)

"""HF Trainer with DeepSpeed ZeRO-3: saves every few steps, goes on from `get_last_checkpoint`, defaults otherwise."""

from __future__ import annotations

from typing import Any

import deepspeed
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

from chaos.contenders.diary import ROWS_PER_RANK, SHAPE, Diary, parse, poison, rows

DEEPSPEED = {
    "zero_optimization": {"stage": 3},
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
}


class Rows(torch.utils.data.Dataset):
    """Ready rows."""

    def __init__(self) -> None:
        self._rows = rows()

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._rows[index], "labels": self._rows[index]}


class Told(TrainerCallback):
    """Tells the rig what happens."""

    def __init__(self, diary: Diary) -> None:
        self._diary = diary

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **rest: Any) -> None:
        if logs and "loss" in logs:
            self._diary.write("step", step=state.global_step, loss=float(logs["loss"]))

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        if not state.is_world_process_zero:
            self._diary.write("step", step=state.global_step)

    def on_save(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        self._diary.write("save", step=state.global_step, saved=True)


def main() -> None:
    """Train, from the last checkpoint where there is one."""
    orders = parse()
    diary = Diary(orders.out)
    arguments = TrainingArguments(
        output_dir=str(orders.out),
        use_cpu=True,
        ddp_backend="gloo",
        deepspeed=DEEPSPEED,
        per_device_train_batch_size=ROWS_PER_RANK,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        logging_steps=1,
        max_steps=orders.steps,
        save_steps=orders.save_every,
        save_total_limit=2,
        report_to="none",
        disable_tqdm=True,
    )
    # With use_cpu today's Trainer leaves DeepSpeed's communicator unset, and DeepSpeed counts one rank.
    deepspeed.init_distributed(dist_backend="gloo")
    set_seed(7)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE))
    poison(model, orders)
    trainer = Trainer(model=model, args=arguments, train_dataset=Rows(), callbacks=[Told(diary)])
    last = get_last_checkpoint(str(orders.out))
    diary.write("start", resumed_from=last)
    trainer.train(resume_from_checkpoint=last)
    diary.write("end", weights_finite=_finite(trainer))


def _finite(trainer: Trainer) -> bool:
    """Whether the weights that were trained are numbers."""
    import deepspeed as ds

    good = True
    for parameter in trainer.model.parameters():
        with ds.zero.GatheredParameters([parameter]):
            good = good and bool(torch.isfinite(parameter).all())
    return good


if __name__ == "__main__":
    main()

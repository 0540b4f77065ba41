"""Values of other tools' settings -> ours, where they can be computed: `bf16: true` -> `parallel.dtype: bf16`.

Each function takes the value and all that was given beside it, by name in lower case with underscores, and returns
the cure, or None where the value does not say enough. The table of names that uses them is foreign.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from coremill.config.schema import AUTO, RunConfig
from coremill.config.task_rules import ENCODERS

Given = Mapping[str, Any]

ROWS = (
    "per_device_train_batch_size per_gpu_train_batch_size train_micro_batch_size_per_gpu micro_batch_size"
    " local_batch_size batch_size"
)
ACCUMULATION = "gradient_accumulation_steps grad_accum_steps"
GLOBAL_ROWS = "train_batch_size global_batch_size total_batch_size"
LENGTH = (
    "max_length max_seq_length max_seq_len seq_length seq_len sequence_len cutoff_len block_size context_length"
    " model_max_length"
)
ALL_DEVICES = "num_processes world_size"
DEVICES = "nproc_per_node nprocs_per_node nproc num_gpus gpus devices num_accelerators"  # of a machine
LOWEST_RATE = ", with train.minimum_learning_rate for its lowest rate"
PAGED = ", without paging, which a CPU does not need"


def words(*lines: str) -> dict[str, str]:
    """`theirs theirs -> ours` as a mapping, theirs in lower case."""
    halves = [line.split(" -> ") for line in lines]
    return {theirs: ours for names, ours in halves for theirs in names.split()}


DTYPES = words(
    "bfloat16 torch.bfloat16 bf16-mixed bf16-true -> bf16", "float32 torch.float32 float 32 32-true no -> fp32"
)


@dataclass(frozen=True)
class Cure:
    """Our settings for what was written; none of them: it is to be left out."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""  # said after them
    why: str | None = None  # instead of the reason that holds for other values


Translate = Callable[[Any, Given], Cure | None]


def accepts(key: str, value: Any) -> bool:
    """Whether the schema takes a value under one of our keys."""
    section, _, name = key.partition(".")
    listed, in_list, inner = re.sub(r"\[\d*\]\.", "[].", name).partition("[].")
    inside = {listed: [{inner: value}]} if in_list else {name: value}
    try:
        RunConfig.model_validate({section: inside if name else value})
    except ValidationError as error:  # an entry of a list may lack other keys
        return bool(in_list) and not any(inner in detail["loc"] for detail in error.errors())
    return True


def same(target: str) -> Translate:
    """The same value under our name."""
    return lambda value, _: Cure({target: value}) if value is not None and accepts(target, value) else None


def by_words(target: str, theirs: Mapping[str, Any]) -> Translate:
    """Our word for another tool's, or the same word."""

    def translate(value: Any, given: Given) -> Cure | None:
        word = str(value).lower()
        ours = theirs.get(word, word if isinstance(value, str) and accepts(target, word) else None)
        return same(target)(value, given) if ours is None else Cure({target: ours}, beside_word(word))

    return translate


def beside_word(word: str) -> str:
    """What is said beside our word for another tool's, which means a little more."""
    return LOWEST_RATE if "min_lr" in word else PAGED if word.startswith("paged") or ".paged" in word else ""


def switch(target: str, on: Any, off: Any = None, note: str = "") -> Translate:
    """True: our setting; false: the other one, or nothing."""

    def translate(value: Any, _: Given) -> Cure | None:
        chosen = on if value is True else off if value is False else None
        return None if not isinstance(value, bool) else Cure({} if chosen is None else {target: chosen}, note)

    return translate


def save_interval(value: Any, given: Given) -> Cure | None:
    """`save_steps: 500`; the words of save_strategy say no number, but whether it counts."""
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        if (other := _other_strategy(given, "save_strategy")) is not None:
            return other
        return Cure({"checkpoint.every": f"{value}steps"})
    return Cure({"checkpoint.every": "never"}) if value in ("no", False) else None


def evaluation_interval(value: Any, given: Given) -> Cure | None:
    """`eval_steps: 50`, with something to evaluate on."""
    if not accepts("evaluation.every_steps", value):
        return None
    if (other := _other_strategy(given, "eval_strategy evaluation_strategy")) is not None:
        return other
    named = "val_set_size val_size test_size validation_file eval_file eval_files eval_dataset eval_split test_file"
    named += " evaluation_fraction evaluation_source evaluation_split"
    rows = {} if any(name in given for name in named.split()) else {"data.evaluation_fraction": 0.05}
    return Cure({"evaluation.every_steps": value, **rows})


def _other_strategy(given: Given, names: str) -> Cure | None:
    """The Trainer counts steps under one strategy alone."""
    for name in names.split():
        if str(given.get(name, "steps")).lower() != "steps":
            return Cure(why=f"{name} is {as_written(given[name])}, and then it does not count there either")
    return None


def steps_or_none(value: Any, given: Given) -> Cure | None:
    """`max_steps: -1` means by epochs."""
    return Cure(note="; -1 means by epochs") if value == -1 else same("train.steps")(value, given)


def tokens_per_step(_: Any, given: Given) -> Cure | None:
    """Rows x accumulation x tokens of a row, of one device, and of all where their number is given.

    Tasks that count a step in rows (`task` among what is given) have no tokens in it.
    """
    length = _number(given, LENGTH, "sequence_length") or RunConfig().data.sequence_length
    of_all = _number(given, GLOBAL_ROWS)
    rows = of_all or _number(given, ROWS)
    if rows is None:
        return None
    factors = {f"{rows} rows": rows}
    passes = None if of_all else _number(given, ACCUMULATION)
    devices = None if of_all else _devices(given)
    if passes is not None:
        factors[f"{passes} accumulation steps"] = passes
    if devices is not None:
        factors[f"{devices} devices"] = devices
    counts_rows = pads_rows(given)
    if not counts_rows:
        factors[f"{length} tokens of a row"] = length
    note = f" ({' x '.join(factors)})" if len(factors) > 1 else ""
    if of_all is None and devices is None:
        note += ", times the number of devices you had"
    key = "train.samples_per_step" if counts_rows else "train.tokens_per_step"
    why = "a step is counted in rows over all ranks, so that it stays the same when the machines change"
    return Cure({key: math.prod(factors.values())}, note, why if counts_rows else None)


def pads_rows(given: Given) -> bool:
    """Whether the task beside it is one whose steps are counted in rows."""
    return str(given.get("task")).replace("_", "-") in ENCODERS


def _devices(given: Given) -> int | None:
    """On all machines together."""
    of_a_machine = _number(given, DEVICES)
    machines = _number(given, "num_machines nnodes num_nodes") or 1
    return _number(given, ALL_DEVICES) or (of_a_machine * machines if of_a_machine else None)


def unwarmed(given: Given) -> str | None:
    """Why a warm-up is none there, where it is none."""
    schedule = next((given[name] for name in ("lr_scheduler_type", "lr_scheduler") if name in given), None)
    named = str(schedule).lower() == "constant"
    return "transformers' schedule constant has no warm-up, whatever is set" if named else None


def warmup_ratio(value: Any, given: Given) -> Cure | None:
    """0 is no warm-up, which is the default."""
    if (why := unwarmed(given)) is not None:
        return Cure(why=why)
    return Cure() if value == 0 and not isinstance(value, bool) else same("train.warmup_share")(value, given)


def minimum_rate(value: Any, given: Given) -> Cure | None:
    """A share of the peak as a rate."""
    peak = next((given[name] for name in ("learning_rate", "lr") if isinstance(given.get(name), int | float)), None)
    if peak is None or not isinstance(value, int | float) or not 0 <= value <= 1:
        return None
    return Cure({"train.minimum_learning_rate": float(f"{value * peak:.6g}")}, f" ({value:g} of {peak:g})")


def scheduler_kwargs(value: Any, given: Given) -> Cure | None:
    """`lr_scheduler_kwargs: {min_lr: 1e-6}`, or min_lr_rate."""
    if not isinstance(value, Mapping):
        return None
    lowest = same("train.minimum_learning_rate")(value.get("min_lr"), given)
    cure = lowest or minimum_rate(value.get("min_lr_rate"), given)
    others = [name for name in value if name not in ("min_lr", "min_lr_rate")]
    left = f"; leave out {', '.join(map(str, others))}: there is nothing here to hand it to" if others else ""
    return None if cure is None else Cure(cure.settings, cure.note + left)


def decay_share(value: Any, _: Given) -> Cure | None:
    if not accepts("train.decay_share", value):
        return None
    return Cure({"train.schedule": "warmup-stable-decay", "train.decay_share": value})


def clip_norm(value: Any, given: Given) -> Cure | None:
    """0 is off there."""
    off = not isinstance(value, bool) and value == 0
    return Cure({"train.clip_norm": None}, "; 0 is off there") if off else same("train.clip_norm")(value, given)


def load_best(value: Any, given: Given) -> Cure | None:
    """By the loss, unless metric_for_best_model is given too."""
    if value is True:
        by_metric = bool(given.get("metric_for_best_model"))
        return Cure(why="metric_for_best_model says by what") if by_metric else Cure({"evaluation.keep_best": "loss"})
    return Cure() if value is False else None


def deciding_metric(value: Any, given: Given) -> Cure | None:
    """eval_loss of other tools is loss here."""
    if given.get("load_best_model_at_end") is False:
        return Cure(why="load_best_model_at_end is false, and then the best is not kept there either")
    return Cure({"evaluation.keep_best": value.removeprefix("eval_")}) if isinstance(value, str) else None


def dtype_of(value: Any, _: Given) -> Cure | None:
    """bf16: true, torch_dtype: bfloat16, DeepSpeed's {enabled: true}."""
    if isinstance(value, Mapping):
        value = value.get("enabled")
    ours = {"true": "bf16", "bf16": "bf16", "fp32": "fp32", "auto": AUTO, **DTYPES}.get(str(value).lower())
    if ours == "bf16":
        return Cure({"parallel.dtype": ours}, ", or leave it out: auto takes bf16 where this CPU is fast at it")
    return Cure() if value is False or ours == AUTO else Cure({"parallel.dtype": ours}) if ours else None


def fp16_of(value: Any, given: Given) -> Cure | None:
    return Cure() if value is False else None


def chat_template(value: Any, _: Given) -> Cure | None:
    """A file; a name of one that another tool has is left out."""
    if isinstance(value, str) and value.endswith((".jinja", ".jinja2", ".j2", ".txt")):
        return Cure({"data.chat_template": value})
    return Cure(note=": the tokenizer's own is taken, and data.chat_template names a file with another")


def roles_learned(value: Any, _: Given) -> Cure | None:
    """Answers are learned; whoever wants more than these wants all."""
    roles = {str(role).lower() for role in (value if isinstance(value, list) else [value])}
    return Cure() if roles <= {"assistant", "gpt", "model"} else Cure({"data.learn": "all"})


def prompt_column(value: Any, given: Given) -> Cure | None:
    """One goes with the other."""
    names = "field_output response_column completion_column completion_field field_response response_field"
    return _pair(value, _text(given, f"{names} answer_column"))


def answer_column(value: Any, given: Given) -> Cure | None:
    return _pair(_text(given, "field_instruction prompt_field field_prompt prompt_column"), value)


def _pair(prompt: Any, answer: Any) -> Cure | None:
    if not isinstance(prompt, str) or not isinstance(answer, str):
        return None
    return Cure({"data.prompt_column": prompt, "data.answer_column": answer})


def _text(given: Given, names: str) -> str | None:
    return next((given[name] for name in names.split() if isinstance(given.get(name), str)), None)


def trackers(value: Any, _: Given) -> Cure | None:
    """`report_to: wandb`, or several; none, or all that are installed."""
    named = value if isinstance(value, list) else [value]
    if not named or named == ["none"] or value is False:
        return Cure()
    return Cure({"run.trackers": named}) if accepts("run.trackers", named) else None


def held_out(value: Any, _: Given) -> Cure | None:
    """val_set_size: a share, or a number of rows, which we do not have."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return Cure() if value == 0 else Cure({"data.evaluation_fraction": float(value)}) if value < 1 else None


def as_written(value: Any) -> str:
    """A value as a run file has it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list):
        return f"[{', '.join(map(as_written, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{name}: {as_written(one)}' for name, one in value.items())}}}"
    return str(value)


def _number(given: Given, *names: str) -> int | None:
    """The first whole number given under one of the names."""
    found = (given.get(name) for words in names for name in words.split())
    return next(
        (value for value in found if isinstance(value, int) and not isinstance(value, bool) and value > 0), None
    )

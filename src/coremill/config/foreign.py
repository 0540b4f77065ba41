"""Settings people bring along: other tools' names for ours, and what the design has but this release does not.

Names are rows of other_tools.toml (`foreign_keys`), values are here (`FOREIGN_VALUES`). Where a value can be translated
the message gives ours (translate.py); the same rows answer for options of the command line (foreign_options.py), for
files and commands of other tools (imports/) and for what `coremill launch` notes.
"""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from coremill.config import translate
from coremill.config import translate_adapters as adapters
from coremill.config import translate_datasets as datasets
from coremill.config import translate_starts as starts
from coremill.config.other_tools import table
from coremill.config.translate import DTYPES, Translate, by_words, same, switch, words

RENAMED = "the same setting has another name here"
_COMPILE = "nothing is compiled here; forms of the layers that suit CPUs are on by default (model.fused)"
_TASKS = "there are causal-lm, sequence-classification and question-answering"

LATER_KEYS = {
    "compile": _COMPILE,
    "parallel.deepspeed": "DeepSpeed itself is not run; engine: shard keeps 1/N of the model on each rank too",
}

_SHARD = "parallel.engine: shard, which keeps 1/N of the model on each rank too"
_OTHER_OPTIMIZERS = (
    "sgd lion lion_32bit lion_pytorch paged_lion_32bit muon rmsprop rmsprop_bnb adagrad lamb ademamix grokadamw sophia"
    " stable_adamw schedule_free_adamw schedule_free_radam schedule_free_sgd onebitadam zerooneadam",
    "this release has AdamW, in fp32 or with moments in 8 bits",
    "adamw",
)
_LEAN_OPTIMIZERS = (
    "adafactor galore galore_adamw galore_adamw_8bit galore_adafactor q_galore apollo apollo_adamw badam adam_mini came"
    " came_pytorch lion_8bit paged_lion_8bit ademamix_8bit paged_ademamix_8bit rmsprop_bnb_8bit adamw_torch_4bit"
    " adamw_4bit adamw4bit adam4bit ao_adamw_4bit ao_adamw_fp8",
    "it saves memory by other updates than AdamW's or by fewer bits; adamw-8bit saves it with those of AdamW",
    "adamw-8bit",
)
_OPTIMIZERS_INSIDE = (
    "lomo adalomo galore_adamw_layerwise galore_adamw_8bit_layerwise galore_adafactor_layerwise apollo_adamw_layerwise",
    "it moves each weight inside backward; adamw and adamw-8bit do so with train.update: inside",
    "adamw-8bit and train.update: inside",
)
LATER_VALUES = {
    **{("device", name): ("coremill computes on CPUs", "device: cpu")
       for name in ("cuda", "cuda:0", "gpu", "mps", "xpu", "tpu", "npu", "rocm")},
    **{("task", name): (_TASKS, "task: causal-lm")
       for name in ("token-classification", "ner", "masked-lm", "mlm", "seq2seq", "summarization", "translation",
                    "dpo", "kto", "orpo", "ppo", "rm", "reward", "rlhf", "grpo")},
    **{("task", name): ("it is causal-lm on conversations, which are known by their columns", "task: causal-lm")
       for name in ("sft", "chat", "instruct", "instruction", "instruction-tuning", "conversational")},
    ("parallel.engine", "deepspeed"): ("DeepSpeed itself is not run", _SHARD),
    **{("train.optimizer", name): (why, f"train.optimizer: {ours}")
       for names, why, ours in (_OTHER_OPTIMIZERS, _LEAN_OPTIMIZERS, _OPTIMIZERS_INSIDE) for name in names.split()},
    **{("parallel.dtype", name): ("fp16 is not offered: CPUs have bf16 units, and its range needs no loss scaling",
                                  "parallel.dtype: auto")
       for name in ("fp16", "float16", "half", "16", "16-mixed", "torch.float16")},
}  # fmt: skip

_ENGINES = words(
    "ddp multi_cpu multi_gpu data_parallel zero_0 no_shard -> replicate",
    "fsdp fsdp2 full_shard zero zero1 zero2 zero3 hybrid_shard -> shard",
)
_OPTIMIZERS = words(
    "adam adamw adamw_torch adamw_torch_fused adamw_hf adamw_fused fused_adam fusedadam cpuadam -> adamw",
    "deepspeedcpuadam -> adamw",
    "torch.optim.adamw adamw_torch_xla adamw_torch_npu_fused adamw_apex_fused adamw_anyprecision -> adamw",
    # Paged ones spill a GPU's memory into the CPU's.
    "paged_adamw paged_adamw_32bit adamw_32bit -> adamw",
    "adamw_8bit adamw8bit adam_8bit adam8bit adamw_bnb_8bit paged_adamw_8bit pagedadamw8bit adamw_torch_8bit"
    " ao_adamw_8bit 8bit 8-bit adam-8bit adamw-8-bit adamw_8_bit paged-adamw-8bit bnb.optim.adamw8bit"
    " bitsandbytes.optim.adamw8bit bitsandbytes.optim.pagedadamw8bit torchao.optim.adamw8bit -> adamw-8bit",
)
_SCHEDULES = words(
    "cosine_with_min_lr cosine_with_restarts cosine_annealing cosineannealinglr cosine_with_warmup -> cosine",
    "get_cosine_schedule_with_warmup warmupcosinelr -> cosine",
    "constant_with_warmup warmuplr -> constant",
    "polynomial linear_with_warmup warmupdecaylr -> linear",
    "wsd warmup_stable_decay cosine_warmup_stable_decay trapezoidal trapezoid -> warmup-stable-decay",
)
_LEARNED = words(
    "assistant completion completions train_on_assistant turn -> answers",
    "last last_answer last_turn train_on_last -> last-answer",
    "train_on_all everything -> all",
)
# key: {another tool's value: ours}
FOREIGN_VALUES: Mapping[str, Mapping[str, str]] = {
    "parallel.dtype": DTYPES,
    "parallel.wire_dtype": DTYPES,
    "parallel.engine": _ENGINES,
    "train.schedule": _SCHEDULES,
    "train.optimizer": _OPTIMIZERS,
    "train.activation_checkpointing": words("full -> true", "selective -> auto", "none -> false"),
    "model.attention": words("flash_attention_2 flash_attention_3 flash fa2 xformers flex_attention auto -> sdpa"),
    "model.weights": words("scratch none init from_scratch -> random"),
    "task": words(
        "causal_lm clm lm text-generation language-modeling pretrain pretraining pt full -> causal-lm",
        "question_answering qa extractive-qa extractive_qa squad -> question-answering",
        "classification text-classification sequence_classification text_classification seq_cls cls glue"
        " -> sequence-classification",
        "regression -> sequence-classification",
    ),
    "checkpoint.every": words("no off -> never", "epoch best -> 10m", "steps -> 100steps"),
    "data.on_bad_rows": words("ignore drop -> skip", "error fail raise -> stop"),
    "data.special_tokens": words("true -> auto", "false -> none"),
    "data.learn": _LEARNED,
}

# Inside an entry of data.sources.
FOREIGN_ITEM_KEYS = words(
    "path dataset dataset_name file files data_files name data_path -> source",
    "weight weights prob probability ratio proportion fraction sampling_weight -> share",
    "text_column text_field field -> column",
)


@dataclass(frozen=True)
class Foreign:
    """Settings of other tools that come down to the same of ours: a row of the table."""

    names: tuple[str, ...]
    tools: tuple[str, ...]
    why: str
    do: str
    targets: tuple[str, ...] = ()
    translate: Translate | None = None
    later: bool = False  # a feature that is not in this release, under whatever name
    retired: bool = False  # gone where it came from, too
    today: str | None = None  # the argument of a script that does the same today; empty: there is none
    in_launch: str | None = None  # what `coremill launch` says of it among a script's arguments
    whole: bool = False  # a mapping under it is one value


# The ways a row of the table may name to compute our value.
_TRANSLATIONS: Mapping[str, Translate] = {
    one.__name__: one
    for one in (
        *(adapters.adapter_kind, translate.answer_column, translate.chat_template, datasets.dataset_source),
        *(translate.deciding_metric, translate.dtype_of, translate.evaluation_interval, translate.fp16_of),
        *(translate.held_out, adapters.lora_targets, translate.minimum_rate, translate.prompt_column),
        *(translate.roles_learned, translate.save_interval, translate.scheduler_kwargs, datasets.shares),
        *(translate.steps_or_none, translate.tokens_per_step, translate.trackers, translate.warmup_ratio),
        *(datasets.evaluation_source, translate.clip_norm, translate.decay_share, translate.load_best),
        *(starts.ranks_of_all, starts.distributed_type, starts.sharding, starts.zero_stage),
        *(
            starts.betas,
            starts.glue_task,
            starts.column_list,
            starts.folder_of_name,
            starts.evaluated,
            starts.row_length,
            starts.resharding,
            starts.dataset_of_config,
        ),
    )
}


@functools.cache
def foreign_keys() -> Mapping[str, Foreign]:
    """Every foreign name, in lower case with underscores; some are dotted, some patterns."""
    rows = [_row(row) for row in table()["settings"]]
    return {name: foreign for foreign in rows for name in foreign.names}


@functools.cache
def find_foreign(path: tuple[str, ...]) -> Foreign | None:
    """The row for a setting by its path in another tool's file: the nearest name, else that of a section around it."""
    found = foreign_keys()
    for start in range(len(path)):
        name = ".".join(path[start:])
        if name in found:
            return found[name]
        for pattern in _patterns(last_resort=False):
            # A pattern without a dot is for single names: fsdp_* would hide the rows of what is in fsdp_config.
            if ("." in pattern or "." not in name) and fnmatch.fnmatchcase(name, pattern):
                return found[pattern]
    whole = ".".join(path)
    for pattern in _patterns(last_resort=True):
        if fnmatch.fnmatchcase(whole, pattern):
            return found[pattern]
    return next((found[each] for each in reversed(path[:-1]) if each in found), None)


@functools.cache
def _patterns(*, last_resort: bool) -> tuple[str, ...]:
    rows = [row for row in table()["settings"] if row.get("fallback", False) == last_resort]
    return tuple(name for row in rows for name in row["names"].split() if "*" in name)


def _row(row: Mapping[str, Any]) -> Foreign:
    targets = tuple(row.get("becomes", "").split())
    return Foreign(
        names=tuple(row["names"].split()),
        tools=tuple(row["of"].split()),
        why=row.get("why", RENAMED),
        do=row.get("do") or (f"set {targets[0]}" if targets else "remove it"),
        targets=targets,
        translate=_translation(row, targets),
        later=row.get("later", False),
        retired=row.get("retired", False),
        today=row.get("today"),
        in_launch=row.get("in_launch"),
        whole=row.get("whole", False),
    )


def _translation(row: Mapping[str, Any], targets: tuple[str, ...]) -> Translate | None:
    named = row.get("translate", "same" if targets and "unless" not in row else "none")
    if "unless" in row:
        return starts.unless(row["unless"], row.get("unless_why", ""), same(targets[0]) if targets else None)
    if named == "none":
        return None
    if named == "left_out":
        return lambda value, _: translate.Cure(note=row.get("note", ""))
    if named in _TRANSLATIONS:
        return _TRANSLATIONS[named]
    target = targets[0]
    if named == "switch":
        return switch(target, row["on"], row.get("off"), row.get("note", ""))
    return {
        "same": same(target),
        "words": by_words(target, FOREIGN_VALUES.get(target, {})),
        "schedule": by_words("train.schedule", _SCHEDULES),
        "with_rank": adapters.with_rank(target),
        "with_rank_list": adapters.with_rank(target, as_list=True),
    }[named]

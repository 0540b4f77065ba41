"""Which keys may change when a run goes on from its checkpoint, and what to do about the others: the one list of it.

A run is the same run with other machines, another end, another learning rate and another rhythm of saving and
evaluating; with another model, other data, or weights and optimizer state that mean something else, it is not. Every
key of the schema stands in one of the two tables (tests/contract/test_continuing.py): a new one has to be put in one.
"""

from __future__ import annotations

from collections.abc import Mapping

from coremill.config.kubernetes_section import KubernetesSection

# By section; TOP-level keys under "".
MAY_CHANGE: Mapping[str, tuple[str, ...]] = {
    "model": ("fused",),
    "train": (
        "steps",
        "epochs",
        "learning_rate",
        "minimum_learning_rate",
        "schedule",
        "warmup_steps",
        "warmup_share",
        "decay_share",
        "optimizer",  # moments are converted
        "update",
    ),
    "lora": ("merge",),
    "parallel": ("engine", "dtype", "wire_dtype", "keep_gathered", "ranks_per_node", "threads_per_rank"),
    "fleet": ("nodes", "min_nodes", "instance", "link_gbit_per_second"),
    "checkpoint": ("folder", "every", "keep", "grace", "spot_notices"),
    "supervise": (
        "restart",
        "fork_ranks",
        "restarts_without_progress",
        "stuck_after",
        "save_deadline",
        "wait_for_hosts",
    ),
    "numerics": ("on_non_finite", "skip_budget"),
    "evaluation": (
        "every_steps",
        "rows",
        "keep_best",
        "stop_after",
        "n_best",
        "max_answer_tokens",
        "null_threshold",
    ),
    "sample": ("prompt", "context", "tokens"),
    "kubernetes": tuple(KubernetesSection.model_fields),  # where it runs says nothing about what is learned
    "run": ("folder", "export", "trackers", "metrics_port", "metrics_host"),
}

FIXED: Mapping[str, tuple[str, ...]] = {
    "": ("tokenizer", "task", "device"),
    "model": (
        "name",
        "revision",
        "trust_remote_code",
        "code_sha256",
        "weights",
        "config",
        "attention",
        "labels",
        "dropout",
        "attention_dropout",
    ),
    "data": (
        "source",
        "sources",
        "column",
        "messages_column",
        "prompt_column",
        "answer_column",
        "chat_template",
        "learn",
        "text_columns",
        "label_column",
        "question_column",
        "context_column",
        "answers_column",
        "id_column",
        "doc_stride",
        "split",
        "evaluation_source",
        "evaluation_split",
        "evaluation_fraction",
        "sequence_length",
        "on_bad_rows",
        "special_tokens",
        "attention_across_documents",
    ),
    "train": (
        "weight_decay",
        "no_decay",
        "freeze",  # what was frozen has no optimizer state
        "adam_beta1",
        "adam_beta2",
        "adam_epsilon",
        "clip_norm",
        "tokens_per_step",
        "samples_per_step",
        "micro_batch_rows",
        "activation_checkpointing",
        "seed",
    ),
    "lora": ("rank", "alpha", "dropout", "target_modules", "modules_to_save", "start_from"),
}

# They say what the learning rate is at a step.
SCHEDULE_KEYS = frozenset(f"train.{name}" for name in MAY_CHANGE["train"] if name not in ("optimizer", "update"))
# Of them, those that a finished run goes on with.
KEYS_OF_THE_END = frozenset(("train.steps", "train.epochs"))


def may_change(key: str) -> bool:
    """Whether the setting of this dotted name may be another one at a continuation; what is inside of one, with it."""
    section, dot, inside = key.partition(".")
    name = inside.partition(".")[0] if dot else key
    return name in MAY_CHANGE.get(section if dot else "", ())


def words_of_what_may_change() -> str:
    """For a refusal: sections as a whole where nothing in them is fixed."""
    whole = [section for section in MAY_CHANGE if section not in FIXED]
    single = [f"{section}.{name}" for section in MAY_CHANGE if section in FIXED for name in MAY_CHANGE[section]]
    return ", ".join([*single, *whole])

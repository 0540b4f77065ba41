"""Settings people bring along: other tools' names for ours, and what the design has but this release does not."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

LATER_KEYS = {
    "lora": "training with adapters comes in a later release; this one trains all weights",
    "compile": "compilation comes in a later release; this one runs the model as it is",
    "kubernetes": "manifests come in a later release; this one runs where it is started, also in a pod",
    "parallel.deepspeed": "this engine comes in a later release; engine: shard keeps 1/N of the model on each rank too",
    "train.samples_per_step": "it belongs to question answering and classification, which come in a later release",
}

LATER_VALUES = {
    ("device", "cuda"): ("GPUs come in a later release; this one computes on CPUs", "device: cpu"),
    ("task", "question-answering"): ("this task comes in a later release", "task: causal-lm"),
    ("task", "sequence-classification"): ("this task comes in a later release", "task: causal-lm"),
    ("parallel.engine", "deepspeed"): (
        "this engine comes in a later release",
        "parallel.engine: shard, which keeps 1/N of the model on each rank too",
    ),
}


@dataclass(frozen=True)
class Foreign:
    """Settings of other tools that come down to the same of ours."""

    names: str
    why: str
    do: str
    targets: tuple[str, ...] = ()


def _renamed(names: str, *targets: str, do: str | None = None) -> Foreign:
    return Foreign(names, "the same setting has another name here", do or f"set {targets[0]}", targets)


_FOREIGN = (
    Foreign(
        "per_device_train_batch_size train_batch_size train_micro_batch_size_per_gpu batch_size"
        " gradient_accumulation_steps",
        "a step is counted in tokens over all ranks, so that it stays the same when the machines change",
        "set train.tokens_per_step = rows per device x devices x accumulation steps x data.sequence_length",
        ("train.tokens_per_step",),
    ),
    Foreign(
        "per_device_eval_batch_size eval_batch_size",
        "the plan picks the rows of a forward pass",
        "remove it; evaluation.rows says how many rows are evaluated",
    ),
    _renamed("num_train_epochs num_epochs max_epochs", "train.epochs", "train.steps"),
    _renamed("max_steps max_train_steps num_steps", "train.steps", "train.epochs"),
    Foreign(
        "bf16 fp16 mixed_precision torch_dtype precision",
        "auto measures this CPU: without bf16 units bf16 is many times slower than fp32; fp16 is not offered",
        "leave it out, or set parallel.dtype to auto, fp32 or bf16",
        ("parallel.dtype",),
    ),
    Foreign(
        "use_ipex ipex ipex_config",
        "IPEX is archived upstream; stock PyTorch uses AMX and AVX-512 through oneDNN by itself",
        "remove it",
    ),
    Foreign(
        "ddp_backend backend",
        "ranks talk over gloo; oneCCL's PyTorch bindings are archived, and stock PyTorch has no MPI backend",
        "remove it",
    ),
    Foreign(
        "max_length max_seq_length max_seq_len seq_length block_size",
        "text is packed into rows of one length, without padding",
        "set data.sequence_length",
        ("data.sequence_length",),
    ),
    Foreign(
        "num_processes nproc_per_node nproc world_size",
        "ranks are counted per machine",
        "set parallel.ranks_per_node (auto: one per NUMA node) and, for several machines, fleet.nodes",
        ("parallel.ranks_per_node", "fleet.nodes"),
    ),
    _renamed("num_machines nnodes num_nodes", "fleet.nodes"),
    _renamed(
        "num_cpu_threads_per_process omp_num_threads num_threads",
        "parallel.threads_per_rank",
        do="set parallel.threads_per_rank (auto: the rank's physical cores)",
    ),
    Foreign(
        "deepspeed deepspeed_config deepspeed_config_file zero_optimization zero_stage",
        "the deepspeed engine comes in a later release",
        "set parallel.engine: shard, which keeps 1/N of the model on each rank too",
        ("parallel.engine",),
    ),
    Foreign("fsdp fsdp_config", "FSDP2 is the engine shard here", "set parallel.engine: shard", ("parallel.engine",)),
    Foreign(
        "distributed_type",
        "the plan chooses how ranks share the work",
        "leave it out, or set parallel.engine to auto, replicate or shard",
        ("parallel.engine",),
    ),
    _renamed("model_name_or_path model_name model_id", "model.name", do="set model: ID_OR_FOLDER"),
    _renamed("tokenizer_name", "tokenizer"),
    Foreign(
        "dataset dataset_name dataset_config_name",
        "a dataset is written as one address",
        "set data.source: hf://[owner/]name[:config][@revision]",
        ("data.source",),
    ),
    Foreign("train_file", "files are named by a path or glob", "set data.source", ("data.source",)),
    Foreign(
        "validation_file eval_file",
        "files are named by a path or glob",
        "set data.evaluation_source",
        ("data.evaluation_source",),
    ),
    _renamed("text_column text_column_name", "data.column"),
    _renamed("lr", "train.learning_rate"),
    _renamed(
        "lr_scheduler_type lr_scheduler lr_schedule decay_type",
        "train.schedule",
        do="set train.schedule to linear, cosine, constant or warmup-stable-decay",
    ),
    _renamed("num_warmup_steps lr_warmup_steps", "train.warmup_steps"),
    _renamed("warmup_ratio warmup_frac warmup_fraction", "train.warmup_share"),
    _renamed("min_lr lr_min eta_min end_learning_rate minimum_lr", "train.minimum_learning_rate"),
    Foreign(
        "min_lr_rate min_lr_ratio min_lr_factor cosine_min_lr_ratio final_lr_frac",
        "the lowest rate is a rate here, not a share of the peak",
        "set train.minimum_learning_rate to this share times train.learning_rate",
        ("train.minimum_learning_rate",),
    ),
    _renamed(
        "warmdown_ratio decay_ratio",
        "train.decay_share",
        do="set train.schedule: warmup-stable-decay and train.decay_share",
    ),
    Foreign(
        "num_decay_steps num_stable_steps",
        "the decay is a share of the run, so that it stays at its end when the run gets longer",
        "set train.schedule: warmup-stable-decay and train.decay_share = decay steps / train.steps",
        ("train.decay_share", "train.schedule"),
    ),
    Foreign(
        "unfrozen_parameters freeze_trainable_layers freeze_layers frozen_layers freeze_parameters",
        "what is not trained is named, by patterns over parameter names; all else is trained",
        "set train.freeze, for instance ['model.embed_tokens.*', 'model.layers.[0-3].*']",
        ("train.freeze",),
    ),
    _renamed("max_grad_norm gradient_clipping", "train.clip_norm"),
    _renamed(
        "gradient_checkpointing",
        "train.activation_checkpointing",
        do="set train.activation_checkpointing to true, false or auto",
    ),
    _renamed("eval_steps", "evaluation.every_steps"),
    _renamed(
        "save_steps save_strategy save_interval",
        "checkpoint.every",
        do="set checkpoint.every to a time (10m) or to steps (100steps)",
    ),
    _renamed("save_total_limit", "checkpoint.keep"),
    Foreign(
        "resume_from_checkpoint",
        "the same command goes on from the newest whole checkpoint by itself",
        "remove it; --fresh starts anew",
    ),
    Foreign("output_dir", "a run leaves one folder", "set run.folder", ("run.folder",)),
    Foreign("use_cpu no_cuda", "coremill computes on CPUs by itself", "remove it"),
)


@functools.cache
def foreign_keys() -> Mapping[str, Foreign]:
    """Every foreign name, in lower case with underscores."""
    return {name: foreign for foreign in _FOREIGN for name in foreign.names.split()}

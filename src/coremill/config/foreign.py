"""Settings people bring along: other tools' names for ours, and what the design has but this release does not.

One table for keys (`_FOREIGN`), one for values (`FOREIGN_VALUES`). Where a value can be translated the message gives
ours (translate.py); the same entries answer for options of the command line (foreign_options.py).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

from coremill.config import translate
from coremill.config.translate import DTYPES, Translate, by_words, same, switch, words

_COMPILE = "compilation comes in a later release; this one runs the model as it is"
_LEARN = "data.learn says which tokens of a conversation the loss is on: answers (the default), last-answer or all"
_TEMPLATE = "conversations are written down by the tokenizer's own chat template, or by one in a file"
_DEEPSPEED = "the deepspeed engine comes in a later release"
_TASKS = "this task comes in a later release"
_QUANTISED = "weights are trained in fp32 (masters) and computed with in fp32 or bf16: nothing is quantised"

LATER_KEYS = {
    "compile": _COMPILE,
    "parallel.deepspeed": "this engine comes in a later release; engine: shard keeps 1/N of the model on each rank too",
}

_SHARD = "parallel.engine: shard, which keeps 1/N of the model on each rank too"
LATER_VALUES = {
    **{("device", name): ("GPUs come in a later release; this one computes on CPUs", "device: cpu")
       for name in ("cuda", "cuda:0", "gpu", "mps", "xpu", "tpu", "npu", "rocm")},
    **{("task", name): (_TASKS, "task: causal-lm")
       for name in ("token-classification", "ner", "masked-lm", "mlm", "seq2seq", "summarization", "translation",
                    "dpo", "kto", "orpo", "ppo", "rm", "reward", "rlhf", "grpo")},
    **{("task", name): ("it is causal-lm on conversations, which are known by their columns", "task: causal-lm")
       for name in ("sft", "chat", "instruct", "instruction", "instruction-tuning", "conversational")},
    ("parallel.engine", "deepspeed"): ("this engine comes in a later release", _SHARD),
    **{("train.optimizer", name): ("this release has AdamW alone, in fp32", "train.optimizer: adamw")
       for name in ("adamw-8bit", "adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit", "paged_adamw_32bit", "adafactor",
                    "sgd", "lion", "muon", "adam_mini", "rmsprop", "lamb", "galore_adamw")},
    **{("parallel.dtype", name): ("fp16 is not offered: CPUs have bf16 units, and its range needs no loss scaling",
                                  "parallel.dtype: auto")
       for name in ("fp16", "float16", "half", "16", "16-mixed", "torch.float16")},
}  # fmt: skip

_ENGINES = words(
    "ddp multi_cpu multi_gpu data_parallel zero_0 no_shard -> replicate",
    "fsdp fsdp2 full_shard zero zero1 zero2 zero3 hybrid_shard -> shard",
)
_OPTIMIZERS = words(
    "adam adamw_torch adamw_torch_fused adamw_hf adamw_fused fused_adam fusedadam cpuadam deepspeedcpuadam -> adamw",
    "torch.optim.adamw -> adamw",
)
_SCHEDULES = words(
    "cosine_with_min_lr cosine_with_restarts cosine_annealing cosineannealinglr cosine_with_warmup -> cosine",
    "get_cosine_schedule_with_warmup -> cosine",
    "constant_with_warmup -> constant",
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
    """Settings of other tools that come down to the same of ours."""

    names: str
    why: str
    do: str
    targets: tuple[str, ...] = ()
    translate: Translate | None = None
    later: bool = False  # a feature of a later release, under whatever name


def _renamed(names: str, *targets: str, do: str | None = None, translate: Translate | None = None) -> Foreign:
    why = "the same setting has another name here"
    return Foreign(names, why, do or f"set {targets[0]}", targets, translate or same(targets[0]))


def _later(
    names: str, why: str, do: str = "remove it", *, unless: tuple[object, ...] = (), unless_why: str = ""
) -> Foreign:
    """A feature to come; `unless` are values that only say it is off."""
    off = translate.Cure(why=unless_why)
    return Foreign(names, why, do, translate=lambda value, _: off if value in unless else None, later=True)


_FOREIGN = (
    # how much a step is
    Foreign(
        f"{translate.ROWS} {translate.ACCUMULATION} {translate.GLOBAL_ROWS}",
        "a step is counted in tokens over all ranks, so that it stays the same when the machines change",
        "set train.tokens_per_step = rows per device x devices x accumulation steps x data.sequence_length",
        ("train.tokens_per_step",),
        translate.tokens_per_step,
    ),
    Foreign(
        "per_device_eval_batch_size eval_batch_size batch_size_val",
        "the plan picks the rows of a forward pass",
        "remove it; evaluation.rows says how many rows are evaluated",
    ),
    Foreign(
        "auto_find_batch_size",
        "the plan picks the rows of a forward pass by the memory there is, before the run",
        "remove it; train.tokens_per_step says how much a step learns from",
    ),
    _renamed("num_train_epochs num_epochs max_epochs", "train.epochs", "train.steps"),
    _renamed("max_steps max_train_steps num_steps total_steps train_iters", "train.steps", "train.epochs",
             translate=translate.steps_or_none),
    Foreign("max_steps_per_epoch", "a run is as long as its steps or its epochs", "set train.steps, without epochs",
            ("train.steps", "train.epochs"), same("train.steps")),
    # the model
    _renamed("model_name_or_path model_name model_id base_model pretrained_model_name_or_path model_path"
             " base_model_name_or_path checkpoint_dir", "model.name", do="set model: ID_OR_FOLDER"),
    _renamed("model_revision", "model.revision"),
    _renamed("tokenizer_name tokenizer_name_or_path tokenizer_config tokenizer_path", "tokenizer"),
    Foreign("use_fast_tokenizer use_fast tokenizer_type tokenizer_use_fast",
            "the tokenizer is read from its files: tokenizer.json where there is one", "remove it"),
    _renamed("attn_implementation flash_attention flash_attn use_flash_attention use_flash_attention_2 sdp_attention"
             " xformers_attention", "model.attention", do="remove it: sdpa, PyTorch's fused attention, is the default",
             translate=lambda value, _: translate.Cure(note=": sdpa, PyTorch's fused attention, is the default")),
    Foreign("bf16 mixed_precision torch_dtype precision bfloat16 amp",
            "auto measures this CPU: without bf16 units bf16 is many times slower than fp32; fp16 is not offered",
            "leave it out, or set parallel.dtype to auto, fp32 or bf16", ("parallel.dtype",), translate.dtype_of),
    Foreign("fp16 fp16_full_eval",
            "CPUs have bf16 units and no fp16 ones worth the name: fp16 is not offered",
            "remove it, or set parallel.dtype to auto, fp32 or bf16", ("parallel.dtype",), translate.fp16_of),
    Foreign("tf32 use_ipex ipex ipex_config", "stock PyTorch uses AMX and AVX-512 through oneDNN by itself; IPEX is"
            " archived upstream", "remove it"),
    Foreign("load_in_4bit load_in_8bit quantization quantization_bit quantization_config bnb_4bit_compute_dtype gptq"
            " bnb_config_kwargs", _QUANTISED,
            "remove it; parallel.engine: shard holds 1/N of the weights on each rank"),
    Foreign("use_liger_kernel liger_kernel unsloth use_unsloth liger_rms_norm",
            "coremill has fused forms of its own for CPUs, on by default (model.fused)", "remove it"),
    Foreign("use_cache low_cpu_mem_usage device_map", "models are built empty and filled with each rank's part only",
            "remove it"),
    # adapters; compilation: later
    _renamed("lora_r lora_rank peft_lora_r", "lora.rank"),
    _renamed("lora_alpha", "lora.alpha", "lora.rank", translate=translate.with_rank("lora.alpha")),
    _renamed("lora_dropout", "lora.dropout", "lora.rank", translate=translate.with_rank("lora.dropout")),
    _renamed("lora_target lora_target_modules lora_attn_modules", "lora.target_modules", "lora.rank",
             translate=translate.lora_targets),
    _renamed("lora_modules_to_save additional_target", "lora.modules_to_save", "lora.rank",
             translate=translate.with_rank("lora.modules_to_save", as_list=True)),
    _renamed("adapter_name_or_path lora_model_dir", "lora.start_from", "lora.rank",
             translate=translate.with_rank("lora.start_from")),
    _renamed("merge_lora save_merged_lora", "lora.merge", "lora.rank", translate=translate.with_rank("lora.merge")),
    Foreign("adapter peft peft_config use_peft lora_config use_lora finetuning_type", "adapters have a section of their"
            " own", "set lora.rank: 16", ("lora.rank",), translate.adapter_kind),
    Foreign("lora_target_linear apply_lora_to_mlp", "left out, lora.target_modules means every linear map of the"
            " layers", "remove it", ("lora.target_modules",), lambda value, _: translate.Cure()),
    Foreign("qlora use_dora use_rslora loraplus_lr_ratio", "adapters are plain LoRA beside a base in fp32 or bf16:"
            " nothing is quantised, all adapters have one scale and one rate", "remove it; lora.rank: 16 has adapters"
            " trained", ("lora.rank",), lambda value, _: translate.Cure() if value is False else None),
    _later("torch_compile torch_compile_backend torch_compile_mode use_compile torchdynamo dynamo_backend dynamo_config"
           " jit_mode_eval", _COMPILE, unless=(False, "no"), unless_why="nothing is compiled here"),
    # conversations
    Foreign("template chat_template_path chat_template_jinja chat_template_name conversation_template prompt_template"
            " prompt_style", _TEMPLATE, "remove it; data.chat_template names a file with a Jinja template",
            ("data.chat_template",), translate.chat_template),
    Foreign("train_on_inputs train_on_input train_on_prompt", _LEARN, "set data.learn to all or answers",
            ("data.learn",), switch("data.learn", "all", "answers")),
    Foreign("assistant_only_loss completion_only_loss", _LEARN, "set data.learn to answers or all",
            ("data.learn",), switch("data.learn", "answers", "all")),
    Foreign("mask_history", _LEARN, "set data.learn to last-answer or answers", ("data.learn",),
            switch("data.learn", "last-answer", "answers")),
    Foreign("masking_strategy", _LEARN, "set data.learn to answers, last-answer or all", ("data.learn",),
            by_words("data.learn", _LEARNED)),
    Foreign("roles_to_train", _LEARN, "remove it, or set data.learn", ("data.learn",), translate.roles_learned),
    Foreign("train_on_eos train_on_eot eot_tokens", "the token that ends an answer is learned with it", "remove it"),
    _renamed("field_messages messages_field conversation_column conversations_column messages_key",
             "data.messages_column"),
    _renamed("field_instruction prompt_field field_prompt", "data.prompt_column", "data.answer_column",
             do="set data.prompt_column and data.answer_column", translate=translate.prompt_column),
    _renamed("field_output response_column completion_column completion_field field_response response_field",
             "data.answer_column", "data.prompt_column", do="set data.prompt_column and data.answer_column",
             translate=translate.answer_column),
    Foreign("formatting dataset_format conversation_style message_property_mappings role_map chat_format",
            "messages of role and content, ShareGPT's and Alpaca's are known by their columns",
            "remove it; data.messages_column names another column"),
    _later("stage rl", _TASKS, unless=("pt", "sft", "none", False),
           unless_why="text and conversations are trained on alike; which it is, is known by the data"),
    Foreign("deepspeed deepspeed_config deepspeed_config_file zero_optimization zero_stage", _DEEPSPEED,
            f"set {_SHARD}", ("parallel.engine",)),
    # data
    Foreign("dataset datasets dataset_name dataset_config_name dataset_config subset train_dataset dataset_path"
            " data_path", "a dataset is written as one address, a file as a path or glob",
            "set data.source: hf://[owner/]name[:config][@revision], or files: texts/*.jsonl", ("data.source",),
            translate.dataset_source),
    Foreign("train_file train_files data_files training_file dataset_dir", "files are named by a path or glob",
            "set data.source", ("data.source",), same("data.source")),
    Foreign("validation_file eval_file eval_files test_file eval_dataset eval_dataset_path test_datasets",
            "files are named by a path or glob", "set data.evaluation_source", ("data.evaluation_source",),
            same("data.evaluation_source")),
    Foreign("interleave_probs probabilities dataset_weights data_weights sampling_weights",
            "each source has its share beside it",
            "set data.sources to a list: {source: FIRST, share: 0.7} and {source: SECOND, share: 0.3}",
            ("data.sources", "data.source"), translate.shares),
    Foreign("mix_strategy stopping_strategy interleave_strategy", "sources are mixed by their shares; a small one is"
            " gone through again, and each is counted in the report",
            "remove it; data.sources takes a share for each source", ("data.sources",)),
    _renamed("val_set_size val_size validation_split_percentage test_size eval_split_ratio", "data.evaluation_fraction",
             do="set data.evaluation_fraction to a share: 0.05", translate=translate.held_out),
    _renamed("text_column text_column_name text_field dataset_text_field", "data.column"),
    _renamed("dataset_split train_split", "data.split"),
    _renamed("eval_split dataset_test_split", "data.evaluation_split"),
    Foreign(translate.LENGTH, "text is packed into rows of one length, without padding", "set data.sequence_length",
            ("data.sequence_length",), same("data.sequence_length")),
    Foreign("packing sample_packing pack_sequences packed eval_sample_packing neat_packing pad_to_sequence_len"
            " group_by_length padding padding_side pad_to_max_length pad_to_multiple_of",
            "text is always packed into whole rows, so there is no padding",
            "remove it; data.attention_across_documents: false keeps the documents of a row apart"),
    Foreign("max_samples max_train_samples num_samples", "a run is as long as its steps", "set train.steps to"
            " rows wanted x data.sequence_length / train.tokens_per_step", ("train.steps", "train.epochs")),
    _renamed("max_eval_samples", "evaluation.rows"),
    Foreign("dataloader_num_workers dataset_num_proc preprocessing_num_workers dataset_processes num_workers"
            " num_data_workers dataloader_pin_memory overwrite_cache dataset_prepared_path streaming prefetch_factor"
            " preprocessing_batch_size remove_unused_columns", "text is tokenised once, on all cores, into a cache"
            " (COREMILL_CACHE), from which ranks read without workers", "remove it"),
    Foreign("data_seed shuffle dataset_shuffle_seed shuffle_merged_datasets", "rows are shuffled, always the same way"
            " for a seed", "remove it; train.seed decides the order"),
    # optimisation
    _renamed("lr peak_lr max_lr base_lr", "train.learning_rate"),
    _renamed("lr_scheduler_type lr_scheduler scheduler lr_schedule", "train.schedule",
             do="set train.schedule to linear, cosine, constant or warmup-stable-decay",
             translate=translate.schedule_of(_SCHEDULES)),
    Foreign("lr_scheduler_kwargs lr_scheduler_args", "the schedules here have no arguments but the lowest rate",
            "remove it; train.minimum_learning_rate is the lowest rate", ("train.minimum_learning_rate",),
            translate.scheduler_kwargs),
    _renamed("warmup_ratio lr_warmup_fraction warmup_fraction warmup_frac", "train.warmup_share",
             translate=translate.warmup_ratio),
    _renamed("min_lr lr_min eta_min end_learning_rate minimum_lr", "train.minimum_learning_rate"),
    Foreign("min_lr_ratio min_lr_rate min_lr_factor cosine_min_lr_ratio final_lr_frac",
            "the lowest rate is a rate here, not a share of the peak",
            "set train.minimum_learning_rate to this share times train.learning_rate",
            ("train.minimum_learning_rate",), translate.minimum_rate),
    _renamed("warmdown_ratio decay_ratio", "train.decay_share",
             do="set train.schedule: warmup-stable-decay and train.decay_share", translate=translate.decay_share),
    Foreign("num_decay_steps num_stable_steps", "the decay is a share of the run, so that it"
            " stays at its end when the run gets longer",
            "set train.schedule: warmup-stable-decay and train.decay_share",
            ("train.decay_share", "train.schedule")),
    _renamed("num_warmup_steps lr_warmup_steps warmup_iters warmup", "train.warmup_steps"),
    _renamed("max_grad_norm gradient_clipping clip_grad_norm grad_clip gradient_clip_val max_norm", "train.clip_norm"),
    _renamed("optim optimizer_type optimizer_name", "train.optimizer", do="remove it: AdamW, in fp32, is what there is",
             translate=by_words("train.optimizer", _OPTIMIZERS)),
    _renamed("wd weight_decay_rate", "train.weight_decay"),
    _renamed("beta1 adam_beta_1", "train.adam_beta1"),
    _renamed("beta2 adam_beta_2", "train.adam_beta2"),
    _renamed("eps adam_eps adamw_epsilon", "train.adam_epsilon"),
    _renamed("gradient_checkpointing enable_activation_checkpointing activation_checkpoint use_gradient_checkpointing",
             "train.activation_checkpointing", do="set train.activation_checkpointing to true, false or auto",
             translate=switch("train.activation_checkpointing", True, False, ", or leave it out: auto turns it on where"
                              " memory is short")),
    Foreign("gradient_checkpointing_kwargs optim_args model_init_kwargs optimizer_params"
            " neftune_noise_alpha label_smoothing_factor label_smoothing", "there is nothing here to hand it to",
            "remove it; `coremill config schema` has all keys"),
    _renamed("random_seed manual_seed", "train.seed"),
    # ranks and machines
    Foreign("ddp_backend backend ccl_worker_count",
            "ranks talk over gloo; oneCCL's PyTorch bindings are archived, and stock PyTorch has no MPI backend",
            "remove it"),
    Foreign(translate.DEVICES, "ranks are counted per machine",
            "set parallel.ranks_per_node (auto: one per NUMA node) and, for several machines, fleet.nodes",
            ("parallel.ranks_per_node", "fleet.nodes"), same("parallel.ranks_per_node")),
    _renamed("num_machines nnodes num_nodes", "fleet.nodes"),
    _renamed("num_cpu_threads_per_process omp_num_threads num_threads", "parallel.threads_per_rank",
             do="set parallel.threads_per_rank (auto: the rank's physical cores)"),
    Foreign("fsdp fsdp_config fsdp_version fsdp_transformer_layer_cls_to_wrap", "FSDP2 is the engine shard here",
            "set parallel.engine: shard", ("parallel.engine",),
            lambda value, _: translate.Cure() if value in ("", False, None) else translate.Cure(
                {"parallel.engine": _ENGINES["fsdp"]})),
    Foreign("distributed_type parallel_mode strategy", "the plan chooses how ranks share the work",
            "leave it out, or set parallel.engine to auto, replicate or shard", ("parallel.engine",),
            by_words("parallel.engine", _ENGINES)),
    Foreign("tensor_parallel_degree tensor_parallel_size pipeline_parallel_degree context_parallel_degree tp_size"
            " data_parallel_shard_degree sequence_parallel_degree",
            "ranks share the rows of a step (replicate), and the weights too (shard)",
            "remove it; parallel.engine: shard makes a model fit that one rank cannot hold"),
    Foreign("compute_environment machine_rank main_training_function main_process_ip main_process_port rdzv_backend"
            " same_network downcast_bf16 tpu_use_cluster tpu_use_sudo tpu_env enable_cpu_affinity"
            " dispatch_batches split_batches ddp_find_unused_parameters ddp_timeout ddp_bucket_cap_mb local_rank",
            "coremill finds machines and ranks by itself, or takes what torchrun and mpirun say", "remove it; see"
            " `coremill train --help` for --hostfile"),
    Foreign("use_cpu no_cuda cpu force_cpu", "coremill computes on CPUs by itself", "remove it"),
    # what is saved, evaluated and told
    _renamed("eval_steps eval_interval evaluate_every", "evaluation.every_steps",
             translate=translate.evaluation_interval),
    Foreign("evals_per_epoch saves_per_epoch", "evaluations and checkpoints are counted in steps or by the clock",
            "set evaluation.every_steps, or checkpoint.every to a time (10m) or to steps (100steps)",
            ("evaluation.every_steps", "checkpoint.every")),
    Foreign("do_eval do_train do_predict eval_strategy evaluation_strategy eval_on_start eval_accumulation_steps",
            "a run trains, and evaluates at its end where there is something to evaluate on", "remove it;"
            " evaluation.every_steps says how often besides"),
    _renamed("save_steps save_strategy save_interval save_every checkpoint_interval",
             "checkpoint.every",
             do="set checkpoint.every to a time (10m) or to steps (100steps)", translate=translate.save_interval),
    _renamed("save_total_limit max_checkpoints keep_last_n keep_checkpoints", "checkpoint.keep"),
    Foreign("resume_from_checkpoint auto_resume_from_checkpoints resume ckpt_path overwrite_output_dir",
            "the same command goes on from the newest whole checkpoint by itself", "remove it; --fresh starts anew"),
    Foreign("save_only_model save_safetensors save_on_each_node", "checkpoints hold all that a"
            " continuation needs; the model alone is exported at the end, as safetensors", "remove it"),
    Foreign("output_dir logging_dir out_dir save_dir default_root_dir output_path", "a run leaves one folder",
            "set run.folder", ("run.folder",), same("run.folder")),
    Foreign("logging_steps logging_strategy logging_first_step log_every_n_steps log_interval steps_per_print log_level"
            " plot_loss include_tokens_per_second include_num_input_tokens_seen disable_tqdm wall_clock_breakdown"
            " log_peak_memory_stats metric_logger logging_nan_inf_filter",
            "every step is written to RUN/events, and drawn in RUN/report.html", "remove it"),
    _renamed("report_to use_wandb use_tensorboard wandb", "run.trackers",
             do="set run.trackers to some of [tensorboard, wandb, mlflow]", translate=translate.trackers),
    Foreign("wandb_project wandb_entity wandb_run_name wandb_name mlflow_tracking_uri use_swanlab trackio_project",
            "trackers read their own settings from the environment (WANDB_PROJECT, MLFLOW_TRACKING_URI)",
            "remove it; set run.trackers to some of [tensorboard, wandb, mlflow]"),
    _renamed("load_best_model_at_end", "evaluation.keep_best", translate=switch("evaluation.keep_best", True)),
    _renamed("metric_for_best_model", "evaluation.keep_best", translate=translate.deciding_metric),
    Foreign("greater_is_better", "a metric knows whether more of it is better", "remove it"),
    _renamed("early_stopping_patience early_stop_patience", "evaluation.stop_after"),
    Foreign("early_stopping_threshold min_delta", "any better value counts as better", "remove it"),
    Foreign("push_to_hub hub_model_id hub_token hub_strategy hub_private_repo",
            "the trained model is left in RUN/export",
            "remove it; afterwards run: coremill export RUN DEST --push OWNER/NAME"),
    Foreign("freeze_layers freeze_trainable_layers unfrozen_parameters frozen_layers freeze_parameters"
            " freeze_vision_tower freeze_embeddings trainable_parameters",
            "what is not trained is named, by patterns over parameter names; all else is trained",
            "set train.freeze, for instance ['model.embed_tokens.*', 'model.layers.[0-3].*']", ("train.freeze",)),
    Foreign("run_name experiment_name exp_name", "a run is called as its folder", "set run.folder: runs/NAME",
            ("run.folder",),
            lambda value, _: translate.Cure({"run.folder": f"runs/{value}"}) if isinstance(value, str) else None),
)  # fmt: skip


@functools.cache
def foreign_keys() -> Mapping[str, Foreign]:
    """Every foreign name, in lower case with underscores."""
    return {name: foreign for foreign in _FOREIGN for name in foreign.names.split()}

"""The run file: every section and key, its type, its default and what it is for.

Strict and frozen: an unknown key is an error, nothing is coerced behind the user's back, nothing changes after loading.
The descriptions below are the documentation: `coremill config schema` and the guide are made from them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field

from coremill.config.durations import DURATION_PATTERN, INTERVAL_PATTERN, LIMIT_PATTERN, WAIT_PATTERN
from coremill.config.kubernetes_section import KubernetesSection
from coremill.config.section import AUTO as AUTO
from coremill.config.section import AutoOrPositiveInt, NonNegativeInt, PositiveInt, Section
from coremill.registry import names

BUILT_IN: Final = "built-in"

NamePattern = Annotated[str, Field(min_length=1)]
PATTERNS_FORM: Final = "a list of name patterns, each a text (* any text, ? any character, [0-3] one of these)"
if TYPE_CHECKING:
    EngineName = str
    TaskName = str
else:
    EngineName = Literal["auto", *names("coremill.engines")]  # other packages may bring their own
    TaskName = Literal[names("coremill.tasks")]


class ModelSection(Section):
    """Which model to start from."""

    name: str = Field(
        BUILT_IN, min_length=1, description="hub id, folder, or built-in (a small Llama shape made on the spot)"
    )
    revision: str | None = Field(None, description="branch, tag or commit on the hub")
    trust_remote_code: bool = Field(
        False,
        description="true: run the code that comes with the model, pinned by a full commit as model.revision (hub)"
        " or by model.code_sha256 (folder)",
    )
    code_sha256: str | None = Field(
        None,
        pattern=r"^[0-9a-f]{64}$",
        json_schema_extra={"x-form": "64 hexadecimal digits"},
        description="the code to trust, for a folder: what LC_ALL=C sha256sum *.py piped into sha256sum prints in it",
    )
    weights: Literal["pretrained", "random"] = Field(
        "pretrained",
        description="random: start from scratch, the same for any number of ranks; only config.json is read",
    )
    config: dict[str, Any] | None = Field(
        None, description="a Hugging Face config (model_type, hidden_size, ...) to start from scratch without a folder"
    )
    attention: Literal["sdpa", "eager"] = Field("sdpa", description="attention implementation in transformers")
    fused: bool = Field(
        True,
        description="false: compute as transformers wrote it (whole logits, no fused norms and MLPs), slower and with"
        " more memory; to find out whether one of coremill's own forms is at fault",
    )


class SourceSection(Section):
    """One of several sources."""

    source: str = Field(min_length=1, description="in the form of data.source")
    share: Annotated[float, Field(gt=0, le=1)] | None = Field(
        None,
        description="part of the rows of a run; all sources have one, together 1, or none has: then their sizes decide",
    )
    column: str | None = Field(None, description="left out: data.column")
    split: str | None = Field(None, description="of an hf:// source; left out: data.split")


def _source_only(value: Any) -> Any:
    """`sources: [a.txt, b.csv]` is short for `sources: [{source: a.txt}, {source: b.csv}]`."""
    return {"source": value} if isinstance(value, str) else value


ListedSource = Annotated[SourceSection, BeforeValidator(_source_only, json_schema_input_type=str | SourceSection)]


class DataSection(Section):
    """Which text to train on, and how it becomes rows."""

    source: str = Field(
        BUILT_IN,
        min_length=1,
        description="hf://[owner/]name[:config][@revision], a path, glob or folder of .txt, .jsonl, .json, .csv, .tsv"
        " or .parquet files (also .gz, .zst), or built-in",
    )
    sources: Annotated[list[ListedSource], Field(min_length=1)] | None = Field(
        None, description="several sources instead of one, mixed by their shares: [{source: a.csv, share: 0.7}, ...]"
    )
    column: str = Field("text", description="the column (all files but txt, and hf) that holds the text")
    messages_column: str | None = Field(None, description="the column of conversations; left out: known by its name")
    prompt_column: str | None = Field(None, description="the column that holds prompts; goes with answer_column")
    answer_column: str | None = Field(None, description="the column that holds the answers to them")
    chat_template: str | None = Field(
        None, description="a file with a Jinja chat template, which the export gets too; left out: the tokenizer's own"
    )
    learn: Literal["answers", "last-answer", "all"] = Field(
        "answers", description="what the loss of a conversation is on: answers with their end tokens, the last one, all"
    )
    split: str = Field("train", description="the split of an hf:// source to train on")
    evaluation_source: str | None = Field(None, description="files to evaluate on, in the form of source")
    evaluation_split: str | None = Field(None, description="the split of an hf:// source to evaluate on")
    evaluation_fraction: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0,
        description="share of the text held out for evaluation where no evaluation source or split is named: whole"
        " documents, chosen by train.seed; where none come near the share, the tail of one",
    )
    sequence_length: PositiveInt = Field(512, description="tokens per row")
    on_bad_rows: Literal["stop", "skip"] = Field(
        "stop",
        description="stop: end with 78 at the first row that cannot be used (not UTF-8, broken JSON, no text);"
        " skip: leave such rows out, count and list them",
    )
    special_tokens: Literal["auto", "none"] = Field(
        AUTO,
        description="auto: around each document what its tokenizer puts around a text (Llama-3, Gemma, Mistral: BOS in"
        " front), once; none: no such tokens; the end token between documents is there either way",
    )
    attention_across_documents: bool = Field(
        True,
        description="false: a token attends only to its own document, at some cost in speed; refused (78) for families"
        " that do not keep documents apart (docs/families.md). Conversations are kept apart wherever the family can",
    )


class TrainSection(Section):
    """How long and how fast to learn."""

    steps: PositiveInt | None = Field(None, description="optimizer steps; give this or epochs")
    epochs: Annotated[float, Field(gt=0)] | None = Field(None, description="passes over the data; give this or steps")
    optimizer: Literal["adamw"] = Field("adamw", description="what moves the weights, in fp32")
    learning_rate: Annotated[float, Field(gt=0)] = Field(2.0e-5, description="peak learning rate")
    minimum_learning_rate: Annotated[float, Field(ge=0)] = Field(
        0.0, description="the rate that the decay ends at; the last step is just above it"
    )
    schedule: Literal["linear", "cosine", "constant", "warmup-stable-decay"] = Field(
        "linear",
        description="what comes after the warm-up: linear and cosine decay to the end of the run; constant stays;"
        " warmup-stable-decay (WSD) stays, then decays linearly over train.decay_share of the run",
    )
    warmup_steps: NonNegativeInt = Field(0, description="steps over which the learning rate rises from zero")
    warmup_share: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        None, description="the warm-up as a share of the run's steps (0.03), instead of warmup_steps"
    )
    decay_share: Annotated[float, Field(gt=0, le=1)] | None = Field(
        None,
        description="warmup-stable-decay: the last share of the run's steps, in which the rate falls; left out: 0.2",
    )
    weight_decay: Annotated[float, Field(ge=0)] = Field(
        0.0, description="AdamW weight decay; norms, biases and other vectors are left out"
    )
    no_decay: list[NamePattern] = Field(
        [],
        json_schema_extra={"x-form": PATTERNS_FORM},
        description="parameters that weight decay leaves out besides norms, biases and other vectors, by name:"
        " [model.embed_tokens.*]; a pattern that matches nothing is refused",
    )
    freeze: list[NamePattern] = Field(
        [],
        json_schema_extra={"x-form": PATTERNS_FORM},
        description="parameters that are not trained, by name: ['model.layers.[0-3].*', model.embed_tokens.weight];"
        " they have no gradient and no optimizer state; a pattern that matches nothing is refused",
    )
    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = Field(0.9, description="AdamW first moment decay")
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = Field(0.999, description="AdamW second moment decay")
    adam_epsilon: Annotated[float, Field(gt=0)] = Field(1e-8, description="AdamW epsilon")
    clip_norm: Annotated[float, Field(gt=0)] | None = Field(
        1.0, description="clip gradients to this global norm; null: do not"
    )
    tokens_per_step: PositiveInt = Field(
        16384,
        description="tokens per optimizer step over all ranks; the plan splits them into ranks, rows and accumulation",
    )
    micro_batch_rows: AutoOrPositiveInt = Field(AUTO, description="rows per forward pass on one rank")
    activation_checkpointing: Literal["auto"] | bool = Field(
        AUTO, description="recompute activations in backward: less memory, about a third more arithmetic"
    )
    seed: NonNegativeInt = Field(7, description="order of the data, random initialisation")


class LoraSection(Section):
    """Adapters: two narrow matrices beside each linear map are trained, the model itself stays as it is (LoRA)."""

    rank: PositiveInt | None = Field(
        None, description="width of the adapters, 8 to 64 as a rule; left out: no adapters, the weights are trained"
    )
    alpha: Annotated[float, Field(gt=0)] | None = Field(
        None, description="an adapter's output counts alpha/rank times; left out: twice the rank"
    )
    dropout: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0, description="share of what goes into adapters that is dropped in training"
    )
    target_modules: Annotated[list[NamePattern], Field(min_length=1)] | None = Field(
        None,
        json_schema_extra={"x-form": "a list of module names, each a text: [q_proj, v_proj]"},
        description="which linear maps get one: the end of their name (q_proj), all of it, or a pattern with *; left"
        " out: every linear map of the layers",
    )
    modules_to_save: list[NamePattern] = Field(
        [],
        json_schema_extra={"x-form": "a list of module names, each a text: [lm_head]"},
        description="modules that are trained whole beside the adapters and saved with them, named in the same way",
    )
    start_from: str | None = Field(
        None,
        min_length=1,
        description="an adapter folder (adapter_config.json) or hub id to begin with instead of a new adapter",
    )
    merge: bool = Field(
        False,
        description="true: export the whole model with the adapters added in, not the adapter folder; coremill export"
        " makes either of any kept step",
    )


class ParallelSection(Section):
    """How ranks share the work; auto lets the plan decide and say why."""

    engine: EngineName = Field(AUTO, description="replicate: whole model on each rank; shard: 1/N of it")
    dtype: Literal["auto", "fp32", "bf16"] = Field(AUTO, description="arithmetic of the model; auto measures this CPU")
    wire_dtype: Literal["auto", "fp32", "bf16"] = Field(
        AUTO,
        description="what travels between ranks; fp32: all exact, auto's choice on one machine; between machines auto"
        " sends gradients in 16 bits (square roots at fp32 arithmetic, bf16 at bf16) with fp32 sums and weights in the"
        " compute dtype; bf16: both",
    )
    keep_gathered: Literal["auto"] | bool = Field(
        AUTO, description="shard: keep gathered weights through backward and accumulation: fewer bytes, more memory"
    )
    ranks_per_node: AutoOrPositiveInt = Field(AUTO, description="processes per machine; auto: one per NUMA node")
    threads_per_rank: AutoOrPositiveInt = Field(AUTO, description="OpenMP threads per rank; auto: its physical cores")


class FleetSection(Section):
    """Which machines; left out: this one."""

    nodes: PositiveInt = Field(1, description="number of machines")
    min_nodes: PositiveInt | None = Field(
        None,
        description="train --hostfile: continue with this many machines where others stay away; left out: with all",
    )
    instance: str | None = Field(None, description="AWS instance type, for planning and pricing")
    link_gbit_per_second: Annotated[float, Field(gt=0)] | None = Field(
        None, description="network of a machine, for the plan; left out: as the instance has it, or as ranks measure it"
    )


class CheckpointSection(Section):
    """When and where the state of the run is saved; the same command goes on from the newest whole checkpoint."""

    folder: str | None = Field(
        None, description="left out: RUN/checkpoints; machines that do not see the same one keep a part each"
    )
    every: str = Field(
        "10m",
        pattern=INTERVAL_PATTERN,
        json_schema_extra={"x-form": "a time (30s, 10m, 1h), a number of steps (100steps) or never"},
        description="how often to save, besides after the last step; never: only when asked to stop",
    )
    keep: PositiveInt = Field(2, description="how many whole checkpoints to keep; older ones are removed")
    grace: str = Field(
        AUTO,
        pattern=LIMIT_PATTERN,
        json_schema_extra={"x-form": "auto or a time (30s, 2m, 1h)"},
        description="how long ranks may take to end the step under way and save when asked to stop; auto: the step's"
        " time and 2 minutes, more where the planned save needs it, and as long as bytes are written",
    )
    spot_notices: Literal["auto", "on", "off"] = Field(
        "auto", description="save and stop when EC2 announces that it takes this machine back; auto: on EC2 only"
    )


class SuperviseSection(Section):
    """What coremill's own launcher does about ranks that die or hang."""

    restart: bool = Field(
        True, description="after a rank died or hung, start all again from the newest whole checkpoint; false: end"
    )
    fork_ranks: bool = Field(
        True,
        description="fork ranks from a process that has imported all they need: a restart takes a second;"
        " false: start each as a program of its own",
    )
    restarts_without_progress: PositiveInt = Field(
        3, description="after this many restarts in a row without a new committed step the run ends: a crash loop"
    )
    stuck_after: str = Field(
        AUTO,
        pattern=WAIT_PATTERN,
        json_schema_extra={"x-form": "auto, never or a time (30s, 10m, 1h)"},
        description="a rank that gets no further within a step for this long is ended; auto: 10 s or five median steps,"
        " whichever is longer; never: nobody watches",
    )
    save_deadline: str = Field(
        AUTO,
        pattern=LIMIT_PATTERN,
        json_schema_extra={"x-form": "auto or a time (30s, 2m, 1h)"},
        description="a save that takes longer hangs in the storage: it is given up, and training goes on without it;"
        " auto: one of which no byte is written for 10 minutes",
    )
    wait_for_hosts: str = Field(
        "10m",
        pattern=DURATION_PATTERN,
        json_schema_extra={"x-form": "a time (30s, 2m, 1h)"},
        description="on several machines: how long to wait for one that went away",
    )


class NumericsSection(Section):
    """What to do when the loss or a gradient is not a number; the weights are never touched by such a step."""

    on_non_finite: Literal["stop", "skip"] = Field(
        "stop", description="stop: end with 70 and name step, rank and rows; skip: leave the step out and go on"
    )
    skip_budget: NonNegativeInt = Field(
        10,
        description="skip: at most this many steps of the whole run, continuations included; one more ends it with 70",
    )


class EvaluationSection(Section):
    """When to evaluate, and on how much."""

    every_steps: PositiveInt | None = Field(
        None, description="how many steps between evaluations; left out: only at the end"
    )
    rows: PositiveInt = Field(64, description="how many rows to evaluate on, at most")
    keep_best: bool | Annotated[str, Field(min_length=1)] = Field(
        False,
        json_schema_extra={"x-form": "the name of a metric"},
        description="true: the best evaluated step, by the main metric of the task (causal-lm: perplexity), is kept"
        " beside the newest checkpoint.keep and exported instead of the last; or the name of the metric that decides"
        " (loss is always one). Each evaluation that is better than all before costs a save, whatever checkpoint.every"
        " says",
    )
    stop_after: PositiveInt | None = Field(
        None,
        description="end the run, as finished, after this many evaluations in a row without a better one, continuations"
        " included; the metric is that of keep_best; left out: train to the last step",
    )


class SampleSection(Section):
    """A completion to show at the end of the run."""

    prompt: str | None = Field(None, description="left out: no sample")
    tokens: PositiveInt = Field(48, description="how many tokens to add")


class RunSection(Section):
    """Where the run leaves its folder, and who else follows it."""

    folder: str | None = Field(None, description="left out: runs/<name of the config file>")
    export: bool = Field(True, description="leave a Hugging Face folder in RUN/export")
    trackers: list[Literal["tensorboard", "wandb", "mlflow"]] = Field(
        [],
        description="who else gets the numbers while it runs; each is an extra of pip: coremill[wandb]",
        json_schema_extra={"x-form": "a list of tensorboard, wandb and mlflow, in brackets"},
    )


def _name_only(value: Any) -> Any:
    """`model: some/id` is short for `model: {name: some/id}`."""
    return {"name": value} if isinstance(value, str) else value


class RunConfig(Section):
    """A whole run file."""

    model: Annotated[ModelSection, BeforeValidator(_name_only, json_schema_input_type=str | ModelSection)] = Field(
        default_factory=lambda: ModelSection(), description="a hub id or folder, or a section"
    )
    tokenizer: str | None = Field(None, description="hub id or folder, or built-in; left out: the model's own")
    task: TaskName = Field(names("coremill.tasks")[0], description="what is learned")
    data: DataSection = Field(default_factory=lambda: DataSection())
    train: TrainSection = Field(default_factory=lambda: TrainSection())
    lora: LoraSection = Field(default_factory=lambda: LoraSection())
    parallel: ParallelSection = Field(default_factory=lambda: ParallelSection())
    device: Literal["cpu"] = Field("cpu", description="where to compute")
    fleet: FleetSection = Field(default_factory=lambda: FleetSection())
    checkpoint: CheckpointSection = Field(default_factory=lambda: CheckpointSection())
    supervise: SuperviseSection = Field(default_factory=lambda: SuperviseSection())
    numerics: NumericsSection = Field(default_factory=lambda: NumericsSection())
    evaluation: EvaluationSection = Field(default_factory=lambda: EvaluationSection())
    sample: SampleSection = Field(default_factory=lambda: SampleSection())
    kubernetes: KubernetesSection = Field(default_factory=lambda: KubernetesSection())
    run: RunSection = Field(default_factory=lambda: RunSection())

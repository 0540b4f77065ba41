"""The run file: every section and key, its type, its default and what it is for.

Strict and frozen: an unknown key is an error, nothing is coerced behind the user's back, nothing changes after loading.
The descriptions below are the documentation: `coremill config schema` and the guide are made from them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from coremill.config.data_section import DataSection as DataSection
from coremill.config.durations import DURATION_PATTERN, INTERVAL_PATTERN, LIMIT_PATTERN, WAIT_PATTERN
from coremill.config.kubernetes_section import KubernetesSection
from coremill.config.section import AUTO as AUTO
from coremill.config.section import BUILT_IN as BUILT_IN
from coremill.config.section import AutoOrPositiveInt, NonNegativeInt, PositiveInt, Section
from coremill.config.train_section import LoraSection as LoraSection
from coremill.config.train_section import TrainSection as TrainSection
from coremill.registry import names

if TYPE_CHECKING:
    EngineName = str
    TaskName = str
else:
    EngineName = Literal["auto", *names("coremill.engines")]  # other packages may bring their own
    TaskName = Literal[names("coremill.tasks")]


LabelName = Annotated[str, Field(min_length=1)]


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
    labels: (
        Literal["regression"] | Annotated[int, Field(ge=2)] | Annotated[list[LabelName], Field(min_length=2)] | None
    ) = Field(
        None,
        json_schema_extra={"x-form": "a list of class names, each a text: [negative, positive]"},
        description="of sequence-classification: class names in their order, how many classes there are, or"
        " regression (labels are numbers to come close to); left out: as the model's head or the data has them",
    )
    dropout: Annotated[float, Field(ge=0, lt=1)] | None = Field(
        None, description="of hidden states and heads, in place of what the model's config has; left out: as it has it"
    )
    attention_dropout: Annotated[float, Field(ge=0, lt=1)] | None = Field(
        None, description="of attention, likewise; 0 lets attention take its fast path, in less memory"
    )
    fused: bool = Field(
        True,
        description="false: compute as transformers wrote it (whole logits, no fused norms and MLPs), slower and with"
        " more memory; to find out whether one of coremill's own forms is at fault",
    )

    @property
    def label_count(self) -> int | None:
        """How many numbers the head of a classifier gives, where the run file says so."""
        if self.labels == "regression":
            return 1
        return len(self.labels) if isinstance(self.labels, list) else self.labels


class ParallelSection(Section):
    """How ranks share the work; auto lets the plan decide and say why."""

    engine: EngineName = Field(
        AUTO,
        description="replicate: whole model on each rank, on a single host one copy of the weights and 1/N of masters,"
        " gradients and moments each; shard: 1/N of it",
    )
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
    ranks_per_node: AutoOrPositiveInt = Field(AUTO, description="processes per machine; auto: as the plan says")
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
    """What to do when the loss or a gradient is not a number; the weights are never touched by such a step (a gradient
    under `train.update: inside` excepted)."""

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
    rows: PositiveInt | None = Field(
        None,
        description="how many rows to evaluate on, at most, of question-answering those of whole questions; left out:"
        " 64 of causal-lm, all of the other tasks",
    )
    keep_best: bool | Annotated[str, Field(min_length=1)] = Field(
        False,
        json_schema_extra={"x-form": "the name of a metric"},
        description="true: the best evaluated step, by the main metric of the task (causal-lm: perplexity;"
        " question-answering: f1; sequence-classification: accuracy, of regression pearson), is kept beside the newest"
        " checkpoint.keep and exported instead of the last; or the name of the metric that decides (loss is always"
        " one). Each evaluation that is better than all before costs a save, whatever checkpoint.every says",
    )
    stop_after: PositiveInt | None = Field(
        None,
        description="end the run, as finished, after this many evaluations in a row without a better one, continuations"
        " included; the metric is that of keep_best; left out: train to the last step",
    )
    n_best: PositiveInt = Field(
        20, description="question-answering: how many of the best starts and ends of an answer are looked at"
    )
    max_answer_tokens: PositiveInt = Field(30, description="question-answering: the longest answer that is given")
    null_threshold: float = Field(
        0.0,
        description="question-answering with questions that have no answer: none is given where its score is above the"
        " best answer's by more than this",
    )


class SampleSection(Section):
    """Something to show of the trained model at the end of the run."""

    prompt: str | None = Field(
        None,
        description="a text to continue (causal-lm), to classify, or a question to answer; left out: no sample",
    )
    context: str | None = Field(
        None, min_length=1, description="where the answer to the question is; of pairs of texts the second one"
    )
    tokens: PositiveInt = Field(48, description="how many tokens to add (causal-lm)")


class RunSection(Section):
    """Where the run leaves its folder, and who else follows it."""

    folder: str | None = Field(None, description="left out: runs/<name of the config file>")
    export: bool = Field(True, description="leave a Hugging Face folder in RUN/export")
    trackers: list[Literal["tensorboard", "wandb", "mlflow"]] = Field(
        [],
        description="who else gets the numbers while it runs; each is an extra of pip: coremill[wandb]",
        json_schema_extra={"x-form": "a list of tensorboard, wandb and mlflow, in brackets"},
    )
    metrics_port: Annotated[int, Field(ge=0, le=65535)] | None = Field(
        None,
        json_schema_extra={"x-form": "a port (9400)"},
        description="each node serves the run's numbers to Prometheus at this port, under /metrics (the extra metrics);"
        " 0: a free one, which is printed; left out: nobody listens",
    )
    metrics_host: str = Field(
        "127.0.0.1",
        pattern=r"^[0-9a-fA-F.:]+$",
        json_schema_extra={"x-form": "the address of an interface of this machine (127.0.0.1, 0.0.0.0, ::)"},
        description="interface to serve them at, by its address; 0.0.0.0: every one, :: of IPv6 too; who reaches the"
        " port can read them. coremill k8s render opens the pod's",
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

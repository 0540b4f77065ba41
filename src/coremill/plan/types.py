"""What a plan is: choices with their reasons, and the numbers they lead to."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, Generic, Literal, TypeVar

from coremill.plan.traffic import GradientForm, gradient_form, sent_bytes

T = TypeVar("T")
_SOMETIMES = ("pod", "price_words", "row_lengths", "samples_per_second")  # only in plans that have them


@dataclass(frozen=True)
class Choice(Generic[T]):
    """A value that was decided, and why, in words for the user."""

    value: T
    reason: str


@dataclass(frozen=True, kw_only=True)
class StepCounts:
    """What a plan asks a task: how much there is to compute in a step."""

    rows: int  # of all ranks
    row_tokens: int  # of each, or of the longest
    vocabulary_logits: bool  # whether the loss is made of a number for each word of the vocabulary at each token
    rows_differ: bool = False  # in length: rows are samples, and those computed at once are padded to their longest


@dataclass(frozen=True, kw_only=True)
class RowLengths:
    """Of rows that differ, in tokens without padding."""

    mean: float
    longest: int


@dataclass(frozen=True, kw_only=True)
class RowCount:
    """How many rows there are to train on, as far as a plan may know without preparing them."""

    rows: int | None  # of an epoch; None: not known
    row_tokens: int  # of each, or at most
    is_estimate: bool
    words: str  # where the number comes from, or why there is none
    lengths: RowLengths | None = None  # where they differ; None: they do not, or it is not known

    def of_length(self, row_tokens: int) -> int | None:
        """The rows of the same text, cut to another length; samples stay as many as they are."""
        if self.rows is None or self.lengths is not None:
            return self.rows
        return max(1, self.rows * self.row_tokens // row_tokens)


@dataclass(frozen=True, kw_only=True)
class Arrangement:
    """How a run is laid out over ranks: all that memory, traffic and time depend on besides model and machines."""

    engine: str
    optimizer: str
    update: Literal["after", "inside"] = "after"  # backward, or inside of it
    dtype: Literal["fp32", "bf16"]
    wire_dtype: Literal["auto", "fp32", "bf16"]
    nodes: int
    ranks_per_node: int
    threads_per_rank: int
    sequence_length: int
    micro_batch_rows: int
    accumulation_steps: int
    activation_checkpointing: bool
    keep_gathered: bool
    attention: Literal["sdpa", "eager"]
    documents_apart: bool = False  # attention does not reach from one document of a row into another
    vocabulary_logits: bool = True  # the task's loss needs them
    rows_differ: bool = False  # in length: sequence_length is the longest, and a mask says where each ends
    mean_row_tokens: float | None = None  # where they differ; None: not known
    through_memory: bool = True  # between ranks of one host, where the engine can

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def way(self) -> tuple[str, str]:
        """What moves the weights, and when."""
        return self.optimizer, self.update

    @property
    def compute_bytes(self) -> int:
        """Bytes of one number in the model's arithmetic."""
        return 2 if self.dtype == "bf16" else 4

    @property
    def gather_bytes(self) -> int:
        """Bytes of one weight on the wire."""
        return 2 if self.wire_dtype == "bf16" else self.compute_bytes

    @property
    def gradient_form(self) -> GradientForm:
        return gradient_form(self.wire_dtype, self.dtype)

    def sent_bytes(self, gradients: int) -> int:
        return sent_bytes(self.gradient_form, gradients)

    @property
    def tokens_per_forward(self) -> int:
        """Tokens one rank computes at once, at most."""
        return self.micro_batch_rows * self.sequence_length

    @property
    def row_tokens(self) -> float:
        """Of a row in the mean, without padding, as far as it is known."""
        return self.mean_row_tokens or self.sequence_length

    @property
    def is_padded(self) -> bool:
        """Whether attention is told by a mask where rows end; a row by itself has no padding."""
        return self.rows_differ and self.micro_batch_rows > 1


@dataclass(frozen=True, kw_only=True)
class MemoryPart:
    """Bytes of one rank in one phase, part by part."""

    parameters: int  # in the dtype they are kept in, copies in the compute dtype included
    gradients: int
    optimizer: int  # its state
    activations: int
    logits: int  # the chunk of logits the loss holds
    buffers: int  # gathered weights, reduction buckets
    data: int
    base: int  # interpreter and libraries
    slack: int  # what the allocator keeps

    @property
    def total(self) -> int:
        return sum(getattr(self, part.name) for part in fields(self))  # asked for often: no copies


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Bytes per rank by phase, against the limit."""

    load: MemoryPart
    first_step: MemoryPart
    steady_step: MemoryPart
    checkpoint: MemoryPart  # writing the model out
    limit: int  # per rank

    @property
    def phases(self) -> dict[str, MemoryPart]:
        """In the order they happen."""
        return {name: getattr(self, name) for name in ("load", "first_step", "steady_step", "checkpoint")}

    @property
    def peak(self) -> MemoryPart:
        """The phase that needs most."""
        return max(self.phases.values(), key=lambda part: part.total)


@dataclass(frozen=True, kw_only=True)
class StepSeconds:
    """Where the time of one optimizer step goes."""

    compute: float
    communication: float  # all of it, hidden or not
    exposed_communication: float  # what compute does not hide
    optimizer: float

    @property
    def total(self) -> float:
        """Wall time of a step."""
        return self.compute + self.exposed_communication + self.optimizer


@dataclass(frozen=True, kw_only=True)
class SavePlan:
    """One checkpoint: its size, its time, and the time it gets (plan/saving.py)."""

    bytes: int  # of all ranks
    bytes_per_second: float  # assumed
    seconds: float
    grace_seconds: Choice[float]  # from the request to stop
    deadline_seconds: Choice[float]
    warnings: tuple[str, ...]  # what does not go together, in words


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """A change that makes the run fit, already evaluated."""

    change: str  # in words, with the key to set
    settings: tuple[str, ...]  # for --set
    total_bytes_per_rank: int
    tokens_per_second: float
    usd: float | None


@dataclass(frozen=True, kw_only=True)
class FullTraining:
    """What the same run would take with all weights trained in place of adapters, already evaluated."""

    parameters: int
    engine: str
    fits: bool
    total_bytes_per_rank: int
    tokens_per_second: float


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything decided before the first rank starts; a pure function of config, fleet and card."""

    fleet: str
    nodes: int
    engine: Choice[str]
    dtype: Choice[Literal["fp32", "bf16"]]
    wire_dtype: Choice[Literal["auto", "fp32", "bf16"]]
    ranks_per_node: Choice[int]
    threads_per_rank: Choice[int]
    cpus_of_rank: tuple[tuple[int, ...], ...]  # by local rank: the hardware threads its threads are bound to
    sequence_length: int
    row_lengths: RowLengths | None = None  # where rows differ, as far as they are known
    rows_per_step: int  # global
    micro_batch_rows: Choice[int]
    accumulation_steps: Choice[int]
    activation_checkpointing: Choice[bool]
    keep_gathered: Choice[bool]  # weights stay gathered through backward and accumulation
    optimizer: Choice[str] = Choice("adamw", "")
    update: Choice[Literal["after", "inside"]] = Choice("after", "")
    kept_activations: Choice[Literal["counted", "estimated"]] = Choice("counted", "")
    attention: Choice[Literal["sdpa", "eager"]] = Choice("sdpa", "")
    logits: Choice[Literal["chunked", "whole", "none"]] = Choice("chunked", "")
    memory: MemoryPlan
    bytes_per_rank_over_the_wire: int | None = None  # of ranks that are to share one copy of the model, if they cannot
    wire_bytes_per_step_per_rank: int
    shared_bytes_per_step_per_rank: int = 0  # read from ranks of the same host, through memory they share
    step_seconds: StepSeconds
    save: SavePlan | None = None  # None: from a plan.json of 0.1.0
    tokens_per_second: float  # without padding
    samples_per_second: float | None = None  # where rows are samples
    steps: int | None  # of the whole run; None until epochs are known in rows
    steps_estimated: bool = False  # from a sample of the text, not counted
    steps_words: str = ""  # where they come from, where they were not set
    steps_done: int = 0  # by an earlier attempt, which this one continues: hours and dollars are of what is left
    usd_per_hour: float | None
    price_words: str | None = None  # which price it is, where that is not plain
    pod: Choice[str] | None = None  # what a pod has, where the run is in pods
    fits: bool
    shortfall_bytes: int  # 0 where it fits
    remedies: tuple[Remedy, ...]
    assumptions: tuple[str, ...]  # numbers that were declared, not measured
    model_flops_per_token: float
    matmul_flops_per_second: float  # of all machines together, in the chosen dtype
    full_training: FullTraining | None = None  # of a run with adapters

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node.value

    def hours(self) -> float | None:
        """Of the steps that are left to do."""
        if self.steps is None:
            return None
        return max(0, self.steps - self.steps_done) * self.step_seconds.total / 3600

    def usd(self) -> float | None:
        hours = self.hours()
        return None if hours is None or self.usd_per_hour is None else hours * self.usd_per_hour

    def to_json(self) -> dict[str, Any]:
        """The keys of `coremill plan --json` and of plan.json."""
        peak = self.memory.peak
        document = asdict(self)
        document["memory_by_phase"] = {
            phase: {**asdict(part), "total": part.total} for phase, part in self.memory.phases.items()
        }
        del document["memory"]
        if self.full_training is None:
            del document["full_training"]
        for name in ("optimizer", "update"):
            if not document[name]["reason"]:  # as it is left out
                del document[name]
        document["memory_bytes_per_rank"] = {**asdict(peak), "total": peak.total, "limit": self.memory.limit}
        document["step_seconds"] = {**asdict(self.step_seconds), "total": self.step_seconds.total}
        document["world_size"] = self.world_size
        document["hours"] = self.hours()
        document["usd"] = self.usd()
        return {name: value for name, value in document.items() if name not in _SOMETIMES or value is not None}

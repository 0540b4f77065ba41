"""What a run needs to know of its task, and the only place where a task is chosen: `make_task`.

A task has two halves. `Task` imports no torch: launcher, planner and fork server ask it how examples become rows, which
model class it trains, what a step counts in. `TrainingTask` is what a rank trains with: batches, loss, metrics. A task
is a class found by its name (registry.py), made from the run file:

    task = make_task(config)
    rows = task.make_rows(...)          once per host, before a rank starts; they travel to ranks as JSON
    training = task.training()          in a rank: imports torch
    training.prepare(model, fused=...)  before an engine places the model
    loader = training.make_loader(rows, ...)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, Self, TypeAlias, TypeVar

from coremill.config.schema import RunConfig
from coremill.errors import InputError
from coremill.plan.types import Choice, RowCount, StepCounts
from coremill.registry import find

if TYPE_CHECKING:  # planning asks a task, and waits for no numpy
    import numpy as np
    import numpy.typing as npt
    import torch
    from torch import nn

    from coremill.data.loader import AnyBatch, EvaluationBatches, Loader
    from coremill.data.packed import Progress

BatchT = TypeVar("BatchT", bound="AnyBatch")
RowOutput: TypeAlias = "npt.NDArray[np.float32]"  # of one row of an evaluation: one line of numbers


class Rows(Protocol):
    """Examples made ready, in files that ranks read."""

    @property
    def key(self) -> str:
        """Their name: another one where anything they were made of differs. A continuation compares it."""

    @property
    def train_rows(self) -> int:
        """How many there are to train on."""

    @property
    def evaluation_rows(self) -> int:
        """How many there are to evaluate on; 0: nothing is evaluated."""

    @property
    def bad_rows_words(self) -> str:
        """What was left out and why; empty: nothing."""

    @property
    def evaluation_words(self) -> str:
        """What was held out for evaluation; empty where that needs no words."""

    def counts(self) -> dict[str, Any]:
        """The fields of the event `data`."""

    def files(self) -> list[Path]:
        """What hosts must have alike."""

    def in_words(self) -> str:
        """How much there is."""

    def explain_change(self, config: RunConfig, earlier: Mapping[str, Any], *, what: str, anew: str) -> InputError:
        """Why a run whose config was `earlier` finds other rows than it began with."""

    def to_json(self) -> dict[str, Any]:
        """For handing to a rank; `Task.rows_from_json` is the inverse."""


RowsT = TypeVar("RowsT", bound=Rows)
RowsT_contra = TypeVar("RowsT_contra", bound=Rows, contravariant=True)


@dataclass(frozen=True)
class Metric:
    """One number of an evaluation, and which way is up."""

    name: str
    better: Literal["lower", "higher"]


LOSS = Metric("loss", "lower")  # every task has it


@dataclass(frozen=True)
class Scored:
    """What an evaluation came to."""

    metrics: Mapping[str, float]  # by name, without the loss
    files: Mapping[str, str] = field(default_factory=dict)  # to leave in the run folder, with their text


@dataclass(frozen=True)
class SmallerStep:
    """A step that takes every row once, where the run file asks for more rows than there are."""

    config: RunConfig  # that asks for it
    words: str


@dataclass(frozen=True)
class ShownRow:
    """A row as the model sees it, for `coremill data show`; one entry per token."""

    row: int  # its number
    ids: tuple[int, ...]
    learned: tuple[bool, ...]  # whether the model is trained to say this token
    document_starts: tuple[int, ...] = ()  # where in the row later documents begin
    source: str = ""  # where the run has several
    words: str = ""  # what else there is to say of it
    summary: str = ""  # said in place of how many tokens are learned and how many documents it has: a label


class Task(Protocol[RowsT]):
    """The half without torch."""

    model_class: ClassVar[str]  # the auto class of transformers that makes its models
    metrics: ClassVar[tuple[Metric, ...]]  # of an evaluation, beside the loss; the first is the main one
    evaluated_rows: ClassVar[int | None] = 64  # at most, where the run file does not say; None: all there are
    training_modules: ClassVar[tuple[str, ...]]  # what `training` imports: ranks are forked with these in memory

    def on_model(self, config: Mapping[str, Any], *, pretrained: bool) -> Self:
        """The same task, knowing the config.json of its model, for one whose rows depend on it; `pretrained`: the
        model's weights, its head's among them, are used."""
        return self

    def metrics_on(self, rows: RowsT) -> tuple[Metric, ...]:
        """Those of `metrics` that evaluations of these rows have."""
        return self.metrics

    def config_changes(self, rows: RowsT) -> Mapping[str, Any]:
        """What these rows make another in the model's config.json (labels), in transformers' names."""
        return {}

    def step_counts(self) -> StepCounts:
        """What the plan counts of a step."""

    def smaller_step(self, rows: RowsT) -> SmallerStep | None:
        """None where there are rows enough for a step."""

    def check_model(self, config: Mapping[str, Any], *, description: str, where: str, trusted: bool) -> None:
        """Refuse a config.json that the task cannot train; `trusted`: code that comes with the model may be run."""

    def check_data(self, *, max_positions: int | None) -> None:
        """Refuse what can be found wrong in a second, before the machine is measured."""

    def make_rows(
        self,
        *,
        tokenizer_folder: Path,
        code_sha256: str | None,
        vocabulary_rows: int,
        max_positions: int | None,
        cache: Path,
        progress: Callable[[Progress], None] | None,
    ) -> RowsT:
        """Examples to rows; `code_sha256` is of the tokenizer's own code, where that may be run."""

    def count_rows(
        self,
        *,
        tokenizer_folder: Path | None,
        code_sha256: str | None,
        vocabulary_rows: int,
        max_positions: int | None,
        cache: Path,
        progress: Callable[[Progress], None],
    ) -> RowCount:
        """How many rows an epoch has, for a plan, in seconds; None for a tokenizer: it is not to be had here."""
        words = f"not known before the data is prepared, as task {type(self).__name__} cannot tell"
        return RowCount(rows=None, row_tokens=self.step_counts().row_tokens, is_estimate=True, words=words)

    def describe_rows(self, rows: RowsT) -> str:
        """What there is to train on, in a line for people."""
        return rows.in_words()

    def check_rows(self, rows: RowsT, *, world_size: int) -> None:
        """Refuse rows that so many ranks cannot share."""

    def shown_rows(self, rows: RowsT, *, count: int, evaluation: bool) -> Sequence[ShownRow]:
        """The first rows that a run trains on, or those of an evaluation; none: there is nothing to show."""
        return ()

    @staticmethod
    def rows_from_json(document: Mapping[str, Any]) -> RowsT:
        """The inverse of `Rows.to_json`."""

    def sample(
        self, export: Path, rows: RowsT, environ: Mapping[str, str], *, code_sha256: str | None
    ) -> Mapping[str, str] | None:
        """Something to look at, by the exported model: the fields of the event `sample`. None: there is none."""

    def training(self) -> TrainingTask[RowsT, Any]:
        """The other half, anew for each model."""

    def training_on(self, rows: RowsT) -> TrainingTask[RowsT, Any]:
        """The same where the rows are known, for a task whose training depends on what they hold."""
        return self.training()


class TrainingTask(Protocol[RowsT_contra, BatchT]):
    """The half of a task that computes, on a rank."""

    def prepare(self, model: nn.Module, *, fused: bool) -> Choice[str]:
        """Put the loss into a model that no engine has placed yet, unless it is not to be `fused`; how it is made."""

    def choices(self, model: nn.Module) -> Mapping[str, Choice[str]]:
        """What else is found out about that model, by name, for events; refuses one that will not do."""

    @property
    def needs_head_in_backward(self) -> bool:
        """Whether backward reads the head's weight again."""

    def loss(self, module: nn.Module, batch: BatchT, scale: float) -> torch.Tensor:
        """Sum over the batch's valid targets times scale."""

    def metrics(self, mean_loss: float) -> tuple[float, ...]:
        """Of an evaluation with this loss, in the order of `Task.metrics`, where they follow from it (see `score`)."""

    def evaluate(self, module: nn.Module, batch: BatchT, scale: float) -> tuple[torch.Tensor, Sequence[RowOutput]]:
        """The loss of a batch, as `loss` gives it, and of each of its rows but fillers what `score` needs; nothing
        where metrics follow from the loss."""
        return self.loss(module, batch, scale), ()

    def score(self, rows: RowsT_contra, row_ids: Sequence[int], outputs: Sequence[RowOutput]) -> Scored | None:
        """On rank 0: what the outputs of all ranks come to, in the order of their rows. None: `metrics` says it."""
        return None

    def make_loader(
        self,
        rows: RowsT_contra,
        *,
        seed: int,
        rows_per_step: int,
        micro_batch_rows: int,
        accumulation_steps: int,
        rank: int,
        world_size: int,
    ) -> Loader[BatchT]:
        """The steps of one rank."""

    def evaluation_batches(
        self, rows: RowsT_contra, *, max_rows: int | None, micro_batch_rows: int, rank: int, world_size: int
    ) -> EvaluationBatches[BatchT]:
        """One rank's share of an evaluation."""


def make_task(config: RunConfig) -> Task[Any]:
    """The task that a run file names."""
    task: Task[Any] = find("coremill.tasks", config.task)(config)
    return task


def deciding_metric(config: RunConfig, metrics: Sequence[Metric] | None = None) -> Metric:
    """What tells a better evaluation: the named one (`evaluation.keep_best`), else the main one of those that there
    are; None: any that the task may have."""
    named = config.evaluation.keep_best
    metrics = make_task(config).metrics if metrics is None else metrics
    if isinstance(named, bool):
        return metrics[0] if metrics else LOSS
    known = {metric.name: metric for metric in (*metrics, LOSS)}
    if named not in known:
        raise InputError(
            f"{named} is no metric of {config.task}",
            where="evaluation.keep_best",
            why=f"its evaluations give {', '.join(known)}",
            do=f"set evaluation.keep_best to {' or '.join(known)}, or to true, which is {next(iter(known))}",
        )
    return known[named]


def evaluated_rows(config: RunConfig) -> int | None:
    """How many rows an evaluation takes at most: as the run file says, else as its task does; None: all."""
    named = config.evaluation.rows
    return make_task(config).evaluated_rows if named is None else named


def rows_from_json(task: str, document: Mapping[str, Any]) -> Rows:
    """Of the task that made them."""
    rows: Rows = find("coremill.tasks", task).rows_from_json(document)
    return rows

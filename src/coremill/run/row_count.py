"""The rows of an epoch, for `coremill plan`: what is wrong with the data is said, but ends no plan."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from coremill.config.schema import RunConfig
from coremill.errors import CoremillError
from coremill.hardware.probe import cache_folder, environment_snapshot
from coremill.model.source import ModelFolder, resolve_model, resolve_tokenizer
from coremill.plan.card import ModelCard
from coremill.plan.planner import step_counts
from coremill.plan.types import RowCount
from coremill.report.progress import StageProgress
from coremill.report.terminal import print_line
from coremill.tasks.base import make_task


def count_rows(config: RunConfig, card: ModelCard, console: Console) -> RowCount | None:
    """None where the run file sets its steps, so that nobody needs to know, unless rows differ in length, which a
    plan goes by; bars and warnings go to `console`."""
    problem = _problem_of_files(config, card)
    is_needed = config.train.epochs is not None or step_counts(config).rows_differ
    if not is_needed:
        counted: RowCount | CoremillError | None = problem
    else:
        counted = problem or _count(config, card, console)
    if not isinstance(counted, CoremillError):
        return counted
    parts = (f"{counted.what} ({counted.where})" if counted.where else counted.what, counted.why, counted.do)
    print_line(
        console, f"warning: coremill train would refuse this data here: {'; '.join(filter(None, parts))}", "yellow"
    )
    if not is_needed:
        return None
    words = f"not known, as the data cannot be counted here: {'; '.join(filter(None, parts[:2]))}"
    return RowCount(rows=None, row_tokens=config.data.sequence_length, is_estimate=True, words=words)


def _problem_of_files(config: RunConfig, card: ModelCard) -> CoremillError | None:
    """What train says of the first row of files on this machine; datasets of the hub are not asked for."""
    sources = [config.data.source, *(entry.source for entry in config.data.sources or ())]
    if any("://" in source for source in (*sources, config.data.evaluation_source or "")):
        return None
    try:
        make_task(config).check_data(max_positions=card.max_positions)
    except CoremillError as error:  # the data may lie on another machine than the one that plans
        return error
    return None


def _count(config: RunConfig, card: ModelCard, console: Console) -> RowCount | CoremillError:
    cache = cache_folder(environment_snapshot())
    try:
        with StageProgress(console) as bars:
            model, tokenizer = _tokenizer_of(config, cache, bars)
            task = make_task(config)
            if model is not None:
                task = task.on_model(model.config, pretrained=config.model.weights == "pretrained")
            return task.count_rows(
                tokenizer_folder=tokenizer,
                code_sha256=None if model is None or tokenizer != model.folder else model.code_sha256,
                vocabulary_rows=card.vocabulary_rows,
                max_positions=card.max_positions,
                cache=cache,
                progress=bars.show,
            )
    except CoremillError as error:
        return error


def _tokenizer_of(config: RunConfig, cache: Path, bars: StageProgress) -> tuple[ModelFolder | None, Path | None]:
    """Model and tokenizer without weights; None for what is not to be had here."""
    section = config.model.model_copy(update={"weights": "random"})
    try:
        model = resolve_model(section, make_task(config), cache=cache)
        return model, resolve_tokenizer(config, model, cache=cache, training_progress=bars.show)
    except CoremillError:
        return None, None

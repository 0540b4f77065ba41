"""The questions of `coremill config init` in their order, the plan at their end, and the file.

Asked is what a look at this machine and folder leaves open. Nothing here knows a task or an engine by its name: which
there are says the schema, which can train a model or read the data they say themselves.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from coremill.config.keys import keys
from coremill.config.load import LoadedConfig, load_config
from coremill.config.schema import BUILT_IN, RunConfig
from coremill.config.task_rules import READ_BY
from coremill.data.hub_datasets import PREFIX, resolve_dataset
from coremill.errors import InputError, Interrupted, StorageError
from coremill.hardware.probe import probe_node
from coremill.nearby import nearest
from coremill.plan.card import ModelCard
from coremill.plan.types import Choice, Plan
from coremill.report.plan_screen import render_plan_short
from coremill.report.terminal import format_bytes, format_count, print_line
from coremill.run.cards import card_without_weights
from coremill.run.init.findings import Findings, columns_of, likely_column, look_around
from coremill.run.init.interview import Interview, answers_given
from coremill.run.init.run_file import run_file_text
from coremill.run.plan_command import plan_and_card
from coremill.tasks.base import make_task


def init_run_file(path: Path, answers: Sequence[str], *, yes: bool, is_terminal: bool, console: Console) -> None:
    """Ask, plan, write; whatever ends it early leaves nothing."""
    _require_new(path)
    interview = Interview(console, answers_given(list(answers)), asks=is_terminal and not yes, takes_suggestions=yes)
    try:
        _hold(interview, path)
    except KeyboardInterrupt:
        console.print()
        raise Interrupted("stopped: nothing was written") from None


def _hold(interview: Interview, path: Path) -> None:
    console = interview.console
    found = look_around(probe_node(busy_seconds=0))
    interview.start()
    print_line(console, Text("this machine", style="bold"))
    for words in found.machine:
        print_line(console, f"  {words}", style="dim")
    card = _model_and_task(interview, found)
    _data(interview, found)
    _row_length(interview, card)
    _length(interview)
    _evaluation(interview)
    _machines(interview, found)
    planned = _plan_or_adapters(interview)
    loaded = interview.load()
    console.print()
    if isinstance(planned, Plan):
        print_line(console, Text("plan", style="bold"))
        render_plan_short(planned.to_json(), console)
    else:
        print_line(console, f"no plan: {planned.what}", style="yellow")
    _write(path, run_file_text(loaded, path))
    hosts = ""
    if loaded.config.fleet.nodes > 1:
        hosts = f" --hostfile {found.hostfile or 'HOSTFILE'}"
    console.print()
    print_line(console, Text(f"wrote {path}", style="bold green"))
    console.print(Text(f"next: coremill train {path}{hosts}"), soft_wrap=True)  # to be copied: one line, however long


def _require_new(path: Path) -> None:
    if path.exists():
        do = f"name another file: coremill config init {path.stem}-2{path.suffix}, or remove it"
        raise InputError(f"{path} is there already", where=str(path), why="a run file of yours is not replaced", do=do)
    if path.suffix not in (".yaml", ".yml"):
        do = f"name it {path.name}.yaml"
        raise InputError(f"{path} does not end in .yaml", where=str(path), why="a run file is YAML", do=do)
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        state = "cannot be written to" if path.parent.is_dir() else "is not there"
        raise InputError(f"the folder {path.parent} {state}", where=str(path), do="name a file in a folder of yours")


# --- which model, for what


def _model_and_task(interview: Interview, found: Findings) -> ModelCard | None:
    """The model first: it says which tasks there can be; one alone is not asked for. None: it is not known here."""
    cards: dict[str, ModelCard] = {}
    if "model.config" not in interview.answers:
        wanted = [interview.given["task"]] if "task" in interview.given else list(keys()["task"].choices)

        def check(loaded: LoadedConfig) -> str:
            cards.clear()
            cards.update(_cards_by_task(loaded, wanted))
            card = next(iter(cards.values()))
            size = f"{format_count(card.parameters)} parameters in {card.layers} layers"
            return f"{card.family}, {size}"

        interview.ask("model.name", found.model, check)
    if "task" not in interview.given and cards:
        _task(interview, found, list(cards))
    return cards.get(interview.load().config.task)


def _task(interview: Interview, found: Findings, able: list[str]) -> None:
    default = keys()["task"].default
    if len(able) == 1:
        if able[0] != default:
            interview.answers["task"] = able[0]
        return
    columns = columns_of(interview.given.get("data.source", found.data.value))
    config = interview.load().config
    missing = {name: len(_missing_columns(config, name, columns)) for name in able}
    best = min(able, key=lambda name: missing[name])
    if len(set(missing.values())) > 1:
        reason = f"of {' and '.join(able)}, its columns are nearest to those of the data: {', '.join(columns)}"
    else:
        reason = f"this model can be trained for {' and '.join(able)}"
    interview.ask("task", Choice(best, reason), lambda loaded: _of_these(loaded.config.task, able, "task"))


def _cards_by_task(loaded: LoadedConfig, names: Sequence[str]) -> dict[str, ModelCard]:
    """The model as each task that can train it sees it; raises what the first one says where none can."""
    cards: dict[str, ModelCard] = {}
    problems: list[InputError] = []
    for name in names:
        try:
            cards[name] = card_without_weights(loaded.located.model_copy(update={"task": name}))
        except InputError as problem:
            if problems and str(problem) == str(problems[0]):
                break  # nothing to do with the task: it is not there, or the hub does not answer
            problems.append(problem)
    if not cards:
        raise problems[0]
    return cards


def _of_these(value: str, able: Sequence[str], what: str) -> str:
    if value not in able:
        near = nearest(value, able)
        do = f"did you mean {near}?" if near else "name one of them"
        raise InputError(f"there is no {what} {value} to choose", why=f"there are {', '.join(able)}", do=do)
    return ""


# --- which data


def _data(interview: Interview, found: Findings) -> None:
    if "data.sources" in interview.answers:
        return
    columns: list[str] = []

    def check(loaded: LoadedConfig) -> str:
        config = loaded.located
        columns[:] = columns_of(config.data.source)
        try:
            return _look_at_data(config)
        except InputError as problem:
            if _missing_columns(config, config.task, columns):
                return f"columns: {', '.join(columns)}"  # which of them, is asked next
            if interview.asks or "data.source" not in interview.given:
                raise
            interview.warn(f"{problem.what} ({problem.where}); is it on the machines that train?")  # as plan does
            return ""

    interview.ask("data.source", found.data, check)
    config = interview.load().located
    with contextlib.suppress(InputError):
        _look_at_data(config)
        return
    for key in _missing_columns(config, config.task, columns):
        if key in interview.answers:
            continue
        usual = keys()[key].default
        taken = _named_columns(interview.load().config, config.task, without=key)
        likely = likely_column(_listed(usual), [name for name in columns if name not in taken] or columns)
        text = f"[{likely}]" if isinstance(usual, list) else likely
        reason = f"there is no column {_listed(usual)}; there are {', '.join(columns)}"
        interview.ask(key, Choice(text, reason), lambda loaded, key=key: _is_column(loaded.config, key, columns))  # type: ignore[misc]


def _look_at_data(config: RunConfig) -> str:
    source = config.data.source
    if source.startswith(PREFIX):
        dataset = resolve_dataset(source, split=config.data.split, setting="data.source")
        return f"{dataset.repository} at {dataset.commit[:12]}"
    make_task(config).check_data(max_positions=None)
    return ""


def _missing_columns(config: RunConfig, task: str, columns: Sequence[str]) -> list[str]:
    """Keys that name columns which the task reads and the data does not have; those without a default may be absent."""
    keys_of_task = _column_keys(task) if columns else []
    return [key for key in keys_of_task if not set(_columns_in(config, key)) <= set(columns)]


def _named_columns(config: RunConfig, task: str, *, without: str) -> set[str]:
    """What the other keys of the task name."""
    return {name for key in _column_keys(task) if key != without for name in _columns_in(config, key)}


def _column_keys(task: str) -> list[str]:
    return [
        key
        for key, readers in READ_BY.items()
        if key.startswith("data.") and key.endswith(("column", "columns")) and task in readers
    ]


def _columns_in(config: RunConfig, key: str) -> list[str]:
    named = getattr(config.data, key.partition(".")[2])
    return [] if named is None else [named] if isinstance(named, str) else list(named)


def _is_column(config: RunConfig, key: str, columns: Sequence[str]) -> str:
    for name in _columns_in(config, key):
        _of_these(name, columns, "column")
    return ""


def _listed(value: object) -> str:
    return " and ".join(map(str, value)) if isinstance(value, list) else str(value)


def _row_length(interview: Interview, card: ModelCard | None) -> None:
    """Asked where the model has no place for rows of the usual length."""
    key, most = "data.sequence_length", None if card is None else card.max_positions
    if most is None or key in interview.given or interview.load().config.data.sequence_length <= most:
        return

    def check(loaded: LoadedConfig) -> str:
        if loaded.config.data.sequence_length > most:
            raise InputError(f"the model has {most} positions", do=f"say {most}, or less")
        return ""

    interview.ask(key, Choice(str(most), f"the model has {most} positions, rows have {keys()[key].default}"), check)


# --- how long, on what


def _length(interview: Interview) -> None:
    if {"train.steps", "train.epochs"} & interview.given.keys():
        return
    config = interview.load().config
    if config.data.source == BUILT_IN and config.model.name == BUILT_IN:
        steps = load_config(None).config.train.steps
        interview.ask("train.steps", Choice(str(steps), "as the built-in example has it"))
    else:
        interview.ask(
            "train.epochs", Choice("1", "fine-tuning takes one to three passes; the plan says how long it is")
        )


def _evaluation(interview: Interview) -> None:
    if any(key.startswith(("data.evaluation_", "evaluation.")) for key in interview.given):
        return
    reason = "held out, so that the report has a score on what was not learned; 0: none"
    interview.ask("data.evaluation_fraction", Choice("0.05", reason))


def _machines(interview: Interview, found: Findings) -> None:
    nodes = found.hosts or Choice(1, "no hostfile is here; several are started with train --hostfile FILE")
    interview.ask("fleet.nodes", Choice(str(nodes.value), nodes.reason))


def _plan_or_adapters(interview: Interview) -> Plan | InputError:
    """The plan; where all weights are too many for this machine, adapters are asked for first."""
    try:
        plan, card = plan_and_card(interview.load(), None)
    except InputError as problem:
        if not interview.asks:
            raise
        return problem
    if plan.fits or "lora.rank" in interview.given:
        return plan
    memory = plan.to_json()["memory_bytes_per_rank"]
    reason = (
        f"all {format_count(card.parameters)} weights take {format_bytes(memory['total'])} per rank to train, and there"
        f" are {format_bytes(memory['limit'])}; adapters take less; null: all the same"
    )
    interview.ask("lora.rank", Choice("16", reason))
    return plan_and_card(interview.load(), None)[0]


def _write(path: Path, text: str) -> None:
    """Where somebody else wrote the file meanwhile, theirs stays."""
    try:
        with path.open("x", encoding="utf-8") as stream:
            stream.write(text)
    except FileExistsError:
        raise InputError(f"{path} is there already", where=str(path), why="it was written meanwhile") from None
    except OSError as error:
        with contextlib.suppress(OSError):
            path.unlink()
        raise StorageError(f"cannot write {path}: {error.strerror or error}", do="free space") from error

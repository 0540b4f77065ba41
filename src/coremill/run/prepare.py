"""Everything that is found out, fetched and checked before the first rank starts: bad input ends here.

The launcher does it for the ranks it starts. Under torchrun or mpirun the first rank of each node does it for that
node.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from coremill.config.load import LoadedConfig
from coremill.config.schema import BUILT_IN, RunConfig
from coremill.data.packed import PackedData
from coremill.data.tokenizer_files import tokenizer_identity
from coremill.errors import InputError
from coremill.hardware.facts import Fleet
from coremill.hardware.load import busy_with_others
from coremill.hardware.probe import cache_folder, environment_snapshot
from coremill.hosts.fingerprint import (
    Fact,
    Facts,
    digest_of_files,
    facts_from_json,
    facts_of_settings,
    facts_of_versions,
    facts_to_json,
)
from coremill.model.adapter_source import find_adapter
from coremill.model.lora_base import Base, base_of, require_peft
from coremill.model.source import ModelFolder, resolve_model, resolve_tokenizer
from coremill.model.tokenizer_fit import require_fitting_tokenizer
from coremill.plan.adapter_folder import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from coremill.plan.adapters import words_of_wide_adapters
from coremill.plan.card import ModelCard
from coremill.plan.dtype import words_of_emulated_bf16
from coremill.plan.headers import weight_files
from coremill.plan.known_length import with_steps
from coremill.plan.length import steps_of_epochs
from coremill.plan.planner import make_plan, step_counts
from coremill.plan.stored import plan_from_json
from coremill.plan.types import Choice, Plan, RowLengths
from coremill.plan.words import plural
from coremill.report.plan_screen import render_plan_short, run_in_words
from coremill.report.progress import StageProgress
from coremill.report.readers.trackers import require_libraries
from coremill.report.sources import words_of_data
from coremill.report.terminal import print_line
from coremill.run.cards import card_for
from coremill.run.machines import Place, measured_fleet
from coremill.supervise.rank_environment import oversubscription_note
from coremill.tasks.base import Rows, Task, deciding_metric, make_task, rows_from_json
from coremill.train.schedule import describe_schedule

FEWEST_HELD_OUT = 4  # rows; fewer say more of themselves than of the model
# In a config.json, and of no consequence: who saved it, and under which name.
WRITTEN_BY_TRANSFORMERS = ("transformers_version", "_name_or_path", "_commit_hash")


@dataclass(frozen=True)
class Orders:
    """What a rank needs to know beside the config: where things lie on this node, how many steps, and the plan."""

    task: str  # by its name: how to read `data`
    model: ModelFolder
    tokenizer: Path
    data: Rows
    steps: int
    plan: Plan
    facts: Facts  # what has to be the same on all hosts; none where there is one host
    parameters: int | None = None  # of the model, for the report; likewise those that are trained
    trainable_parameters: int | None = None
    base: Base | None = None  # of adapters
    start_from: Path | None = None  # an adapter folder

    def to_json(self) -> dict[str, Any]:
        """Plain values for orders.json and for sending between ranks."""
        return {
            "task": self.task,
            "model": self.model.to_json(),
            "tokenizer": str(self.tokenizer),
            "data": self.data.to_json(),
            "steps": self.steps,
            "plan": self.plan.to_json(),
            "facts": facts_to_json(self.facts),
            "parameters": self.parameters,
            "trainable_parameters": self.trainable_parameters,
            "base": None if self.base is None else self.base.to_json(),
            "start_from": None if self.start_from is None else str(self.start_from),
        }

    @property
    def answer_end_ids(self) -> tuple[int, ...]:
        """The tokens that answers end with, where the data are conversations; generation ends there too."""
        conversations = self.data.conversations if isinstance(self.data, PackedData) else None
        return () if conversations is None else conversations.end_ids

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> Orders:
        """The inverse of to_json."""
        return Orders(
            task=document["task"],
            model=ModelFolder.from_json(document["model"]),
            tokenizer=Path(document["tokenizer"]),
            data=rows_from_json(document["task"], document["data"]),
            steps=document["steps"],
            plan=plan_from_json(document["plan"]),
            facts=facts_from_json(document["facts"]),
            parameters=document.get("parameters"),
            trainable_parameters=document.get("trainable_parameters"),
            base=Base(**document["base"]) if document.get("base") else None,
            start_from=Path(document["start_from"]) if document.get("start_from") else None,
        )

    @staticmethod
    def read(path: Path) -> Orders:
        """What the launcher wrote."""
        return Orders.from_json(json.loads(path.read_text()))


@dataclass(frozen=True)
class Begun:
    """What the run that this one goes on with had done, and on how many ranks; nothing where this one begins."""

    steps: int = 0
    world_size: int | None = None


BEGINS = Begun()


def prepare_run(
    loaded: LoadedConfig,
    place: Place,
    console: Console,
    *,
    force: bool = False,
    on_plan: Callable[[Plan, ModelFolder], None] | None = None,
    before: Begun = BEGINS,
) -> Orders:
    """Model, machines, plan and rows, in that order; bars appear where there is work, bad input ends here.

    The machine may have to be measured, for 40 s or more: what is wrong with the files is said before that. The plan
    is shown, and refused where it does not fit, before the data is touched; `on_plan` hears of it then. A run that goes
    on plans what is left, for as many ranks as it had where that is left open.
    """
    with loaded.placing(), StageProgress(console) as bars:
        config = place.settle(loaded.located)
        cache, on_model = cache_folder(environment_snapshot()), partial(say, console)
        require_libraries(config.run.trackers)
        require_peft(config)
        task = make_task(config)
        deciding_metric(config)  # refuses a name that the task does not know
        model = resolve_model(config.model, task, cache=cache, progress=on_model)
        task = task.on_model(model.config, pretrained=model.weights == "pretrained")
        card = card_for(config, model, on_model)
        if (warning := words_of_wide_adapters(card)) is not None:
            say(console, warning)
        base = base_of(config, model)
        start_from = find_adapter(config, model, base, cache, on_model, goes_on=before.steps > 0)
        task.check_data(max_positions=card.max_positions)
        fleet = measured_fleet(place, on_model)
        if (busy := busy_with_others(fleet.node)) is not None:
            say(console, str(busy))
        plan = replace(make_plan(config, fleet, card, ranks_before=before.world_size), steps_done=before.steps)
        _show_plan(plan, fleet, console)
        refuse_what_does_not_fit(plan, force=force)
        if on_plan is not None:
            on_plan(plan, model)
        tokenizer = resolve_tokenizer(config, model, cache=cache, progress=on_model, training_progress=bars.show)
        doubt = require_fitting_tokenizer(config.tokenizer, tokenizer, model, card.vocabulary_rows)
        if doubt is not None:
            say(console, doubt)
        data: Rows = task.make_rows(
            tokenizer_folder=tokenizer,
            code_sha256=model.code_sha256 if tokenizer == model.folder else None,
            vocabulary_rows=card.vocabulary_rows,
            max_positions=card.max_positions,
            cache=cache,
            progress=bars.show,
        )
        deciding_metric(config, task.metrics_on(data))
        model = replace(model, config_changes=dict(task.config_changes(data)))
        refuse_nothing_to_compare(config, data)
        if 0 < data.train_rows < plan.rows_per_step:
            announced = plan.world_size
            plan = replace(plan_for_rows(config, fleet, card, data, before.world_size), steps_done=before.steps)
            if plan.world_size != announced:
                say(console, f"so few rows are for fewer ranks: {plan.world_size}, not {announced}")
        task.check_rows(data, world_size=plan.world_size)
        steps = count_steps(config, data, plan)
        plan = with_steps(plan, config, fleet, card, steps, lengths_of(config, data))
        facts = facts_of(config, model, tokenizer, data, steps, start_from) if plan.nodes > 1 else {}
    for words in spoken_of(task, config, data, plan, steps):
        say(console, words)
    return Orders(
        task=config.task,
        model=model,
        tokenizer=tokenizer,
        data=data,
        steps=steps,
        plan=plan,
        facts=facts,
        parameters=card.parameters,
        trainable_parameters=card.trainable_parameters,
        base=base,
        start_from=start_from,
    )


def _show_plan(plan: Plan, fleet: Fleet, console: Console) -> None:
    render_plan_short(plan.to_json(), console)
    slow = words_of_emulated_bf16(plan.dtype, fleet.node, fleet.calibration)
    for warning in filter(None, (slow, oversubscription_note(plan))):
        say(console, warning)


def spoken_of(task: Task[Any], config: RunConfig, data: Rows, plan: Plan, steps: int) -> list[str]:
    """What there is to train on and how long that takes, a line each."""
    spoken = [f"training data: {task.describe_rows(data)}", data.bad_rows_words, data.evaluation_words]
    spoken.append(words_of_few_held_out(data))
    spoken += [words_of_smaller_step(config, data), *words_of_data(data.counts(), steps * plan.rows_per_step)]
    spoken += [words_of_schedule(config, steps), run_in_words(plan, data.train_rows)]
    return [words for words in spoken if words]


def words_of_few_held_out(data: Rows) -> str:
    """Of what was held out where that is next to nothing; empty else, and where the user named what to evaluate on."""
    if not data.evaluation_words or data.evaluation_rows >= FEWEST_HELD_OUT:
        return ""
    return (
        f"warning: {plural(data.evaluation_rows, 'row')} held out for evaluation: what so few give is mostly chance;"
        " raise data.evaluation_fraction, or name more text in data.evaluation_source"
    )


def say(console: Console, text: str) -> None:
    """One finding, one line; on a terminal wrapped at words."""
    print_line(console, text)


def facts_of(
    config: RunConfig, model: ModelFolder, tokenizer: Path, data: Rows, steps: int, start_from: Path | None
) -> Facts:
    """What this host found, for comparison with the others: of files a few words and a hash."""
    shape = {key: value for key, value in model.config.items() if key not in WRITTEN_BY_TRANSFORMERS}
    shape_hash = hashlib.blake2b(json.dumps([shape, model.code_sha256], sort_keys=True).encode(), digest_size=6)
    weights = "made from the seed"
    if model.weights == "pretrained":
        files = [model.folder / name for name in weight_files(model.folder)]
        weights = f"{sum(file.stat().st_size for file in files):,} bytes, hash {digest_of_files(files)}"
    named = [config.data.source] if config.data.sources is None else [entry.source for entry in config.data.sources]
    files_of_python = f"the files of Python {platform.python_version()}"
    source = ", ".join(files_of_python if name == BUILT_IN else name for name in named)
    found = {
        "the model's config.json": Fact(
            f"{model.config['model_type']}, hash {shape_hash.hexdigest()}", model.description
        ),
        "the model's weights": Fact(weights, str(model.folder)),
        "the tokenizer": Fact(f"hash {tokenizer_identity(tokenizer)[:12]}", str(tokenizer)),
        "the data": Fact(f"{data.in_words()}, hash {data.key[:12]}-{digest_of_files(data.files())}", source),
    }
    if start_from is not None:
        adapter = digest_of_files([start_from / name for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS)])
        found["the adapter to start from"] = Fact(f"hash {adapter}", str(start_from))
    if config.train.steps is None:
        found["the number of steps"] = Fact(f"{steps:,}")
    return {**facts_of_versions(), **facts_of_settings(config.model_dump(mode="json")), **found}


def plan_for_rows(
    config: RunConfig, fleet: Fleet, card: ModelCard, data: Rows, ranks_before: int | None = None
) -> Plan:
    """The plan once the rows are known: where a step would hold some of them twice, it takes all of them once."""
    smaller = make_task(config).smaller_step(data)
    if smaller is None:
        return make_plan(config, fleet, card, ranks_before=ranks_before)
    plan = make_plan(smaller.config, fleet, card, ranks_before=ranks_before)
    passes = plan.accumulation_steps
    return replace(plan, accumulation_steps=Choice(passes.value, f"{passes.reason}; {smaller.words}"))


def lengths_of(config: RunConfig, data: Rows) -> RowLengths | None:
    """How long rows are, where they differ."""
    if not step_counts(config).rows_differ:
        return None
    counts = data.counts()
    return RowLengths(mean=counts["mean_row_tokens"], longest=counts["longest_row"])


def words_of_smaller_step(config: RunConfig, data: Rows) -> str:
    """What is done about a step of more rows than there are; empty where there are enough."""
    smaller = make_task(config).smaller_step(data)
    return "" if smaller is None else smaller.words


def words_of_schedule(config: RunConfig, steps: int) -> str:
    """What shares of the run are in steps; empty where the run file says it in steps."""
    train = config.train
    is_share = train.warmup_share is not None or train.schedule == "warmup-stable-decay"
    return describe_schedule(steps, train) if is_share else ""


def count_steps(config: RunConfig, data: Rows, plan: Plan) -> int:
    """Optimizer steps of the run; whole steps only, at least one, and more than its warm-up has."""
    if config.train.steps is not None:
        return config.train.steps
    epochs, warmup = config.train.epochs, config.train.warmup_steps
    assert epochs is not None
    steps = steps_of_epochs(epochs, data.train_rows, plan.rows_per_step)
    if warmup >= steps:  # of train.steps the rules of the run file say it
        raise InputError(
            f"train.warmup_steps ({warmup}) is not below the {steps:,} steps of the run",
            where=f"train.warmup_steps: {warmup}",
            why=f"train.epochs is {epochs:g}, an epoch has {data.train_rows:,} rows and a step {plan.rows_per_step:,}:"
            " the learning rate would never reach its peak",
            do=f"set train.warmup_steps to at most {steps - 1}, or train for more epochs",
        )
    return steps


def refuse_nothing_to_compare(config: RunConfig, data: Rows) -> None:
    """Where evaluations are to decide something, there are some."""
    if (config.evaluation.keep_best or config.evaluation.stop_after) and not data.evaluation_rows:
        raise InputError(
            "there is nothing to evaluate on: no rows were held out",
            where="evaluation.keep_best" if config.evaluation.keep_best else "evaluation.stop_after",
            why="which step is best is told by an evaluation",
            do="set data.evaluation_fraction: 0.05, or data.evaluation_source to files that fill a row or more",
        )


def refuse_what_does_not_fit(plan: Plan, *, force: bool) -> None:
    """Better now than hours later, killed by the kernel."""
    if plan.fits or force:
        return
    needed, limit = plan.memory.peak.total, plan.memory.limit
    remedies = "; ".join(
        f"{remedy.change} ({' '.join('--set ' + item for item in remedy.settings)})" for remedy in plan.remedies[:3]
    )
    kept = plan.kept_activations
    estimate = f"; what layers keep is an estimate: {kept.reason}" if kept.value == "estimated" else ""
    raise InputError(
        f"the run does not fit: {needed / 1e9:.2f} GB per rank against a limit of {limit / 1e9:.2f} GB",
        where="coremill plan shows the parts",
        why=f"{plan.shortfall_bytes / 1e9:.2f} GB too much on each rank{estimate}",
        do=f"{remedies or 'a smaller model or more machines'}; --force tries anyway",
    )

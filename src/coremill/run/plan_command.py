"""`coremill plan` and `coremill instances`: which fleet, which card, what to show. No torch, no weights, no data."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from coremill.config.load import LoadedConfig, load_config
from coremill.errors import InputError
from coremill.hardware.calibrate import remember
from coremill.hardware.instances import find_instances, live_instances, table
from coremill.hardware.load import busy_with_others
from coremill.hardware.probe import cache_folder, environment_snapshot
from coremill.hardware.process_memory import MAPPED_FILE_BYTES
from coremill.plan.card import ModelCard
from coremill.plan.compare import compare_fleets, usd_per_million_tokens
from coremill.plan.dtype import words_of_emulated_bf16
from coremill.plan.known_length import arrangement_of
from coremill.plan.learn import observe, without_learning
from coremill.plan.planner import make_plan, step_counts
from coremill.plan.pricing import price
from coremill.plan.stored import plan_from_json
from coremill.plan.types import Plan, StepSeconds
from coremill.report.events import not_a_run
from coremill.report.plan_screen import length_in_words, render_plan
from coremill.report.summary import summarise
from coremill.report.terminal import (
    format_bytes,
    format_rate,
    format_seconds,
    format_usd,
    print_heading,
    print_line,
    print_rows,
)
from coremill.run.cards import card_of_new_run, card_without_weights
from coremill.run.folder import RunFolder
from coremill.run.machines import Place, find_fleet, measured_fleet, with_slots
from coremill.run.opening import say_basis, with_paths_of_run
from coremill.run.row_count import count_rows
from coremill.tasks.base import deciding_metric


def plan_and_card(loaded: LoadedConfig, fleet: str | None, *, live: bool = False) -> tuple[Plan, ModelCard]:
    """One run on one fleet, and the model as the plan sees it; `live`: at what spot machines cost now."""
    config = with_slots(loaded.located, fleet)
    deciding_metric(config)  # refuses a name that the task does not know
    with loaded.placing():
        card = card_of_new_run(config, Console(stderr=True))
        machines = find_fleet(config, fleet, card, live=live)
    rows = count_rows(config, card, Console(stderr=True))
    plan = make_plan(config, machines, card, rows=rows)
    if (warning := words_of_emulated_bf16(plan.dtype, machines.node, machines.calibration)) is not None:
        print_line(Console(stderr=True), warning)
    if (busy := busy_with_others(machines.node)) is not None:
        print_line(Console(stderr=True), str(busy))
    return plan, card


def plan_once(loaded: LoadedConfig, fleet: str | None, *, as_json: bool, console: Console, live: bool = False) -> None:
    """Show one run on one fleet."""
    plan, card = plan_and_card(loaded, fleet, live=live)
    if as_json:
        print(json.dumps({**plan.to_json(), "model": asdict(card)}, indent=2))
    else:
        say_basis(loaded, console)
        render_plan(plan.to_json(), asdict(card), console)


def plan_on_fleets(
    loaded: LoadedConfig, fleets: Sequence[str], *, as_json: bool, console: Console, live: bool = False
) -> None:
    """The same run on several fleets, ranked by cost and by time; none named: on this machine."""
    config = loaded.located
    with loaded.placing():
        card = card_of_new_run(config, Console(stderr=True))
        machines = [find_fleet(config, fleet, card, live=live) for fleet in (*fleets, *([] if fleets else [None]))]
    rows = count_rows(config, card, Console(stderr=True))
    comparison = compare_fleets(config, machines, card, rows=rows)
    if as_json:
        ranked = {"by_cost": comparison.by_cost, "by_time": comparison.by_time}
        print(json.dumps({order: [plan.to_json() for plan in plans] for order, plans in ranked.items()}, indent=2))
        return
    say_basis(loaded, console)
    columns = ("fleet", "fits", "memory/limit", "tokens/s", "time", "$/run", "$/M tokens")
    for heading, plans in (("Cheapest first", comparison.by_cost), ("Quickest first", comparison.by_time)):
        print_heading(console, heading)
        print_rows(console, heading.lower(), columns, [_row(plan) for plan in plans])
    for words in dict.fromkeys(length_in_words(plan.to_json()) for plan in comparison.by_cost):
        if words:
            console.print()
            print_line(console, words)
    for plan in comparison.by_cost:
        for assumption in plan.assumptions:
            print_line(console, f"assumed for {plan.fleet}, not measured: {assumption}", style="yellow")


def _row(plan: Plan) -> tuple[str, ...]:
    hours = plan.hours()
    return (
        plan.fleet,
        "yes" if plan.fits else "no",
        f"{format_bytes(plan.memory.peak.total)} / {format_bytes(plan.memory.limit)}",
        format_rate(plan.tokens_per_second, ""),
        format_seconds(None if hours is None else hours * 3600),
        format_usd(plan.usd()),
        format_usd(usd_per_million_tokens(plan)),
    )


def learn_from(run: Path, *, as_json: bool, console: Console) -> None:
    """Feed the measured rates of a finished run back: later plans on this machine go by them."""
    if not (run / "plan.json").is_file() or not (run / "config.yaml").is_file():
        raise not_a_run(run)
    config = with_paths_of_run(load_config(run / "config.yaml"), RunFolder(run)).located
    plan = plan_from_json(json.loads((run / "plan.json").read_text(encoding="utf-8")))
    summary = summarise(run)
    measured = summary["measured"]
    seconds = measured["step_seconds"]
    steady_bytes = measured["memory_bytes_by_phase"]["steady_step"]
    if summary["state"] != "finished" or not seconds["compute"] or not seconds["optimizer"] or not steady_bytes:
        raise InputError(
            f"there is nothing to learn from {run} yet",
            why="rates come from the second step on, of a run that has ended well",
            do="let it finish, with a few steps at least",
        )
    if not plan.fleet.endswith("this machine"):
        raise InputError(
            f"the run in {run} was planned for {plan.fleet}", do="learn on one of the machines that it ran on"
        )
    if not config.model.fused or not step_counts(config).vocabulary_logits:
        raise InputError(
            f"the run in {run} tells nothing about others on this machine",
            why="with model.fused: false, or a task without words to predict, what is planned is an estimate",
            do="learn from a run of causal language modelling with model.fused: true",
        )
    fleet = without_learning(measured_fleet(Place(nodes=plan.nodes), lambda text: None))
    planned = price(card_without_weights(config), arrangement_of(plan, config), fleet, plan.memory.limit)
    observation = observe(
        run=str(run.resolve()),
        engine=plan.engine.value,
        dtype=plan.dtype.value,
        optimizer=plan.optimizer.value,
        fleet=fleet,
        planned_seconds=planned.seconds,
        planned_memory=planned.memory.steady_step,
        measured_seconds=StepSeconds(
            compute=seconds["compute"],
            communication=seconds["communication"] or 0.0,
            exposed_communication=seconds["communication"] or 0.0,
            optimizer=seconds["optimizer"],
        ),
        # Plans count pages of libraries as so many, whatever the page cache did in this run.
        measured_bytes=steady_bytes - (measured["mapped_file_bytes_per_rank"] or MAPPED_FILE_BYTES) + MAPPED_FILE_BYTES,
    )
    file = remember(fleet.node, cache_folder(environment_snapshot()), observation)
    if as_json:
        print(json.dumps(asdict(observation), indent=2))
        return
    factors = {name: getattr(observation, name) for name in ("compute", "optimizer", "communication", "slack")}
    told = ", ".join(f"{name} x {value:.2f}" for name, value in factors.items() if value is not None)
    console.print(
        f"learned from {run} ({plan.engine.value}, {plan.dtype.value}), measured over planned: {told};"
        f" plans on this machine go by it now; forget it by removing {file}",
        highlight=False,
        soft_wrap=True,
        markup=False,
    )


def show_instances(*, family: str | None, efa: bool, live: bool, as_json: bool, console: Console) -> None:
    """The table, or what EC2 says now."""
    if live:
        found = live_instances(pattern=f"{family}.*" if family else "*", efa=efa or None)
    else:
        found = find_instances(family=family, efa=efa or None)
    if as_json:
        print(json.dumps([instance.to_json() for instance in found], indent=2))
        return
    columns = ("type", "vCPU", "cores", "memory", "Gbit/s", "EFA", "pods get", "$/h")
    rows = [
        (
            instance.name,
            str(instance.vcpus),
            str(instance.cores),
            f"{instance.memory_mib / 1024:,.0f} GiB",
            f"{instance.network_baseline_gbps:g}",
            str(instance.efa_interfaces) if instance.efa else "no",
            "" if instance.allocatable_memory_mib is None else f"{instance.allocatable_memory_mib / 1024:,.1f} GiB",
            format_usd(instance.usd_per_hour),
        )
        for instance in found
    ]
    print_rows(console, "instance", columns, rows)
    if not live:
        console.print(
            f"{len(found)} types; on-demand prices of {table().region}, {table().price_date}", highlight=False
        )

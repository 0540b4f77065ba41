"""`coremill plan` on one screen, and the few lines of it that `coremill train` shows first.

Both take the JSON form of a plan, so a plan read back from plan.json looks the same as one just made.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from coremill.plan.types import Plan
from coremill.plan.words import plural
from coremill.report.summary_screen import memory_bar, render_split
from coremill.report.terminal import (
    bar,
    format_bytes,
    format_count,
    format_epochs,
    format_flops,
    format_percent,
    format_rate,
    format_seconds,
    format_usd,
    print_heading,
    print_line,
    print_rows,
)

MEMORY_PARTS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "activations": "activations",
    "logits": "logits chunk",
    "buffers": "gather and reduce buffers",
    "data": "data",
    "base": "interpreter and libraries",
    "slack": "allocator slack",
}
PHASE_NAMES = {"load": "load", "first_step": "first step", "steady_step": "steady steps", "checkpoint": "export"}


def render_plan(plan_json: Mapping[str, Any], card: Mapping[str, Any], console: Console) -> None:
    """Will it fit, how fast, what does it cost, and why."""
    _headline(plan_json, card, console)
    _memory(plan_json, console)
    _time_and_cost(plan_json, console)
    print_heading(console, "Choices")
    print_rows(console, "choice", ("", "", ""), _choice_rows(plan_json), wrapped_column=2)
    if plan_json.get("remedies"):
        _remedies(plan_json, console)
    for warning in (plan_json.get("save") or {}).get("warnings") or ():
        print_line(console, f"saving: {warning}", style="yellow")
    for assumption in plan_json.get("assumptions") or ():
        print_line(console, f"assumed, not measured: {assumption}", style="yellow")


def render_plan_short(plan_json: Mapping[str, Any], console: Console) -> None:
    """The plan in four to ten lines."""
    lines = _short_lines(plan_json)
    width = max(8, *(len(name) + 1 for name, _ in lines))
    for name, text in lines:
        if console.is_terminal:
            over = name == "memory" and not plan_json["fits"]
            line = Text(name.ljust(width), style="dim").append(text, style="bold red" if over else "not dim")
            console.print(_hanging(line, width))
        else:
            print_line(console, f"{name}: {text}")


def _short_lines(plan: Mapping[str, Any]) -> list[tuple[str, str]]:
    value = {name: choice["value"] for name, choice in plan.items() if _is_choice(choice)}
    ranks, threads = plan["world_size"], _many(value["threads_per_rank"], "thread")
    rows = _rows_words(plan)
    at_a_time, passes = _many(value["micro_batch_rows"], "row"), _many(value["accumulation_steps"], "pass", "passes")
    speed = [*_rates(plan), f"{format_seconds(plan['step_seconds']['total'])} a step"]
    if plan.get("steps"):
        speed.append(_length(plan))
    if plan.get("usd") is not None:
        speed.append(format_usd(plan["usd"]))
    # What is out of the ordinary about the model, and costs memory.
    unusual = (
        ("layers", "kept_activations", "estimated"),
        ("attention", "attention", "eager"),
        ("logits", "logits", "whole"),
    )
    model = [(label, f"{word}: {plan[name]['reason']}") for label, name, word in unusual if value.get(name) == word]
    return [
        ("ranks", f"{ranks} with {threads}{' each' if ranks > 1 else ''}, on {plan['fleet']}"),
        ("engine", f"{value['engine']}: {plan['engine']['reason']}"),
        ("dtype", f"{value['dtype']}: {plan['dtype']['reason']}"),
        *((name, f"{value[name]}: {plan[name]['reason']}") for name in ("optimizer", "update") if name in value),
        ("step", f"{rows}, {at_a_time} at a time, {passes} per rank"),
        *model,
        ("memory", _fit_words(plan)),
        ("speed", ", ".join(speed)),
        *(("saving", warning) for warning in (plan.get("save") or {}).get("warnings") or ()),
    ]


def _rows_words(plan: Mapping[str, Any]) -> str:
    """What a step has: rows of one length, or samples of several."""
    rows, length = format_count(plan["rows_per_step"]), format_count(plan["sequence_length"])
    if plan.get("samples_per_second") is None:
        return f"{rows} rows of {length} tokens"
    lengths = plan.get("row_lengths")
    mean = f", {lengths['mean']:.0f} in the mean and {lengths['longest']} at most" if lengths else ""
    return f"{rows} samples of up to {length} tokens{mean}"


def _rates(plan: Mapping[str, Any]) -> list[str]:
    """Tokens a second; where a run counts in samples these first, and how long they were taken to be."""
    tokens = format_rate(plan["tokens_per_second"])
    if (samples := plan.get("samples_per_second")) is None:
        return [tokens]
    if not plan.get("row_lengths"):
        return [f"at least {format_rate(samples, 'samples/s')} (as if all were as long as they may be)"]
    return [format_rate(samples, "samples/s"), tokens]


def _parameter_words(card: Mapping[str, Any]) -> str:
    words = f"{format_count(card['parameters'])} parameters"
    if not (frozen := card.get("frozen")):
        return words
    left_out = frozen["embedding"] + frozen["head"] + sum(frozen["layers"]) + frozen["rest"]
    if adapters := card.get("adapters"):
        beside = sum(adapters["layers"]) + adapters["rest"]
        whole = card["parameters"] - left_out
        also = f" and {format_count(whole)} of its own" if whole else ""
        return f"{words} ({format_count(beside)} trained beside them in adapters of rank {adapters['rank']}{also})"
    return f"{words} ({format_count(card['parameters'] - left_out)} trained, {format_count(left_out)} frozen)"


def _headline(plan: Mapping[str, Any], card: Mapping[str, Any], console: Console) -> None:
    name = card.get("name") or card.get("model") or "model"
    facts = [
        _parameter_words(card) if card.get("parameters") else "",
        f"{card['layers']} layers" if card.get("layers") else "",
        f"vocabulary {card['vocabulary_rows']:,}" if card.get("vocabulary_rows") else "",
    ]
    line = Text(str(name), style="bold")
    line.append(" " + ", ".join(filter(None, facts)), style="not bold")
    line.append(f" on {plan['fleet']}", style="not bold")
    print_line(console, line)
    verdict = Text("fits: " if plan["fits"] else "does not fit: ", style="bold green" if plan["fits"] else "bold red")
    verdict.append(_fit_words(plan), style="not bold default")
    print_line(console, verdict)
    if full := plan.get("full_training"):
        fits = "fits too" if full["fits"] else "does not fit"
        memory, speed = format_bytes(full["total_bytes_per_rank"]), format_rate(full["tokens_per_second"])
        trained = f"all {format_count(full['parameters'])} parameters trained instead, without adapters"
        print_line(console, f"{trained}: {memory} per rank ({full['engine']}), {speed}; {fits}")


def _fit_words(plan: Mapping[str, Any]) -> str:
    memory = plan["memory_bytes_per_rank"]
    total, limit = memory["total"], memory["limit"]
    words = (
        f"{format_bytes(total)} of {format_bytes(limit)} per rank ({format_percent(total / limit if limit else None)})"
    )
    return words if plan["fits"] else f"{words}, {format_bytes(plan['shortfall_bytes'])} too much"


def _memory(plan: Mapping[str, Any], console: Console) -> None:
    memory, phases = plan["memory_bytes_per_rank"], plan.get("memory_by_phase") or {}
    limit, total = memory["limit"], memory["total"]
    parts = [(label, memory.get(name) or 0) for name, label in MEMORY_PARTS.items() if memory.get(name)]
    totals = [(PHASE_NAMES.get(name, name), part["total"]) for name, part in phases.items()]
    print_heading(console, "Memory per rank, in the phase that needs most")
    by_phase = "by phase: " + ", ".join(f"{label} {format_bytes(size)}" for label, size in totals)
    if not console.is_terminal:
        rows = [*parts, ("total", total), ("limit", limit)]
        print_rows(console, "memory per rank", ("", ""), [(label, format_bytes(size)) for label, size in rows])
        print_line(console, by_phase)
        return
    width = max(10, min(40, console.width - 42))
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(no_wrap=True, justify="right")
    grid.add_column(no_wrap=True)
    scale = max(limit, total)
    for label, size in parts:
        grid.add_row(label, format_bytes(size), Text(bar(size / scale, width).rstrip("░"), style="cyan"))
    blocks, style = memory_bar(total, limit, width)
    grid.add_row(Text("total", style="bold"), Text(format_bytes(total), style="bold"), Text(blocks, style=style))
    grid.add_row(Text("limit", style="dim"), Text(format_bytes(limit), style="dim"), "")
    console.print(grid)
    print_line(console, by_phase, style="dim")


def _time_and_cost(plan: Mapping[str, Any], console: Console) -> None:
    seconds = plan["step_seconds"]
    print_heading(console, f"Time of a step ({format_seconds(seconds['total'])})")
    exposed = seconds.get("exposed_communication", seconds["communication"])
    split = {"compute": seconds["compute"], "communication": exposed, "optimizer": seconds.get("optimizer")}
    render_split(split, console, "where a step goes")
    hidden = seconds["communication"] - exposed
    shared = plan.get("shared_bytes_per_step_per_rank")
    moved = shared or plan["wire_bytes_per_step_per_rank"]
    if moved:
        took = format_seconds(seconds["communication"])
        behind = f", {format_seconds(hidden)} of it hidden" if hidden > 0 else ""
        way = "through memory" if shared else "on the wire"
        print_line(console, f"{way}: {format_bytes(moved)} per step and rank in {took}{behind}")
    utilization = plan["tokens_per_second"] * plan["model_flops_per_token"] / plan["matmul_flops_per_second"]
    print_line(
        console,
        f"speed: {', '.join(_rates(plan))}, utilization {format_percent(utilization)}"
        f" of {format_flops(plan['matmul_flops_per_second'])}",
    )
    cost = [_length(plan)] if plan.get("steps") else []
    if plan.get("usd_per_hour") is not None:
        which = f" ({plan['price_words']})" if plan.get("price_words") else ""
        cost.append(f"{format_usd(plan['usd_per_hour'])} per hour{which}")
    if plan.get("usd") is not None:
        cost.append(f"{format_usd(plan['usd'])} in all")
    if cost:
        print_line(console, "run: " + ", ".join(cost))
    if words := length_in_words(plan):
        print_line(console, words, style="yellow" if plan["steps_estimated"] or not plan["steps"] else "")
    if save := plan.get("save"):
        rate = f"an assumed {format_bytes(save['bytes_per_second'])}/s"
        took, grace = format_seconds(save["seconds"]), format_seconds(save["grace_seconds"]["value"])
        print_line(console, f"a checkpoint: {format_bytes(save['bytes'])} in {took} at {rate}; a stop gives it {grace}")


def _choice_rows(plan: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    return [
        (name.replace("_", " "), _show_value(choice["value"]), str(choice["reason"]))
        for name, choice in plan.items()
        if _is_choice(choice)
    ]


def _remedies(plan: Mapping[str, Any], console: Console) -> None:
    print_heading(console, "What would make it fit" if not plan["fits"] else "What else is possible")
    for remedy in plan["remedies"]:
        price = f", {format_usd(remedy['usd'])}" if remedy.get("usd") is not None else ""
        memory, speed = format_bytes(remedy["total_bytes_per_rank"]), format_rate(remedy["tokens_per_second"])
        how = " ".join(f"--set {setting}" for setting in remedy["settings"])
        text = f"{remedy['change']}: {memory} per rank, {speed}{price}" + (f" ({how})" if how else "")
        print_line(console, f"- {text}")


def _is_choice(value: Any) -> bool:
    return isinstance(value, Mapping) and set(value) == {"value", "reason"}


def _length(plan: Mapping[str, Any]) -> str:
    """800 steps in 3h 05m; of a run that goes on what is left."""
    return f"{'about ' if plan.get('steps_estimated') else ''}{_steps_left(plan)} in {_duration(plan)}"


def _steps_left(plan: Mapping[str, Any]) -> str:
    steps, done = plan["steps"], plan.get("steps_done") or 0
    return f"{max(0, steps - done):,} of {steps:,} steps left" if done else plural(steps, "step")


def length_in_words(plan: Mapping[str, Any]) -> str:
    """Where the steps of a run come from that gives its length in epochs; empty where they were set."""
    if not plan.get("steps_words"):
        return ""
    steps = plan.get("steps")
    if not steps:
        return f"number of steps: {plan['steps_words']}"
    how = "estimated" if plan.get("steps_estimated") else "counted"
    return f"number of steps, {how}: {plan['steps_words']}"


def run_in_words(plan: Plan, train_rows: int) -> str:
    """How long a run is once its rows are counted: steps, epochs, time and money."""
    assert plan.steps is not None
    epochs, document = format_epochs(plan.steps * plan.rows_per_step / train_rows), plan.to_json()
    in_epochs = f"{epochs} {'epoch' if epochs == '1' else 'epochs'}{' in all' if plan.steps_done else ''}"
    cost = f", {format_usd(document['usd'])}" if document["usd"] is not None else ""
    return f"run: {_steps_left(document)}, {in_epochs}, {_duration(document)} at the planned speed{cost}"


def _duration(plan: Mapping[str, Any]) -> str:
    hours = plan.get("hours")
    return format_seconds(None if hours is None else hours * 3600)


def _many(count: int, one: str, many: str | None = None) -> str:
    return f"{count} {one if count == 1 else many or one + 's'}"


def _show_value(value: Any) -> str:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def _hanging(line: Text, width: int) -> Table:
    """A label with its text wrapped beside it, not under it."""
    grid = Table.grid(padding=0)
    grid.add_column(width=width, no_wrap=True)
    grid.add_column()
    grid.add_row(line[:width], line[width:])
    return grid

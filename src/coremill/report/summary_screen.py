"""The end-of-run screen, also `coremill report RUN`: plan beside measured, where the time went, what next."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.text import Text

from coremill.plan.words import plural
from coremill.report.loss_plot import render_loss_plot
from coremill.report.metrics import (
    format_metric,
    in_words,
    loading_expression,
    loading_lines,
    memory_beside_plan,
    metric_names,
    model_class_of,
    pages_of_libraries,
)
from coremill.report.sources import kind_of_documents
from coremill.report.terminal import (
    bar,
    format_bytes,
    format_count,
    format_difference,
    format_flops,
    format_loss,
    format_percent,
    format_rate,
    format_seconds,
    format_share,
    format_usd,
    print_heading,
    print_line,
    print_rows,
    print_verbatim,
)
from coremill.report.timeline import render_timeline

SPLIT_STYLES = {
    "compute": "cyan",
    "communication": "magenta",
    "optimizer": "yellow",
    "data": "green",
    "other": "bright_black",
}
SHOWN_FINDINGS = 8
_STATE_STYLES = {"finished": "bold green", "running": "bold cyan", "failed": "bold red", "stopped": "bold yellow"}


def render_summary(summary: Mapping[str, Any], console: Console) -> None:
    """Show a summary; on a terminal as one screen, elsewhere as lines that are never wrapped."""
    _headline(summary, console)
    _plan_beside_measured(summary, console)
    split = summary["measured"]["step_seconds"]
    if split.get("total"):
        print_heading(console, f"Where a step went ({format_seconds(split['total'])})")
        render_split(split, console, "where a step went")
        if parts := parts_line(summary):
            print_line(console, parts)
        rows = collective_rows(summary)
        if rows:
            print_rows(console, "exchanges of a step", ("exchange", "moved", "took", "not hidden"), rows)
    render_timeline(summary.get("faults") or (), console)
    _sources(summary, console)
    _evaluations(summary, console)
    _findings(summary, console)
    render_loss_plot(summary, console)
    _sample(summary, console)
    _next_steps(summary, console)


def render_split(split: Mapping[str, float | None], console: Console, part: str) -> None:
    """The seconds of a step as one stacked bar with its legend; elsewhere as one line."""
    parts = [(name, split.get(name) or 0.0) for name in SPLIT_STYLES if (split.get(name) or 0.0) > 0]
    total = sum(seconds for _, seconds in parts)
    if not total:
        return
    legend = [f"{name} {format_seconds(seconds)} ({format_percent(seconds / total)})" for name, seconds in parts]
    if not console.is_terminal:
        print_line(console, f"{part}: " + ", ".join(legend))
        return
    width = min(72, console.width)
    line, drawn = Text(), 0
    for index, (name, seconds) in enumerate(parts):
        cells = width - drawn if index == len(parts) - 1 else min(width - drawn, round(width * seconds / total))
        line.append("█" * cells, style=SPLIT_STYLES[name])
        drawn += cells
    console.print(line)
    words = Text()
    for (name, _), label in zip(parts, legend, strict=True):
        if words and len(words) + len(label) + 4 > console.width:
            console.print(words)
            words = Text()
        words.append("  " if words else "").append("■ ", style=SPLIT_STYLES[name]).append(label)
    console.print(words)


PART_WORDS = {"products": "matmul", "between": "norms and elementwise", "update": "optimizer"}


def parts_line(summary: Mapping[str, Any]) -> str:
    """What a step computes, as shares; empty before there is a step of which it is known."""
    parts = summary["measured"].get("step_parts") or {}
    total = sum(parts.values())
    shares = [
        f"{PART_WORDS.get(name, name)} {format_percent(seconds / total)}"
        for name, seconds in parts.items()
        if seconds >= 0.001 * total
    ]
    return f"by part: {', '.join(shares)}" if total else ""


COLLECTIVE_WORDS = {
    "gather": "weights gathered",
    "reduce_scatter": "gradients summed and scattered",
    "all_reduce": "gradients summed",
    "agreement": "loss, norm and votes",
}


def collective_rows(summary: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    """One row per kind of exchange: what it is, bytes, seconds, seconds that compute did not hide."""
    return [
        (
            COLLECTIVE_WORDS.get(kind, kind),
            f"{format_bytes(use['shared_bytes'])} in memory" if use.get("shared_bytes") else format_bytes(use["bytes"]),
            format_seconds(use["seconds"]),
            format_seconds(use["exposed_seconds"]),
        )
        for kind, use in (summary["measured"].get("collectives") or {}).items()
    ]


def _headline(summary: Mapping[str, Any], console: Console) -> None:
    state, steps, planned = summary["state"], summary["steps"], summary.get("steps_planned")
    done = f"{steps:,} of {plural(planned, 'step')}" if planned and planned != steps else plural(steps, "step")
    line = Text()
    line.append(state, style=_STATE_STYLES.get(state, "bold"))
    line.append(f"  {done} in {format_seconds(summary['seconds'])}")
    if steps:
        line.append(f", loss {format_loss(summary['loss_first'])} -> ")
        line.append(format_loss(summary["loss_last"]), style="bold")
    print_line(console, line)
    for text in (_data_line(summary), _pause_line(summary)):
        if text:
            print_line(console, text)
    error = summary.get("error")
    if error:
        who = f"rank {error['rank']}: " if error.get("rank") is not None else ""
        for text in str(error.get("message") or "no message").splitlines():
            print_line(console, f"  {who}{text}", style="red" if state == "failed" else "yellow")
            who = ""


def _data_line(summary: Mapping[str, Any]) -> str:
    rows, epochs = (summary.get("data") or {}).get("train_rows"), summary.get("epochs")
    if not rows or not epochs:
        return ""
    return f"trained on {format_count(summary['tokens'])} tokens: {epochs:.2f} epochs of {format_count(rows)} rows"


def _pause_line(summary: Mapping[str, Any]) -> str:
    count, seconds = summary.get("pauses") or 0, format_seconds(summary.get("pause_seconds"))
    if count < 2:
        return f"a pause of {seconds} between a stop and its continuation is not counted" if count else ""
    return f"{count} pauses between a stop and its continuation, {seconds} together, are not counted"


def _plan_beside_measured(summary: Mapping[str, Any], console: Console) -> None:
    plan, measured = summary["plan"], summary["measured"]
    wanted = (
        ("tokens per second", "tokens_per_second", lambda value: format_rate(value, "")),
        ("step time", "step_seconds", format_seconds),
        ("peak memory per rank", "memory_bytes_per_rank", format_bytes),
        ("on the wire per step and rank", "wire_bytes_per_step_per_rank", format_bytes),
    )
    rows = []
    for label, key, show in wanted:
        planned, came_out = plan.get(key), measured.get(key)
        if key == "step_seconds":
            planned, came_out = (planned or {}).get("total"), (came_out or {}).get("total")
        of_memory = key == "memory_bytes_per_rank"
        comparable = memory_beside_plan(measured) if of_memory else came_out
        if planned or came_out:
            rows.append((label, show(planned), show(came_out), format_difference(comparable, planned)))
        if of_memory and planned and (libraries := pages_of_libraries(summary, show)) is not None:
            rows.append(libraries)
    limit = plan.get("memory_limit_bytes_per_rank")
    if limit:
        rows.append(("memory limit per rank", format_bytes(limit), "", ""))
    for label, text in (
        ("utilization of matmul", _utilization(summary)),
        ("padding", format_percent(summary["padding_fraction"])),
        ("goodput (steps / wall time)", format_percent(summary["goodput"])),
        ("reading weights", _loading(summary)),
    ):
        rows.append((label, "", text, ""))
    cost = summary.get("cost")
    if cost:
        spent, said = cost["usd"], cost["planned_usd"]
        rows.append(("dollars", format_usd(said), format_usd(spent), format_difference(spent, said)))
    console.print()
    print_rows(console, "", ("", "plan", "measured", "difference"), rows)
    if cost:
        print_line(console, cost_words(cost))


def cost_words(cost: Mapping[str, Any]) -> str:
    """What was paid for, and at which price."""
    restarts = f"{cost['restarts']} restart{'' if cost['restarts'] == 1 else 's'}"
    return (
        f"{cost['nodes']} x {cost['instance']} for {format_seconds(3600 * cost['hours'])}, {restarts} included, at"
        f" {format_usd(cost['usd_per_hour'])} per hour ({cost['price_words']}); booting nodes come on top"
    )


def _utilization(summary: Mapping[str, Any]) -> str:
    if summary["utilization"] is None:
        return "-"
    return f"{format_percent(summary['utilization'])} of {format_flops(summary['matmul_flops_per_second'])}"


def _loading(summary: Mapping[str, Any]) -> str:
    read = [size for size in summary["bytes_read_per_rank"] if size is not None]
    if not read:
        return "-"
    what = format_bytes(max(read)) if max(read) else "none, made"
    return f"{what} in {format_seconds(summary['load_seconds'])}"


def _sources(summary: Mapping[str, Any], console: Console) -> None:
    sources = summary.get("sources") or []
    if not sources:
        return
    rows = [
        (
            str(source["name"]),
            "by size" if source["share_asked"] is None else format_share(source["share_asked"]),
            format_share(source["share_got"]),
            format_count(source["documents"]),
            format_count(source["rows"]),
            f"{source['passes']:.2f}",
        )
        for source in sources
    ]
    print_heading(console, "Sources")
    columns = ("", "share", "came out", kind_of_documents(summary.get("data") or {}), "rows", "passes")
    print_rows(console, "source", columns, rows)


def _evaluations(summary: Mapping[str, Any], console: Console) -> None:
    evaluations = summary["evaluations"]
    if not evaluations:
        return
    shown = evaluations if len(evaluations) <= 4 else [evaluations[0], *evaluations[-3:]]
    names = metric_names(evaluations[-1])
    rows = [
        (f"step {one['step']}", format_loss(one["loss"]), *(format_metric(one.get(name)) for name in names))
        for one in shown
    ]
    print_heading(console, "Evaluation")
    print_rows(console, "evaluation", ("", "loss", *(in_words(name) for name in names)), rows)
    if left_out := len(evaluations) - len(shown):
        between = f"between step {shown[0]['step']} and step {shown[1]['step']}"
        print_line(console, f"... {left_out:,} more {between}: coremill report {summary['run']} --json has all")
    best, early = summary.get("best"), summary.get("early_stop")
    if best and len(evaluations) > 1:
        told = [f"{in_words(name)} {format_metric(best['metrics'][name])}" for name in names]
        found = ", ".join([f"loss {format_loss(best['metrics']['loss'])}", *told])
        print_line(console, f"best: step {best['step']}, {found}")
    if early:
        print_line(console, f"ended early, after step {early['step']}: {early['text']}")
    if words := (summary.get("data") or {}).get("evaluation_words"):
        console.print(words, soft_wrap=True, highlight=False, markup=False)


def _findings(summary: Mapping[str, Any], console: Console) -> None:
    findings = summary.get("findings") or []
    if not findings:
        return
    print_heading(console, "Look at")
    for text in findings[:SHOWN_FINDINGS]:
        print_line(console, text, style="yellow")
    if len(findings) > SHOWN_FINDINGS:
        print_line(console, f"and {len(findings) - SHOWN_FINDINGS} more: coremill report {summary['run']} --json")


def _sample(summary: Mapping[str, Any], console: Console) -> None:
    sample = summary.get("sample")
    if not sample:
        return
    prompt, completion = str(sample.get("prompt") or ""), str(sample.get("completion") or "")
    if not console.is_terminal:
        print_line(console, f"sample: {prompt!r} -> {completion!r}")
        return
    print_heading(console, "Sample")
    console.print(Text(prompt, style="dim") + Text(completion))


def _next_steps(summary: Mapping[str, Any], console: Console) -> None:
    export, run = summary.get("export"), summary["run"]
    print_heading(console, "Next")
    if export:
        folder = str(export["folder"])
        model_class = model_class_of(summary)
        is_adapter = export.get("form") == "adapter"
        base = export.get("base") if is_adapter else None
        which = f" of step {export['step']}, {export['reason']}" if export.get("reason") else ""
        size = format_bytes(export.get("bytes"))
        if console.is_terminal:
            what = "Adapter" if is_adapter else "Model"
            kind = "a folder that peft loads" if is_adapter else "a plain Hugging Face folder"
            print_line(console, f"{what}{which}, {size}, {kind}:")
            for line in filter(None, loading_lines(model_class, folder, base)):
                print_verbatim(console, f"  {line}", style="cyan")
        else:
            load = loading_expression(model_class, folder, base)
            print_line(console, f"export{which}: {folder} ({size}), load it with {load}")
        if is_adapter:
            print_verbatim(console, f"whole model: coremill export {shlex.quote(run)} FOLDER --merged")
    if summary.get("state") == "running":
        print_verbatim(console, f"page: coremill report {shlex.quote(run)} --html FILE")
    else:
        print_verbatim(console, f"page: {run}/report.html")
    print_verbatim(console, f"numbers: coremill report {shlex.quote(run)} --json")


def memory_bar(used: float, limit: float, width: int) -> tuple[str, str]:
    """A bar of use against the limit, and the style that says how near it is."""
    share = used / limit if limit else 0.0
    return bar(share, width), "red" if share > 1 else "yellow" if share > 0.9 else "green"

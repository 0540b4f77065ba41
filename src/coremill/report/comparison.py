"""Several runs side by side: their figures, what differs in their configs, and how right each plan was.

Made from summaries alone, as JSON, on the screen, and for the page. Which run is best is said by the loss on held-out
text where all have it, else by the last training loss; where the text or the model differs, losses say little about
each other, and that is said too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from coremill.config.layers import within
from coremill.config.show import scalar_text
from coremill.errors import InputError
from coremill.report.metrics import memory_beside_plan
from coremill.report.subject import config_values
from coremill.report.terminal import (
    NONE,
    format_bytes,
    format_loss,
    format_percent,
    format_rate,
    format_seconds,
    print_heading,
    print_line,
    print_rows,
    print_values,
    print_verbatim,
)

RIGHT_WITHIN = 0.10  # of the planned value
SAME_SPEED_WITHIN = 0.02  # the same command twice differs by as much
MEMORY = "memory_bytes_per_rank"
PLANNED = ("tokens_per_second", "step_seconds", MEMORY)
ALWAYS_DIFFERENT = ("run.folder",)
WHAT_A_LOSS_IS_OF = ("data.", "tokenizer", "task", "train.seed")  # of which rows, in which tokens

Values = Mapping[str, Any]


def compare(summaries: Sequence[Values]) -> dict[str, Any]:
    """What `coremill report RUN1 RUN2 ... --json` prints."""
    names = names_of([Path(summary["run"]) for summary in summaries])
    runs = [_row(name, summary) for name, summary in zip(names, summaries, strict=True)]
    differences = config_differences([summary.get("config") for summary in summaries])
    best_by = "evaluation" if all(run["best"] for run in runs) else "training"
    # The best step of a run may be that of another metric.
    losses = {name: _lowest_loss(summary) for name, summary in zip(names, summaries, strict=True)}
    lowest = losses if best_by == "evaluation" else {run["name"]: run["loss_last"] for run in runs}
    return {
        "runs": runs,
        "config_differences": differences,
        "lowest_loss": {"run": _least(lowest), "of": best_by},
        "fastest": {
            "planned": _most({run["name"]: run["plan"]["tokens_per_second"] for run in runs}),
            "measured": _most({run["name"]: run["measured"]["tokens_per_second"] for run in runs}),
        },
        "closest_plan": _least({run["name"]: _worst(run["plan_error"].values()) for run in runs}),
        "notes": _notes(differences),
    }


def names_of(folders: Sequence[Path]) -> list[str]:
    """Short names that tell the runs apart: the last parts of their paths."""
    whole = [folder.absolute() for folder in folders]
    for parts in range(1, max(len(folder.parts) for folder in whole) + 1):
        names = ["/".join(folder.parts[-parts:]) for folder in whole]
        if len(set(names)) == len(names):
            return names
    raise InputError("the same run is named twice", where=f"{_first_twice(whole)}", do="name different run folders")


def config_differences(texts: Sequence[str | None]) -> list[dict[str, Any]]:
    """Keys whose values are not the same in all, in the order of the run file; null where a config lacks the key."""
    flat = [_in_force(dict(_leaves(config_values(text), ""))) for text in texts]
    keys = dict.fromkeys(key for config in flat for key in config)
    found = [(key, [config.get(key) for config in flat]) for key in keys if key not in ALWAYS_DIFFERENT]
    return [{"key": key, "values": values} for key, values in found if any(value != values[0] for value in values)]


def _in_force(config: dict[str, Any]) -> dict[str, Any]:
    """Without the default of a key in whose place another one is given: it says nothing about the run."""
    replaced = {"data.source": "data.sources", "model.name": "model.config"}
    return {
        key: value
        for key, value in config.items()
        if key not in replaced or not any(within(other, replaced[key]) and config[other] for other in config)
    }


def render_comparison(document: Values, console: Console, page: Path | None = None) -> None:
    """On the screen: tables on a terminal, lines elsewhere."""
    runs = document["runs"]
    print_heading(console, f"{len(runs)} runs")
    heads: tuple[str, ...] = ("", "state", "steps", "loss", "best evaluation", "tokens/s", "time", "memory/rank")
    print_rows(console, "run", heads, [figures(run) for run in runs])
    print_heading(console, "Plan beside measured")
    heads = ("", "tokens/s planned", "measured", "off by", "memory planned", "measured", "off by")
    print_rows(console, "plan", heads, [plan_figures(run) for run in runs])
    if document["config_differences"]:
        print_heading(console, "What differs in the configs")
        names = [run["name"] for run in runs]
        print_values(console, ("", *names), difference_rows(document))
    print_heading(console, "In short")
    for line in verdicts(document):
        print_line(console, line)
    folders = " ".join(run["run"] for run in runs)
    print_verbatim(console, f"page: {page or f'coremill report {folders} --html FILE'}")


def figures(run: Values) -> tuple[str, ...]:
    """A run in the first table."""
    best = run["best"]
    return (
        run["name"],
        run["state"],
        f"{run['steps']:,}",
        format_loss(run["loss_last"]),
        NONE if best is None else f"{format_loss(best['loss'])} at step {best['step']:,}",
        format_rate(run["measured"]["tokens_per_second"], ""),
        format_seconds(run["seconds"]),
        format_bytes(run["measured"]["memory_bytes_per_rank"]),
    )


def plan_figures(run: Values) -> tuple[str, ...]:
    """A run in the table of plans."""
    plan, measured, off = run["plan"], run["measured"], run["plan_error"]
    return (
        run["name"],
        format_rate(plan["tokens_per_second"], ""),
        format_rate(measured["tokens_per_second"], ""),
        _signed(off["tokens_per_second"]),
        format_bytes(plan["memory_bytes_per_rank"]),
        format_bytes(run["memory_bytes_per_rank_as_planned"]),
        _signed(off["memory_bytes_per_rank"]),
    )


def difference_rows(document: Values) -> list[tuple[str, ...]]:
    """What differs, as text: the key, then a value for each run."""
    return [
        (one["key"], *(NONE if value is None else scalar_text(value) for value in one["values"]))
        for one in document["config_differences"]
    ]


def verdicts(document: Values) -> list[str]:
    """What the tables amount to, in sentences."""
    lowest, fastest = document["lowest_loss"], document["fastest"]
    lines = []
    if lowest["run"]:
        what = "loss on held-out data" if lowest["of"] == "evaluation" else "training loss at the end"
        lines.append(f"lowest {what}: {lowest['run']}")
    if fastest["planned"] and fastest["measured"]:
        lines.append(_verdict_on_speed(document["runs"], fastest["planned"], fastest["measured"]))
    verdict_by_run = {run["name"]: _verdict_on_plan(run) for run in document["runs"]}
    if len(set(verdict_by_run.values())) == 1:
        lines.append(f"all runs: {verdict_by_run[document['runs'][0]['name']]}")
    else:
        lines += [f"{name}: {verdict}" for name, verdict in verdict_by_run.items()]
    return [*lines, *document["notes"]]


def _verdict_on_speed(runs: Sequence[Values], planned: str, measured: str) -> str:
    """Which run the plans took for the fastest, and which was; what lies within noise is no difference."""
    expected, found = (_hardly_slower(runs, side) for side in ("plan", "measured"))
    if len(expected) == len(runs):
        is_so = len(found) == len(runs)
        came = "and there is hardly one" if is_so else f"but {measured} was the fastest"
        return f"speed: the plans expected no difference, {came}"
    if planned == measured or (planned not in found and measured not in expected):
        return (
            f"fastest: the plans said {planned}, {'and so it came' if planned == measured else f'but {measured} was'}"
        )
    if planned in found:
        return f"fastest: the plans said {planned}, but there is hardly a difference"
    return f"fastest: the plans said {' or '.join(expected)}, and {measured} was"


def _hardly_slower(runs: Sequence[Values], side: str) -> list[str]:
    """Those that are as fast as the fastest, within noise; `side`: plan or measured."""
    rates = {run["name"]: run[side]["tokens_per_second"] or 0.0 for run in runs}
    return [name for name, rate in rates.items() if rate > (1 - SAME_SPEED_WITHIN) * max(rates.values())]


def _verdict_on_plan(run: Values) -> str:
    off = {name: value for name, value in run["plan_error"].items() if value is not None and name != "step_seconds"}
    if not off:
        return "nothing measured yet to hold the plan against"
    wrong = [
        f"{_WORDS[name]} {format_percent(abs(value))} {'above' if value > 0 else 'below'} plan"
        for name, value in off.items()
        if abs(value) > RIGHT_WITHIN
    ]
    return ", ".join(wrong) if wrong else f"the plan was right, speed and memory within {format_percent(RIGHT_WITHIN)}"


_WORDS = {"tokens_per_second": "speed", MEMORY: "memory"}


def _row(name: str, summary: Values) -> dict[str, Any]:
    planned, measured = ({key: _total(summary[side].get(key)) for key in PLANNED} for side in ("plan", "measured"))
    as_planned = memory_beside_plan(summary["measured"])
    keys = ("run", "state", "exit_code", "steps", "steps_planned", "seconds", "tokens", "loss_first", "loss_last")
    return {
        "name": name,
        **{key: summary[key] for key in (*keys, "utilization", "world_size", "subject")},
        "best": _best(summary),
        "plan": planned,
        "measured": measured,
        "memory_bytes_per_rank_as_planned": as_planned,
        "plan_error": {key: _off(as_planned if key == MEMORY else measured[key], planned[key]) for key in PLANNED},
    }


def _total(value: Any) -> float | None:
    return value.get("total") if isinstance(value, Mapping) else value


def _off(measured: float | None, planned: float | None) -> float | None:
    """How far the measured value is from the planned one, as a share of that; as on every other screen."""
    return measured / planned - 1 if measured is not None and planned else None


def _lowest_loss(summary: Values) -> float | None:
    """Of its evaluations."""
    return min((one["loss"] for one in summary["evaluations"] if one["loss"] is not None), default=None)


def _best(summary: Values) -> dict[str, Any] | None:
    """The evaluation that the run itself calls its best, else that with the lowest loss."""
    if told := summary.get("best"):
        return {"step": told["step"], **told["metrics"]}
    known = [one for one in summary["evaluations"] if one["loss"] is not None]
    return dict(min(known, key=lambda one: float(one["loss"]))) if known else None


def _notes(differences: Sequence[Values]) -> list[str]:
    keys = [one["key"] for one in differences if one["key"].startswith(WHAT_A_LOSS_IS_OF)]
    if not keys:
        return []
    return [f"losses may not be of the same text: {', '.join(keys[:4])}{' and more' if len(keys) > 4 else ''} differ"]


def _leaves(tree: Values, above: str) -> Iterable[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def _least(values: Mapping[str, float | None]) -> str | None:
    known = {name: value for name, value in values.items() if value is not None}
    return min(known, key=lambda name: known[name]) if known else None


def _most(values: Mapping[str, float | None]) -> str | None:
    return _least({name: None if value is None else -value for name, value in values.items()})


def _worst(errors: Iterable[float | None]) -> float | None:
    return max((abs(error) for error in errors if error is not None), default=None)


def _signed(share: float | None) -> str:
    if share is None:
        return NONE
    return f"{100 * share:+.1f} %" if abs(share) < 0.0995 else f"{100 * share:+.0f} %"


def _first_twice(folders: Sequence[Path]) -> Path:
    return next(folder for folder in folders if folders.count(folder) > 1)

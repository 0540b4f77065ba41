"""What a run amounts to: the keys of `coremill report RUN --json`, made from config.yaml, plan.json and the events.

Works on a run that is still going and on one that failed: a number that is not known yet is null, a list by rank
holds null for a rank that has not said it. The page and the closing screen are drawn from this dictionary alone.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import accumulate
from pathlib import Path
from typing import Any

from coremill.errors import InputError
from coremill.hardware.process_memory import MAPPED_FILE_BYTES
from coremill.redaction import redact
from coremill.report.cost import cost_of
from coremill.report.events import Event, events_folder, iter_events, no_such_run, not_a_run
from coremill.report.history import SERIES_POINTS, Point, point_of, thinned
from coremill.report.marks import marks_of
from coremill.report.metrics import metric_names
from coremill.report.planned import MEMORY_PHASES, planned_figures
from coremill.report.sources import source_figures
from coremill.report.state import state_of
from coremill.report.subject import subject_of
from coremill.report.tally import COLLECTIVE_FIGURES, SPLIT, RankTally, RunTally
from coremill.report.timeline import timeline
from coremill.report.weights import weight_findings

DATA_COUNTS = (
    *("documents", "evaluation_documents", "train_rows", "evaluation_rows", "tokens", "dropped_tokens"),
    *("evaluation_words", "learn"),
)
EXPORT_FIELDS = ("folder", "bytes", "seconds", "step", "reason", "form", "base")


def summarise(run_folder: Path | str, *, exit_code: int | None = None) -> dict[str, Any]:
    """Everything known about a run so far, ready for JSON; `exit_code`: what its ranks ended with, where that is known.

    `state` and `exit_code` of the summary are one finding: 0 goes with finished, and with nothing else.
    """
    folder = Path(run_folder)
    tally = RunTally(read_plan(folder))
    for event in iter_events(folder):
        tally.add(event)
    return summary_of(folder, tally, exit_code=exit_code)


def read_plan(folder: Path) -> dict[str, Any]:
    """What was planned for the run in this folder; a folder without a run is refused."""
    if not folder.is_dir():
        raise no_such_run(folder)
    plan = _read_json(folder / "plan.json")
    if not plan and not events_folder(folder).is_dir():
        raise not_a_run(folder)
    return plan


def summary_of(folder: Path, tally: RunTally, *, exit_code: int | None = None) -> dict[str, Any]:
    """The same of a run whose events were counted."""
    config, orders = _read_text(folder / "config.yaml"), _read_json(folder / "orders.json")
    faults = timeline(tally.faults, tally.restarts, tally.first_time)
    planned = planned_figures(tally.plan)
    document = {
        "run": str(folder),
        "subject": subject_of(redact(config or ""), orders),
        **state_of(tally, exit_code),
        **_figures(tally),
        "plan": planned,
        "measured": _measured(tally),
        "cost": cost_of(tally, config, planned["hours"]),
        "data": None if tally.data is None else {name: tally.data.get(name) for name in DATA_COUNTS},
        "metrics": _metrics(tally.evaluations.get(max(tally.evaluations, default=0))),
        "best": _best(tally),
        "early_stop": None if (early := tally.early_stop) is None else {k: early.get(k) for k in ("step", "text")},
        "sources": _sources(tally),
        "evaluations": [_evaluation(tally.evaluations[step]) for step in sorted(tally.evaluations)],
        "sample": _sample(tally),
        "export": None if tally.export is None else {name: tally.export.get(name) for name in EXPORT_FIELDS},
        "faults": faults,
        "marks": marks_of(tally, faults),
        "choices": _choices(tally),
        **_findings(tally),
        "ranks": [_rank_row(tally, rank) for rank in range(tally.world_size)],
        "wall_seconds_split": _wall_split(tally),
        "environment": _environment(tally),
        "series": _series(tally),
        "config": redact(config or "") or None,
    }
    cleaned: dict[str, Any] = _json_ready(document)
    return cleaned


def _figures(tally: RunTally) -> dict[str, Any]:
    """The headline keys; their names and definitions are a contract with everybody who reads report.json."""
    rate = tally.tokens_per_second()
    ranks = [tally.ranks.get(rank) for rank in range(tally.world_size)]
    loads = [rank.load if rank is not None else None for rank in ranks]
    losses = [tally.past.first_loss] if tally.past.has_first_loss else []
    losses += [tally.steps[step].loss for step in sorted(tally.steps) if not tally.steps[step].skipped]
    return {
        "steps": tally.last_step,
        "steps_planned": tally.plan.get("steps"),
        "epochs": tally.epochs(tally.last_step),
        "seconds": tally.wall_seconds,
        "pauses": len(tally.pauses),
        "pause_seconds": math.fsum(until - since for since, until in tally.pauses),
        "goodput": tally.goodput,
        "tokens": tally.past.tokens + sum(int(record.tokens) for record in tally.steps.values()),
        "tokens_per_second": rate,
        **_samples_per_second(tally),
        "padding_fraction": tally.padding_fraction,
        "model_flops_per_second": tally.model_flops_per_second(rate),
        "matmul_flops_per_second": tally.plan.get("matmul_flops_per_second"),
        "utilization": tally.utilization(rate),
        "loss_first": losses[0] if losses else None,
        "loss_last": losses[-1] if losses else None,
        "load_seconds": max((float(load.get("seconds") or 0) for load in loads if load), default=None),
        "bytes_read_per_rank": [load.get("bytes_read") if load else None for load in loads],
        "peak_rss_bytes_per_rank": [rank.peak_rss_bytes or None if rank else None for rank in ranks],
        "peak_rss_bytes_at_load_per_rank": [load.get("peak_rss_bytes") if load else None for load in loads],
        "wire_bytes_per_step_per_rank": [rank.wire_bytes_per_step if rank else None for rank in ranks],
        "world_size": tally.world_size,
    }


def _sources(tally: RunTally) -> list[dict[str, Any]]:
    """Several sources that are mixed, up to the last step done; none where the run has one."""
    sources = [] if tally.data is None else list(tally.data.get("sources") or ())
    last = tally.steps.get(tally.last_step)
    if not sources or last is None:
        return source_figures(sources, 0)
    # Rows of conversations hold more or less: only the plan knows how many there are in a step.
    planned = (tally.plan or {}).get("rows_per_step")
    rows_per_step = planned or round(last.tokens * sources[0]["rows"] / sources[0]["tokens"])
    return source_figures(sources, tally.last_step * rows_per_step)


def _evaluation(event: Event) -> dict[str, Any]:
    """Beside the loss the metrics of its task, by their names."""
    return {name: event.get(name) for name in ("step", "loss", *metric_names(event.fields), "tokens", "seconds")}


def _metrics(evaluation: Event | None) -> dict[str, Any] | None:
    """By name, the loss among them; None before the first evaluation."""
    if evaluation is None:
        return None
    return {name: evaluation.get(name) for name in (*metric_names(evaluation.fields), "loss")}


def _best(tally: RunTally) -> dict[str, Any] | None:
    """As ranks say with each evaluation, by the metric that decides (train/scores.py)."""
    last = tally.evaluations.get(max(tally.evaluations, default=0))
    best = None if last is None else tally.evaluations.get(last.get("best_step"))
    return None if best is None else {"step": int(best.number("step")), "metrics": _metrics(best)}


def _sample(tally: RunTally) -> dict[str, Any] | None:
    if tally.sample is None or tally.sample.get("completion") is None:
        return None
    return {key: tally.sample.get(key) for key in ("prompt", "completion")}


def _findings(tally: RunTally) -> dict[str, Any]:
    """What a reader should look at: numbers that were none, losses far above the usual; `findings` in words."""
    spikes = tally.past.spikes((step, tally.steps[step].loss) for step in sorted(tally.steps))
    told = [tally.non_finite[key] for key in sorted(tally.non_finite)]
    lines = [f"{event.get('text')}: {'left out' if event.get('skipped') else 'the run ended here'}" for event in told]
    bad_rows = None if tally.data is None else int(tally.data.number("bad_rows"))
    if bad_rows and tally.data is not None:
        lines.insert(0, str(tally.data.get("bad_rows_words")))
    files = {} if tally.files_load is None else tally.files_load.fields
    lines = [*weight_findings(files), *lines]
    if tally.sample is not None and tally.sample.get("problem"):
        lines.insert(0, f"no sample: {tally.sample.get('problem')}")
    return {
        "weights_drawn": list(files.get("initialised") or ()),
        "weights_unused": list(files.get("unexpected") or ()),
        "bad_rows": bad_rows,
        "skipped_steps": tally.past.skipped + [step for step in sorted(tally.steps) if tally.steps[step].skipped],
        "non_finite": [{key: event.get(key) for key in ("step", "text", "skipped", "culprits")} for event in told],
        "loss_spikes": [asdict(spike) for spike in spikes],
        "findings": [*lines, *(str(spike) for spike in spikes)],
    }


def _samples_per_second(tally: RunTally) -> dict[str, float | None]:
    """Of a run that counts in samples; of others nothing."""
    rows, seconds = tally.plan.get("rows_per_step"), tally.step_seconds()
    if tally.plan.get("samples_per_second") is None:
        return {}
    return {"samples_per_second": rows / seconds if rows and seconds else None}


def _measured(tally: RunTally) -> dict[str, Any]:
    """The same quantities as they came out; the rank with most memory or traffic stands for all."""
    ranks = tally.ranks.values()
    wire = [rank.wire_bytes_per_step for rank in ranks if rank.wire_bytes_per_step is not None]
    return {
        "memory_bytes_per_rank": tally.peak_rss_bytes or None,
        "memory_bytes_by_phase": {
            phase: max((rank.phase_peak_bytes.get(name, 0) for rank in ranks), default=0) or None
            for phase, name in MEMORY_PHASES.items()
        },
        "memory_bytes_per_rank_as_planned": _asplanned_figures(max((rank.own_peak_bytes for rank in ranks), default=0)),
        "mapped_file_bytes_per_rank": max((rank.mapped_file_bytes for rank in ranks), default=0) or None,
        "step_seconds": _split(tally),
        "tokens_per_second": tally.tokens_per_second(),
        **_samples_per_second(tally),
        "wire_bytes_per_step_per_rank": max(wire, default=None),
        "collectives": _collectives(tally),
        "step_parts": _step_parts(tally),
    }


def _asplanned_figures(own_peak_bytes: int) -> int | None:
    """The peak with as many pages of files as every plan counts: how many the kernel maps depends on its cache."""
    return own_peak_bytes + MAPPED_FILE_BYTES if own_peak_bytes else None


def _collectives(tally: RunTally) -> dict[str, dict[str, float | None]]:
    """What each kind of exchange costs in a steady step, mean over ranks: bytes sent, seconds, seconds not hidden."""
    kinds = dict.fromkeys(kind for rank in tally.ranks.values() for kind in rank.collectives)
    return {
        kind: {
            name: _mean(rank.collectives[kind][name].value for rank in tally.ranks.values() if kind in rank.collectives)
            for name in COLLECTIVE_FIGURES
        }
        for kind in kinds
    }


def _step_parts(tally: RunTally) -> dict[str, float] | None:
    """Seconds of a steady step by what is computed, mean over ranks: of products and attention as many for each token
    as in the step that was watched (train/watched_step.py), `between` what is left of the arithmetic."""
    watched = [rank.watched_seconds for rank in tally.ranks.values() if rank.watched_seconds]
    split, steps = _split(tally), len(tally.steps) or 1
    if not watched or (compute := split["compute"]) is None:
        return None
    tokens = math.fsum(record.tokens for record in tally.steps.values()) / steps
    parts = {part: tokens * math.fsum(each[part] for each in watched) / len(watched) for part in watched[0]}
    most = min(1.0, compute / (sum(parts.values()) or 1.0))
    parts = {part: most * seconds for part, seconds in parts.items()}
    parts["between"] = max(0.0, compute - sum(parts.values()))
    return {**parts, "update": split["optimizer"] or 0.0, "waiting": split["communication"] or 0.0}


def _split(tally: RunTally) -> dict[str, float | None]:
    """Mean seconds of a step by what they went into, over steady steps and ranks; `other` is what nobody claimed."""
    total = tally.step_seconds()
    split: dict[str, float | None] = {}
    for name in SPLIT:
        means = [rank.split_seconds[name].value for rank in tally.ranks.values()]
        known = [mean for mean in means if mean is not None]
        split[name] = sum(known) / len(known) if known else None
    claimed = sum(value or 0.0 for value in split.values())
    return {**split, "other": None if total is None else max(0.0, total - claimed), "total": total}


def _choices(tally: RunTally) -> list[dict[str, Any]]:
    """Every automatic decision with its reason: the plan's, then those ranks took themselves."""
    planned = [
        {"name": name, "value": choice["value"], "reason": choice["reason"], "by": "plan"}
        for name, choice in tally.plan.items()
        if isinstance(choice, Mapping) and set(choice) == {"value", "reason"}
    ]
    taken = [
        {"name": name, "value": value, "reason": reason, "by": "every rank" if everybody else f"rank {_ranks(ranks)}"}
        for (name, value, reason), ranks in tally.choices.items()
        for everybody in [len(set(ranks)) >= tally.world_size]
    ]
    return planned + taken


def _ranks(ranks: Iterable[int]) -> str:
    return ", ".join(str(rank) for rank in sorted(set(ranks)))


def _rank_row(tally: RunTally, number: int) -> dict[str, Any]:
    rank = tally.ranks.get(number, RankTally(number))
    load = rank.load or {}
    return {
        "rank": rank.rank,
        "hostname": tally.host_of(number) if number in tally.ranks else None,
        "local_rank": rank.start.get("local_rank"),
        "threads": rank.start.get("threads"),
        "cpus": rank.start.get("cpus"),
        "step": rank.last_step,
        "step_seconds": rank.step_seconds.value,
        "communication_seconds": rank.split_seconds["communication"].value,
        "load_seconds": load.get("seconds"),
        "bytes_read": load.get("bytes_read"),
        "peak_rss_bytes": rank.peak_rss_bytes or None,
        "peak_rss_bytes_by_phase": dict(rank.phase_peak_bytes),
        "wire_bytes_per_step": rank.wire_bytes_per_step,
        "ended": rank.ended,
    }


def _wall_split(tally: RunTally) -> dict[str, float]:
    """Where the wall time of the whole run went, by the slowest rank of each phase; `other` is what nobody claimed."""

    def slowest(phase: str) -> float:
        return max((rank.phase_seconds.get(phase, 0.0) for rank in tally.ranks.values()), default=0.0)

    load = max((float((rank.load or {}).get("seconds") or 0.0) for rank in tally.ranks.values()), default=0.0)
    evaluated = math.fsum(event.number("seconds") for event in tally.evaluations.values())
    exported = tally.export.number("seconds") if tally.export is not None else 0.0
    split = {
        "join": slowest("join"),
        "data": slowest("data"),
        "build": slowest("build"),
        "load": max(slowest("load"), load),
        "steps": tally.past.seconds + math.fsum(record.seconds for record in tally.steps.values()),
        "evaluation": max(slowest("evaluate"), evaluated),
        "export": max(slowest("export"), exported),
        "sample": slowest("sample"),
    }
    return {**split, "other": max(0.0, tally.wall_seconds - math.fsum(split.values()))}


def _environment(tally: RunTally) -> dict[str, Any]:
    starts = [tally.ranks[rank].start for rank in sorted(tally.ranks)]
    first = starts[0] if starts else {}
    return {
        "fleet": tally.plan.get("fleet"),
        "hosts": sorted({host for rank in tally.ranks if (host := tally.host_of(rank))}),
        "world_size": tally.world_size,
        "engine": first.get("engine"),
        "dtype": first.get("dtype"),
        "threads_per_rank": first.get("threads"),
        "torch_version": first.get("torch_version"),
        "started": tally.first_time,
        "last_word": tally.last_time,
    }


def _series(tally: RunTally) -> dict[str, list[Any]]:
    """Curves over steps; a long run is thinned to buckets of neighbours, first and last step stay as they are.

    `tokens` are those of the run up to there, `elapsed_seconds` its time.
    """
    points = [*tally.past.curve(), *(point_of(step, tally.steps[step]) for step in sorted(tally.steps))]
    shown = list(thinned(points, SERIES_POINTS))
    names = ("step", "time", "loss", "tokens_per_second", "gradient_norm", "learning_rate")
    series: dict[str, list[Any]] = {name: [getattr(point, name) for point in shown] for name in names}
    return {**series, "tokens": list(accumulate(point.tokens for point in shown)), **_elapsed(tally, shown)}


def _elapsed(tally: RunTally, points: Sequence[Point]) -> dict[str, list[float]]:
    """Since the run began, pauses left out."""
    pauses = tally.pauses

    def elapsed(time: float) -> float:
        return time - (tally.first_time or time) - math.fsum(until - since for since, until in pauses if until <= time)

    return {"elapsed_seconds": [elapsed(point.time) for point in points]}


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None and math.isfinite(value)]
    return math.fsum(known) / len(known) if known else None


def _read_json(path: Path) -> dict[str, Any]:
    text = _read_text(path)
    if text is None:
        return {}
    try:
        document = json.loads(text)
    except ValueError as error:
        raise InputError(f"{path} is not JSON: {error}", do="start the run again with --fresh") from error
    return document if isinstance(document, dict) else {}


def _read_text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, NotADirectoryError):
        return None


def _json_ready(value: Any) -> Any:
    """Without NaN and infinity, which JSON does not know: they become null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _json_ready(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json_ready(item) for item in value]
    return value

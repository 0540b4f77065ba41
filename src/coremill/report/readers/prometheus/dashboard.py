"""The Grafana dashboard of runs, as JSON to import: what to look at first on top, then why, then each rank.

Every query is over metrics of `families.py`. Series are taken together over pods and addresses, so that a curve goes on
where a pod has a successor. The data source, the namespace and the runs are chosen on the page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

TITLE, UID = "coremill runs", "coremill-runs"
SCHEMA_VERSION = 39  # of Grafana 10.4 and 11; later releases read it
WIDTH = 24
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_INFO = "namespace, run, model, task, engine, dtype, fleet, version"
_RUN = 'run=~"$run", namespace=~"$namespace"'


@dataclass(frozen=True)
class Panel:
    """One picture: queries with their legends. `unit` as Grafana names it."""

    title: str
    unit: str
    queries: Sequence[tuple[str, str]]
    width: int = 8
    height: int = 8
    kind: str = "timeseries"
    description: str = ""


def _of_run(metric: str) -> str:
    return f"max by (namespace, run) (coremill_{metric}{{{_RUN}}})"


def _of_rank(metric: str) -> str:
    return f"max by (namespace, run, rank) (coremill_{metric}{{{_RUN}}})"


def _stat(title: str, unit: str, query: str, **options: Any) -> Panel:
    return Panel(title, unit, [(query, "{{run}}")], width=4, height=5, kind="stat", **options)


def _curve(title: str, unit: str, query: str, **options: Any) -> Panel:
    return Panel(title, unit, [(query, "{{run}}")], **options)


_MEMORY_SHARE = f"max by (namespace, run) ({_of_rank('rank_memory_bytes')}) / {_of_run('rank_memory_limit_bytes')}"
_SECONDS_BY_PART = f"sum by (namespace, run, part) (rate(coremill_rank_step_seconds_total{{{_RUN}}}[$__rate_interval]))"

ROWS: dict[str, Sequence[Panel]] = {
    "Now": (
        _stat("Progress", "percentunit", f"{_of_run('steps_done')} / {_of_run('steps_planned')}"),
        _stat("Time left", "s", _of_run("remaining_seconds")),
        _stat("Loss", "none", _of_run("loss")),
        _stat("Tokens per second", "short", _of_run("tokens_per_second")),
        _stat("Cost so far", "currencyUSD", _of_run("cost_usd_total"), description="Of runs in a cluster."),
        _stat(
            "Silent for",
            "s",
            f"time() - {_of_run('last_event_timestamp_seconds')}",
            description="Since a rank last said anything. Long steps, loading and saving are silent too.",
        ),
    ),
    "Learning": (
        Panel(
            "Loss",
            "none",
            [
                (_of_run("loss"), "{{run}}"),
                (
                    f'max by (namespace, run) (coremill_evaluation_score{{{_RUN}, metric="loss"}})',
                    "{{run}}, evaluation",
                ),
            ],
        ),
        Panel(
            "Evaluation",
            "none",
            [
                (
                    f'max by (namespace, run, metric) (coremill_evaluation_score{{{_RUN}, metric!="loss"}})',
                    "{{run}}, {{metric}}",
                )
            ],
        ),
        _curve("Gradient norm", "none", _of_run("gradient_norm")),
        _curve("Learning rate", "none", _of_run("learning_rate")),
        _curve("Steps done", "short", _of_run("steps_done")),
        _curve("Steps left out", "short", _of_run("skipped_steps_total"), description="Their numbers were none."),
    ),
    "Speed": (
        _curve("Tokens per second", "short", _of_run("tokens_per_second")),
        _curve(
            "Utilization", "percentunit", _of_run("utilization_ratio"), description="Of calibrated matrix products."
        ),
        _curve("Seconds per step", "s", _of_run("step_seconds")),
        Panel(
            "Where ranks spend their steps",
            "percentunit",
            [
                (
                    f"{_SECONDS_BY_PART} / on (namespace, run) group_left sum by (namespace, run) ({_SECONDS_BY_PART})",
                    "{{run}}, {{part}}",
                )
            ],
            width=12,
        ),
        Panel(
            "Sent by a rank",
            "Bps",
            [
                (
                    f"max by (namespace, run, rank) (rate(coremill_rank_sent_bytes_total{{{_RUN}}}[$__rate_interval]))",
                    "{{run}}, rank {{rank}}",
                )
            ],
            width=12,
        ),
    ),
    "Reliability": (
        _curve(
            "Goodput", "percentunit", _of_run("goodput_ratio"), description="Share of the time that went into steps."
        ),
        Panel(
            "Restarts, faults, steps done again",
            "short",
            [
                (_of_run("restarts_total"), "{{run}}, restarts"),
                (_of_run("repeated_steps_total"), "{{run}}, steps done again"),
                (f"max by (namespace, run, cause) (coremill_faults_total{{{_RUN}}})", "{{run}}, {{cause}}"),
            ],
        ),
        Panel(
            "Last save",
            "s",
            [
                (_of_run("last_save_seconds"), "{{run}}, in all"),
                (_of_run("last_save_blocked_seconds"), "{{run}}, training stood"),
            ],
        ),
        _curve(
            "Steps that a loss would cost",
            "short",
            f"{_of_run('steps_done')} - {_of_run('last_save_step')}",
            description="Done since the last checkpoint.",
        ),
        Panel(
            "Saves",
            "short",
            [(f"max by (namespace, run, outcome) (coremill_saves_total{{{_RUN}}})", "{{run}}, {{outcome}}")],
        ),
        _curve("Ranks", "short", _of_run("ranks")),
    ),
    "Memory and money": (
        Panel(
            "Memory of a rank",
            "bytes",
            [
                (_of_rank("rank_memory_bytes"), "{{run}}, rank {{rank}}"),
                (_of_run("rank_memory_planned_bytes"), "{{run}}, planned"),
                (_of_run("rank_memory_limit_bytes"), "{{run}}, limit"),
            ],
        ),
        _curve(
            "Memory, of the limit",
            "percentunit",
            _MEMORY_SHARE,
            description="Of the rank that holds most.",
        ),
        Panel(
            "Cost",
            "currencyUSD",
            [(_of_run("cost_usd_total"), "{{run}}, so far"), (_of_run("cost_planned_usd"), "{{run}}, planned")],
            description="Of runs in a cluster: nodes by the hour, waiting and restarts included.",
        ),
        Panel(
            "Runs",
            "none",
            [
                (
                    f"max by ({_INFO}) (coremill_run_info{{{_RUN}}})",
                    "",
                )
            ],
            width=WIDTH,
            height=6,
            kind="table",
        ),
    ),
}


def dashboard() -> dict[str, Any]:
    """What Grafana imports."""
    return {
        "title": TITLE,
        "uid": UID,
        "description": "Training runs of coremill, from the metrics of run.metrics_port.",
        "tags": ["coremill"],
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "schemaVersion": SCHEMA_VERSION,
        "templating": {"list": _variables()},
        "panels": _placed(),
    }


def _variables() -> list[dict[str, Any]]:
    """All namespaces by `.*`, which also takes series without one: runs outside of a cluster."""

    def of_label(name: str, label: str, query: str) -> dict[str, Any]:
        return {
            "name": name,
            "label": label,
            "type": "query",
            "datasource": _SOURCE,
            "query": {"query": query, "refId": name},
            "refresh": 2,  # with the time range
            "sort": 1,
            "multi": True,
            "includeAll": True,
            "allValue": ".*",
            "current": {"text": ["All"], "value": ["$__all"]},
        }

    return [
        {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus", "current": {}},
        of_label("namespace", "Namespace", "label_values(coremill_run_info, namespace)"),
        of_label("run", "Run", 'label_values(coremill_run_info{namespace=~"$namespace"}, run)'),
    ]


def _placed() -> list[dict[str, Any]]:
    """Panels from left to right, rows from top to bottom."""
    found: list[dict[str, Any]] = []
    top = 0
    for title, panels in ROWS.items():
        found.append(
            _numbered(found, {"type": "row", "title": title, "panels": [], "collapsed": False}, 0, top, WIDTH, 1)
        )
        top, left, height = top + 1, 0, 0
        for panel in panels:
            if left + panel.width > WIDTH:
                top, left, height = top + height, 0, 0
            found.append(_numbered(found, _picture(panel), left, top, panel.width, panel.height))
            left, height = left + panel.width, max(height, panel.height)
        top += height
    return found


def _numbered(before: Sequence[Any], panel: dict[str, Any], x: int, y: int, w: int, h: int) -> dict[str, Any]:
    return {"id": len(before) + 1, "gridPos": {"x": x, "y": y, "w": w, "h": h}, **panel}


def _picture(panel: Panel) -> dict[str, Any]:
    is_table = panel.kind == "table"
    targets = [
        {
            "refId": chr(ord("A") + place),
            "datasource": _SOURCE,
            "expr": query,
            "legendFormat": legend,
            "instant": is_table,
            "range": not is_table,
            "format": "table" if is_table else "time_series",
        }
        for place, (query, legend) in enumerate(panel.queries)
    ]
    picture: dict[str, Any] = {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": _SOURCE,
        "targets": targets,
        "fieldConfig": {"defaults": {"unit": panel.unit}, "overrides": []},
    }
    if panel.kind == "stat":
        picture["options"] = {"reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False}}
    if is_table:
        hidden = {"Time": True, "Value": True}
        picture["transformations"] = [{"id": "organize", "options": {"excludeByName": hidden}}]
    return picture

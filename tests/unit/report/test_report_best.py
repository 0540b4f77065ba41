"""The best and the last evaluation in a report, an early end, and what `train --from` set aside."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console

from coremill.report.summary import summarise
from coremill.report.summary_screen import render_summary
from unit.report.fake_run import make_fake_run


def write(folder: Path, rank: int, *events: tuple[float, str, dict[str, Any]]) -> None:
    file = folder / "events" / f"rank-{rank:05d}.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"kind": kind, "time": time, "rank": rank, **fields}) for time, kind, fields in events]
    file.write_text("".join(f"{line}\n" for line in lines))


def step(number: int, loss: float) -> dict[str, Any]:
    return {"step": number, "loss": loss, "tokens": 10, "padding_tokens": 0, "seconds": 1.0, "learning_rate": 0.1}


def evaluation(number: int, loss: float, best: int) -> dict[str, Any]:
    return {"step": number, "perplexity": 2 * loss, "loss": loss, "tokens": 5, "seconds": 0.1, "best_step": best}


START = {"world_size": 2, "local_rank": 0, "hostname": "elsewhere", "pid": 1, "attempt": 1.0}


def test_metrics_and_best_by_name(tmp_path: Path) -> None:
    write(
        tmp_path,
        0,
        (1.0, "start", START),
        *((1.0 + number, "step", step(number, 4.0 - number)) for number in (1, 2, 3)),
        (2.5, "evaluation", evaluation(1, 2.0, 1)),
        (3.5, "evaluation", evaluation(2, 1.0, 2)),
        (4.5, "evaluation", evaluation(3, 1.5, 2)),
        (5.0, "early_stop", {"step": 3, "text": "no better one"}),
    )
    summary = summarise(tmp_path)
    assert summary["metrics"] == {"perplexity": 3.0, "loss": 1.5}
    assert summary["best"] == {"step": 2, "metrics": {"perplexity": 2.0, "loss": 1.0}}
    assert summary["early_stop"] == {"step": 3, "text": "no better one"}
    assert summary["evaluations"][0] == {"step": 1, "loss": 2.0, "perplexity": 4.0, "tokens": 5, "seconds": 0.1}


def test_evaluations_that_the_screen_leaves_out_are_counted(tmp_path: Path) -> None:
    make_fake_run(tmp_path, world_size=1, steps=3, total_steps=3)
    summary = {**summarise(tmp_path), "data": None, "best": None}
    for count, said in ((4, None), (9, "... 5 more between step 1 and step 7: coremill report")):
        console = Console(record=True, width=300)
        told = [{"step": number, "loss": 1.0, "tokens": 5, "seconds": 0.1} for number in range(1, count + 1)]
        render_summary({**summary, "evaluations": told}, console)
        text = console.export_text()
        assert "step 1 " in text and f"step {count} " in text
        assert said in text if said else "more between" not in text


def test_without_evaluations_they_are_null(tmp_path: Path) -> None:
    write(tmp_path, 0, (1.0, "start", START), (2.0, "step", step(1, 3.0)))
    summary = summarise(tmp_path)
    assert (summary["metrics"], summary["best"], summary["early_stop"]) == (None, None, None)


def test_what_was_set_aside_is_left_out_whichever_rank_told_it(tmp_path: Path) -> None:
    before = [(1.0 + number, "step", step(number, 10.0 - number)) for number in (1, 2, 3, 4)]
    again = [(20.0 + number, "step", step(number, 5.0)) for number in (3,)]
    write(
        tmp_path,
        0,
        (1.0, "start", START),
        *before,
        (4.5, "evaluation", evaluation(2, 2.0, 2)),
        (6.0, "evaluation", evaluation(4, 1.0, 4)),
        (7.0, "export", {"folder": "x", "bytes": 1, "seconds": 1.0}),
        (7.5, "early_stop", {"step": 4, "text": "no better one"}),
        (10.0, "set_aside", {"after_step": 2, "steps": [4], "folder": "aside"}),
        (20.0, "start", {**START, "attempt": 20.0}),
        *again,
    )
    write(tmp_path, 1, (1.0, "start", START), *before, (20.0, "start", {**START, "attempt": 20.0}), *again)
    summary = summarise(tmp_path)
    assert summary["steps"] == 3
    assert summary["series"]["loss"] == [9.0, 8.0, 5.0]
    assert summary["tokens"] == 30
    assert [each["step"] for each in summary["evaluations"]] == [2]
    assert summary["best"]["step"] == 2
    assert summary["export"] is None and summary["early_stop"] is None

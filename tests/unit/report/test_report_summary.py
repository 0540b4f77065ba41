import io
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from coremill.errors import InputError
from coremill.report import summary as summary_module
from coremill.report.events import EventWriter
from coremill.report.page.run_page import render_page
from coremill.report.summary import summarise
from coremill.report.summary_screen import parts_line, render_summary
from coremill.report.terminal import format_bytes, format_seconds
from coremill.report.timeline import outcome_of
from unit.report.fake_run import START, fake_plan, make_fake_run, write_line, write_report

CONTRACT = (
    "tokens_per_second",
    "padding_fraction",
    "model_flops_per_second",
    "matmul_flops_per_second",
    "utilization",
    "load_seconds",
    "bytes_read_per_rank",
    "peak_rss_bytes_per_rank",
    "peak_rss_bytes_at_load_per_rank",
    "wire_bytes_per_step_per_rank",
    "loss_first",
    "loss_last",
    "steps",
    "seconds",
    "goodput",
    "plan",
    "measured",
    "state",
    "error",
    "evaluations",
    "sample",
    "export",
)


def by_hand(folder: Path) -> Path:
    """Two ranks, three steps, one evaluation; every number below can be checked in the head."""
    plan = fake_plan(2, steps=3).to_json() | {"model_flops_per_token": 1e6, "matmul_flops_per_second": 2e8}
    folder.mkdir(exist_ok=True)
    (folder / "plan.json").write_text(json.dumps(plan))
    for rank in (0, 1):
        write_line(folder, rank, "start", 100.0, world_size=2, hostname="h", threads=1, engine="shard", dtype="fp32")
        load = {"seconds": 2.0 + rank, "bytes_read": 1000 + rank, "peak_rss_bytes": 500 + rank}
        write_line(folder, rank, "load", 104.0, **load)
        for step, seconds, end in ((1, 4.0, 108.0), (2, 1.0, 109.0), (3, 3.0, 122.0)):
            times = {"data_seconds": 0.1, "compute_seconds": seconds / 2, "communication_seconds": 0.2 + rank * 0.2}
            numbers = {"loss": 1 / (3 * step), "tokens": 90, "padding_tokens": 10, "wire_bytes": 70 + step + rank}
            use = {"bytes": 60 + rank, "seconds": float(step), "exposed_seconds": 0.2 + rank * 0.2}
            numbers["collectives"] = {"gather": use} if rank == 0 else {"gather": use, "agreement": {"bytes": 8}}
            peaks = {"peak_rss_bytes": 600 + 100 * rank + step, "rss_bytes": 400}
            if step == 2:
                numbers["watched_seconds"] = {"products": 0.2 + rank * 0.2, "attention": 0.1}
            write_line(
                folder,
                rank,
                "step",
                end,
                step=step,
                seconds=seconds,
                optimizer_seconds=0.1,
                **times,
                **numbers,
                **peaks,
            )
        write_line(folder, rank, "evaluation", 119.0, step=2, loss=0.5, perplexity=1.65, tokens=50, seconds=10.0)
        write_line(folder, rank, "phase", 119.0, name="evaluate", seconds=10.0, peak_rss_bytes=650, rss_bytes=400)
        write_line(folder, rank, "end", 125.0, seconds=25.0)
    return folder


def test_numbers_by_hand(tmp_path: Path) -> None:
    summary = summarise(by_hand(tmp_path))
    assert set(CONTRACT) <= set(summary)
    assert summary["state"] == "finished"
    assert summary["tokens_per_second"] == 180 / 4  # steps 2 and 3; the evaluation between them is left out
    assert summary["model_flops_per_second"] == 45e6
    assert summary["utilization"] == pytest.approx(0.225)
    assert summary["padding_fraction"] == 0.1
    assert (summary["loss_first"], summary["loss_last"]) == (1 / 3, 1 / 9)  # full precision
    assert (summary["steps"], summary["seconds"], summary["goodput"]) == (3, 25.0, 8 / 25)
    assert summary["load_seconds"] == 3.0
    assert summary["bytes_read_per_rank"] == [1000, 1001]
    assert summary["peak_rss_bytes_per_rank"] == [650, 703]
    assert summary["peak_rss_bytes_at_load_per_rank"] == [500, 501]
    assert summary["wire_bytes_per_step_per_rank"] == [72, 74]  # mean of steps 2 and 3, 72.5 and 73.5, rounded to even
    measured = summary["measured"]
    assert measured["memory_bytes_by_phase"] == {"load": 501, "first_step": 701, "steady_step": 703, "checkpoint": None}
    split = measured["step_seconds"]
    expected = {"total": 2.0, "data": 0.1, "compute": 1.0, "communication": 0.3, "optimizer": 0.1, "other": 0.5}
    assert split == pytest.approx(expected)
    # A step computes for 1 s; of the 0.5 s of step 2 on either rank products took 0.2 and 0.4, attention 0.1.
    parts = {"products": 0.3, "attention": 0.1, "between": 0.6, "update": 0.1, "waiting": 0.3}
    assert measured["step_parts"] == pytest.approx(parts)
    assert parts_line(summary) == (
        "by part: matmul 21 %, attention 7.1 %, norms and elementwise 43 %, optimizer 7.1 %, waiting 21 %"
    )
    gather, agreement = measured["collectives"]["gather"], measured["collectives"]["agreement"]
    # Steps 2 and 3, both ranks.
    assert gather == pytest.approx({"bytes": 60.5, "shared_bytes": 0, "seconds": 2.5, "exposed_seconds": 0.3})
    assert agreement == {"bytes": 8, "shared_bytes": 0, "seconds": 0, "exposed_seconds": 0}
    assert summary["wall_seconds_split"]["other"] == pytest.approx(25 - 8 - 10 - 3)
    assert [one["step"] for one in summary["evaluations"]] == [2]
    assert summary["plan"]["step_seconds"]["total"] == pytest.approx(4.45)


def test_the_order_in_which_ranks_are_heard_does_not_matter(tmp_path: Path) -> None:
    first = summarise(by_hand(tmp_path))
    events = tmp_path / "events"
    (events / "rank-00000.jsonl").rename(events / "rank-00009.jsonl")  # now read last
    assert {**summarise(tmp_path), "ranks": 0, "choices": 0} == {**first, "ranks": 0, "choices": 0}


@pytest.mark.parametrize(("ending", "state"), [("finished", "finished"), ("stopped", "stopped")])
def test_ranks_of_hosts_with_a_run_folder_of_their_own_are_not_heard(tmp_path: Path, ending: str, state: str) -> None:
    make_fake_run(tmp_path, ending=ending, steps=20)
    for rank in (2, 3):
        (tmp_path / "events" / f"rank-{rank:05d}.jsonl").unlink()
    summary = write_report(tmp_path)
    assert summary["state"] == state and summary["steps"] == 20
    assert [size is None for size in summary["peak_rss_bytes_per_rank"]] == [False, False, True, True]


@pytest.mark.parametrize("world_size", [1, 4])
def test_a_realistic_run(tmp_path: Path, world_size: int) -> None:
    summary = summarise(make_fake_run(tmp_path, world_size=world_size))
    assert summary["state"] == "finished" and summary["error"] is None
    assert len(summary["ranks"]) == world_size == len(summary["peak_rss_bytes_per_rank"])
    assert summary["series"]["step"] == list(range(1, 301))
    assert {choice["by"] for choice in summary["choices"]} == {"plan", "every rank"}
    assert 0 < summary["utilization"] < 1
    json.dumps(summary, allow_nan=False)


def test_a_run_that_is_still_going(tmp_path: Path) -> None:
    for steps, known in ((0, False), (1, False), (2, True)):
        folder = make_fake_run(tmp_path / str(steps), steps=steps, ending="running")
        summary = summarise(folder)
        assert (summary["state"], summary["steps"]) == ("running", steps)
        assert (summary["tokens_per_second"] is not None) == known  # the first step alone gives no rate
        assert set(CONTRACT) <= set(summary)


def test_before_any_rank_spoke(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(json.dumps(fake_plan(4).to_json()))
    summary = write_report(tmp_path)
    assert summary["state"] == "running" and summary["bytes_read_per_rank"] == [None] * 4


def test_the_rank_that_failed_is_named_not_those_that_lost_it(tmp_path: Path) -> None:
    summary = summarise(make_fake_run(tmp_path, steps=120, ending="failed"))
    assert summary["state"] == "failed"
    assert summary["error"]["rank"] == 2 and summary["error"]["exit_code"] == 70
    assert summary["error"]["traceback"].startswith("Traceback")


def test_a_request_to_stop_is_no_failure(tmp_path: Path) -> None:
    assert summarise(make_fake_run(tmp_path, steps=5, ending="stopped"))["state"] == "stopped"


@pytest.mark.parametrize("exit_code", [None, 0, 1, 70, 75, 130])
@pytest.mark.parametrize("ending", ["finished", "stopped", "failed", "running"])
def test_a_state_and_its_exit_code_never_disagree(tmp_path: Path, ending: str, exit_code: int | None) -> None:
    summary = write_report(make_fake_run(tmp_path, steps=3, ending=ending), exit_code=exit_code)
    assert (summary["state"] == "finished") == (summary["exit_code"] == 0)
    assert (summary["state"] == "running") == (summary["exit_code"] is None)
    assert (summary["error"] is None) == (summary["state"] in ("finished", "running"))
    if exit_code:
        assert summary["exit_code"] == exit_code


def test_events_that_were_replaced_while_the_run_went_on_are_no_success(tmp_path: Path) -> None:
    make_fake_run(tmp_path, steps=3)
    for path in (tmp_path / "events").iterdir():
        path.unlink()
    summary = write_report(tmp_path, exit_code=0)
    assert (summary["state"], summary["exit_code"]) == ("failed", 1)
    assert "events do not say so" in summary["error"]["message"]


def attempt_of(
    folder: Path, ranks: tuple[int, ...], began: float, *, ending: str | None, exit_code: int = 0, size: int = 4
) -> None:
    for rank in ranks:
        where = {"hostname": "elsewhere", "pid": 4711}
        write_line(folder, rank, "start", began + 1, world_size=size, attempt=began, **where)
        if ending is not None:
            write_line(folder, rank, ending, began + 9, exit_code=exit_code, message="stopped on request")


@pytest.mark.parametrize(
    ("ending", "exit_code"), [("error", 75), ("error", 69), (None, 0)], ids=["stopped", "lost", "killed"]
)
@pytest.mark.parametrize(("ranks", "size"), [((0, 1), 4), ((0,), 2)], ids=["1x4 as 2x2", "hosts swapped"])
def test_what_ranks_left_that_write_elsewhere_now_is_over(
    tmp_path: Path, ending: str | None, exit_code: int, ranks: tuple[int, ...], size: int
) -> None:
    """Hosts share no run folder: this one keeps the files of ranks that another one has now."""
    attempt_of(tmp_path, tuple(range(size)), 1000.0, ending=ending, exit_code=exit_code, size=size)
    attempt_of(tmp_path, ranks, 2000.0, ending="end", size=size)
    assert summarise(tmp_path)["state"] == "finished"
    summary = write_report(tmp_path, exit_code=0)
    assert (summary["state"], summary["exit_code"], summary["error"]) == ("finished", 0, None)


@pytest.mark.parametrize("ahead", [-900.0, 1e6])
def test_clocks_of_hosts_differ(tmp_path: Path, ahead: float) -> None:
    """Hosts were swapped: the attempt before is named by the clock of the host that led it."""
    for rank in (2, 3):
        write_line(tmp_path, rank, "start", 1001.0, world_size=4, attempt=1000.0 + ahead, hostname="elsewhere")
        write_line(tmp_path, rank, "error", 1009.0, exit_code=69, message="lost")
    attempt_of(tmp_path, (0, 1), 2000.0, ending="end")
    assert write_report(tmp_path, exit_code=0)["state"] == "finished"


def test_an_attempt_of_fewer_ranks_counts_for_itself(tmp_path: Path) -> None:
    attempt_of(tmp_path, (0, 1, 2, 3), 1000.0, ending="error", exit_code=75)
    attempt_of(tmp_path, (0, 1), 2000.0, ending="end", size=2)
    summary = write_report(tmp_path, exit_code=0)
    assert (summary["state"], summary["world_size"]) == ("finished", 2)


def test_the_end_of_another_hosts_rank_may_be_seen_late(tmp_path: Path) -> None:
    attempt_of(tmp_path, (0, 1), 1000.0, ending="end")
    attempt_of(tmp_path, (2, 3), 1000.0, ending=None)
    assert summarise(tmp_path)["state"] == "running"
    assert write_report(tmp_path, exit_code=0)["state"] == "finished"  # the first host's ranks have ended


@pytest.mark.parametrize("rank", [2, 3])
def test_an_error_of_this_attempt_counts(tmp_path: Path, rank: int) -> None:
    """Also of a rank that did not come to its start."""
    attempt_of(tmp_path, (0, 1, 2, 3), 1000.0, ending="error", exit_code=75)
    attempt_of(tmp_path, (0, 1, 2), 2000.0, ending=None)
    write_line(tmp_path, rank, "error", 2005.0, exit_code=74, message="the disk is full")
    summary = write_report(tmp_path, exit_code=74)
    assert (summary["exit_code"], summary["error"]["message"]) == (74, "the disk is full")


def test_the_end_of_an_earlier_attempt_is_no_success(tmp_path: Path) -> None:
    attempt_of(tmp_path, (0, 1), 1000.0, ending="end", size=2)
    attempt_of(tmp_path, (0, 1), 2000.0, ending=None, size=2)
    assert write_report(tmp_path, exit_code=0)["exit_code"] == 1


def test_what_ranks_said_when_they_were_ended_at_once_is_not_the_cause(tmp_path: Path) -> None:
    make_fake_run(tmp_path, steps=3, ending="running")
    write_line(tmp_path, 1, "error", 1e10, message="a collective broke", exit_code=1)
    write_line(tmp_path, 0, "error", 1e10 + 1, message="stopped at once (Ctrl-C)", exit_code=130, on_request=True)
    summary = summarise(tmp_path)
    assert (summary["state"], summary["exit_code"]) == ("stopped", 130)
    assert summary["error"]["message"] == "stopped at once (Ctrl-C)"


def test_a_run_whose_processes_are_gone_is_not_called_running(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    alive = {"world_size": 2, "hostname": socket.gethostname(), "pid": os.getpid()}
    write_line(tmp_path, 0, "start", 4e9, **alive)
    write_line(tmp_path, 1, "start", 4e9, **alive | {"pid": process.pid})
    assert summarise(tmp_path)["state"] == "running"  # rank 0 lives
    write_line(tmp_path, 0, "start", 4e9, **alive | {"pid": process.pid})
    gone = summarise(tmp_path)
    assert gone["state"] == "failed" and "without a word" in gone["error"]["message"]
    write_line(tmp_path, 0, "start", 4e9, **alive | {"hostname": "elsewhere"})
    assert summarise(tmp_path)["state"] == "running"  # nothing is known about another machine


def test_nan_is_null_in_json(tmp_path: Path) -> None:
    write_line(tmp_path, 0, "start", 1.0, world_size=1)
    write_line(tmp_path, 0, "step", 2.0, step=1, seconds=1.0, tokens=1, loss=None, non_finite={"loss": "nan"})
    summary = write_report(tmp_path)
    assert summary["loss_last"] is None and summary["series"]["loss"] == [None]


def test_a_long_run_is_thinned_with_its_ends_kept(tmp_path: Path) -> None:
    for step in range(1, 2001):
        write_line(tmp_path, 0, "step", float(step), step=step, loss=float(step), seconds=0.5, tokens=10)
    series = summarise(tmp_path)["series"]
    assert len(series["step"]) <= summary_module.SERIES_POINTS
    assert (series["loss"][0], series["loss"][-1]) == (1.0, 2000.0)
    assert series["tokens_per_second"][5] == 20.0


def test_the_report_is_written_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_fake_run(tmp_path, steps=3)
    first = write_report(tmp_path)
    assert json.loads((tmp_path / "report.json").read_text()) == first
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(Exception, match="No space left"):
        write_report(tmp_path)
    assert json.loads((tmp_path / "report.json").read_text()) == first
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".report")]


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not a run folder"):
        summarise(tmp_path)
    with pytest.raises(InputError, match="no such run folder"):
        summarise(tmp_path / "nowhere")


def test_tokens_in_the_config_are_blotted_out(tmp_path: Path) -> None:
    make_fake_run(tmp_path, steps=1)
    (tmp_path / "config.yaml").write_text("model: hf_" + "x" * 30)
    assert summarise(tmp_path)["config"] == "model: ***"


def test_units() -> None:
    shown = [format_bytes(size) for size in (None, 0, 999, 1e3, 2.34e9, 37.94e9, 999.7e6)]
    assert shown == ["-", "0 B", "999 B", "1.00 kB", "2.34 GB", "37.9 GB", "1.00 GB"]
    assert [format_seconds(one) for one in (0.0841, 3.2, 192, 7505, 97_300)] == [
        "84.1 ms",
        "3.20 s",
        "3m 12s",
        "2h 05m",
        "1d 03h",
    ]


def test_what_to_look_at(tmp_path):
    folder = make_fake_run(tmp_path / "run", world_size=2, steps=120)
    culprits = [{"rank": 1, "what": "the loss is nan", "rows": [4, 9]}]
    text = "step 61: the loss is nan on rank 1 in rows 4, 9"
    told = {"step": 61, "text": text, "skipped": True, "culprits": culprits}
    for rank in (0, 1):
        write_line(folder, rank, "non_finite", START + 700, **told, skipped_so_far=1, budget=10)
        nan = {"loss": None, "gradient_norm": None, "non_finite": {"loss": "nan"}, "skipped": True, "seconds": 1.0}
        write_line(folder, rank, "step", START + 700, step=61, tokens=1, **nan)
        write_line(folder, rank, "step", START + 900, step=90, loss=19.5, tokens=1, seconds=1.0)
    summary = summarise(folder)
    assert summary["skipped_steps"] == [61]
    assert summary["non_finite"] == [told]
    assert [spike["first_step"] for spike in summary["loss_spikes"]] == [90]
    assert summary["findings"][0] == "step 61: the loss is nan on rank 1 in rows 4, 9: left out"
    assert summary["findings"][1].startswith("loss spike at step 90: 19.5, where ")
    assert summary["series"]["loss"].count(None) == 1  # of step 61; charts leave a gap there
    screen = io.StringIO()
    render_summary(summary, Console(file=screen, force_terminal=False, width=200))
    assert all(line in screen.getvalue() for line in summary["findings"])
    assert "loss spike at step 90" in render_page(summary)


def test_nothing_to_look_at(tmp_path):
    summary = summarise(make_fake_run(tmp_path / "run"))
    assert summary["findings"] == summary["loss_spikes"] == summary["skipped_steps"] == summary["non_finite"] == []


def test_a_run_between_a_fault_and_its_restart_is_going(tmp_path):
    run = tmp_path / "run"
    launcher = {"hostname": socket.gethostname(), "launcher_pid": os.getpid()}
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    with EventWriter(run, 0) as events:
        events.write("start", world_size=1, hostname=socket.gethostname(), pid=gone.pid)
        events.write("error", message="the connection to another rank was lost", exit_code=69)
        events.write("fault", cause="killed", action="restart", text="rank 0 was ended by SIGKILL", **launcher)
    assert summarise(run)["state"] == "running"
    with EventWriter(run, 0) as events:
        events.write("fault", cause="killed", action="restart", **{**launcher, "launcher_pid": gone.pid})
    assert summarise(run)["state"] == "failed"


def test_faults_and_restarts_are_a_timeline(tmp_path):
    run = tmp_path / "run"
    fault = {"text": "rank 1 was ended by SIGKILL", "exit_code": 137, "step": 12, "committed_step": 10}
    with EventWriter(run, 1) as one, EventWriter(run, 0) as zero:
        one.write("fault", cause="killed", action="restart", detected_seconds=0.05, **fault)
        zero.write("fault", cause="peer lost", action="restart", detected_seconds=0.1, **{**fault, "text": "rank 0"})
        zero.write("restart", resumed_seconds=9.0, steps_lost=2)
        one.write("restart", resumed_seconds=8.0, steps_lost=2)
        one.write("fault", cause="killed", action="restart", detected_seconds=0.05, **fault)
        one.write("fault", cause="failed", action="end", why_not="restarted once", **fault)
    summary = write_report(run)
    then = [outcome_of(entry) for entry in summary["faults"]]
    assert then == [
        "training again after 8.00 s, 2 steps repeated",
        "restarted, no step done before the next fault",
        "the end: restarted once",
    ]
    page = (run / "report.html").read_text()
    assert "Faults and restarts" in page and page.count("was ended by SIGKILL") == 3
    console = Console(file=io.StringIO(), width=200)
    render_summary(summary, console)
    assert "training again after 8.00 s" in console.file.getvalue()

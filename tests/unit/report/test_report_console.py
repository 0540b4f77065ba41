import gc
import io
import os
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from coremill.data.packed import Progress
from coremill.report import progress as progress_module
from coremill.report.events import Event, read_events
from coremill.report.progress import AmountProgress, StageProgress, show_error
from coremill.report.readers import console as console_module
from coremill.report.readers.console import RunConsole
from coremill.report.summary import summarise
from coremill.report.summary_screen import render_summary
from coremill.report.work import LongWorks
from coremill.world.heartbeat import Reading
from unit.report.fake_run import START, fake_plan, make_fake_run, write_line


def plain() -> Console:
    return Console(file=io.StringIO(), width=80)


def terminal() -> Console:
    return Console(
        file=io.StringIO(), width=80, force_terminal=True, record=True, color_system=None, legacy_windows=False
    )


def text(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def frame(screen: RunConsole) -> list[str]:
    """What the live display shows now."""
    shown = terminal()
    shown.print(screen._display())
    return [line.rstrip() for line in text(shown).splitlines()]


def test_plain_lines(tmp_path: Path) -> None:
    make_fake_run(tmp_path, steps=60, total_steps=60)
    console = plain()
    with RunConsole(60, fake_plan(4, steps=60).to_json(), console) as screen:
        screen.note("a finding of the launcher that is longer than eighty columns and " + "must not be wrapped " * 3)
        screen.take(read_events(tmp_path))
    lines = text(console).splitlines()
    assert lines[0].endswith("must not be wrapped ") and len(lines[0]) > 80
    assert lines[1] == "4 ranks started on 4 machines: shard, fp32, 2 threads each"
    assert lines[2] == "weights read in 2.60 s: 52.0 MB per rank"
    steps = [line for line in lines if line.startswith("step ")]
    assert steps[0].startswith("step 1/60  loss 8.85") and steps[-1].startswith("step 60/60  loss ")
    assert 25 <= len(steps) <= 35  # steps of 4.4 s: about every second one is 5 s after the last
    assert "tokens/s  utilization 7" in steps[-1] and "memory 1.22 GB/rank" in steps[-1] and "ETA" not in steps[-1]
    assert "ETA" in steps[3]
    assert any(line.startswith("evaluation at step 50: loss 4.97") for line in lines)
    assert lines[-1].startswith("exported to ")


def test_what_a_continuation_converts_is_said_once() -> None:
    """Also where no setting changed: `auto` may find another optimizer or dtype on another machine."""
    console = plain()
    found = {"weights": ("rounded", "they were in fp32"), "moments": ("converted", "they were in fp32")}
    with RunConsole(60, fake_plan(2, steps=60).to_json(), console) as screen:
        for name, (value, reason) in found.items():
            choice = {"name": name, "value": value, "reason": reason}
            screen.take([Event("choice", START, rank, choice) for rank in (0, 1)])
    lines = text(console).splitlines()
    for name, (value, reason) in found.items():
        assert lines.count(f"{name}: {value}, because {reason}") == 1


def test_weights_that_were_drawn_or_left_are_said_on_screen_and_in_the_report(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text("{}")
    names = {"initialised": ["lm_head.weight"], "unexpected": [f"mtp.{index}.weight" for index in range(5)]}
    for rank in range(2):
        write_line(tmp_path, rank, "start", START, world_size=2, hostname="here", engine="shard", dtype="fp32")
        write_line(tmp_path, rank, "load", START + 1, seconds=1.0, bytes_read=8, **names)
        # Going on from a checkpoint: nothing is drawn, and what was drawn at first is still so.
        write_line(tmp_path, rank, "load", START + 9, seconds=1.0, bytes_read=8, initialised=[], unexpected=[])
    drawn = "1 parameter is in none of the weight files, so drawn at random: lm_head.weight"
    unused = "5 tensors of the weight files left unused, the model has no place for them: mtp.0.weight, mtp.1.weight,"
    console = plain()
    with RunConsole(3, {}, console) as screen:
        screen.take(read_events(tmp_path))
    lines = text(console).splitlines()
    assert lines.count(drawn) == 1 and sum(line.startswith(unused) for line in lines) == 1
    summary = summarise(tmp_path)
    assert summary["weights_drawn"] == names["initialised"] and summary["weights_unused"] == names["unexpected"]
    assert summary["findings"][0] == drawn and summary["findings"][1].startswith(unused)
    closing = plain()
    render_summary(summary, closing)
    assert drawn in text(closing)


def test_a_run_that_breaks_off_leaves_its_last_step(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        write_line(tmp_path, 0, "step", START + step, step=step, loss=4.0 - step, seconds=1.0, tokens=10)
    console = plain()
    screen = RunConsole(100, None, console)
    screen.take(read_events(tmp_path))
    assert text(console).count("step ") == 1
    screen.ranks_ended()
    assert "step 3/100  loss 1.0000" in text(console)
    screen.ranks_ended()
    assert text(console).count("step ") == 2


def test_live_display_fits_eighty_columns(tmp_path: Path) -> None:
    make_fake_run(tmp_path, steps=60)
    screen = RunConsole(300, fake_plan(4).to_json(), terminal())
    screen.take(read_events(tmp_path))
    lines = frame(screen)
    assert len(lines) == 3 and all(len(line) <= 80 for line in lines)
    assert lines[0].startswith("training") and "60/300" in lines[0] and "ETA 17m" in lines[0]
    assert lines[1].startswith("loss 4.") and "learning rate 3.00e-04  gradient norm 1." in lines[1]
    for words in ("tokens/s", "utilization 7", "memory/rank 1.22 GB of 2.00 GB"):
        assert words in lines[2]
    screen.ranks_ended()
    assert "evaluation at step 50" in text(screen.console) and "step 60/300" in text(screen.console)


def test_phases_before_the_first_step(tmp_path: Path) -> None:
    def event(rank: int, kind: str, **fields: Any) -> Event:
        return Event(kind, START, rank, {"world_size": 2, **fields})

    screen = RunConsole(10, fake_plan(2).to_json(), terminal())
    assert "starting ranks (0 of 2)" in frame(screen)[0]
    screen.take([event(0, "start"), event(1, "start")])
    assert "starting ranks (2 of 2)" in frame(screen)[0]
    for rank in (0, 1):
        screen.take([event(rank, "phase", name=name) for name in ("join", "build")])
    assert "reading weights (0 of 2)" in frame(screen)[0]
    screen.take([event(1, "load", bytes_read=5, seconds=1)])
    assert "reading weights (1 of 2)" in frame(screen)[0]
    screen.take([event(0, "load", bytes_read=5, seconds=1)])
    assert "first step" in frame(screen)[0]
    screen.ranks_ended()


def test_eta_leaves_the_first_step_out() -> None:
    screen = RunConsole(5, None, plain())
    screen.take([Event("step", START, 0, {"step": 1, "seconds": 100.0, "tokens": 1, "loss": 1.0})])
    assert screen.tally.remaining_seconds(5) is None
    screen.take([Event("step", START + 2, 0, {"step": 2, "seconds": 2.0, "tokens": 1, "loss": 1.0})])
    assert screen.tally.remaining_seconds(5) == 6.0


def test_console_and_report_share_their_numbers(tmp_path: Path) -> None:
    make_fake_run(tmp_path, steps=30)
    summary = summarise(tmp_path)
    screen = RunConsole(300, fake_plan(4).to_json(), plain())
    screen.take(read_events(tmp_path))
    assert screen.tally.tokens_per_second() == summary["tokens_per_second"]
    assert screen.tally.utilization(screen.tally.tokens_per_second()) == summary["utilization"]


def test_nan_is_shown(tmp_path: Path) -> None:
    console = plain()
    screen = RunConsole(1, None, console)
    screen.take([Event("step", START, 0, {"step": 1, "loss": float("nan"), "seconds": 1.0, "tokens": 1})])
    assert "loss nan" in text(console)


def test_error_names_the_rank_message_first() -> None:
    console = plain()
    trace = "Traceback (most recent call last):\n  File x\n    " + "y" * 120 + "\nValueError: [no] markup\n"
    show_error("[red]it broke[/red]\n  do: mend it hf_" + "a" * 30, 2, trace, console)
    lines = text(console).splitlines()
    assert lines[0] == "error on rank 2: [red]it broke[/red]"
    assert lines[1] == "  do: mend it ***"
    assert lines[2] == "traceback of rank 2:"
    assert lines[3] == "  Traceback (most recent call last):" and lines[-1] == "  ValueError: [no] markup"
    assert len(lines) == 7


def test_tokenising_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_module, "PLAIN_EVERY_SECONDS", 0.0)
    console = plain()
    bar = AmountProgress("tokenising", console)
    bar.show(5_000_000, 10_000_000, "120 documents, 1,250,000 tokens")
    bar.show(10_000_000, 10_000_000, "240 documents, 2,500,000 tokens")
    bar.close()
    lines = text(console).splitlines()
    assert lines[0] == "tokenising: 5.00 MB of 10.0 MB (50 %), 120 documents, 1,250,000 tokens"
    assert lines[-1].startswith("tokenising: 10.0 MB, 240 documents, 2,500,000 tokens in ")
    shown = terminal()
    live = AmountProgress("tokenising", shown)
    live.show(5, None, "1 document, 1 tokens")
    drawn = terminal()
    drawn.print(live._display())
    assert "5 B, 1 document, 1 tokens" in text(drawn)
    live.close("done")
    assert "done" in text(shown)


def test_each_stage_has_the_time_of_its_own_work(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(progress_module.time, "monotonic", lambda: now)
    console = plain()
    with StageProgress(console) as stages:
        stages.show(Progress(0, 5_000_000, 9_000_000, 0, "hash"))
        now += 2
        stages.show(Progress(0, 9_000_000, 9_000_000, 0, "hash", is_done=True))
        now += 30  # nobody reads any more
        stages.show(Progress(0, 0, 9_000_000, 0, "tokenise"))
        now += 4
        stages.show(Progress(12, 9_000_000, 9_000_000, 3_000_000, "tokenise", is_done=True))
        now += 30
        stages.show(Progress(0, 0, None, 0, "hold out"))
        now += 0.05
        stages.show(Progress(0, 0, None, 0, "hold out", is_done=True))
        stages.show(Progress(0, 0, None, 0, "train tokenizer", is_done=True))  # which was there already
        now += 30
    assert text(console).splitlines() == [
        "reading the text: 9.00 MB in 2.00 s",
        "tokenising: 9.00 MB, 12 documents, 3,000,000 tokens in 4.00 s",
    ]


def test_download_of_unknown_size() -> None:
    console = plain()
    bar = AmountProgress("downloading the model", console)
    bar.show(3_000_000_000)
    bar.close()
    assert text(console).startswith("downloading the model: 3.00 GB in ")


@pytest.mark.parametrize("ending", ["finished", "failed", "stopped", "running"])
@pytest.mark.parametrize("make", [plain, terminal])
def test_closing_screen(tmp_path: Path, make: Any, ending: str) -> None:
    console = make()
    render_summary(summarise(make_fake_run(tmp_path, steps=60, ending=ending)), console)
    shown = text(console)
    assert shown.startswith(ending)
    lines = shown.splitlines()
    if make is terminal:
        copied = [line for line in lines if str(tmp_path) in line]
        assert all(len(line) <= 80 for line in lines if line not in copied)
        assert "difference" in shown and "████" in shown
    else:
        assert any(line.split()[:8] == ["peak", "memory", "per", "rank", "1.21", "GB", "1.22", "GB"] for line in lines)
        assert any(line.startswith("where a step went: compute ") for line in lines)
    assert ("from_pretrained" in shown) == (ending == "finished")


def a_long_run(first: int, last: int) -> Iterator[Event]:
    """Two ranks that are evaluated, fail to save, and start again now and then."""
    for step in range(first, last + 1):
        moment = START + step / 1000  # few of them are printed, which takes longer than all the rest
        for rank in (0, 1):
            if step % 1000 == 1:
                yield Event("start", moment, rank, {"world_size": 2})
                yield Event("choice", moment, rank, {"name": "loss", "value": "chunked", "reason": "as before"})
            fields = {"step": step, "loss": 1.0, "seconds": 1.0, "tokens": 10, "collectives": {"gather": {"bytes": 1}}}
            yield Event("step", moment, rank, fields)
            if step % 200 == 0:
                yield Event("phase", moment, rank, {"name": "evaluate", "seconds": 1.0})
                yield Event("evaluation", moment, rank, {"step": step, "loss": 1.0})
                yield Event("save", moment, rank, {"step": step, "saved": False, "reason": f"no room at {step}"})
                yield Event("non_finite", moment, rank, {"step": step, "text": f"step {step}"})
        if step % 1000 == 0:
            yield Event("error", moment, 1, {"message": "lost"})
            yield Event("fault", moment, 1, {"action": "restart"})
            yield Event("restart", moment, 1, {"attempt": step})


def test_a_screen_keeps_no_more_of_a_long_run_than_of_a_short_one() -> None:
    with Path(os.devnull).open("w") as nowhere:
        screen = RunConsole(None, None, Console(file=nowhere, width=80))
        screen.take(a_long_run(1, 5000))
        gc.collect()
        tracemalloc.start()
        try:
            screen.take(a_long_run(5001, 15_000))
            gc.collect()
            grown_bytes, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    tally = screen.tally
    kept = (tally.steps, tally.evaluations, tally.non_finite, tally.errors, tally.faults, tally.restarts)
    assert all(0 < len(each) <= console_module.KEPT for each in kept)
    assert [len(ranks) for ranks in tally.choices.values()] == [2]
    # All that is kept was replaced meanwhile: a few dozen events, against 20,000 that went by.
    assert grown_bytes < 500_000
    assert tally.last_step == 15_000 and tally.tokens_per_second(console_module.RECENT_STEPS) == 10.0


def reading(**fields: Any) -> Reading:
    quiet = {"beats": 1, "marks": 1, "step": 0, "first_step": 0, "steps_done": 0, "is_waiting": False}
    return Reading(**{"phase": "load", "saving_since": None, **quiet, **fields})


class Hour:
    """A clock that a test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_long_work_is_a_bar_with_its_rate_and_what_is_left() -> None:
    clock, console = Hour(), terminal()
    with RunConsole(10, fake_plan().to_json(), console) as screen:
        screen._works = LongWorks(clock)
        shown = []
        for second in range(60):
            clock.now = float(second)
            hashed = reading(
                work="checking the checkpoint", work_done_bytes=second * 10**8, work_total_bytes=48 * 10**9
            )
            ahead = reading(work="reading the checkpoint", work_done_bytes=5, work_total_bytes=10)
            screen.take_work([hashed, ahead])
            shown.append("\n".join(frame(screen)))
        assert "checking the checkpoint" not in shown[2]
        assert "checking the checkpoint" in shown[30] and "reading the checkpoint" not in shown[30]
        assert "3.00 GB of 48.0 GB (6.2 %), 100 MB/s, ETA 7m 30s" in shown[30]
        for saved in (0, 50):
            screen.take_work([reading(saving_since=1.0, saved_bytes=saved, save_total_bytes=100)])
            clock.now += 5.0
        assert "saving" in "\n".join(frame(screen)) and "checking" not in "\n".join(frame(screen))


def test_long_work_off_a_terminal_is_a_line_now_and_then() -> None:
    clock, console = Hour(), plain()
    screen = RunConsole(10, fake_plan().to_json(), console)
    screen._works = LongWorks(clock)
    for second in range(60):
        clock.now = float(second)
        screen.take_work([reading(work="exporting", work_done_bytes=second * 10**6, work_total_bytes=10**9)])
    lines = [line for line in text(console).splitlines() if line.startswith("exporting: ")]
    assert len(lines) == 3 and lines[0] == "exporting: 15.0 MB of 1.00 GB (1.5 %), 1.00 MB/s, ETA 16m 25s"


def test_a_save_that_took_longer_than_a_stop_gives_it_is_said() -> None:
    document = fake_plan().to_json()
    document["save"] = {"grace_seconds": {"value": 120.0, "reason": "set by you"}}
    console = plain()
    screen = RunConsole(10, document, console)
    for step, seconds in ((1, 80.0), (2, 110.0), (3, 111.0)):
        screen.take([Event("save", 1.0, 0, {"step": step, "saved": True, "bytes": 5, "seconds": seconds})])
    assert text(console).count("but a stop gives it only a part of 2m 00s (checkpoint.grace)") == 1


def test_an_evaluation_is_shown_once_whichever_rank_tells_it_first() -> None:
    console = plain()
    screen = RunConsole(8, None, console)
    found = {"step": 8, "loss": 2.0, "perplexity": 7.39, "tokens": 64, "seconds": 1.0}
    shown = []
    for rank in (1, 0, 0):  # the last one: another attempt came as far again
        screen.take([Event("evaluation", 1.0, rank, found)])
        shown.append(console.file.getvalue().count("evaluation at step 8"))
    assert shown == [1, 1, 2]

import contextlib
import json
import time
from pathlib import Path

import pytest
from benchmarks import scale_figures, scale_model
from benchmarks.watching import Series, Watcher
from benchmarks.workload import SMALL_LLAMA_SHAPE, llama_parameters


def growing(per_second: float, *, until: float = 100.0) -> Series:
    series = Series()
    for moment in (0.0, 0.5, until):
        series.add(moment, moment * per_second)
    return series


def a_rank(pid: int, *, ends: tuple[float, ...] = (10.0, 14.0, 18.0)) -> scale_figures.RankRecord:
    return scale_figures.RankRecord(
        pid=pid, load_began=1.0, first_step_began=5.0, step_ends=ends, losses=(3.0, 2.5, 2.0), peak_rss_bytes=pid
    )


def test_the_small_shape_has_thirteen_million_parameters():
    assert llama_parameters(SMALL_LLAMA_SHAPE) == 13_325_184


def test_a_series_is_read_between_its_points_and_held_at_its_ends():
    series = growing(2.0, until=4.0)
    assert [series.at(moment) for moment in (-1.0, 0.25, 2.0, 9.0)] == [0.0, 0.5, 4.0, 8.0]
    assert series.between(1.0, 3.0) == 4.0


def test_what_is_per_step_leaves_the_first_step_out():
    watcher = Watcher({}, "a mark that no process has")
    watcher.sent = {"node1": growing(10.0), "node2": growing(30.0)}
    watcher.awake = {1: growing(0.75), 2: growing(0.25)}
    figures = scale_figures.join(
        [a_rank(1), a_rank(2)],
        watcher,
        scene="slow",
        contender="bf16",
        round_number=1,
        tokens_per_step=400,
        wall_seconds=20.0,
    )
    assert (figures.step_seconds, figures.tokens_per_second) == (4.0, 100.0)
    assert figures.wire_bytes_per_step == 80.0  # mean of 40 and 120
    assert figures.unhidden_seconds_per_step == pytest.approx(2.0)  # 1 and 3 of 4 s asleep
    assert (figures.load_seconds, figures.load_bytes) == (4.0, 160.0)
    assert (figures.peak_rss_bytes, figures.losses[-1]) == (2, 2.0)
    with pytest.raises(RuntimeError, match="timed step"):
        scale_figures.join(
            [a_rank(1, ends=(10.0,))],
            watcher,
            scene="slow",
            contender="bf16",
            round_number=1,
            tokens_per_step=400,
            wall_seconds=20.0,
        )


def test_ratios_are_taken_within_a_round(tmp_path: Path):
    def figures(contender: str, round_number: int, rate: float, sent: float) -> scale_figures.Figures:
        return scale_figures.Figures(
            scene="slow",
            contender=contender,
            round=round_number,
            tokens_per_second=rate,
            step_seconds=1.0,
            wire_bytes_per_step=sent,
            unhidden_seconds_per_step=sent,
            told_unhidden_seconds_per_step=None,
            told_wire_bytes_per_step=None,
            load_seconds=1.0,
            load_bytes=0.0,
            peak_rss_bytes=1,
            losses=(1.0,),
            wall_seconds=1.0,
        )

    found = [
        figures("fsdp2", 1, 100, 10),
        figures("bf16", 1, 300, 3),
        figures("fsdp2", 2, 50, 10),
        figures("bf16", 2, 200, 2),
    ]
    by_name = {ratio.name: ratio for ratio in scale_figures.ratios(found)}
    assert by_name["bytes, coremill bf16 / stock FSDP2"].per_round == (0.3, 0.2)
    assert by_name["tokens/s at 50 Mbit/s, coremill bf16 / stock FSDP2"].per_round == (3.0, 4.0)
    assert by_name["tokens/s at 50 Mbit/s, coremill bf16 / DeepSpeed"].median is None
    assert "| coremill shard, wire bf16 | 250 |" in scale_figures.table(found, scale_model.NAMES)


def test_coremills_events_give_the_same_record_as_a_peers_file(tmp_path: Path):
    (tmp_path / "events").mkdir()
    start = {"kind": "start", "time": 100.0, "pid": 7}
    step = {"kind": "step", "loss": 2.0, "communication_seconds": 0.5, "wire_bytes": 9, "peak_rss_bytes": 11}
    lines = [start, {**step, "time": 110.0, "seconds": 4.0}, {**step, "time": 112.0, "seconds": 2.0}]
    (tmp_path / "events" / "rank-00000.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (record,) = scale_figures.coremill_ranks(tmp_path)
    assert (record.pid, record.load_began, record.first_step_began, record.step_ends) == (
        7,
        100.0,
        106.0,
        (110.0, 112.0),
    )
    assert (record.told_unhidden_seconds, record.told_wire_bytes, record.peak_rss_bytes) == (0.5, 9, 11)


def test_a_process_that_sleeps_is_seen_to_sleep():
    import os
    import subprocess
    import sys

    mark = f"SCALE_FIGURES_TEST={os.getpid()}"
    program = "import time\nwhile True: time.sleep(1)"
    name, value = mark.split("=")
    read_since = None
    process = subprocess.Popen([sys.executable, "-S", "-c", program], env={**os.environ, name: value})
    try:
        with Watcher({"ticks": lambda: 3}, mark) as watcher:
            deadline = time.monotonic() + 120
            while time.monotonic() < deadline and not (read_since and time.time() - read_since > 3):
                time.sleep(0.2)
                with contextlib.suppress(KeyError, IndexError):  # not found yet, or not read
                    watcher.awake[process.pid].at(time.time())
                    read_since = read_since or time.time()
    finally:
        process.kill()
        process.wait()
    end = time.time()
    # However busy the machine, a process that asks for next to nothing of a processor sleeps most of the time.
    assert watcher.asleep_seconds(process.pid, read_since, end) > 0.2 * (end - read_since)
    assert watcher.sent["ticks"].at(end) == 3


@pytest.mark.parametrize(
    "arguments", [["--scenes", "medium"], ["--only", "nobody"], ["--rounds", "0"], ["--tokens", "1000"]]
)
def test_wrong_arguments_are_refused(arguments, capsys):
    with pytest.raises(SystemExit) as refusal:
        scale_model.main(arguments)
    assert refusal.value.code == 2

import json
from pathlib import Path

import pytest
from benchmarks import results
from benchmarks.workload import Workload


def a_result(contender: str, round_number: int, rate: float, memory: int) -> results.Result:
    return results.Result(
        contender=contender,
        round=round_number,
        tokens_per_second=rate,
        counted_tokens_per_second=rate,
        positions_per_second=rate,
        step_seconds=(1.0, 2.0, 9.0),
        loss_first=10.0,
        loss_last=9.0,
        peak_rss_bytes=memory,
        peak_tree_rss_bytes=memory,
        ranks=2,
        threads_per_rank=1,
        wall_seconds=30.0,
    )


def write_ranks(folder: Path, positions: int, real: tuple[int, int]) -> None:
    for rank, seconds in enumerate(([9.0, 2.0, 4.0], [9.0, 3.0, 3.0])):
        record = {
            "rank": rank,
            "world_size": 2,
            "threads": 1,
            "step_seconds": seconds,
            "losses": [10.0, 9.5, 9.0],
            "real_tokens": [999, real[rank], real[rank]],
            "positions": [positions] * 3,
            "peak_rss_bytes": 100 + rank,
        }
        (folder / f"rank-{rank}.json").write_text(json.dumps(record))


WORK = Workload(folder="x", parameters=1, documents=1, tokens=1, rows=1, paragraphs=100, paragraph_tokens=5120)
RUN = {"round_number": 1, "peak_tree_rss_bytes": 7, "wall_seconds": 30.0}


def test_packed_rows_count_every_token_after_the_first_step_and_the_slowest_rank(tmp_path):
    write_ranks(tmp_path, positions=70, real=(70, 70))
    result = results.from_ranks(tmp_path, contender="b", work=WORK, padded=False, **RUN)
    assert result.step_seconds == (3.0, 4.0)
    assert result.tokens_per_second == 4 * 70 / 7
    assert result.peak_rss_bytes == 201


def test_padding_is_never_counted(tmp_path):
    write_ranks(tmp_path, positions=700, real=(7, 14))
    result = results.from_ranks(tmp_path, contender="a", work=WORK, padded=True, **RUN)
    assert result.positions_per_second == 400
    assert result.counted_tokens_per_second == 6
    assert result.tokens_per_second == pytest.approx(40)  # a tenth of the corpus is real


def test_a_missing_rank_is_no_result(tmp_path):
    write_ranks(tmp_path, positions=70, real=(70, 70))
    (tmp_path / "rank-1.json").unlink()
    with pytest.raises(RuntimeError, match="1 rank records"):
        results.from_ranks(tmp_path, contender="b", work=WORK, padded=False, **RUN)


def write_run(folder: Path, reported: float) -> None:
    (folder / "events").mkdir()
    events = [{"kind": "start", "threads": 2}] + [
        {"kind": "step", "time": 100.0 + 10 * step, "tokens": 2000, "padding_tokens": 0, "seconds": 10.0}
        for step in range(3)
    ]
    (folder / "events" / "rank-00000.jsonl").write_text("\n".join(map(json.dumps, events)))
    report = {
        "tokens_per_second": reported,
        "peak_rss_bytes_per_rank": [5, 6],
        "loss_first": 10.0,
        "loss_last": 9.0,
        "utilization": 0.8,
    }
    (folder / "report.json").write_text(json.dumps(report))


def test_coremill_is_read_from_its_report(tmp_path):
    write_run(tmp_path, reported=201.0)
    result = results.from_coremill(tmp_path, contender="d", **RUN)
    assert (result.tokens_per_second, result.note) == (201.0, None)
    assert (result.peak_rss_bytes, result.ranks, result.threads_per_rank) == (11, 2, 2)


def test_a_report_that_the_clock_does_not_bear_out_is_corrected_and_named(tmp_path):
    write_run(tmp_path, reported=300.0)
    result = results.from_coremill(tmp_path, contender="d", **RUN)
    assert result.tokens_per_second == 200.0
    assert result.note is not None and "300.0" in result.note


def test_ratios_are_taken_within_rounds():
    found = [
        a_result("a", 1, 10, 400),
        a_result("b", 1, 80, 300),
        a_result("c", 1, 90, 300),
        a_result("d", 1, 99, 200),
        a_result("a", 2, 20, 400),
        a_result("d", 2, 200, 100),  # b and c failed in this round
    ]
    speed, at_wikitext, packed, memory = results.ratios(found, real_share_when_padded=0.26)
    assert speed.per_round == (9.9, 10.0)
    assert at_wikitext.per_round == pytest.approx((19.8, 20.0))
    assert packed.per_round == pytest.approx((1.1,))
    assert memory.median == 0.375


def test_tables_name_every_contender_even_without_a_result():
    table = results.contender_table([a_result("b", 1, 80, 2**31)], {"a": "padded", "b": "packed"})
    assert "| (a) padded | no result |" in table
    assert "| (b) packed | 80.0 | 80.0 | 2.00 | 2.00 GiB | 2 x 1 | 10.000, 9.000 | 1 |" in table
    assert "no result" in results.ratio_table(results.ratios([], 0.12))

"""From records to figures: a result per contender and round, medians over rounds, ratios within a round, the tables."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import coremill_run
from benchmarks.workload import Workload

# Share of real tokens of wikitext-2 rows padded to 512, for which the padded recipe is written.
WIKITEXT_REAL_SHARE = 0.13
GIB = 1024**3


@dataclass(frozen=True, kw_only=True)
class Result:
    """One contender in one round. Throughput leaves the first step out; padding is never counted."""

    contender: str
    round: int
    tokens_per_second: float  # real tokens; for padded rows: positions per second x real share of the whole corpus
    counted_tokens_per_second: float  # real tokens that happened to be in the timed steps
    positions_per_second: float  # real tokens and padding: what was computed
    step_seconds: tuple[float, ...]  # timed steps only
    loss_first: float
    loss_last: float
    peak_rss_bytes: int  # sum over ranks of each rank's own peak
    peak_tree_rss_bytes: int  # sampled by the driver: the whole tree at one moment, launchers included
    ranks: int
    threads_per_rank: int | None
    wall_seconds: float
    utilization: float | None = None
    note: str | None = None


def from_ranks(
    out: Path,
    *,
    contender: str,
    round_number: int,
    work: Workload,
    padded: bool,
    peak_tree_rss_bytes: int,
    wall_seconds: float,
) -> Result:
    """Join what the ranks of a peer wrote down; a step is as long as its slowest rank's."""
    ranks = [json.loads(path.read_text()) for path in sorted(out.glob("rank-*.json"))]
    if not ranks or len(ranks) != ranks[0]["world_size"]:
        raise RuntimeError(f"{len(ranks)} rank records in {out}")
    step_seconds = tuple(max(seconds) for seconds in zip(*(rank["step_seconds"] for rank in ranks), strict=True))[1:]
    if not step_seconds:
        raise RuntimeError("no timed step: at least two are needed")
    positions = sum(sum(rank["positions"][1:]) for rank in ranks)
    counted = sum(sum(rank["real_tokens"][1:]) for rank in ranks)
    seconds = sum(step_seconds)
    # A padded step lasts equally long whatever it holds, but the mean length of a few dozen paragraphs varies by a
    # fifth: the share of the whole corpus is the steadier figure, and right on average.
    real = positions * work.real_share_when_padded if padded else counted
    return Result(
        contender=contender,
        round=round_number,
        tokens_per_second=real / seconds,
        counted_tokens_per_second=counted / seconds,
        positions_per_second=positions / seconds,
        step_seconds=step_seconds,
        loss_first=ranks[0]["losses"][0],
        loss_last=ranks[0]["losses"][-1],
        peak_rss_bytes=sum(rank["peak_rss_bytes"] for rank in ranks),
        peak_tree_rss_bytes=peak_tree_rss_bytes,
        ranks=len(ranks),
        threads_per_rank=ranks[0]["threads"],
        wall_seconds=wall_seconds,
    )


def from_coremill(
    run: Path, *, contender: str, round_number: int, peak_tree_rss_bytes: int, wall_seconds: float
) -> Result:
    """Read what coremill left; the throughput it reports is checked against the clock rule of the peers."""
    report, steps = coremill_run.read_report(run), coremill_run.read_steps(run)
    rate = float(report["tokens_per_second"])
    wall_rate = coremill_run.wall_tokens_per_second(steps)
    note = None
    if wall_rate is not None and abs(wall_rate / rate - 1) > 0.02:
        note = f"report.json says {rate:.1f} tokens/s; between step events it is {wall_rate:.1f}, which counts here"
        rate = wall_rate
    timed = steps[1:]
    padding = sum(step["padding_tokens"] for step in timed)
    real = sum(step["tokens"] for step in timed)
    return Result(
        contender=contender,
        round=round_number,
        tokens_per_second=rate,
        counted_tokens_per_second=rate,
        positions_per_second=rate * (real + padding) / real,
        step_seconds=tuple(step["seconds"] for step in timed),
        loss_first=report["loss_first"],
        loss_last=report["loss_last"],
        peak_rss_bytes=sum(report["peak_rss_bytes_per_rank"]),
        peak_tree_rss_bytes=peak_tree_rss_bytes,
        ranks=len(report["peak_rss_bytes_per_rank"]),
        threads_per_rank=threads_of(run),
        wall_seconds=wall_seconds,
        utilization=report.get("utilization"),
        note=note,
    )


def threads_of(run: Path) -> int | None:
    """Of rank 0."""
    for line in (run / "events" / "rank-00000.jsonl").read_text().splitlines():
        event = json.loads(line)
        if event["kind"] == "start":
            return int(event["threads"])
    return None


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """A figure of the comparison: taken within each round, median over rounds."""

    name: str
    per_round: tuple[float, ...]
    target: str

    @property
    def median(self) -> float | None:
        """None where no round has all it needs."""
        return statistics.median(self.per_round) if self.per_round else None


def ratios(results: Sequence[Result], real_share_when_padded: float) -> list[Ratio]:
    """Contenders are compared within a round: what slows the machine for a while then slows both sides."""
    by_round: dict[int, dict[str, Result]] = {}
    for result in results:
        by_round.setdefault(result.round, {})[result.contender] = result

    def per_round(needed: str, figure: Callable[[dict[str, Result]], float]) -> tuple[float, ...]:
        return tuple(figure(found) for found in by_round.values() if set(needed) <= set(found))

    padded_speedup = per_round("ad", lambda found: found["d"].tokens_per_second / found["a"].tokens_per_second)
    scale = real_share_when_padded / WIKITEXT_REAL_SHARE
    return [
        Ratio(name="real tokens/s, d / a", per_round=padded_speedup, target=">= 8"),
        Ratio(
            name=f"the same if {WIKITEXT_REAL_SHARE:.0%} of a's tokens were real, as in wikitext-2",
            per_round=tuple(value * scale for value in padded_speedup),
            target="",
        ),
        Ratio(
            name="real tokens/s, d / faster of b and c",
            per_round=per_round(
                "bcd",
                lambda found: (
                    found["d"].tokens_per_second / max(found["b"].tokens_per_second, found["c"].tokens_per_second)
                ),
            ),
            target=">= 1.0",
        ),
        Ratio(
            name="peak memory of all ranks, d / a",
            per_round=per_round("ad", lambda found: found["d"].peak_rss_bytes / found["a"].peak_rss_bytes),
            target="<= 0.5",
        ),
    ]


def contender_table(results: Sequence[Result], names: Mapping[str, str]) -> str:
    """Medians over rounds, as a Markdown table."""
    lines = [
        "| contender | real tokens/s | computed tokens/s | s/step | peak memory, all ranks | ranks x threads"
        " | loss first, last | rounds |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for key, name in names.items():
        mine = [result for result in results if result.contender == key]
        if not mine:
            lines.append(f"| ({key}) {name} | no result | | | | | | 0 |")
            continue

        def median(figure: Callable[[Result], float], mine: list[Result] = mine) -> float:
            return statistics.median(figure(result) for result in mine)

        lines.append(
            f"| ({key}) {name} | {median(lambda r: r.tokens_per_second):.1f}"
            f" | {median(lambda r: r.positions_per_second):.1f}"
            f" | {median(lambda r: statistics.median(r.step_seconds)):.2f}"
            f" | {median(lambda r: r.peak_rss_bytes) / GIB:.2f} GiB"
            f" | {mine[-1].ranks} x {mine[-1].threads_per_rank or '?'}"
            f" | {mine[-1].loss_first:.3f}, {mine[-1].loss_last:.3f} | {len(mine)} |"
        )
    return "\n".join(lines)


def ratio_table(found: Sequence[Ratio]) -> str:
    """Ratios with the targets beside them, as a Markdown table."""
    lines = ["| ratio | median | each round | target |", "|---|---:|---|---|"]
    for ratio in found:
        median = "no result" if ratio.median is None else f"{ratio.median:.2f}"
        each = ", ".join(f"{value:.2f}" for value in ratio.per_round)
        lines.append(f"| {ratio.name} | {median} | {each} | {ratio.target} |")
    return "\n".join(lines)

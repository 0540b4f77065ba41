"""The scale model's figures: what ranks and links recorded, joined into one result per contender and round."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.results import Ratio
from benchmarks.watching import Watcher

MB = 1e6


@dataclass(frozen=True, kw_only=True)
class RankRecord:
    """One rank, whichever program it ran."""

    pid: int
    load_began: float  # time of day, as the next two
    first_step_began: float
    step_ends: tuple[float, ...]
    losses: tuple[float, ...]
    peak_rss_bytes: int
    told_unhidden_seconds: float | None = None  # per timed step, where the program counts it itself
    told_wire_bytes: float | None = None


@dataclass(frozen=True, kw_only=True)
class Figures:
    """One contender in one round of one scene; the first step is left out of all that is per step."""

    scene: str
    contender: str
    round: int
    tokens_per_second: float
    step_seconds: float
    wire_bytes_per_step: float  # sent by a rank, headers included: mean over hosts
    unhidden_seconds_per_step: float  # mean over ranks
    told_unhidden_seconds_per_step: float | None
    told_wire_bytes_per_step: float | None
    load_seconds: float
    load_bytes: float  # sent by all hosts together
    peak_rss_bytes: int  # of the largest rank
    losses: tuple[float, ...]
    wall_seconds: float


def peer_ranks(out: Path) -> list[RankRecord]:
    """What the ranks of a peer wrote down."""
    records = []
    for path in sorted(out.glob("rank-*.json")):
        rank = json.loads(path.read_text())
        records.append(
            RankRecord(
                pid=rank["pid"],
                load_began=rank["load_began"],
                first_step_began=rank["first_step_began"],
                step_ends=tuple(rank["step_ends"]),
                losses=tuple(rank["losses"]),
                peak_rss_bytes=rank["peak_rss_bytes"],
            )
        )
    return records


def coremill_ranks(run: Path) -> list[RankRecord]:
    """What coremill's ranks wrote down: their events."""
    records = []
    for path in sorted((run / "events").glob("rank-*.jsonl")):
        events: list[dict[str, Any]] = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
        start = next(event for event in events if event["kind"] == "start")
        steps = [event for event in events if event["kind"] == "step"]
        timed = steps[1:]
        records.append(
            RankRecord(
                pid=start["pid"],
                load_began=start["time"],
                first_step_began=steps[0]["time"] - steps[0]["seconds"],
                step_ends=tuple(step["time"] for step in steps),
                losses=tuple(step["loss"] for step in steps),
                peak_rss_bytes=max(event.get("peak_rss_bytes") or 0 for event in events),
                told_unhidden_seconds=statistics.fmean(step["communication_seconds"] for step in timed),
                told_wire_bytes=statistics.fmean(step["wire_bytes"] for step in timed),
            )
        )
    return records


def join(
    ranks: Sequence[RankRecord],
    watcher: Watcher,
    *,
    scene: str,
    contender: str,
    round_number: int,
    tokens_per_step: int,
    wall_seconds: float,
) -> Figures:
    """All of it, over the timed steps. Ranks step together, so the first one's clock serves for the links."""
    if not ranks or any(len(rank.step_ends) < 2 for rank in ranks):
        raise RuntimeError("a timed step is missing")
    timed = len(ranks[0].step_ends) - 1
    begin, end = ranks[0].step_ends[0], ranks[0].step_ends[-1]
    step_seconds = statistics.fmean((rank.step_ends[-1] - rank.step_ends[0]) / timed for rank in ranks)
    asleep = [watcher.asleep_seconds(rank.pid, rank.step_ends[0], rank.step_ends[-1]) for rank in ranks]
    load_began = min(rank.load_began for rank in ranks)
    load_ended = max(rank.first_step_began for rank in ranks)
    told_seconds = [rank.told_unhidden_seconds for rank in ranks if rank.told_unhidden_seconds is not None]
    told_bytes = [rank.told_wire_bytes for rank in ranks if rank.told_wire_bytes is not None]
    return Figures(
        scene=scene,
        contender=contender,
        round=round_number,
        tokens_per_second=tokens_per_step / step_seconds,
        step_seconds=step_seconds,
        wire_bytes_per_step=statistics.fmean(sent.between(begin, end) for sent in watcher.sent.values()) / timed,
        unhidden_seconds_per_step=statistics.fmean(asleep) / timed,
        told_unhidden_seconds_per_step=statistics.fmean(told_seconds) if told_seconds else None,
        told_wire_bytes_per_step=statistics.fmean(told_bytes) if told_bytes else None,
        load_seconds=load_ended - load_began,
        load_bytes=sum(sent.between(load_began, load_ended) for sent in watcher.sent.values()),
        peak_rss_bytes=max(rank.peak_rss_bytes for rank in ranks),
        losses=ranks[0].losses,
        wall_seconds=wall_seconds,
    )


def table(found: Sequence[Figures], names: Mapping[str, str]) -> str:
    """Medians over rounds, as a Markdown table."""
    lines = [
        "| contender | tokens/s | s/step | MB sent per step and rank | unhidden s/step | load s | MB sent at load, all"
        " | peak memory of a rank | loss | rounds |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for key, name in names.items():
        mine = [figures for figures in found if figures.contender == key]
        if not mine:
            lines.append(f"| {name} | no result | | | | | | | | 0 |")
            continue

        def median(figure: Callable[[Figures], float], mine: list[Figures] = mine) -> float:
            return statistics.median(figure(figures) for figures in mine)

        lines.append(
            f"| {name} | {median(lambda f: f.tokens_per_second):.0f} | {median(lambda f: f.step_seconds):.2f}"
            f" | {median(lambda f: f.wire_bytes_per_step) / MB:.1f}"
            f" | {median(lambda f: f.unhidden_seconds_per_step):.2f}"
            f" | {median(lambda f: f.load_seconds):.1f} | {median(lambda f: f.load_bytes) / MB:.1f}"
            f" | {median(lambda f: f.peak_rss_bytes) / 2**20:.0f} MiB | {mine[0].losses[-1]:.4f} | {len(mine)} |"
        )
    return "\n".join(lines)


def ratios(found: Sequence[Figures]) -> list[Ratio]:
    """Taken within a round: what slows the machine for a while then slows both sides."""
    by_round: dict[tuple[str, int], dict[str, Figures]] = {}
    for figures in found:
        by_round.setdefault((figures.scene, figures.round), {})[figures.contender] = figures

    def ratio(name: str, scene: str, over: str, under: str, figure: Callable[[Figures], float], target: str) -> Ratio:
        return Ratio(
            name=name,
            per_round=tuple(
                figure(contenders[over]) / figure(contenders[under])
                for (where, _), contenders in by_round.items()
                if where == scene and over in contenders and under in contenders
            ),
            target=target,
        )

    def sent(figures: Figures) -> float:
        return figures.wire_bytes_per_step

    def rate(figures: Figures) -> float:
        return figures.tokens_per_second

    return [
        ratio("bytes, coremill bf16 / stock FSDP2", "slow", "bf16", "fsdp2", sent, "<= 0.40"),
        ratio("bytes, coremill bf16 / DeepSpeed", "slow", "bf16", "zero3", sent, "<= 0.50"),
        ratio("bytes, coremill auto / stock FSDP2", "slow", "auto", "fsdp2", sent, "<= 0.70"),
        ratio("tokens/s at 50 Mbit/s, coremill bf16 / stock FSDP2", "slow", "bf16", "fsdp2", rate, ">= 3"),
        ratio("tokens/s at 50 Mbit/s, coremill bf16 / DeepSpeed", "slow", "bf16", "zero3", rate, ">= 3"),
        ratio("tokens/s at 50 Mbit/s, coremill replicate bf16 / DDP", "slow", "replicate", "ddp", rate, ""),
        ratio(
            "unhidden communication, coremill bf16 / stock FSDP2",
            "slow",
            "bf16",
            "fsdp2",
            lambda figures: figures.unhidden_seconds_per_step,
            "<= 0.25",
        ),
        ratio("tokens/s at 1 Gbit/s, shard on 2 hosts / single hosts", "fast", "bf16", "single", rate, ">= 0.95"),
        ratio(
            "tokens/s at 1 Gbit/s, replicate on 2 hosts / single hosts", "fast", "replicate", "single", rate, ">= 0.95"
        ),
    ]

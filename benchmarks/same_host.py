"""Ranks of one host, through memory and through gloo, in turn: `python -m benchmarks.same_host [--ranks 2] [...]`.

One model with random weights under the shard engine, the same steps both ways, alternating. Prints tokens per second,
and per rank: peak resident memory, memory with shared pages shared out (PSS, sampled),
bytes sent, bytes read through memory, and the seconds that compute threads stood waiting. Losses must be the same.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
WAYS = ("memory", "gloo")
TIMEOUT_SECONDS = 540.0
PSS_EVERY_SECONDS = 0.2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run both ways in turn and print what came out."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.same_host", description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--intermediate", type=int, default=1408)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--rows", type=int, default=1, help="per rank and pass")
    parser.add_argument("--passes", type=int, default=1)
    parser.add_argument("--keep", action="store_true", help="keep gathered weights through backward")
    parser.add_argument("--tied", action="store_true")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args(arguments)

    sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]
    os.environ["PYTHONPATH"] = str(ROOT)  # ranks find `measured` there
    import ranks
    from tiny_models import make_config_folder
    from training import make_packed

    found: dict[str, list[list[dict[str, Any]]]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        shape = {
            "hidden_size": options.hidden,
            "intermediate_size": options.intermediate,
            "num_hidden_layers": options.layers,
            "num_attention_heads": options.hidden // 64,
            "num_key_value_heads": options.hidden // 64,
            "vocab_size": options.vocabulary,
            "max_position_embeddings": options.length,
        }
        make_config_folder(Path(folder) / "model", "llama-tied" if options.tied else "llama", **shape)
        rows = options.rows * options.passes * options.ranks
        packed = make_packed(
            Path(folder) / "data", rows=2 * rows, length=options.length, vocabulary=min(options.vocabulary, 60_000)
        )
        run = {
            "model_folder": f"{folder}/model",
            "data": packed.to_json(),
            "weights": "random",
            "engine": "shard",
            "dtype": options.dtype,
            "keep_gathered": options.keep,
            "rows_per_step": rows,
            "micro_batch_rows": options.rows,
            "steps": options.steps,
            "threads": options.threads,
        }
        for _ in range(options.turns):
            for way, turns in found.items():
                turns.append(
                    ranks.run_ranks(
                        "benchmarks.same_host:measured",
                        options.ranks,
                        timeout_seconds=TIMEOUT_SECONDS,
                        through_memory=way == "memory",
                        run=run,
                    )
                )
                print(f"{way}: {_rate(turns[-1], rows * options.length):.0f} tokens/s", flush=True)
        ranks.close_nursery()
    _print(found, rows * options.length)
    return 0


def measured(world: Any, *, through_memory: bool, run: dict[str, Any]) -> dict[str, Any]:
    """On a rank: a run with what it took."""
    from coremill.hardware.process_memory import peak_rss_bytes
    from training import train_here

    most, done = 0, threading.Event()

    def sample() -> None:
        nonlocal most
        while not done.wait(PSS_EVERY_SECONDS):
            text = Path("/proc/self/smaps_rollup").read_text()
            most = max(most, *(1024 * int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:")))

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    result = train_here(world, through_memory=through_memory, **run)
    done.set()
    thread.join()
    return {**result, "peak_rss_bytes": peak_rss_bytes(), "pss_bytes": most}


def _rate(of_ranks: list[dict[str, Any]], tokens_per_step: int) -> float:
    return tokens_per_step / statistics.median(of_ranks[0]["seconds"][1:])


def _print(found: dict[str, list[list[dict[str, Any]]]], tokens_per_step: int) -> None:
    print("\n| way | tokens/s | peak RSS | PSS | sent per step | read in memory per step | waited per step |")
    print("|---|---|---|---|---|---|---|")
    for way, turns in found.items():
        rate = statistics.median(_rate(of_ranks, tokens_per_step) for of_ranks in turns)
        all_ranks = [rank for of_ranks in turns for rank in of_ranks]
        sizes = [max(rank[name] for rank in all_ranks) for name in ("peak_rss_bytes", "pss_bytes")]
        sizes += [max(rank[name][-1] for rank in all_ranks) for name in ("wire_bytes", "shared_bytes")]
        waited = statistics.median(seconds for rank in all_ranks for seconds in rank["waited_seconds"][1:])
        shown = " | ".join(f"{size / 1e6:.0f} MB" for size in sizes)
        print(f"| {way} | {rate:.0f} | {shown} | {waited:.2f} s |")
    losses = {tuple(of_ranks[0]["losses"]) for turns in found.values() for of_ranks in turns}
    print("losses are the same" if len(losses) == 1 else f"losses differ: {sorted(losses)}")


if __name__ == "__main__":
    sys.exit(main())

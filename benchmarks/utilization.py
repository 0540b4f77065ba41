"""How much of this machine's matmul rate coremill turns into training: `python -m benchmarks.utilization [--steps N]`.

One process on all cores, the model of `benchmarks.peers`. `utilization` is coremill's own figure from report.json:
model FLOPs per second over the matmul FLOPs per second that its calibration measured. The calibration is made anew
right before the run: one kept from a busier or quieter hour would flatter or shame the figure.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from benchmarks import coremill_run, peers, processes

TARGET = 0.75
TOKENS_PER_STEP = 4096


def main(argv: list[str] | None = None) -> int:
    """Train a few steps and print the figures; 1 where the run failed, 0 whatever the figures are."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.utilization", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--steps", type=int, default=4, help="timed steps (default 4)")
    parser.add_argument("--set", dest="settings", action="append", default=[], help="passed on to coremill train")
    parser.add_argument("--timeout", type=float, default=900, help="seconds the run may take (default 900)")
    parser.add_argument("--folder", type=Path, default=peers.FOLDER, help="workload, caches, logs (default runs/peers)")
    arguments = parser.parse_args(argv)
    cache = arguments.folder.resolve()
    out = cache / time.strftime("utilization-%Y%m%d-%H%M%S")
    out.mkdir(parents=True)
    work = peers.prepare_workload(cache, out / "workload.log")
    run_file, run = out / "coremill.yaml", out / "run"
    coremill_run.write_run_file(
        run_file, work, run=run, steps=arguments.steps + 1, tokens_per_step=TOKENS_PER_STEP, seed=peers.SEED
    )
    settings = ["parallel.ranks_per_node=1", *arguments.settings]
    finished = processes.run_tree(
        coremill_run.train_command(run_file, settings),
        environment=peers.environment(cache, {"COREMILL_CACHE": str(out / "coremill")}),
        folder=peers.ROOT,
        log=out / "log.txt",
        timeout_seconds=arguments.timeout,
    )
    if finished.returncode != 0:
        print(f"coremill ended with {finished.returncode}; see {finished.log}")
        return 1
    report = coremill_run.read_report(run)
    rows = {
        "utilization": f"{report['utilization']:.3f} (target >= {TARGET})",
        "model FLOP/s": f"{report['model_flops_per_second'] / 1e9:.1f} G",
        "calibrated matmul FLOP/s": f"{report['matmul_flops_per_second'] / 1e9:.1f} G",
        "real tokens/s": f"{report['tokens_per_second']:.1f}",
        "peak memory": f"{sum(report['peak_rss_bytes_per_rank']) / 2**30:.2f} GiB",
    }
    print("| figure | value |\n|---|---:|")
    for name, value in rows.items():
        print(f"| {name} | {value} |")
    print(f"{work.parameters:,} parameters, {arguments.steps} timed steps of {TOKENS_PER_STEP} tokens; run in {run}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

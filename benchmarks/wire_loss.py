"""What a narrower wire does to the loss: `python -m benchmarks.wire_loss [--steps N] [--json FILE]`.

The built-in corpus and a small Llama shape, the same rows, once in one process and then on two hosts (network
namespaces) with every engine and wire dtype. Prints the loss after the last step and its distance from the fp32 wire of
the same engine; for fp32 the distance from the single process. Needs root, like the scale model; asserts nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.hosts.namespaces import Fleet, fake_hosts, why_not

from benchmarks import coremill_run, peers, processes

HOSTS = 2
SHAPE = {
    "model_type": "llama",
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 4096,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
TARGETS = {"fp32": 1e-5, "auto": 5e-4, "bf16": 5e-3}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One run."""

    engine: str
    wire_dtype: str
    hosts: int
    loss_first: float
    loss_last: float
    difference: float | None  # relative to what it is held against


def main(argv: list[str] | None = None) -> int:
    """All runs, one after the other; 1 where one failed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.wire_loss", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps (default 100)")
    parser.add_argument("--json", type=Path, help="write all figures to this file too")
    parser.add_argument("--timeout", type=float, default=600, help="seconds one run may take (default 600)")
    parser.add_argument("--folder", type=Path, default=peers.FOLDER, help="caches and logs (default runs/peers)")
    arguments = parser.parse_args(argv)
    reason = why_not()
    if reason is not None:
        raise SystemExit(f"no hosts can be made here: {reason}")
    cache = arguments.folder.resolve()
    folder = cache / time.strftime("wire-loss-%Y%m%d-%H%M%S")
    folder.mkdir(parents=True)
    found: list[Outcome] = []
    cpus = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(prefix="coremill-hosts-") as hosts_folder:
        with fake_hosts(HOSTS, Path(hosts_folder), cpus=cpus) as fleet:

            def run(engine: str, wire_dtype: str, hosts: int, against: float | None) -> Outcome:
                report = _run(fleet, folder, cache, arguments, engine=engine, wire_dtype=wire_dtype, hosts=hosts)
                last = float(report["loss_last"])
                outcome = Outcome(
                    engine=engine,
                    wire_dtype=wire_dtype,
                    hosts=hosts,
                    loss_first=float(report["loss_first"]),
                    loss_last=last,
                    difference=None if against is None else abs(last - against) / against,
                )
                found.append(outcome)
                print(f"{engine}, {wire_dtype}, {hosts} hosts: {last:.6f}", flush=True)
                return outcome

            alone = run("replicate", "fp32", 1, None).loss_last
            for engine in ("shard", "replicate"):
                exact = run(engine, "fp32", HOSTS, alone).loss_last
                for wire_dtype in ("auto", "bf16"):
                    run(engine, wire_dtype, HOSTS, exact)
    print(f"\n| engine | hosts | wire | loss at step 1 | at step {arguments.steps} | off by | target |")
    print("|---|---:|---|---:|---:|---:|---:|")
    for one in found:
        off, target = (
            ("", "") if one.difference is None else (f"{one.difference:.1e}", f"{TARGETS[one.wire_dtype]:.0e}")
        )
        print(
            f"| {one.engine} | {one.hosts} | {one.wire_dtype} | {one.loss_first:.5f} | {one.loss_last:.5f}"
            f" | {off} | {target} |"
        )
    document = {"steps": arguments.steps, "outcomes": [asdict(one) for one in found]}
    for target in filter(None, (folder / "wire-loss.json", arguments.json)):
        target.write_text(json.dumps(document, indent=1) + "\n")
    return 0


def _run(
    fleet: Fleet, folder: Path, cache: Path, arguments: argparse.Namespace, *, engine: str, wire_dtype: str, hosts: int
) -> dict[str, float]:
    out = folder / f"{engine}-{wire_dtype}-{hosts}"
    out.mkdir()
    document = {
        "model": {"weights": "random", "config": SHAPE},
        "tokenizer": "built-in",
        "data": {"source": "built-in", "sequence_length": 128},
        "train": {
            "steps": arguments.steps,
            "tokens_per_step": 1024,
            "learning_rate": 2e-3,
            "schedule": "constant",
            "warmup_steps": 4,
        },
        "parallel": {"engine": engine, "dtype": "fp32", "wire_dtype": wire_dtype},
        "checkpoint": {"every": "never"},
        "run": {"folder": str(out / "run"), "export": False},
    }
    run_file = out / "run.yaml"
    run_file.write_text(json.dumps(document, indent=1))  # JSON is YAML
    command = coremill_run.train_command(run_file)
    if hosts > 1:
        hostfile = out / "hostfile"
        hostfile.write_text("".join(f"{host.name} slots=1\n" for host in fleet.hosts))
        command += ["--hostfile", str(hostfile), "--ssh", fleet.ssh]
    finished = processes.run_tree(
        fleet.hosts[0].command(command, peers.ROOT),
        environment=peers.environment(cache),
        folder=peers.ROOT,
        log=out / "log.txt",
        timeout_seconds=arguments.timeout,
    )
    if finished.returncode != 0:
        raise SystemExit(f"{out.name} ended with {finished.returncode}; see {finished.log}")
    return coremill_run.read_report(out / "run")


if __name__ == "__main__":
    sys.exit(main())

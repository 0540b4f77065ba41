"""What a narrower wire does to the loss: `python -m benchmarks.wire_loss [--example] [--steps N] [--json FILE]`.

The built-in corpus and a small Llama shape at a high constant rate, or (`--example`) the built-in example as it is
shipped; the same rows, once in one process and then on two hosts (network namespaces) with every engine and wire dtype.
Prints the loss of the last step, the mean of the last ten, and how far each is from the fp32 wire of the same engine;
for fp32 from the single process. Needs root, like the scale model; asserts nothing.
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
EXAMPLE = peers.ROOT / "src" / "coremill" / "config" / "built_in.yaml"
TARGETS = {"fp32": 1e-5, "auto": 5e-4, "bf16": 5e-3}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One run."""

    engine: str
    wire_dtype: str
    hosts: int
    loss_first: float
    loss_last: float
    loss_of_ten: float  # mean of the last ten steps
    difference: float | None  # of the last step, relative to what it is held against
    difference_of_ten: float | None


def main(argv: list[str] | None = None) -> int:
    """All runs, one after the other; 1 where one failed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.wire_loss", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps (default 100)")
    parser.add_argument("--example", action="store_true", help="the built-in example instead of the small shape")
    parser.add_argument("--engines", default="shard,replicate", help="engines to run (default shard,replicate)")
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
    cpus = [str(cpu) for cpu in sorted(os.sched_getaffinity(0))]
    with tempfile.TemporaryDirectory(prefix="coremill-hosts-") as hosts_folder:
        with fake_hosts(HOSTS, Path(hosts_folder), cpus=cpus) as fleet:

            def run(engine: str, wire_dtype: str, hosts: int, against: Outcome | None) -> Outcome:
                losses = _run(fleet, folder, cache, arguments, engine=engine, wire_dtype=wire_dtype, hosts=hosts)
                last, of_ten = losses[-1], sum(losses[-10:]) / len(losses[-10:])
                outcome = Outcome(
                    engine=engine,
                    wire_dtype=wire_dtype,
                    hosts=hosts,
                    loss_first=losses[0],
                    loss_last=last,
                    loss_of_ten=of_ten,
                    difference=None if against is None else abs(last / against.loss_last - 1),
                    difference_of_ten=None if against is None else abs(of_ten / against.loss_of_ten - 1),
                )
                found.append(outcome)
                print(f"{engine}, {wire_dtype}, {hosts} hosts: {last:.6f}", flush=True)
                return outcome

            alone = run("replicate", "fp32", 1, None)
            for engine in arguments.engines.split(","):
                exact = run(engine, "fp32", HOSTS, alone)
                for wire_dtype in ("auto", "bf16"):
                    run(engine, wire_dtype, HOSTS, exact)
    print("\n" + _table(found, arguments.steps))
    document = {"steps": arguments.steps, "outcomes": [asdict(one) for one in found]}
    for target in filter(None, (folder / "wire-loss.json", arguments.json)):
        target.write_text(json.dumps(document, indent=1) + "\n")
    return 0


def _table(found: list[Outcome], steps: int) -> str:
    lines = [
        f"| engine | hosts | wire | loss at step 1 | at step {steps} | off by | mean of last ten | off by | target |",
        "|---|---:|---|---:|---:|---:|---:|---:|---:|",
    ]
    for one in found:
        off, off_ten, target = "", "", ""
        if one.difference is not None and one.difference_of_ten is not None:
            off, off_ten = f"{one.difference:.1e}", f"{one.difference_of_ten:.1e}"
            target = f"{TARGETS[one.wire_dtype]:.0e}"
        lines.append(
            f"| {one.engine} | {one.hosts} | {one.wire_dtype} | {one.loss_first:.5f} | {one.loss_last:.5f} | {off}"
            f" | {one.loss_of_ten:.5f} | {off_ten} | {target} |"
        )
    return "\n".join(lines)


def _run(
    fleet: Fleet, folder: Path, cache: Path, arguments: argparse.Namespace, *, engine: str, wire_dtype: str, hosts: int
) -> list[float]:
    out = folder / f"{engine}-{wire_dtype}-{hosts}"
    out.mkdir()
    document = {
        "model": {"weights": "random", "config": SHAPE},
        "tokenizer": "built-in",
        "data": {"source": "built-in", "sequence_length": 128},
        "train": {
            "tokens_per_step": 1024,
            "learning_rate": 2e-3,
            "schedule": "constant",
            "warmup_steps": 4,
        },
    }
    run_file = out / "run.yaml"
    run_file.write_text(EXAMPLE.read_text() if arguments.example else json.dumps(document, indent=1))  # JSON is YAML
    settings = [
        *(f"parallel.engine={engine}", "parallel.dtype=fp32", f"parallel.wire_dtype={wire_dtype}"),
        *(f"train.steps={arguments.steps}", "checkpoint.every=never", "run.export=false", f"run.folder={out / 'run'}"),
    ]
    command = coremill_run.train_command(run_file, settings)
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
    return [float(step["loss"]) for step in coremill_run.read_steps(out / "run")]


if __name__ == "__main__":
    sys.exit(main())

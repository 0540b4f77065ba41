"""The scale model: `python -m benchmarks.scale_model [--rounds N] [--quick] [--only slow,fast] [--json FILE]`.

Hosts are network namespaces with a link and a processor of their own. A core of the machine this was made on does some
36 GFLOP/s, so a link of 50 Mbit/s gives it the arithmetic per byte of a server with AMX on 12.5 Gbit/s: what wins here
wins there for the same reason. Two scenes: four hosts at 50 Mbit/s, and two at 1 Gbit/s, where coremill also runs on
single hosts that exchange nothing. Contenders alternate within each round; all train on the same rows.
Needs root, iproute2 and openssh-server (`make hosts-setup`). Prints figures and targets; asserts nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.hosts.namespaces import DEVICE, FakeHost, Fleet, fake_hosts, free_port, why_not

from benchmarks import coremill_run, peers, processes, results, scale_figures
from benchmarks.watching import Watcher
from benchmarks.workload import SEQUENCE_LENGTH, Workload

TOKENS_PER_STEP = 4096
LEARNING_RATE = 1e-3  # large enough that a few steps move the loss
MARK = "COREMILL_SCALE_MODEL"
ALIKE = ("parallel.dtype=fp32", "checkpoint.every=never")  # the peers' arithmetic; saving is measured for nobody
MODULES = {
    "fsdp2": "benchmarks.contenders.fsdp2_stock",
    "ddp": "benchmarks.contenders.trainer_ddp",
    "zero3": "benchmarks.contenders.zero3_packed",
}
COREMILL = {
    "bf16": ("parallel.engine=shard", "parallel.wire_dtype=bf16"),
    "auto": ("parallel.engine=shard", "parallel.wire_dtype=auto"),
    "replicate": ("parallel.engine=replicate", "parallel.wire_dtype=bf16"),
    "single": ("parallel.engine=auto",),
}
NAMES = {
    "fsdp2": "stock FSDP2",
    "zero3": "HF Trainer + DeepSpeed ZeRO-3",
    "ddp": "HF Trainer, DDP",
    "bf16": "coremill shard, wire bf16",
    "auto": "coremill shard, wire auto",
    "replicate": "coremill replicate, wire bf16",
    "single": "coremill, single hosts, each half of the tokens",
}


@dataclass(frozen=True, kw_only=True)
class Scene:
    """So many hosts on links of such a rate, and who runs there."""

    name: str
    hosts: int
    bits_per_second: float
    contenders: tuple[str, ...]
    once: tuple[str, ...] = ()  # only in the first round: they take minutes to load


SCENES = {
    "slow": Scene(
        name="slow",
        hosts=4,
        bits_per_second=50e6,
        contenders=("fsdp2", "bf16", "zero3", "auto", "ddp", "replicate"),
        once=("zero3",),
    ),
    "fast": Scene(
        name="fast",
        hosts=2,
        bits_per_second=1e9,
        contenders=("single", "bf16", "replicate", "fsdp2", "auto", "zero3", "ddp"),
    ),
}


@dataclass(frozen=True, kw_only=True)
class Go:
    """What holds for the whole command."""

    folder: Path
    cache: Path
    work: Workload
    packed: Path  # the rows as coremill has packed them
    tokens_per_step: int
    timed_steps: int
    timeout_seconds: float
    settings: tuple[str, ...] = ()  # of every run of coremill

    @property
    def steps(self) -> int:
        """The first step, which is not timed, and the timed ones."""
        return self.timed_steps + 1


def main(argv: list[str] | None = None) -> int:
    """Run all rounds of all scenes; 1 where a contender failed, else 0, whatever the figures are."""
    arguments = _parse(argv)
    cache = arguments.folder.resolve()
    folder = begin(cache, "scale-model")
    print("preparing the workload (once per Python version)", flush=True)
    work = peers.prepare_workload(cache, folder / "workload.log", "13M")
    go = Go(
        folder=folder,
        cache=cache,
        work=work,
        packed=pack(folder, cache, work),
        tokens_per_step=arguments.tokens,
        timed_steps=arguments.steps,
        timeout_seconds=arguments.timeout,
    )
    load = os.getloadavg()[0]
    print(
        f"{work.parameters:,} parameters, {go.tokens_per_step} tokens a step; load average {load:.2f}; logs in {folder}"
    )
    began = time.monotonic()
    found: list[scale_figures.Figures] = []
    failures: list[str] = []
    try:
        for scene in (SCENES[name] for name in arguments.scenes):
            contenders = [key for key in scene.contenders if not arguments.only or key in arguments.only]
            _run_scene(go, scene, contenders, arguments.rounds, found, failures)
    except KeyboardInterrupt:
        failures.append("interrupted")
        print("interrupted: what was measured so far follows", flush=True)
    for name in arguments.scenes:
        scene, mine = SCENES[name], [figures for figures in found if figures.scene == name]
        print(f"\n{scene.hosts} hosts, {scene.bits_per_second / 1e6:.0f} Mbit/s, {go.timed_steps} timed steps:\n")
        print(scale_figures.table(mine, {key: NAMES[key] for key in scene.contenders}))
    comparison = scale_figures.ratios(found)
    print("\n" + results.ratio_table(comparison))
    print(f"\n{(time.monotonic() - began) / 60:.1f} minutes in all")
    document = {
        "parameters": work.parameters,
        "load_average_at_start": load,
        "tokens_per_step": go.tokens_per_step,
        "timed_steps": go.timed_steps,
        "figures": [asdict(figures) for figures in found],
        "ratios": [{**asdict(ratio), "median": ratio.median} for ratio in comparison],
        "failures": failures,
    }
    for target in filter(None, (folder / "scale-model.json", arguments.json)):
        target.write_text(json.dumps(document, indent=1) + "\n")
    return 1 if failures else 0


def begin(cache: Path, name: str) -> Path:
    """Make sure that there can be hosts; a new folder for this go."""
    reason = why_not()
    if reason is not None:
        raise SystemExit(f"no hosts can be made here: {reason}")
    signal.signal(signal.SIGTERM, peers.interrupt)
    folder = cache / time.strftime(f"{name}-%Y%m%d-%H%M%S")
    folder.mkdir(parents=True)
    return folder


def _run_scene(
    go: Go,
    scene: Scene,
    contenders: Sequence[str],
    rounds: int,
    found: list[scale_figures.Figures],
    failures: list[str],
) -> None:
    """Add each contender's figures, round after round, to `found`."""
    cpus = [str(cpu) for cpu in sorted(os.sched_getaffinity(0))]
    with tempfile.TemporaryDirectory(prefix="coremill-hosts-") as hosts_folder:
        with fake_hosts(
            scene.hosts, Path(hosts_folder), link_bits_per_second=scene.bits_per_second, cpus=cpus
        ) as fleet:
            for round_number in range(1, rounds + 1):
                for key in (key for key in contenders if round_number == 1 or key not in scene.once):
                    print(f"{scene.name}, round {round_number}/{rounds}: {NAMES[key]}", flush=True)
                    try:
                        figures = _run_contender(go, scene, fleet, key, round_number)
                    except peers.ContenderFailed as failure:
                        failures.append(f"{scene.name}, round {round_number}, {key}: {failure}")
                        print(f"  failed: {failure}", flush=True)
                        continue
                    found.append(figures)
                    print(
                        f"  {figures.tokens_per_second:.0f} tokens/s,"
                        f" {figures.wire_bytes_per_step / 1e6:.1f} MB a step,"
                        f" {figures.unhidden_seconds_per_step:.2f} of {figures.step_seconds:.2f} s unhidden,"
                        f" load {figures.load_seconds:.1f} s and {figures.load_bytes / 1e6:.1f} MB,"
                        f" loss {figures.losses[-1]:.4f}, {figures.wall_seconds:.0f} s in all",
                        flush=True,
                    )


def _run_contender(go: Go, scene: Scene, fleet: Fleet, key: str, round_number: int) -> scale_figures.Figures:
    out = go.folder / f"{scene.name}-{round_number}-{key}"
    out.mkdir()
    seed = peers.SEED + round_number
    if key == "single":
        commands = [single_host(go, host, out / host.name, seed, scene.hosts) for host in fleet.hosts]
    elif key in COREMILL:
        commands = [coremill_hosts(go, fleet, out, seed, COREMILL[key])]
    else:
        rows = out / "rows.npy"
        _write_rows(go, rows, seed)
        commands = _torchrun(go, fleet, out, rows, MODULES[key])
    mark = f"{MARK}={uuid.uuid4().hex}"
    environment = peers.environment(go.cache, {**_threads(key), **dict([mark.split("=")])})
    counters: dict[str, Callable[[], int]] = {
        host.name: (lambda host=host: host.sent_bytes)
        for host in fleet.hosts  # type: ignore[misc]
    }
    began = time.monotonic()
    with Watcher(counters, mark) as watcher:
        _run_together(commands, environment, out, go.timeout_seconds)
    try:
        if key == "single":
            ranks = [rank for host in fleet.hosts for rank in scale_figures.coremill_ranks(out / host.name / "run")]
        else:
            ranks = scale_figures.coremill_ranks(out / "run") if key in COREMILL else scale_figures.peer_ranks(out)
        if len(ranks) != scene.hosts:
            raise RuntimeError(f"{len(ranks)} rank records")
        return scale_figures.join(
            ranks,
            watcher,
            scene=scene.name,
            contender=key,
            round_number=round_number,
            tokens_per_step=go.tokens_per_step,
            wall_seconds=time.monotonic() - began,
        )
    except (OSError, KeyError, ValueError, RuntimeError, StopIteration) as error:
        raise peers.ContenderFailed(f"left no usable record ({error!r}); see {out}") from error


def together(commands: Sequence[list[str]], out: Path) -> str:
    """A shell program that runs all commands at once, with a log each, and fails where one does."""
    lines = [
        f'{shlex.join(command)} >{out}/log-{index}.txt 2>&1 & pids="$pids $!"' for index, command in enumerate(commands)
    ]
    return "\n".join([*lines, "code=0; for pid in $pids; do wait $pid || code=$?; done; exit $code"])


def _run_together(
    commands: Sequence[list[str]], environment: dict[str, str], out: Path, timeout_seconds: float
) -> None:
    """All commands at once, under one shell whose whole tree is ended if it takes too long."""
    finished = processes.run_tree(
        ["bash", "-c", together(commands, out)],
        environment=environment,
        folder=peers.ROOT,
        log=out / "log.txt",
        timeout_seconds=timeout_seconds,
    )
    if finished.timed_out:
        raise peers.ContenderFailed(f"over the time limit of {timeout_seconds:.0f} s; see {out}")
    if finished.returncode != 0:
        raise peers.ContenderFailed(f"exit code {finished.returncode}; see {out}")


def _torchrun(go: Go, fleet: Fleet, out: Path, rows: Path, module: str) -> list[list[str]]:
    """One torchrun per host, as people start them."""
    first, port = fleet.hosts[0], free_port()
    meeting = ("--nnodes", str(len(fleet.hosts)), "--nproc-per-node", "1", "--master-addr", first.address)
    script = (
        *("-m", module, "--workload", go.work.folder, "--out", str(out), "--steps", str(go.steps), "--dtype", "fp32"),
        *("--rows-per-rank", str(go.tokens_per_step // SEQUENCE_LENGTH // len(fleet.hosts))),
        *("--ordered-rows", str(rows), "--learning-rate", str(LEARNING_RATE)),
    )
    return [
        host.command(
            [
                *(sys.executable, "-m", "torch.distributed.run", *meeting, "--master-port", str(port)),
                *("--node-rank", str(index), *script),
            ],
            peers.ROOT,
        )
        for index, host in enumerate(fleet.hosts)
    ]


def coremill_hosts(go: Go, fleet: Fleet, out: Path, seed: int, settings: Sequence[str]) -> list[str]:
    """`coremill train --hostfile` on the first host: it finds cores, threads, interface and link by itself."""
    run_file = _run_file(go, out, seed, go.tokens_per_step)
    hostfile = out / "hostfile"
    hostfile.write_text("".join(f"{host.name} slots=1\n" for host in fleet.hosts))
    command = coremill_run.train_command(run_file, (*settings, *ALIKE, *go.settings))
    return fleet.hosts[0].command([*command, "--hostfile", str(hostfile), "--ssh", fleet.ssh], peers.ROOT)


def single_host(go: Go, host: FakeHost, out: Path, seed: int, hosts: int) -> list[str]:
    """The same rows per rank, nothing to exchange; all hosts at once, so that they share caches and memory likewise."""
    out.mkdir()
    run_file = _run_file(go, out, seed, go.tokens_per_step // hosts)
    return host.command(coremill_run.train_command(run_file, (*COREMILL["single"], *ALIKE, *go.settings)), peers.ROOT)


def _run_file(go: Go, out: Path, seed: int, tokens_per_step: int) -> Path:
    run_file = out / "coremill.yaml"
    coremill_run.write_run_file(
        run_file,
        go.work,
        run=out / "run",
        steps=go.steps,
        tokens_per_step=tokens_per_step,
        seed=seed,
        learning_rate=LEARNING_RATE,
        schedule="constant",
    )
    return run_file


def pack(folder: Path, cache: Path, work: Workload) -> Path:
    """Have coremill tokenise and pack the documents, as it does before training; where it put them."""
    out = folder / "packing"
    out.mkdir()
    run_file = out / "coremill.yaml"
    coremill_run.write_run_file(run_file, work, run=out / "run", steps=1, tokens_per_step=TOKENS_PER_STEP, seed=1)
    finished = processes.run_tree(
        [*coremill_run.train_command(run_file), "--dry-run"],
        environment=peers.environment(cache),
        folder=peers.ROOT,
        log=out / "log.txt",
        timeout_seconds=600,
    )
    manifests = sorted((cache / "coremill" / "data").glob("*/manifest.json"), key=lambda path: path.stat().st_mtime)
    asked = (str(work.documents_file.resolve()), SEQUENCE_LENGTH)
    found = [
        path
        for path in manifests
        if (told := json.loads(path.read_text())) and (told["source"], told["sequence_length"]) == asked
    ]
    if finished.returncode != 0 or not found:
        raise SystemExit(f"coremill did not pack the rows; see {finished.log}")
    return found[-1].parent


def _write_rows(go: Go, path: Path, seed: int) -> None:
    """The rows that coremill takes under this seed, in its order: the peers train on the same."""
    import numpy as np

    from coremill.data.order import order_key, shuffled
    from coremill.data.packed import TOKENS_FILE, read_manifest

    manifest = read_manifest(go.packed)
    assert manifest is not None
    shape = (manifest.rows, manifest.sequence_length)
    rows = np.memmap(go.packed / TOKENS_FILE, manifest.dtype, mode="r", shape=shape)
    epoch_order = 2  # the purpose that coremill's loader gives the order of an epoch's rows
    needed = np.arange(go.steps * go.tokens_per_step // SEQUENCE_LENGTH)
    np.save(path, rows[shuffled(needed, len(rows), order_key(seed, epoch_order, 0))].astype(np.int32))


def _threads(key: str) -> dict[str, str]:
    """A host here is one core; coremill sees that by itself."""
    return {} if key in COREMILL else {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": DEVICE}


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scale_model", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--rounds", type=int, default=2, help="rounds over all contenders (default 2)")
    parser.add_argument("--steps", type=int, default=2, help="timed steps per contender and round (default 2)")
    parser.add_argument(
        "--tokens", type=int, default=TOKENS_PER_STEP, help=f"a step, over all hosts (default {TOKENS_PER_STEP})"
    )
    parser.add_argument("--quick", action="store_true", help="one round")
    parser.add_argument("--scenes", default="slow,fast", help="slow (4 hosts, 50 Mbit/s), fast (2 hosts, 1 Gbit/s)")
    parser.add_argument("--only", default="", help=f"contenders to run, of {','.join(NAMES)} (default: all)")
    parser.add_argument("--json", type=Path, help="write all figures to this file too")
    parser.add_argument("--timeout", type=float, default=600, help="seconds one contender may take (default 600)")
    parser.add_argument("--folder", type=Path, default=peers.FOLDER, help="workload, caches, logs (default runs/peers)")
    arguments = parser.parse_args(argv)
    arguments.scenes = [name for name in arguments.scenes.split(",") if name]
    arguments.only = [key for key in arguments.only.split(",") if key]
    if not arguments.scenes or set(arguments.scenes) - set(SCENES):
        parser.error(f"--scenes takes {' and '.join(SCENES)}")
    if set(arguments.only) - set(NAMES):
        parser.error(f"--only takes names out of {','.join(NAMES)}")
    if arguments.quick:
        arguments.rounds = 1
    if arguments.rounds < 1 or arguments.steps < 1:
        parser.error("--rounds and --steps start at 1")
    if arguments.tokens < 1 or arguments.tokens % (4 * SEQUENCE_LENGTH):
        parser.error(f"--tokens takes multiples of {4 * SEQUENCE_LENGTH}: whole rows for each of four hosts")
    return arguments


if __name__ == "__main__":
    sys.exit(main())

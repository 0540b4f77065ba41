"""coremill beside its peers: `python -m benchmarks.peers [--rounds N] [--steps N] [--only a,b,c,d] [--json FILE]`.

One go, same corpus, same 52 M parameter Llama shape, contenders alternating (a b c d, a b c d, ...), so that a busy
minute of a shared machine hits all alike. Prints medians and ratios with the targets beside them; asserts nothing.
docs/benchmarks.md explains.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

from benchmarks import coremill_run, processes, results, workload

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "runs" / "peers"
RANKS = 2
TOKENS_PER_STEP = 2048  # of b, c and d; a's recipe has 2 ranks x 4 x 512 positions
SEED = 7
CONTENDERS = {
    "a": "HF Trainer + DeepSpeed ZeRO-3, padded to 512",
    "b": "HF Trainer, DDP, packed rows",
    "c": "stock FSDP2, packed rows",
    "d": "coremill, packed rows",
}
MODULES = {
    "a": "benchmarks.contenders.zero3_padded",
    "b": "benchmarks.contenders.trainer_ddp",
    "c": "benchmarks.contenders.fsdp2_stock",
}


class ContenderFailed(Exception):
    """A contender ended badly or left no record; the message says where its log is."""


@dataclass(frozen=True, kw_only=True)
class Session:
    """What holds for the whole go."""

    folder: Path
    cache: Path
    work: workload.Workload
    dtype: str
    cores: int
    timed_steps: int
    timeout_seconds: float

    @property
    def steps(self) -> int:
        """The first step, which is not timed, and the timed ones."""
        return self.timed_steps + 1


def main(argv: list[str] | None = None) -> int:
    """Run all rounds; 1 where a contender failed, else 0, whatever the figures are."""
    arguments = _parse(argv)
    signal.signal(signal.SIGTERM, interrupt)
    cache = arguments.folder.resolve()
    session_folder = cache / time.strftime("%Y%m%d-%H%M%S")
    session_folder.mkdir(parents=True)
    print("preparing the workload (once per Python version)", flush=True)
    work = prepare_workload(cache, session_folder / "workload.log")
    dtype, cores, machine = describe_machine()
    session = Session(
        folder=session_folder,
        cache=cache,
        work=work,
        dtype=dtype,
        cores=cores,
        timed_steps=arguments.steps,
        timeout_seconds=arguments.timeout,
    )
    load = os.getloadavg()[0]
    facts = {
        "machine": machine,
        "cores": cores,
        "dtype": dtype,
        "load_average_at_start": load,
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in ("torch", "transformers", "accelerate", "deepspeed", "coremill")},
    }
    print(
        f"{machine}, {cores} cores, {dtype}; {work.parameters:,} parameters; {work.rows} packed rows,"
        f" {work.paragraphs} paragraphs of which padded to {workload.SEQUENCE_LENGTH}"
        f" {work.real_share_when_padded:.1%} of the tokens are real; logs in {session_folder}",
        flush=True,
    )
    if load > 0.2 * cores:
        print(f"note: load average {load:.2f} at the start; others are using this machine", flush=True)

    found: list[results.Result] = []
    failures: list[str] = []
    try:
        for round_number in range(1, arguments.rounds + 1):
            for key in arguments.only:
                try:
                    found.append(_run_contender(session, key, round_number, arguments.rounds))
                except ContenderFailed as failure:
                    failures.append(f"round {round_number}, ({key}): {failure}")
                    print(f"  failed: {failure}", flush=True)
    except KeyboardInterrupt:
        failures.append("interrupted")
        print("interrupted: what was measured so far follows", flush=True)

    comparison = results.ratios(found, work.real_share_when_padded)
    print("\n" + results.contender_table(found, {key: CONTENDERS[key] for key in arguments.only}))
    print("\n" + results.ratio_table(comparison))
    for note in dict.fromkeys(result.note for result in found if result.note):
        print(f"note: {note}")
    document = {
        **facts,
        "workload": {**asdict(work), "real_share_when_padded": work.real_share_when_padded},
        "timed_steps": arguments.steps,
        "results": [asdict(result) for result in found],
        "ratios": [{**asdict(ratio), "median": ratio.median} for ratio in comparison],
        "failures": failures,
    }
    for target in filter(None, (session_folder / "peers.json", arguments.json)):
        target.write_text(json.dumps(document, indent=1) + "\n")
    return 1 if failures else 0


def prepare_workload(cache: Path, log: Path, shape: str = "52M") -> workload.Workload:
    """Make the workload in a process of its own: the driver stays small, without torch."""
    cache.mkdir(parents=True, exist_ok=True)
    finished = processes.run_tree(
        [sys.executable, "-m", "benchmarks.workload", str(cache), shape],
        environment=environment(cache),
        folder=ROOT,
        log=log,
        timeout_seconds=600,
    )
    if finished.returncode != 0:
        raise SystemExit(f"the workload could not be made; see {log}")
    return workload.load(Path(log.read_text().splitlines()[-1]))


def environment(cache: Path, additions: dict[str, str] | None = None) -> dict[str, str]:
    """Of every process here: no network, caches inside the benchmark's folder, the package found from source."""
    return processes.clean_environment(
        {
            # DeepSpeed builds its C++ ops at run time and looks for ninja on the PATH.
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
            "PYTHONPATH": processes.python_path(ROOT / "src"),
            "PYTHONUNBUFFERED": "1",
            "TORCH_EXTENSIONS_DIR": str(cache / "torch_extensions"),
            "HF_DATASETS_CACHE": str(cache / "datasets"),
            "COREMILL_CACHE": str(cache / "coremill"),
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_OFFLINE": "1",
            "DS_ACCELERATOR": "cpu",
            "CUDA_VISIBLE_DEVICES": "",
            **(additions or {}),
        }
    )


def contender_command(session: Session, key: str, out: Path, round_number: int) -> tuple[list[str], dict[str, str]]:
    """The command line of a contender and what its environment needs beyond the common one."""
    seed = SEED + round_number  # other rows each round, the same for all
    if key == "d":
        run_file = out / "coremill.yaml"
        coremill_run.write_run_file(
            run_file, session.work, run=out / "run", steps=session.steps, tokens_per_step=TOKENS_PER_STEP, seed=seed
        )
        return coremill_run.train_command(run_file), {}
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)),
        *("-m", MODULES[key], "--workload", session.work.folder, "--out", str(out)),
        *("--steps", str(session.steps), "--dtype", session.dtype, "--seed", str(seed)),
    ]
    if key == "a":
        return command, {}  # the recipe sets no thread count: torchrun's default of 1 it is
    command += ["--rows-per-rank", str(TOKENS_PER_STEP // workload.SEQUENCE_LENGTH // RANKS)]
    return command, {"OMP_NUM_THREADS": str(max(1, session.cores // RANKS))}  # their best: every core busy


def _run_contender(session: Session, key: str, round_number: int, rounds: int) -> results.Result:
    out = session.folder / f"round-{round_number}-{key}"
    out.mkdir()
    print(f"round {round_number}/{rounds} ({key}) {CONTENDERS[key]}", flush=True)
    command, additions = contender_command(session, key, out, round_number)
    last_line_at = 0.0

    def progress(elapsed_seconds: float, rss_bytes: int) -> None:
        nonlocal last_line_at
        if elapsed_seconds - last_line_at >= 60:
            last_line_at = elapsed_seconds
            print(f"  {elapsed_seconds:.0f} s, {rss_bytes / results.GIB:.2f} GiB", flush=True)

    finished = processes.run_tree(
        command,
        environment=environment(session.cache, additions),
        folder=ROOT,
        log=out / "log.txt",
        timeout_seconds=session.timeout_seconds,
        on_sample=progress,
    )
    if finished.timed_out:
        raise ContenderFailed(f"over the time limit of {session.timeout_seconds:.0f} s; see {finished.log}")
    if finished.returncode != 0:
        raise ContenderFailed(f"exit code {finished.returncode}; see {finished.log}")
    common = {
        "contender": key,
        "round_number": round_number,
        "peak_tree_rss_bytes": finished.peak_tree_rss_bytes,
        "wall_seconds": finished.seconds,
    }
    try:
        if key == "d":
            result = results.from_coremill(out / "run", **common)  # type: ignore[arg-type]
        else:
            result = results.from_ranks(out, work=session.work, padded=key == "a", **common)  # type: ignore[arg-type]
    except (OSError, KeyError, ValueError, RuntimeError) as error:
        raise ContenderFailed(f"left no usable record ({error!r}); see {finished.log}") from error
    print(
        f"  {result.tokens_per_second:.1f} real tokens/s, {result.peak_rss_bytes / results.GIB:.2f} GiB"
        f" in {result.ranks} {'rank' if result.ranks == 1 else 'ranks'},"
        f" loss {result.loss_first:.3f} to {result.loss_last:.3f}, {result.wall_seconds:.0f} s in all",
        flush=True,
    )
    return result


def describe_machine() -> tuple[str, int, str]:
    """(dtype the peers can use, physical cores, words): the peers get bf16 wherever the CPU has units for it."""
    from coremill.hardware.probe import probe_node

    node = probe_node()
    return ("bf16" if node.has_bf16_units else "fp32"), node.usable_cores, f"{node.cpu_model} ({node.architecture})"


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def interrupt(number: int, frame: FrameType | None) -> None:
    """SIGTERM ends a go as Ctrl-C does: with what was measured so far."""
    raise KeyboardInterrupt


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=3, help="rounds over all contenders (default 3)")
    parser.add_argument("--steps", type=int, default=3, help="timed steps per contender and round (default 3)")
    parser.add_argument("--only", default="a,b,c,d", help="contenders to run, by letter (default a,b,c,d)")
    parser.add_argument("--json", type=Path, help="write all figures to this file too")
    parser.add_argument("--timeout", type=float, default=900, help="seconds one contender may take (default 900)")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="workload, caches, logs (default runs/peers)")
    arguments = parser.parse_args(argv)
    arguments.only = [key for key in arguments.only.split(",") if key]
    unknown = sorted(set(arguments.only) - set(CONTENDERS))
    if unknown or not arguments.only:
        parser.error(f"--only takes letters out of a,b,c,d, not {','.join(unknown) or 'nothing'}")
    if arguments.rounds < 1 or arguments.steps < 1:
        parser.error("--rounds and --steps start at 1")
    return arguments


if __name__ == "__main__":
    try:
        sys.exit(main())
    except subprocess.SubprocessError as error:
        sys.exit(str(error))

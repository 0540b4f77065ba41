"""The same faults on coremill's peers, by the same rig: what happened is written down, whatever it is.

A trial "passes" where it kept the promise coremill makes for this fault. What a peer does not do within the time limit
is told with the limit. Peers are started by torchrun with --max-restarts 3 and torch's default timeouts.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

from chaos.experiment import Experiment, Rig, Trial
from chaos.mounts import mounted_tmpfs, why_no_mounts
from chaos.running import POLL_SECONDS, ROOT, Broken, Run, environment
from coremill.child import wrapped
from coremill.report.events import EventFollower

LEAST_LIMIT_SECONDS = 120.0  # or four times what a start took, on a machine that others use
START_SECONDS = 600.0
SYSTEMS = {
    "torchrun+Trainer+DeepSpeed": "chaos.contenders.trainer_deepspeed",
    "torchrun+FSDP2+DCP": "chaos.contenders.fsdp2_dcp",
}
MANY_STEPS = 100_000
SETTINGS = {
    # DeepSpeed compiles an operator with ninja, which it looks for on the PATH; the folder is that of the benchmarks.
    "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
    "TORCH_EXTENSIONS_DIR": str(ROOT / "runs" / "peers" / "torch_extensions"),
    "DS_ACCELERATOR": "cpu",
    "CUDA_VISIBLE_DEVICES": "",
}
COMPILE = "from deepspeed.comm.torch import build_shm_op; build_shm_op()"


class PeerRun(Run):
    """A peer's script under torchrun."""

    def __init__(self, module: str, folder: Path, shared: Path) -> None:
        super().__init__(Path(), folder, shared)
        self._module = module
        self.limit_seconds = LEAST_LIMIT_SECONDS

    def begin(self, steps: int = MANY_STEPS, *, nan_at: int = 0, ranks: int = 2) -> None:
        """The same command as ever."""
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)),
            *("--max-restarts", "3", "-m", self._module, "--out", str(self.folder), "--steps", str(steps)),
            *("--nan-at", str(nan_at)),
        ]
        self.folder.mkdir(parents=True, exist_ok=True)
        self._follower = self._follower or EventFollower(self.folder)
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                wrapped(command, launcher_pid=os.getpid(), cpus=None),
                cwd=ROOT,
                env=environment(self.shared, SETTINGS),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def train(self, steps: int) -> int:
        """Start it and wait for so many new steps and one save; the last step."""
        since = time.time()
        self.begin()
        self.wait_for(
            lambda: len(self.of("step", rank=0, since=since)) >= steps and self.of("save", since=since),
            f"{steps} steps and a save",
            START_SECONDS,
        )
        self.limit_seconds = max(LEAST_LIMIT_SECONDS, 4 * (self.of("step", rank=0, since=since)[0].time - since))
        return self.last_step

    def files(self) -> list[Path]:
        """Of the newest checkpoint."""
        folders = [path for path in (*self.folder.glob("step-*"), *self.folder.glob("checkpoint-*")) if path.is_dir()]
        newest = max(folders, key=lambda path: int(path.name.split("-")[1]))
        return sorted(path for path in newest.rglob("*") if path.is_file() and path.stat().st_size)

    def saved_step(self) -> int:
        """The newest save that all of its own ranks told."""
        return max((int(event.number("step")) for event in self.of("save")), default=0)


@dataclass(frozen=True)
class Peer:
    """One trial's surroundings."""

    module: str
    rig: Rig
    random: Random
    number: int

    def run(self, name: str = "run") -> PeerRun:
        """In a fresh folder."""
        return PeerRun(self.module, self.rig.folder / f"{name}{self.number}", self.rig.shared)


def _until_limit(run: PeerRun, since: float, condition: Callable[[], object]) -> tuple[str, float]:
    """Whether it came ("yes"), the run ended first ("ended") or time did ("limit"), and how long that took."""
    while True:
        ended = run.process is None or run.process.poll() is not None
        run.look()
        seconds = time.time() - since
        if condition():
            return "yes", seconds
        if ended:
            return "ended", seconds
        if seconds > run.limit_seconds:
            return "limit", seconds
        time.sleep(POLL_SECONDS)


def _first_step(run: PeerRun, since: float) -> Callable[[], object]:
    def found() -> object:
        starts = run.of("start", rank=0, since=since)
        return starts and run.of("step", rank=0, since=starts[-1].time)

    return found


def _survived(run: PeerRun, since: float, fault: str) -> Trial:
    """Whether it trains again by itself."""
    done = run.last_step
    how, seconds = _until_limit(run, since, _first_step(run, since))
    if how == "yes":
        first = int(run.of("step", rank=0, since=run.of("start", rank=0, since=since)[-1].time)[0].number("step"))
        return Trial(
            passed=True, fault=fault, outcome="went on by itself", resumed_seconds=seconds, steps_lost=done - first + 1
        )
    if how == "ended":
        code = run.wait_end()
        return Trial(
            passed=False,
            fault=fault,
            outcome=f"the run ended, exit code {code}",
            resumed_seconds=seconds,
            exit_code=code,
        )
    return Trial(passed=False, fault=fault, outcome=f"nothing within {run.limit_seconds:.0f} s")


def killed(peer: Peer, run: PeerRun) -> Trial:
    """X1."""
    step = run.train(peer.random.randint(6, 14))
    rank, pid = peer.random.choice(sorted(run.rank_pids().items()))
    since = time.time()
    os.kill(pid, signal.SIGKILL)
    return _survived(run, since, f"rank {rank} killed after step {step}")


def stopped(peer: Peer, run: PeerRun) -> Trial:
    """X4."""
    step = run.train(peer.random.randint(6, 14))
    rank, pid = peer.random.choice(sorted(run.rank_pids().items()))
    since = time.time()
    os.kill(pid, signal.SIGSTOP)
    return _survived(run, since, f"rank {rank} stopped after step {step}")


def asked_to_stop(peer: Peer, run: PeerRun) -> Trial:
    """X6b."""
    run.train(peer.random.randint(6, 14))
    since = time.time()
    os.kill(run.launcher_pid, signal.SIGTERM)
    how, seconds = _until_limit(run, since, lambda: False)
    if how == "limit":
        return Trial(passed=False, fault="SIGTERM", outcome=f"did not end within {run.limit_seconds:.0f} s")
    code = run.wait_end()
    lost = run.last_step - run.saved_step()
    outcome = "ended without saving" if lost else "ended; the last step happened to be saved"
    return Trial(
        passed=lost == 0 and code == 75,
        fault="SIGTERM to the launcher",
        outcome=outcome,
        resumed_seconds=seconds,
        steps_lost=lost,
        exit_code=code if code >= 0 else 128 - code,
    )


def killed_in_save(peer: Peer, run: PeerRun) -> Trial:
    """X2: everything is killed right after a new checkpoint folder appeared; then the same command."""
    run.train(6)
    known = set(run.folder.iterdir())
    run.wait_for(lambda: set(run.folder.iterdir()) - known, "the next save")
    time.sleep(peer.random.uniform(0, 0.05))
    for pid in [run.launcher_pid, *run.rank_pids().values()]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    run.kill()
    return _again(run, "killed inside a save")


def _again(run: PeerRun, fault: str, *, should_notice: bool = False) -> Trial:
    """The same command once more: does it go on, from where, and does it say anything."""
    done, since = run.last_step, time.time()
    run.begin(done + 12)
    how, seconds = _until_limit(run, since, _first_step(run, since))
    log = run.log.read_text(errors="replace")
    if how == "yes":
        first = int(run.of("step", rank=0, since=run.of("start", rank=0, since=since)[-1].time)[0].number("step"))
        run.wait_end(START_SECONDS)
        words = "loaded the altered checkpoint without a word" if should_notice else "went on"
        return Trial(
            passed=not should_notice,
            fault=fault,
            outcome=words if first > 1 else "began anew at step 1",
            steps_lost=done - first + 1,
        )
    if how == "ended":
        code = run.wait_end()
        errors = [line.strip() for line in log.splitlines() if "Error" in line]
        kind = errors[-1].split(":")[-2].split()[-1] if errors and ":" in errors[-1] else "error"
        return Trial(
            passed=False, fault=fault, outcome=f"cannot go on: {kind}, no other checkpoint is tried", exit_code=code
        )
    return Trial(passed=False, fault=fault, outcome=f"nothing within {run.limit_seconds:.0f} s")


def flipped(peer: Peer, run: PeerRun) -> Trial:
    """X17: one bit in one file of the newest checkpoint."""
    run.train(6)
    run.kill()
    path = peer.random.choice([path for path in run.files() if path.suffix in (".distcp", ".pt", ".safetensors")])
    data = bytearray(path.read_bytes())
    place = peer.random.randrange(len(data) // 2, len(data))
    data[place] ^= 1 << peer.random.randrange(8)
    path.write_bytes(data)
    return _again(run, f"a bit of {path.name} flipped", should_notice=True)


def not_a_number(peer: Peer, run: PeerRun) -> Trial:
    """X21: the logits of one rank are NaN once."""
    run.begin(20, nan_at=8)
    code = run.wait_end(START_SECONDS)
    losses = {int(e.number("step")): e.get("loss") for e in run.of("step", rank=0)}
    told = [step for step, loss in losses.items() if isinstance(loss, float) and not math.isfinite(loss)]
    ends = run.of("end", rank=0)
    finite = bool(ends) and bool(ends[-1].get("weights_finite"))
    if code == 0:
        weights = "weights still numbers" if finite else "all weights NaN"
        losses_words = f"the log shows NaN in {len(told)} steps" if told else "the log shows no NaN"
        outcome = f"trained on to the end, {weights}, {losses_words}"
    else:
        outcome = f"ended, exit code {code}"
    return Trial(passed=code == 70, fault="NaN on one rank in step 8", outcome=outcome, exit_code=code)


def disk_full(peer: Peer, run: PeerRun) -> Trial:
    """X15: the disk takes one and a half checkpoints."""
    run.train(6)
    run.kill()
    size = sum(path.stat().st_size for path in run.files())
    with mounted_tmpfs(peer.rig.folder / f"disk{peer.number}", int(1.5 * size) + 64 * 1024) as disk:
        on_disk = PeerRun(peer.module, disk.path / "run", peer.rig.shared)
        on_disk.limit_seconds = 2 * run.limit_seconds
        try:
            since = time.time()
            on_disk.begin(40)
            how, _ = _until_limit(on_disk, time.time(), lambda: on_disk.last_step >= 20)
            code = None if how != "ended" else on_disk.wait_end()
            step = on_disk.last_step
            starts = len(on_disk.of("start", rank=0, since=since))
        finally:
            on_disk.kill()
            if on_disk.log.exists():
                shutil.copy(on_disk.log, peer.rig.folder / f"disk-full-{peer.number}.log")
    words = "trained on" if how == "yes" else f"the run ended in step {step}, after {starts} starts"
    return Trial(passed=how == "yes", fault="a disk of 1.5 checkpoints", outcome=words, exit_code=code)


def fewer_ranks(peer: Peer, run: PeerRun) -> Trial:
    """X13: gone on with one rank instead of two."""
    run.train(6)
    run.kill()
    done, since = run.last_step, time.time()
    run.begin(done + 6, ranks=1)
    how, _ = _until_limit(run, since, _first_step(run, since))
    if how == "yes":
        run.wait_end(START_SECONDS)
        return Trial(passed=True, fault="1 rank instead of 2", outcome="went on")
    code = run.wait_end() if how == "ended" else None
    return Trial(passed=False, fault="1 rank instead of 2", outcome="refused", exit_code=code)


FAULTS: dict[str, tuple[Callable[[Peer, PeerRun], Trial], str, int, Callable[[], str | None]]] = {
    "X1": (killed, "SIGKILL of a random rank at a random step", 5, lambda: None),
    "X2": (killed_in_save, "a rank killed inside a save", 5, lambda: None),
    "X4": (stopped, "a rank stopped for ever", 2, lambda: None),
    "X6b": (asked_to_stop, "SIGTERM to the launcher", 3, lambda: None),
    "X13": (fewer_ranks, "the number of ranks changes", 2, lambda: None),
    "X15": (disk_full, "disk full under a run", 2, why_no_mounts),
    "X17": (flipped, "a bit flipped in a checkpoint", 5, lambda: None),
    "X21": (not_a_number, "NaN or Inf in loss or weights of one rank", 2, lambda: None),
}


def _compile(rig: Rig) -> None:
    """Once, before anything is killed: a killed compilation leaves a lock that the next one waits for, for ever."""
    for lock in Path(SETTINGS["TORCH_EXTENSIONS_DIR"]).rglob("lock"):
        lock.unlink()
    with (rig.folder / "compile.log").open("wb") as log:
        subprocess.run(
            [sys.executable, "-c", COMPILE], env=environment(rig.shared, SETTINGS), stdout=log, stderr=log, check=True
        )


def _runner(key: str, module: str) -> Callable[[Rig, int], Iterator[Trial]]:
    def trials(rig: Rig, count: int) -> Iterator[Trial]:
        if "deepspeed" in module:
            _compile(rig)
        for number in range(count):
            peer = Peer(module, rig, rig.random(f"{key}/{number}"), number)
            run = peer.run()
            try:
                yield FAULTS[key][0](peer, run)
            except (Broken, OSError) as error:
                yield Trial(passed=False, fault=key, outcome=f"not measured: {error}")
            finally:
                run.kill()

    return trials


PEER_EXPERIMENTS = tuple(
    Experiment(
        key=key,
        fault=fault,
        promise="what happens",
        short_trials=0,
        long_trials=trials,
        seconds_per_trial=60,
        run=_runner(key, module),
        system=system,
        why_not=why_not,
    )
    for system, module in SYSTEMS.items()
    for key, (_, fault, trials, why_not) in FAULTS.items()
)

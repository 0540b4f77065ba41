"""A training run under the rig: the real command in a folder of its own, its events followed, its processes found.

Small enough for two cores (150 thousand parameters, about 30 ms a step), otherwise as any user's: `python -m coremill
train`, two ranks, a checkpoint every few steps, a constant learning rate: a step is the same wherever the end is.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coremill.checkpoint.manifest import Checkpoint, survey
from coremill.child import wrapped
from coremill.hardware.calibrate import calibration_of
from coremill.hardware.calibrate_part import Part
from coremill.hardware.probe import probe_node
from coremill.report.events import Event, EventFollower
from coremill.supervise.descendants import descendants

ROOT = Path(__file__).resolve().parent.parent
INSIDE = Path(__file__).resolve().parent / "inside"
WITHOUT_END = 1_000_000
EVERY_STEPS = 5
PATIENCE_SECONDS = 300.0  # only a hang takes that long, even on a machine that others use
POLL_SECONDS = 0.02
VOCABULARY = 257
RUN_FILE = """\
model:
  weights: random
  config: {{model_type: llama, vocab_size: {vocabulary}, hidden_size: 64, intermediate_size: 160, num_hidden_layers: 2,
    num_attention_heads: 4, num_key_value_heads: 4, max_position_embeddings: 64, tie_word_embeddings: false}}
tokenizer: tokenizer
data:
  source: text/*.jsonl
  sequence_length: 32
train:
  steps: {steps}
  tokens_per_step: 256
  learning_rate: 1.0e-3
  schedule: constant
  weight_decay: 0.1
parallel:
  engine: {engine}
  dtype: fp32
  wire_dtype: fp32
  threads_per_rank: 1
checkpoint:
  every: {every}steps
  grace: 30s
run:
  export: false
"""
# What a launcher further out, or the caller's shell, may have left: no experiment depends on it.
FOREIGN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_", "OMPI_", "PMI_", "PET_", "TORCHELASTIC_", "HF_", "OMP_")


class Broken(Exception):
    """An experiment cannot go on: what it waits for does not come."""


def environment(shared: Path, changes: Mapping[str, str] | None = None) -> dict[str, str]:
    """Of every command here: no network, caches in the scratch folder, the package found from source."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
    return {
        **kept,
        "COREMILL_CACHE": str(shared / "cache"),
        "HF_HOME": str(shared / "hub"),
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join([str(INSIDE), str(ROOT / "src"), str(ROOT)]),
        **(changes or {}),
    }


def make_scene(shared: Path, *, engine: str = "replicate") -> Path:
    """A folder with run file, text and tokenizer; made once for all experiments of a go."""
    folder = shared / "scene"
    run_file = folder / f"run-{engine}.yaml"
    if not run_file.exists():
        _write_text(folder / "text")
        _write_tokenizer(folder / "tokenizer")
        _write_rates(shared / "cache")
        text = RUN_FILE.format(vocabulary=VOCABULARY, steps=WITHOUT_END, engine=engine, every=EVERY_STEPS)
        run_file.write_text(text)
    return run_file


def write_settings_of_go(shared: Path, settings: Sequence[str]) -> None:
    """For every run of this go: what `--set` of the command asks for."""
    shared.mkdir(parents=True, exist_ok=True)
    (shared / "settings.json").write_text(json.dumps(list(settings)))


def settings_of_go(shared: Path) -> list[str]:
    file = shared / "settings.json"
    return list(json.loads(file.read_text())) if file.exists() else []


@dataclass
class Run:
    """One run folder, started and ended as often as an experiment likes."""

    run_file: Path
    folder: Path
    shared: Path
    ranks: int = 2
    settings: Sequence[str] = ()
    process: subprocess.Popen[bytes] | None = None
    events: list[Event] = field(default_factory=list)
    starts: int = 0
    _follower: EventFollower | None = None

    # --- the command ---

    def start(self, *settings: str, ranks: int | None = None, environ: Mapping[str, str] | None = None) -> None:
        """The same command as ever."""
        assert self.process is None, "it runs"
        words = [f"run.folder={self.folder}", *settings_of_go(self.shared), *self.settings, *settings]
        command = [sys.executable, "-m", "coremill", "train", str(self.run_file), "--nproc", str(ranks or self.ranks)]
        for word in words:
            command += ["--set", word]
        self.starts += 1
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        if self._follower is None:
            self._follower = EventFollower(self.folder)
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                wrapped(command, launcher_pid=os.getpid(), cpus=None),
                cwd=self.run_file.parent,
                env=environment(self.shared, environ),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def log(self) -> Path:
        """All that the command prints."""
        return self.folder.with_name(f"{self.folder.name}.log")

    @property
    def launcher_pid(self) -> int:
        """Of the command itself."""
        assert self.process is not None
        return self.process.pid

    def wait_end(self, timeout_seconds: float = PATIENCE_SECONDS) -> int:
        """Its exit code; raises Broken where it does not end."""
        assert self.process is not None
        process, deadline = self.process, time.monotonic() + timeout_seconds
        while process.poll() is None:
            self.look()
            if time.monotonic() > deadline:
                self.kill()
                raise Broken(f"it had not ended after {timeout_seconds:.0f} s; see {self.log}")
            time.sleep(POLL_SECONDS)
        self.look()
        self.process = None
        return process.returncode

    def kill(self) -> None:
        """Whatever runs of it, at once."""
        if self.process is not None:
            for pid in [self.process.pid, *descendants(self.process.pid)]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.process.wait()
            self.process = None

    # --- what it says ---

    def look(self) -> list[Event]:
        """New events."""
        new = self._follower.poll() if self._follower is not None else []
        self.events += new
        return new

    def of(self, kind: str, rank: int | None = None, since: float = 0.0) -> list[Event]:
        """Events of a kind, in the order of time."""
        return [e for e in self.events if e.kind == kind and rank in (None, e.rank) and e.time >= since]

    def wait_for(
        self,
        condition: Callable[[], Any],
        what: str,
        timeout_seconds: float = PATIENCE_SECONDS,
        *,
        may_end: bool = False,
    ) -> Any:
        """Look until the condition gives something true; raises Broken where the run ends or time does."""
        deadline = time.monotonic() + timeout_seconds
        while True:
            ended = self.process is None or self.process.poll() is not None
            self.look()
            if found := condition():
                return found
            if ended and not may_end:
                code = self.process.returncode if self.process else None
                raise Broken(f"it ended ({code}) while waiting for {what}; see {self.log}")
            if ended or time.monotonic() > deadline:
                raise Broken(f"{what} did not come within {timeout_seconds:.0f} s; see {self.log}")
            time.sleep(POLL_SECONDS)

    @property
    def last_step(self) -> int:
        """The highest one that rank 0 has done."""
        return max((int(event.number("step")) for event in self.of("step", rank=0)), default=0)

    def wait_steps(self, count: int) -> None:
        """So many steps after a start."""
        since = time.time()
        self.wait_for(lambda: len(self.of("step", rank=0, since=since)) >= count, f"{count} more steps")

    def rank_pids(self) -> dict[int, int]:
        """Process ids of the ranks that live now, from /proc, so also of ranks that have not said a word yet."""
        found: dict[int, int] = {}
        for pid in descendants(self.launcher_pid):
            rank = rank_of(pid)
            if rank is not None:
                found.setdefault(rank, pid)  # children come after their parents
        return found

    # --- what it leaves ---

    @property
    def checkpoints(self) -> Path:
        """Its folder of checkpoints."""
        named = [word.split("=", 1)[1] for word in self.settings if word.startswith("checkpoint.folder=")]
        return Path(named[-1]) if named else self.folder / "checkpoints"

    def newest(self) -> Checkpoint | None:
        """Every byte checked."""
        for checkpoint in survey(self.checkpoints).sound[:1]:
            checkpoint.verify()
            return checkpoint
        return None


def rank_of(pid: int) -> int | None:
    """The rank that a process is, or was forked by; None: none.

    One started afresh has it in its environment; a forked one keeps its fork server's in /proc, and goes by its name.
    """
    with contextlib.suppress(OSError, ValueError):
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        named = [each.removeprefix(b"RANK=") for each in variables if each.startswith(b"RANK=")]
        name = Path(f"/proc/{pid}/comm").read_text()
        if named or name.startswith("rank-"):
            return int(named[0] if named else name.removeprefix("rank-"))
    return None


def losses(run: Run) -> dict[int, set[float]]:
    """Every loss any rank ever told of a step; of the same bits, all sets have one member."""
    found: dict[int, set[float]] = {}
    for event in run.of("step"):
        found.setdefault(int(event.number("step")), set()).add(event.number("loss"))
    return found


def compare(run: Run, reference: Run) -> str | None:
    """What differs between a disturbed run and one left in peace, both at their end; None: not a bit."""
    ours, theirs = losses(run), losses(reference)
    for step in sorted(ours):
        if step in theirs and ours[step] != theirs[step]:
            return f"step {step}: losses {sorted(ours[step])}, undisturbed {sorted(theirs[step])}"
    last, expected = run.newest(), reference.newest()
    if last is None or expected is None or last.step != expected.step:
        return f"the last checkpoints are of steps {last and last.step} and {expected and expected.step}"
    if sorted(ours) != list(range(1, last.step + 1)):
        return "steps are missing"
    files, other = ({file.name: file.sha256 for file in each.manifest.files} for each in (last, expected))
    differing = [name for name, digest in files.items() if name.startswith("rank-") and digest != other.get(name)]
    return f"{differing[0]} of step {last.step} differs" if differing else None


def left_in_peace(run: Run, steps: int) -> Run:
    """The same run without a fault, for so many steps."""
    reference = Run(run.run_file, run.folder.with_name(f"{run.folder.name}-peace"), run.shared, ranks=run.ranks)
    reference.start(f"train.steps={steps}")
    code = reference.wait_end(PATIENCE_SECONDS + steps)
    if code != 0:
        raise Broken(f"the undisturbed run ended with {code}; see {reference.log}")
    return reference


# --- the scene ---


def _write_text(folder: Path) -> None:
    words = ["mill", "core", "rank", "shard", "token", "loss", "step", "wheel"]
    generator = random.Random(1)
    folder.mkdir(parents=True, exist_ok=True)
    lines = ["_".join(generator.choices(words, k=generator.randint(10, 40))) for _ in range(60)]
    (folder / "part.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))


def _write_tokenizer(folder: Path) -> None:
    """One token for each byte, and an end token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder.mkdir(parents=True, exist_ok=True)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<|end|>": 0, **{letter: index for index, letter in enumerate(letters, 1)}}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<|end|>"))
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", "bos_token": "<|end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def _write_rates(cache: Path) -> None:
    """Made-up rates of this machine: no experiment measures it."""

    def rates(part: Part) -> dict[str, Any]:
        return {
            "fp32_matmul_flops_per_second": 40e9,
            "bf16_matmul_flops_per_second": 20e9,
            "bf16_emulated_flops_per_second": 1e8,
            "copy_bytes_per_second": 10e9,
            "base_rss_bytes": 400e6,
            "busy_fraction": 0.0,
            "splits": [],
        }

    calibration_of(probe_node(), cache, runner=rates)

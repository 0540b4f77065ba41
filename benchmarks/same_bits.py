"""Does a change of the code change anything? Runs two commits side by side here and compares what they leave.

    python -m benchmarks.same_bits BEFORE                    the working tree beside a commit
    python -m benchmarks.same_bits BEFORE AFTER              two commits
    python -m benchmarks.same_bits BEFORE --keep FOLDER      leave run folders and logs there
    python -m benchmarks.same_bits BEFORE --only "shard 2"   runs whose name holds these words

Twenty steps of two tiny models by both engines on 1, 2 and 4 ranks and a few special cases; checkpoints of BEFORE that
AFTER goes on from; commands, refusals, schema and plans of the examples. Losses, norms, evaluations, exported files and
checkpoints are compared to the bit. Bits differ between CPUs, so nothing is recorded: both sides run here, at once.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy
from safetensors.numpy import save_file

from benchmarks.processes import clean_environment, python_path, run_tree
from benchmarks.run_differences import (
    COMPUTED_FIELDS,
    Values,
    checkpoint_files,
    computed,
    differences,
    event_keys,
    files_of,
    leaves,
    report_keys,
    written_differences,
    written_kinds,
)

ROOT = Path(__file__).parents[1]
STEPS = 20
SAVED_STEP = 10
RUN_TIMEOUT_SECONDS = 300.0
SHOWN_DIFFERENCES = 5

# What a change may add to the run file: keys by where the schema has them.
NEW_KEYS = {
    "train.optimizer": "$defs.TrainSection.properties.optimizer",
    "model.fused": "$defs.ModelSection.properties.fused",
}

PROSE = ".description"

SHAPE = {
    "model_type": "llama",
    "vocab_size": 4096,  # the built-in tokenizer's
    "hidden_size": 48,
    "intermediate_size": 100,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
# One model is made on the spot, the other read from a folder: both ways to come by weights are tried.
MODELS = {
    "tied": ["model.weights=random", f"model.config={json.dumps({**SHAPE, 'tie_word_embeddings': True})}"],
    "untied": ["model.name=model"],
}
RUN_FILE = f"""\
tokenizer: built-in
data:
  source: built-in
  sequence_length: 32
  evaluation_fraction: 0.01
train:
  steps: {STEPS}
  tokens_per_step: 256
  micro_batch_rows: 2      # one rank adds up four passes, four ranks have one each
  learning_rate: 1.0e-2
  schedule: cosine
  warmup_steps: 4
  weight_decay: 0.1
parallel:
  dtype: fp32
  threads_per_rank: 1
checkpoint:
  every: {SAVED_STEP}steps
evaluation:
  every_steps: 5
"""
LLAMA_CARD = ("model.name=examples/cards/llama3-8b", "model.weights=random")
PLANS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("examples/tiny-from-scratch.yaml", ()),
    ("examples/tiny-from-scratch.yaml", ("fleet.instance=c7i.8xlarge", "fleet.nodes=2", "parallel.engine=replicate")),
    ("examples/finetune-files.yaml", (*LLAMA_CARD, "train.steps=9", "train.epochs=null", "train.warmup_steps=2")),
    ("examples/llama3-8b-wikitext.yaml", LLAMA_CARD),
    ("examples/llama3-8b-wikitext.yaml", (*LLAMA_CARD, "parallel.engine=replicate")),
    ("examples/llama3-8b-wikitext.yaml", (*LLAMA_CARD, "parallel.wire_dtype=fp32", "parallel.keep_gathered=true")),
)
REFUSALS = (
    ("train", "missing.yaml"),
    ("train", "run.yaml", "--set", "data.sourc=x"),
    ("train", "run.yaml", "--set", "parallel.engine=ddp"),
    ("train", "run.yaml", "--set", "task=classify"),
    ("plan", "run.yaml", "--set", "model.name=nowhere/at-all"),
    ("report", "runs/none"),
    ("stop", "runs/none"),
)


@dataclass(frozen=True)
class Side:
    """One of the two commits: its files, and a folder of its own to run in."""

    tree: Path
    folder: Path

    def environment(self) -> dict[str, str]:
        """Its source, and a cache that the other side does not see: both tokenise."""
        additions = {
            "PYTHONPATH": python_path(self.tree / "src"),
            "COREMILL_CACHE": str(self.folder / "cache"),
            "HF_HUB_OFFLINE": "1",
            "COLUMNS": "120",
            "TERM": "dumb",
        }
        return clean_environment(additions)

    def answer(self, words: Sequence[str], folder: Path | None = None) -> subprocess.CompletedProcess[str]:
        """What a short `coremill WORDS` says."""
        command = [sys.executable, "-m", "coremill", *words]
        return subprocess.run(
            command, cwd=folder or self.folder, env=self.environment(), capture_output=True, text=True, check=False
        )

    def outcome(self, ended: subprocess.CompletedProcess[str]) -> str:
        """Exit code and all that was said, but for where this side is."""
        said = f"{ended.stdout}\n{ended.stderr}"
        return f"{ended.returncode} {said.replace(str(self.folder), 'FOLDER').replace(str(self.tree), 'TREE')}"

    def run_of(self, case: Case) -> Path:
        """The run folder of a case."""
        return self.folder / "runs" / case.name.replace(" ", "-")


@dataclass(frozen=True)
class Case:
    """One run."""

    model: str
    engine: str
    ranks: int
    settings: tuple[str, ...] = ()
    torchrun: bool = False  # the same command as a rank of somebody else's launcher
    goes_on_from: Case | None = None  # a run of BEFORE's, as a kill during its last save leaves it

    @property
    def name(self) -> str:
        """For the table and for the folder."""
        words = [self.model, self.engine, str(self.ranks), *self.settings, *["torchrun"] * self.torchrun]
        return " ".join(
            [*words, *([f"from-step-{SAVED_STEP}-of-{self.goes_on_from.ranks}"] if self.goes_on_from else [])]
        )

    def command(self, run: Path) -> list[str]:
        """As the documentation has it."""
        settings = [*MODELS[self.model], f"parallel.engine={self.engine}", f"run.folder={run}", *self.settings]
        train = ["-m", "coremill", "train", "run.yaml", *(word for one in settings for word in ("--set", one))]
        if self.torchrun:
            ranks = ["--standalone", "--nproc-per-node", str(self.ranks)]
            return [sys.executable, "-m", "torch.distributed.run", *ranks, *train]
        return [sys.executable, *train, "--nproc", str(self.ranks)]


def cases(only: str = "") -> list[Case]:
    """All runs, or those named and what they go on from; those that go on from others last."""
    plain = [Case(model, engine, n) for model in MODELS for engine in ("replicate", "shard") for n in (1, 2, 4)]
    special = [
        Case("untied", "shard", 2, ("parallel.dtype=bf16", "sample.prompt=def")),
        Case("tied", "replicate", 2, ("data.attention_across_documents=false", "train.activation_checkpointing=true")),
        Case("tied", "shard", 2, ("supervise.fork_ranks=false",)),
        Case("untied", "shard", 2, torchrun=True),
    ]
    continued = [
        Case("tied", "shard", 2, goes_on_from=Case("tied", "shard", 2)),
        Case("untied", "replicate", 2, goes_on_from=Case("untied", "replicate", 2)),
        Case("untied", "shard", 2, goes_on_from=Case("untied", "shard", 4)),
    ]
    wanted = [case for case in plain + special + continued if only in case.name]
    return [case for case in plain if any(case in (one, one.goes_on_from) for one in wanted)] + [
        case for case in wanted if case not in plain
    ]


def main() -> int:
    """Compare and print; 0: all is the same."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", help="a commit")
    parser.add_argument("after", nargs="?", help="a commit; left out: the working tree")
    parser.add_argument("--keep", type=Path, help="an empty folder for all that is made; left out: removed")
    parser.add_argument("--only", default="", help="only runs whose name holds this")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the worktrees go, however this ends
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        folder = options.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="coremill-same-bits-")))
        before = Side(stack.enter_context(checked_out(options.before)), folder.resolve() / "before")
        tree = stack.enter_context(checked_out(options.after)) if options.after else ROOT
        after = Side(tree, folder.resolve() / "after")
        for side in (before, after):
            lay_out(side.folder)
        pool = stack.enter_context(ThreadPoolExecutor(2))
        same = compare_answers(before, after, pool)
        same &= compare_runs(before, after, pool, cases(options.only))
    print(f"\n{'the same' if same else 'DIFFERENT'}, in {time.monotonic() - began:.0f} s")
    return 0 if same else 1


@contextlib.contextmanager
def checked_out(commit: str) -> Iterator[Path]:
    """The files of a commit, in a worktree for the time being."""
    with tempfile.TemporaryDirectory(prefix="coremill-commit-") as folder:
        tree = Path(folder) / "tree"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(tree), commit], check=True)
        try:
            yield tree
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)


def lay_out(folder: Path) -> None:
    """What the runs need: a run file and a model with weights."""
    (folder / "model").mkdir(parents=True)
    (folder / "run.yaml").write_text(RUN_FILE)
    config = {**SHAPE, "tie_word_embeddings": False, "architectures": ["LlamaForCausalLM"]}
    (folder / "model" / "config.json").write_text(json.dumps(config))
    random = numpy.random.default_rng(7)
    hidden, inner, words = SHAPE["hidden_size"], SHAPE["intermediate_size"], SHAPE["vocab_size"]
    layer = {f"self_attn.{name}_proj": (hidden, hidden) for name in "qo"}
    layer |= {f"self_attn.{name}_proj": (hidden // 2, hidden) for name in "kv"}
    layer |= {"mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner)}
    layer |= {"input_layernorm": (hidden,), "post_attention_layernorm": (hidden,)}
    shapes = {"model.embed_tokens": (words, hidden), "model.norm": (hidden,), "lm_head": (words, hidden)}
    for number in range(SHAPE["num_hidden_layers"]):
        shapes |= {f"model.layers.{number}.{name}": shape for name, shape in layer.items()}
    weights = {
        f"{name}.weight": (random.standard_normal(shape) * 0.02 + (len(shape) == 1)).astype(numpy.float32)
        for name, shape in shapes.items()
    }
    save_file(weights, folder / "model" / "model.safetensors", metadata={"format": "pt"})


def compare_answers(before: Side, after: Side, pool: ThreadPoolExecutor) -> bool:
    """Everything that answers in a second: help, schema, refusals, plans."""
    # Measured once, for both: a plan of this machine hangs on its rates.
    before.answer(["plan", "run.yaml", "--set", MODELS["untied"][0]])
    shutil.copytree(before.folder / "cache", after.folder / "cache", dirs_exist_ok=True)
    looks: dict[str, Callable[[Side], Values]] = {
        "commands": help_texts,
        "schema": lambda side: without_new_keys(leaves(json.loads(side.answer(["config", "schema"]).stdout))),
        "refusals": lambda side: {" ".join(words): side.outcome(side.answer(words)) for words in REFUSALS},
        "plans": plans,
    }
    same = True
    for name, look in looks.items():
        sides = list(pool.map(look, (before, after)))
        same &= show(name, f"{len(sides[0])} values", differences(*sides))
    written = [written_kinds(side.tree / "src" / "coremill") for side in (before, after)]
    same &= show("events in the source", f"{len(written[0])} kinds", written_differences(*written))
    return same


def help_texts(side: Side) -> Values:
    """The lines of `--help` of every command, found by walking down from `coremill --help`."""
    found = {}
    waiting: list[tuple[str, ...]] = [()]
    while waiting:
        words = waiting.pop()
        text = side.answer([*words, "--help"]).stdout
        found |= {f"coremill {' '.join(words)} line {number}": line for number, line in enumerate(text.splitlines())}
        waiting += [(*words, name) for name in commands_in(text)]
    return found


def commands_in(help_text: str) -> list[str]:
    """The names in the box of commands; none where there is no such box."""
    _, _, box = help_text.partition("─ Commands ─")
    return re.findall(r"^│ ([a-z][\w-]*) ", box, flags=re.MULTILINE)


def without_new_keys(schema: Values) -> Values:
    """The schema but for keys that the change is there for, and but for descriptions, which are prose."""
    new = tuple(NEW_KEYS.values())
    return {path: value for path, value in schema.items() if not path.startswith(new) and not path.endswith(PROSE)}


def plans(side: Side) -> Values:
    """The plans of the examples, number by number."""
    found = {}
    for example, settings in PLANS:
        words = ["plan", example, "--json", *(word for one in settings for word in ("--set", one))]
        ended = side.answer(words, side.tree)
        name = " ".join([Path(example).stem, *settings])
        found[f"{name} exit"] = str(ended.returncode) if ended.stdout else side.outcome(ended)
        if ended.stdout:
            found |= leaves(json.loads(ended.stdout), name)
    return found


def compare_runs(before: Side, after: Side, pool: ThreadPoolExecutor, chosen: Sequence[Case]) -> bool:
    """Train every case on both sides at once."""
    same = True
    for case in chosen:
        for side in (before, after):
            if case.goes_on_from:
                cut_short(before.run_of(case.goes_on_from), side.run_of(case))
        began = time.monotonic()
        codes = list(pool.map(lambda side, case=case: train(side, case), (before, after)))
        found = [f"exit codes {codes}: {side.folder}/{case.name}.log" for side in (before, after) if codes != [0, 0]]
        if not found:
            found = run_differences(before.run_of(case), after.run_of(case))
        same &= show(case.name, f"{time.monotonic() - began:.0f} s", found)
    runs = [[path.parent for path in (side.folder / "runs").glob("*/report.json")] for side in (before, after)]
    for name, keys in (("event kinds and keys", event_keys), ("keys of report.json", report_keys)):
        sides = [keys(of_side) for of_side in runs]
        same &= show(name, f"{len(sides[0])} values", differences(*sides))
    return same


def cut_short(finished: Path, run: Path) -> None:
    """The folder as a kill during the last save would have left it: the run goes on from the checkpoint before."""
    left_out = shutil.ignore_patterns(f"step-{STEPS:08d}", "export", "report.*")
    shutil.copytree(finished, run, ignore=left_out)


def train(side: Side, case: Case) -> int:
    """Run to the end; returns the exit code."""
    return run_tree(
        case.command(side.run_of(case)),
        environment=side.environment(),
        folder=side.folder,
        log=side.folder / f"{case.name}.log",
        timeout_seconds=RUN_TIMEOUT_SECONDS,
    ).returncode


def run_differences(before: Path, after: Path) -> list[str]:
    """Losses and norms, evaluations, choices, exported files and checkpoints of two run folders."""
    found = []
    for kind in COMPUTED_FIELDS:
        found += differences(computed(before, kind), computed(after, kind))
    exports = differences(files_of(before / "export"), files_of(after / "export"))
    checkpoints = differences(*(checkpoint_files(run / "checkpoints", NEW_KEYS) for run in (before, after)))
    found += [f"export/{one}" for one in exports] + [f"checkpoints/{one}" for one in checkpoints]
    return found


def show(name: str, extent: str, found: list[str]) -> bool:
    """One row of the table; True where nothing differs."""
    print(f"{'same' if not found else 'DIFFERENT':10} {extent:>12}  {name}", flush=True)
    for one in found[:SHOWN_DIFFERENCES]:
        print(f"{'':26}{' '.join(one.split())[:400]}")
    if len(found) > SHOWN_DIFFERENCES:
        print(f"{'':26}and {len(found) - SHOWN_DIFFERENCES} more")
    return not found


if __name__ == "__main__":
    sys.exit(main())

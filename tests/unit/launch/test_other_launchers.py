"""`coremill launch` for people who come from other launchers: their words, their files, their scripts."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from coremill import cli
from coremill.errors import InputError
from coremill.launch.accelerate import with_accelerate_file
from coremill.launch.request import Request
from coremill.launch.script_notes import known_arguments, notes_on_script
from coremill.launch.settings import OpenMp, notes_on

Command = Callable[..., tuple[int, str, str]]
FOREIGN = ("RANK", "OMP_", "GLOO_", "CCL_", "KMP_", "PMI_", "ACCELERATE_", "WORLD_SIZE", "MASTER_")
GOMP = OpenMp(runtime="libgomp", preload=None, reason="torch brings libgomp")


@pytest.fixture
def coremill(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Command:
    """`coremill WORDS` in this process, in a folder with a script and a hostfile: exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("raise SystemExit('this script must not be started')\n")
    (tmp_path / "hosts").write_text("node1\nnode2\n")
    for name in [name for name in os.environ if name.startswith(FOREIGN)]:
        monkeypatch.delenv(name)

    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["coremill", *words])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return run


# what is typed after `coremill launch` | the line that is told
LINES = [
    ("--nproc_per_node=2 train.py --lr 3", "coremill launch --nproc 2 train.py --lr 3"),
    (
        "--distributed --nnodes=4 --node_rank=0 --master_addr=10.0.1.100 --nproc_per_node=1 train.py",
        "coremill launch --nnodes 4 --node-rank 0 --master 10.0.1.100 --nproc 1 train.py",
    ),
    (
        "--dry-run --num_machines 2 --machine_rank 1 --main_process_ip node1 --main_process_port 29500 train.py",
        "coremill launch --dry-run --nnodes 2 --node-rank 1 --master node1:29500 train.py",
    ),
    (
        "--num_processes 4 --mixed_precision bf16 train.py",
        "ACCELERATE_MIXED_PRECISION=bf16 coremill launch --nproc 4 train.py",
    ),
    (
        "-n 4 -ppn 2 -f hosts -genv OMP_NUM_THREADS=23 python3 train.py",
        "coremill launch --hostfile hosts --ppn 2 --threads 23 train.py",
    ),
    ("--via torchrun -np 2 train.py", "coremill launch --via torchrun --nproc 2 train.py"),
    ("--bind_cores_to_rank train.py", "coremill launch train.py"),
    ("--multi_gpu train.py", "coremill launch train.py"),
    ("--multi_gpu --num_processes 4 train.py", "coremill launch --nproc 4 train.py"),
    ("--ntasks 2 --cpus-per-task 1 train.py", "coremill launch --nproc 2 --threads 1 train.py"),
    ("--module --nproc_per_node 2 my.training x", "coremill launch --nproc 2 -m my.training x"),
]


@pytest.mark.parametrize(("typed", "line"), LINES)
def test_words_of_other_launchers_are_answered_with_the_line(coremill: Command, typed: str, line: str) -> None:
    code, out, err = coremill("launch", *shlex.split(typed))
    assert (code, out) == (78, ""), err
    assert err.rstrip().endswith(f"the line to type: {line}"), err
    words = [word for word in shlex.split(line) if "=" not in word][2:]
    if "-m" not in words:  # that module is nowhere
        code, _, err = coremill("launch", "--dry-run", *words)
        assert code == 0, err


def test_a_flag_for_gpus_says_who_counts_ranks(coremill: Command) -> None:
    _, _, err = coremill("launch", "--multi_gpu", "train.py")
    assert (
        "it is for GPUs and is dropped: the plan decides how many ranks coremill train has" in err
        and "--nproc N" in err
    )


def test_what_comes_after_a_script_is_the_scripts(coremill: Command) -> None:
    """The same words that are refused before it."""
    code, out, err = coremill("launch", "--dry-run", "train.py", "--use_cpu", "--nproc_per_node", "3", "--config", "a")
    assert code == 0, err
    assert "train.py --use_cpu --nproc_per_node 3 --config a" in out


# --- --accelerate FILE

ONE = """\
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_CPU
mixed_precision: bf16
num_machines: {machines}
num_processes: {processes}
machine_rank: 1
main_process_ip: 10.0.0.1
main_process_port: 29501
dynamo_config:
  dynamo_backend: inductor
  dynamo_mode: default
use_cpu: true
"""


def taken(
    tmp_path: Path, text: str, *, is_rank: bool = False, environ: dict[str, str] | None = None, **options: object
) -> tuple[dict[str, object], dict[str, str], str]:
    """What the file changes in the request and in the environment, and what is said."""
    (tmp_path / "accelerate.yaml").write_text(text)
    request = Request(script="train.py", **options)  # type: ignore[arg-type]
    found = with_accelerate_file(request, tmp_path / "accelerate.yaml", environ or {}, is_rank=is_rank)
    names = ("nproc", "hostfile", "ppn", "nnodes", "node_rank", "master")
    changed = {name: getattr(found.request, name) for name in names if getattr(found.request, name) is not None}
    return changed, dict(found.environ), "\n".join(found.notes)


def test_an_accelerate_file_of_one_machine(tmp_path: Path) -> None:
    text = ONE.format(machines=1, processes=2)
    changed, environ, notes = taken(tmp_path, text)
    assert changed == {"nproc": 2}
    assert environ == {
        "ACCELERATE_MIXED_PRECISION": "bf16",
        "ACCELERATE_DYNAMO_BACKEND": "INDUCTOR",
        "ACCELERATE_DYNAMO_MODE": "default",
    }
    assert "--nproc 2" in notes and "ACCELERATE_MIXED_PRECISION=bf16" in notes
    # The command line goes over it, and what is set stays.
    changed, environ, _ = taken(tmp_path, text, nproc=3, environ={"ACCELERATE_MIXED_PRECISION": "no"})
    assert changed == {"nproc": 3} and environ["ACCELERATE_MIXED_PRECISION"] == "no"


def test_an_accelerate_file_of_several_machines(tmp_path: Path) -> None:
    text = ONE.format(machines=2, processes=8)
    by_hand = {"nnodes": 2, "node_rank": 1, "nproc": 4, "master": "10.0.0.1:29501"}
    assert taken(tmp_path, text)[0] == by_hand
    assert taken(tmp_path, text, node_rank=0)[0] == by_hand | {"node_rank": 0}
    with_hosts = text + "mpirun_config:\n  mpirun_hostfile: /home/me/hosts\n"
    assert taken(tmp_path, with_hosts)[0] == {"hostfile": Path("/home/me/hosts"), "ppn": 4, "nnodes": 2}
    assert taken(tmp_path, with_hosts, hostfile=Path("mine"))[0] == {"hostfile": Path("mine"), "ppn": 4}
    # Somebody's mpirun has started us: how many there are is settled.
    changed, environ, _ = taken(tmp_path, text, is_rank=True)
    assert changed == {} and environ["ACCELERATE_MIXED_PRECISION"] == "bf16"
    with pytest.raises(InputError, match="cannot be shared out"):
        taken(tmp_path, ONE.format(machines=2, processes=3))


def test_what_is_not_taken_from_an_accelerate_file_is_said(tmp_path: Path) -> None:
    text = "distributed_type: FSDP\nnum_processes: 2\nmixed_precision: fp16\nfsdp_config:\n  fsdp_version: 2\n"
    notes = taken(tmp_path, text)[2]
    for part in ("distributed_type: FSDP: ", "fsdp_config: not handed on; ", "mixed_precision: fp16: "):
        assert part in notes
    hosts = (
        "distributed_type: MULTI_CPU\nmpirun_config:\n  mpirun_hostfile: hosts\ncompute_environment: AMAZON_SAGEMAKER"
    )
    notes = taken(tmp_path, hosts)[2]
    assert "hosts: not read; num_machines is 1" in notes and "compute_environment: AMAZON_SAGEMAKER: " in notes


def test_files_of_other_versions_of_accelerate(tmp_path: Path) -> None:
    old = "distributed_type: MULTI_CPU\nfp16: true\nnum_processes: 2"
    assert taken(tmp_path, old)[:2] == ({"nproc": 2}, {"ACCELERATE_MIXED_PRECISION": "fp16"})
    alone = "distributed_type: 'NO'\ndynamo_config:\n  backend: EAGER\ndebug: true"
    variables = {"ACCELERATE_DYNAMO_BACKEND": "EAGER", "ACCELERATE_DEBUG_MODE": "true"}
    assert taken(tmp_path, alone)[:2] == ({"nproc": 1}, variables)
    any_port = "distributed_type: MULTI_CPU\nnum_machines: 2\nmain_process_ip: 10.0.0.1\nmain_process_port: 0"
    assert taken(tmp_path, any_port)[0] == {"nnodes": 2, "master": "10.0.0.1"}


@pytest.mark.parametrize("text", ["", "- a\n", "learning_rate: 1\n", "{", "num_processes: [", "\0"])
def test_no_accelerate_file(coremill: Command, text: str) -> None:
    Path("broken.yaml").write_text(text)
    code, out, err = coremill("launch", "--accelerate", "broken.yaml", "train.py")
    assert (code, out) == (78, "") and err.startswith("coremill: ") and "Traceback" not in err
    assert coremill("launch", "--accelerate", "missing.yaml", "train.py")[0] == 78


# --- scripts of yesterday

OLD = """\
import intel_extension_for_pytorch as ipex
from transformers import Trainer, TrainingArguments
arguments = TrainingArguments(
    output_dir="out", use_cpu=True,
    no_cuda=True, use_ipex=True, overwrite_output_dir=True,
)
"""
PARSED = "from transformers import HfArgumentParser, TrainingArguments\nclass Mine:\n    doc_stride: int = 128\n"


def test_what_a_script_asks_of_transformers_in_vain() -> None:
    notes = notes_on_script("train.py", (), OLD)
    assert notes[0].startswith(
        "train.py:1 imports intel_extension_for_pytorch, which is not installed: IPEX is archived"
    )
    told = [re.sub(r" transformers [\d.]+ ", " transformers V ", note) for note in notes[1:]]
    refused = "transformers V has no such argument and will refuse it"
    assert told == [
        f"train.py:5 TrainingArguments(no_cuda=...): {refused}; remove it; today's name is use_cpu",
        f"train.py:5 TrainingArguments(use_ipex=...): {refused}; remove it",
        f"train.py:5 TrainingArguments(overwrite_output_dir=...): {refused}; remove it",
    ]


def test_arguments_that_transformers_no_longer_takes() -> None:
    words = ("--doc_stride", "128", "--output_dir=out", "--overwrite_output_dir", "--evaluation_strategy=no",
             "--per-device-train-batch-size", "4", "--learning", "1e-5", "--do_train")  # fmt: skip
    notes = notes_on_script("run_qa.py", words, PARSED)
    assert [note.partition(":")[0] for note in notes] == ["--overwrite_output_dir", "--evaluation_strategy"]
    # Of a script that reads its own command line nothing is known.
    assert notes_on_script("mine.py", words, "import argparse\n") == []
    assert notes_on_script("mine.py", words, "this is no Python (\n") == []
    # An argument that the script itself has is its own, whatever transformers makes of it.
    assert notes_on({}, ("--no_cuda",), GOMP) and notes_on({}, ("--no_cuda",), GOMP, script_text="no_cuda") == []


def test_a_script_that_trains_by_deepspeed_is_not_told_of_cpus(coremill: Command) -> None:
    """accelerate would leave its model unwrapped; another script's ranks need the word to find each other."""
    Path("zero.py").write_text("import deepspeed\n")
    Path("handed.py").write_text("TrainingArguments(deepspeed='ds.json')\n")
    Path("spoken_of.py").write_text("# no deepspeed here\n")
    told = {}
    for words in (["zero.py"], ["handed.py"], ["train.py", "--deepspeed", "ds.json"], ["spoken_of.py"], ["train.py"]):
        told[" ".join(words)] = "ACCELERATE_USE_CPU=true" in coremill("launch", "--nproc", "1", "--dry-run", *words)[1]
    assert [name for name, is_told in told.items() if is_told] == ["spoken_of.py", "train.py"]


def test_the_fields_are_those_of_the_installed_class() -> None:
    """The class itself is asked in a process of its own, for it imports torch."""
    if not os.environ.get("COREMILL_LONG_TESTS"):
        pytest.skip("imports torch; COREMILL_LONG_TESTS=1 runs it")
    program = "import dataclasses, transformers; print([f.name for f in dataclasses.fields(transformers.{})])"
    done = subprocess.run(
        [sys.executable, "-c", program.format("Seq2SeqTrainingArguments")], capture_output=True, text=True, check=True
    )
    assert known_arguments() == set(ast.literal_eval(done.stdout.splitlines()[-1]))

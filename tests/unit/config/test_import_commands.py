# ruff: noqa: E501 (the tables: one command, one row)
"""`coremill config import -- COMMAND ...`: the same start by coremill, and the run file where the work is known."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coremill.errors import InputError
from unit.config.brought import BROUGHT, fates, imported, loaded

# each command of a tutorial | what coremill launch is called with | the task, where the script's work is known
COMMANDS = {
    "torchrun_one.sh": ("coremill launch --nproc 1 samples/cpu-amx/cpu-llama3.py", None),
    "torchrun_four.sh": ("GLOO_LOG_LEVEL=TRACE TORCH_DISTRIBUTED_DEBUG=DETAIL coremill launch --nproc 4 train.py", None),
    "python.sh": ("coremill launch --nproc 1 train.py", None),
    "ipex_launcher.sh": ("coremill launch --nnodes 4 --node-rank 0 --master 10.0.1.100 --nproc 1 train.py", None),
    "accelerate.sh": ("coremill launch --nproc 1 examples/nlp_example.py", "sequence-classification"),
    "mpirun_accelerate.sh": (
        "coremill launch --hostfile hostfile --ppn 4 examples/nlp_example.py", "sequence-classification"
    ),
    "mpirun_qa_one.sh": ("coremill launch --nproc 2 --threads 23 run_qa.py", "question-answering"),
    "srun.sh": ("coremill launch --hostfile hosts.txt --ppn 2 --threads 16 train.py", None),
    "mpirun_qa_two.sh": ("coremill launch --hostfile hostfile --ppn 2 --threads 23 run_qa.py", "question-answering"),
}  # fmt: skip


@pytest.mark.parametrize("name", COMMANDS)
def test_every_word_of_a_tutorials_command_is_answered(name, tmp_path):
    text = (BROUGHT / name).read_text()
    launch, task = COMMANDS[name]
    found = imported(text, is_command=True)
    assert " ".join(found.launch).startswith(launch)
    config = loaded(tmp_path, found.text).config
    assert config.task == (task or "causal-lm")
    below = found.text.partition("\n\n")[2]  # without the command itself
    for word in words_of(text):
        assert word in below, word
    assert imported(text, is_command=True).text == found.text
    assert imported(str(BROUGHT / name)).text.partition("\n\n")[2] == below  # as a shell script
    assert "unknown" not in fates(found).values()


def words_of(text: str) -> list[str]:
    """Variables that are exported or in front, and options."""
    kept = "\n".join(line for line in text.splitlines() if "$(" not in line and "source " not in line)
    exported = re.findall(r"export (\w+)=|(?<!\S)([A-Z_]+)=", kept)
    options = re.findall(r"(?<!\S)(-[-\w]+)", kept.replace("python -m", "python"))
    return [first or second for first, second in exported] + options


def test_the_run_file_of_question_answering(tmp_path):
    found = imported(str(BROUGHT / "mpirun_qa_two.sh"))
    config = loaded(tmp_path, found.text).config
    assert (config.model.name, config.data.source) == ("google-bert/bert-large-uncased", "hf://squad")
    assert (config.train.samples_per_step, config.train.epochs, config.train.learning_rate) == (48, 2, 3e-5)
    assert (config.data.sequence_length, config.data.doc_stride, config.data.evaluation_split) == (
        384,
        128,
        "validation",
    )
    assert (config.parallel.dtype, config.parallel.ranks_per_node) == ("bf16", 2)
    assert config.parallel.threads_per_rank == "auto" and "--threads 23; train takes the cores" in found.text
    assert (config.fleet.nodes, config.run.folder) == (2, "/tmp/debug_squad/")


def test_arguments_that_transformers_no_longer_knows_are_replaced():
    launch = imported(str(BROUGHT / "mpirun_qa_one.sh")).launch
    assert launch[-3:] == ("--use_cpu", "--ddp_backend", "gloo") and "--use_ipex" not in launch
    own = imported("torchrun", "mine.py", "--use_ipex", "--no_cuda", is_command=True)
    assert own.launch[-3:] == ("mine.py", "--use_ipex", "--no_cuda")  # a script of the user's may have them


def test_the_pairs_of_nlp_example(tmp_path):
    config = loaded(tmp_path, imported(str(BROUGHT / "mpirun_accelerate.sh")).text).config
    assert (config.model.name, config.data.source) == ("bert-base-cased", "hf://nyu-mll/glue:mrpc")
    assert config.data.text_columns == ["sentence1", "sentence2"]
    assert (config.train.samples_per_step, config.train.epochs) == (16 * 16, 3)


LAUNCHES = [
    ("mpirun -np 4 -npernode 2 --hostfile h -x OMP_NUM_THREADS=8 python -u t.py a --b", "--hostfile h --ppn 2 --threads 8 t.py a --b"),
    ("mpirun -np 8 --hostfile h --map-by ppr:2:node -x NCCL_DEBUG python t.py", "--hostfile h --ppn 2 t.py"),
    ("mpiexec.hydra -n 4 -ppn 2 -hosts a,b -genv I_MPI_PIN 1 -genv FOO bar python t.py", "--hostfile hosts.txt --ppn 2 t.py"),
    ("mpirun --allow-run-as-root -n 2 -l python -m pkg.train --x 1", "--nproc 2 -m pkg.train --x 1"),
    ("torchrun --standalone --nproc-per-node auto t.py", "t.py"),
    ("torchrun --nnodes 1:4 --nproc_per_node 2 --rdzv_endpoint n0:29400 --rdzv_backend c10d --node_rank 1 t.py", "--nnodes 4 --node-rank 1 --master n0:29400 --nproc 2 t.py"),
    ("python -m torch.distributed.launch --nproc_per_node 2 --use_env t.py --local", "--nproc 2 t.py --local"),
    ("torchrun --nproc_per_node 2 -m pkg.mod --a", "--nproc 2 -m pkg.mod --a"),
    ("torchrun --nnodes $N --nproc_per_node 2 t.py", "--nproc 2 t.py"),
    ("accelerate launch --cpu --num_processes 2 --num_cpu_threads_per_process 4 t.py", "--nproc 2 --threads 4 t.py"),
    ("accelerate launch --num_machines 2 --num_processes 4 --machine_rank 1 --main_process_ip n0 --main_process_port 1234 t.py", "--nnodes 2 --node-rank 1 --master n0:1234 --nproc 2 t.py"),
    ("accelerate launch --mpirun_hostfile h --num_machines 2 --num_processes 4 --mpirun_ccl 1 --ipex t.py", "--hostfile h --ppn 2 t.py"),
    ("accelerate launch --config_file nowhere.yaml t.py", "--accelerate nowhere.yaml --nproc 1 t.py"),
    ("deepspeed --num_gpus 4 --bind_cores_to_rank t.py --deepspeed --deepspeed_config c.json", "--nproc 4 t.py --deepspeed --deepspeed_config c.json"),
    ("deepspeed --hostfile h --num_nodes 2 --num_gpus 2 --master_port 99 t.py", "--hostfile h --ppn 2 t.py"),
    ("ipexrun --nnodes 2 --nprocs-per-node 2 --hostfile h --ccl-worker-count 4 t.py", "--hostfile h --ppn 2 t.py"),
    ("ipexrun --memory-allocator jemalloc --ninstances 2 --ncores-per-instance 8 --throughput-mode t.py", "--allocator jemalloc --nproc 2 --threads 8 t.py"),
    ("python -m torch.backends.xeon.run_cpu --enable-tcmalloc --ninstances 2 t.py", "--allocator tcmalloc --nproc 2 t.py"),
    ("numactl -C 0-3 -m 0 python t.py", "--nproc 1 t.py"),
    ("env -u A FOO=1 python t.py", "--nproc 1 t.py"),
    ("./t.py --x", "--nproc 1 ./t.py --x"),
    ("accelerate launch --multi_gpu t.py", "t.py"),
    ("accelerate launch --multi_gpu --num_processes 4 t.py", "--nproc 4 t.py"),
    ("srun t.py", "--nproc 1 t.py"),
    ("srun -n4 -c 8 --mem 64G python t.py", "--nproc 4 --threads 8 t.py"),
    ("srun -N 2 -n 8 --cpus-per-task=16 -p cpu python t.py --x 1", "--hostfile hosts.txt --ppn 4 --threads 16 t.py --x 1"),
    ("srun -N2 --ntasks-per-node 4 --cpu-bind=cores -l python -m pkg.train", "--hostfile hosts.txt --ppn 4 -m pkg.train"),
    ("srun -w a,b -N 2 python t.py", "--hostfile hosts.txt --ppn 1 t.py"),
    ("srun -N 4 --ntasks-per-node=1 torchrun --nnodes 4 --nproc_per_node 2 --rdzv_endpoint n0:1 t.py", "--hostfile hosts.txt --ppn 2 t.py"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "launch"), LAUNCHES, ids=[line for line, _ in LAUNCHES])
def test_launchers(line, launch, tmp_path):
    found = imported(*shlex.split(line), is_command=True)
    told = " ".join(found.launch).partition("coremill launch ")[2]
    assert told == launch
    loaded(tmp_path, found.text)


def test_slurm():
    """Hosts are those of the allocation; what is about the allocation is said to be left behind."""
    found = imported(*shlex.split("srun -N 2 --ntasks-per-node=4 --gres gpu:4 -t 10 python t.py"), is_command=True)
    assert (
        "#   scontrol show hostnames > hosts.txt\n#   coremill launch --hostfile hosts.txt --ppn 4 t.py" in found.text
    )
    assert fates(found) == {"N": "mapped", "ntasks-per-node": "mapped", "gres": "dropped", "t": "dropped"}
    assert "salloc or sbatch asks for it" in found.text and "it is for GPUs" in found.text
    of_script = imported(
        "#SBATCH -N 2 # two\n#SBATCH --ntasks-per-node=4\nsrun --ntasks-per-node=1 t.py", is_command=True
    )
    assert of_script.launch == ("coremill", "launch", "--hostfile", "hosts.txt", "--ppn", "1", "t.py")
    assert "--ppn" not in imported("#SBATCH -N 2\npython t.py", is_command=True).launch


def test_variables_stay_unless_they_are_retired():
    found = imported(
        "CCL_WORKER_COUNT=1", "KMP_AFFINITY=compact", "MY=a b", "mpirun", "-genv", "X=1", "t.py", is_command=True
    )
    assert found.launch[:3] == ("KMP_AFFINITY=compact", "MY=a b", "X=1")
    assert fates(found)["CCL_WORKER_COUNT"] == "retired" and "MY='a b'" in found.text


def test_files_that_a_command_names_are_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "four.yaml").write_text((BROUGHT / "four_machines.yaml").read_text())
    (tmp_path / "ds.json").write_text((BROUGHT / "cpu-ds.json").read_text())
    line = "accelerate launch --config_file four.yaml run_clm.py --model_name_or_path gpt2 --train_file a.txt --deepspeed ds.json"
    found = imported(
        *shlex.split(f"{line} --gradient_accumulation_steps 4 --per_device_train_batch_size 1"), is_command=True
    )
    config = loaded(tmp_path, found.text).config
    assert " ".join(found.launch).startswith("coremill launch --accelerate four.yaml run_clm.py")
    assert (config.parallel.engine, config.train.tokens_per_step) == ("shard", 4 * 16 * 1024)
    assert (config.fleet.nodes, config.parallel.ranks_per_node) == (4, 4)
    beside = imported(*shlex.split(line.replace("launch", "launch --num_processes 8", 1)), is_command=True).launch
    assert " ".join(beside).startswith("coremill launch --accelerate four.yaml --hostfile /home/me/hostfile --ppn 2")


def test_the_default_file_of_accelerate_is_read(tmp_path):
    from coremill.config.imports.imported import import_words

    folder = tmp_path / "hf" / "accelerate"
    folder.mkdir(parents=True)
    (folder / "default_config.yaml").write_text((BROUGHT / "one_machine.yaml").read_text())
    found = import_words(["accelerate", "launch", "t.py"], is_command=True, environ={"HF_HOME": str(tmp_path / "hf")})
    assert f"--accelerate {folder / 'default_config.yaml'}" in " ".join(found.launch)
    assert "parallel:\n  dtype: bf16" in found.text


BAD = {
    "echo hello": "no launcher that is known",
    "torchrun --nproc_per_node 2": "names no script",
    "accelerate config": "accelerate is followed by launch",
    "accelerate": "accelerate is followed by launch",
    "python": "names no script",
    "python -c 'print(1)'": "python -c has no script",
    "coremill train": "a command of coremill already",
    "mpirun -n 2": "names no script",
    "mpirun -n 2 hostname": "no launcher that is known",
    "": "nothing to import",
}


@pytest.mark.parametrize("line", BAD)
def test_a_bad_command_gets_one_message(line):
    with pytest.raises(InputError, match=BAD[line]) as caught:
        imported(*shlex.split(line), is_command=True)
    assert caught.value.do


def test_text_of_a_shell():
    text = "# start\n$ cd src && export A=1; B='x ; y' torchrun --nproc_per_node 2 t.py --say 'a && b' > log.txt 2>&1 & tail log.txt"
    found = imported(text, is_command=True)
    assert found.launch == ("A=1", "B=x ; y", "coremill", "launch", "--nproc", "2", "t.py", "--say", "a && b")
    assert imported("mpirun -n 2 python t.py | tee log", is_command=True).launch[-3:] == ("--nproc", "2", "t.py")


def test_text_without_a_command():
    with pytest.raises(InputError, match="no command that starts a training"):
        imported("cat hostfile\necho done", is_command=True)
    with pytest.raises(InputError, match="cannot be taken apart"):
        imported("torchrun 'open t.py", is_command=True)


@settings(max_examples=60, deadline=None)
@given(
    words=st.lists(
        st.one_of(
            st.sampled_from(
                ["mpirun", "accelerate", "launch", "torchrun", "python", "-m", "-n", "2", "-ppn", "--", "-x", "t.py"]
            ),
            st.sampled_from(
                ["-genv", "A=1", "--nnodes", "--map-by", "ppr:2:node", "--mixed_precision", "run_qa.py", "-H"]
            ),
            st.text(max_size=6),
        ),
        max_size=8,
    )
)
def test_any_words_give_a_command_or_a_message(tmp_path_factory, words):
    try:
        found = imported(*words, is_command=True)
    except InputError as error:
        assert error.do
        return
    loaded(tmp_path_factory.mktemp("any"), answered(found.text))
    json.loads(found.as_json)


def answered(text: str) -> str:
    """A run file whose questions have been answered: `# source: ?` is `source: x`."""
    return re.sub(
        r"^( *)# ( *)(name|model|source): \?", r"\1\2\3: x", text.replace("\n# data:\n", "\ndata:\n"), flags=re.M
    )


@pytest.mark.parametrize(
    ("words", "questions"),
    [([], ("model", "data.source")), (["--model_name_or_path", "bert-base-cased"], ("data.source",))],
)
def test_the_task_stands_where_model_or_data_is_still_asked(tmp_path, words, questions):
    found = imported("python", "run_qa.py", *words, is_command=True)
    assert found.composed.questions == questions
    with pytest.raises(InputError, match="no (model|data) is named"):
        loaded(tmp_path, found.text)
    config = loaded(tmp_path, answered(found.text)).config
    assert (config.task, config.train.samples_per_step) == ("question-answering", 8)


def test_the_command(tmp_path, monkeypatch, capsys):
    """By its own command line: with and without --, the file, JSON, exit codes."""
    from coremill import cli

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path))

    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["coremill", "config", "import", *words])
        try:
            cli.main()
            code: object = 0
        except SystemExit as ended:
            code = ended.code
        out, err = capsys.readouterr()
        return int(str(code or 0)), out, err

    code, text, err = run("--", "torchrun", "--nproc_per_node=4", "train.py", "--", "x")
    assert (code, err) == (0, "") and "coremill launch --nproc 4 train.py -- x" in text
    assert run("torchrun", "--nproc_per_node=4", "train.py", "--lr", "1")[0] == 0
    code, text, _ = run("--json", str(BROUGHT / "cpu-ds.json"))
    assert (code, json.loads(text)["questions"]) == (0, ["model", "data.source"])
    Path("a b.yaml").write_text((BROUGHT / "one_machine.yaml").read_text())
    assert run("a b.yaml")[:1] == (0,)
    for words in ((), ("nothing.yaml",), ("a b.yaml", "more"), ("a b.yaml", "--", "torchrun", "t.py"), ("--nonsense",)):
        assert run(*words)[0] == 78, words


def test_json_for_scripts_shows_no_secret():
    line = "HF_TOKEN=made-up-1 python t.py --hub_token made-up-2 --token=made-up-3 --push_to_hub_token $T --max_steps 3"
    found = imported(*shlex.split(line), is_command=True)
    shown = json.loads(found.as_json)["launch"]
    assert "made-up" not in found.as_json and {"$T", "--max_steps", "3"} <= set(shown)
    assert [word for word in shown if "***" in word] == ["HF_TOKEN=***", "***", "--token=***"]

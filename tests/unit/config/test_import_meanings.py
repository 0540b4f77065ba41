"""`coremill config import`: settings mean what they mean where they stand, in files of several versions of a tool."""

from __future__ import annotations

import ast
import importlib.metadata
import json
from pathlib import Path

import pytest

from coremill.config.foreign import find_foreign
from coremill.config.imports.imported import Imported
from coremill.config.imports.launchers import take_apart
from coremill.errors import InputError
from unit.config.brought import accelerate_section_fields, fates, imported, loaded

ACCELERATE = "compute_environment: LOCAL_MACHINE\n"
DEEPSPEED = {
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}},
    "train_micro_batch_size_per_gpu": 8,
    "aio": {"block_size": 1048576, "queue_depth": 8},
    "tensorboard": {"enabled": True, "output_path": "elsewhere"},
}


def of_text(tmp_path: Path, text: str, name: str = "theirs.yaml") -> Imported:
    path = tmp_path / name
    path.write_text(text)
    return imported(str(path))


def settings_of(found: Imported) -> dict[str, object]:
    return json.loads(found.as_json)["settings"]


# a file of accelerate, less its first line | settings that come of it
FILES = {
    "0.3: a switch for fp16": ("distributed_type: MULTI_CPU\nfp16: true\nnum_processes: 2", {"parallel.dtype": None}),
    "0.12: empty sections": (
        "distributed_type: 'NO'\ndeepspeed_config: {}\nfsdp_config: {}\nmegatron_lm_config: {}",
        {"parallel.engine": None},
    ),
    "0.20: FSDP that shards nothing": (
        "distributed_type: FSDP\nfsdp_config:\n  fsdp_sharding_strategy: 3\n  fsdp_offload_params: true",
        {"parallel.engine": "replicate"},
    ),
    "1.0: FSDP": (
        "distributed_type: FSDP\nfsdp_config:\n  fsdp_activation_checkpointing: true\n"
        "  fsdp_sharding_strategy: FULL_SHARD\n  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP",
        {"parallel.engine": "shard", "train.activation_checkpointing": True},
    ),
    "1.7: FSDP2": (
        "distributed_type: FSDP\nfsdp_config:\n  fsdp_version: 2\n  fsdp_reshard_after_forward: false",
        {"parallel.engine": "shard", "parallel.keep_gathered": True},
    ),
    "fp8": ("distributed_type: MULTI_GPU\nfp8_config:\n  backend: TE\n  margin: 0", {"parallel.engine": "replicate"}),
}


@pytest.mark.parametrize("kind", FILES)
def test_files_of_several_versions_of_accelerate(tmp_path, kind):
    text, expected = FILES[kind]
    found = of_text(tmp_path, ACCELERATE + text)
    assert {key: settings_of(found).get(key) for key in expected} == expected
    assert "unknown" not in fates(found).values()
    loaded(tmp_path, found.text)


def test_what_is_empty_is_said_to_be(tmp_path):
    assert "fsdp_config: {} -- it is left empty there" in of_text(tmp_path, f"{ACCELERATE}fsdp_config: {{}}").text


@pytest.mark.parametrize("section", accelerate_section_fields())
def test_a_pattern_hides_no_row(section):
    for name in accelerate_section_fields()[section]:
        alone = find_foreign((name,))
        assert alone is None or section == "fp8_config" or find_foreign((section, name)) is alone, name


def test_names_inside_sections_of_deepspeed_are_not_those_of_others(tmp_path):
    found = of_text(tmp_path, json.dumps(DEEPSPEED), "ds.json")
    config = loaded(tmp_path, found.text).config
    assert config.data.sequence_length == 512 and config.train.tokens_per_step == 8 * 512
    assert settings_of(found)["train.optimizer"] == "adamw" and "run.folder" not in settings_of(found)


def test_steps_within_a_section_of_the_trainer_are_not_those_of_the_run(tmp_path):
    text = {"output_dir": "out", "accelerator_config": {"gradient_accumulation_kwargs": {"num_steps": 4}}}
    assert "train.steps" not in settings_of(of_text(tmp_path, json.dumps(text), "args.json"))


@pytest.mark.parametrize("strategy", ["no", "epoch"])
def test_steps_count_under_their_strategy_alone(tmp_path, strategy):
    text = {"output_dir": "out", "save_strategy": strategy, "save_steps": 500, "eval_strategy": strategy}
    found = of_text(tmp_path, json.dumps({**text, "eval_steps": 50}), "args.json")
    assert settings_of(found).get("checkpoint.every") == ("never" if strategy == "no" else None)
    assert fates(found)["save_steps"] == fates(found)["eval_steps"] == "dropped"


def test_a_deepspeed_file_that_an_accelerate_file_names(tmp_path):
    text = f"{ACCELERATE}distributed_type: DEEPSPEED\ndeepspeed_config:\n  deepspeed_config_file: ds.json\n"
    assert "ds.json is not here" in of_text(tmp_path, text).text
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 0}, "gradient_clipping": 0.5}))
    assert (
        settings_of(of_text(tmp_path, text)).items() >= {"parallel.engine": "replicate", "train.clip_norm": 0.5}.items()
    )


# settings of TrainingArguments | what comes of them, None: nothing
TRAINER = {
    "the best by a metric": (
        {"load_best_model_at_end": True, "metric_for_best_model": "f1", "task": "question-answering"},
        {"evaluation.keep_best": "f1"},
    ),
    "the best by nothing else": ({"load_best_model_at_end": True}, {"evaluation.keep_best": "loss"}),
    "the last": ({"load_best_model_at_end": False, "metric_for_best_model": "f1"}, {"evaluation.keep_best": None}),
    "no warm-up": ({"lr_scheduler_type": "constant", "warmup_ratio": 0.03}, {"train.warmup_share": None}),
    "no warm-up of steps": ({"lr_scheduler_type": "constant", "warmup_steps": 9}, {"train.warmup_steps": None}),
    "a warm-up": (
        {"lr_scheduler_type": "constant_with_warmup", "warmup_ratio": 0.03},
        {"train.schedule": "constant", "train.warmup_share": 0.03},
    ),
}


@pytest.mark.parametrize("kind", TRAINER)
def test_settings_of_the_trainer_that_change_each_other(tmp_path, kind):
    text, expected = TRAINER[kind]
    text = {"output_dir": "out", "eval_strategy": "steps", "eval_steps": 50, **text}
    found = settings_of(of_text(tmp_path, json.dumps(text), "args.json"))
    assert {key: found.get(key) for key in expected} == expected


def test_no_clipping_is_none(tmp_path):
    found = of_text(tmp_path, json.dumps({"output_dir": "out", "max_grad_norm": 0}), "args.json")
    assert settings_of(found)["train.clip_norm"] is None and "clip_norm: null" in found.text
    assert loaded(tmp_path, found.text).config.train.clip_norm is None


def test_axolotls_own_schedule(tmp_path):
    text = "base_model: m\nsequence_len: 1024\nmicro_batch_size: 2\nadapter: lora\nlora_r: 8\n"
    assert settings_of(of_text(tmp_path, text))["train.schedule"] == "cosine"
    assert settings_of(of_text(tmp_path, f"{text}lr_scheduler: linear\n"))["train.schedule"] == "linear"


def test_a_typed_length_counts_before_the_scripts_own_by_another_name():
    line = "python sft.py --max_seq_length 2048 --per_device_train_batch_size 4"
    assert settings_of(imported(line, is_command=True))["train.tokens_per_step"] == 4 * 2048


def test_ranks_that_only_their_total_is_known_of():
    line = "mpirun -np 16 --hostfile hosts python train.py --per_device_train_batch_size 4 --max_length 512"
    found = imported(line, is_command=True)
    assert settings_of(found)["train.tokens_per_step"] == 16 * 4 * 512 and "number of devices you had" not in found.text


def test_arguments_of_an_unknown_script_are_its_own():
    words = "torchrun train.py --name exp1 --rank 1 --config c.yaml --image me --role x --zone y --steps 7"
    found = imported(words, is_command=True)
    assert settings_of(found) == {"train.steps": 7}
    assert found.launch[-len(words.split()) + 2 :] == tuple(words.split()[2:])


def test_arguments_with_several_values():
    found = imported("torchrun train.py --report_to tensorboard wandb --lr 1e-4 rest", is_command=True)
    assert settings_of(found) == {
        "run.trackers": ["tensorboard", "wandb"],
        "train.learning_rate": 1e-4,
        "train.epochs": 1,
    }


# a command | what coremill launch is called with | a line of the head
HOSTS = [
    ("mpirun -H h1:2,h2:2 python train.py", "--hostfile hosts.txt --ppn 2 train.py", "h1:2 h2:2 > hosts.txt"),
    ("deepspeed --include w0:0,2@w1:1,3 train.py", "--hostfile hosts.txt --ppn 2 train.py", "w0 w1 > hosts.txt"),
    ("deepspeed --include localhost:0,2 train.py", "--nproc 2 train.py", "--nproc 2"),
]


@pytest.mark.parametrize(("line", "launch", "head"), HOSTS)
def test_hosts_with_their_slots(line, launch, head):
    found = imported(line, is_command=True)
    assert " ".join(found.launch) == f"coremill launch {launch}"
    assert head in found.text


# program | the file of its package that has its options
LAUNCHERS = [
    ("accelerate launch", "accelerate", "accelerate/commands/launch.py"),
    ("torchrun", "torch", "torch/distributed/run.py"),
    ("deepspeed", "deepspeed", "deepspeed/launcher/runner.py"),
    ("ipexrun", "torch", "torch/backends/xeon/run_cpu.py"),
]


@pytest.mark.parametrize(("program", "package", "file"), LAUNCHERS)
def test_no_option_of_an_installed_launcher_swallows_the_script(program, package, file):
    path = Path(str(importlib.metadata.distribution(package).locate_file(file)))
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    options = [call for call in calls if getattr(call.func, "attr", "") == "add_argument"]
    tried = 0
    for call in options:
        action = next((ast.unparse(word.value) for word in call.keywords if word.arg == "action"), "")
        is_flag = action in ("'store_true'", "'store_false'", "check_env")
        names = [ast.literal_eval(name) for name in call.args if isinstance(name, ast.Constant)]
        for name in (name for name in names if name.startswith("-") and name not in ("-h", "--help")):
            start = take_apart([*program.split(), name, *([] if is_flag else ["7"]), "the_script.py", "--lr", "1"])
            assert (start.script, start.arguments) == ("the_script.py", ["--lr", "1"]), name
            tried += 1
    assert tried > 20


def test_secrets_of_a_command_are_not_written_down():
    line = "mpirun -x HF_TOKEN=hush -n 2 python train.py --hf_token hush --wandb-api-key=hush --pad_token x"
    found = imported(line, is_command=True)
    assert "hush" not in found.text and "--pad_token x" in found.text
    kept = imported("HF_TOKEN=$MY_TOKEN torchrun train.py", is_command=True)
    assert 'HF_TOKEN="$MY_TOKEN" coremill launch' in kept.text


def test_of_several_commands_the_launcher_is_taken_and_the_others_told():
    found = imported("python prepare.py\ntorchrun --nproc_per_node 2 train.py\npython score.py", is_command=True)
    assert found.launch[-1] == "train.py"
    assert "python prepare.py; python score.py" in found.text


def test_folders_that_a_script_changes_to_stand_before_the_command():
    found = imported("cd examples\ncd 'question answering' && torchrun train.py\ncd ..", is_command=True)
    lines = found.text.splitlines()
    place = next(number for number, line in enumerate(lines) if line.endswith("coremill launch --nproc 1 train.py"))
    assert [line.lstrip("# ") for line in lines[place - 2 : place]] == ["cd examples", "cd 'question answering'"]


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["mpirun", "-n", "1", "python", "a.py", ":", "-n", "2", "python", "b.py"], "several programs"),
        (["bash", "run.sh"], "shell script"),
    ],
)
def test_what_cannot_be_one_start(words, what):
    with pytest.raises(InputError, match=what):
        imported(*words, is_command=True)


def test_texts_that_are_no_path():
    assert imported(f"torchrun train.py {'--x y ' * 200}").launch[:2] == ("coremill", "launch")
    with pytest.raises(InputError, match="no file"):
        imported("~nobody-of-that-name/x.yaml")


def test_aliases_of_aliases_are_not_written_out(tmp_path):
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 8)}]" for n in range(1, 9)]
    with pytest.raises(InputError, match="more than 200000 values"):
        of_text(tmp_path, ACCELERATE + "\n".join(lines))

"""`coremill config import FILE`: every setting is answered, the output loads, bad files get one message."""

from __future__ import annotations

import json
import pickle
import re
import zipfile

import pytest

from coremill.config.document import read_document
from coremill.config.foreign import find_foreign
from coremill.config.keys import keys
from coremill.errors import InputError
from unit.config.brought import (
    BROUGHT,
    accelerate_fields,
    accelerate_section_fields,
    deepspeed_fields,
    fates,
    imported,
    loaded,
    names_in,
    offload_fields,
    trainer_fields,
    zero_fields,
)

FILES = ["one_machine.yaml", "four_machines.yaml", "cpu-ds.json", "axolotl-lora.yml"]


@pytest.mark.parametrize("name", FILES)
def test_every_key_of_a_file_is_answered(name, tmp_path):
    path = BROUGHT / name
    found = imported(str(path))
    for key in names_in(read_document(path.read_text()).value):
        assert re.search(rf"\b{re.escape(key)}\b", found.text), key
    assert "unknown" not in fates(found).values()
    assert imported(str(path)).text == found.text
    loaded(tmp_path, found.text)


def test_a_file_of_one_machine(tmp_path):
    found = imported(str(BROUGHT / "one_machine.yaml"))
    config = loaded(tmp_path, found.text).config
    assert (config.parallel.dtype, config.parallel.ranks_per_node, config.parallel.engine) == ("bf16", 1, "auto")
    assert fates(found)["ipex"] == "retired" and fates(found)["tpu_env"] == "dropped"
    assert "keys were put back into ipex_config" in found.text


def test_a_file_of_four_machines(tmp_path):
    found = imported(str(BROUGHT / "four_machines.yaml"))
    config = loaded(tmp_path, found.text).config
    assert (config.parallel.engine, config.parallel.ranks_per_node, config.fleet.nodes) == ("replicate", 4, 4)
    assert "--hostfile /home/me/hostfile --ppn 4" in found.text
    assert fates(found)["mpirun_ccl"] == "retired" and fates(found)["mpirun_hostfile"] == "mapped"


def test_a_deepspeed_file(tmp_path):
    found = imported(str(BROUGHT / "cpu-ds.json"))
    config = loaded(tmp_path, found.text).config
    assert (config.parallel.engine, config.parallel.dtype) == ("shard", "bf16")
    assert "on a CPU it is there already" in " ".join(found.text.replace("#", "").split())
    told = [each["why"] for each in json.loads(found.as_json)["fates"]]
    assert sum('"auto" has DeepSpeed take it from TrainingArguments' in why for why in told) == 4


def test_deepspeed_with_numbers(tmp_path):
    optimizer = {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}}
    scheduler = {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 10, "total_num_steps": 200}}
    (tmp_path / "ds.json").write_text(
        json.dumps({"optimizer": optimizer, "scheduler": scheduler, "train_batch_size": 64, "fp16": {"enabled": True}})
    )
    train = loaded(tmp_path, imported(str(tmp_path / "ds.json")).text).config.train
    assert (train.learning_rate, train.adam_beta2, train.weight_decay) == (3e-4, 0.95, 0.1)
    assert (train.schedule, train.warmup_steps, train.steps, train.tokens_per_step) == ("cosine", 10, 200, 64 * 512)


def test_a_file_of_axolotl(tmp_path):
    found = imported(str(BROUGHT / "axolotl-lora.yml"))
    config = loaded(tmp_path, found.text).config
    assert (config.model.name, config.data.source) == ("meta-llama/Llama-3.2-1B", "hf://tatsu-lab/alpaca")
    assert (config.data.learn, config.data.evaluation_fraction, config.data.sequence_length) == ("answers", 0.05, 2048)
    assert (config.train.epochs, config.train.tokens_per_step) == (3, 2 * 4 * 2048)
    assert (config.train.optimizer, config.train.schedule, config.train.warmup_share) == ("adamw-8bit", "cosine", 0.1)
    assert (config.lora.rank, config.lora.alpha, config.lora.dropout) == (16, 32, 0.05)
    assert config.lora.target_modules == ["q_proj", "k_proj", "v_proj", "o_proj"]
    assert (config.checkpoint.keep, config.run.folder) == (2, "./outputs/lora")
    assert "Axolotl's file" in found.text and "DeepSpeed" not in found.text  # bf16: auto is Axolotl's own
    assert "paged_adamw_8bit, without paging, which a CPU does not need" in found.text
    assert "written with the chat template instead of ### Instruction" in found.text
    assert fates(found)["adapter"] == "mapped" and fates(found)["chat_template"] == "dropped"  # no file llama3


AXOLOTL = {
    "qlora": ("adapter: qlora\nlora_r: 8\nload_in_4bit: true", {"lora.rank": 8}, "the base is not quantised"),
    "several datasets": (
        "datasets:\n  - {path: a/b, type: chat_template, split: train_sft, field_messages: said}\n"
        "  - {path: c.jsonl, type: chat_template, split: train, field_messages: said, ds_type: json}",
        {"data.sources": [{"source": "hf://a/b", "split": "train_sft"}, "c.jsonl"], "data.messages_column": "said"},
        "",
    ),
    "columns that differ": (
        "datasets:\n  - {path: a.jsonl, type: chat_template, field_messages: said}\n  - {path: c.jsonl}",
        {"data.sources": ["a.jsonl", "c.jsonl"], "data.messages_column": None},
        "their columns differ, and a run has one set of them",
    ),
    "pairs": (
        "datasets:\n  - path: a.jsonl\n    type: {field_instruction: asked, field_output: said, format: '[{input}]'}",
        {"data.prompt_column": "asked", "data.answer_column": "said"},
        "its format ([{input}]) is not taken along",
    ),
    "text": (
        "pretraining_dataset:\n  - {path: a/b, name: en, split: train, text_column: body, type: pretrain}",
        {"data.source": "hf://a/b:en", "data.column": "body"},
        "",
    ),
    "a type of its own": ("datasets: [{path: a/b, type: gpteacher, revision: v2}]", {"data.source": "hf://a/b@v2"},
                          "its type (gpteacher) is not taken along"),
    "roles of a list": (
        "datasets: [{path: a.jsonl, message_property_mappings: {role: [x]}}]",
        {"data.source": "a.jsonl"},
        "its message_property_mappings ({role: [x]}) is not taken along",
    ),
    "whose answers": ("datasets: [{path: a.jsonl, roles_to_train: [user, assistant]}]", {"data.learn": "all"}, ""),
    "files by a builder": ("datasets: [{path: json, data_files: [a.jsonl], type: completion}]",
                           {"data.source": "a.jsonl"}, ""),
    "a file to evaluate on": ("datasets: [{path: a/b}]\ntest_datasets: [{path: e.jsonl, split: train}]",
                              {"data.evaluation_source": "e.jsonl"}, ""),
    "a split to evaluate on": ("datasets: [{path: a/b}]\ntest_datasets: [{path: a/b, split: test}]",
                               {"data.evaluation_split": "test"}, ""),
    "trackers": ("use_tensorboard: true\nwandb_project: mine", {"run.trackers": ["tensorboard"]}, "WANDB_PROJECT"),
    "named template": ("chat_template: chatml", {"data.chat_template": None}, "the tokenizer's own is taken"),
    "template in a file": ("chat_template_jinja: chatml.jinja", {"data.chat_template": "chatml.jinja"}, ""),
    "a measured dtype": ("bf16: auto", {"parallel.dtype": None}, "auto measures this CPU"),
}  # fmt: skip


@pytest.mark.parametrize("kind", AXOLOTL)
def test_settings_of_axolotl(tmp_path, kind):
    text, expected, said = AXOLOTL[kind]
    (tmp_path / "a.yml").write_text(f"base_model: a/b\nsequence_len: 256\nmicro_batch_size: 1\n{text}\n")
    found = imported(str(tmp_path / "a.yml"))
    got = json.loads(found.as_json)["settings"]
    assert {key: got.get(key) for key in expected} == expected
    assert said in " ".join(found.text.replace("#   ", "").replace("# ", "").split())
    assert "unknown" not in fates(found).values()
    loaded(tmp_path, found.text)


def test_an_optimizer_loses_its_paging_in_words(tmp_path):
    (tmp_path / "args.json").write_text('{"optim": "paged_adamw_32bit", "output_dir": "out"}')
    found = imported(str(tmp_path / "args.json"))
    assert loaded(tmp_path, found.text).config.train.optimizer == "adamw"
    assert "optim: paged_adamw_32bit, without paging, which a CPU does not need" in found.text


@pytest.mark.parametrize(
    ("kind", "engine"),
    [("NO", "auto"), ("MULTI_CPU", "replicate"), ("MULTI_GPU", "replicate"), ("MULTI_XPU", "replicate"),
     ("FSDP", "shard"), ("DEEPSPEED", "shard"), ("XLA", "auto"), ("MEGATRON_LM", "auto"), ("MULTI_HPU", "replicate")],
)  # fmt: skip
def test_every_distributed_type_of_accelerate(tmp_path, kind, engine):
    (tmp_path / "a.yaml").write_text(f"compute_environment: LOCAL_MACHINE\ndistributed_type: '{kind}'\n")
    found = imported(str(tmp_path / "a.yaml"))
    assert loaded(tmp_path, found.text).config.parallel.engine == engine
    assert f"distributed_type: {kind}" in found.text.replace('"', "")


def test_training_arguments(tmp_path):
    arguments = {
        "output_dir": "out", "num_train_epochs": 3.0, "max_steps": -1, "learning_rate": 5e-5, "warmup_steps": 0.1,
        "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "bf16": True, "optim": "adamw_torch",
        "save_steps": 500, "lr_scheduler_type": "cosine", "hub_token": "a-made-up-secret", "max_grad_norm": 1.0,
    }  # fmt: skip
    (tmp_path / "args.json").write_text(json.dumps(arguments))
    found = imported(str(tmp_path / "args.json"))
    config = loaded(tmp_path, found.text).config
    assert (config.train.epochs, config.train.steps, config.train.warmup_share) == (3.0, None, 0.1)
    assert (config.train.tokens_per_step, config.checkpoint.every) == (4 * 2 * 512, "500steps")
    assert "a-made-up-secret" not in found.text + found.as_json and "hub_token" in found.text


def test_steps_go_before_epochs(tmp_path):
    (tmp_path / "args.json").write_text('{"max_steps": 100, "num_train_epochs": 3, "output_dir": "out"}')
    found = imported(str(tmp_path / "args.json"))
    train = loaded(tmp_path, found.text).config.train
    assert (train.steps, train.epochs, fates(found)["num_train_epochs"]) == (100, None, "dropped")


def test_what_is_open_is_asked_and_told_until_it_is_answered(tmp_path):
    text = imported(str(BROUGHT / "one_machine.yaml")).text
    asked = loaded(tmp_path, text).open_questions
    assert len(asked) == 2 and "model" in asked[0] and "data.source" in asked[1]
    with pytest.raises(InputError, match="open questions(.|\n)*asks for model(.|\n)*--model and --data"):
        loaded(tmp_path, text).with_answers()
    assert loaded(tmp_path, text, model="gpt2", data="a.txt").with_answers().config.model.name == "gpt2"
    assert loaded(tmp_path, text, model="gpt2", data="a.txt").open_questions == []
    answered = re.sub(r"^# model: \?", "model: gpt2", text, flags=re.MULTILINE)
    answered = answered.replace("# data:\n#   source: ?", "data:\n  source: notes.txt")
    found = loaded(tmp_path, answered)
    assert found.open_questions == [] and found.config.data.source == "notes.txt"


def test_fields_of_installed_tools_have_their_row():
    """What a new release adds is answered as unknown until it gets one; a few may wait."""
    own = {key.name for key in keys().values()}
    paths = [(name,) for name in (*trainer_fields(), *accelerate_fields()) if name not in own]
    paths += [(section, name) for section, names in accelerate_section_fields().items() for name in names]
    paths += [("zero_optimization", name) for name in zero_fields()]
    paths += [("zero_optimization", "offload_optimizer", name) for name in offload_fields()]
    paths += [(name,) for name in deepspeed_fields() if find_foreign((name, "any")) is None]
    missing = [".".join(path) for path in paths if find_foreign(path) is None]
    assert len(missing) <= 3, missing


BAD = {
    "empty": ("", "is empty"),
    "comments": ("# nothing\n", "nothing but comments"),
    "not YAML": ("a: [1, 2\nb: }\n", "not valid YAML"),
    "tabs": ("a:\n\tb: 1\n", "not valid YAML"),
    "not JSON": ('{"a": 1,}', "not valid JSON"),
    "twice": ('{"bf16": true, "bf16": false}', "is given twice"),
    "a list": ("- a\n- b\n", "holds a list"),
    "text": ("hello world\n", "holds plain text"),
    "an unknown version": ("version: 7\nnum_processes: 2\n", "says version: 7"),
    "unknown": ("colour: red\nsize: 3\n", "no settings that are known here"),
    "a run file": ("model: gpt2\ntrain: {steps: 3}\n", "a run file of coremill already"),
    "a model": ('{"architectures": ["A"], "model_type": "llama"}', "a model's config"),
    "binary": (b"\x7fELF\x00\x01\xff\xfe", "not a text file"),
    "zeros": (b"a: 1\x00\n", "not a text file"),
    "a pickle": (pickle.dumps({"a": 1}), "is a pickle"),
    "too deep": ("[" * 1000, "nested too deeply"),
    "too deep for JSON": ('{"a":' * 100_000, "cannot be read"),
    "processes": ("compute_environment: LOCAL_MACHINE\nnum_machines: 3\nnum_processes: 4\n", "cannot be shared out"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_file_gets_one_message(tmp_path, kind):
    content, what = BAD[kind]
    (tmp_path / "bad").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(InputError, match=re.escape(what)) as caught:
        imported(str(tmp_path / "bad"))
    assert caught.value.exit_code == 78 and caught.value.do


def test_a_saved_training_args_is_refused_with_the_way_out(tmp_path):
    with zipfile.ZipFile(tmp_path / "training_args.bin", "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({}))
    with pytest.raises(InputError, match="is a pickle") as caught:
        imported(str(tmp_path / "training_args.bin"))
    assert "to_json_string" in (caught.value.do or "") and "training_args.bin" in (caught.value.do or "")


def test_a_large_file_is_not_read(tmp_path):
    with (tmp_path / "large.json").open("wb") as file:
        file.truncate(100 << 20)
        file.write(b"x" * 10)
    (tmp_path / "text.yaml").write_text("a: 1\n" * 200_000)
    for name in ("large.json", "text.yaml"):
        with pytest.raises(InputError, match="no file of settings"):
            imported(str(tmp_path / name))


def test_files_that_are_not_there(tmp_path):
    (tmp_path / "default_config.yaml").touch()
    with pytest.raises(InputError, match="there is no file") as caught:
        imported(str(tmp_path / "default_confg.yaml"))
    assert "did you mean" in (caught.value.do or "")
    with pytest.raises(InputError, match="is a folder"):
        imported(str(tmp_path))
    with pytest.raises(InputError, match="nothing to import"):
        imported()

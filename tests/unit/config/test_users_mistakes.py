# ruff: noqa: E501 (the tables: one mistake, one row)
"""Mistakes and wishes of people who come from other tools: each answer names the cure, and following it works.

The cure is followed by the words of the message alone, as a user would: `follow` reads `do:` and changes the run file,
`follow_words` the command line. What comes out has to load and to be planned, after one round.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer.main

from coremill import cli
from coremill.config.document import read_document
from coremill.config.load import LoadedConfig, load_config
from coremill.config.show import scalar_text
from coremill.data.tokenise import check_sources
from coremill.errors import ConfigError, InputError
from coremill.hardware.instances import fleet_of
from coremill.model import hub_models
from coremill.plan.planner import make_plan
from coremill.run.cards import card_without_weights
from tiny_models import make_config_folder

STEPS = "train: {steps: 10}\n"
ENCODER = STEPS + "model: {name: some/encoder}\ndata: {source: train.jsonl}\n"

# who has it | the run file | part of what to do
FILES = [
    # Hugging Face Trainer
    ("Trainer", "num_train_epochs: 3", "set train.epochs: 3"),
    ("Trainer", "max_steps: 100", "set train.steps: 100"),
    ("Trainer", STEPS + "max_steps: -1", "remove it"),
    ("Trainer", STEPS + "per_device_train_batch_size: 4\ngradient_accumulation_steps: 8\nmax_seq_length: 256", "set train.tokens_per_step: 8192 (4 rows x 8 accumulation steps x 256 tokens of a row)"),
    ("Trainer", STEPS + "per_device_train_batch_size: 8", "set train.tokens_per_step: 4096 (8 rows x 512 tokens of a row), times the number of devices"),
    ("run_qa.py", ENCODER + "task: question-answering\nper_device_train_batch_size: 12", "set train.samples_per_step: 12, times the number of devices"),
    ("run_qa.py", ENCODER + "task: question-answering\nn_best_size: 10", "set evaluation.n_best: 10"),
    ("run_qa.py", ENCODER + "task: question-answering\nmax_answer_length: 20", "set evaluation.max_answer_tokens: 20"),
    ("run_glue.py", ENCODER + "task: sequence-classification\nnum_labels: 3", "set model.labels: 3"),
    ("Trainer", STEPS + "per_device_eval_batch_size: 8", "remove it; evaluation.rows"),
    ("Trainer", STEPS + "learning_rate: 5e-5", "move it under train: (its full name is train.learning_rate)"),
    ("Trainer", "train: {steps: 10, lr_scheduler_type: cosine}", "set train.schedule: cosine"),
    ("Trainer", "train: {steps: 10, lr_scheduler_type: constant_with_warmup, num_warmup_steps: 2}", "set train.schedule: constant"),
    ("Trainer", "train: {steps: 100, warmup_ratio: 0.1}", "set train.warmup_share: 0.1"),
    ("Trainer", "train: {steps: 100, lr_scheduler_type: warmup_stable_decay}", "set train.schedule: warmup-stable-decay"),
    ("torchtitan", "train: {steps: 100, lr: 1e-3, min_lr_factor: 0.1}", "set train.minimum_learning_rate: 0.0001"),
    ("LLaMA-Factory", STEPS + "freeze_trainable_layers: 2", "set train.freeze, for instance"),
    ("values", "train: {steps: 10, schedule: wsd}", "write warmup-stable-decay"),
    ("types", "train: {steps: 10, freeze: lm_head.weight}", "write [lm_head.weight]"),
    ("Trainer", STEPS + "optim: adamw_torch_fused", "set train.optimizer: adamw"),
    ("Trainer", STEPS + "max_grad_norm: 0.5", "set train.clip_norm: 0.5"),
    ("Trainer", STEPS + "bf16: true", "set parallel.dtype: bf16, or leave it out"),
    ("Trainer", STEPS + "bf16: false", "remove it"),
    ("Trainer", STEPS + "fp16: true", "remove it, or set parallel.dtype to auto, fp32 or bf16"),
    ("Trainer", STEPS + "tf32: true\nuse_ipex: true\nno_cuda: true", "remove it"),
    ("Trainer", STEPS + "gradient_checkpointing: true", "set train.activation_checkpointing: true"),
    ("Trainer", STEPS + "output_dir: out/first", "set run.folder: out/first"),
    ("Trainer", STEPS + "run_name: first", "set run.folder: runs/first"),
    ("Trainer", STEPS + "logging_steps: 10", "remove it"),
    ("Trainer", STEPS + "save_steps: 500\nsave_total_limit: 3", "set checkpoint.every: 500steps"),
    ("Trainer", STEPS + 'save_strategy: "no"', "set checkpoint.every: never"),
    ("Trainer", STEPS + "eval_steps: 5", "set evaluation.every_steps: 5 and data.evaluation_fraction: 0.05"),
    ("Trainer", STEPS + "eval_strategy: steps\nper_device_eval_batch_size: 1", "evaluation.every_steps says how often"),
    ("Trainer", STEPS + "resume_from_checkpoint: true", "remove it; --fresh starts anew"),
    ("Trainer", STEPS + "torch_compile: true", "remove it"),
    ("Trainer", STEPS + "deepspeed: ds_config.json", "set parallel.engine: shard"),
    ("Trainer", STEPS + "fsdp: full_shard auto_wrap", "set parallel.engine: shard"),
    ("Trainer", STEPS + "dataloader_num_workers: 4\ngroup_by_length: true", "remove it"),
    ("Trainer", STEPS + "report_to: wandb\npush_to_hub: true", "set run.trackers: [wandb]"),
    ("Trainer", STEPS + "load_best_model_at_end: true\nmetric_for_best_model: eval_loss\nearly_stopping_patience: 3\neval_steps: 5", "set evaluation.keep_best: loss"),
    ("Trainer", "train: {steps: 10, learning_rate: 1.0e-3, min_lr_rate: 0.1}", "set train.minimum_learning_rate: 0.0001 (0.1 of 0.001)"),
    ("nanochat", "train: {steps: 10, warmdown_ratio: 0.2}", "set train.schedule: warmup-stable-decay and train.decay_share: 0.2"),
    ("Axolotl", STEPS + "datasets: [{path: a.jsonl}, {path: b.csv}]", "set data.sources: [a.jsonl, b.csv]"),
    ("run_clm", STEPS + "model_name_or_path: built-in\ntokenizer_name: built-in", "set model: built-in"),
    ("run_clm", STEPS + "dataset_name: Salesforce/wikitext\ndataset_config_name: wikitext-2-raw-v1", "set data.source: hf://Salesforce/wikitext:wikitext-2-raw-v1"),
    ("run_clm", STEPS + "train_file: texts/train.jsonl\nvalidation_file: texts/valid.jsonl", "set data.evaluation_source: texts/valid.jsonl"),
    ("run_clm", STEPS + "block_size: 256", "set data.sequence_length: 256"),
    # TRL and PEFT
    ("TRL", STEPS + "dataset_text_field: body\npacking: true", "set data.column: body"),
    ("TRL", STEPS + "chat_template: chatml.jinja", "move it under data:"),
    ("TRL", STEPS + "chat_template_path: chatml.jinja\nassistant_only_loss: true", "set data.chat_template: chatml.jinja"),
    ("TRL", STEPS + "completion_only_loss: false", "set data.learn: all"),
    ("PEFT", STEPS + "peft: {r: 8}\nuse_peft: true", "lora.rank: 8"),
    ("PEFT", STEPS + "lora_r: 16\nlora_alpha: 32\nlora_dropout: 0.05", "lora.rank: 16"),
    ("PEFT", STEPS + "lora: {r: 8, lora_alpha: 16}", "lora.rank: 8"),
    ("PEFT", STEPS + "lora: {rank: 8, lora_alpha: 24}", "lora.alpha: 24"),
    ("PEFT", STEPS + "lora: {rank: 8, lora_dropout: 0.1}", "lora.dropout: 0.1"),
    ("PEFT", STEPS + "lora: {rank: 8, target_modules: all-linear}", "remove it"),
    ("bitsandbytes", STEPS + "load_in_4bit: true", "remove it; parallel.engine: shard"),
    # accelerate
    ("accelerate", STEPS + "compute_environment: LOCAL_MACHINE\nmachine_rank: 0\nmain_training_function: main\nsame_network: true\ndowncast_bf16: 'no'", "remove it"),
    ("accelerate", STEPS + "distributed_type: MULTI_CPU\nmixed_precision: bf16\nnum_processes: 2\nnum_machines: 1\nuse_cpu: true", "set parallel.engine: replicate"),
    # Axolotl
    ("Axolotl", "base_model: built-in\nsequence_len: 256\nmicro_batch_size: 2\ngradient_accumulation_steps: 4\nnum_epochs: 1\noptimizer: adamw_torch\nlr_scheduler: cosine\nlearning_rate: 2e-5", "set train.tokens_per_step: 2048"),
    ("Axolotl", STEPS + "adapter: lora\nlora_r: 8\nlora_target_linear: true", "lora.rank: 8"),
    ("Axolotl", STEPS + "datasets:\n  - path: texts/part.jsonl\n    type: completion", "set data.source: texts/part.jsonl"),
    ("Axolotl", STEPS + "datasets:\n  - path: chats.jsonl\n    type: chat_template\n    field_messages: turns", "set data.source: chats.jsonl and data.messages_column: turns"),
    ("Axolotl", STEPS + "data: {source: chats.jsonl}\ntrain_on_inputs: false\nroles_to_train: [assistant]\ntrain_on_eos: turn", "set data.learn: answers"),
    ("Axolotl", STEPS + "data: {source: pairs.jsonl}\nfield_instruction: asked\nfield_output: said", "set data.prompt_column: asked and data.answer_column: said"),
    ("Axolotl", STEPS + "val_set_size: 0.05", "set data.evaluation_fraction: 0.05"),
    ("Axolotl", STEPS + "sample_packing: true\npad_to_sequence_len: true\nflash_attention: true", "remove it"),
    # LLaMA-Factory
    ("LLaMA-Factory", "model_name_or_path: built-in\ncutoff_len: 256\nnum_train_epochs: 1\nper_device_train_batch_size: 1\ngradient_accumulation_steps: 8\nstage: pt\nfinetuning_type: full\ndo_train: true\noverwrite_output_dir: true\nplot_loss: true", "set train.tokens_per_step: 2048"),
    ("LLaMA-Factory", STEPS + "stage: sft\ntemplate: llama3", "remove it: the tokenizer's own is taken"),
    ("LLaMA-Factory", STEPS + "formatting: sharegpt\ntrain_on_prompt: true", "set data.learn: all"),
    ("LLaMA-Factory", STEPS + "mask_history: true", "set data.learn: last-answer"),
    ("LLaMA-Factory", STEPS + "stage: dpo", "remove it"),
    ("LLaMA-Factory", STEPS + "finetuning_type: lora\nlora_rank: 8\nlora_target: all", "lora.rank: 8"),
    ("LLaMA-Factory", STEPS + "preprocessing_num_workers: 16\noverwrite_cache: true\nval_size: 0.1", "set data.evaluation_fraction: 0.1"),
    # torchtune, torchtitan, litgpt, DeepSpeed
    ("torchtune", STEPS + "batch_size: 2\nmax_seq_len: 128\nenable_activation_checkpointing: true\ndtype: fp32", "set train.tokens_per_step: 256"),
    ("torchtune", STEPS + "optimizer:\n  _component_: torch.optim.AdamW\n  lr: 2e-5", "set train.learning_rate: 2e-05"),
    ("torchtune", STEPS + "masking_strategy: train_on_last\nconversation_style: sharegpt", "set data.learn: last-answer"),
    ("torchtitan", "training:\n  local_batch_size: 8\n  seq_len: 256\n  steps: 10", "set train.tokens_per_step: 2048"),
    ("torchtitan", STEPS + "parallelism:\n  tensor_parallel_degree: 2", "remove it; parallel.engine: shard"),
    ("litgpt", STEPS + "precision: bf16-true\ndevices: 2\nout_dir: out", "set parallel.ranks_per_node: 2"),
    ("DeepSpeed", STEPS + "train_batch_size: 32\nbf16: {enabled: true}\ngradient_clipping: 1.0\nzero_optimization: {stage: 3}", "set train.tokens_per_step: 16384 (32 rows"),
    # values
    ("types", STEPS + "checkpoint: {every: 100}", "write 100steps"),
    ("types", STEPS + "checkpoint: {every: 10min}", "10m"),
    ("types", STEPS + "checkpoint: {every: 1 hour}", "1h"),
    ("types", STEPS + "checkpoint: {grace: 30}", "write 30s"),
    ("types", STEPS + "supervise: {stuck_after: '00:05:00'}", "5m"),
    ("types", "train: {steps: 1e3}", "write 1000"),
    ("types", "train: {steps: '1,000'}", "1000"),
    ("types", "train: {steps: 10, tokens_per_step: 16k}", "16000, or 16384"),
    ("types", 'train: {steps: 10, learning_rate: "2e-5"}', "remove the quotes: 2e-5"),
    ("types", "train: {steps: 10, clip_norm: None}", "write null"),
    ("types", STEPS + "run: {export: yes}", "true"),
    ("types", STEPS + "model: {fused: off}", "false"),
    ("types", STEPS + "supervise: {restart: 1}", "write true"),
    ("types", STEPS + "data: {evaluation_fraction: 5}", "write 0.05"),
    ("types", STEPS + "data: {evaluation_fraction: 5%}", "0.05"),
    ("values", "train: {steps: 10, optimizer: adamw_torch}", "write adamw"),
    ("values", "train: {steps: 10, optimizer: paged_adamw_8bit}", "write adamw-8bit, without paging, which a CPU does not need"),
    ("values", "train: {steps: 10, optimizer: paged_adamw_32bit}", "write adamw, without paging"),
    ("values", "train: {steps: 10, optimizer: 8bit}", "write adamw-8bit"),
    ("Trainer", STEPS + "optim: paged_adamw_8bit", "set train.optimizer: adamw-8bit, without paging"),
    ("values", "train: {steps: 10, optimizer: galore_adamw}", "use train.optimizer: adamw-8bit"),
    ("values", "train: {steps: 10, optimizer: adalomo}", "use train.optimizer: adamw-8bit and train.update: inside"),
    ("values", "train: {steps: 10, optimizer: muon}", "use train.optimizer: adamw"),
    ("Trainer", STEPS + "optim: adamw_bnb_8bit", "set train.optimizer: adamw-8bit"),
    ("Trainer", STEPS + "optim: adafactor", "set train.optimizer: adamw, or adamw-8bit where memory is short"),
    ("torchtune", STEPS + "optimizer_in_bwd: true", "set train.update: inside"),
    ("LLaMA-Factory", STEPS + "use_galore: true", "set train.optimizer: adamw-8bit"),
    ("values", "train: {steps: 10, schedule: cosine_with_min_lr}", "write cosine, with train.minimum_learning_rate for its lowest rate"),
    ("Trainer", "train: {steps: 10, learning_rate: 1e-3}\nlr_scheduler_type: cosine_with_min_lr\nlr_scheduler_kwargs: {min_lr: 1e-5}", "set train.minimum_learning_rate: 1e-05"),
    ("Trainer", "train: {steps: 10, learning_rate: 1e-3}\nlr_scheduler_kwargs: {min_lr_rate: 0.1, num_cycles: 0.5}", "set train.minimum_learning_rate: 0.0001 (0.1 of 0.001); leave out num_cycles"),
    ("Trainer", STEPS + "lr_scheduler_kwargs: {num_cycles: 2}", "remove it; train.minimum_learning_rate is the lowest rate"),
    ("LLaMA-Factory", STEPS + "finetuning_type: freeze", "remove it; set train.freeze to patterns, for instance ['model.embed_tokens.*']"),
    ("LLaMA-Factory", STEPS + "dataset: a.jsonl,b.jsonl\ninterleave_probs: 0.7,0.3\nmix_strategy: interleave_over", "set data.sources: [{source: a.jsonl, share: 0.7}, {source: b.jsonl, share: 0.3}]"),
    ("Axolotl", STEPS + "datasets:\n  - path: texts/part.jsonl\n    type: alpaca\n    split: train", "set data.source: texts/part.jsonl; Alpaca's columns are known, and written with the chat template"),
    ("Axolotl", STEPS + "datasets:\n  - path: texts/part.jsonl\n    type: gpteacher\n    shards: 2", "set data.source: texts/part.jsonl; its type (gpteacher) and shards (2) are not taken along"),
    ("values", STEPS + "parallel: {dtype: bfloat16}", "write bf16"),
    ("values", STEPS + "parallel: {dtype: float16}", "use parallel.dtype: auto"),
    ("values", STEPS + "dtype: bfloat16", "as dtype: bf16"),
    ("values", STEPS + "parallel: {engine: fsdp}", "write shard"),
    ("values", STEPS + "parallel: {engine: ddp}", "write replicate"),
    ("values", STEPS + "device: gpu", "use device: cpu"),
    ("values", STEPS + "device: cuda:0", "use device: cpu"),
    ("values", ENCODER + "task: classification", "write sequence-classification"),
    ("values", ENCODER + "task: text-classification", "write sequence-classification"),
    ("values", STEPS + "task: sft", "use task: causal-lm"),
    ("values", STEPS + "data: {learn: train_on_all}", "write all"),
    ("values", STEPS + "task: causal_lm", "write causal-lm"),
    ("values", STEPS + "model: {attention: flash_attention_2}", "write sdpa"),
    ("values", "train: {steps: 10, compile: true}", "remove it"),
    # slips
    ("slips", "train: {stepz: 10}", "did you mean train.steps?"),
    ("slips", "trian: {steps: 10}", "did you mean train?"),
    ("slips", STEPS + "data: {colunm: body}", "did you mean data.column?"),
    ("slips", STEPS + "train_config: {warmup_steps: 2, lr: 1e-4}", "set train.learning_rate: 0.0001"),
]  # fmt: skip


@pytest.mark.parametrize(("tool", "text", "cure"), FILES, ids=[f"{row[0]}: {row[1][:60]!r}" for row in FILES])
def test_the_cure_of_a_run_file_works(tmp_path, coremill, tool, text, cure):
    file = tmp_path / "run.yaml"
    file.write_text(text)
    code, _, err = coremill("config", "show", str(file))
    assert code == 78
    assert cure in err
    problems = problems_of(file)
    for problem in problems:
        assert problem.what and problem.why and problem.do, problem
        assert re.match(rf"{re.escape(str(file))}:\d+ \(", problem.where or ""), problem
    cured = follow(read_document(text).value, problems)
    file.write_text(as_yaml(cured))
    loaded = load_config(file)
    plan = make_plan(loaded.config, fleet_of("2xc7i.4xlarge"), card_without_weights(RUN_FILE_OF_THE_EXAMPLE.config))
    assert plan.fits


RUN_FILE_OF_THE_EXAMPLE = load_config(None)

# command | what to write instead
WORDS = [
    ("train --model_name_or_path some/model --num_train_epochs 1", "write --set model.name=some/model"),
    ("train --max_steps 10 --per_device_train_batch_size 4 --gradient_accumulation_steps 2 --max_seq_length 128", "write --set train.tokens_per_step=1024 (4 rows x 2 accumulation steps x 128 tokens of a row)"),
    ("train run.yaml --learning_rate 2e-5", "write --set train.learning_rate=2e-5"),
    ("train run.yaml --train.steps=5", "write --set train.steps=5"),
    ("train run.yaml train.steps=5 seed=3", "write --set train.seed=3"),
    ("train run.yaml --bf16 --output_dir out", "write --set parallel.dtype=bf16"),
    ("train run.yaml --bf16 True --gradient_checkpointing", "write --set train.activation_checkpointing=true"),
    ("train run.yaml --lora_r 8 --use_cpu", "lora.rank=8"),
    ("train --config run.yaml", "name it without an option: coremill train run.yaml"),
    ("train run.yaml --nproc_per_node 2", "write --nproc 2"),
    ("train run.yaml --num_processes=2 --dry_run", "write --dry-run"),
    ("plan run.yaml --max_steps 50", "write --set train.steps=50"),
    ("config show run.yaml --seed 3", "write --set train.seed=3"),
    ("launch --nproc_per_node 4 --master_addr node1 script.py --bf16 --max_steps 3", "write --nproc 4"),
    ("launch --num_machines 2 --machine_rank 1 --mixed_precision bf16 --master node1 script.py", "write --node-rank 1"),
    ("launch --log_dir logs --standalone script.py", "write --log-dir logs"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "cure"), WORDS, ids=[row[0] for row in WORDS])
def test_the_cure_of_a_command_line_works(tmp_path, coremill, line, cure):
    (tmp_path / "run.yaml").write_text(STEPS)
    words = line.split()
    code, out, err = coremill(*words)
    assert (code, out) == (78, "")
    assert cure in err
    accepted(follow_words(words, err))


@pytest.mark.parametrize(
    ("command", "ours"),
    [("finetune", "coremill train"), ("env", "coremill doctor"), ("estimate-memory", "coremill plan"), ("validate", "coremill config show")],
)  # fmt: skip
def test_commands_of_other_tools(coremill, command, ours):
    code, _, err = coremill(command, "run.yaml")
    assert code == 78 and f"do: run {ours}" in err


@pytest.mark.parametrize(
    ("words", "part"),
    [(["train", "--frobnicate"], "No such option: --frobnicate"), (["frobnicate"], "No such command"), (["train", "run.yaml", "x.yaml"], "unexpected extra argument"), (["--frob"], "No such option: --frob"), (["report"], "Missing argument"), (["data", "show", "--rows", "x"], "Invalid value for '--rows'"), (["launch", "--nproc", "two", "a.py"], "Invalid value for '--nproc'")],
)  # fmt: skip
def test_what_nobody_knows_is_left_to_the_command_line(coremill, words, part):
    code, _, err = coremill(*words)
    assert code == 78 and part in err


# key | a path that is wrong | the one that was meant, None: several answers are right | part of the message
PATHS = [
    ("model", "models/tinny", "models/tiny", "there is no folder models/tinny"),
    ("model", "modles/tiny", "models/tiny", "there is no folder modles/tiny"),
    ("model", "./models/tinyy", "models/tiny", "no such model folder"),
    ("model", "models/tiny/config.json", "models/tiny", "it is a file"),
    ("model", "models", "models/tiny", "no config.json in the model folder"),
    ("model", "https://huggingface.co/openai-community/gpt2", "openai-community/gpt2", "an address, not a hub id"),
    ("model", "adapted", None, "this folder in lora.start_from"),
    ("model", "some/model", None, "the hub cannot be reached"),
    ("data.source", "text/*.jsonl", "texts/*.jsonl", "no file matches"),
    ("data.source", "texts/*.txt", "texts/*.jsonl", "no file matches"),
    ("data.source", "texts/prt.jsonl", "texts/part.jsonl", "there is no such file"),
    ("data.source", "Texts/Part.JSONL", "texts/part.jsonl", "there is no such file"),
    ("data.source", "Salesforce/wikitext", None, "a dataset of the hub is written hf://Salesforce/wikitext"),
    ("data.source", "https://huggingface.co/datasets/Salesforce/wikitext", None, "write hf://Salesforce/wikitext"),
    ("data.evaluation_source", "texts/partt.jsonl", "texts/part.jsonl", "there is no such file"),
]


@pytest.mark.parametrize("beside", [False, True], ids=["in the current folder", "beside the run file"])
@pytest.mark.parametrize(("key", "wrong", "right", "part"), PATHS, ids=[row[1] for row in PATHS])
def test_the_cure_of_a_path_works(project, monkeypatch, key, wrong, right, part, beside):
    folder = "project/" if beside else ""
    monkeypatch.chdir(project.parent if beside else project)
    run_file = Path(f"{folder}run.yaml")
    run_file.write_text(as_yaml({**PROJECT, **nested(key, wrong)}))
    with pytest.raises(InputError) as caught:
        look_at(load_config(run_file))
    said = str(caught.value)
    if not beside or right is None:
        assert part in said
    if right is None:
        return
    cure = re.search(r"(?:did you mean|set model:) ([^\s?,]+)", caught.value.do or "")
    assert cure is not None, said
    assert cure[1] in (right, folder + right), said
    assert ("network" in said, "reach" in said) == (False, False)
    if Path(cure[1]).exists():
        run_file.write_text(as_yaml({**PROJECT, **nested(key, cure[1])}))
        look_at(load_config(run_file))


def test_relative_paths_are_looked_for_beside_the_run_file_too(project, monkeypatch, coremill):
    (project / "run.yaml").write_text(as_yaml(PROJECT))
    monkeypatch.chdir(project)
    assert load_config(Path("run.yaml")).places.notes == ()
    monkeypatch.chdir(project.parent)
    loaded = load_config(Path("project/run.yaml"))
    look_at(loaded)
    assert loaded.config.model.name == "models/tiny"  # as written: what a continuation compares
    assert loaded.located.model.name == "project/models/tiny"
    assert [note.partition(" is ")[0] for note in loaded.places.notes] == ["note: model: models/tiny", "note: data.source: texts/*.jsonl"]  # fmt: skip
    code, out, _ = coremill("plan", "project/run.yaml", "--fleet", "1xc7i.4xlarge")
    assert code == 0 and "taken beside the run file, project/models/tiny" in out


def test_each_of_several_sources_is_looked_for(project, monkeypatch):
    text = "data: {sources: [{source: texts/part.jsonl, share: 0.5}, {source: here.txt, share: 0.5}]}\n"
    (project / "run.yaml").write_text(text + STEPS)
    monkeypatch.chdir(project.parent)
    Path("here.txt").write_text("some words")
    loaded = load_config(Path("project/run.yaml"))
    assert [one.source for one in loaded.located.data.sources or ()] == ["project/texts/part.jsonl", "here.txt"]
    (project / "run.yaml").write_text(text.replace("part", "prt") + STEPS)
    with pytest.raises(InputError, match=r"(?s)run.yaml:1 \(data.sources\[0\].source\).*mean project/texts/part.jsonl"):
        look_at(load_config(Path("project/run.yaml")))


def test_the_current_folder_wins_and_says_so(project, monkeypatch):
    (project / "run.yaml").write_text(as_yaml(PROJECT))
    make_config_folder(project.parent / "models" / "tiny", "llama")
    monkeypatch.chdir(project.parent)
    loaded = load_config(Path("project/run.yaml"))
    assert loaded.located.model.name == "models/tiny"
    assert "the current folder's is taken, not project/models/tiny" in loaded.places.notes[0]


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("train.py", "coremill launch train.py"),
        ("texts/part.jsonl", "--set data.source=texts/part.jsonl"),
        ("models/tiny", "--set model=models/tiny"),
        ("gpt2", "--set model=gpt2"),
    ],
)
def test_something_else_than_a_run_file(project, monkeypatch, name, part):
    monkeypatch.chdir(project)
    Path("train.py").touch()
    with pytest.raises(ConfigError) as caught:
        load_config(Path(name))
    assert part in str(caught.value)


PROJECT: dict[str, Any] = {
    "model": {"name": "models/tiny", "weights": "random"},
    "tokenizer": "built-in",
    "data": {"source": "texts/*.jsonl", "sequence_length": 32},
    "train": {"steps": 10, "tokens_per_step": 256},
}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model, text and no hub."""
    folder = tmp_path / "project"
    make_config_folder(folder / "models" / "tiny", "llama")
    (folder / "texts").mkdir()
    (folder / "texts" / "part.jsonl").write_text('{"text": "some words"}\n')
    (folder / "adapted").mkdir()
    (folder / "adapted" / "adapter_config.json").write_text("{}")

    def nobody_answers(*_: object) -> None:
        raise ConnectionError("nobody answers")

    def not_an_address(name: str, _: object) -> None:
        from huggingface_hub.utils import validate_repo_id

        validate_repo_id(name)
        nobody_answers()

    monkeypatch.setattr(hub_models, "_ask", not_an_address)
    return folder


@pytest.fixture
def coremill(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Callable[..., tuple[int, str, str]]:  # fmt: skip
    """`coremill WORDS` in this process: exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["coremill", *words])
        try:
            cli.main()
            code: object = 0
        except SystemExit as ended:
            code = ended.code
        out, err = capsys.readouterr()
        return int(str(code or 0)), out, err

    return run


def problems_of(file: Path) -> tuple[InputError, ...]:
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    return caught.value.problems


def look_at(loaded: LoadedConfig) -> None:
    """All that a run looks at before it touches the data."""
    with loaded.placing():
        card_without_weights(loaded.located)
        check_sources(loaded.located.data, max_positions=None)


def accepted(words: list[str]) -> None:
    """The command line reads the words."""
    command: Any = typer.main.get_command(cli.app)
    while hasattr(command, "commands"):
        command, words = command.commands[words[0]], words[1:]
    settings = command.make_context("coremill", list(words)).params.get("settings")
    load_config(None, [*(settings or []), *([] if any("steps" in one or "epochs" in one for one in settings or []) else ["train.steps=10"])])  # fmt: skip


def follow(tree: dict[str, Any], problems: tuple[InputError, ...]) -> dict[str, Any]:
    """The run file after doing what each message says."""
    tree = copy.deepcopy(tree)
    # what is inside a section before the section itself
    for problem in sorted(problems, key=lambda one: -(one.where or "").count(".")):
        path = re.search(r"\((.+)\)$", problem.where or "")
        assert path is not None
        key, do = path[1], problem.do or ""
        if "did you mean" in do:
            meant = re.search(r"did you mean ([\w.-]+)", do)
            assert meant is not None
            place(tree, meant[1], remove(tree, key))
        elif moved := re.search(r"its full name is ([\w.]+)\)(?:, as \w+: (\S+))?", do):
            value = remove(tree, key)
            place(tree, moved[1], value if moved[2] is None else read_document(moved[2]).value)
        elif do.startswith(("set ", "use ")):
            remove(tree, key)
            for ours, value in re.findall(
                r"([a-z_]+(?:\.[a-z_0-9]+)*): (\[.*\]|[^\s,;]+)", re.split(r" \(|, or |, which ", do)[0]
            ):
                place(tree, ours, read_document(value).value)
        elif do.startswith("remove it"):
            remove(tree, key)
        else:
            told = re.search(r"(?:: here|^remove the quotes:|^write digits:|^write) ([^\s,]+)", do)
            assert told is not None, do
            here = re.search(r": here (\S+)$", do)
            place(tree, key, read_document((here or told)[1]).value)
    return {name: value for name, value in tree.items() if value != {}}


def follow_words(words: list[str], err: str) -> list[str]:
    """The command line after doing what each message says."""
    words = list(words)
    for typed, do in re.findall(r"where: command line \((.+)\)\n.*\n +do: (.+)", err):
        option = typed.split()[0]
        at = next(place for place, word in enumerate(words) if word.partition("=")[0] == option or word == option)
        del words[at : at + (len(typed.split()) if words[at] == option else 1)]
        told = re.match(r"write ((?:-\S+(?: [^-(,]\S*)?[, ]?)+)", do)
        if told is not None:
            words[at:at] = told[1].replace(",", " ").split()
        elif do.startswith("name it without an option: coremill "):
            words = do.removeprefix("name it without an option: coremill ").split()
        else:
            assert do.startswith("remove it"), do
    return words


def remove(tree: dict[str, Any], key: str) -> Any:
    level, parts = tree, key.split(".")
    for part in parts[:-1]:
        level = level[part]
    return level.pop(parts[-1])


def place(tree: dict[str, Any], key: str, value: Any) -> None:
    level, parts = tree, key.split(".")
    for part in parts[:-1]:
        level = level.setdefault(part, {})
    if isinstance(value, dict) and isinstance(level.get(parts[-1]), dict):
        level[parts[-1]].update(value)
    else:
        level[parts[-1]] = value


def nested(key: str, value: str) -> dict[str, Any]:
    """One changed key of the project's run file."""
    if key == "model":
        return {"model": {"name": value, "weights": "random"}}
    changed = copy.deepcopy(PROJECT["data"])
    changed[key.partition(".")[2]] = value
    return {"data": changed}


def as_yaml(tree: dict[str, Any]) -> str:
    lines = []
    for name, value in tree.items():
        if isinstance(value, dict):
            lines.append(f"{name}:")
            lines += [f"  {inner}: {scalar_text(one)}" for inner, one in value.items()]
        else:
            lines.append(f"{name}: {scalar_text(value)}")
    return "".join(f"{line}\n" for line in lines)

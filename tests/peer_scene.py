"""What the scripts of tests/launched find where they are started: models, data and settings, made on the spot."""

from __future__ import annotations

import csv
import json
import random
import shutil
from pathlib import Path

from tiny_models import make_model, make_tokenizer

LAUNCHED = Path(__file__).resolve().parent / "launched"
_TEXT = """the a river runs past every house and old town where people build boats of wood in winter while their
children learn to read books about stars maps trade winds and distant green islands"""
WORDS = _TEXT.split()
QA_ARGUMENTS = (
    *("--model_name_or_path", "bert-large-uncased", "--train_file", "squad.json", "--do_train", "--do_eval"),
    *("--per_device_train_batch_size", "4", "--learning_rate", "3e-3", "--num_train_epochs", "1"),
    *("--max_seq_length", "64", "--doc_stride", "16", "--output_dir", "debug_squad", "--use_cpu", "--ddp_backend"),
    *("gloo", "--logging_steps", "4", "--save_strategy", "no", "--report_to", "none", "--disable_tqdm", "true"),
)
ACCELERATE_FILE = """\
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_CPU
downcast_bf16: 'no'
machine_rank: 0
main_training_function: main
mixed_precision: 'no'
num_machines: 1
num_processes: 2
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: true
"""


def make_scene(folder: Path) -> Path:
    """All of it, and the scripts."""
    for file in (*LAUNCHED.glob("*.py"), LAUNCHED / "cpu-ds.json"):
        shutil.copy(file, folder)
    _make_bert(folder / "bert-large-uncased", dropout=0.1)
    _make_bert(folder / "bert-base-cased", dropout=0.1)
    llama = folder / "meta-llama" / "Meta-Llama-3-8B"
    make_tokenizer(make_model(llama, "llama", dtype="bfloat16", max_position_embeddings=512))
    _write_squad(folder / "squad.json")
    _write_pairs(folder / "pairs.csv")
    _write_wikitext(folder / "wikitext")
    (folder / "accelerate.yaml").write_text(ACCELERATE_FILE)
    return folder


def _make_bert(folder: Path, dropout: float) -> None:
    import torch
    from transformers import BertConfig, BertForPreTraining, BertTokenizerFast

    folder.mkdir(parents=True)
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *dict.fromkeys(WORDS), "?", "what", "follows"]
    (folder / "vocab.txt").write_text("".join(f"{word}\n" for word in vocabulary))
    BertTokenizerFast(vocab=str(folder / "vocab.txt"), do_lower_case=True).save_pretrained(folder)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(vocabulary), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=64, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
    )  # fmt: skip
    BertForPreTraining(config).save_pretrained(folder)


def _write_squad(path: Path) -> None:
    """Two questions for each of 64 paragraphs; some are longer than a window."""
    draw = random.Random(1)
    paragraphs = []
    for number in range(64):
        words = draw.choices(WORDS, k=90 if number % 8 == 0 else 40)
        context, questions = " ".join(words), []
        for _ in range(2):
            place = draw.randrange(1, len(words) - 2)
            answer = " ".join(words[place : place + 2])
            start = len(" ".join(words[:place])) + 1
            questions.append(
                {
                    "question": f"what follows {words[place - 1]} ?",
                    "answers": [{"text": answer, "answer_start": start}],
                    "id": f"{number}-{place}",
                }
            )
        paragraphs.append({"context": context, "qas": questions})
    path.write_text(json.dumps({"version": "1.1", "data": [{"title": "made up", "paragraphs": paragraphs}]}))


def _write_pairs(path: Path) -> None:
    draw = random.Random(2)
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["sentence1", "sentence2", "label"])
        for number in range(128):
            words = draw.choices(WORDS, k=12)
            other = words[::-1] if number % 2 else draw.choices(WORDS, k=12)
            rows.writerow([" ".join(words), " ".join(other), number % 2])


def _write_wikitext(folder: Path) -> None:
    """As the hub has it: a dataset of several configurations."""
    draw = random.Random(3)
    folder.mkdir()
    lines = (json.dumps({"text": " ".join(draw.choices(WORDS, k=60))}) for _ in range(32))
    (folder / "raw.jsonl").write_text("".join(f"{line}\n" for line in lines))
    (folder / "README.md").write_text(
        "---\nconfigs:\n- config_name: wikitext-2-raw-v1\n  data_files:\n  - split: train\n    path: raw.jsonl\n---\n"
    )

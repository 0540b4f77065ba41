"""What encoders are measured on: questions of SQuAD's form and lengths, a tokenizer and a model, made on the spot.

    python -m benchmarks.encoder_work FOLDER --shape bert-base --questions 2000

Words are made up. A context holds two short phrases of special words, of two kinds, and the question asks for one kind:
a small model learns to point at it in a few hundred steps, so that metrics can be compared. With its question a context
has about 170 tokens in the mean and 384 at most, so that each is one row.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LONGEST = 384
MEAN = 170
SPREAD = 0.42  # of the logarithm of lengths
KINDS = ("red", "blue")
ANSWER_WORDS = 20  # of each kind
PHRASE_WORDS = 3  # at most
FILLERS = 500  # different words that contexts are filled with
QUESTION_WORDS = 8
SPECIAL_TOKENS = 3  # around question and context
TRAIN_FILE, EVALUATION_FILE = "train.jsonl", "evaluation.jsonl"

_BERT = {"model_type": "bert", "architectures": ["BertForQuestionAnswering"], "max_position_embeddings": 512}
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": _BERT | {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 2},
    "mini": _BERT | {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 4},
    "small": _BERT | {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 4, "num_attention_heads": 8},
    "bert-base": _BERT
    | {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12},
    "bert-large": _BERT
    | {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16},
}
VOCABULARY = 30522


@dataclass(frozen=True)
class Work:
    """Where it lies."""

    folder: Path

    @property
    def model(self) -> Path:
        """With its tokenizer."""
        return self.folder / "model"

    @property
    def train(self) -> Path:
        return self.folder / TRAIN_FILE

    @property
    def evaluation(self) -> Path:
        return self.folder / EVALUATION_FILE


def make(
    folder: Path,
    shape: str,
    *,
    questions: int,
    evaluation: int,
    dropout: float,
    mean: int = MEAN,
    longest: int = LONGEST,
) -> Work:
    """All of it, in place of what was there; weights are drawn from a seed, so that all contenders begin alike."""
    shutil.rmtree(folder, ignore_errors=True)
    work = Work(folder)
    work.model.mkdir(parents=True)
    for path, count, seed in ((work.train, questions, 1), (work.evaluation, evaluation, 2)):
        with path.open("w") as stream:
            for row in questions_of(count, seed, mean=mean, longest=longest):
                stream.write(json.dumps(row) + "\n")
    write_tokenizer(work.model)
    _write_model(work.model, shape, dropout)
    return work


def questions_of(count: int, seed: int, *, mean: int = MEAN, longest: int = LONGEST) -> Iterator[dict[str, Any]]:
    """Rows in SQuAD's form."""
    draw = random.Random(seed)
    fillers = [f"w{number}" for number in range(FILLERS)]
    weights = [1 / (rank + 10) for rank in range(FILLERS)]
    most = longest - QUESTION_WORDS - SPECIAL_TOKENS
    median = mean * math.exp(-(SPREAD**2) / 2)
    for number in range(count):
        length = min(most, max(24, round(draw.lognormvariate(math.log(median), SPREAD)) - QUESTION_WORDS))
        words = draw.choices(fillers, weights, k=length)
        asked = draw.randrange(len(KINDS))
        phrases = [_phrase(draw, kind) for kind in range(len(KINDS))]
        places = sorted(draw.sample(range(len(words) // 4), len(KINDS)))
        order = draw.sample(range(len(KINDS)), len(KINDS))
        for place, kind in sorted(zip(places, order, strict=True), reverse=True):
            words[4 * place : 4 * place + len(phrases[kind])] = phrases[kind]
        start = 4 * places[order.index(asked)]
        yield {
            "id": f"q{number}",
            "kind": KINDS[asked],
            "question": f"which words of {len(words) % 7} are of kind {KINDS[asked]}",
            "context": " ".join(words),
            "answers": {
                "text": [" ".join(phrases[asked])],
                "answer_start": [len(" ".join(words[:start])) + (1 if start else 0)],
            },
        }


def _phrase(draw: random.Random, kind: int) -> list[str]:
    count = draw.randint(1, PHRASE_WORDS)
    return [f"{KINDS[kind]}{draw.randrange(ANSWER_WORDS)}" for _ in range(count)]


def write_tokenizer(folder: Path) -> None:
    """A token a word, around texts what BERT has around them."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from tokenizers.processors import TemplateProcessing

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words = ["which", "words", "of", "are", "kind", *KINDS, *map(str, range(7))]
    words += [f"{kind}{number}" for kind in KINDS for number in range(ANSWER_WORDS)]
    words += [f"w{number}" for number in range(FILLERS)]
    vocabulary = {word: number for number, word in enumerate([*special, *words])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    around = [("[CLS]", vocabulary["[CLS]"]), ("[SEP]", vocabulary["[SEP]"])]
    tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=around
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 512, **names}
    settings["model_input_names"] = ["input_ids", "token_type_ids", "attention_mask"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))


def config_of(shape: str, dropout: float) -> dict[str, Any]:
    """What config.json holds."""
    dropouts = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    return {**SHAPES[shape], "vocab_size": VOCABULARY, "type_vocab_size": 2, "pad_token_id": 0, **dropouts}


def _write_model(folder: Path, shape: str, dropout: float) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForQuestionAnswering

    (folder / "config.json").write_text(json.dumps(config_of(shape, dropout), indent=1))
    torch.manual_seed(7)
    AutoModelForQuestionAnswering.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="bert-base")
    parser.add_argument("--questions", type=int, default=2000)
    parser.add_argument("--evaluation", type=int, default=500)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--mean", type=int, default=MEAN)
    parser.add_argument("--longest", type=int, default=LONGEST)
    asked = parser.parse_args()
    make(
        asked.folder,
        asked.shape,
        questions=asked.questions,
        evaluation=asked.evaluation,
        dropout=asked.dropout,
        mean=asked.mean,
        longest=asked.longest,
    )

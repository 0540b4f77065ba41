"""Small encoders with a tokenizer each, and data that they can learn, made on the spot; shared by tests."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

_TEXT = (
    "the a of and to in is was it for on with as by at from red blue green old new small large river city king queen"
    " war peace north south house garden tree stone bridge school teacher book letter water fire winter summer music"
    " painter author wrote built found lived born died opened closed who what where when which year name place first"
    " last good bad fine awful great poor happy sad never always very not film story actor plot"
)
WORDS = _TEXT.split()
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
SMALL = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "initializer_range": 0.15,
    "intermediate_size": 64,
    "max_position_embeddings": 128,
}
SHAPES: dict[str, dict[str, Any]] = {
    "bert": {**SMALL},
    "distilbert": {"n_layers": 2, "dim": 32, "n_heads": 2, "hidden_dim": 64, "max_position_embeddings": 128},
    "roberta": {**SMALL, "max_position_embeddings": 130, "type_vocab_size": 1, "pad_token_id": 0},
    "electra": {**SMALL, "embedding_size": 32},
    "deberta-v2": {**SMALL, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_biased_input": False},
    "modernbert": {**SMALL, "pad_token_id": 0, "cls_token_id": 2, "sep_token_id": 3, "local_attention": 16},
}


def make_tokenizer(folder: Path) -> Path:
    """WordPiece as BERT has it: every word of `WORDS`, letters for the rest; two texts told apart by their types."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    letters = "abcdefghijklmnopqrstuvwxyz0123456789.,?!'-é"
    pieces = [*SPECIAL, *dict.fromkeys([*WORDS, *letters, *(f"##{letter}" for letter in letters)])]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0",
        pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
        special_tokens=[("[CLS]", vocabulary["[CLS]"]), ("[SEP]", vocabulary["[SEP]"])],
    )
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    about = {"tokenizer_class": "BertTokenizerFast", "model_max_length": 128, **named, "mask_token": "[MASK]"}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    return folder


def encoder_config(family: str, **changes: Any) -> dict[str, Any]:
    vocabulary = {"vocab_size": len({*SPECIAL, *WORDS}) + 100}
    return {"model_type": family, **vocabulary, **SHAPES[family], **changes}


def make_encoder(folder: Path, family: str = "bert", *, weights: bool = False, **changes: Any) -> Path:
    """A folder with a config and a tokenizer; with `weights` those of a bare trunk, drawn by seed 0, without a head."""
    make_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps(encoder_config(family, **changes)))
    if weights:
        import torch
        from transformers import AutoConfig, AutoModel

        torch.manual_seed(0)
        AutoModel.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder)
        (folder / "config.json").write_text(json.dumps(encoder_config(family, **changes)))
    return folder


def sentences(count: int, *, seed: int = 0, pairs: bool = False, names: bool = False) -> list[dict[str, Any]]:
    """Texts of 3 to 40 words; the label says whether good words outnumber bad ones, of pairs in both together."""
    drawn, rows = random.Random(seed), []
    good, bad = ("good", "fine", "great", "happy"), ("bad", "awful", "poor", "sad")
    for _ in range(count):
        label = drawn.randrange(2)
        texts = []
        for _ in range(2 if pairs else 1):
            words = drawn.choices(WORDS[:60], k=int(drawn.triangular(3, 40, 6)))
            words[drawn.randrange(len(words))] = drawn.choice(good if label else bad)
            texts.append(" ".join(words))
        named = dict(zip(("sentence1", "sentence2"), texts, strict=False)) if pairs else {"text": texts[0]}
        rows.append({**named, "label": ("negative", "positive")[label] if names else label})
    return rows


def questions(count: int, *, seed: int = 0, unanswerable: float = 0.0) -> list[dict[str, Any]]:
    """Questions for the word behind a marker word, in contexts of 8 to 150 words."""
    drawn, rows = random.Random(seed), []
    for number in range(count):
        words = drawn.choices(WORDS[:50], k=int(drawn.triangular(8, 150, 20)))
        at = drawn.randrange(len(words) - 1)
        words[at : at + 2] = ["painter", drawn.choice(("river", "city", "king", "queen"))]
        context = " ".join(words)
        start = len(" ".join(words[: at + 1])) + 1
        answers = {"text": [words[at + 1]], "answer_start": [start]}
        if drawn.random() < unanswerable:
            context, answers = context.replace("painter", "music"), {"text": [], "answer_start": []}
        rows.append({"id": f"q{number}", "question": "who painter ?", "context": context, "answers": answers})
    return rows


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path

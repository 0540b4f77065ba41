"""Tokenizers of encoders, made in milliseconds: of BERT's kind (words in pieces) and of RoBERTa's (bytes)."""

from __future__ import annotations

import json
from pathlib import Path

TEXT = [
    "the mill turns and the store holds what the mill has ground",
    "numbers go in and numbers come out; who asks for the year 1871 gets an answer",
    "ünïcödé ∑ 文字 🙂 straße naïve café",
]


def make_bert_tokenizer(folder: Path, *, vocabulary: int = 200) -> Path:
    """[CLS] text [SEP] text [SEP], with token types."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(vocab_size=vocabulary, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0",
        pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in ("[CLS]", "[SEP]")],
    )
    return _saved(tokenizer, folder, {"tokenizer_class": "BertTokenizer", "pad_token": "[PAD]", "cls_token": "[CLS]"})


def make_roberta_tokenizer(folder: Path, *, vocabulary: int = 330) -> Path:
    """<s> text </s></s> text </s>, no token types; a character may be several tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<s>", "<pad>", "</s>", "<unk>", "<mask>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    ends = [(token, tokenizer.token_to_id(token)) for token in ("</s>", "<s>")]
    tokenizer.post_processor = processors.RobertaProcessing(*ends, trim_offsets=True, add_prefix_space=False)
    return _saved(tokenizer, folder, {"tokenizer_class": "RobertaTokenizer"})


def _saved(tokenizer: object, folder: Path, settings: dict[str, str]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))  # type: ignore[attr-defined]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder

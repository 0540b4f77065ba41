"""The class or number that an export gives a text, or two: a program of its own (tasks/encoder/sample.py)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from coremill.tasks.encoder.sample import load_export, run_program


def say_label(asked: Mapping[str, Any], export: str, code_sha256: str | None) -> str:
    """`positive (0.97)`, or a number."""
    import torch

    names = asked["names"]
    model, tokenizer = load_export("AutoModelForSequenceClassification", export, code_sha256, len(names))
    texts = [text for text in (asked["prompt"], asked.get("context")) if text is not None]
    inputs = tokenizer(*texts, truncation=True, max_length=asked["length"], return_tensors="pt")
    with torch.no_grad():
        logits = model(**inputs).logits[0].float()
    if len(names) == 1:
        return f"{float(logits[0]):.4g}"
    shares = logits.softmax(dim=0)
    best = int(shares.argmax())
    return f"{names[best]} ({float(shares[best]):.2f})"


if __name__ == "__main__":
    run_program(say_label)

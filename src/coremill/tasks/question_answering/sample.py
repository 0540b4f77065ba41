"""The answer that an export finds in a context: a program of its own (tasks/encoder/sample.py)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from coremill.data.encoded_split import AskedQuestion
from coremill.tasks.encoder.sample import load_export, run_program
from coremill.tasks.question_answering.post_processing import AnswerRules, ScoredWindow, answer

NO_ANSWER = "(no answer)"


def say_answer(asked: Mapping[str, Any], export: str, code_sha256: str | None) -> str:
    """As an evaluation finds it, over the windows of a long context."""
    import torch

    model, tokenizer = load_export("AutoModelForQuestionAnswering", export, code_sha256, None)
    found = tokenizer(
        asked["prompt"],
        asked["context"],
        truncation="only_second",
        max_length=asked["length"],
        stride=asked["stride"],
        return_overflowing_tokens=True,
        return_offsets_mapping=True,
        padding=True,
        return_tensors="pt",
    )
    offsets = found.pop("offset_mapping").numpy()
    found.pop("overflow_to_sample_mapping")
    with torch.no_grad():
        outputs = model(**found)
    windows = []
    for row in range(len(offsets)):
        of_context = np.array([part == 1 for part in found.sequence_ids(row)])
        begins = found["input_ids"][row].tolist()
        null = begins.index(tokenizer.cls_token_id) if tokenizer.cls_token_id in begins else 0
        places = np.where(of_context[:, None], offsets[row], -1).astype(np.int32)
        starts, ends = (each[row].float().numpy() for each in (outputs.start_logits, outputs.end_logits))
        windows.append(ScoredWindow(places, starts, ends, null))
    question = AskedQuestion(id="", question=asked["prompt"], context=asked["context"], answers=())
    return answer(question, windows, AnswerRules(**asked["rules"])).text or NO_ANSWER


if __name__ == "__main__":
    run_program(say_answer)

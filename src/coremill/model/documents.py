"""Whether a model keeps the documents of a row apart, seen on a small copy of it before its weights are loaded.

Documents are kept apart by position ids that start again with each of them, and nothing else: attention made by
transformers' masks goes by these, but families that make masks of their own, attend by distance (Bloom, MPT) or carry a
state along (Mamba) let them pass without a word. So it is tried: other tokens in one document must leave the next one's
logits alone, and these must be the same as when it has a row for itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from coremill.config.schema import DataSection
from coremill.errors import InputError
from coremill.model.small_copy import SPECIAL_TOKENS, quiet_transformers, small_copy
from coremill.plan.types import Choice

FIRST, SECOND = 13, 11  # tokens of two documents in one row: longer than the small copy's windows
# Of what the same change does where documents are not kept apart. Over all families of transformers 5.22 rounding stays
# below 3e-4, and the least that leaks is 0.1.
SAME = 5e-3
COPIES = 5


@dataclass(frozen=True)
class Influence:
    """How much a document's logits change, each as a share of what the one before does to it in a joined row."""

    of_previous: float  # by other tokens in the document before it
    of_place: float  # by being behind another document instead of alone in its row


def documents_of(model: PreTrainedModel, data: DataSection, *, conversations: bool = False) -> Choice[str]:
    """Whether the documents of a row see each other; refuses to keep them apart where the model does not.

    Conversations are, unless the model cannot: then they see each other, as documents do by default."""
    if conversations and data.attention_across_documents:
        try:
            return require_documents_apart(model, row_tokens=data.sequence_length)
        except InputError as problem:
            seen = "a token sees the conversations before its own in the row too"
            return Choice("joined", f"{problem.what} ({problem.why}): {seen}")
    if data.attention_across_documents:
        return Choice("joined", "data.attention_across_documents is true: a token sees all before it in its row")
    return require_documents_apart(model, row_tokens=data.sequence_length)


def require_documents_apart(model: PreTrainedModel, *, row_tokens: int) -> Choice[str]:
    """Refuse a model whose documents would see each other; `model` is one that no engine has placed."""
    name = type(model).__name__
    try:
        with quiet_transformers():
            found = _least_by_place(model, row_tokens)
    except Exception as error:  # of an unknown forward: then nothing is known of it, and silence would be a promise
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise _refusal(f"cannot tell whether {name} keeps documents apart", why) from error
    if not found.of_previous <= SAME:  # nor is NaN
        why = "on a small copy of it, other tokens in one document change the next one's logits"
        raise _refusal(f"{name} does not keep the documents of a row apart", why)
    if not found.of_place <= SAME:
        why = "on a small copy of it, a document behind another has other logits than alone in its row"
        raise _refusal(f"{name} does not read a document in the middle of a row as it would alone", why)
    return Choice("apart", "tried on a small copy of the model: no document changes another's logits")


def _least_by_place(model: PreTrainedModel, row_tokens: int) -> Influence:
    """Of several copies, until one is the same in every place: where a model chooses tokens by score (DeepSeek V3.2),
    equal scores fall by chance. What the document before it does counts in every copy."""
    worst, found = 0.0, Influence(0.0, 0.0)
    for seed in range(COPIES):
        found = influence_of_documents(small_copy(model, row_tokens=row_tokens, seed=seed))
        worst = found.of_previous if not found.of_previous <= worst else worst
        if not worst <= SAME or found.of_place <= SAME:
            break
    return Influence(worst, found.of_place)


def influence_of_documents(small: PreTrainedModel) -> Influence:
    """Try two documents in a row; the row beside it changes documents elsewhere, as rows of a batch do."""
    generator = torch.Generator().manual_seed(1)
    embedding: Any = small.get_input_embeddings()
    words = embedding.weight.shape[0] - SPECIAL_TOKENS

    def tokens(count: int) -> torch.Tensor:
        return torch.randint(words // 4, words, (1, count), generator=generator)  # padding is among the first

    first, second, beside = tokens(FIRST), tokens(SECOND), tokens(FIRST + SECOND)
    other = torch.where(first > words // 4, first - 1, first + 1)
    here = torch.cat([torch.arange(FIRST), torch.arange(SECOND)])
    elsewhere = torch.cat([torch.arange(SECOND), torch.arange(FIRST)])
    positions = torch.stack([here, elsewhere])

    def logits(previous: torch.Tensor, position_ids: torch.Tensor | None) -> torch.Tensor:
        rows = torch.cat([torch.cat([previous, second], 1), beside])
        return _logits(small, rows, position_ids)[0, FIRST:]

    alone = _logits(small, second, torch.arange(SECOND).unsqueeze(0))[0]
    behind = logits(first, positions)
    joined = _difference(logits(first, None), logits(other, None))
    if joined == 0.0:
        raise ValueError("its documents do not change each other even in a joined row")
    return Influence(_difference(behind, logits(other, positions)) / joined, _difference(behind, alone) / joined)


@torch.no_grad()
def _logits(model: PreTrainedModel, token_ids: torch.Tensor, position_ids: torch.Tensor | None) -> torch.Tensor:
    """Called as in training."""
    inputs: dict[str, Any] = {} if position_ids is None else {"position_ids": position_ids}
    result: torch.Tensor = model(input_ids=token_ids, use_cache=False, **inputs).logits
    return result


def _difference(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).abs().max())


def _refusal(what: str, why: str) -> InputError:
    return InputError(
        what,
        where="data.attention_across_documents",
        why=why,
        do="set data.attention_across_documents: true, or use a family that keeps them apart (docs/families.md)",
    )

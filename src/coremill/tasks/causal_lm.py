"""Causal language modelling: predict the next token of packed rows."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from coremill.data.loader import Batch
from coremill.plan.types import Choice
from coremill.train.loss import HeadLoss, logits_loss
from coremill.train.tied import tied_lookup


class CausalLm:
    """What a batch, a loss and a metric are for next-token prediction."""

    def __init__(self) -> None:
        self._head_loss: HeadLoss | None = None

    def prepare(self, model: nn.Module) -> Choice[str]:
        """Put the chunked loss into the head where its output is the logits; before the engine places the model."""
        reason = why_not_chunked(model)
        if reason is not None:
            return Choice("logits", f"{reason}, so whole logits are made and the model's own arithmetic is kept")
        head = model.get_output_embeddings()  # type: ignore[operator]
        self._head_loss = HeadLoss(head, tied_lookup(model.get_input_embeddings(), head))  # type: ignore[operator]
        return Choice("chunked", "the head's output is the logits, so they are made and used a chunk at a time")

    @property
    def needs_head_in_backward(self) -> bool:
        """Whether backward reads the head's weight again (the chunked loss made its gradients in forward)."""
        return self._head_loss is None

    def loss(self, module: nn.Module, batch: Batch, scale: float) -> torch.Tensor:
        """Sum over the batch's valid targets times scale; call backward on it for gradients."""
        inputs: dict[str, Any] = {"input_ids": batch.input_ids, "use_cache": False}
        if batch.position_ids is not None:
            inputs["position_ids"] = batch.position_ids
        if self._head_loss is None:
            return logits_loss(module(**inputs).logits, batch.labels, scale)
        self._head_loss.expect(batch.labels, scale)
        result: torch.Tensor = module(**inputs).logits
        return result

    @staticmethod
    def metric(mean_loss: float) -> float:
        """Perplexity; infinite where it exceeds what a float holds."""
        return math.exp(mean_loss) if mean_loss < 700 else math.inf


def why_not_chunked(model: nn.Module) -> str | None:
    """What happens to the logits after the head (Gemma 2's soft cap, Granite's and Cohere's scales); None if nothing.

    Instead of a list of model types: run the model's own forward with trunk and head replaced by constants, and see
    whether what the head returned comes out untouched.
    """
    head = model.get_output_embeddings()  # type: ignore[operator]
    if not isinstance(head, nn.Linear):
        return f"the head is a {type(head).__name__}, not a plain linear map"
    trunk: Any = getattr(model, str(model.base_model_prefix), None)
    if trunk is None or trunk is model:
        return "the model has no trunk apart from its head"
    from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

    hidden = torch.zeros(1, 2, head.in_features)
    marker = torch.linspace(-40.0, 40.0, 2 * head.out_features).view(1, 2, head.out_features)
    originals = (trunk.__dict__.get("forward"), head.__dict__.get("forward"))
    trunk.forward = lambda *args, **kwargs: BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=hidden)
    head.forward = lambda input: marker  # type: ignore[method-assign, assignment]
    try:
        with torch.no_grad():
            logits = model(input_ids=torch.zeros(1, 2, dtype=torch.long), use_cache=False).logits
    except Exception as error:  # a forward of an unknown shape: any failure means the short cut is not safe
        return f"the model's forward could not be followed ({type(error).__name__})"
    finally:
        for module, original in zip((trunk, head), originals, strict=True):
            if original is None:
                del module.forward
            else:
                module.forward = original
    if logits is not marker and not (logits.shape == marker.shape and torch.equal(logits, marker)):
        return "the model changes its logits after the head"
    return None

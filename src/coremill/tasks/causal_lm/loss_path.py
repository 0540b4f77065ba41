"""What a model's own forward does with its head's output and its loss, found out by running it on stand-ins.

Nothing here knows a model family. The forward is the model's, weights on meta or not; its trunk, head and loss function
hand it marked tensors, and where these come out again says what happened to them.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.loss.loss_utils import ForCausalLMLoss, fixed_cross_entropy
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

# What transformers' cross-entropy can be told besides logits, labels and the size of the vocabulary.
LOSS_OPTIONS = {
    name
    for function in (ForCausalLMLoss, fixed_cross_entropy)
    for name, parameter in inspect.signature(function).parameters.items()
    if parameter.default is not parameter.empty
}


@dataclass(frozen=True)
class LossPath:
    """What becomes of the head's output, and why."""

    chunked: bool  # it is the logits, and their cross-entropy can be made in its place
    cross_entropy: bool  # the loss is the cross-entropy of the next token
    more: bool  # and something that the model adds to it
    reason: str


class _TrunkOutput(BaseModelOutputWithPastAndCrossAttentions):
    """What a trunk may return: whatever else a forward asks for is not there, and noted."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)
        self.__dict__.setdefault("_asked", set()).add(name)


class _Marked(torch.Tensor):
    """A single number, as the chunked loss is, that notices when something is computed from it."""

    is_used = False

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        for argument in (*args, *(kwargs or {}).values()):
            # What returns the tensor itself (`float` in fp32), its shape or its device has used nothing.
            if isinstance(argument, cls) and isinstance(result, torch.Tensor) and result is not argument:
                argument.is_used = True
        return result

    @property
    def is_untouched(self) -> bool:
        """Whether nothing was made of it and nothing written to it."""
        return not self.is_used and self._version == 0


class _StandIns:
    """In place of a model's trunk, head and loss function for one forward pass; they note what they are given."""

    def __init__(self, model: Any, head: nn.Linear, logits: torch.Tensor) -> None:
        """`logits`: what the head is to return."""
        rows = torch.zeros(1, 2, head.in_features, device=head.weight.device)  # other weights may be on the way
        self._output = _TrunkOutput(last_hidden_state=rows)
        self._output.__dict__["router_logits"] = _router_logits(model)
        self._logits = logits
        self._loss = torch.zeros(())
        self.head_inputs: list[tuple[int, ...]] = []
        self.loss_inputs: list[tuple[Any, Any, dict[str, Any]]] = []  # logits, labels, options

    def trunk(self, *_: Any, **__: Any) -> _TrunkOutput:
        """In place of all layers."""
        return self._output

    def head(self, rows: torch.Tensor) -> torch.Tensor:
        """In place of the product."""
        self.head_inputs.append(tuple(rows.shape))
        return self._logits

    def loss(self, logits: Any, labels: Any, vocab_size: int | None = None, **options: Any) -> torch.Tensor:
        """In place of transformers' cross-entropy."""
        self.loss_inputs.append((logits, labels, options))
        return self._loss

    @property
    def asked(self) -> set[str]:
        """What the forward looked for in the trunk's output in vain."""
        asked: set[str] = self._output.__dict__.get("_asked", set())
        return asked

    def is_untouched(self, loss: Any) -> bool:
        """Whether this is what the loss function returned, and nothing else."""
        return loss is self._loss and self._loss._version == 0


def find_loss_path(model: nn.Module) -> LossPath:
    """Run the model's own forward with trunk, head and loss function replaced, and see what it does with theirs.

    Instead of a list of model types, and instead of comparing logits: a tensor comes out untouched or it does not, so a
    cap that only large logits meet is seen as well (Gemma 2's; Granite and Cohere scale).
    """
    head: Any = model.get_output_embeddings()  # type: ignore[operator]
    trunk = _trunk_of(model)
    reason = _why_no_plain_head(head) or ("the model has no trunk apart from its head" if trunk is None else None)
    if reason is not None or trunk is None:
        return LossPath(chunked=False, cross_entropy=False, more=False, reason=str(reason))
    reason = _why_not_chunked(model, trunk, head)
    in_training = _follow_training(model, trunk, head)
    if in_training is None:
        if not _is_cross_entropy_inside(model, trunk, head):
            why = reason or "the model's loss is one of its own"
            return LossPath(chunked=False, cross_entropy=False, more=False, reason=why)
        in_training = _InTraining(more=False, logits_are_used=False)
    if reason is None and in_training.logits_are_used:
        reason = "the model uses its logits for more than the cross-entropy"
    return LossPath(
        chunked=reason is None,
        cross_entropy=True,
        more=in_training.more,
        reason=reason or "the head's output is the logits",
    )


def _trunk_of(model: Any) -> nn.Module | None:
    """All layers without the head."""
    trunk = getattr(model, str(model.base_model_prefix), None)
    if isinstance(trunk, nn.Module) and trunk is not model:
        return trunk
    others = [child for child in model.children() if child is not model.get_output_embeddings()]
    return others[0] if len(others) == 1 else None  # Llama 4's goes by another name than its model says


def _trunk_and_all_of_it(trunk: nn.Module) -> Iterator[nn.Module]:
    """What a wrapper is around may be called past it (Pegasus' decoder)."""
    yield trunk
    inside = list(trunk.children())
    if len(inside) == 1:
        yield from _trunk_and_all_of_it(inside[0])


def _why_no_plain_head(head: Any) -> str | None:
    """What the chunked loss cannot stand in for; None where the head is a product and nothing else."""
    if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward:
        return f"the head is a {type(head).__name__}, not a plain linear map"
    if "forward" in head.__dict__ or head._forward_hooks or head._forward_pre_hooks:
        return "the head's forward has been changed"
    return None


def _why_not_chunked(model: Any, trunk: nn.Module, head: nn.Linear) -> str | None:
    """What happens between the head and the logits; None if nothing."""
    made = torch.zeros(()).as_subclass(_Marked)
    seen = _StandIns(model, head, made)
    try:
        with torch.no_grad(), _in_place(model, trunk, head, seen):
            logits = model(input_ids=_tokens(), use_cache=False).logits
    except Exception as error:  # a forward of an unknown shape: any failure means the short cut is not safe
        return f"the model's forward could not be followed ({type(error).__name__})"
    if seen.head_inputs != [(1, 2, head.in_features)]:
        return "the head does not see every row once"
    return None if logits is made and made.is_untouched else "the model changes its logits after the head"


@dataclass(frozen=True)
class _InTraining:
    """What a forward with labels does."""

    more: bool  # than transformers' cross-entropy
    logits_are_used: bool  # by something else than that


def _follow_training(model: Any, trunk: nn.Module, head: nn.Linear) -> _InTraining | None:
    """None where the loss is not transformers' cross-entropy of the logits, or not seen to be."""
    if model.loss_function is not ForCausalLMLoss:
        return None
    tokens, made = _tokens(), torch.zeros(()).as_subclass(_Marked)
    seen = _StandIns(model, head, made)
    try:
        with torch.no_grad(), _in_place(model, trunk, head, seen):
            output = model(input_ids=tokens, labels=tokens, use_cache=False)
    except Exception:
        return None
    if len(seen.loss_inputs) != 1 or any("loss" in name for name in seen.asked):
        return None
    logits, labels, options = seen.loss_inputs[0]
    if labels is not tokens or logits is not output.logits or LOSS_OPTIONS & options.keys():
        return None
    return _InTraining(more=not seen.is_untouched(output.loss), logits_are_used=not made.is_untouched)


def _is_cross_entropy_inside(model: Any, trunk: nn.Module, head: nn.Linear) -> bool:
    """Whether a forward whose loss is made in a way of its own (BART and its kin) means the cross-entropy.

    Some of them expect labels that are shifted already: the next token's are, where we make them.
    """
    generator = torch.Generator().manual_seed(1)
    logits = 20 * torch.randn(1, 2, head.out_features, generator=generator)
    labels = torch.tensor([[1, head.out_features - 1]])
    try:
        with torch.no_grad(), _in_place(model, trunk, head, _StandIns(model, head, logits), own_loss=True):
            output = model(input_ids=labels, labels=labels, use_cache=False)
        targets = (labels[:, 1], labels[0])  # of the first row, of both
        losses = [nn.functional.cross_entropy(logits[0, : len(each)], each) for each in targets]
        return output.logits is logits and any(bool(torch.isclose(output.loss, loss, rtol=1e-6)) for loss in losses)
    except Exception:
        return False


def _tokens() -> torch.Tensor:
    return torch.zeros(1, 2, dtype=torch.long)


def _router_logits(model: Any) -> tuple[torch.Tensor, ...] | None:
    """Of two tokens in one layer of a mixture; None where no number of experts is said."""
    config = model.config.get_text_config()
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        experts = getattr(config, name, None)
        if isinstance(experts, int):
            return (torch.zeros(2, experts),)
    return None


@contextmanager
def _in_place(
    model: Any, trunk: nn.Module, head: nn.Module, seen: _StandIns, *, own_loss: bool = False
) -> Iterator[None]:
    """Put the stand-ins there, and take them away again."""
    places: list[tuple[nn.Module, str, Any]] = [(head, "forward", seen.head)]
    places += [(module, "forward", seen.trunk) for module in _trunk_and_all_of_it(trunk)]
    if not own_loss:
        places.append((model, "_loss_function", seen.loss))
    before = [module.__dict__.get(name) for module, name, _ in places]
    for module, name, stand_in in places:
        module.__dict__[name] = stand_in
    try:
        yield
    finally:
        for (module, name, _), value in zip(places, before, strict=True):
            del module.__dict__[name]
            if value is not None:
                module.__dict__[name] = value

"""Every change to how a model computes: in order, each with its reason, and off as a whole with `model.fused: false`.

    layers  norms and gated MLPs keep less for backward and stay in the cache        model/fused_layers.py
    adapter adapted linear maps in fewer passes, no gradient of the base              model/lora.py
    attention goes backward by products where there are matrix units              model/quick_attention.py
    dropout masks are looked up instead of drawn: other random numbers, as random  model/quick_dropout.py
    loss    the head makes its loss a chunk of logits at a time, never all of them   model/chunked_loss.py
            and hands a tied table's gradient to the lookup, where there is one only model/tied_lookup.py
    rows    a lookup table's gradient travels by the rows that tokens named          engines/replicate/named_rows.py
            and the table itself by the rows that they need                          engines/shard/embedding.py

Layers come first: they look for forwards as transformers wrote them. The loss follows the model's own forward from the
trunk to the logits, so the head must still be as it was. Rows come last, by the engine, which is told `named_rows`:
only it knows what is sent. Nothing else replaces a forward or a loss function. Without these changes a model computes
as transformers wrote it, to rounding the same: the reference to hold a doubtful number against.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from coremill.config.schema import RunConfig
from coremill.model.build import attention_of
from coremill.model.fused_layers import fuse_layers
from coremill.model.quick_attention import quicken_attention
from coremill.model.quick_dropout import quicken_dropout
from coremill.model.slices import has_base_apart
from coremill.plan.model_choices import NOT_FUSED
from coremill.plan.types import Choice
from coremill.tasks.base import TrainingTask


def apply_changes(model: PreTrainedModel, task: TrainingTask[Any, Any], config: RunConfig) -> dict[str, Choice[Any]]:
    """Change what the run file leaves on, before the engine places the model; what the model now does, by name."""
    fused = config.model.fused
    choices: dict[str, Choice[Any]] = {"attention": attention_of(model, config.model.attention)}
    choices["layers"] = fuse_layers(model) if fused else Choice("as they are", NOT_FUSED)
    if fused and has_base_apart(model):
        from coremill.model.lora import fuse_adapters

        fuse_adapters(model)
    if fused and (dropout := quicken_dropout(model)) is not None:
        choices["dropout"] = dropout
    if fused and (quicker := quicken_attention(model)) is not None:
        attention = choices["attention"]
        choices["attention"] = Choice(attention.value, f"{attention.reason}; {quicker}")
    choices["loss"] = task.prepare(model, fused=fused)
    if not fused:
        choices["rows"] = Choice("whole tables", NOT_FUSED)
    return {**choices, **task.choices(model)}

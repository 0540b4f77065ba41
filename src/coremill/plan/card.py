"""What a model is, for planning: its shapes and counts, from config.json and safetensors headers alone.

No weights are read and neither torch nor transformers is imported. Two ways lead to the same card: the headers say
exactly which tensors there are; where there are none (training from scratch, a bare config) plan/shape.py writes down
the tensors that the known families are made of. What layers of other families keep is estimated (plan/unknown.py). The
one definition of model FLOPs, used by plan and report alike, is here.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from coremill.errors import InputError
from coremill.nearby import missing_folder
from coremill.plan.attention import unread_windows
from coremill.plan.headers import TensorHeader, read_headers
from coremill.plan.shape import BlockShape, ModelShape, Tensor, shape_of, tensors_of, text_config
from coremill.plan.unknown import has_recurrent_layers, kept_numbers, named_by_shape, shape_of_tensors

_LAYER = re.compile(r"(?:^|\.)(?:layers|layer|h|blocks|block)\.(\d+)\.")
_HEAD = re.compile(r"(?:^|\.)(?:lm_head|embed_out)\.(?:weight|bias)$")
_EMBEDDING = re.compile(r"(?:^|\.)(?:embed_tokens|embed_in|wte|word_embeddings)\.weight$")
_POSITIONS = re.compile(r"(?:^|\.)(?:wpe|embed_positions)\.weight$")
# Causal masks and rotary tables that older checkpoints carry along: buffers, not parameters.
_BUFFER = re.compile(r"\.(?:attn|attention)\.(?:bias|masked_bias)$|rotary_emb\.inv_freq$|position_ids$")
_EXPERT = re.compile(r"\.experts?\.")


@dataclass(frozen=True, kw_only=True)
class FrozenParameters:
    """What `train.freeze` leaves untrained, where it lies."""

    embedding: int  # with learned positions; of a tied model the head too
    head: int
    layers: tuple[int, ...]
    rest: int
    matmul: int  # of those that a token is multiplied with

    @property
    def total(self) -> int:
        return self.embedding + self.head + sum(self.layers) + self.rest


@dataclass(frozen=True, kw_only=True)
class AdapterParameters:
    """What is trained beside a model whose weights stay as they are (`lora`)."""

    rank: int
    layers: tuple[int, ...]  # by layer
    rest: int  # of linear maps outside of the layers
    inputs: int  # widths of what goes into the adapted maps, over all of them
    outputs: int
    maps: int = 0  # how many these are
    base_weights: int = 0  # matrices of the model itself
    unkept: int = 0  # numbers of a token that only gradients would need which are not made, over layers in backward
    has_dropout: bool = False  # of what goes into adapters: a copy of it is kept for each, and what was left out

    @property
    def total(self) -> int:
        return sum(self.layers) + self.rest


@dataclass(frozen=True, kw_only=True)
class ModelCard:
    """A causal language model in numbers."""

    name: str
    family: str  # model_type of config.json
    parameters: int  # each counted once, tied ones too
    matmul_parameters: int  # that a token is multiplied with: the head also when tied, the input embedding never
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary_rows: int
    tied: bool
    max_positions: int | None  # None: the config names no limit
    disk_dtype: str | None  # of the weights on disk; None: there are none
    disk_bytes: int  # 0: there are none
    embedding_parameters: int  # token and learned position embeddings
    layer_parameters: tuple[int, ...]  # by decoder layer
    head_parameters: int  # 0 when tied
    rest_parameters: int  # the final norm and what belongs to no layer
    largest_tensor_parameters: int
    block: BlockShape  # what a layer keeps for backward
    windows: tuple[int | None, ...]  # by layer: how many tokens attention reaches back; None: all
    experts: int  # of a layer; 0: one MLP
    experts_per_token: int
    expert_width: int
    has_recurrent_layers: bool = False
    unread: tuple[str, ...] = ()  # what the config says in a form that was not read, in words
    estimated_numbers: int | None = None  # kept of a token by a layer of an unknown family; None: it is known
    frozen: FrozenParameters | None = None  # None: all are trained
    adapters: AdapterParameters | None = None  # trained beside it; what is frozen is then held narrow and never saved

    @property
    def trainable_parameters(self) -> int:
        """Those with a gradient, optimizer state and a place in reductions."""
        own = self.parameters - (self.frozen.total if self.frozen else 0)
        return own + (self.adapters.total if self.adapters else 0)

    @property
    def base_parameters(self) -> int:
        """Of a model that adapters are trained beside: held in the compute dtype, never moved, never saved."""
        return self.frozen.total if self.frozen and self.adapters else 0

    @property
    def held_parameters(self) -> int:
        """All that is computed with."""
        return self.parameters + (self.adapters.total if self.adapters else 0)

    @property
    def own_parameters(self) -> int:
        """Those that belong to the state of a run: fp32, and in its checkpoints."""
        return self.held_parameters - self.base_parameters

    @property
    def trainable_embedding_parameters(self) -> int:
        return self.embedding_parameters - (self.frozen.embedding if self.frozen else 0)

    @property
    def trainable_head_parameters(self) -> int:
        """Of a head of its own: 0 when tied."""
        return self.head_parameters - (self.frozen.head if self.frozen else 0)

    @property
    def trains_the_head(self) -> bool:
        """Whether the table that makes logits has a gradient."""
        return bool(self.trainable_embedding_parameters if self.tied else self.trainable_head_parameters)

    @property
    def held_layer_parameters(self) -> tuple[int, ...]:
        """By layer, with the adapters that are gathered and reduced with it."""
        if self.adapters is None:
            return self.layer_parameters
        return tuple(map(sum, zip(self.layer_parameters, self.adapters.layers, strict=True)))

    @property
    def trainable_layer_parameters(self) -> tuple[int, ...]:
        if self.frozen is None:
            return self.layer_parameters
        return tuple(all_ - left for all_, left in zip(self.held_layer_parameters, self.frozen.layers, strict=True))

    @property
    def largest_trainable_layer_parameters(self) -> int:
        return max(self.trainable_layer_parameters, default=0)

    @property
    def layers_below_backward(self) -> int:
        """Layers that backward never comes to: nothing in or below them is trained, so they keep nothing for it."""
        if self.frozen is None or self.trainable_embedding_parameters:
            return 0
        return next((at for at, trained in enumerate(self.trainable_layer_parameters) if trained), self.layers)

    @property
    def has_one_table_gradient(self) -> bool:
        """Whether lookup and head add to the same gradient of a tied table."""
        return self.tied and self.block.plain_logits and self.block.plain_lookup

    @property
    def largest_layer_parameters(self) -> int:
        return max(self.held_layer_parameters, default=0)

    @property
    def groups(self) -> tuple[int, ...]:
        """Parameters by group that is gathered and reduced as one: embedding (with a tied head), head, layers, rest."""
        ends = (self.embedding_parameters,) if self.tied else (self.embedding_parameters, self.head_parameters)
        return (*ends, *self.layer_parameters, self.rest_parameters)

    def attention_flops_per_token(self, sequence_length: int) -> float:
        """Both products over the causal half of the row, forward and backward: 3 x 2 products x 2 x S/2 x width."""
        return 6.0 * self.layers * sequence_length * self.heads * self.head_dim

    def flops_per_token(self, sequence_length: int) -> float:
        """Model FLOPs of one token: 6 per matmul parameter, plus causal attention; recomputing is not counted.

        Of these 6, 2 are forward, 2 the gradient of what came in and 2 that of the weight: what is frozen has no
        gradient, and what lies below all that is trained is not gone back through. Adapters have all 6."""
        if self.frozen is None:
            return 6.0 * self.matmul_parameters + self.attention_flops_per_token(sequence_length)
        attention = self.attention_flops_per_token(sequence_length)
        in_layers = self.matmul_parameters - self.vocabulary_rows * self.hidden
        forward = 2.0 * self.matmul_parameters + attention / 3
        backward = (2.0 * in_layers + attention * 2 / 3) * self.share_of_layers_in_backward
        head = 2.0 * self.vocabulary_rows * self.hidden if self._trains_below_the_head else 0.0
        adapters = 6.0 * self.adapters.total if self.adapters else 0.0
        return forward + backward + head + 2.0 * (self.matmul_parameters - self.frozen.matmul) + adapters

    @property
    def head_flops_per_token(self) -> float:
        """The part of it that the table of logits has."""
        products = 1 + self._trains_below_the_head + self.trains_the_head
        return 2.0 * products * self.vocabulary_rows * self.hidden

    @property
    def share_of_layers_in_backward(self) -> float:
        return 1.0 - self.layers_below_backward / max(1, self.layers)

    @property
    def _trains_below_the_head(self) -> bool:
        of_the_rest = self.rest_parameters - (self.frozen.rest if self.frozen else 0)
        return self.layers_below_backward < self.layers or of_the_rest > 0


def require_positions(sequence_length: int, max_positions: int | None) -> None:
    """Refuse rows that are longer than the model can place; None: it names no limit."""
    if max_positions is not None and sequence_length > max_positions:
        raise InputError(
            f"rows of {sequence_length} tokens are longer than the model's {max_positions} positions",
            where=f"data.sequence_length: {sequence_length}",
            why="the model has no position for the tokens beyond",
            do=f"set data.sequence_length to {max_positions} or less",
        )


def fully_trained(card: ModelCard) -> ModelCard:
    """The card of the same model with all its weights trained, and nothing beside it."""
    return replace(card, frozen=None, adapters=None)


def as_written(card: ModelCard) -> ModelCard:
    """The card of the same model with `model.fused: false`: every forward is transformers' own (model/changes.py)."""
    block = replace(card.block, plain_logits=False, plain_lookup=False)
    if block.norm == "rms":  # of families with RMS norms all MLPs are gated: the activated gate is kept as well
        block = replace(block, norm="unfused rms", mlp_tensors_kept=4)
    return replace(card, block=block)


def read_card(
    folder: str | Path | None = None,
    *,
    config: Mapping[str, Any] | None = None,
    headers: Mapping[str, TensorHeader] | None = None,
    name: str | None = None,
    pretrained: bool = True,
) -> ModelCard:
    """The card of a folder (config.json, safetensors where pretrained), of a bare config, or of config and headers."""
    if config is None:
        if folder is None:
            raise ValueError("read_card needs a folder or a config")
        config = read_config(Path(folder))
    if headers is None and folder is not None and pretrained and any(Path(folder).glob("*.safetensors")):
        headers = read_headers(Path(folder))
    label = name or (str(folder) if folder is not None else str(config.get("model_type", "config")))
    return card_of(config, headers, name=label)


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a model folder, which says at least what kind of model it is."""
    path = folder / "config.json"
    if not folder.is_dir():
        raise missing_folder(folder, "model", f"no such model folder: {folder}")
    if not path.is_file():
        raise _no_config(folder)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"config.json cannot be read: {error}", where=str(path)) from None
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        advice = "use the config.json of a transformers model"
        raise InputError("config.json has no model_type", where=str(path), do=advice)
    return config


def _no_config(folder: Path) -> InputError:
    """A folder around models, an adapter, or something else."""
    why, do = "it says what shape the model has", "give a Hugging Face model folder (config.json and model.safetensors)"
    inside = sorted(path.parent for path in folder.glob("*/config.json"))
    if (folder / "adapter_config.json").is_file():
        why, do = (
            "it holds an adapter, not a whole model",
            f"name the model it was trained beside{_base_of_adapter(folder)} in model, and this folder in"
            " lora.start_from, with its lora.rank, to train it further; a merged model (coremill export --merged) has a"
            " config.json of its own",
        )
    elif inside:
        do = f"did you mean {inside[-1]}?" if len(inside) == 1 else f"name one of {', '.join(map(str, inside[:8]))}"
    return InputError("no config.json in the model folder", where=str(folder), why=why, do=do)


def _base_of_adapter(folder: Path) -> str:
    """In brackets, as the adapter has it; empty where it says none."""
    try:
        named = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    return f" ({named})" if isinstance(named, str) else ""


def card_of(config: Mapping[str, Any], headers: Mapping[str, TensorHeader] | None, *, name: str) -> ModelCard:
    """The card of a config and, where there are weights, of their headers: the headers decide the counts."""
    config = text_config(config)
    shape = shape_of(config)
    from_config = tensors_of(shape)
    if headers:
        tensors = [_tensor_of(header, shape) for header in headers.values() if not _BUFFER.search(header.name)]
        if not shape.known:
            tensors = named_by_shape(shape, tensors)
            shape = shape_of_tensors(shape, tensors, config)
        if shape.tied:  # files may hold a second copy
            tensors = [tensor for tensor in tensors if tensor.role != "head"]
        if not any(tensor.role == "head" for tensor in tensors) and not shape.tied:
            # Files without a head for an untied model: the head will be made at random, and counts all the same.
            head = [Tensor("head", (shape.vocabulary, shape.hidden))]
            tensors += head if from_config is None else [tensor for tensor in from_config if tensor.role == "head"]
    elif from_config is not None:
        tensors = from_config
    else:
        raise InputError(
            f"the size of a {shape.family!r} model cannot be told from its config alone",
            where=name,
            why="the plan does not know this family, and counts the tensors of its files",
            do="plan with a folder or hub id that has safetensors weights",
        )
    card = replace(_card_of_tensors(name, shape, tensors, headers), unread=unread_windows(config))
    if shape.known:
        return card
    return replace(
        card, estimated_numbers=kept_numbers(shape, tensors, config), has_recurrent_layers=has_recurrent_layers(config)
    )


def _card_of_tensors(
    name: str, shape: ModelShape, tensors: list[Tensor], headers: Mapping[str, TensorHeader] | None
) -> ModelCard:
    def count(role: str) -> int:
        return sum(tensor.parameters for tensor in tensors if tensor.role == role)

    layers = sorted({int(tensor.role) for tensor in tensors if tensor.role.isdigit()})
    in_layers = sum(
        active_parameters(tensor, shape) for tensor in tensors if tensor.role.isdigit() and len(tensor.shape) > 1
    )
    vocabulary_rows = max((tensor.shape[0] for tensor in tensors if tensor.role == "embedding"), default=0)
    vocabulary_rows = vocabulary_rows or shape.vocabulary
    dtypes = Counter(header.dtype for header in (headers or {}).values())
    return ModelCard(
        name=name,
        family=shape.family,
        parameters=sum(tensor.parameters for tensor in tensors),
        matmul_parameters=in_layers + vocabulary_rows * shape.hidden,
        layers=len(layers),
        hidden=shape.hidden,
        intermediate=shape.intermediate,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        vocabulary_rows=vocabulary_rows,
        tied=shape.tied,
        max_positions=shape.max_positions,
        disk_dtype=max(sorted(dtypes), key=dtypes.__getitem__) if dtypes else None,
        disk_bytes=sum(header.end - header.start for header in headers.values()) if headers else 0,
        embedding_parameters=count("embedding") + count("positions"),
        layer_parameters=tuple(count(str(layer)) for layer in layers),
        head_parameters=count("head"),
        rest_parameters=count("rest"),
        largest_tensor_parameters=max(tensor.parameters for tensor in tensors),
        block=shape.block,
        windows=shape.windows,
        experts=shape.experts,
        experts_per_token=shape.experts_per_token,
        expert_width=shape.expert_width,
    )


def role_of(name: str) -> str:
    layer = _LAYER.search(name)
    if layer:
        return layer.group(1)
    if _HEAD.search(name):
        return "head"
    if _POSITIONS.search(name):
        return "positions"
    return "embedding" if _EMBEDDING.search(name) else "rest"


def _tensor_of(header: TensorHeader, shape: ModelShape) -> Tensor:
    """Experts are named so, or lie merged in one tensor."""
    merged = len(header.shape) == 3 and header.shape[0] == shape.experts
    return Tensor(role_of(header.name), header.shape, merged or bool(_EXPERT.search(header.name)))


def active_parameters(tensor: Tensor, shape: ModelShape | ModelCard) -> int:
    """Parameters one token is multiplied with: of experts, only those it is routed to."""
    if not tensor.is_expert or not shape.experts or not shape.experts_per_token:
        return tensor.parameters
    return tensor.parameters * shape.experts_per_token // shape.experts

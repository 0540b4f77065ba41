"""What a model is, for planning: its shapes and counts, from config.json and safetensors headers alone.

No weights are read and neither torch nor transformers is imported. Two ways lead to the same card: the headers say
exactly which tensors there are; where there are none (training from scratch, a bare config) plan/shape.py writes down
the tensors that the known families are made of. What layers of other families keep is estimated (plan/unknown.py). The
one definition of model FLOPs, used by plan and report alike, is here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from coremill.errors import InputError
from coremill.plan.attention import unread_windows
from coremill.plan.config_file import read_config
from coremill.plan.headers import TensorHeader, read_headers
from coremill.plan.heads import head_of
from coremill.plan.shape import BlockShape, ModelShape, Tensor, head_tensors, shape_of, tensors_of, text_config
from coremill.plan.tensor_names import BUFFER, EXPERT, OTHER_HEAD, role_of
from coremill.plan.unknown import has_recurrent_layers, kept_numbers, named_by_shape, shape_of_tensors

LANGUAGE_MODEL = "AutoModelForCausalLM"


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
    hole_bytes: int = 0  # that building the model leaves in the heap (plan/allocator.py)
    unkept: int = 0  # numbers of a token that only gradients would need which are not made, over layers in backward
    has_dropout: bool = False  # of what goes into adapters: a copy of it is kept for each, and what was left out

    @property
    def total(self) -> int:
        return sum(self.layers) + self.rest


@dataclass(frozen=True, kw_only=True)
class ModelCard:
    """A language model, or one with a task's head, in numbers."""

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
    layer_parameters: tuple[int, ...]  # by layer
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
    is_causal: bool = True  # a token sees those before it only
    has_vocabulary_head: bool = True  # the head makes a number for each word; else the few of a task
    embedding_width: int | None = None  # None: the hidden width

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
    def lookup_width(self) -> int:
        """Of a row of the embedding."""
        return self.embedding_width or self.hidden

    @property
    def groups(self) -> tuple[int, ...]:
        """Parameters by group that is gathered and reduced as one: embedding (with a tied head), head, layers, rest."""
        ends = (self.embedding_parameters,) if self.tied else (self.embedding_parameters, self.head_parameters)
        return (*ends, *self.layer_parameters, self.rest_parameters)

    def attention_flops_per_token(self, sequence_length: float) -> float:
        """Both products, forward and backward, over the causal half of the row or all of it: 3 x 2 products x 2 x S/2
        or S x width."""
        causal_half = 6.0 * self.layers * sequence_length * self.heads * self.head_dim
        return causal_half if self.is_causal else 2 * causal_half

    def flops_per_token(self, sequence_length: float) -> float:
        """Model FLOPs of one token: 6 per matmul parameter, plus attention; recomputing is not counted.

        Of these 6, 2 are forward, 2 the gradient of what came in and 2 that of the weight: what is frozen has no
        gradient, and what lies below all that is trained is not gone back through. Adapters have all 6."""
        if self.frozen is None:
            return 6.0 * self.matmul_parameters + self.attention_flops_per_token(sequence_length)
        attention = self.attention_flops_per_token(sequence_length)
        in_layers = self.matmul_parameters - self.head_matmul_parameters
        forward = 2.0 * self.matmul_parameters + attention / 3
        backward = (2.0 * in_layers + attention * 2 / 3) * self.share_of_layers_in_backward
        head = 2.0 * self.head_matmul_parameters if self._trains_below_the_head else 0.0
        adapters = 6.0 * self.adapters.total if self.adapters else 0.0
        return forward + backward + head + 2.0 * (self.matmul_parameters - self.frozen.matmul) + adapters

    @property
    def head_flops_per_token(self) -> float:
        """The part of it that the table of logits has."""
        products = 1 + self._trains_below_the_head + self.trains_the_head
        return 2.0 * products * self.head_matmul_parameters

    @property
    def head_matmul_parameters(self) -> int:
        """Of the table of logits; what a task has in its place is too small to count."""
        return self.vocabulary_rows * self.hidden if self.has_vocabulary_head else 0

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
    block = replace(card.block, plain_logits=False, plain_lookup=False, masks_kept=True)
    if block.norm == "rms":  # of families with RMS norms all MLPs are gated: the activated gate is kept as well
        block = replace(block, norm="unfused rms", mlp_tensors_kept=4)
    return replace(card, block=block)


def with_dropouts(card: ModelCard, *, hidden: float | None, attention: float | None) -> ModelCard:
    """The card where a run sets the dropout of hidden states or of attention; None: as the model's config has it."""
    block = card.block
    if attention is not None:
        block = replace(block, attention_dropout=attention > 0)
    if hidden is not None:
        places = block.dropout_places if hidden > 0 else 0
        block = replace(block, residual_dropouts=places, embedding_dropout=hidden > 0)
    return replace(card, block=block)


def read_card(
    folder: str | Path | None = None,
    *,
    config: Mapping[str, Any] | None = None,
    headers: Mapping[str, TensorHeader] | None = None,
    name: str | None = None,
    pretrained: bool = True,
    model_class: str = LANGUAGE_MODEL,
    labels: int | None = None,
) -> ModelCard:
    """The card of a folder (config.json; safetensors where pretrained, or where the config does not tell the size), of
    a bare config, or of config and headers, as this auto class of transformers makes it: with a head of so many
    `labels`, where that is for classification."""
    if config is None:
        if folder is None:
            raise ValueError("read_card needs a folder or a config")
        config = read_config(Path(folder))
    if headers is None and folder is not None and any(Path(folder).glob("*.safetensors")):
        shape = text_config(config)
        if pretrained or tensors_of(shape_of(shape, head_of(model_class, shape, labels))) is None:
            headers = read_headers(Path(folder))
    label = name or (str(folder) if folder is not None else str(config.get("model_type", "config")))
    return card_of(config, headers, name=label, model_class=model_class, labels=labels)


def card_of(
    config: Mapping[str, Any],
    headers: Mapping[str, TensorHeader] | None,
    *,
    name: str,
    model_class: str = LANGUAGE_MODEL,
    labels: int | None = None,
) -> ModelCard:
    """The card of a config and, where there are weights, of their headers: the headers decide the counts. Behind a
    task's head files hold more than the model has (a head of their own), or less: there a known family decides."""
    config = text_config(config)
    shape = shape_of(config, head_of(model_class, config, labels))
    from_config = tensors_of(shape)
    if shape.head is not None and from_config is not None:
        tensors = from_config
    elif shape.head is not None and headers:
        tensors, shape = _trunk_with_head(shape, headers, config)
    elif headers:
        tensors = [_tensor_of(header, shape) for header in headers.values() if not BUFFER.search(header.name)]
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


def _trunk_with_head(
    shape: ModelShape, headers: Mapping[str, TensorHeader], config: Mapping[str, Any]
) -> tuple[list[Tensor], ModelShape]:
    """Of a family that is not known: all but the head that was saved with it, and the one that such models have."""
    trunk = [each for each in headers.values() if not (BUFFER.search(each.name) or OTHER_HEAD.search(each.name))]
    tensors = named_by_shape(shape, [_tensor_of(header, shape) for header in trunk])
    shape = shape_of_tensors(shape, tensors, config)
    return [*tensors, *head_tensors(shape)], shape


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
        matmul_parameters=in_layers + (vocabulary_rows * shape.hidden if shape.head is None else 0),
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
        is_causal=shape.is_causal,
        has_vocabulary_head=shape.head is None,
        embedding_width=None if shape.embedding_width == shape.hidden else shape.embedding_width,
    )


def _tensor_of(header: TensorHeader, shape: ModelShape) -> Tensor:
    """Experts are named so, or lie merged in one tensor."""
    merged = len(header.shape) == 3 and header.shape[0] == shape.experts
    return Tensor(role_of(header.name), header.shape, merged or bool(EXPERT.search(header.name)))


def active_parameters(tensor: Tensor, shape: ModelShape | ModelCard) -> int:
    """Parameters one token is multiplied with: of experts, only those it is routed to."""
    if not tensor.is_expert or not shape.experts or not shape.experts_per_token:
        return tensor.parameters
    return tensor.parameters * shape.experts_per_token // shape.experts

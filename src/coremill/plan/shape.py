"""A config.json in one set of names, and the tensors that a known family makes of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

from coremill.errors import InputError
from coremill.plan.attention import EAGER_ONLY, EAGER_ONLY_ENCODERS, windows_of
from coremill.plan.families import FAMILIES, KEPT_BY_ACTIVATION, LLAMA, Family
from coremill.plan.heads import TaskHead
from coremill.plan.logits import caps_logits, makes_whole_logits


@dataclass(frozen=True)
class Tensor:
    """One parameter: where it belongs (a layer's number, embedding, positions, head, rest) and its shape."""

    role: str
    shape: tuple[int, ...]
    is_expert: bool = False

    @property
    def parameters(self) -> int:
        return prod(self.shape)


HIDDEN = ("hidden_size", "n_embd", "d_model", "n_embed", "dim")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads", "decoder_attention_heads")
_ATTENTION_DROPOUT = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")
_RESIDUAL_DROPOUT = ("resid_pdrop", "hidden_dropout", "hidden_dropout_prob", "dropout")
_ACTIVATIONS = ("hidden_act", "activation_function", "activation")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k")


@dataclass(frozen=True, kw_only=True)
class BlockShape:
    """What decides how much a decoder layer keeps for backward."""

    norm: Literal["rms", "layer", "unfused rms"]
    norms_into_matmul: int
    norms_into_residual: int
    shared_norm_input: bool  # both norms of a layer read the same tensor
    mlp_tensors_kept: int  # as wide as the intermediate
    rotary: bool
    qk_norm: bool
    whole_qk_norm: bool  # over all heads at once
    fused_qkv: bool
    copies_attention_output: bool
    attention_dropout: bool  # keeps the flash kernel from being used
    residual_dropouts: int
    embedding_dropout: bool
    embedding_norm: bool = False  # behind the lookup, in place of the one behind the layers
    masks_kept: bool = False  # of dropouts, as torch draws them; else they are looked up again (model/quick_dropout.py)
    dropout_places: int = 2  # of what a layer adds, where there is dropout
    softcap: bool  # keeps the flash kernel from being used
    eager_only: bool  # transformers has no sdpa form
    eager_softmax_in_fp32: bool
    plain_logits: bool  # the head is all there is: the loss needs one chunk of logits at a time
    capped_logits: bool  # by a tanh
    plain_lookup: bool  # nothing happens to the rows: a tied table has one gradient (model/tied_lookup.py)


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A config, read with its family's defaults."""

    family: str
    known: bool
    traits: Family
    is_causal: bool  # a token sees those before it only
    head: TaskHead | None  # None: a number for each word of the vocabulary
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    max_positions: int | None
    position_rows: int  # of a learned table
    token_types: int
    embedding_width: int
    tied: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    head_norms: bool  # Phi's qk_layernorm
    residual_dropout: float
    activation: str
    windows: tuple[int | None, ...]  # by layer: how many tokens attention reaches back; None: all
    experts: int  # 0: one MLP
    experts_per_token: int
    expert_width: int
    block: BlockShape


def shape_of(config: Mapping[str, Any], head: TaskHead | None = None) -> ModelShape:
    """A config.json in one set of names; what an unknown family leaves out has the value that Llama gives it.
    `head`: what stands behind the layers in place of a table of words."""
    config = text_config(config)
    family_name = str(config.get("model_type") or "unknown")
    # An encoder with a table of words would be a masked or a causal language model: others than these.
    is_family = family_name in FAMILIES and not (FAMILIES[family_name].is_encoder and head is None)
    traits = FAMILIES[family_name] if is_family else LLAMA
    hidden = _integer(config, HIDDEN, traits.hidden)
    # Without a number of heads a model that is not known has no attention (Mamba, RWKV).
    heads = _integer(config, _HEADS, traits.heads if is_family else 0)
    biased = bool(config.get(traits.bias_key, traits.qkv_bias)) if traits.bias_key else traits.qkv_bias
    head_dim = _integer(config, ("head_dim",), traits.head_dim or hidden // max(1, heads))
    layers = _integer(config, ("num_hidden_layers", "n_layer", "n_layers", "num_layers"), traits.layers)
    widths = ("intermediate_size", "n_inner", "ffn_dim", "hidden_dim")
    intermediate = _integer(config, widths, traits.intermediate or 4 * hidden)
    activation = str(next((config[key] for key in _ACTIVATIONS if config.get(key)), traits.activation))
    embedding_width = hidden
    if traits.embedding_width is not None:
        embedding_width = _integer(config, ("embedding_size",), traits.embedding_width)
    position_rows = _positions(config, traits, is_family)
    usable_positions = position_rows
    if position_rows and traits.first_position_is_behind_padding:
        usable_positions = position_rows - _integer(config, ("pad_token_id",), 1, least=0) - 1
    return ModelShape(
        family=family_name,
        known=is_family and not _mixes_layers(config),
        traits=traits,
        # Of a family that is not known the dearer case: behind a task's head stand encoders.
        is_causal=not traits.is_encoder if is_family else head is None,
        head=head,
        hidden=hidden,
        intermediate=intermediate,
        layers=layers,
        heads=heads,
        kv_heads=_integer(config, ("num_key_value_heads",), traits.kv_heads or heads),
        head_dim=head_dim,
        vocabulary=_integer(config, ("vocab_size",), traits.vocabulary),
        max_positions=usable_positions,
        position_rows=position_rows or 0,
        token_types=_integer(config, ("type_vocab_size",), traits.token_types, least=0) if traits.token_types else 0,
        embedding_width=embedding_width,
        tied=head is None and bool(config.get("tie_word_embeddings", traits.tied)),
        qkv_bias=biased,
        output_bias=biased if traits.bias_key else traits.output_bias,
        mlp_bias=bool(config.get("mlp_bias", traits.mlp_bias)) if traits.gated else traits.mlp_bias,
        head_norms=_has_head_norms(config, family_name),
        residual_dropout=_fraction(config, _RESIDUAL_DROPOUT, traits.dropout),
        activation=activation,
        windows=windows_of(config, traits, layers),
        experts=_integer(config, _EXPERTS, traits.experts, least=0),
        experts_per_token=_integer(config, _EXPERTS_PER_TOKEN, traits.experts_per_token, least=0),
        expert_width=(
            intermediate
            if traits.expert_width is None
            else _integer(config, ("moe_intermediate_size",), traits.expert_width)
        ),
        block=_block_of(config, family_name, traits, activation),
    )


def _block_of(config: Mapping[str, Any], family_name: str, traits: Family, activation: str) -> BlockShape:
    residual_dropout = _fraction(config, _RESIDUAL_DROPOUT, traits.dropout)
    embedding_dropout = residual_dropout if traits.is_encoder else _fraction(config, ("embd_pdrop",), traits.dropout)
    return BlockShape(
        norm=traits.norm,
        norms_into_matmul=traits.norms_into_matmul,
        norms_into_residual=traits.norms_into_residual,
        shared_norm_input=traits.parallel_norms and bool(config.get("use_parallel_residual", True)),
        rotary=not traits.learned_positions,
        mlp_tensors_kept=3 if traits.gated else KEPT_BY_ACTIVATION.get(activation, 2),
        qk_norm=traits.qk_norm or _has_head_norms(config, family_name),
        whole_qk_norm=traits.whole_qk_norm,
        fused_qkv=traits.fused_qkv,
        copies_attention_output=traits.copies_attention_output,
        attention_dropout=_fraction(config, _ATTENTION_DROPOUT, traits.dropout) > 0,
        residual_dropouts=traits.layer_dropouts if residual_dropout > 0 else 0,
        embedding_dropout=embedding_dropout > 0,
        embedding_norm=traits.is_encoder,
        dropout_places=traits.layer_dropouts,
        softcap=bool(traits.softcap_key and config.get(traits.softcap_key, 50.0)),
        eager_only=family_name in EAGER_ONLY | EAGER_ONLY_ENCODERS,
        eager_softmax_in_fp32=traits.eager_softmax_in_fp32,
        plain_logits=not makes_whole_logits(config, family_name),
        capped_logits=caps_logits(config, family_name),
        plain_lookup=not traits.scaled_lookup,
    )


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config that describes the language model."""
    text = config.get("text_config")
    if isinstance(text, Mapping) and "hidden_size" not in config:
        return {**text, "model_type": text.get("model_type", config.get("model_type"))}
    return config


def tensors_of(shape: ModelShape) -> list[Tensor] | None:
    """Every parameter of a known family, each once; None for a family that is not known."""
    if not shape.known:
        return None
    hidden, width = shape.hidden, shape.embedding_width
    norm = [(hidden,)] if shape.traits.norm == "rms" else [(hidden,), (hidden,)]
    embedding = [Tensor("embedding", (shape.vocabulary, width))]
    if shape.traits.learned_positions:
        embedding.append(Tensor("positions", (shape.position_rows, width)))
    if shape.token_types:
        embedding.append(Tensor("positions", (shape.token_types, width)))
    one_layer = [*_attention_shapes(shape), *([] if shape.experts else _mlp_shapes(shape))]
    one_layer += norm * (shape.traits.norms_into_matmul + shape.traits.norms_into_residual)
    experts = _expert_shapes(shape) if shape.experts else []
    layers = [Tensor(str(layer), tensor) for layer in range(shape.layers) for tensor in one_layer]
    layers += [Tensor(str(layer), tensor, True) for layer in range(shape.layers) for tensor in experts]
    rest: list[tuple[int, ...]] = [*norm]  # behind the layers
    if shape.traits.is_encoder:
        rest = [(width,), (width,)]  # of the embedding
    if width != hidden:
        rest += [(hidden, width), (hidden,)]
    return [*embedding, *layers, *(Tensor("rest", tensor) for tensor in rest), *head_tensors(shape)]


def head_tensors(shape: ModelShape) -> list[Tensor]:
    """What makes logits of hidden states: of each word, where that is no tied table; or a task's few."""
    if shape.head is None:
        bias = [Tensor("head", (shape.vocabulary,))] if shape.traits.head_bias else []
        return bias if shape.tied else [Tensor("head", (shape.vocabulary, shape.hidden)), *bias]
    last = [Tensor("head", (shape.head.outputs, shape.hidden))]
    if not shape.is_causal:  # decoders have a bare product
        last.append(Tensor("head", (shape.head.outputs,)))
    if not shape.head.pools or shape.is_causal:
        return last
    return [Tensor("rest", (shape.hidden, shape.hidden)), Tensor("rest", (shape.hidden,)), *last]


def _attention_shapes(shape: ModelShape) -> list[tuple[int, ...]]:
    width, kv_width = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    tensors: list[tuple[int, ...]] = [(width, shape.hidden), (kv_width, shape.hidden), (kv_width, shape.hidden)]
    tensors.append((shape.hidden, width))
    if shape.qkv_bias:
        tensors += [(width,), (kv_width,), (kv_width,)]
    if shape.output_bias:
        tensors.append((shape.hidden,))
    if shape.traits.qk_norm:
        tensors += [(shape.head_dim,), (shape.head_dim,)]
    if shape.traits.whole_qk_norm:
        tensors += [(width,), (kv_width,)]
    if shape.head_norms:
        tensors += [(shape.head_dim,)] * 4
    if shape.experts:
        tensors.append((shape.experts, shape.hidden))  # the router, which every token passes
    return tensors


def _expert_shapes(shape: ModelShape) -> list[tuple[int, ...]]:
    """All experts of a layer, merged as transformers has them."""
    return [(shape.experts, 2 * shape.expert_width, shape.hidden), (shape.experts, shape.hidden, shape.expert_width)]


def _mlp_shapes(shape: ModelShape) -> list[tuple[int, ...]]:
    ups = 2 if shape.traits.gated else 1
    tensors: list[tuple[int, ...]] = [(shape.hidden, shape.intermediate)]
    tensors += [(shape.intermediate, shape.hidden)] * ups
    if shape.mlp_bias:
        tensors += [(shape.intermediate,)] * ups + [(shape.hidden,)]
    return tensors


def _has_head_norms(config: Mapping[str, Any], family_name: str) -> bool:
    return bool(config.get("qk_layernorm", False)) and family_name == "phi"


def _mixes_layers(config: Mapping[str, Any]) -> bool:
    """Whether some layers have experts and others one MLP (Qwen3-MoE can be told so)."""
    return bool(config.get("mlp_only_layers")) or config.get("decoder_sparse_step", 1) != 1


def _integer(config: Mapping[str, Any], keys: tuple[str, ...], default: int, *, least: int = 1) -> int:
    for key in keys:
        value = config.get(key)
        if value is None:
            continue
        if isinstance(value, int) and not isinstance(value, bool) and value >= least:
            return value
        # Families that are not known may mean something else by it: a number for each layer, say.
        if str(config.get("model_type")) in FAMILIES:
            what = "a positive number" if least else "a number, 0 or more"
            raise InputError(f"{key} of the model config is {value!r}, not {what}", where="config.json")
    return default


def _fraction(config: Mapping[str, Any], keys: tuple[str, ...], default: float) -> float:
    for key in keys:
        if isinstance(config.get(key), int | float):
            return float(config[key])
    return default


def _positions(config: Mapping[str, Any], traits: Family, known: bool) -> int | None:
    named = _integer(config, ("max_position_embeddings", "n_positions", "n_ctx"), traits.max_positions if known else 0)
    return named or None

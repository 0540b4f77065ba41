"""The tensors that known model families are made of, and what their layers keep for backward, from config.json alone.

A family is a row of differences from the Llama shape. Counts are exact and held to the real models by a test that
builds each on the meta device. What a layer keeps for backward was read off with saved_tensors_hooks on transformers
5.22, with model/lean.py in place, and is held to it by a test as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Literal

from coremill.errors import InputError


@dataclass(frozen=True)
class Tensor:
    """One parameter: where it belongs (a layer's number, embedding, positions, head, rest) and its shape."""

    role: str
    shape: tuple[int, ...]
    is_expert: bool = False

    @property
    def parameters(self) -> int:
        """Elements."""
        return prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class Family:
    """What transformers assumes for keys a config leaves out, and how the layer is built."""

    hidden: int = 4096
    intermediate: int | None = 11008  # None: four times hidden
    layers: int = 32
    heads: int = 32
    kv_heads: int | None = None  # None: as many as heads
    head_dim: int | None = None  # None: hidden / heads
    vocabulary: int = 32000
    max_positions: int = 2048
    tied: bool = False
    norm: Literal["rms", "layer"] = "rms"
    norms_into_matmul: int = 2
    norms_into_residual: int = 0
    gated: bool = True
    activation: str = "silu"
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    bias_key: str | None = "attention_bias"  # the config key that turns on biases of q, k, v and o
    head_bias: bool = False
    qk_norm: bool = False  # an RMS norm over each head's q and k
    fused_qkv: bool = False  # q, k and v are slices of one tensor, which stays whole
    copies_attention_output: bool = False  # rotary by concatenation leaves heads first; the output is copied back
    learned_positions: bool = False
    scaled_lookup: bool = False  # the embedding multiplies the rows it looks up
    softcap_key: str | None = None
    parallel_norms: bool = False  # attention and MLP are fed from the same residual
    eager_softmax_in_fp32: bool = True


_LLAMA = Family()
FAMILIES: dict[str, Family] = {
    "llama": _LLAMA,
    "mistral": replace(_LLAMA, intermediate=14336, kv_heads=8, max_positions=131072, bias_key=None),
    "qwen2": replace(
        _LLAMA, intermediate=22016, kv_heads=32, vocabulary=151936, max_positions=32768, qkv_bias=True, bias_key=None
    ),
    "qwen3": replace(
        _LLAMA, intermediate=22016, kv_heads=32, head_dim=128, vocabulary=151936, max_positions=32768, qk_norm=True
    ),
    "gemma": replace(
        _LLAMA,
        hidden=3072,
        intermediate=24576,
        layers=28,
        heads=16,
        kv_heads=16,
        head_dim=256,
        vocabulary=256000,
        max_positions=8192,
        tied=True,
        activation="gelu_pytorch_tanh",
        scaled_lookup=True,
    ),
    "gemma2": replace(
        _LLAMA,
        hidden=2304,
        intermediate=9216,
        layers=26,
        heads=8,
        kv_heads=4,
        head_dim=256,
        vocabulary=256000,
        max_positions=8192,
        tied=True,
        norms_into_residual=2,
        activation="gelu_pytorch_tanh",
        scaled_lookup=True,
        softcap_key="attn_logit_softcapping",
    ),
    "phi3": replace(
        _LLAMA,
        hidden=3072,
        intermediate=8192,
        vocabulary=32064,
        max_positions=4096,
        bias_key=None,
        fused_qkv=True,
        copies_attention_output=True,
    ),
    "gpt2": Family(
        hidden=768,
        intermediate=None,
        layers=12,
        heads=12,
        vocabulary=50257,
        max_positions=1024,
        tied=True,
        norm="layer",
        gated=False,
        activation="gelu_new",
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        bias_key=None,
        fused_qkv=True,
        learned_positions=True,
        eager_softmax_in_fp32=False,
    ),
    "gpt_neox": Family(
        hidden=6144,
        intermediate=24576,
        layers=44,
        heads=64,
        vocabulary=50432,
        norm="layer",
        gated=False,
        activation="gelu",
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        fused_qkv=True,
        copies_attention_output=True,
        parallel_norms=True,
    ),
    "phi": Family(
        hidden=2048,
        intermediate=8192,
        layers=24,
        vocabulary=51200,
        norm="layer",
        norms_into_matmul=1,
        gated=False,
        activation="gelu_new",
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        bias_key=None,
        head_bias=True,
        copies_attention_output=True,
    ),
}

# Intermediate-wide tensors an ungated MLP keeps: the fused kernels keep input and output, GELUs written out in Python
# (gelu_new, gelu_fast) keep every factor, ReLU only its output.
_KEPT_BY_ACTIVATION = {"gelu_new": 5, "gelu_fast": 5, "relu": 1, "relu2": 3}


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A config, read with its family's defaults."""

    family: str
    known: bool
    traits: Family
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    max_positions: int | None
    tied: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    head_norms: bool  # Phi's qk_layernorm
    learned_positions: bool
    attention_dropout: float
    residual_dropout: float
    embedding_dropout: float
    softcap: bool
    shared_norm_input: bool
    plain_logits: bool
    activation: str


@dataclass(frozen=True, kw_only=True)
class BlockShape:
    """What decides how much a decoder layer keeps for backward."""

    norm: Literal["rms", "layer"]
    norms_into_matmul: int
    norms_into_residual: int
    shared_norm_input: bool  # both norms of a layer read the same tensor
    mlp_tensors_kept: int  # as wide as the intermediate
    rotary: bool
    qk_norm: bool
    fused_qkv: bool
    copies_attention_output: bool
    attention_dropout: bool  # keeps the flash kernel from being used
    residual_dropouts: int
    embedding_dropout: bool
    softcap: bool  # keeps the flash kernel from being used
    eager_softmax_in_fp32: bool
    plain_logits: bool  # the head is all there is: the loss needs one chunk of logits at a time
    plain_lookup: bool  # nothing happens to the rows: a tied table has one gradient (train/tied.py)


def shape_of(config: Mapping[str, Any]) -> ModelShape:
    """A config.json in one set of names; unknown families are read with Llama's."""
    family_name = str(config.get("model_type") or "unknown")
    text = config.get("text_config")
    if isinstance(text, Mapping) and "hidden_size" not in config:
        config = {**text, "model_type": text.get("model_type", family_name)}
        family_name = str(config["model_type"])
    traits = FAMILIES.get(family_name, _LLAMA)
    hidden = _integer(config, ("hidden_size", "n_embd", "d_model"), traits.hidden)
    heads = _integer(config, ("num_attention_heads", "n_head"), traits.heads)
    biased = bool(config.get(traits.bias_key, traits.qkv_bias)) if traits.bias_key else traits.qkv_bias
    head_dim = config.get("head_dim") or traits.head_dim or hidden // heads
    return ModelShape(
        family=family_name,
        known=family_name in FAMILIES,
        traits=traits,
        hidden=hidden,
        intermediate=_integer(config, ("intermediate_size", "n_inner", "ffn_dim"), traits.intermediate or 4 * hidden),
        layers=_integer(config, ("num_hidden_layers", "n_layer"), traits.layers),
        heads=heads,
        kv_heads=_integer(config, ("num_key_value_heads",), traits.kv_heads or heads),
        head_dim=int(head_dim),
        vocabulary=_integer(config, ("vocab_size",), traits.vocabulary),
        max_positions=_positions(config, traits, family_name in FAMILIES),
        tied=bool(config.get("tie_word_embeddings", traits.tied)),
        qkv_bias=biased,
        output_bias=biased if traits.bias_key else traits.output_bias,
        mlp_bias=bool(config.get("mlp_bias", traits.mlp_bias)) if traits.gated else traits.mlp_bias,
        head_norms=bool(config.get("qk_layernorm", False)) and family_name == "phi",
        learned_positions=traits.learned_positions,
        attention_dropout=_fraction(config, ("attention_dropout", "attn_pdrop"), 0.1 if family_name == "gpt2" else 0.0),
        residual_dropout=_fraction(config, ("resid_pdrop", "hidden_dropout"), 0.1 if family_name == "gpt2" else 0.0),
        embedding_dropout=_fraction(config, ("embd_pdrop",), 0.1 if family_name == "gpt2" else 0.0),
        softcap=bool(traits.softcap_key and config.get(traits.softcap_key, 50.0)),
        shared_norm_input=traits.parallel_norms and bool(config.get("use_parallel_residual", True)),
        plain_logits=not _changes_logits(config, family_name),
        activation=str(config.get("hidden_act") or config.get("activation_function") or traits.activation),
    )


def block_of(shape: ModelShape) -> BlockShape:
    """What a layer of this shape keeps, before any dimension is put in."""
    traits = shape.traits
    return BlockShape(
        norm=traits.norm,
        norms_into_matmul=traits.norms_into_matmul,
        norms_into_residual=traits.norms_into_residual,
        shared_norm_input=shape.shared_norm_input,
        rotary=not shape.learned_positions,
        mlp_tensors_kept=3 if traits.gated else _KEPT_BY_ACTIVATION.get(shape.activation, 2),
        qk_norm=traits.qk_norm or shape.head_norms,
        fused_qkv=traits.fused_qkv,
        copies_attention_output=traits.copies_attention_output,
        attention_dropout=shape.attention_dropout > 0,
        residual_dropouts=2 if shape.residual_dropout > 0 else 0,
        embedding_dropout=shape.embedding_dropout > 0,
        softcap=shape.softcap,
        eager_softmax_in_fp32=traits.eager_softmax_in_fp32,
        plain_logits=shape.plain_logits,
        plain_lookup=not shape.traits.scaled_lookup,
    )


def tensors_of(shape: ModelShape) -> list[Tensor] | None:
    """Every parameter of a known family, each once; None for a family that is not known."""
    if not shape.known:
        return None
    hidden = shape.hidden
    norm = [(hidden,)] if shape.traits.norm == "rms" else [(hidden,), (hidden,)]
    embedding = [Tensor("embedding", (shape.vocabulary, hidden))]
    if shape.learned_positions:
        embedding.append(Tensor("positions", (shape.max_positions or 0, hidden)))
    head: list[Tensor] = [] if shape.tied else [Tensor("head", (shape.vocabulary, hidden))]
    if shape.traits.head_bias:
        head.append(Tensor("head", (shape.vocabulary,)))
    one_layer = [*_attention_shapes(shape), *_mlp_shapes(shape)]
    one_layer += norm * (shape.traits.norms_into_matmul + shape.traits.norms_into_residual)
    layers = [Tensor(str(layer), tensor) for layer in range(shape.layers) for tensor in one_layer]
    return [*embedding, *layers, *(Tensor("rest", tensor) for tensor in norm), *head]


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
    if shape.head_norms:
        tensors += [(shape.head_dim,)] * 4
    return tensors


def _mlp_shapes(shape: ModelShape) -> list[tuple[int, ...]]:
    ups = 2 if shape.traits.gated else 1
    tensors: list[tuple[int, ...]] = [(shape.hidden, shape.intermediate)]
    tensors += [(shape.intermediate, shape.hidden)] * ups
    if shape.mlp_bias:
        tensors += [(shape.intermediate,)] * ups + [(shape.hidden,)]
    return tensors


def _integer(config: Mapping[str, Any], keys: tuple[str, ...], default: int) -> int:
    for key in keys:
        value = config.get(key)
        if value is not None:
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise InputError(f"{key} of the model config is {value!r}, not a positive number", where="config.json")
            return value
    return default


def _changes_logits(config: Mapping[str, Any], family: str) -> bool:
    """Whether the model does something to its logits after the head (soft cap, scale)."""
    softcap = config.get("final_logit_softcapping", 30.0 if family == "gemma2" else None)
    scales = (config.get("logit_scale"), config.get("logits_scaling"))
    return bool(softcap) or any(scale not in (None, 1, 1.0) for scale in scales)


def _fraction(config: Mapping[str, Any], keys: tuple[str, ...], default: float) -> float:
    for key in keys:
        if config.get(key) is not None:
            return float(config[key])
    return default


def _positions(config: Mapping[str, Any], traits: Family, known: bool) -> int | None:
    for key in ("max_position_embeddings", "n_positions", "n_ctx"):
        if config.get(key) is not None:
            return int(config[key])
    return traits.max_positions if known else None

"""The model families whose layers are known to the plan, each a row of differences from the Llama shape.

What transformers assumes for keys that a config leaves out, which tensors a layer has and what it keeps for backward:
read off with saved_tensors_hooks on transformers 5.22, with fused_layers.py in place, and held to the real models by
tests (tests/unit/plan/test_against_torch.py). Other families are planned by the shapes of their weights
(plan/unknown.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal


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
    whole_qk_norm: bool = False  # the same over all heads at once
    fused_qkv: bool = False  # q, k and v are slices of one tensor, which stays whole
    copies_attention_output: bool = False  # rotary by concatenation leaves heads first; the output is copied back
    learned_positions: bool = False
    scaled_lookup: bool = False  # the embedding multiplies the rows it looks up
    softcap_key: str | None = None
    sliding_window: int | None = None
    full_attention_every: int | None = None  # of layers with a window, every n-th sees the whole row
    window_is_optional: bool = False  # a window counts only where use_sliding_window says so
    experts: int = 0  # in place of one MLP
    experts_per_token: int = 0
    expert_width: int | None = None  # moe_intermediate_size; None: the intermediate is the experts'
    parallel_norms: bool = False  # attention and MLP are fed from the same residual
    eager_softmax_in_fp32: bool = True
    dropout: float = 0.0  # of attention, of what layers add, and of the embedding
    layer_dropouts: int = 2  # of what a layer adds
    is_encoder: bool = False  # every token sees the whole row; norms follow attention and MLP, and the embedding
    token_types: int = 0
    first_position_is_behind_padding: bool = False  # positions count on from the padding's id
    embedding_width: int | None = None  # None: hidden


LLAMA = Family()
MISTRAL = replace(LLAMA, intermediate=14336, kv_heads=8, max_positions=131072, bias_key=None, sliding_window=4096)
OLMO2 = replace(LLAMA, vocabulary=50304, whole_qk_norm=True)
QWEN3 = replace(
    LLAMA,
    intermediate=22016,
    kv_heads=32,
    head_dim=128,
    vocabulary=151936,
    max_positions=32768,
    qk_norm=True,
    sliding_window=4096,
    window_is_optional=True,
)
GEMMA2 = replace(
    LLAMA,
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
    sliding_window=4096,
    full_attention_every=2,
)
GPT = replace(
    LLAMA,
    norm="layer",
    gated=False,
    activation="gelu_new",
    qkv_bias=True,
    output_bias=True,
    mlp_bias=True,
    bias_key=None,
)
BERT = replace(
    GPT,
    hidden=768,
    intermediate=3072,
    layers=12,
    heads=12,
    vocabulary=30522,
    max_positions=512,
    activation="gelu",
    learned_positions=True,
    eager_softmax_in_fp32=False,
    dropout=0.1,
    is_encoder=True,
    token_types=2,
)
ROBERTA = replace(BERT, vocabulary=50265, first_position_is_behind_padding=True)
FAMILIES: dict[str, Family] = {
    "llama": LLAMA,
    "mistral": MISTRAL,
    "qwen2": replace(QWEN3, head_dim=None, qk_norm=False, qkv_bias=True, bias_key=None),
    "qwen3": QWEN3,
    "smollm3": replace(  # layers without rotary keep as much
        LLAMA,
        hidden=2048,
        layers=36,
        heads=16,
        kv_heads=4,
        vocabulary=128256,
        max_positions=32768,
        tied=True,
        window_is_optional=True,
    ),
    # Norms behind attention and MLP in place of those before them: what these read is kept all the same.
    "olmo2": OLMO2,
    "olmo3": replace(OLMO2, sliding_window=4096, full_attention_every=4),
    "granite": LLAMA,
    "mixtral": replace(MISTRAL, sliding_window=None, experts=8, experts_per_token=2),
    "qwen3_moe": replace(
        QWEN3,
        hidden=2048,
        intermediate=6144,
        layers=24,
        kv_heads=4,
        head_dim=None,
        experts=128,
        experts_per_token=8,
        expert_width=768,
    ),
    "olmoe": replace(
        OLMO2, hidden=2048, intermediate=2048, layers=16, heads=16, max_positions=4096, experts=64, experts_per_token=8
    ),
    "granitemoe": replace(LLAMA, experts=8, experts_per_token=2),
    "gemma": replace(
        LLAMA,
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
    "gemma2": GEMMA2,
    "gemma3_text": replace(
        GEMMA2,
        vocabulary=262208,
        max_positions=131072,
        qk_norm=True,
        copies_attention_output=True,  # norms of heads leave heads first
        softcap_key=None,
        full_attention_every=6,
    ),
    "phi3": replace(
        LLAMA,
        hidden=3072,
        intermediate=8192,
        vocabulary=32064,
        max_positions=4096,
        bias_key=None,
        fused_qkv=True,
        copies_attention_output=True,
    ),
    "gpt2": replace(
        GPT,
        hidden=768,
        intermediate=None,
        layers=12,
        heads=12,
        vocabulary=50257,
        max_positions=1024,
        tied=True,
        fused_qkv=True,
        learned_positions=True,
        eager_softmax_in_fp32=False,
        dropout=0.1,
    ),
    "gpt_neox": replace(
        GPT,
        hidden=6144,
        intermediate=24576,
        layers=44,
        heads=64,
        vocabulary=50432,
        activation="gelu",
        bias_key="attention_bias",
        fused_qkv=True,
        copies_attention_output=True,
        parallel_norms=True,
    ),
    "phi": replace(
        GPT,
        hidden=2048,
        intermediate=8192,
        layers=24,
        vocabulary=51200,
        norms_into_matmul=1,
        head_bias=True,
        copies_attention_output=True,
    ),
    "bert": BERT,
    "roberta": ROBERTA,
    "xlm-roberta": replace(ROBERTA, vocabulary=30522),
    "camembert": replace(ROBERTA, vocabulary=30522),
    "electra": replace(BERT, hidden=256, intermediate=1024, heads=4, embedding_width=128),
    "distilbert": replace(BERT, layers=6, layer_dropouts=1, token_types=0),
}

# Families whose head stays in fp32 while the rest computes in bf16: whole on every rank, also where ranks
# share the state (engines/kept_in_fp32.py). What others keep so (routers, norms, sinks) is small and not counted.
FP32_HEADS = frozenset({"hy_v4"})

# Intermediate-wide tensors an ungated MLP keeps: the fused kernels keep input and output, GELUs written out in Python
# (gelu_new, gelu_fast) keep every factor, ReLU only its output.
KEPT_BY_ACTIVATION = {"gelu_new": 5, "gelu_fast": 5, "relu": 1, "relu2": 3}

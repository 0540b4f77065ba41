"""Model configs and machines the plan's tests share."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from coremill.hardware.facts import Calibration, Core, Fleet, NodeFacts

GIB = 2**30

_COMMON = {
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 250,
    "max_position_embeddings": 128,
}

# Odd on purpose where families differ: fewer key heads, a head width of its own, biases on and off.
TINY_CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **_COMMON, "num_key_value_heads": 2},
    "llama-biased": {"model_type": "llama", **_COMMON, "attention_bias": True, "mlp_bias": True},
    "llama-tied": {"model_type": "llama", **_COMMON, "tie_word_embeddings": True, "head_dim": 24},
    "smollm3": {"model_type": "smollm3", **_COMMON, "num_key_value_heads": 2, "pad_token_id": 0},
    "smollm3-no-rope": {"model_type": "smollm3", **_COMMON, "num_key_value_heads": 2, "pad_token_id": 0}
    | {"no_rope_layers": [1, 0, 0]},
    "olmo2": {"model_type": "olmo2", **_COMMON, "num_key_value_heads": 2},
    "olmo3": {"model_type": "olmo3", **_COMMON, "num_key_value_heads": 2},
    "granite": {"model_type": "granite", **_COMMON, "num_key_value_heads": 2}
    | {"embedding_multiplier": 12.0, "residual_multiplier": 0.22},
    "gemma3_text": {"model_type": "gemma3_text", **_COMMON, "num_key_value_heads": 2, "head_dim": 24},
    "mistral": {"model_type": "mistral", **_COMMON, "num_key_value_heads": 2},
    "mistral-window": {"model_type": "mistral", **_COMMON, "num_key_value_heads": 2, "sliding_window": 16},
    "mixtral": {
        "model_type": "mixtral",
        **_COMMON,
        "num_key_value_heads": 2,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
    },
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        **_COMMON,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
    },
    "granitemoe": {
        "model_type": "granitemoe",
        **_COMMON,
        "num_key_value_heads": 2,
        "num_local_experts": 3,
        "num_experts_per_tok": 2,
    },
    "olmoe": {"model_type": "olmoe", **_COMMON, "num_key_value_heads": 2, "num_experts": 6, "num_experts_per_tok": 2},
    "qwen2": {"model_type": "qwen2", **_COMMON, "num_key_value_heads": 2},
    "qwen3": {"model_type": "qwen3", **_COMMON, "num_key_value_heads": 2, "head_dim": 24},
    "gemma": {"model_type": "gemma", **_COMMON, "num_key_value_heads": 1, "head_dim": 24},
    "gemma2": {"model_type": "gemma2", **_COMMON, "num_key_value_heads": 2, "head_dim": 24},
    "phi3": {"model_type": "phi3", **_COMMON, "num_key_value_heads": 2, "pad_token_id": 0},
    "gpt2": {"model_type": "gpt2", "n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 250, "n_positions": 128},
    "gpt2-no-dropout": {
        "model_type": "gpt2",
        "n_embd": 64,
        "n_layer": 3,
        "n_head": 4,
        "n_inner": 200,
        "vocab_size": 250,
        "n_positions": 300,
        "attn_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
    },
    "gpt_neox": {"model_type": "gpt_neox", **_COMMON},
    "gpt_neox-serial": {"model_type": "gpt_neox", **_COMMON, "use_parallel_residual": False, "attention_bias": False},
    "phi": {"model_type": "phi", **_COMMON, "num_key_value_heads": 2},
    "phi-head-norms": {"model_type": "phi", **_COMMON, "qk_layernorm": True},
}

_ENCODER = {**_COMMON, "type_vocab_size": 2}
TINY_ENCODERS: dict[str, dict[str, Any]] = {
    "bert": {"model_type": "bert", **_ENCODER},
    "bert-one-type": {"model_type": "bert", **_ENCODER, "type_vocab_size": 1},
    "roberta": {"model_type": "roberta", **_ENCODER, "type_vocab_size": 1},
    "xlm-roberta": {"model_type": "xlm-roberta", **_ENCODER, "type_vocab_size": 1},
    "camembert": {"model_type": "camembert", **_ENCODER, "type_vocab_size": 1},
    "electra": {"model_type": "electra", **_ENCODER, "embedding_size": 24},
    "electra-wide": {"model_type": "electra", **_ENCODER, "embedding_size": 64},
    "distilbert": {
        "model_type": "distilbert",
        "dim": 64,
        "hidden_dim": 176,
        "n_layers": 3,
        "n_heads": 4,
        "vocab_size": 250,
        "max_position_embeddings": 128,
    },
}

BERT_LARGE: dict[str, Any] = {
    "model_type": "bert",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "vocab_size": 30522,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
}

LLAMA_3_8B: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}

LLAMA_50M: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 16384,
    "max_position_embeddings": 2048,
}


def machine(
    *, cores: int = 2, numa_nodes: int = 1, threads_per_core: int = 1, memory_gib: float = 16, isa: tuple[str, ...] = ()
) -> NodeFacts:
    """A machine made up for a test."""
    per_node = -(-cores // numa_nodes)
    return NodeFacts(
        hostname="here",
        architecture="aarch64",
        cpu_model="a CPU",
        cores=tuple(
            Core(
                cpus=tuple(core + cores * thread for thread in range(threads_per_core)),
                numa_node=core // per_node,
                socket=core // per_node,
            )
            for core in range(cores)
        ),
        cpu_quota=None,
        isa=isa,
        memory_total_bytes=int(memory_gib * GIB),
        memory_available_bytes=int(memory_gib * GIB),
        memory_limit_bytes=None,
        interfaces=(),
        allocators=(),
        openmp=None,
        huge_pages=None,
        busy_fraction=0.0,
    )


def calibration(*, fp32: float = 70e9, bf16: float | None = None, threads: int = 2) -> Calibration:
    """Rates made up for a test."""
    return Calibration(
        source="measured",
        origin="made up",
        threads=threads,
        fp32_matmul_flops_per_second=fp32,
        bf16_matmul_flops_per_second=bf16,
        copy_bytes_per_second=20e9,
        base_rss_bytes=440_000_000,
        torch_version="2.13.0",
    )


def fleet(*, nodes: int = 1, node: NodeFacts | None = None, rates: Calibration | None = None) -> Fleet:
    """Machines made up for a test."""
    return Fleet(
        nodes=nodes,
        node=node or machine(),
        calibration=rates or calibration(),
        name="this machine" if nodes == 1 else f"{nodes} x this machine",
        link_bits_per_second=10e9 if nodes > 1 else None,
    )


def with_memory(some_fleet: Fleet, limit_bytes: int) -> Fleet:
    """The same machines under a memory limit."""
    return replace(some_fleet, node=replace(some_fleet.node, memory_limit_bytes=limit_bytes))


def safetensors_bytes(tensors: dict[str, tuple[int, ...]], dtype: str = "BF16", pad: int = 0) -> bytes:
    """A safetensors file without anything in its tensors worth reading."""
    header: dict[str, Any] = {"__metadata__": {"note": "x" * pad}}
    offset = 0
    for name, shape in tensors.items():
        size = 2
        for rows in shape:
            size *= rows
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(offset)


def llama_tensors(*, tied_copy: bool = False) -> dict[str, tuple[int, ...]]:
    tensors: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (250, 64), "model.norm.weight": (64,)}
    for layer in range(3):
        prefix = f"model.layers.{layer}."
        tensors |= {
            prefix + "self_attn.q_proj.weight": (64, 64),
            prefix + "self_attn.k_proj.weight": (32, 64),
            prefix + "self_attn.v_proj.weight": (32, 64),
            prefix + "self_attn.o_proj.weight": (64, 64),
            prefix + "self_attn.rotary_emb.inv_freq": (8,),
            prefix + "mlp.gate_proj.weight": (176, 64),
            prefix + "mlp.up_proj.weight": (176, 64),
            prefix + "mlp.down_proj.weight": (64, 176),
            prefix + "input_layernorm.weight": (64,),
            prefix + "post_attention_layernorm.weight": (64,),
        }
    if tied_copy:
        tensors["lm_head.weight"] = (250, 64)
    return tensors

"""Tiny Hugging Face model folders with random weights, made on the spot for every family, one file or indexed.

    folder = make_model(tmp_path / "m", "llama-tied")                  # model.safetensors
    folder = make_model(tmp_path / "m", "gpt2", indexed=True)          # several files and an index
    make_tokenizer(folder)                                              # a small byte-level BPE beside it

Row counts are odd on purpose (vocabulary 131, widths that 4 ranks cannot divide evenly where the family allows it).
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

VOCABULARY = 131

_ROPE_FAMILY: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "intermediate_size": 50,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": None,
}

# Keyed by the name the tests use; values are what config.json holds.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {**_ROPE_FAMILY, "model_type": "llama", "tie_word_embeddings": False},
    "llama-tied": {**_ROPE_FAMILY, "model_type": "llama", "tie_word_embeddings": True},
    "qwen2": {**_ROPE_FAMILY, "model_type": "qwen2", "tie_word_embeddings": True},
    "mistral": {**_ROPE_FAMILY, "model_type": "mistral", "tie_word_embeddings": False, "sliding_window": 16},
    "gemma": {**_ROPE_FAMILY, "model_type": "gemma", "head_dim": 8, "tie_word_embeddings": True},
    "gemma2": {
        **_ROPE_FAMILY,
        "model_type": "gemma2",
        "head_dim": 8,
        "query_pre_attn_scalar": 8,
        "final_logit_softcapping": 3.0,
        "attn_logit_softcapping": 5.0,
        "sliding_window": 16,
        "tie_word_embeddings": True,
    },
    "gpt2": {
        "model_type": "gpt2",
        "vocab_size": VOCABULARY,
        "n_positions": 64,
        "n_embd": 24,
        "n_layer": 2,
        "n_head": 4,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
    },
    "gpt_neox": {
        "model_type": "gpt_neox",
        "vocab_size": VOCABULARY,
        "hidden_size": 24,
        "intermediate_size": 50,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 0,
    },
    "phi": {
        **_ROPE_FAMILY,
        "model_type": "phi",
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "partial_rotary_factor": 0.5,
        "tie_word_embeddings": False,
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
    },
}

# Experts lie one by one in the files and merged in the module: loading and export go through transformers' converters.
# Five experts on four ranks leave the last rank without rows.
MERGED_FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {
        **FAMILIES["mistral"],
        "model_type": "mixtral",
        "intermediate_size": 48,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
    },
}


# In bf16 transformers keeps this one's router in fp32: `gate.weight`.
FP32_ROUTER_FAMILIES: dict[str, dict[str, Any]] = {
    "ernie4_5_moe": {
        **_ROPE_FAMILY,
        "model_type": "ernie4_5_moe",
        "tie_word_embeddings": False,
        "intermediate_size": 48,
        "moe_intermediate_size": 32,
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_num_shared_experts": 1,
        "moe_layer_start_index": 0,
        "moe_layer_end_index": 1,
        "moe_layer_interval": 1,
        "use_bias": False,
    },
    # This one's head too.
    "hy_v4": {
        **_ROPE_FAMILY,
        "model_type": "hy_v4",
        "tie_word_embeddings": False,
        "intermediate_size": 48,
        "moe_intermediate_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "index_topk": 64,
        "index_head_dim": 16,
        "index_n_heads": 2,
        "mlp_layer_types": ["dense", "sparse"],
        "indexer_types": ["full", "full"],
    },
}


def tiny_config(family: str, **changes: Any) -> dict[str, Any]:
    """The config of a family, as config.json would hold it."""
    return {**(FAMILIES | MERGED_FAMILIES | FP32_ROUTER_FAMILIES)[family], **changes}


def make_config_folder(folder: Path, family: str, **changes: Any) -> Path:
    """A folder with config.json only."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(tiny_config(family, **changes)))
    return folder


def make_model(
    folder: Path,
    family: str,
    *,
    indexed: bool = False,
    dtype: str = "float32",
    shard_bytes: int = 20_000,
    seed: int = 0,
    **changes: Any,
) -> Path:
    """A folder as `save_pretrained` writes it; norms and biases are random too, so that none can be mixed up."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    make_config_folder(folder, family, **changes)
    config = AutoConfig.from_pretrained(folder)
    generator = torch.Generator().manual_seed(zlib.crc32(f"{family}/{seed}".encode()))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size=shard_bytes if indexed else "5GB")
    return folder


def make_tokenizer(folder: Path, vocabulary: int = VOCABULARY) -> Path:
    """A character-level tokenizer in the form of `tokenizers`, with an end token of id 0; loads with AutoTokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder.mkdir(parents=True, exist_ok=True)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())[: vocabulary - 1]
    words = {"<|end|>": 0, **{letter: index for index, letter in enumerate(letters, 1)}}
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[], unk_token="<|end|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", bos_token="<|end|>")
    wrapped.save_pretrained(folder)
    return folder

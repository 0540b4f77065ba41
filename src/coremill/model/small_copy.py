"""A model of the same kind, so small that it runs in a moment: narrow, few layers, yet every kind of layer it has.

For finding out how a model behaves before its weights are loaded. Configs have no common form, but their keys have
common names: widths go by those, and what a family needs beside them is listed. How many layers are needed is seen
from the layers themselves.
"""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.utils import logging

VOCABULARY = 128
SPECIAL_TOKENS = 8  # at the end of the vocabulary: what a config names by ids beyond it
WIDTH = 64
HEADS = 4
WINDOW = 8

# By the name of a key, the first that fits: a number is made so small at most, never larger.
_SMALL = [
    (re.compile(pattern), size)
    for pattern, size in (
        (r"(task_)?type_vocab_size", 2),
        (r".*vocab_size(_.*)?|n_words|codebook_size|.*_group_vocab|ngram_vocab_size_base", VOCABULARY),
        (r"hidden_size_per_layer_input|laurel_rank|adapter_rank|gated_norm_rank|hc_lowrank", 8),
        (r"[a-z]+_lora_rank|router_hidden_size", 32),
        (r"mamba_(n|num)_heads|n_mamba_heads", 8),
        (r".*n_heads?|.*num_heads|.*attention_heads(_per_layer)?", HEADS),
        (r".*head_?dim|.*head_size|.*d_head|dim_head|kv_channels|d_kv|.*state_size|.*d_state", WIDTH // HEADS),
        (r".*n_?groups", 2),
        (r"rotary_dim", 8),
        (r".*time_step_rank|.*dt_rank", 4),
        (r"mamba_d_ssm", 2 * WIDTH),
        (r".*intermediate_size.*|.*ffn_dim|.*ffn_hidden_size|d_ff|dff|dim_ff|d_inner|n_inner|feed_forward_size", 80),
        (r"n_embd|d_model|emb_dim|embed_dim|embedding_dim|lru_width|word_embed_proj_dim|.*embedding_size", WIDTH),
        (r".*hidden_size(_global)?|mlp_dim|.*_output_dim|.*_input_dim|input_size", WIDTH),
        (r"num_experts_per_tok(en)?|moe_k|moe_topk|moe_top_k|top_k_experts", 2),
        (r".*(num|n)_(routed_|local_)?experts|zero_expert_num", 4),
        (r"n_group|num_expert_group|topk_group", 1),
        (r".*(position|positions|position_embeddings)|max_seq_len|context_length|n_ctx", 512),
        (r".*chunk_size", 8),
    )
]
_KEY_VALUE_HEADS = re.compile(r".*(key_value|kv)_heads(_per_layer)?|n_head_kv|kv_n_heads|num_query_groups")
_ALL_HEADS = re.compile(r"(num_attention|n|decoder_attention)_heads?")
# How far a token looks back, or how many it chooses from all before it.
_WINDOWS = re.compile(
    r"sliding_window(_size)?|window_size|attention_window_size|local_attention|attention_chunk_size|index_topk"
    r"|indexer_budget"
)
_LAYERS = re.compile(
    r"(num_)?(decoder|encoder)_layers|num_hidden_layers|num_layers|n_layers?|num_blocks|num_layers_per_stack|depth"
)
_PLACES_OF_LAYERS = re.compile(r".*(idxs|indices|indexes|layer_ids|_layers)")
_TOKENS = re.compile(r".*token_(id|index|ids)")
_CHANCE = re.compile(r".*(dropout|pdrop|layerdrop|jitter|drop_path)(_.*)?")
_LABELS = ("id2label", "label2id")

# What a family needs beside the common names, so that its widths fit each other.
_NEEDS: dict[str, dict[str, Any]] = {
    "falcon_h1": {"mamba_d_head": 16},
    # Sparse ones, dense ones, and ones that take keys and values over, of both kinds of attention.
    "gemma3n_text": {
        "num_hidden_layers": 8,
        "num_kv_shared_layers": 4,
        "intermediate_size": 8 * [WIDTH],
        "layer_types": 4 * ["sliding_attention", "full_attention"],
        "activation_sparsity_pattern": [0.95, 0.95, *6 * [0.0]],
    },
    "longcat_flash": {"head_dim": 16, "qk_head_dim": 32},
    "mamba2": {"num_heads": 8},
    "qwen4_exp_text": {"indexer_budget": WINDOW, "indexer_compress_ratio": 2},
    "zamba": {"attention_hidden_size": 2 * WIDTH, "attention_head_dim": 2 * WIDTH // HEADS},
    "zamba2": {"attention_hidden_size": 2 * WIDTH, "attention_head_dim": 2 * WIDTH // HEADS},
}


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """While a small copy is made and run: what transformers says of it is about no model that the user has."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)


@quiet_transformers()
def small_copy(model: PreTrainedModel, *, row_tokens: int, seed: int = 0) -> PreTrainedModel:
    """A small model of the same class, in fp32 with random weights and no dropout, ready to train.

    `row_tokens`: how long rows are that the model is to see. Windows that end within them become short ones."""
    model_class: Any = type(model)
    attention = str(model.config._attn_implementation)
    config = small_config(model.config, model_class, row_tokens=row_tokens)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        small: PreTrainedModel = model_class._from_config(config, dtype=torch.float32, attn_implementation=attention)
        with torch.no_grad():
            for parameter in small.parameters():  # what starts as zeros or ones would hide what it does
                parameter.add_(torch.randn(parameter.shape), alpha=0.1)
    small.config.use_cache = False
    return small.train()


def small_config(config: PretrainedConfig, model_class: Any, *, row_tokens: int) -> PretrainedConfig:
    """The config of a small model, with the fewest layers that still have every kind."""
    narrow = _narrow(config.to_dict(), row_tokens) | _NEEDS.get(config.model_type, {})
    config_class: Any = type(config)
    whole: PretrainedConfig = config_class.from_dict(narrow)
    kinds = _kinds_of_layers(whole, model_class)
    most = _most_layers(narrow)
    for count in (*range(2, 9), 12, 16, 24, 32, 48):
        if count >= most:
            break
        with contextlib.suppress(Exception):  # not every number of layers makes a model of this family
            fewer: PretrainedConfig = config_class.from_dict(_with_layers(narrow, count))
            if _kinds_of_layers(fewer, model_class) == kinds:
                return fewer
    return whole


def _kinds_of_layers(config: PretrainedConfig, model_class: Any) -> set[Any]:
    """What the layers of each list in a model are made of, and the settings each was given; places do not count."""
    config_class: Any = type(config)
    with no_init_weights():
        # Building a model writes into its config.
        copy: PretrainedConfig = config_class.from_dict(config.to_dict())
        model: nn.Module = model_class._from_config(copy, dtype=torch.float32)
    lists = {name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    outer = [name for name in lists if not any(name.startswith(f"{other}.") for other in lists)]
    return {(name, _kind(layer)) for name in outer for layer in lists[name]}


def _kind(layer: nn.Module) -> Any:
    return tuple((name, type(part).__name__, frozenset(_settings(part))) for name, part in layer.named_modules())


def _settings(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, value in vars(module).items():
        if name.startswith("_") or _LAYERS.fullmatch(name) or re.search(r"idx|index|layer_number|layer_id$|seed", name):
            continue
        if value is None or isinstance(value, str | bool | int):
            yield name, value
        elif isinstance(value, float):
            yield name, value != 0.0  # DiffLlama's lambda is another one in each layer; that there is none would count


def _narrow(document: Mapping[str, Any], row_tokens: int) -> dict[str, Any]:
    heads = next((document[key] for key in document if key not in _LABELS and _ALL_HEADS.fullmatch(key)), None)

    def smaller(key: str, value: Any) -> Any:
        if isinstance(value, Mapping):
            return _plain_rope(value) if "rope" in key else _narrow(value, row_tokens)
        if isinstance(value, list | tuple):
            return [smaller(key, each) for each in value]
        if isinstance(value, float) and _CHANCE.fullmatch(key):
            return 0.0
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            return value
        if _TOKENS.fullmatch(key):
            ordinary = VOCABULARY - SPECIAL_TOKENS
            return value if value < ordinary else ordinary + value % SPECIAL_TOKENS
        if _WINDOWS.fullmatch(key):
            return min(value, WINDOW) if value < row_tokens else value
        if _KEY_VALUE_HEADS.fullmatch(key):
            return min(value, HEADS if value == heads else 2)
        return min([value, *[size for pattern, size in _SMALL if pattern.fullmatch(key)][:1]])

    return {key: smaller(key, value) for key, value in document.items() if key not in _LABELS}


def _plain_rope(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Factors for each pair of a head's numbers would have to fit the narrower head; frequencies mix no tokens."""
    if any(isinstance(value, list) for value in rope.values()):
        return {key: value for key, value in rope.items() if not isinstance(value, list)} | {"rope_type": "default"}
    return {key: _plain_rope(value) if isinstance(value, Mapping) else value for key, value in rope.items()}


def _most_layers(document: Mapping[str, Any]) -> int:
    inside = [_most_layers(value) for value in document.values() if isinstance(value, Mapping)]
    return max([0, *_counts_of_layers(document), *inside])


def _counts_of_layers(document: Mapping[str, Any]) -> set[int]:
    return {value for key, value in document.items() if _LAYERS.fullmatch(str(key)) and isinstance(value, int)}


def _with_layers(document: Mapping[str, Any], count: int) -> dict[str, Any]:
    lengths = _counts_of_layers(document)

    def cut(key: str, value: Any) -> Any:
        if isinstance(value, Mapping):
            kept = {place: each for place, each in value.items() if not str(place).isdigit() or int(place) < count}
            return _with_layers(kept, count)
        if _LAYERS.fullmatch(key) and isinstance(value, int):
            return min(value, count)
        if isinstance(value, list) and len(value) in lengths:
            return value[:count]
        if isinstance(value, list) and _PLACES_OF_LAYERS.fullmatch(key):
            return [each for each in value if not isinstance(each, int) or each < count]
        return value

    return {key: cut(key, value) for key, value in document.items()}

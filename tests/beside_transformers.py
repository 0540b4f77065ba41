"""On a rank: a small model of a family, three steps of it by transformers alone, and the same three by coremill.

benchmarks/families.py makes a row of it for every family.
"""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path
from typing import Any

STEPS, ROWS, LENGTH = 3, 4, 24
# Of AdamW. Epsilon above the rounding of gradients: what is zero but for that must not become a whole step.
LEARNING_RATE, EPSILON = 1e-3, 1e-4
EOS = 9  # an ordinary token: what it means is the tokenizer's business
LOSS_TOLERANCE, LOGITS_TOLERANCE = 1e-5, 1e-4

# What transformers' default config of a family lacks to be a whole model, or to be one that predicts the next token.
DECODER = {"is_decoder": True}
MIXTURE = {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
INDEXER = {
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 256,
    "indexer_budget": 2048,
    "indexer_compress_ratio": 4,
}
STARTS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("bert", "bert-generation", "camembert", "data2vec-text", "electra", "ernie"), DECODER),
    "big_bird": {**DECODER, "attention_type": "original_full"},
    **dict.fromkeys(("megatron-bert", "rembert", "roberta", "roberta-prelayernorm", "roc_bert"), DECODER),
    **dict.fromkeys(("roformer", "xlm-roberta", "xlm-roberta-xl"), DECODER),
    "xmod": {**DECODER, "default_language": "en_XX"},
    "xlm": {"causal": True},
    "xlnet": {"attn_type": "uni"},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": MIXTURE,
    "gemma4_assistant": {"text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0}},
    "qwen4_exp": {"text_config": INDEXER},
    "qwen4_exp_text": INDEXER,
    **dict.fromkeys(
        ("hunyuan_v1_dense", "hunyuan_v1_moe", "ministral", "nemotron"), {"head_dim": 128, "num_key_value_heads": 8}
    ),
}


def make_and_train_by_transformers(world: Any, *, family: str, folder: str) -> dict[str, Any]:
    """Leave a small model in the folder, and beside it losses and last logits of three steps by transformers alone."""
    import torch
    import transformers
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    from coremill.config.schema import ModelSection, RunConfig, TrainSection
    from coremill.data.packed_batches import make_loader
    from coremill.errors import InputError
    from coremill.model.build import build_on_meta
    from coremill.model.documents import require_documents_apart
    from coremill.model.small_copy import SPECIAL_TOKENS, VOCABULARY, small_copy
    from coremill.model.source import resolve_model
    from coremill.tasks.causal_lm import CausalLm
    from coremill.train.schedule import learning_rate_at
    from training import make_packed

    del world
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    place = Path(folder)
    config = CONFIG_MAPPING[family](**STARTS.get(family, {}))
    (place / "default").mkdir()
    (place / "default/config.json").write_text(config.to_json_string(use_diff=False))
    try:
        section = ModelSection(name=str(place / "default"), weights="random")
        with torch.device("meta"):  # buffers too: these models are large
            default = build_on_meta(resolve_model(section, CausalLm(RunConfig()), cache=place / "cache"))
    except InputError as error:
        return {"outcome": "refused", "reason": _words(error)}
    small = small_copy(default, row_tokens=sys.maxsize)
    small.save_pretrained(place / "model")
    if small.config.model_type != config.model_type:  # the text part of a larger model, whose config folders have
        (place / "model/config.json").write_text(json.dumps(_with_part(config.to_dict(), small.config.to_dict())))
    if _looks_ahead(small):
        return {"outcome": "fails", "reason": "it sees the tokens it is to predict"}
    # Without the last tokens of the vocabulary, some of which mean pictures and sounds.
    data = make_packed(
        place / "data", rows=ROWS * STEPS, length=LENGTH, vocabulary=VOCABULARY - SPECIAL_TOKENS, first_token=EOS
    )
    (place / "data.json").write_text(json.dumps(data.to_json()))
    model = AutoModelForCausalLM.from_pretrained(place / "model", dtype=torch.float32).train()
    settings = TrainSection(steps=STEPS, learning_rate=LEARNING_RATE, warmup_steps=2)
    loader = make_loader(
        data, seed=5, rows_per_step=ROWS, rank=0, world_size=1, micro_batch_rows=ROWS, accumulation_steps=1
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, eps=EPSILON, weight_decay=0.0)
    losses = []
    for step in range(1, STEPS + 1):
        (batch,) = loader.next_step().batches
        labels = _labels_for(model, batch.input_ids, batch.labels)
        loss = model(input_ids=batch.input_ids, labels=labels, use_cache=False).loss
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate_at(step, STEPS, settings)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    torch.save({"losses": losses, "logits": _logits(model)}, place / "reference.pt")

    try:
        return {"outcome": "made", "documents": require_documents_apart(model, row_tokens=sys.maxsize).value}
    except InputError as error:
        is_seen = "does not keep" in error.what  # by its neighbour: the usual reason
        return {"outcome": "made", "documents": "refused" if is_seen else f"refused: {error.why}"}


def train_by_coremill(world: Any, *, folder: str, engine: str, through_memory: bool | None = None) -> dict[str, Any]:
    """The same three steps by coremill; its export is read by transformers."""
    import torch
    import transformers
    from transformers import AutoModelForCausalLM

    from coremill.errors import InputError
    from training import train_here

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    place = Path(folder)
    export = place / f"export-{engine}-{through_memory}"
    reference = torch.load(place / "reference.pt", weights_only=True)
    try:
        found = train_here(
            world,
            model_folder=str(place / "model"),
            data=json.loads((place / "data.json").read_text()),
            engine=engine,
            through_memory=through_memory,
            rows_per_step=ROWS,
            micro_batch_rows=ROWS // world.size,
            steps=STEPS,
            learning_rate=LEARNING_RATE,
            weight_decay=0.0,
            adam_epsilon=EPSILON,
            clip_norm=None,
            export_to=str(export),
        )
    except InputError as error:
        return {"outcome": "refused", "reason": _words(error)}
    outcome = {"outcome": "exact", "layers": found["layers"], "loss_path": found["loss_path"]}
    if world.rank != 0:
        return outcome
    pairs = list(zip(found["losses"], reference["losses"], strict=True))
    if any(not abs(ours - theirs) <= LOSS_TOLERANCE * max(1.0, abs(theirs)) for ours, theirs in pairs):
        shown = ", ".join(f"{ours:.6f} ({theirs:.6f})" for ours, theirs in pairs)
        return outcome | {"outcome": "fails", "reason": f"losses {shown} in transformers"}
    reloaded, info = AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32, output_loading_info=True)
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info[kind]:
            return outcome | {"outcome": "fails", "reason": f"export: {kind} {sorted(info[kind])[:3]}"}
    difference = float((_logits(reloaded) - reference["logits"]).abs().max() / reference["logits"].abs().max())
    if not difference <= LOGITS_TOLERANCE:
        return outcome | {"outcome": "fails", "reason": f"the export's logits are off by {difference:.1e}"}
    return outcome


def _with_part(whole: dict[str, Any], part: dict[str, Any]) -> dict[str, Any]:
    """A config with one of its parts replaced."""
    places = [name for name, each in whole.items() if isinstance(each, dict) and "model_type" in each]
    return whole | {name: part for name in places if whole[name]["model_type"] == part["model_type"]}


def _labels_for(model: Any, token_ids: Any, labels: Any) -> Any:
    """As the family's own loss wants them: the decoders of encoder-decoder families take the next tokens, ready."""
    import torch

    with torch.no_grad():
        output = model(input_ids=token_ids, labels=labels, use_cache=False)
        as_given = torch.nn.functional.cross_entropy(output.logits.flatten(0, 1), labels.flatten())
    if not torch.isclose(output.loss, as_given, rtol=1e-6):
        return labels
    following = torch.full_like(labels, -100)
    following[:, :-1] = labels[:, 1:]
    return following


def _logits(model: Any, last_token: int | None = None) -> Any:
    import torch

    tokens = torch.randint(EOS, 80, (2, LENGTH), generator=torch.Generator().manual_seed(2))
    if last_token is not None:
        tokens[:, -1] = last_token
    with torch.no_grad():
        return model.eval()(input_ids=tokens, use_cache=False).logits


def _looks_ahead(model: Any) -> bool:
    """Whether the last token changes logits before it, beyond rounding (mixtures sort tokens)."""
    one, other = (_logits(model, last_token)[:, :-1] for last_token in (EOS, EOS + 1))
    return bool((one - other).abs().max() > 1e-4 * one.abs().max())


def _words(error: Any) -> str:
    return textwrap.shorten(str(error.why or error.what), 160)

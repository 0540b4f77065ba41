"""Counts and kept activations of encoders with the heads of question answering and classification, held to the real
models."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
)

from coremill.config.schema import LoraSection
from coremill.model.fused_layers import fuse_layers
from coremill.model.lora import add_adapters, fuse_adapters
from coremill.model.parameter_list import named_parameters
from coremill.model.quick_dropout import quicken_dropout
from coremill.plan.activations import backward_bytes, layer_bytes_per_token
from coremill.plan.activations import kept_bytes as planned_bytes
from coremill.plan.adapters import adapted_by, with_adapters
from coremill.plan.attention import EAGER_ONLY, EAGER_ONLY_ENCODERS
from coremill.plan.card import ModelCard, read_card
from coremill.plan.headers import TensorHeader
from coremill.plan.types import Arrangement
from unit.plan.shapes import TINY_CONFIGS, TINY_ENCODERS
from unit.plan.test_against_torch import arrangement, config_of

ROWS, LENGTH = 3, 40
ANSWERS, CLASSES = "AutoModelForQuestionAnswering", "AutoModelForSequenceClassification"
NO_DROPOUT, HIDDEN_ONLY, ATTENTION_ONLY, BOTH = (0.0, 0.0), (0.1, 0.0), (0.0, 0.1), (0.1, 0.1)


def with_changes(values: dict[str, Any], layers: int, dropouts: tuple[float, float]) -> dict[str, Any]:
    """So many layers, so much dropout of hidden states and of attention, in the family's own words."""
    hidden, attention = dropouts
    if values["model_type"] == "distilbert":
        return {**values, "n_layers": layers, "dropout": hidden, "attention_dropout": attention, "qa_dropout": hidden}
    return {
        **values,
        "num_hidden_layers": layers,
        "hidden_dropout_prob": hidden,
        "attention_probs_dropout_prob": attention,
    }


def kept_bytes(
    values: dict[str, Any],
    *,
    attention: str,
    dtype: torch.dtype,
    padded: bool,
    checkpointing: bool = False,
    lora: LoraSection | None = None,
) -> int:
    """What autograd really keeps of one forward pass, parameters aside."""
    auto = getattr(transformers, ANSWERS)
    model = auto.from_config(config_of(values), attn_implementation=attention).to(dtype).train()
    if lora is not None:
        add_adapters(model, lora)  # which are on meta
        for module in model.modules():
            for name, parameter in list(module._parameters.items()):
                if parameter is not None and parameter.is_meta:
                    zeros = torch.zeros(parameter.shape)
                    module._parameters[name] = torch.nn.Parameter(zeros, requires_grad=parameter.requires_grad)
        fuse_layers(model)
        fuse_adapters(model)
    quicken_dropout(model)
    if checkpointing:
        model.config.use_cache = False
        model.gradient_checkpointing_enable({"use_reentrant": False})
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept.setdefault(storage.data_ptr(), storage)
        return tensor

    inputs = {"input_ids": torch.randint(5, 200, (ROWS, LENGTH))}
    if padded:
        inputs["attention_mask"] = torch.ones(ROWS, LENGTH, dtype=torch.bool)
        inputs["attention_mask"][0, LENGTH // 2 :] = False
    with (
        torch.backends.mkldnn.flags(enabled=dtype == torch.float32),
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
    ):
        model(**inputs)
    return sum(storage.nbytes() for storage in kept.values())


def one(dtype: str, attention: str, *, padded: bool = True, checkpointing: bool = False) -> Arrangement:
    return replace(
        arrangement(dtype, attention),
        sequence_length=LENGTH,
        micro_batch_rows=ROWS,
        vocabulary_logits=False,
        rows_differ=padded,
        activation_checkpointing=checkpointing,
    )


def card_of(values: dict[str, Any], model_class: str = ANSWERS, **more: Any) -> ModelCard:
    return read_card(config=values, model_class=model_class, **more)


@pytest.mark.parametrize("model_class", [ANSWERS, CLASSES])
@pytest.mark.parametrize("name", TINY_ENCODERS)
def test_counts_from_the_config_alone_are_those_of_the_model(name: str, model_class: str) -> None:
    values = TINY_ENCODERS[name]
    with torch.device("meta"):
        model = getattr(transformers, model_class).from_config(config_of(values))
    card = card_of(values, model_class)
    assert card.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert card.vocabulary_rows == model.get_input_embeddings().weight.shape[0]
    layers = next(module for module in model.modules() if isinstance(module, torch.nn.ModuleList))
    assert card.layer_parameters == tuple(sum(p.numel() for p in layer.parameters()) for layer in layers)
    assert card.matmul_parameters == sum(p.numel() for layer in layers for p in layer.parameters() if p.dim() == 2)
    assert sum(card.groups) == card.parameters and not card.tied and not card.is_causal
    assert card.embedding_parameters == sum(
        module.weight.numel() for module in model.modules() if isinstance(module, torch.nn.Embedding)
    )


@pytest.mark.parametrize("labels", [1, 5])
def test_labels_of_the_config_and_of_the_run_are_counted(labels: int) -> None:
    for name in ("bert", "roberta"):
        values = {**TINY_ENCODERS[name], "id2label": {str(label): f"L{label}" for label in range(3)}}
        with torch.device("meta"):
            model = getattr(transformers, CLASSES).from_config(config_of({**TINY_ENCODERS[name], "num_labels": labels}))
        assert card_of(values, CLASSES, labels=labels).parameters == sum(p.numel() for p in model.parameters())
        assert card_of(values, CLASSES) == card_of(values, CLASSES, labels=3)


def test_defaults_of_left_out_keys_are_those_of_transformers() -> None:
    for family in sorted({values["model_type"] for values in TINY_ENCODERS.values()}):
        with torch.device("meta"):
            model = getattr(transformers, CLASSES).from_config(CONFIG_MAPPING[family]())
        card = card_of({"model_type": family}, CLASSES)
        assert card.parameters == sum(p.numel() for p in model.parameters()), family
        assert card.block.attention_dropout and card.block.residual_dropouts, family


def test_positions_behind_the_padding_are_not_counted_as_places() -> None:
    """RoBERTa's table has two rows more than a row may have tokens."""
    values = {**TINY_ENCODERS["roberta"], "max_position_embeddings": 514, "pad_token_id": 1}
    assert card_of(values).max_positions == 512
    model = getattr(transformers, ANSWERS).from_config(config_of(values)).eval()
    model(input_ids=torch.full((1, 512), 7))
    with pytest.raises((IndexError, RuntimeError)):
        model(input_ids=torch.full((1, 513), 7))


def test_a_decoder_with_the_head_of_classification() -> None:
    for name in ("llama-tied", "gpt2"):
        values = {**TINY_CONFIGS[name], "num_labels": 3, "pad_token_id": 0}
        with torch.device("meta"):
            model = getattr(transformers, CLASSES).from_config(config_of(values))
        card = card_of(values, CLASSES)
        assert card.parameters == sum(p.numel() for p in model.parameters())
        assert card.is_causal and not card.tied and not card.has_vocabulary_head


def test_heads_that_files_hold_for_something_else_are_not_counted() -> None:
    """BERT as it was pretrained: a head of words that a tied table makes, a pooler, and next sentences."""
    values = TINY_ENCODERS["bert"]
    with torch.device("meta"):
        saved = transformers.BertForPreTraining(config_of(values)).state_dict()
    headers = {name: TensorHeader(name, "F32", tuple(each.shape), "one", 0, 8) for name, each in saved.items()}
    card = card_of(values, headers=headers)
    assert replace(card, disk_dtype=None, disk_bytes=0) == card_of(values)
    assert card.disk_dtype == "F32"


@pytest.mark.parametrize("family", ["mpnet", "deberta-v2", "ernie"])
def test_encoders_that_are_not_known_are_counted_by_their_files(family: str) -> None:
    values = {**TINY_ENCODERS["bert"], "model_type": family}
    with torch.device("meta"):
        model = getattr(transformers, ANSWERS).from_config(config_of(values))
    headers = {
        name: TensorHeader(name, "F32", tuple(each.shape), "one", 0, 0) for name, each in model.state_dict().items()
    }
    card = card_of(values, headers=headers)
    assert card.parameters == sum(p.numel() for p in model.parameters())
    assert card.estimated_numbers is not None and card.layers == 3 and not card.is_causal
    two, first = (
        kept_bytes(with_changes(values, layers, NO_DROPOUT), attention="eager", dtype=torch.float32, padded=True)
        for layers in (2, 1)
    )
    planned = layer_bytes_per_token(card, one("fp32", "eager")) * ROWS * LENGTH
    if family != "deberta-v2":  # whose attention to places keeps matrices of its own
        assert 1 < planned / (two - first) < 2


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("dropouts", [NO_DROPOUT, HIDDEN_ONLY, ATTENTION_ONLY, BOTH])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["bert", "roberta", "distilbert", "electra"])
def test_a_pass_keeps_what_the_plan_says(
    name: str, dtype: str, attention: str, dropouts: tuple[float, float], padded: bool
) -> None:
    """A layer to half a percent, all of it to three."""
    torch_dtype = torch.float32 if dtype == "fp32" else torch.bfloat16
    values = [with_changes(TINY_ENCODERS[name], layers, dropouts) for layers in (3, 2)]
    measured = [kept_bytes(each, attention=attention, dtype=torch_dtype, padded=padded) for each in values]
    planned = [planned_bytes(card_of(each), one(dtype, attention, padded=padded)) for each in values]
    assert planned[0] - planned[1] == pytest.approx(measured[0] - measured[1], rel=0.005)
    assert planned[0] == pytest.approx(measured[0], rel=0.03)


@pytest.mark.parametrize("dropouts", [NO_DROPOUT, BOTH])
@pytest.mark.parametrize("name", ["bert", "distilbert"])
def test_layers_that_are_computed_again_keep_their_inputs(name: str, dropouts: tuple[float, float]) -> None:
    values = [with_changes(TINY_ENCODERS[name], layers, dropouts) for layers in (3, 2)]
    measured = [
        kept_bytes(each, attention="sdpa", dtype=torch.float32, padded=True, checkpointing=True) for each in values
    ]
    again = one("fp32", "sdpa", checkpointing=True)
    planned = [planned_bytes(card_of(each), again) for each in values]
    assert planned[0] - planned[1] == measured[0] - measured[1]
    assert planned[0] == pytest.approx(measured[0], rel=0.1)  # of ends there is little
    assert backward_bytes(card_of(values[0]), again) > backward_bytes(card_of(values[0]), one("fp32", "sdpa"))


@pytest.mark.parametrize(
    ("name", "section"),
    [
        ("bert", {}),
        ("bert", {"target_modules": ["query", "value"]}),
        ("bert", {"target_modules": ["intermediate.dense"]}),
        ("bert", {"dropout": 0.1}),
        ("distilbert", {}),
        ("distilbert", {"target_modules": ["q_lin", "v_lin"]}),
    ],
)
def test_layers_with_adapters_keep_what_the_plan_says(name: str, section: dict[str, Any]) -> None:
    lora, planned, measured = LoraSection.model_validate({"rank": 4, **section}), [], []
    for layers in (3, 2):
        values = with_changes(TINY_ENCODERS[name], layers, HIDDEN_ONLY)
        measured.append(kept_bytes(values, attention="sdpa", dtype=torch.float32, padded=True, lora=lora))
        with torch.device("meta"):
            parameters = named_parameters(getattr(transformers, ANSWERS).from_config(config_of(values)))
        card = with_adapters(card_of(values), parameters, adapted_by(parameters, lora))
        planned.append(planned_bytes(card, one("fp32", "sdpa")))
    assert 0.995 * (measured[0] - measured[1]) <= planned[0] - planned[1] <= 1.06 * (measured[0] - measured[1])


def test_encoders_without_sdpa_are_those_of_transformers() -> None:
    classes = {ANSWERS: MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES}
    classes[CLASSES] = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
    found = set()
    for model_class, families in classes.items():
        for family in families:
            model = getattr(transformers, model_class)._model_mapping[CONFIG_MAPPING[family]]
            if not getattr(model, "_supports_sdpa", False):
                found.add(family)
    assert found - EAGER_ONLY == EAGER_ONLY_ENCODERS

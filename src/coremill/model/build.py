"""The module without its weights: parameters on the meta device, buffers real, and where its layers are.

Nothing here knows a model family. A buffer that is not in the checkpoint (rotary frequencies, causal masks) keeps the
value its constructor gave it, so it is right; a parameter takes no memory until an engine has placed it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import AutoConfig, PreTrainedModel
from transformers.core_model_loading import build_glob_alternation
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.initialization import no_init_weights

from coremill.errors import InputError
from coremill.hardware.probe import cache_folder, environment_snapshot
from coremill.model.config_changes import change_config
from coremill.model.slices import model_name
from coremill.model.source import ModelFolder
from coremill.plan.types import Choice
from coremill.remote_code import TRUST_ADVICE, checked_copy

# What a config that does not make sense leads to, depending on where it is noticed.
CONFIG_ERRORS = (
    ValueError,
    TypeError,
    KeyError,
    AttributeError,
    ImportError,
    ZeroDivisionError,
    RuntimeError,
    StrictDataclassError,
)


# What an auto class makes, in words.
_KINDS = {
    "AutoModelForCausalLM": "a causal language model",
    "AutoModelForQuestionAnswering": "a question-answering model",
    "AutoModelForSequenceClassification": "a classifier",
}


@dataclass(frozen=True)
class LayerMap:
    """The parts of a model that engines treat apart."""

    layers: list[nn.Module]  # in order
    layers_name: str  # where the model keeps them, as in model.layers
    embedding: nn.Module
    head: nn.Module
    tied: bool  # embedding and head share one weight
    other: tuple[str, ...]  # parameters outside of all of these: final norm, position embedding


def build_on_meta(source: ModelFolder, *, attention: str = "sdpa") -> PreTrainedModel:
    """The model of a folder in fp32: parameters on meta, buffers on the CPU, tied weights one parameter.

    Where a model has no sdpa form (attention with a soft cap, for one) it gets eager attention; `attention_of` says so.
    """
    # The folder as it is, or, where its own code is to be run, a copy with exactly the code that was pinned.
    trusted = source.code_sha256 is not None
    folder = source.folder if source.code_sha256 is None else code_of(source)
    config = _read_config(source, folder, trusted=trusted)
    try:
        change_config(config, source)
        if attention == "sdpa" and not _sdpa_serves(config, folder, source.model_class, trusted=trusted):
            attention = "eager"
        with no_init_weights(), _parameters_on_meta():
            model: PreTrainedModel = getattr(transformers, source.model_class).from_config(
                config, dtype=torch.float32, attn_implementation=attention, trust_remote_code=trusted
            )
    except CONFIG_ERRORS as error:
        raise _cannot_build(source, error) from error
    model.tie_weights()
    model.config.use_cache = False
    model.train()
    return model


def code_of(source: ModelFolder) -> Path:
    """A copy of the folder with the code that was checked, for this process."""
    assert source.code_sha256 is not None
    return checked_copy(source.folder.absolute(), source.code_sha256, cache_folder(environment_snapshot()).absolute())


def attention_of(model: PreTrainedModel, asked: str) -> Choice[str]:
    """The attention implementation the model runs with, and why it is another one than was asked for."""
    used = str(model.config._attn_implementation)
    if used == asked:
        return Choice(used, f"model.attention is {asked}")
    return Choice(used, f"{type(model).__name__.removeprefix('FSDP')} has no {asked} form")


def names_kept_in_fp32(model: nn.Module, dtype: torch.dtype) -> set[str]:
    """Parameters that transformers leaves in fp32 when it loads the model in another dtype, by its own plan for that.

    In bf16 these are the strict ones; `_keep_in_fp32_modules` alone is about fp16. Of a parameter with several names (a
    head that is tied to the lookup) the first decides: the one it is loaded by."""
    patterns = model._get_dtype_plan(dtype) if isinstance(model, PreTrainedModel) else {}
    if not patterns:
        return set()
    kept, *_ = build_glob_alternation(list(patterns))
    loaded_as: dict[nn.Parameter, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        loaded_as.setdefault(parameter, model_name(name))
    names = model.named_parameters(remove_duplicate=False)
    return {model_name(name) for name, parameter in names if kept.search(loaded_as[parameter])}


def find_layers(model: nn.Module) -> LayerMap:
    """The layers (the heaviest list of modules), and the embedding and head the model itself names."""
    lists = {name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    weights = {name: sum(parameter.numel() for parameter in module.parameters()) for name, module in lists.items()}
    embedding = _part(model, "get_input_embeddings")
    head = _part(model, "get_output_embeddings")
    if head is None:
        head = _behind_trunk(model)
    if not any(weights.values()):
        raise parts_not_found(model, "no list of layers")
    if embedding is None:
        raise parts_not_found(model, "no input embedding")
    if head is None:
        raise parts_not_found(model, "no output head")
    layers_name = max(weights, key=weights.__getitem__)
    layers = lists[layers_name]
    inside = {id(parameter) for part in (layers, embedding, head) for parameter in part.parameters()}
    return LayerMap(
        layers=list(layers),
        layers_name=layers_name,
        embedding=embedding,
        head=head,
        tied=getattr(embedding, "weight", None) is getattr(head, "weight", head),
        other=tuple(name for name, parameter in model.named_parameters() if id(parameter) not in inside),
    )


def has_plain_lookup(embedding: nn.Module) -> TypeGuard[nn.Embedding]:
    """Whether an embedding does nothing but look rows up (Gemma scales them)."""
    if type(embedding) is not nn.Embedding:
        return False
    return embedding.max_norm is None and not embedding.sparse and not embedding.scale_grad_by_freq


def _read_config(source: ModelFolder, folder: Path, *, trusted: bool) -> Any:
    """The config as transformers sees it; code that comes with a model is run only where it is trusted."""
    if "quantization_config" in source.config:
        raise InputError(
            "the model is quantised and cannot be trained as it is",
            where=f"{source.folder}/config.json",
            why="quantization_config is set",
            do="use the model it was made from",
        )
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=trusted, local_files_only=True)
    except (OSError, *CONFIG_ERRORS) as error:
        raise _cannot_build(source, error) from error


def _sdpa_serves(config: Any, folder: Path, auto_class: str, *, trusted: bool) -> bool:
    """Whether sdpa computes what the model means: it cannot cap scores, and older transformers let that pass."""
    own_classes = getattr(config, "auto_map", None) or {}
    if trusted and auto_class in own_classes:
        model_class = get_class_from_dynamic_module(own_classes[auto_class], folder, local_files_only=True)
    else:
        model_class = getattr(transformers, auto_class)._model_mapping.get(type(config), None)
    capped = getattr(config.get_text_config(), "attn_logit_softcapping", None)
    return capped is None and getattr(model_class, "_supports_sdpa", True)


def _cannot_build(source: ModelFolder, error: Exception) -> InputError:
    reason = " ".join(str(error).split())[:300] or type(error).__name__
    kind = _KINDS.get(source.model_class, f"a model of {source.model_class}")
    if "auto_map" in source.config:
        advice = TRUST_ADVICE if source.code_sha256 is None else "look into the model's own code, which was run"
    else:
        advice = f"check config.json; model_type must be {kind} that this transformers knows"
    return InputError(
        f"cannot build {kind} from {source.description}",
        where=f"{source.folder}/config.json",
        why=reason,
        do=advice,
    )


@contextlib.contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Every parameter registered in this context moves to meta at once.

    Its constructor has reserved addresses, but with initialisation off it touched no page: an 8 B model costs nothing.
    """
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            attributes = parameter.__dict__
            parameter = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
            parameter.__dict__.update(attributes)
        register(module, name, parameter)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _part(model: nn.Module, getter: str) -> nn.Module | None:
    """What the model's own getter gives, or None where it has none."""
    try:
        part = getattr(model, getter)()
    except (AttributeError, NotImplementedError):
        return None
    return part if isinstance(part, nn.Module) else None


def _behind_trunk(model: nn.Module) -> nn.Module | None:
    """Where no words are predicted: the last module beside the trunk (score, classifier, qa_outputs)."""
    trunk = getattr(model, getattr(model, "base_model_prefix", ""), None)
    beside = [child for child in model.children() if child is not trunk and any(True for _ in child.parameters())]
    return beside[-1] if trunk is not None and beside else None


def parts_not_found(model: nn.Module, why: str) -> InputError:
    return InputError(
        f"cannot find the parts of {type(model).__name__}",
        why=why,
        do="use a model of transformers whose layers are one list",
    )

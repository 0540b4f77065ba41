"""The card of the model that a run names, with what of it the run trains: what a plan is made of."""

from __future__ import annotations

from collections.abc import Callable, Collection

from rich.console import Console

from coremill.config.schema import BUILT_IN, RunConfig
from coremill.hardware.probe import cache_folder, environment_snapshot
from coremill.model import hub_models
from coremill.model.adapter_source import refuse_unfit_adapter
from coremill.model.parameter_list import PREDICTS_WORDS, parameters_of
from coremill.model.source import ModelFolder, Say, resolve_model
from coremill.plan.adapters import adapted_by, with_adapters, words_of_adapters, words_of_wide_adapters
from coremill.plan.card import ModelCard, read_card, with_dropouts
from coremill.plan.trained import frozen_by, named_by, with_frozen, words_of_frozen
from coremill.remote_code import is_folder
from coremill.report.subject import shape_name
from coremill.report.terminal import print_line
from coremill.tasks.base import make_task


def card_for(config: RunConfig, model: ModelFolder, progress: Say | None = None) -> ModelCard:
    """The card of a model that lies in a folder, with what of it the run trains."""
    shape = config.model.config
    name = config.model.name if shape is None else shape_name(shape)
    card = read_card(
        model.folder,
        name=name,
        pretrained=model.weights == "pretrained",
        model_class=model.model_class,
        labels=config.model.label_count,
    )
    return card_as_trained(config, card, lambda: model, progress)


def card_without_weights(config: RunConfig) -> ModelCard:
    """From the folder, from a config, or from the hub's headers: nothing is downloaded but those."""
    model, task = config.model, make_task(config)
    if not _is_on_hub(config):
        return card_for(config, _model_without_weights(config))
    weights, code = model.weights == "pretrained", model.trust_remote_code
    card = hub_models.card_on_hub(
        model.name,
        task,
        revision=model.revision,
        weights=weights,
        setting="model",
        code=code,
        labels=model.label_count,
    )
    return card_as_trained(config, card, lambda: _model_without_weights(config), stored=_stored_on_hub(config))


def card_of_new_run(config: RunConfig, console: Console) -> ModelCard:
    """The same for `coremill plan`, of a run that begins: an adapter to start from is refused as `train` does."""
    card = card_without_weights(config)
    if config.lora.start_from is not None:
        cache = cache_folder(environment_snapshot())
        refuse_unfit_adapter(config, _model_without_weights(config), cache, stored=_stored_on_hub(config))
    if (warning := words_of_wide_adapters(card)) is not None:
        print_line(console, warning)
    return card


def _trains_a_part(config: RunConfig) -> bool:
    return bool(config.train.freeze) or config.lora.rank is not None


def _stored_on_hub(config: RunConfig) -> Collection[str] | None:
    """The tensors in the files of a model on the hub, where what they lack of it is trained whole; None: not asked."""
    model = config.model
    if not _is_on_hub(config) or model.weights != "pretrained" or not _trains_a_part(config):
        return None
    if make_task(config).model_class == PREDICTS_WORDS:
        return None
    return hub_models.tensor_names_on_hub(model.name, model.revision)


def _is_on_hub(config: RunConfig) -> bool:
    return config.model.config is None and config.model.name != BUILT_IN and not is_folder(config.model.name)


def _model_without_weights(config: RunConfig) -> ModelFolder:
    """Of one on the hub config and code."""
    section = config.model.model_copy(update={"weights": "random"}) if _is_on_hub(config) else config.model
    return resolve_model(section, make_task(config), cache=cache_folder(environment_snapshot()))


def card_as_trained(
    config: RunConfig,
    card: ModelCard,
    model: Callable[[], ModelFolder],
    progress: Say | None = None,
    *,
    stored: Collection[str] | None = None,
) -> ModelCard:
    """With the dropout that the run sets; less what `train.freeze` names, or with adapters beside it. Patterns of these
    and of `train.no_decay` name parts of the model, `stored` the tensors of files that are elsewhere."""
    card = with_dropouts(card, hidden=config.model.dropout, attention=config.model.attention_dropout)
    if not config.train.no_decay and not _trains_a_part(config):
        return card
    parameters = parameters_of(model(), cache_folder(environment_snapshot()), progress, stored=stored)
    named_by(parameters, config.train.no_decay, key="train.no_decay")
    if config.lora.rank is not None:
        adapted = adapted_by(parameters, config.lora)
        if progress is not None:
            progress(words_of_adapters(adapted, config.lora))
        return with_adapters(card, parameters, adapted)
    frozen = frozen_by(parameters, config.train.freeze)
    if frozen and progress is not None:
        progress(words_of_frozen(parameters, frozen))
    return with_frozen(card, frozen)

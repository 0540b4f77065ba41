"""Where the adapter to go on from comes from (`lora.start_from`): a folder, or the hub. No torch here.

What is wrong with it is found before any rank starts.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from coremill.config.schema import RunConfig
from coremill.errors import InputError
from coremill.files import at_home
from coremill.model.hub_models import download_files
from coremill.model.lora_base import Base, base_of, digest_of_model
from coremill.model.parameter_list import parameters_of
from coremill.model.source import ModelFolder, Say
from coremill.nearby import missing_folder
from coremill.plan.adapter_folder import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    adapter_of_another_base,
    base_named_by,
    refuse_other_adapter,
    words_of_another_base,
)
from coremill.plan.adapters import adapted_by
from coremill.plan.config_file import read_config
from coremill.remote_code import is_folder

SETTING = "lora.start_from"
FILES = [ADAPTER_CONFIG, ADAPTER_WEIGHTS]


def find_adapter(
    config: RunConfig, model: ModelFolder, base: Base | None, cache: Path, say: Say, *, goes_on: bool
) -> Path | None:
    """The folder of an adapter that fits the model and the section; None where a new one is begun.

    A run that goes on has its own in a checkpoint: then none is missed."""
    if config.lora.start_from is None or base is None:
        return None
    try:
        folder = _found(config.lora.start_from)
        refuse_other_adapter(folder, config.lora, adapted_by(parameters_of(model, cache, say), config.lora))
    except InputError:
        if goes_on:
            return None
        raise
    if goes_on:
        return folder
    if (named := base_named_by(folder, base.name)) is not None:
        _refuse_another_base(folder, named, base, model)
        say(words_of_another_base(folder, named, base.name))
    say(f"begins with the adapter in {folder}, not with a new one")
    return folder


def refuse_unfit_adapter(
    config: RunConfig, model: ModelFolder, cache: Path, *, stored: Collection[str] | None = None
) -> None:
    """For a plan, which fetches nothing: a folder of this machine that `train` would refuse. `stored`: the tensors of
    the model's files where these are not here."""
    name = config.lora.start_from
    if name is None or config.lora.rank is None or not is_folder(name):
        return
    folder = _found(name)
    parameters = parameters_of(model, cache, stored=stored)
    refuse_other_adapter(folder, config.lora, adapted_by(parameters, config.lora))
    base = base_of(config, model) if is_folder(config.model.name) else None  # one on the hub has no weights here
    if base is not None and (named := base_named_by(folder, base.name)) is not None:
        _refuse_another_base(folder, named, base, model)


def _refuse_another_base(folder: Path, named: str, base: Base, model: ModelFolder) -> None:
    """Where it can be told: two names on the hub, or a folder here whose weights are others."""
    if is_folder(named):
        own = at_home(named)
        if (own / "config.json").is_file() and base.digest is not None:
            config = read_config(own)
            if digest_of_model(replace(model, folder=own, config=config)) != base.digest:
                raise adapter_of_another_base(folder, named, base.name, "the two have different weights")
    elif base.is_on_hub and base.digest is not None:
        raise adapter_of_another_base(folder, named, base.name, "these are two models on the hub")


def _found(name: str) -> Path:
    if not is_folder(name):
        return download_files(name, FILES, setting=SETTING)
    folder = at_home(name).absolute()
    if not folder.is_dir():
        raise missing_folder(folder, SETTING, f"no such adapter folder: {folder}")
    return folder

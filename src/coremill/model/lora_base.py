"""The model that adapters were trained beside: its name, its revision and a hash of its files. No torch here.

Checkpoints and adapter folders do not hold it, so they say which it was; a run that goes on beside another one would
be of neither.
"""

from __future__ import annotations

import importlib.util
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from coremill.config.schema import RunConfig
from coremill.errors import InputError
from coremill.hosts.fingerprint import digest_of_files
from coremill.model.source import ModelFolder
from coremill.plan.adapter_folder import is_adapter_folder, read_adapter_config
from coremill.plan.headers import weight_files
from coremill.remote_code import is_folder

_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class Base:
    """A model as it was found."""

    name: str  # on the hub, or the absolute path of its folder
    revision: str | None  # on the hub: the commit where that is known, else as the run file has it
    digest: str | None  # of the files of its weights; None: they were made from the seed

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def is_on_hub(self) -> bool:
        return not Path(self.name).is_absolute()


def base_of(config: RunConfig, model: ModelFolder) -> Base | None:
    """What the adapters of a run are trained beside; None where it trains the weights themselves."""
    if config.lora.rank is None:
        return None
    if model.weights == "random":
        return Base(model.description, None, None)
    digest = digest_of_files([model.folder / name for name in weight_files(model.folder)])
    if is_folder(config.model.name):
        return Base(str(model.folder.absolute()), None, digest)
    # The hub's cache has a folder for each commit.
    commit = model.folder.name if _COMMIT.fullmatch(model.folder.name) else config.model.revision
    return Base(config.model.name, commit, digest)


def base_folder_of(adapter: Path) -> Path | None:
    """Where on this machine the model lies that an adapter folder names; None where that is no adapter folder."""
    if not is_adapter_folder(adapter):
        return None
    config = read_adapter_config(adapter)
    name = str(config.get("base_model_name_or_path"))
    if is_folder(name):
        return Path(name)
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, "config.json", revision=config.get("revision"))
    if not isinstance(found, str):
        raise InputError(f"{name} is not on this machine", where=str(adapter))
    return Path(found).parent


def require_peft(config: RunConfig) -> None:
    """Before anything is started; nothing is imported."""
    if config.lora.rank is None:
        return
    spec = importlib.util.find_spec("peft")
    if spec is None or spec.origin is None:  # a folder of that name where the command runs is no library
        raise InputError(
            "peft, which makes the adapters, is not installed here",
            where="lora.rank",
            why="there is no module peft in this Python",
            do="pip install 'coremill[lora]', or remove the section lora",
        )

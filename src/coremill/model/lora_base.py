"""The model that adapters were trained beside: its name, its revision and a hash of what it is. No torch here.

Checkpoints and adapter folders do not hold it, so they say which it was; a run that goes on beside another one would
be of neither.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from coremill.config.schema import RunConfig
from coremill.errors import InputError
from coremill.model.source import ModelFolder
from coremill.plan.adapter_folder import is_adapter_folder, read_adapter_config
from coremill.plan.headers import read_headers
from coremill.remote_code import is_folder

_COMMIT = re.compile(r"[0-9a-f]{40}")
BLOCK_BYTES = 2**16
# Keys of a config.json that change no number here: who saved it, under which name, and in which dtype.
OF_NO_CONSEQUENCE = ("transformers_version", "_name_or_path", "_commit_hash", "dtype", "torch_dtype", "use_cache")


@dataclass(frozen=True)
class Base:
    """A model as it was found."""

    name: str  # on the hub, or the absolute path of its folder
    revision: str | None  # on the hub: the commit where that is known, else as the run file has it
    digest: str | None  # of its config and of parts of every tensor; None: they were made from the seed

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
    digest = digest_of_model(model)
    if is_folder(config.model.name):
        return Base(str(model.folder.absolute()), None, digest)
    # The hub's cache has a folder for each commit.
    commit = model.folder.name if _COMMIT.fullmatch(model.folder.name) else config.model.revision
    return Base(config.model.name, commit, digest)


def digest_of_model(model: ModelFolder) -> str:
    """Of what makes its numbers: the config, and of every tensor its form and up to three blocks. A tensor that was
    trained on differs everywhere; hashing 16 GB at every start would take a minute."""
    shape = {key: value for key, value in model.config.items() if key not in OF_NO_CONSEQUENCE}
    digest = hashlib.blake2b(json.dumps([shape, model.code_sha256], sort_keys=True).encode(), digest_size=8)
    headers = sorted(read_headers(model.folder).values(), key=lambda header: header.name)
    with contextlib.ExitStack() as opened:
        streams: dict[str, IO[bytes]] = {}
        for header in headers:
            if header.file not in streams:
                file = (model.folder / header.file).open("rb", buffering=0)
                streams[header.file] = opened.enter_context(file)
            digest.update(f"{header.name} {header.dtype} {header.shape} ".encode())
            last = max(header.start, header.end - BLOCK_BYTES)
            for begin in sorted({header.start, (header.start + last) // 2, last}):
                streams[header.file].seek(begin)
                digest.update(streams[header.file].read(min(BLOCK_BYTES, header.end - begin)))
    return digest.hexdigest()


def is_changed(base: Base, model: ModelFolder) -> bool:
    """Whether a model's files are others than those of the base."""
    return base.digest is not None and digest_of_model(model) != base.digest


def refuse_changed_base(base: Base, model: ModelFolder) -> None:
    """Where a model's files are read once more, they are still those of the base."""
    if is_changed(base, model):
        raise InputError(
            f"the files of {base.name} have changed while the run went on: adapters cannot be merged into them",
            where=str(model.folder),
            why="they were trained beside other weights",
            do="bring the files back; then coremill export RUN DEST --merged merges the last checkpoint",
        )


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

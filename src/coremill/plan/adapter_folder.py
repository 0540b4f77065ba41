"""A folder with an adapter, as peft writes it: its names, and whether a run can go on from it. No torch here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coremill.config.schema import LoraSection
from coremill.errors import InputError
from coremill.files import at_home
from coremill.plan.adapters import Adapted, alpha_of
from coremill.plan.headers import TensorHeader, read_file_header

ADAPTER = "default"  # peft's name for the one that there is
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# The folder beside an adapter with the config that its base is loaded with. Not in the adapter's own folder:
# transformers would take that for a whole model.
BASE_CONFIG = "base_config"
FILE_PREFIX = "base_model.model."  # of every name in an adapter's file
_OTHER_KINDS = ("use_dora", "use_rslora", "rank_pattern", "alpha_pattern", "use_qalora", "alora_invocation_tokens")
# Beginnings that leave the base as it is; others (pissa, olora, corda, loftq) take out of it what the adapter holds.
_PLAIN_BEGINNINGS = (True, False, None, "gaussian", "eva", "orthogonal")


def is_adapter(name: str) -> bool:
    return ".lora_A." in name or ".lora_B." in name


def name_in_file(name: str) -> str:
    """Of a trained parameter in an adapter's file, by its name in the module."""
    return FILE_PREFIX + (name.replace(f".{ADAPTER}.", ".") if is_adapter(name) else name)


def is_adapter_folder(folder: Path) -> bool:
    return (folder / ADAPTER_CONFIG).is_file()


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """adapter_config.json of a LoRA folder as it is; refused where there is none or it is of another method."""
    file = folder / ADAPTER_CONFIG
    if not file.is_file():
        is_model = (folder / "config.json").is_file()
        raise InputError(
            f"no {ADAPTER_CONFIG} in {folder}",
            where="lora.start_from",
            why="it holds a whole model" if is_model else "that is where peft says what an adapter is",
            do="name it in model, and leave lora.start_from out"
            if is_model
            else "name an adapter folder, such as RUN/export of a run with adapters",
        )
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{ADAPTER_CONFIG} cannot be read: {error}", where=str(file)) from None
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        kind = config.get("peft_type") if isinstance(config, dict) else type(config).__name__
        raise InputError(
            f"{folder} holds no LoRA adapter but {kind}",
            where="lora.start_from",
            why="other methods train other things",
            do="name a LoRA folder, or leave lora.start_from out",
        )
    return config


def refuse_other_adapter(folder: Path, lora: LoraSection, adapted: Adapted) -> None:
    """Before anything starts: an adapter that cannot be the beginning of this run."""
    config = read_adapter_config(folder)
    if not (folder / ADAPTER_WEIGHTS).is_file():
        pickled = (folder / "adapter_model.bin").is_file()
        raise InputError(
            f"no {ADAPTER_WEIGHTS} in {folder}",
            where="lora.start_from",
            why="its weights are pickled, which could run anything when loaded" if pickled else "it has no weights",
            do="save it again with peft (safe_serialization=True)",
        )
    if names := [key for key in _OTHER_KINDS if config.get(key)]:
        raise InputError(
            f"the adapter in {folder} uses {' and '.join(names)}",
            where="lora.start_from",
            why="here every adapter has the same rank and scale",
            do="start a new adapter: leave lora.start_from out",
        )
    if config.get("init_lora_weights", True) not in _PLAIN_BEGINNINGS:
        raise InputError(
            f"the adapter in {folder} began as {config['init_lora_weights']}",
            where="lora.start_from",
            why="such an adapter belongs to a base that was changed with it, not to the model's own files",
            do="convert it with peft (save_pretrained with path_initial_model_for_weight_conversion), or begin anew",
        )
    wanted: Mapping[str, tuple[str, float | None]] = {
        "r": ("lora.rank", lora.rank),
        "lora_alpha": ("lora.alpha", alpha_of(lora)),
    }
    for key, (ours, value) in wanted.items():
        if config.get(key) != value:
            raise InputError(
                f"the adapter in {folder} has {key} {config.get(key)}, the run file {ours} {value:g}",
                where="lora.start_from",
                why="an adapter goes on with the rank and the scale that it was trained with",
                do=f"set {ours}: {config.get(key)}",
            )
    _refuse_other_tensors(folder, lora, adapted, read_file_header(folder / ADAPTER_WEIGHTS))


def _refuse_other_tensors(
    folder: Path, lora: LoraSection, adapted: Adapted, headers: Mapping[str, TensorHeader]
) -> None:
    """Names and shapes are those of this model with these settings."""
    expected: dict[str, str] = {}  # by name in the file, what is there in its place
    for target, shape in adapted.targets:
        a, b = (headers.get(f"{FILE_PREFIX}{target}.lora_{each}.weight") for each in "AB")
        found = None if a is None or b is None else (*b.shape[:1], *a.shape[1:])
        if a is None or b is None or found not in (tuple(shape), tuple(reversed(shape))):  # GPT-2's weights are turned
            raise another_adapter(folder, lora, target, found, tuple(shape))
        expected |= {a.name: target, b.name: target}
    for parameter in adapted.whole:
        held = [headers[name] for each in parameter.names if (name := FILE_PREFIX + each) in headers]
        # Of a head the data may say how many classes it has: ranks look again.
        if not held or (held[0].shape != parameter.shape and not parameter.in_head):
            raise another_adapter(folder, lora, parameter.names[0], held[0].shape if held else None, parameter.shape)
        expected |= {header.name: parameter.names[0] for header in held}
    if unused := sorted(set(headers) - set(expected)):
        raise InputError(
            f"the adapter in {folder} has {len(unused)} tensors that this run does not train: {unused[0]}",
            where="lora.start_from",
            why=_difference(folder, lora),
            do="name the adapter's own target_modules and modules_to_save in lora",
        )


def another_adapter(
    folder: Path, lora: LoraSection, name: str, found: tuple[int, ...] | None, wanted: tuple[int, ...]
) -> InputError:
    """The refusal of one that has not what the model wants."""
    held = "is not in it" if found is None else f"has shape {list(found)} in it"
    return InputError(
        f"the adapter in {folder} is of another model or form: {name} {held}, the model wants {list(wanted)}",
        where="lora.start_from",
        why=_difference(folder, lora),
        do="name the adapter's own base in model, and its rank and target_modules in lora",
    )


def base_named_by(folder: Path, base: str) -> str | None:
    """The model that an adapter says it was made for, where that is another one than this; None: it is this one."""
    named = read_adapter_config(folder).get("base_model_name_or_path")
    if not isinstance(named, str) or at_home(named).absolute() == at_home(base).absolute():
        return None
    return named


def adapter_of_another_base(folder: Path, named: str, base: str, why: str) -> InputError:
    """The refusal of an adapter that is known to belong to other weights."""
    return InputError(
        f"the adapter in {folder} is of another base: it was made for {named}, not for {base}",
        where="lora.start_from",
        why=why,
        do=f"set model: {named}; where it is the same model under another name, change base_model_name_or_path in its"
        f" {ADAPTER_CONFIG}",
    )


def words_of_another_base(folder: Path, named: str, base: str) -> str:
    """For an adapter that fits, and of whose own base nothing more is known than its name."""
    return (
        f"warning: the adapter in {folder} says that it was made for {named}, and goes on beside {base} here: beside"
        " other weights it means nothing"
    )


def _difference(folder: Path, lora: LoraSection) -> str:
    config = read_adapter_config(folder)
    base, targets = config.get("base_model_name_or_path"), config.get("target_modules")
    shown = "left out (all linear maps of the layers)" if lora.target_modules is None else lora.target_modules
    return f"it was made for {base}, with target_modules {targets}; here lora.target_modules is {shown}"

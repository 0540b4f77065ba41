"""Datasets as other tools name them -> ours (see translate.py): names of the hub, files, Axolotl's lists."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from coremill.config.translate import Cure, Given, as_written, roles_learned

_FILE = re.compile(r"(^[./~])|[*?]|\.(txt|jsonl?|parquet|csv|tsv)(\.gz|\.zst)?$")
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_LISTED = ("json", "text", "csv", "parquet")  # builders of datasets: what they read is named elsewhere
_CONFIGS = "dataset_config_name dataset_config subset"
_IF_OF_HUB = ", if it is one of the hub"

# An entry of Axolotl's `datasets`. Text, and conversations by their columns, are what is done here.
_KNOWN_TYPES = ("completion", "pretrain", "chat_template", "sharegpt", "alpaca")
_ALPACA = "; Alpaca's columns are known, and written with the chat template instead of ### Instruction"
_NAMES = ("path", "source", "dataset", "ds_type", "name", "subset")
_BY_ITSELF = {
    "train_on_eos": ("turn", "all"),
    "train_on_eot": ("turn", "all"),
    "trust_remote_code": (False,),
    "drop_system_message": (False,),
}
_OF_MESSAGES = (
    *("message_property_mappings", "message_field_role", "message_field_content"),
    *("field_human", "field_model"),
)
_KNOWN_IN_MESSAGES = {"role", "content", "from", "value"}


def dataset_source(value: Any, given: Given) -> Cure | None:
    """A name of the hub with its config, or files."""
    if isinstance(value, list | tuple):
        if len(value) == 1:
            return dataset_source(value[0], given)
        mixed = shares(given["interleave_probs"], given) if "interleave_probs" in given else None
        return mixed or _several(value)
    if isinstance(value, Mapping):
        return _entry(value)
    if not isinstance(value, str) or not value:
        return None
    if "," in value and "{" not in value:
        return dataset_source([part.strip() for part in value.split(",")], given)
    if _FILE.search(value):
        return Cure({"data.source": value})
    if not _HUB_NAME.fullmatch(value):
        return None
    config = next((given[name] for name in _CONFIGS.split() if isinstance(given.get(name), str)), None)
    return Cure({"data.source": f"hf://{value}" + (f":{config}" if config else "")}, _IF_OF_HUB)


def evaluation_source(value: Any, given: Given) -> Cure | None:
    """`test_datasets`, a list like `datasets`; with a split of the dataset that is trained on, that split."""
    entries = value if isinstance(value, list) else [value]
    cure = dataset_source(entries[0], {}) if len(entries) == 1 else None
    if cure is None or "data.source" not in cure.settings:
        return None
    source, split = cure.settings["data.source"], cure.settings.get("data.split", "train")
    trained = dataset_source(given.get("datasets"), {})
    if trained is not None and trained.settings.get("data.source") == source and split != "train":
        return Cure({"data.evaluation_split": split})
    if source.startswith("hf://") and split != "train":
        return None
    return Cure({"data.evaluation_source": source}, _IF_OF_HUB if source.startswith("hf://") else "")


def shares(value: Any, given: Given) -> Cure | None:
    """`interleave_probs: 0.7,0.3` with `dataset: a,b`."""
    probabilities = value.split(",") if isinstance(value, str) else value
    named = given.get("dataset") or given.get("datasets")
    named = named.split(",") if isinstance(named, str) else named
    if not isinstance(probabilities, list) or not isinstance(named, list) or len(named) != len(probabilities):
        return None
    try:
        parts = [float(each) for each in probabilities]
    except (TypeError, ValueError):
        return None
    cures = [dataset_source(each.strip() if isinstance(each, str) else each, {}) for each in named]
    found = [cure.settings["data.source"] for cure in cures if cure is not None and "data.source" in cure.settings]
    if not parts or len(found) != len(parts) or min(parts) <= 0:
        return None
    return Cure({"data.sources": [{"source": f, "share": s} for f, s in zip(found, as_shares(parts), strict=True)]})


def as_shares(parts: Sequence[float]) -> list[float]:
    """Weights as parts of 1."""
    return [float(f"{part / sum(parts):.4g}") for part in parts]


def _several(values: Sequence[Any]) -> Cure | None:
    """A list of sources; what else they say counts where all say the same."""
    found = [cure for value in values if (cure := dataset_source(value, {})) is not None]
    if not found or len(found) != len(values) or any("data.source" not in cure.settings for cure in found):
        return None
    entries: list[Any] = []
    others = []
    for cure in found:
        entry = {name: cure.settings[f"data.{name}"] for name in ("source", "column", "split")
                 if f"data.{name}" in cure.settings}  # fmt: skip
        entries.append(entry if len(entry) > 1 else entry["source"])
        others.append({key: one for key, one in cure.settings.items() if key.rpartition(".")[2] not in entry})
    notes = "".join(dict.fromkeys(cure.note for cure in found))
    if any(each != others[0] for each in others):
        return Cure({"data.sources": entries}, f"{notes}; their columns differ, and a run has one set of them")
    return Cure({"data.sources": entries, **others[0]}, notes)


def _entry(dataset: Given) -> Cure | None:
    """One entry of Axolotl's list: where it is, which part and column of it, and what is not taken along."""
    named = dataset.get("path") or dataset.get("source") or dataset.get("dataset")
    taken = set(_NAMES)
    if named in _LISTED:
        named = dataset.get("data_files")
        taken.add("data_files")
    config = dataset.get("name") or dataset.get("subset")
    cure = dataset_source(named, {"subset": config} if config else {}) if isinstance(named, str | list) else None
    if cure is None:
        return None
    settings = dict(cure.settings)
    of_hub = str(settings.get("data.source")).startswith("hf://")
    if of_hub and isinstance(dataset.get("revision"), str):
        settings["data.source"] += f"@{dataset['revision']}"
        taken.add("revision")
    split = dataset.get("split")
    if split == "train":
        taken.add("split")
    elif of_hub and isinstance(split, str) and split.isidentifier():
        settings["data.split"] = split
        taken.add("split")
    settings |= _columns(dataset, taken)
    kind = dataset.get("type")
    note = _ALPACA if str(kind).startswith("alpaca") else ""
    return Cure(settings, cure.note + note + _left_out(dataset, taken))


def _columns(dataset: Given, taken: set[str]) -> dict[str, Any]:
    """Settings for the columns that an entry names; `taken` gets the names that are answered."""
    found: dict[str, Any] = {}
    targets = {"field": "column", "text_column": "column", "field_messages": "messages_column"}
    for name, target in targets.items():
        if isinstance(dataset.get(name), str):
            found[f"data.{target}"] = dataset[name]
            taken.add(name)
    kind = dataset.get("type")
    of_kind = kind if isinstance(kind, Mapping) else {}
    asked, said = of_kind.get("field_instruction"), of_kind.get("field_output")
    if isinstance(asked, str) and isinstance(said, str):
        found |= {"data.prompt_column": asked, "data.answer_column": said}
    roles = roles_learned(dataset["roles_to_train"], {}) if dataset.get("roles_to_train") else None
    if roles is not None:
        found |= roles.settings
        taken.add("roles_to_train")
    return found


def _left_out(dataset: Given, taken: set[str]) -> str:
    """What else an entry says, in words."""
    others = {name: one for name, one in dataset.items() if name not in taken and not _is_known(name, one)}
    kind = others.get("type")
    if isinstance(kind, Mapping):  # its columns were taken
        del others["type"]
        others |= {name: one for name, one in kind.items() if name not in ("field_instruction", "field_output")}
    if not others:
        return ""
    said = " and ".join(f"{name} ({as_written(one)})" for name, one in others.items())
    hint = ": data.column, or data.prompt_column and answer_column, say what is learned" if "type" in others else ""
    return f"; its {said} {'is' if len(others) == 1 else 'are'} not taken along{hint}"


def _is_known(name: str, value: Any) -> bool:
    """Whether it says what is done here anyway."""
    if value in (None, ""):
        return True
    if name == "type" and isinstance(value, str):
        return re.split(r"[.:]", value)[0] in _KNOWN_TYPES
    if name in _OF_MESSAGES:  # messages of role and content, and ShareGPT's
        return all(
            str(one) in _KNOWN_IN_MESSAGES for one in (value.values() if isinstance(value, Mapping) else [value])
        )
    return value in _BY_ITSELF.get(name, ())

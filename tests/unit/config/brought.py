"""What people bring, for the tests of `coremill config import`: fields of installed tools, and the answers to them."""

from __future__ import annotations

import ast
import importlib.metadata
import json
import re
from pathlib import Path
from typing import Any

from coremill.config.imports.imported import Imported, import_words
from coremill.config.load import LoadedConfig, load_config

BROUGHT = Path(__file__).parents[2] / "golden" / "brought"


def fields_of(package: str, file: str, *classes: str) -> list[str]:
    """The fields of dataclasses and pydantic models in a file of an installed package, which is not imported."""
    path = Path(str(importlib.metadata.distribution(package).locate_file(file)))
    found: list[str] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef) and node.name in classes:
            found += [
                line.target.id
                for line in node.body
                if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
            ]
    assert found, (package, file, classes)
    return [name for name in found if not name.startswith("_")]


def trainer_fields() -> list[str]:
    return fields_of("transformers", "transformers/training_args.py", "TrainingArguments")


def accelerate_fields() -> list[str]:
    file = "accelerate/commands/config/config_args.py"
    return fields_of("accelerate", file, "BaseConfig", "ClusterConfig", "SageMakerConfig")


def accelerate_section_fields() -> dict[str, list[str]]:
    """What `accelerate config` writes into the sections of its file."""
    path = importlib.metadata.distribution("accelerate").locate_file("accelerate/commands/config/cluster.py")
    found: dict[str, list[str]] = {}
    text = Path(str(path)).read_text(encoding="utf-8")
    for section, name in re.findall(r'(\w+_config)\["(\w+)"\]', text):
        found.setdefault(section, []).append(name)
    return {section: sorted(set(names)) for section, names in found.items()}


def zero_fields() -> list[str]:
    return fields_of("deepspeed", "deepspeed/runtime/zero/config.py", "DeepSpeedZeroConfig")


def offload_fields() -> list[str]:
    file = "deepspeed/runtime/zero/offload_config.py"
    return fields_of("deepspeed", file, "DeepSpeedZeroOffloadParamConfig", "DeepSpeedZeroOffloadOptimizerConfig")


def deepspeed_fields() -> list[str]:
    """Names at the top of DeepSpeed's JSON: constants that its reader looks up."""
    folder = Path(str(importlib.metadata.distribution("deepspeed").locate_file("deepspeed/runtime")))
    constants = {
        target.id: node.value.value
        for node in ast.parse((folder / "constants.py").read_text(encoding="utf-8")).body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    reader = (folder / "config.py").read_text(encoding="utf-8")
    looked_up = set(re.findall(r"param_dict(?:,\s*|\[|\.get\()([A-Z_0-9]+)\b", reader)) & constants.keys()
    return sorted({constants[name] for name in looked_up} | {"zero_optimization"})


def imported(*words: str, is_command: bool = False) -> Imported:
    return import_words(words, is_command=is_command, environ={"HOME": "/nowhere"})


def loaded(tmp_path: Path, text: str, **options: Any) -> LoadedConfig:
    path = tmp_path / "imported.yaml"
    path.write_text(text, encoding="utf-8")
    return load_config(path, **options)


def names_in(tree: Any) -> list[str]:
    """Every name of a tree of settings."""
    if not isinstance(tree, dict):
        return []
    return [name for key, value in tree.items() for name in (str(key), *names_in(value))]


def fates(found: Imported) -> dict[str, str]:
    """What became of each setting, by its last name."""
    told = json.loads(found.as_json)["fates"]
    return {each["setting"].rpartition(".")[2].lstrip("-"): each["fate"] for each in told}

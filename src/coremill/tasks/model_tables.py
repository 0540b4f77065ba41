"""Which families transformers knows for a task, told without importing it.

The answer is needed before any rank starts, and importing transformers' models costs torch, seconds and 400 MB. Its
tables of names are plain literals in one file; they are read from there (60 ms). Should that file look different one
day, nothing is refused by them and a rank says it later.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
from collections.abc import Mapping
from pathlib import Path

_TABLE_OF_CLASS = {
    "AutoModelForCausalLM": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "AutoModelForMaskedLM": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "AutoModelForQuestionAnswering": "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES",
    "AutoModelForSequenceClassification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
}


@functools.cache
def families_of(auto_class: str) -> Mapping[str, str]:
    """Class names by model_type, of an auto class of transformers; empty where they cannot be found."""
    return _tables().get(_TABLE_OF_CLASS[auto_class], {})


def is_encoder_family(family: str) -> bool:
    """Whether its tokens see those that come after them, unless a config says otherwise."""
    return families_of("AutoModelForMaskedLM").get(family, "").endswith("MaskedLM")


@functools.cache
def _tables() -> dict[str, dict[str, str]]:
    package = importlib.util.find_spec("transformers")
    if package is None or package.origin is None:
        return {}
    names = set(_TABLE_OF_CLASS.values())
    try:
        source = (Path(package.origin).parent / "models" / "auto" / "modeling_auto.py").read_text(encoding="utf-8")
        found = {
            statement.targets[0].id: dict(ast.literal_eval(statement.value.args[0]))
            for statement in ast.parse(source).body
            if isinstance(statement, ast.Assign)
            and isinstance(statement.targets[0], ast.Name)
            and statement.targets[0].id in names
            and isinstance(statement.value, ast.Call)
        }
    except (OSError, SyntaxError, ValueError, TypeError, IndexError):
        return {}
    return found if names == set(found) else {}

"""What several screens show alike: the metrics of a run's task, what loads its model, memory beside its plan."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from coremill.config.schema import RunConfig
from coremill.hardware.process_memory import MAPPED_FILE_BYTES
from coremill.plan.adapter_folder import BASE_CONFIG
from coremill.registry import importable

# The class whose head an adapter brings along, with as many classes as the run has: the base is loaded for these.
HAS_LABELS = "AutoModelForSequenceClassification"
# Of every evaluation. What else one has is a metric of the task, under its name.
OF_EVERY_EVALUATION = ("step", "loss", "tokens", "seconds", "non_finite", "best_step")


def metric_names(evaluation: Mapping[str, Any]) -> list[str]:
    """Of an event, or of what a summary has made of it."""
    return [name for name in evaluation if name not in OF_EVERY_EVALUATION]


def in_words(name: str) -> str:
    """The name of a metric for people."""
    return name.replace("_", " ")


def format_metric(value: float | None) -> str:
    """Two decimals while that says something; four of a share."""
    if value is None:
        return "-"
    return f"{value:.4f}" if abs(value) < 1 else f"{value:,.2f}" if abs(value) < 1e6 else f"{value:.2e}"


def memory_beside_plan(measured: Mapping[str, Any]) -> int | None:
    """The measured peak that a planned one is held against: with as many pages of libraries as every plan counts, for
    the kernel takes them back, and maps as many as its cache suggests."""
    found: int | None = measured.get("memory_bytes_per_rank_as_planned") or measured["memory_bytes_per_rank"]
    return found


def pages_of_libraries(summary: Mapping[str, Any], show: Callable[[Any], str]) -> tuple[str, str, str, str] | None:
    """The row below the peak that says why the difference there is not that of the two figures."""
    measured = summary["measured"]
    if not measured.get("memory_bytes_per_rank_as_planned"):
        return None
    mapped = measured.get("mapped_file_bytes_per_rank")
    return "of it, pages of libraries", show(MAPPED_FILE_BYTES), show(mapped), "not in the difference"


def model_class_of(summary: Mapping[str, Any]) -> str:
    """What loads the export: the class of its run's task, or whatever fits where that task is not installed here."""
    named = re.search(r"^task: *(\S+)", summary.get("config") or "", flags=re.MULTILINE)
    task = named.group(1) if named else RunConfig().task
    known = importable("coremill.tasks").get(task)
    return "AutoModel" if known is None else str(known.model_class)


def loading_lines(model_class: str, folder: str, base: str | None = None) -> list[str]:
    """The Python that loads an export, by its folder or name; of an adapter beside the `base` it was trained with."""
    if base is None:
        return [f"from transformers import {model_class}", "", f'model = {model_class}.from_pretrained("{folder}")']
    if model_class != HAS_LABELS:
        return [
            "from peft import PeftModel",
            f"from transformers import {model_class}",
            "",
            f'base = {model_class}.from_pretrained("{base}")',
            f'model = PeftModel.from_pretrained(base, "{folder}")',
        ]
    return [
        "from peft import PeftModel",
        f"from transformers import AutoConfig, {model_class}",
        "",
        f'config = AutoConfig.from_pretrained("{folder}", subfolder="{BASE_CONFIG}")',
        f'base = {model_class}.from_pretrained("{base}", config=config, ignore_mismatched_sizes=True)',
        f'model = PeftModel.from_pretrained(base, "{folder}")',
    ]


def loading_expression(model_class: str, folder: str, base: str | None = None) -> str:
    """The same in one line."""
    if base is None:
        return f'{model_class}.from_pretrained("{folder}")'
    how = f'"{base}"'
    if model_class == HAS_LABELS:
        config = f'AutoConfig.from_pretrained("{folder}", subfolder="{BASE_CONFIG}")'
        how += f", config={config}, ignore_mismatched_sizes=True"
    return f'PeftModel.from_pretrained({model_class}.from_pretrained({how}), "{folder}")'

"""Run files for a cluster, and what tests look for in the objects made from them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from coremill.config.load import LoadedConfig, load_config

LONG = os.environ.get("COREMILL_LONG_TESTS") == "1"  # in `make test-long`
IMAGE = "example.com/coremill:0.1.0"
# Llama-3-8B as a shape: no hub, no weights.
LLAMA3_8B = {
    "weights": "random",
    "config": {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
    },
}
CLUSTER = {"cluster": "demo", "role": "KarpenterNodeRole-demo"}
STORAGES: dict[str, dict[str, Any]] = {
    "claim": {"storage": "claim"},
    "fsx": {"storage": "fsx", "file_system": "fs-0123456789abcdef0", "mount_name": "abcdefgh", "zone": "us-west-2a"},
    "fsx-new": {
        "storage": "fsx-new",
        "subnet": "subnet-0123456789abcdef0",
        "security_groups": ["sg-0123456789abcdef0", "sg-0fedcba9876543210"],
    },
}
CAPACITIES: dict[str, dict[str, Any]] = {
    "on-demand": {"capacity": "on-demand"},
    "spot": {"capacity": "spot"},
    "spot-or-on-demand": {"capacity": "spot-or-on-demand"},
    "reservation": {"capacity": "reservation", "reservation": "cr-0123456789abcdef0"},
}


def run_file(folder: Path, name: str = "tiny.yaml") -> Path:
    path = folder / name
    path.write_text("train: {steps: 20}\n")
    return path


def loaded(
    folder: Path, section: Mapping[str, Any] | None = None, *, name: str = "tiny.yaml", **settings: Any
) -> LoadedConfig:
    """A run on four c7i.8xlarge with Karpenter, unless told otherwise; `settings` with __ for dots."""
    values: dict[str, Any] = {"fleet.nodes": 4, "fleet.instance": "c7i.8xlarge"}
    values |= {f"kubernetes.{key}": value for key, value in ({"image": IMAGE} | CLUSTER | dict(section or {})).items()}
    values |= {key.replace("__", "."): value for key, value in settings.items()}
    return load_config(run_file(folder, name), values)


def of_kind(objects: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    (found,) = (one for one in objects if one["kind"] == kind)
    return found


def pod_of(objects: list[dict[str, Any]]) -> dict[str, Any]:
    """The pod's spec, wherever the kind of job keeps it."""
    return next(job_spec_of(objects))["template"]["spec"]


def job_spec_of(objects: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The Job that makes the pods."""
    for one in objects:
        if one["kind"] == "Job":
            yield one["spec"]
        elif one["kind"] == "JobSet":
            yield one["spec"]["replicatedJobs"][0]["template"]["spec"]
        elif one["kind"] == "TrainingRuntime":
            yield one["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]

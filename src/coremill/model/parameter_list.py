"""The parameters of a model by name, for a launcher without torch: a process of its own builds it on meta, once.

Files do not tell: their names may be older than the module's, tied weights are there once, and a model that starts from
scratch has none. What was found is kept in the cache, for the next plan or run of the same config.

    python -m coremill.model.parameter_list        stdin: a ModelFolder as JSON and the names of tensors in its files;
                                                   stdout: what was found, or the error
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Collection, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from coremill.child import wrapped
from coremill.errors import CoremillError, InputError
from coremill.files import write_atomically
from coremill.model.source import ModelFolder, Say
from coremill.plan.headers import read_headers
from coremill.plan.trained import NamedParameter
from coremill.remote_code import remove_copies

FORM = 4  # of what is kept: part of its name
PREDICTS_WORDS = "AutoModelForCausalLM"  # whose models have no head of their own to learn


def parameters_of(
    model: ModelFolder, cache: Path, say: Say | None = None, *, stored: Collection[str] | None = None
) -> list[NamedParameter]:
    """In the order of the module, tied ones once with all their names. `stored`: the tensors of the model's files where
    these are not in its folder."""
    if model.model_class == PREDICTS_WORDS:
        stored = None
    elif stored is None and model.weights == "pretrained":
        stored = read_headers(model.folder).keys()
    names = None if stored is None else sorted(stored)
    known = json.dumps(
        [
            FORM,
            model.config,
            model.config_changes,
            model.model_class,
            model.code_sha256,
            version("transformers"),
            names,
        ],
        sort_keys=True,
    )
    file = cache / "parameters" / f"{hashlib.sha256(known.encode()).hexdigest()[:32]}.json"
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        if say is not None:
            say("listing the model's parameters, once for this model")
        found = _ask_child(model, names)
        with contextlib.suppress(OSError):  # then it is found anew each time
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(file, json.dumps(found))
    return [NamedParameter(tuple(names), tuple(shape), *kinds) for names, shape, *kinds in found]


def named_parameters(module: Any, drawn: tuple[str, ...] = ()) -> list[NamedParameter]:
    """Of a module that no engine has placed; what begins with `drawn` is new (poolers.py) and counts as its head."""
    names: dict[int, list[str]] = {}
    shapes: dict[int, tuple[int, ...]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
        shapes[id(parameter)] = tuple(parameter.shape)
    linear = {id(each.weight) for each in module.modules() if is_linear_map(each)}
    behind = (*_behind_the_trunk(module), *drawn)
    return [
        NamedParameter(tuple(each), shapes[key], key in linear, in_head=all(name.startswith(behind) for name in each))
        for key, each in names.items()
    ]


def _behind_the_trunk(module: Any) -> tuple[str, ...]:
    """Where the head is, of a model that predicts no words: all beside the trunk."""
    trunk = getattr(module, "base_model_prefix", "")
    if not trunk or not hasattr(module, trunk) or module.get_output_embeddings() is not None:
        return ()
    return tuple(f"{name}." for name, _ in module.named_children() if name != trunk)


def is_linear_map(module: Any) -> bool:
    """Those of torch, and GPT-2's, which has its weight the other way round; what is derived from them may compute
    something else."""
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    return type(module) in (nn.Linear, Conv1D)


def _ask_child(model: ModelFolder, stored: list[str] | None) -> list[Sequence[Any]]:
    # -P: a torch.py in the user's folder must not stand in for the library.
    command = [sys.executable, "-P", "-m", __name__]
    job = json.dumps({"model": model.to_json(), "stored": stored})
    done = subprocess.run(
        wrapped(command, launcher_pid=os.getpid(), cpus=None), input=job, capture_output=True, text=True, check=False
    )
    try:
        answer = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        tail = done.stderr.strip()[-1000:] or f"it ended with status {done.returncode}"
        raise CoremillError("the model's parameters could not be listed", why=tail) from None
    if "error" in answer:
        error = answer["error"]
        raise InputError(error["what"], where=error["where"], why=error["why"], do=error["do"])
    parameters: list[Sequence[Any]] = answer["parameters"]
    return parameters


def _main() -> None:
    from coremill.model.build import build_on_meta
    from coremill.model.poolers import poolers_not_stored

    job = json.load(sys.stdin)
    try:
        model = build_on_meta(ModelFolder.from_json(job["model"]), attention="eager")
        drawn = () if job["stored"] is None else poolers_not_stored(model, job["stored"])
        listed = named_parameters(model, drawn)
        answer: dict[str, Any] = {
            "parameters": [(each.names, each.shape, each.is_linear, each.in_head) for each in listed]
        }
    except InputError as error:
        answer = {"error": {"what": error.what, "where": error.where, "why": error.why, "do": error.do}}
    remove_copies()  # of code that comes with the model
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    _main()
    os._exit(0)  # native threads of the libraries have nothing left to do

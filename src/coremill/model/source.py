"""Where the model comes from: a folder, the hub, or a config to start from scratch.

Torch-free, and run before any rank starts: whatever is wrong with the model's files is found here and said once.
Code that comes with a model is run only where it is asked for and pinned, and a pickle is never opened.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from coremill.config.schema import BUILT_IN, ModelSection, RunConfig
from coremill.data.built_in_tokenizer import built_in_tokenizer
from coremill.data.packed import Progress
from coremill.data.tokenizer_files import TOKENIZER_FILES, with_chat_template
from coremill.errors import InputError
from coremill.files import CACHE_ADVICE, at_home, write_atomically
from coremill.model.hub_models import download
from coremill.nearby import missing_folder
from coremill.plan.config_file import read_config
from coremill.plan.headers import read_headers
from coremill.remote_code import is_folder, pin_problem, require_checked_code
from coremill.tasks.base import Task

Say = Callable[[str], None]

# A small Llama: 1.2 M parameters learn the look of Python source in a minute and a half on two cores. Wide and of two
# layers: products fill the cores better than with four of 128, and as many seconds give a lower loss of held-out text
# (4.57 after 88 s of training, against 4.70 after 103 s; two Skylake cores).
BUILT_IN_VOCABULARY = 4096  # of the built-in tokenizer, at most: a shape of one's own may have as many words
BUILT_IN_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 2048,
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": None,
}


@dataclass(frozen=True)
class ModelFolder:
    """A model on this machine's disk."""

    folder: Path
    config: dict[str, Any]  # config.json as it is
    weights: Literal["pretrained", "random"]
    description: str  # in words: what the user asked for
    model_class: str  # the auto class of transformers that makes it
    code_sha256: str | None = None  # of the code that comes with it and is to be run; None: none is
    # What a run makes of that config (model/config_changes.py): in transformers' names, and dropout, which has many.
    config_changes: dict[str, Any] = field(default_factory=dict)
    dropout: float | None = None
    attention_dropout: float | None = None

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "folder": str(self.folder)}

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> ModelFolder:
        """The inverse of to_json."""
        return ModelFolder(**{**document, "folder": Path(document["folder"])})


def resolve_model(section: ModelSection, task: Task[Any], *, cache: Path, progress: Say | None = None) -> ModelFolder:
    """Find, download or write the model's folder, and check its files: it is one that the task can train."""
    model = _find_model(section, task.model_class, cache, progress)
    where = f"{model.folder}/config.json"
    task.check_model(model.config, description=model.description, where=where, trusted=section.trust_remote_code)
    if section.trust_remote_code:
        model = replace(model, code_sha256=require_pinned_code(section, model.folder))
    if model.weights == "pretrained":
        read_headers(model.folder)
    return model


def require_pinned_code(section: ModelSection, folder: Path) -> str:
    """Check the code that is to be run against what the run file pins; returns its hash."""
    problem = pin_problem(section.name, section.revision, section.code_sha256)
    if problem is not None:
        raise InputError(problem.what, where=problem.key, why=problem.why, do=problem.do)
    key = "model.trust_remote_code" if section.code_sha256 is None else "model.code_sha256"
    return require_checked_code(folder, section.code_sha256, key)


def require_named_code(section: ModelSection) -> None:
    """The same for a folder that is here, before anything is looked at but its code."""
    folder = at_home(section.name)
    if section.trust_remote_code and folder.is_dir():
        require_pinned_code(section, folder)


def _find_model(section: ModelSection, model_class: str, cache: Path, progress: Say | None) -> ModelFolder:
    weights = section.weights
    if section.config is not None:
        folder, weights = _write_config(section.config, cache, "config"), "random"
        description = f"a {section.config.get('model_type')} config"
    elif section.name == BUILT_IN:
        folder, weights = _write_config(BUILT_IN_CONFIG, cache, BUILT_IN), "random"
        description = "the built-in model"
    elif is_folder(section.name):
        folder = at_home(section.name)
        description = str(folder)
    else:
        folder = download(
            section.name,
            revision=section.revision,
            weights=weights == "pretrained",
            progress=progress,
            setting="model",
            code=section.trust_remote_code,
        )
        description = section.name if section.revision is None else f"{section.name} at {section.revision}"
    return ModelFolder(
        folder,
        read_config(folder),
        weights,
        description,
        model_class,
        dropout=section.dropout,
        attention_dropout=section.attention_dropout,
    )


def resolve_tokenizer(
    config: RunConfig,
    model: ModelFolder,
    *,
    cache: Path,
    progress: Say | None = None,
    training_progress: Callable[[Progress], None] | None = None,
) -> Path:
    """The folder of the tokenizer: the named one, or the model's own; a copy where it gets another chat template."""
    folder = _find_tokenizer(config, model, cache, progress, training_progress)
    template = config.data.chat_template
    return folder if template is None else with_chat_template(folder, template, cache)


def _find_tokenizer(
    config: RunConfig,
    model: ModelFolder,
    cache: Path,
    progress: Say | None,
    training_progress: Callable[[Progress], None] | None,
) -> Path:
    name = config.tokenizer
    if name is None and config.model.name == BUILT_IN and config.model.config is None:
        name = BUILT_IN
    if name == BUILT_IN:
        vocabulary = min(BUILT_IN_VOCABULARY, int(model.config.get("vocab_size", BUILT_IN_VOCABULARY)))
        return built_in_tokenizer(cache, vocabulary=vocabulary, progress=training_progress)
    if name is None:
        if has_tokenizer(model.folder):
            return model.folder
        what, do = f"{model.description} has no tokenizer of its own", "set tokenizer: a hub id, a folder, or built-in"
        raise InputError(what, where=str(model.folder), do=do)
    if is_folder(name):
        folder = at_home(name)
        if not folder.is_dir():
            raise missing_folder(folder, "tokenizer", f"no tokenizer in {folder}: there is no such folder")
        if not has_tokenizer(folder):
            raise InputError(
                f"no tokenizer in {folder}",
                where="tokenizer",
                why=f"none of {', '.join(TOKENIZER_FILES[:3])} is there",
                do="name a folder that has them, a hub id, or built-in",
            )
        return folder
    folder = download(name, revision=None, weights=False, progress=progress, setting="tokenizer")
    if not has_tokenizer(folder):
        raise InputError(f"{name} on the hub has no tokenizer files", where="tokenizer", do="name another one")
    return folder


def has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in TOKENIZER_FILES)


def _write_config(config: dict[str, Any], cache: Path, name: str) -> Path:
    """A folder in the cache with this config.json, named by its content; several processes may write it at once."""
    if not isinstance(config.get("model_type"), str):
        raise InputError("model.config has no model_type", where="model.config", do="add for example model_type: llama")
    try:
        text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    except TypeError as error:
        raise InputError(f"model.config is not plain data: {error}", where="model.config") from None
    folder = cache / "models" / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "config.json").is_file():
            write_atomically(folder / "config.json", text)
    except OSError as error:
        what = f"cannot write the model's config to the cache: {error.strerror}"
        raise InputError(what, where=str(folder), do=CACHE_ADVICE) from None
    return folder

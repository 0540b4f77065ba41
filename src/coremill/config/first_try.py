"""`--model` and `--data`: a first try without a run file, or another model or text for the one that is there.

Both are short for a `--set`. Beside a run file `--model` also takes away what that file says of its own model: weights,
revision, code and tokenizer of one model mean nothing for another. Without a run file the text is passed over once,
unless the length is given, and text for the built-in model is learned as fast as the built-in example learns.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import PurePath

from coremill.config.keys import keys
from coremill.config.layers import DEFAULT, Problem, Settings
from coremill.config.schema import BUILT_IN, RunConfig
from coremill.errors import InputError

# What a run file says of its own model, besides its name.
_OF_ITS_MODEL = (
    *("model.config", "model.weights", "model.revision", "model.trust_remote_code", "model.code_sha256"),
    "tokenizer",
)
_OF_ITS_TEXT = ("data.sources",)
# Of the built-in example: its length, which may be more than the warm-up of a short text, and a sample of Python.
_OF_THE_EXAMPLE = ("train.steps", "train.warmup_steps", "sample.prompt")


@dataclass(frozen=True)
class Named:
    """What the command line names by an option of its own."""

    model: str | None = None
    data: str | None = None

    def __bool__(self) -> bool:
        return self.model is not None or self.data is not None

    def options(self) -> list[tuple[str, str, str]]:
        """Each as option, key and value."""
        both = (("--model", "model.name", self.model), ("--data", "data.source", self.data))
        return [(option, key, value) for option, key, value in both if value is not None]


def takes_example(given: Named, above: Settings) -> bool:
    """Whether a try without a run file starts from the built-in example: its model, on other text."""
    shape = any(path[:2] in (("model", "name"), ("model", "config")) for path in above.values)
    return given.data is not None and given.model in (None, BUILT_IN) and not shape


def add_named(settings: Settings, given: Named, above: Settings, *, file: str | None) -> tuple[str, ...]:
    """Settle what is named, under `--set`; returns what that took away from the run file, in words.

    What is said twice, and differently, is reported as a problem.
    """
    notes = []
    for option, key, value in given.options():
        said = f"{option} {value}"
        settings.problems += _contradictions(said, key, value, above)
        of_file = _OF_ITS_MODEL if option == "--model" else _OF_ITS_TEXT
        gone = [name for name in of_file if _drop(settings, name)] if file is not None else []
        if gone:
            verb = "is" if len(gone) == 1 else "are"
            notes.append(f"{said}: {', '.join(gone)} of {file} {verb} left out, for another model or text")
        settings.add_value(key, value, said)
    if given and file is None:
        for name in _OF_THE_EXAMPLE:
            _drop(settings, name)
        if not {("train", "steps"), ("train", "epochs")} & above.values.keys():
            settings.add_value("train.epochs", 1.0, " ".join(f"{name} {value}" for name, _, value in given.options()))
    return tuple(notes)


def words_of_try(config: RunConfig, *, from_example: bool) -> str:
    """The first line of a try without a run file: which model, which text, for how long."""
    model = "a small model from scratch (built-in)" if config.model.name == BUILT_IN else config.model.name
    if config.model.config is not None:
        model = f"a {config.model.config.get('model_type')} from scratch"
    sources = config.data.sources or ()
    text = "the Python standard library (built-in)" if config.data.source == BUILT_IN else config.data.source
    text = ", ".join(each.source for each in sources) or text
    steps, epochs = config.train.steps, config.train.epochs or 0
    length = f"{epochs:g} epochs" if steps is None else f"{steps:,} steps"
    length = "one epoch" if epochs == 1 else "1 step" if steps == 1 else length
    others = "is the built-in example's" if from_example else "has its default"
    return f"no run file: {model} on {text} for {length}, every other key {others}"


def name_of_try(config: RunConfig) -> str:
    """For its run folder: model and text by the last part of their names, with a digest where that leaves some out."""
    shape = config.model.config
    text = "+".join(each.source for each in config.data.sources or ()) or config.data.source
    whole = (config.model.name if shape is None else str(shape.get("model_type", "")), text)
    parts = [_slug(_last_part(name)) for name in whole]
    name = "-".join(part for part in parts if part) or "try"
    if all(_slug(given) == given for given in whole) and shape is None:
        return name
    digest = hashlib.blake2b("\0".join([*whole, str(shape)]).encode(), digest_size=2).hexdigest()
    return f"{name}-{digest}"


def _last_part(name: str) -> str:
    """wikitext of hf://org/wikitext:raw@main, train of data/train.jsonl.gz, books of books/*.txt."""
    path = PurePath(name.removeprefix("hf://").partition("@")[0])
    if name.startswith("hf://"):
        return path.name.partition(":")[0]
    if any(sign in path.name for sign in "*?["):
        path = PurePath(path.parent.name) if path.parent.name else PurePath("files")
    return path.name if not path.suffix[1:].isalpha() else path.name.partition(".")[0]


def _slug(text: str) -> str:
    return re.sub(r"[^\w.-]+", "-", text).strip("-.")


def _contradictions(said: str, key: str, value: str, above: Settings) -> list[Problem]:
    """`--set` gives the same key another value, or a shape where a name is given."""
    others = {key, "model.config"} if key == "model.name" else {key, "data.sources"}
    found = []
    for path, other in above.values.items():
        dotted = ".".join(str(part) for part in path[:2])
        if dotted in others and (dotted != key or other != value):
            origin = above.origins.get(path, DEFAULT)
            found.append((origin, origin.where(dotted)))
    if not found:
        return []
    origin, where = found[0]
    what = "models" if key == "model.name" else "texts"
    error = InputError(
        f"{said} and {where} name two {what}",
        where=f"{said} and {where}",
        why=f"{said.partition(' ')[0]} is short for --set {key}=...",
        do="keep one of them",
    )
    return [Problem(error, origin, tuple(others & keys().keys()))]


def _drop(settings: Settings, key: str) -> bool:
    """Forget what the run file says of a key; whether it said something."""
    path = tuple(key.split("."))
    there = any(each[: len(path)] == path for each in settings.values)
    settings.drop(key)
    settings.origins = {each: origin for each, origin in settings.origins.items() if each[: len(path)] != path}
    return there

"""A run file and `--set` options -> one checked config in which every value knows where it came from.

Precedence: default < file < --set and the options that are short for one. All problems come at once, each as what,
where, why and what to do. Without a file `--set` changes the built-in example, unless it names a model or data: the
example's learning rate and tokenizer are the example's, and a run of something else starts from the defaults.
`--model` and `--data` are in first_try.py.
"""

from __future__ import annotations

import importlib.resources
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from coremill.config.document import Flaw, dotted_key, read_document
from coremill.config.first_try import Named, add_named, name_of_try, takes_example, words_of_try
from coremill.config.keys import keys
from coremill.config.layers import DEFAULT, Origin, Problem, Settings, said, within
from coremill.config.open_questions import questions_left
from coremill.config.places import Places, find_places, meant_beside, relative_paths, with_paths
from coremill.config.rule import Breach
from coremill.config.rules import breaches_of
from coremill.config.run_files import read_run_file
from coremill.config.schema import BUILT_IN, RunConfig
from coremill.config.wrong_items import explain_items
from coremill.config.wrong_values import explain_value
from coremill.errors import ConfigError, InputError

COMMAND_LINE = "command line"
_NAMES_A_RUN = (("model", "name"), ("model", "config"), ("data", "source"), ("data", "sources"))


@dataclass(frozen=True)
class LoadedConfig:
    """What the user asked for, checked; `origins` has every key, and what is inside `model.config`, by dotted name."""

    config: RunConfig
    origins: Mapping[str, Origin]
    name: str  # the stem of the file, built-in for the example, else the model's
    path: Path | None
    text: str
    without_file: str | None = None  # in words, where there is no run file: what the values start from
    notes: tuple[str, ...] = ()  # in words: what else was done to the values
    places: Places = Places()

    if not TYPE_CHECKING:  # a type checker knows what there is

        def __getattr__(self, name: str) -> Any:
            """Sections are one level down, which is easily forgotten."""
            hint = (
                f": sections are in its .config, this one is .config.{name}" if name in RunConfig.model_fields else ""
            )
            raise AttributeError(f"a LoadedConfig has no attribute {name!r}{hint}", name=name, obj=self)

    @property
    def located(self) -> RunConfig:
        """The config for those who open models and data: paths as they were found, not as they were written."""
        return with_paths(self.config, self.places.paths)

    @property
    def open_questions(self) -> list[str]:
        """In words: questions of an imported run file that nobody has answered yet."""
        return questions_left(self.text, self.origins)

    def with_answers(self) -> LoadedConfig:
        """Itself, for what trains: the built-in model or text is nobody's answer."""
        for error in _unanswered(self.path, self.open_questions):
            raise error
        return self

    def where(self, key: str) -> str:
        """The place of a key, for the message of an error found later."""
        return self.origins.get(key, DEFAULT).where(key)

    @contextmanager
    def placing(self) -> Iterator[None]:
        """An error found later that names a key is raised with the place where that key was set."""
        try:
            yield
        except InputError as error:
            key, colon, value = (error.where or "").partition(": ")
            full_name = "model.name" if key == "model" else key
            near = meant_beside(self.config, full_name, self.path)
            if near is not None and "did you mean" not in (error.do or ""):
                error.what = f"there is no {relative_paths(self.config)[full_name]}"
                error.why = "it is neither in the current folder nor beside the run file"
                error.do = f"did you mean {near}, beside the run file?"
            origin = self.origins.get(key) or self.origins.get(f"{key}.name", DEFAULT)
            if origin is not DEFAULT:  # --set shows the value already
                error.where = origin.where(key) + (f"{colon}{value}" if origin.file is not None else "")
            raise


def load_config(
    path: Path | None,
    overrides: Sequence[str] | Mapping[str, Any] = (),
    *,
    nproc: int | None = None,
    model: str | None = None,
    data: str | None = None,
) -> LoadedConfig:
    """Read and check a run file; without one the built-in example, or the defaults where a model or data is named.

    `overrides` are as on the command line ("train.steps=10"), or values by their keys. Raises ConfigError with all
    problems.
    """
    given = Named(model, data)
    above = _add_overrides(Settings(), overrides)
    named = _named_by(above) if path is None else []
    from_example = takes_example(given, above)
    if path is not None:
        text, file = read_run_file(path), str(path)
    elif (named or given) and not from_example:
        text, file = "", COMMAND_LINE
    else:
        built_in = importlib.resources.files("coremill.config").joinpath("built_in.yaml")
        text, file = built_in.read_text(encoding="utf-8"), BUILT_IN
    settings = Settings()
    document = read_document(text)
    if not document.readable:
        raise ConfigError([_flaw_problem(flaw, file).error for flaw in document.flaws])
    if document.value is not None and not isinstance(document.value, dict):
        raise ConfigError([_not_a_mapping(document.value, file)])
    settings.add_file(document.value or {}, file, document.lines)
    for flaw in document.flaws:
        problem = _flaw_problem(flaw, file)
        settings.problems.append(problem)
        for key in problem.doubtful:
            settings.drop(key)
    notes = add_named(settings, given, above, file=None if path is None else str(path))
    _add_overrides(settings, overrides)
    if nproc is not None:
        settings.add_value("parallel.ranks_per_node", nproc, f"--nproc {nproc}")

    config, problems = _validate(settings)
    places = find_places(config, path)
    doubtful = frozenset(key for problem in problems for key in problem.doubtful)
    breaches = breaches_of(with_paths(config, places.paths), doubtful)
    problems += [_breach_problem(breach, settings, file) for breach in breaches]
    origins = _all_origins(settings)
    if problems:
        errors = [problem.error for problem in sorted(problems, key=lambda problem: problem.place)]
        raise ConfigError([*_unanswered(path, questions_left(text, origins)), *errors])
    if path is not None:
        return LoadedConfig(config, origins, path.stem, path, text, notes=notes, places=places)
    if given:
        words = words_of_try(config, from_example=from_example)
        return LoadedConfig(config, origins, name_of_try(config), path, text, words)
    if named:
        words = f"no run file: {' and '.join(named)} by --set, every other key has its default"
        return LoadedConfig(config, origins, _name_of(config), path, text, words)
    return LoadedConfig(config, origins, BUILT_IN, path, text, "no run file: the built-in example")


def _unanswered(path: Path | None, questions: Sequence[str]) -> list[InputError]:
    if not questions:
        return []
    error = InputError(
        "the run file still has open questions",
        where=str(path),
        why="; ".join(questions),
        do="answer them in the file, or on the command line by --model and --data",
    )
    return [error]


def _add_overrides(settings: Settings, overrides: Sequence[str] | Mapping[str, Any]) -> Settings:
    if isinstance(overrides, Mapping):
        for key, value in overrides.items():
            settings.add_value(key, value, f"settings={{{key!r}: {value!r}}}")
    else:
        for override in overrides:
            settings.add_override(override)
    return settings


def _named_by(settings: Settings) -> list[str]:
    """Which of the keys that make a run another one than the built-in example are given."""
    given = {path[:2] for path, value in settings.values.items() if value not in (None, BUILT_IN)}
    return [dotted_key(path).removesuffix(".name") for path in _NAMES_A_RUN if path in given]


def _name_of(config: RunConfig) -> str:
    """For the folder of a run without a file: the last part of the model's name; built-in alone is the example's."""
    shape, name = config.model.config, config.model.name
    if shape is not None:
        name = str(shape.get("model_type", ""))
    elif name == BUILT_IN:
        name = "built-in-model"
    return re.sub(r"[^\w.-]+", "-", Path(name).name).strip("-.") or "run"


def _validate(settings: Settings) -> tuple[RunConfig, list[Problem]]:
    """The config of all good values, and a problem for each bad one."""
    problems = list(settings.problems)
    try:
        return RunConfig.model_validate(settings.nested()), problems
    except ValidationError as error:
        # a key with several alternatives gives several errors, their loc going on inside it; it gets one message
        bad: dict[str, list[tuple[int | str, ...]]] = {}
        for detail in error.errors():
            two, one = dotted_key(detail["loc"][:2]), dotted_key(detail["loc"][:1])
            bad.setdefault(two if two in keys() else one, []).append(detail["loc"][2:])
    for dotted, places in bad.items():
        key, value, origin = keys()[dotted], settings.value_of(dotted), settings.origin_of(dotted)
        if key.inside and isinstance(value, list) and all(places):
            found = explain_items(key, value, places, settings)
        else:
            found = [explain_value(key, value, origin)]
        problems += [Problem(problem, origin, (dotted,)) for problem in found]
        settings.drop(dotted)
    return RunConfig.model_validate(settings.nested()), problems


def _flaw_problem(flaw: Flaw, file: str) -> Problem:
    key = dotted_key(flaw.path[:2])
    place = f"{file}:{flaw.line}" + (f":{flaw.column}" if flaw.column is not None else "")
    where = f"{place} ({dotted_key(flaw.path)})" if flaw.path else place
    error = InputError(flaw.what, where=where, why=flaw.why, do=flaw.do)
    return Problem(error, Origin("file", file, flaw.line), tuple(name for name in keys() if within(name, key)))


def _not_a_mapping(value: Any, file: str) -> InputError:
    return InputError(
        f"a run file holds keys and values, not {said(value)}",
        where=f"{file}:1",
        why="its top level is a mapping of sections such as model, data and train",
        do="start with for instance `model: built-in`, one `key: value` per line, a space after the colon",
    )


def _breach_problem(breach: Breach, settings: Settings, file: str) -> Problem:
    """Point at every key the rule is about that was given; else at the section it is missing from."""
    given = {key: settings.origin_of(key) for key in (breach.key, *breach.others)}
    given = {key: origin for key, origin in given.items() if origin != DEFAULT}
    if given:
        origin = next(iter(given.values()))
        where = " and ".join(found.where(key) for key, found in given.items())
    else:
        section = breach.key.partition(".")[0]
        origin = settings.origin_of(section)
        where = f"{file} ({breach.key})" if origin == DEFAULT else origin.where(section)
    return Problem(InputError(breach.what, where=where, why=breach.why, do=breach.do), origin)


def _all_origins(settings: Settings) -> dict[str, Origin]:
    origins = {dotted: settings.origin_of(dotted) for dotted in keys()}
    inside = [path for path in settings.values if len(path) > 2]
    inside += [path for path in settings.origins if len(path) > 1 and str(path[1]).endswith("]")]
    return origins | {dotted_key(path): settings.origins[path] for path in inside}

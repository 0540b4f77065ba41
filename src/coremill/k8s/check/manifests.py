"""Manifests as users keep them: YAML of one or many documents, JSON, lists, stdin, a run file that is rendered first.

YAML is read as kubectl does: version 1.1 (`on` is a boolean), dates are text, a key that stands twice is an error.
Every field keeps its line.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from coremill.errors import InputError
from coremill.k8s.check.findings import Finding, Problem, joined
from coremill.nearby import PATH_ADVICE, nearest_path

if TYPE_CHECKING:
    from coremill.k8s.render import Rendered

STDIN = "-"
_STDIN_NAME = "stdin"
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_MERGE = "tag:yaml.org,2002:merge"
_TIMESTAMP = "tag:yaml.org,2002:timestamp"
_TEXT = "tag:yaml.org,2002:str"


@dataclass(frozen=True)
class Manifest:
    """One object with where it stands."""

    file: str
    object: dict[str, Any]
    lines: Mapping[str, int]  # by path of the field
    releases: Mapping[str, str] = field(default_factory=dict)  # products it is meant for, where its run file says so
    repeated: tuple[str, ...] = ()  # paths of keys that stand twice

    @property
    def name(self) -> str:
        """NodePool/cpu-amx, or TrainJob/train/cpu-llama3 where it names a namespace."""
        metadata = self.object.get("metadata")
        metadata = metadata if isinstance(metadata, dict) else {}
        name = metadata.get("name") or metadata.get("generateName") or "?"
        return "/".join(str(part) for part in (self.object.get("kind", "?"), metadata.get("namespace"), name) if part)

    @property
    def kind(self) -> str:
        return str(self.object.get("kind", ""))

    @property
    def group(self) -> str:
        return self.api_version.rpartition("/")[0]

    @property
    def version(self) -> str:
        return self.api_version.rpartition("/")[2]

    @property
    def api_version(self) -> str:
        return str(self.object.get("apiVersion", ""))

    def finding(self, problem: Problem) -> Finding:
        return Finding(self.file, self.line_of(problem.path), self.name, problem)

    def line_of(self, path: str) -> int | None:
        """Of a field that is not there, of the nearest one around it. None: it is of a rendered object."""
        while path and path not in self.lines:
            path = path[: max(path.rfind("."), path.rfind("["), 0)]
        return self.lines.get(path)


def read_manifests(files: Sequence[str], settings: Sequence[str] = ()) -> list[Manifest]:
    """All objects of all files, in order; `settings` go over the run files. A problem with a file is an InputError."""
    found: list[Manifest] = []
    has_run = False
    for file in files:
        name = _STDIN_NAME if file == STDIN else file
        text = sys.stdin.read() if file == STDIN else _text_of(Path(file))
        documents = list(_documents(text, name))
        if len(documents) == 1 and is_run_file(documents[0][0]):
            found += _rendered(file, settings)
            has_run = True
            continue
        for value, lines, repeated in documents:
            found += _objects(value, lines, repeated, name)
    if not found:
        raise InputError("no objects to check", where=", ".join(files), do="name files with manifests, or a run file")
    if settings and not has_run:
        raise manifests_take_no_settings(f"FILE {', '.join(files)}")
    return found


def manifests_take_no_settings(where: str) -> InputError:
    return InputError(
        "--set changes a run file, and these are manifests", where=where, do="render them anew, or name the run file"
    )


def manifests_in(text: str, name: str) -> list[Manifest]:
    """The objects of a text, which stands in a file of that name, or will."""
    return [one for value, lines, repeated in _documents(text, name) for one in _objects(value, lines, repeated, name)]


def holds_a_run(file: Path) -> bool:
    """Whether a file is a run file; one that is not there may have been meant as such."""
    if not file.is_file():
        return True
    documents = list(_documents(_text_of(file), str(file)))
    return not documents or (len(documents) == 1 and is_run_file(documents[0][0]))


def is_run_file(value: Any) -> bool:
    return isinstance(value, dict) and not {"apiVersion", "kind", "metadata", "spec"} & set(value)


def _text_of(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        near = nearest_path(str(file), Path.is_file)
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        if file.is_dir():
            raise InputError(f"{file} is a folder", where="FILE", do=f"name its files: {file}/*.yaml") from error
        raise InputError(
            f"{file} cannot be read", where="FILE", why=why, do=f"did you mean {near}?" if near else PATH_ADVICE
        ) from error


def _documents(text: str, name: str) -> Iterator[tuple[Any, dict[str, int], tuple[str, ...]]]:
    loader = _Loader(text)
    try:
        while loader.check_node():
            node = loader.get_node()
            lines: dict[str, int] = {}
            repeated: list[str] = []
            value = _plain(node, loader, "", lines, repeated)
            if value is not None:
                yield value, lines, tuple(repeated)
    except (yaml.YAMLError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{name}:{mark.line + 1}" if mark else name
        why = getattr(error, "problem", None) or str(error)
        raise InputError(
            "this is not YAML", where=where, why=why, do="mend it; tabs and lost spaces are the usual cause"
        ) from error
    finally:
        loader.dispose()


def _plain(node: Any, loader: Any, path: str, lines: dict[str, int], repeated: list[str]) -> Any:
    """The value of a node, in plain lists and dicts; lines by path are noted along the way."""
    lines.setdefault(path, node.start_mark.line + 1)
    if isinstance(node, yaml.MappingNode):
        loader_keys = [key.value for key, _ in node.value if key.tag != _MERGE]
        repeated += [joined(path, str(key)) for key in dict.fromkeys(loader_keys) if loader_keys.count(key) > 1]
        loader.flatten_mapping(node)
        value = {}
        for key_node, one in node.value:
            key = str(loader.construct_object(key_node)) if not isinstance(key_node.value, str) else key_node.value
            where = joined(path, key)
            lines.setdefault(where, key_node.start_mark.line + 1)
            value[key] = _plain(one, loader, where, lines, repeated)
        return value
    if isinstance(node, yaml.SequenceNode):
        return [_plain(one, loader, joined(path, index), lines, repeated) for index, one in enumerate(node.value)]
    if node.tag == _TIMESTAMP:
        node.tag = _TEXT
    return loader.construct_object(node)


def _objects(value: Any, lines: dict[str, int], repeated: tuple[str, ...], file: str) -> Iterator[Manifest]:
    if not isinstance(value, dict):
        raise InputError(
            "this is no object",
            where=f"{file}:{lines.get('', 1)}",
            why="a manifest is a mapping",
            do="begin with apiVersion",
        )
    if str(value.get("kind")).endswith("List") and isinstance(value.get("items"), list):
        for index, item in enumerate(value["items"]):
            path = f"items[{index}]"
            own = {key[len(path) :].lstrip("."): line for key, line in lines.items() if key.startswith(path)}
            twice = tuple(key[len(path) :].lstrip(".") for key in repeated if key.startswith(path))
            yield from _objects(item, own, twice, file)
        return
    yield Manifest(file, value, lines, repeated=repeated)


def _rendered(file: str, settings: Sequence[str]) -> list[Manifest]:
    """The objects of a run file, checked for the releases it names."""
    if file == STDIN:
        raise InputError("a run file cannot come from stdin", where="FILE -", do="name the file")
    from coremill.config.load import load_config
    from coremill.k8s.render import render_objects

    return manifests_of(render_objects(load_config(Path(file), list(settings))), file)


def manifests_of(rendered: Rendered, file: str) -> list[Manifest]:
    """What was rendered, to be checked for the releases that its run file names."""
    section = rendered.job.section
    releases: dict[str, str] = {"trainer": section.trainer}
    if section.has_karpenter:
        releases["karpenter"] = section.karpenter
    return [Manifest(file, each, {}, releases) for each in rendered.objects]

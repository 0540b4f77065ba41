"""Settings by where they come from: the run file first, `--set` on top; each value keeps its origin.

A layer is taken apart into single settings (`train.steps`, `model.config.hidden_size`), so that a later one replaces
exactly what it names. Keys the schema does not know are reported here, and left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from coremill.config.document import Flaw, KeyPath, dotted_key, read_document
from coremill.config.keys import TOP, keys, names_in, sections
from coremill.config.unknown_keys import (
    explain_unknown_key,
    inside_a_list,
    is_known_elsewhere,
    plain_name,
    unknown_section,
)
from coremill.errors import InputError


@dataclass(frozen=True)
class Origin:
    """Where a value comes from."""

    kind: Literal["default", "file", "--set"]
    file: str | None = None  # as the user wrote it, or built-in
    line: int | None = None
    text: str | None = None  # of --set: key=value
    option: str | None = None  # as the user wrote it, where that was short for a --set

    def __str__(self) -> str:
        """Short, for the comments of `config show`: `default`, `run.yaml:7`, `--set`, `--nproc`."""
        if self.option is not None and self.option.startswith("--"):
            return self.option.partition(" ")[0]
        return f"{Path(self.file).name}:{self.line}" if self.file is not None else self.kind

    def where(self, key: str) -> str:
        """Long, for messages: a place the user can go to."""
        if self.kind == "--set":
            return self.option or f"--set {self.text}"
        return f"{self.file}:{self.line} ({key})" if self.file is not None else f"{key} (default)"


DEFAULT = Origin("default")


@dataclass(frozen=True)
class Problem:
    """A message, its origin for sorting, and the keys whose values are in doubt because of it."""

    error: InputError
    origin: Origin
    doubtful: tuple[str, ...] = ()

    @property
    def place(self) -> tuple[int, int]:
        return (0, self.origin.line or 0) if self.origin.kind == "file" else (1, 0)


@dataclass
class Settings:
    """Single settings by path, with their origins; filled layer by layer."""

    values: dict[KeyPath, Any] = field(default_factory=dict)
    origins: dict[KeyPath, Origin] = field(default_factory=dict)  # also of sections and mappings
    problems: list[Problem] = field(default_factory=list)
    given: dict[str, Any] = field(default_factory=dict)  # by name alone: what unknown keys mean together

    def add_file(self, tree: Mapping[Any, Any], file: str, lines: Mapping[KeyPath, int]) -> None:
        self.given |= _by_name(tree)
        for name, value in tree.items():
            self._settle((name,), value, lambda path: Origin("file", file, lines.get(path)))

    def add_override(self, text: str, option: str | None = None) -> None:
        """Take in one `--set`: a.b=c, its value written as YAML, or as it is where the key takes text."""
        printable = _printable(text)
        origin = Origin("--set", text=printable, option=option)
        dotted, equals, raw = text.partition("=")
        if printable != text:
            self._report("--set takes UTF-8 text only", origin, dotted, do="type it again, or use a run file")
            return
        path = tuple(part.strip() for part in dotted.strip().split("."))
        if not equals or not all(path):
            what = "--set needs key=value" if not equals else "--set needs a key before the ="
            self._report(what, origin, dotted, do="write for instance --set train.steps=100")
            return
        value, flaw = _override_value(dotted_key(path), raw)
        if flaw is not None:
            self._report(
                f"the value of --set {dotted_key(path)} cannot be read: {flaw.what}",
                origin,
                dotted,
                why=flaw.why,
                do="put quotes around the value, inside those of the shell: --set 'key=\"value\"'",
                doubtful=tuple(key for key in keys() if within(key, dotted_key(path))),
            )
            return
        self.given |= _by_name({path[-1]: value})
        self._settle(path, value, lambda _: origin)

    def add_value(self, dotted: str, value: Any, option: str) -> None:
        """Take in one value as Python or a short option has it: nothing is read as YAML."""
        origin = Origin("--set", text=f"{dotted}={value}", option=option)
        self._settle(tuple(dotted.split(".")), value, lambda _: origin)

    def origin_of(self, key: str) -> Origin:
        return self.origins.get(tuple(key.split(".")), DEFAULT)

    def drop(self, key: str) -> None:
        """Forget a setting and all inside it."""
        gone = tuple(key.split("."))
        for path in [path for path in self.values if path[: len(gone)] == gone]:
            del self.values[path]

    def nested(self) -> dict[str, Any]:
        """The settings as the schema takes them."""
        tree: dict[str, Any] = {}
        for path, value in self.values.items():
            level: dict[Any, Any] = tree
            for part in path[:-1]:
                level = level.setdefault(part, {})
            level[path[-1]] = value
        return tree

    def value_of(self, key: str) -> Any:
        """The value as given, of a key that was given."""
        level: Any = self.nested()
        for part in key.split("."):
            level = level[part]
        return level

    def _settle(self, path: KeyPath, value: Any, origin_of: Callable[[KeyPath], Origin]) -> None:
        """Put a value where the schema wants it, taking sections apart; report what the schema does not know."""
        section = path[0]
        if section in sections() and section != TOP:
            if len(path) == 1:
                self._settle_section(section, value, origin_of)
                return
            parent, own = str(section), path[:2]
        else:
            parent, own = TOP, path[:1]
        known = dotted_key(own)
        listed = keys().get(known.partition("[")[0])
        if listed is not None and listed.inside and (len(path) > len(own) or "[" in known):
            found = inside_a_list(listed, path[1:], value, self.values.get((listed.section, listed.name)))
            self._report(
                found.what, origin_of(path), dotted_key(path), why=found.why, do=found.do, doubtful=found.targets
            )
        elif own[-1] not in names_in(parent):
            self._settle_unknown(parent, own, value if path == own else {}, origin_of)
        elif len(path) > len(own) and "object" not in keys()[known].kinds:
            self._report(
                f"unknown key {dotted_key(path)}",
                origin_of(path),
                known,
                why=f"{known} holds a single value, without keys inside",
                do=f"--set {known}=...",
                doubtful=(known,),
            )
        else:
            self._assign(path, value, origin_of)

    def _settle_unknown(self, parent: str, own: KeyPath, value: Any, origin_of: Callable[[KeyPath], Origin]) -> None:
        """Say what was meant by the key, and in a section of another tool by those inside it."""
        unknown = explain_unknown_key(parent, str(own[-1]), value, self.given)
        meant = {own: unknown}
        if isinstance(value, Mapping) and unknown.may_be_section:
            mistyped = unknown.targets and not unknown.is_single  # what is ours in it is fine, once it is moved
            meant |= {
                (*own, name): explain_unknown_key(dotted_key(own), str(name), one, self.given)
                for name, one in value.items()
                if is_known_elsewhere(str(name), ours=not mistyped)
            }
            if len(meant) > 1 and not mistyped:
                meant[own] = unknown_section(dotted_key(own))
        for path, found in meant.items():
            self._report(
                found.what, origin_of(path), dotted_key(path), why=found.why, do=found.do, doubtful=found.targets
            )

    def _settle_section(self, section: str, value: Any, origin_of: Callable[[KeyPath], Origin]) -> None:
        self.origins[(section,)] = origin_of((section,))
        if value is None:
            if self.origins[(section,)].kind == "--set":  # as if the file did not have it
                self.drop(section)
                for inner in [path for path in self.origins if path[0] == section and len(path) > 1]:
                    del self.origins[inner]
            return  # in a file: `train:` with every key commented out
        if isinstance(value, str) and section == "model":
            self.origins[("model", "name")] = origin_of(("model",))
            self.values[("model", "name")] = value
            return
        if isinstance(value, Mapping):
            for name, inner in value.items():
                self._settle((section, name), inner, origin_of)
            return
        short = "text, or " if section == "model" else ""
        first = names_in(section)[0]
        self._report(
            f"{section} must be {short}a section of keys, not {said(value)}",
            origin_of((section,)),
            section,
            why=f"the section {section} has {', '.join(names_in(section))}",
            do=f"put keys inside it: --set {section}.{first}=..., or `{first}: ...` indented under {section}:",
            doubtful=tuple(key for key in keys() if within(key, section)),
        )

    def _assign(self, path: KeyPath, value: Any, origin_of: Callable[[KeyPath], Origin]) -> None:
        for size in range(2, len(path)):  # a key inside a mapping: the mapping is no longer one value
            self.values.pop(path[:size], None)
            self.origins.setdefault(path[:size], origin_of(path))
        for inner in [inner for inner in self.values if inner[: len(path)] == path]:
            del self.values[inner]
        self.origins[path] = origin_of(path)
        self._place_items(path, value, origin_of)
        if isinstance(value, Mapping) and value:
            for name, inner_value in value.items():
                self._assign((*path, name), inner_value, origin_of)
        else:
            self.values[path] = value

    def _place_items(self, path: KeyPath, value: Any, origin_of: Callable[[KeyPath], Origin]) -> None:
        """Where the keys of mappings in a list come from: data.sources[0].share."""
        key = keys().get(dotted_key(path))
        if key is None or not key.inside:
            return
        for stale in [each for each in self.origins if dotted_key(each).startswith(f"{key.dotted}[")]:
            del self.origins[stale]
        for index, item in enumerate(value if isinstance(value, list) else ()):
            place, inside = (key.section, f"{key.name}[{index}]"), list(item) if isinstance(item, Mapping) else []
            self.origins[place] = origin_of((*path, index, inside[0])) if inside else origin_of(path)
            for inner in inside:
                self.origins[(*place, str(inner))] = origin_of((*path, index, inner))

    def _report(
        self,
        what: str,
        origin: Origin,
        key: str,
        *,
        why: str | None = None,
        do: str | None = None,
        doubtful: tuple[str, ...] = (),
    ) -> None:
        self.problems.append(Problem(InputError(what, where=origin.where(key), why=why, do=do), origin, doubtful))


def _by_name(tree: Mapping[Any, Any]) -> dict[str, Any]:
    """All settings of a tree by their last names."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        found[plain_name(name)] = value
        if isinstance(value, Mapping):
            found |= _by_name(value)
    return found


def within(key: str, prefix: str) -> bool:
    """Whether a dotted key is `prefix` or inside it."""
    return not prefix or key == prefix or key.startswith(f"{prefix}.")


def said(value: Any) -> str:
    """A value as a message quotes it."""
    if value is None:
        return "empty"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        shown = value if len(value) <= 60 else f"{value[:57]}..."
        return f"the text '{_printable(shown)}'"
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, list):
        return "a list" if value else "an empty list"
    return str(value)


def _printable(text: str) -> str:
    """Text that any terminal takes: half characters, from broken bytes on the command line, become escapes."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _override_value(dotted: str, raw: str) -> tuple[Any, Flaw | None]:
    """The value of a `--set`: YAML, but text needs no quotes: `*.txt`, `def f():` and 1234567 stay as they are."""
    key = keys().get(dotted)
    text = raw.lstrip()
    written_as_yaml = text.startswith(("'", '"')) or text.rstrip() in ("", "null", "~")
    if key is not None and key.is_text and not written_as_yaml:
        return raw, None
    if dotted == "model" and not written_as_yaml and not text.startswith("{"):
        return raw, None
    document = read_document(raw)
    return document.value, document.flaws[0] if document.flaws else None

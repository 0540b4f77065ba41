"""YAML text -> plain values that remember their line.

Works on ruamel's node graph, not on constructed objects: there every key and value still has its place, and a key
given twice is still there twice. Problems are collected, so that one reading shows all of them; only text that is not
YAML at all ends the reading.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

KeyPath = tuple[Any, ...]
"""The keys from the top to a value; text, save inside free mappings, where YAML allows numbers too."""

_TAG = "tag:yaml.org,2002:"
# a date is text to us: revisions and folders may look like one
_TEXT_TAGS = {f"{_TAG}str", f"{_TAG}timestamp", f"{_TAG}value"}
# 2e-5: text to a YAML 1.1 reader, a number to people
_EXPONENT = re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+")

_DIGITS_READ = 100  # beyond any setting; Python itself stops writing whole numbers out at 4300 digits
_VALUES_READ = 200_000

_SYNTAX_HELP = (
    ("'\\t'", "indent with spaces, not tabs"),
    ("mapping values are not allowed", "check the indentation; put quotes around a value that contains ': '"),
    ("found another document", "keep one run per file: remove the second ---"),
    ("undefined alias", "put quotes around a value that starts with *"),
    ("unexpected end of stream", "close the quote that was opened"),
    ("expected ',' or", "close the bracket that was opened, or put a comma between the values"),
    ("cannot start any token", "put quotes around a value that starts with this character"),
    ("could not find expected ':'", "write `key: value`, with a space after the colon"),
    ("expected <block end>", "give all keys of one section the same indentation"),
)


@dataclass(frozen=True)
class Flaw:
    """Something wrong with the text itself."""

    what: str
    line: int
    column: int | None = None
    why: str | None = None
    do: str | None = None
    path: KeyPath = ()


@dataclass(frozen=True)
class Document:
    """A YAML text as plain values; `lines` has the line of every key by its path."""

    value: Any
    lines: Mapping[KeyPath, int] = field(default_factory=dict)
    flaws: tuple[Flaw, ...] = ()

    @property
    def readable(self) -> bool:
        """False where the text is not YAML and `value` says nothing."""
        return not any(flaw.column is not None for flaw in self.flaws)


def read_document(text: str) -> Document:
    """Read one YAML document; an empty one has the value None."""
    reader = _Reader()
    try:
        root = YAML(typ="safe", pure=True).compose(text)
        value = None if root is None else reader.value_of(root, ())
    except MarkedYAMLError as error:
        return Document(None, flaws=(_syntax_flaw(error, text),))
    except YAMLError as error:  # a character YAML does not allow: has a position instead of a mark
        return Document(None, flaws=(_character_flaw(error, text),))
    except _TooManyValues:
        what = f"the YAML has more than {_VALUES_READ} values"
        do = "write out what its aliases (*name) stand for, and no more than is needed"
        return Document(None, flaws=(Flaw(what, 1, 1, why="aliases inside aliases repeat each other", do=do),))
    except RecursionError:
        return Document(None, flaws=(Flaw("the YAML is nested too deeply", 1, 1, do="use fewer levels of brackets"),))
    return Document(value, reader.lines, tuple(reader.flaws))


class _TooManyValues(Exception):
    """A few lines of aliases can stand for billions of values."""


class _Reader:
    """Walks the node graph once, gathering lines and flaws."""

    def __init__(self) -> None:
        self.lines: dict[KeyPath, int] = {}
        self.flaws: list[Flaw] = []
        self._open_nodes: set[int] = set()  # an alias may point at a node that contains it
        self._values = 0

    def value_of(self, node: Node, path: KeyPath) -> Any:
        self._values += 1
        if self._values > _VALUES_READ:
            raise _TooManyValues
        if isinstance(node, ScalarNode):
            return self._scalar(node, path)
        if id(node) in self._open_nodes:
            self._flaw(node, path, "the value contains itself", do="write the value out instead of the alias")
            return None
        self._open_nodes.add(id(node))
        try:
            if isinstance(node, MappingNode):
                return {key: self.value_of(value, (*path, key)) for key, value in self._entries(node, path)}
            assert isinstance(node, SequenceNode)
            return [self.value_of(item, (*path, index)) for index, item in enumerate(node.value)]
        finally:
            self._open_nodes.discard(id(node))

    def _entries(self, node: MappingNode, path: KeyPath) -> Iterator[tuple[Any, Node]]:
        first_line: dict[Any, int] = {}
        for key_node, value_node in node.value:
            line = _line(key_node)
            if not isinstance(key_node, ScalarNode):
                self._flaw(key_node, path, "a key must be a single word", do="remove the brackets around the key")
                continue
            if str(key_node.tag) == f"{_TAG}merge":
                self._flaw(key_node, path, "<< is not supported in a run file", do="write the keys out")
                continue
            key = self._scalar(key_node, path)
            if key in first_line:
                why = f"the first one is on line {first_line[key]}; only one of them could count"
                twice = f"{dotted_key((*path, key))} is given twice"
                self._flaw(key_node, (*path, key), twice, why=why, do="keep one")
                continue
            first_line[key] = line
            self.lines[(*path, key)] = line
            yield key, value_node

    def _scalar(self, node: ScalarNode, path: KeyPath) -> Any:
        tag, text = str(node.tag), str(node.value)
        plain = not node.style
        if tag in _TEXT_TAGS:
            return float(text.replace("_", "")) if plain and _EXPONENT.fullmatch(text) else text
        if tag == f"{_TAG}null":
            return None
        if tag == f"{_TAG}bool":
            return text.lower() in ("true", "yes", "on")
        try:
            if tag == f"{_TAG}int":
                return _whole_number(text)
            if tag == f"{_TAG}float":
                return _number(text)
        except ValueError:
            self._flaw(node, path, f"{text[:40]} is not a number that can be read", do="write plain digits")
            return None
        self._flaw(node, path, f"the tag {tag.removeprefix(_TAG)} is not supported in a run file", do="remove the tag")
        return text

    def _flaw(self, node: Node, path: KeyPath, what: str, *, why: str | None = None, do: str | None = None) -> None:
        self.flaws.append(Flaw(what, _line(node), why=why, do=do, path=path))


def _line(node: Node) -> int:
    return int(node.start_mark.line) + 1


def dotted_key(path: KeyPath) -> str:
    """('train', 'steps') -> 'train.steps'."""
    return ".".join(str(part) for part in path)


def _whole_number(text: str) -> int:
    digits = text.replace("_", "").lower()
    sign = -1 if digits.startswith("-") else 1
    digits = digits.lstrip("+-")
    if len(digits) > _DIGITS_READ:
        raise ValueError("too long")
    for prefix, base in (("0x", 16), ("0o", 8), ("0b", 2)):
        if digits.startswith(prefix):
            return sign * int(digits[2:], base)
    return sign * int(digits)


def _number(text: str) -> float:
    text = text.replace("_", "").lower()
    return float(text.replace(".inf", "inf").replace(".nan", "nan"))


def _syntax_flaw(error: MarkedYAMLError, text: str) -> Flaw:
    mark = error.problem_mark or error.context_mark
    line, column = (int(mark.line) + 1, int(mark.column) + 1) if mark else (1, 1)
    said = " ".join(part for part in (error.context, error.problem) if part)
    helps = (help_text for sign, help_text in _SYNTAX_HELP if sign in said)
    do = next(helps, "write `key: value`, indented with spaces")
    rows = text.splitlines()
    shown = rows[line - 1].strip() if line <= len(rows) else ""
    why = f"{said}, at: {shown}" if shown else said
    return Flaw("this is not valid YAML", line, column, why=why, do=do)


def _character_flaw(error: YAMLError, text: str) -> Flaw:
    position = int(getattr(error, "position", 0))
    before = text[:position]
    line, column = before.count("\n") + 1, position - (before.rfind("\n") + 1) + 1
    code = ord(text[position]) if position < len(text) else 0
    do = "remove it, or write it as an escape in double quotes"
    return Flaw(f"the character U+{code:04X} is not allowed in YAML", line, column, do=do)

"""What becomes of each setting that was brought: a setting of ours, or nothing, and then why.

Every setting gets an answer; one that nobody knows is said to be unknown. The answers come from the table of other
tools' settings (config/foreign.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from coremill.config.foreign import FOREIGN_VALUES, LATER_VALUES, RENAMED, Foreign, find_foreign
from coremill.config.keys import Key, keys
from coremill.config.show import scalar_text
from coremill.config.translate import accepts, beside_word, unwarmed
from coremill.config.unknown_keys import plain_name

Kind = Literal["mapped", "dropped", "retired", "unknown"]
AUTO = "auto"
# Not pad_token and its like.
_SECRETS = r"(?:(?:hub|hf|huggingface|auth|access|api|wandb)[_-]?token|secret|password|(?:api|access)[_-]?key)"
_SECRET = re.compile(rf"{_SECRETS}|^-*token$", re.IGNORECASE)
_SECRET_IN_COMMAND = re.compile(rf"(?<!\S)((?:[\w-]*{_SECRETS}[\w-]*|--?token)[= ]+)(?![-\"']*\$|-)\S+", re.IGNORECASE)
# Names of ours that mean something else in most scripts, and sections that no other tool has.
_AMBIGUOUS = ("name", "config", "rank", "alpha", "weights", "every", "keep", "rows")
_NAMED_TEMPLATE = ("chat_template_path",)  # `chat_template: chatml` is no file of that name
_SHARED_SECTIONS = ("", "model", "data", "train", "parallel", "lora", "evaluation")
_LONGEST_VALUE = 100
_EMPTY = "it is left empty there"


@dataclass(frozen=True)
class Brought:
    """One setting as it was written somewhere else."""

    name: str  # as written, dotted where it was in a section, with its dashes where it was an option
    path: tuple[str, ...]  # the same as the table has it
    value: Any
    tool: str
    typed: str | None = None  # the value of an option, as it was typed

    @property
    def text(self) -> str:
        """Name and value on one line, without secrets."""
        if self.name.startswith("-"):
            return self.name if self.typed is None else f"{self.name} {self.shown}"
        return f"{self.name}={self.shown}" if self.tool == "environment" else f"{self.name}: {self.shown}"

    @property
    def shown(self) -> str:
        if _SECRET.search(self.name) and isinstance(self.value, str):
            return "***"
        text = scalar_text(self.value) if self.typed is None else one_line(self.typed)
        return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}..."


@dataclass(frozen=True)
class Fate:
    """What becomes of a setting: keys of the run file, words of a command line, or neither and why."""

    brought: Brought
    kind: Kind
    why: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    command: str = ""  # what it is on the command line of coremill launch
    note: str = ""  # said beside the settings


def one_line(text: str) -> str:
    """Nothing in it may end a comment."""
    return re.sub(r"[^\x20-\x7e\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "?", re.sub(r"\s+", " ", text))


def without_secrets(command: str) -> str:
    """Run files are shown around; the words of a command may hold a password."""
    return _SECRET_IN_COMMAND.sub(r"\1***", command)


def words_without_secrets(words: Sequence[str]) -> list[str]:
    """The same of a command that is a list: a secret stands behind its name, or is the word after it."""
    after_name = (name.startswith("-") and "=" not in name and bool(_SECRET.search(name)) for name in ("", *words))
    hidden = (is_value and not word.startswith(("-", "$")) for is_value, word in zip(after_name, words, strict=False))
    return ["***" if is_hidden else without_secrets(word) for is_hidden, word in zip(hidden, words, strict=True)]


def settings_in(tree: Mapping[Any, Any], tool: str, above: tuple[str, ...] = ()) -> Iterator[Brought]:
    """Every single setting of a tree; a mapping that the table takes whole is one."""
    for name, value in tree.items():
        written = (*above, one_line(str(name)))
        path = tuple(plain_name(part) for part in written)
        row = find_foreign(path) if isinstance(value, Mapping) else None
        if isinstance(value, Mapping) and value and not (row is not None and row.whole and path[-1] in row.names):
            yield from settings_in(value, tool, written)
        else:
            yield Brought(".".join(written), path, value, tool)


def by_name(brought: Sequence[Brought], **more: Any) -> dict[str, Any]:
    """What translations see beside a value: all settings by their last name, the first of a name.

    Not those of sections that come to nothing here: `block_size` of DeepSpeed's `aio` is no length of a row.
    """
    given: dict[str, Any] = {}
    for each in brought:
        row = find_foreign(each.path) if len(each.path) > 1 else None
        if each.value != AUTO and (row is None or row.targets):
            given.setdefault(each.path[-1], each.value)
    return given | more


def fate_of(brought: Brought, given: Mapping[str, Any]) -> Fate:
    """The answer for one setting."""
    if brought.value is None or brought.value == {}:
        row = find_foreign(brought.path)
        return Fate(brought, "retired" if row is not None and row.retired else "dropped", _EMPTY)
    own = _own_key(brought.path)
    if own is not None and own.dotted == "data.chat_template" and (row := find_foreign(_NAMED_TEMPLATE)) is not None:
        return _fate_by_row(brought, row, given)
    if own is not None:
        return _fate_of_own(brought, own, given)
    row = find_foreign(brought.path)
    if row is None:
        return Fate(brought, "unknown", "no such setting is known here: look at what it did")
    if brought.value == AUTO and row.targets and "deepspeed" in row.tools and brought.tool != "axolotl":
        return Fate(brought, "dropped", _auto(row))
    return _fate_by_row(brought, row, given)


def _fate_by_row(brought: Brought, row: Foreign, given: Mapping[str, Any]) -> Fate:
    cure = row.translate(brought.value, given) if row.translate is not None else None
    gone: Kind = "retired" if row.retired else "dropped"
    if cure is None:
        return Fate(brought, gone, _why_and_do(row))
    taken = {key: value for key, value in cure.settings.items() if accepts(key, value)}
    if not taken:  # it is off there, or what it asks for is not to be had
        told = _why_and_do(row) if cure.settings else cure.why or row.why
        note = "" if cure.settings else cure.note
        return Fate(brought, gone, note.lstrip(";:, ") or "it is off there" if told == RENAMED else told + note)
    return Fate(brought, "mapped", cure.why or row.why, taken, note=cure.note)


def _why_and_do(row: Foreign) -> str:
    """The reason, and what there is besides removing it."""
    do = row.do.removeprefix("remove it").lstrip(";:, ").removeprefix("or ")
    if row.why == RENAMED and do:
        return do
    return f"{row.why}; {do}" if do else row.why


def _auto(row: Foreign) -> str:
    ours = " and ".join(row.targets)
    return (
        f'"auto" has DeepSpeed take it from TrainingArguments of the script; import these too, or set {ours} yourself'
    )


def _own_key(path: tuple[str, ...]) -> Key | None:
    if len(path) > 1:
        return keys().get(".".join(path)) if len(path) == 2 and find_foreign(path) is None else None
    if path[0] in _AMBIGUOUS:
        return None
    return next((key for key in keys().values() if key.name == path[0] and key.section in _SHARED_SECTIONS), None)


def _fate_of_own(brought: Brought, key: Key, given: Mapping[str, Any]) -> Fate:
    """A name that is ours too: the same value, or our word for it."""
    value = brought.value
    if key.dotted == "train.warmup_steps" and value and (why := unwarmed(given)) is not None:
        return Fate(brought, "dropped", why)
    word = str(value).lower()
    ours = FOREIGN_VALUES.get(key.dotted, {}).get(word)
    if ours is not None and accepts(key.dotted, ours):
        return Fate(brought, "mapped", key.description, {key.dotted: ours}, note=beside_word(word))
    if accepts(key.dotted, value):
        return Fate(brought, "mapped", key.description, {key.dotted: value})
    if key.dotted == "train.warmup_steps" and accepts("train.warmup_share", value):  # transformers 5 takes a share too
        return Fate(brought, "mapped", "below 1 it is a share of the steps", {"train.warmup_share": value})
    why, _ = LATER_VALUES.get((key.dotted, word), (f"{key.dotted} takes {key.takes}", ""))
    return Fate(brought, "dropped", why)

"""Keys that are not in the schema: what was probably meant.

In this order: the key exists in another section; it is not in this release; it is another tool's name for one of
ours, with our value where it can be told; it is close to a key here, or elsewhere. A key that nobody reads would train
with the default in silence, so all are refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from coremill.config.foreign import FOREIGN_VALUES, LATER_KEYS, find_foreign, foreign_keys
from coremill.config.keys import TOP, Key, keys, names_in, sections
from coremill.config.translate import accepts, as_written
from coremill.nearby import nearest


@dataclass(frozen=True)
class UnknownKey:
    """What to say about an unknown key; `targets` are our keys that the user may have meant.

    `settings` is the cure where it is known to the last digit: what to set instead, or nothing, if it is to be removed.
    """

    what: str
    why: str
    do: str
    targets: tuple[str, ...] = ()
    settings: Mapping[str, Any] | None = None
    note: str = ""  # said after the settings
    is_guess: bool = False  # nobody knows the name; at most it is like one
    is_single: bool = False  # a key of ours that holds one value

    @property
    def may_be_section(self) -> bool:
        """Whether a section of another tool may be behind it, whose keys say more."""
        return self.is_guess or self.is_single


def explain_unknown_key(
    section: str, name: str, value: Any = None, given: Mapping[str, Any] | None = None
) -> UnknownKey:
    """What to say about `name`, unknown in `section` (`TOP` for the top level).

    `given` are all settings beside it, by name as `plain_name` makes it: some mean something together only.
    """
    dotted = f"{section}.{name}" if section else name
    word = plain_name(name)
    return (
        _joined_by_a_dot(section, dotted, word)
        or _at_home_elsewhere(section, dotted, word, value)
        or _not_in_this_release(section, dotted, word)
        or _of_another_tool(dotted, word, value, given or {word: value})
        or _misspelt(section, dotted, word)
    )


def as_settings(name: str, value: Any, given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Settings that a bare name with its value stands for, ours or another tool's; empty where nobody knows."""
    homes = [key.dotted for key in keys().values() if key.name == plain_name(name)]
    if homes:
        return {homes[0]: value}
    return (
        explain_unknown_key(TOP, name, value, given).settings if is_known_elsewhere(name, ours=False) else None
    ) or {}


def inside_a_list(key: Key, path: Sequence[object], value: Any, entries: Any) -> UnknownKey:
    """A key inside an entry of a list (`data.sources.1.share`), which `--set` takes as a whole only.

    `path`: what was written after the section; `entries`: the list as it is given so far.
    """
    what = f"one entry of {key.dotted} cannot be set alone"
    why = "--set takes such a list as a whole, for the order of its entries says which is which"
    steps = [part for part in re.split(r"[.\[\]]+", ".".join(map(str, path)).partition(key.name)[2]) if part]
    index, names = (int(steps[0]), steps[1:]) if steps and steps[0].isdecimal() else (-1, [])
    example = ", ".join(f"{inner.name}: ..." for inner in key.inside[:2])
    do = f"write the whole list: --set '{key.dotted}=[{{{example}}}, {{{example}}}]', or change it in the run file"
    if isinstance(entries, list) and 0 <= index < len(entries) and len(names) == 1:
        changed = [{key.inside[0].name: one} if isinstance(one, str) else one for one in entries]
        changed[index] = {**changed[index], names[0]: value} if isinstance(changed[index], Mapping) else changed[index]
        do = f"change it in the run file, or write --set '{key.dotted}={as_written(changed)}'"
    return UnknownKey(what, why, do, (key.dotted,))


def unknown_section(dotted: str) -> UnknownKey:
    """A section of another tool: its keys are explained one by one."""
    why = f"the sections of a run file are {', '.join(name for name in sections() if name)}"
    return UnknownKey(f"unknown section {dotted}", why, "remove it, and give its keys their places here (below)")


def is_known_elsewhere(name: str, *, ours: bool) -> bool:
    """Whether a name says what was meant, whatever section it stands in; `ours`: also where it is one of our own."""
    word = plain_name(name)
    return find_foreign((word,)) is not None or (ours and any(key.name == word for key in keys().values()))


def plain_name(name: object) -> str:
    """A name as the tables have it: lower case, underscores."""
    return str(name).strip().lower().replace("-", "_")


def _joined_by_a_dot(section: str, dotted: str, word: str) -> UnknownKey | None:
    if section != TOP or "." not in word or word not in keys():
        return None
    home, _, inner = word.partition(".")
    why = "in a file keys are nested in their section; the dot is for --set"
    return UnknownKey(f"unknown key {dotted}", why, f"write {inner}: indented under {home}:", (word,))


def _at_home_elsewhere(section: str, dotted: str, word: str, value: Any) -> UnknownKey | None:
    what = f"unknown key {dotted}"
    if word in names_in(section):  # right place, wrong spelling: Learning-Rate
        return None
    if section and word in sections():
        return UnknownKey(
            what, f"{word} is a section of its own", f"write {word}: without indentation, outside {section}:"
        )
    homes = [key for key in keys().values() if key.name == word]
    if not homes:
        return None
    home = homes[0]
    if home.section == TOP:
        why = f"{word} belongs at the top level"
        return UnknownKey(what, why, f"write {word}: without indentation, outside {section}:", (home.dotted,))
    why = f"{word} belongs in the section {home.section}"
    do = f"move it under {home.section}: (its full name is {home.dotted})"
    ours = FOREIGN_VALUES.get(home.dotted, {}).get(str(value).lower())
    if ours is not None:
        do = f"{do}, as {home.name}: {ours}"
    settings = next(
        ({home.dotted: one} for one in (ours, value) if one is not None and accepts(home.dotted, one)), None
    )
    return UnknownKey(what, why, do, (home.dotted,), settings, is_single=True)


def _not_in_this_release(section: str, dotted: str, word: str) -> UnknownKey | None:
    why = LATER_KEYS.get(f"{section}.{word}" if section else word)
    return UnknownKey(f"{dotted} is not in this release", why, "remove it") if why else None


def _of_another_tool(dotted: str, word: str, value: Any, given: Mapping[str, Any]) -> UnknownKey | None:
    around = [part for part in map(plain_name, dotted.split(".")[:-1]) if part not in sections()]
    foreign = foreign_keys().get(".".join(map(plain_name, dotted.split("."))))  # under a section that is ours too
    foreign = foreign or find_foreign((*around, word))
    if foreign is None:
        return None
    cure = None if value is None or foreign.translate is None else foreign.translate(value, given)
    what = f"unknown key {dotted}: another tool's setting"
    if cure is None:
        what = f"{dotted} is not in this release" if foreign.later else what
        return UnknownKey(what, foreign.why, foreign.do, foreign.targets)
    ours = " and ".join(f"{key.removesuffix('.name')}: {as_written(one)}" for key, one in cure.settings.items())
    do = (f"set {ours}" if ours else "remove it") + cure.note
    return UnknownKey(what, cure.why or foreign.why, do, foreign.targets, cure.settings, cure.note)


def _misspelt(section: str, dotted: str, word: str) -> UnknownKey:
    what, here = f"unknown key {dotted}", names_in(section)
    why = f"{f'the section {section}' if section else 'the top level'} has {', '.join(here)}"
    close = nearest(word, here)
    if close:
        meant = f"{section}.{close}" if section else close
        inside = tuple(key.dotted for key in keys().values() if section == TOP and key.section == close)
        return UnknownKey(what, why, f"did you mean {meant}?", (meant, *inside), is_guess=True)
    by_name = {key.name: key.dotted for key in keys().values()}
    close = nearest(word, by_name)
    if close:
        return UnknownKey(
            what, why, f"did you mean {by_name[close]}, in another section?", (by_name[close],), is_guess=True
        )
    return UnknownKey(what, why, "remove it; `coremill config schema` has all keys", is_guess=True)

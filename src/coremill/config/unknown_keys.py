"""Keys that are not in the schema: what was probably meant.

In this order: the key exists in another section; it belongs to a later release; it is another tool's name for one of
ours; it is close to a key here, or elsewhere. A key that nobody reads would train with the default in silence, so all
are refused.
"""

from __future__ import annotations

from dataclasses import dataclass

from coremill.config.foreign import LATER_KEYS, foreign_keys
from coremill.config.keys import TOP, keys, names_in, sections
from coremill.nearby import nearest


@dataclass(frozen=True)
class UnknownKey:
    """What to say about an unknown key; `targets` are our keys that the user may have meant."""

    what: str
    why: str
    do: str
    targets: tuple[str, ...] = ()


def explain_unknown_key(section: str, name: str) -> UnknownKey:
    """What to say about `name`, unknown in `section` (`TOP` for the top level)."""
    dotted = f"{section}.{name}" if section else name
    word = name.strip().lower().replace("-", "_")
    return (
        _joined_by_a_dot(section, dotted, word)
        or _at_home_elsewhere(section, dotted, word)
        or _of_a_later_release(section, dotted, word)
        or _of_another_tool(dotted, word)
        or _misspelt(section, dotted, word)
    )


def _joined_by_a_dot(section: str, dotted: str, word: str) -> UnknownKey | None:
    if section != TOP or "." not in word or word not in keys():
        return None
    home, _, inner = word.partition(".")
    why = "in a file keys are nested in their section; the dot is for --set"
    return UnknownKey(f"unknown key {dotted}", why, f"write {inner}: indented under {home}:", (word,))


def _at_home_elsewhere(section: str, dotted: str, word: str) -> UnknownKey | None:
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
    return UnknownKey(what, why, f"move it under {home.section}: (its full name is {home.dotted})", (home.dotted,))


def _of_a_later_release(section: str, dotted: str, word: str) -> UnknownKey | None:
    why = LATER_KEYS.get(f"{section}.{word}" if section else word)
    return UnknownKey(f"{dotted} is not in this release", why, "remove it") if why else None


def _of_another_tool(dotted: str, word: str) -> UnknownKey | None:
    foreign = foreign_keys().get(word)
    if foreign is None:
        return None
    return UnknownKey(f"unknown key {dotted}: another tool's setting", foreign.why, foreign.do, foreign.targets)


def _misspelt(section: str, dotted: str, word: str) -> UnknownKey:
    what, here = f"unknown key {dotted}", names_in(section)
    why = f"{f'the section {section}' if section else 'the top level'} has {', '.join(here)}"
    close = nearest(word, here)
    if close:
        meant = f"{section}.{close}" if section else close
        inside = tuple(key.dotted for key in keys().values() if section == TOP and key.section == close)
        return UnknownKey(what, why, f"did you mean {meant}?", (meant, *inside))
    by_name = {key.name: key.dotted for key in keys().values()}
    close = nearest(word, by_name)
    if close:
        return UnknownKey(what, why, f"did you mean {by_name[close]}, in another section?", (by_name[close],))
    return UnknownKey(what, why, "remove it; `coremill config schema` has all keys")

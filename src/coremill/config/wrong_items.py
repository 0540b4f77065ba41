"""Lists of mappings (`data.sources`): what is wrong with an entry, each with its own line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from coremill.config.foreign import FOREIGN_ITEM_KEYS
from coremill.config.keys import Key
from coremill.config.layers import Settings, said
from coremill.config.translate import as_written
from coremill.config.translate_datasets import as_shares
from coremill.config.unknown_keys import plain_name
from coremill.config.wrong_values import explain_value
from coremill.errors import InputError
from coremill.nearby import nearest


def explain_items(
    key: Key, items: Sequence[Any], places: Sequence[Sequence[int | str]], settings: Settings
) -> list[InputError]:
    """What is wrong with mappings in a list, each thing once; a required key that is only misspelt is not missing."""
    names = {inner.name for inner in key.inside}
    misspelt = {place[0] for place in places if len(place) > 1 and place[1] not in names}
    found = []
    for place in dict.fromkeys(tuple(place[:2]) for place in places):
        item = items[int(place[0])]
        is_missing = len(place) > 1 and isinstance(item, Mapping) and place[1] in names and place[1] not in item
        if not (is_missing and place[0] in misspelt):
            found.append(_explain_item(key, items, place, settings))
    return found


def _explain_item(key: Key, items: Sequence[Any], place: Sequence[int | str], settings: Settings) -> InputError:
    """`place`: its index and, where one is at fault, its key."""
    item = items[int(place[0])]
    names, entry = [inner.name for inner in key.inside], f"{key.dotted}[{place[0]}]"
    whole = f"an entry has {', '.join(names)}"
    required = ", ".join(f"{inner.name}: ..." for inner in key.inside if inner.is_required)
    if not isinstance(item, Mapping):
        what = f"{entry} must be a mapping{' or text' if isinstance(item, str) else ''}, not {said(item)}"
        return InputError(what, where=settings.origin_of(entry).where(entry), why=whole, do=f"write {{{required}}}")
    name = str(place[1])
    dotted = f"{entry}.{name}"
    inner = next((each for each in key.inside if each.name == name), None)
    where = settings.origin_of(dotted if name in item else entry).where(dotted)
    if inner is None:
        close = nearest(name, names)
        do = f"did you mean {close}?" if close else "remove it"
        if (ours := FOREIGN_ITEM_KEYS.get(plain_name(name))) in names:
            do = f"write {ours}: {as_written(_as_share(items, name, item) if ours == 'share' else item[name])}"
        return InputError(f"unknown key {dotted}", where=where, why=whole, do=do)
    if name not in item:
        return InputError(f"{entry} has no {name}", where=where, why=inner.description, do=f"add {name}: ...")
    return explain_value(replace(inner, section=entry), item[name], settings.origin_of(dotted))


def _as_share(items: Sequence[Any], name: str, item: Mapping[str, Any]) -> Any:
    """A weight as a part of 1, where every entry has one: 7 beside 3 is 0.7."""
    weights = [other.get(name) if isinstance(other, Mapping) else None for other in items]
    numbers = [weight for weight in weights if isinstance(weight, int | float) and weight > 0]
    if len(numbers) < len(items):
        return item[name]
    return as_shares(numbers)[next(place for place, other in enumerate(items) if other is item)]

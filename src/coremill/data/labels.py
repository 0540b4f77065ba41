"""Labels to classes or numbers: as the run file asks, else by what the labels of the training data are.

    whole numbers 0 to n-1    n classes, as they are
    other whole numbers       a class each, in their order, named after them (1 to 5 stars)
    names                     a class each, in alphabetical order
    numbers with a fraction   a number to predict: regression; a few whole ones with a point (0.0, 1.0) are classes

A csv has no types: what is written like a number is one. Numbers of a dataset that names its classes (ClassLabel) stand
for these names, and go by name to the classes of a model, whose order may be another.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from coremill.data.conversations import DROP
from coremill.data.examples import Label
from coremill.errors import InputError

OF_HEAD = "the model's head"  # who says what the labels are, where it is the model
SHOWN_CLASSES = 8
# So many different labels, and one for every second row: no classes, but numbers to predict, texts or ids.
SUSPECTED_CLASSES = 100
ROWS_OF_ONE_CLASS = 10  # in the mean: then a class of one row is looked at twice
# Whole numbers with a point are classes while there are no more different ones: pandas writes 0.0 and 1.0 where a
# column of 0 and 1 has a gap.
MOST_POINTED_CLASSES = 20

_WHOLE = re.compile(r"[+-]?[0-9]+")
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")


@dataclass(frozen=True, kw_only=True)
class Labels:
    """What a model says of a text: one of so many classes, or a number."""

    kind: Literal["classes", "regression"]
    count: int = 1  # of classes; of a number 1, as the head has one output
    names: tuple[str, ...] = ()  # of the classes; none: they are numbers from 0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Labels:
        return cls(**{**document, "names": tuple(document["names"])})

    def in_words(self) -> str:
        if self.kind == "regression":
            return "a number to predict"
        return f"{self.count:,} classes" + (f": {listed(self.names)}" if self.names else "")


@dataclass(frozen=True)
class ClassNames:
    """What a dataset calls the numbers in its column of labels, from 0."""

    names: tuple[str, ...]
    setting: str  # where they are: the features of glue

    @property
    def are_numbers(self) -> bool:
        """They say no more than the numbers do."""
        return all(name in (str(number), f"LABEL_{number}") for number, name in enumerate(self.names))


class LabelReader:
    """Takes the labels of rows, one after the other; what they are is known at the end, or asked for before."""

    def __init__(
        self, asked: Labels | None, setting: str, *, may_name: bool = True, named: ClassNames | None = None
    ) -> None:
        """`setting`: where it was asked for. So many classes without names are numbers, or as many names where these
        labels `may_name` them: not those of an evaluation, whose model has learned the numbers. `named`: what the
        dataset calls its numbers."""
        self._notes: list[str] = []
        self._class_of_number: list[int] | None = None  # of numbers that the dataset names
        if named is not None and (asked is None or asked.kind == "classes"):
            asked, setting = self._matched(asked, setting, named, may_name=may_name)
        self._asked, self._setting, self._may_name = asked, setting, may_name
        self._index = {name: number for number, name in enumerate(asked.names)} if asked is not None else {}
        self._folded = folded_index(self._index)  # models write POSITIVE, data positive
        self._plain_numbers = not any(_WHOLE.fullmatch(name) for name in self._index)
        self._bare_numbers = False  # whether a label was the place of a name
        self._values: list[Label] = []

    def _matched(
        self, asked: Labels | None, setting: str, named: ClassNames, *, may_name: bool
    ) -> tuple[Labels | None, str]:
        """What is asked for where a dataset names its classes, and who asks: these names, or a model's that they are
        held against."""
        own = Labels(kind="classes", count=len(named.names), names=named.names)
        if asked is None or (not asked.names and may_name and asked.count == own.count):
            self._class_of_number = list(range(own.count))
            if asked is not None and not named.are_numbers:
                self._notes.append(
                    f"the {asked.count} classes of {setting} have no names: they are taken to be {listed(own.names)},"
                    f" in this order ({named.setting})"
                )
            return own, named.setting
        if not asked.names:
            return asked, setting
        index = {name: number for number, name in enumerate(asked.names)}
        folded = folded_index(index)
        found = [index.get(name, folded.get(name.casefold())) for name in named.names]
        known = [each for each in found if each is not None]
        if len(set(known)) == len(found):
            self._class_of_number = known
            if known != list(range(len(known))):
                self._notes.append(
                    f"labels go by name: the classes are {listed(asked.names)} ({setting}), whatever numbers"
                    f" {named.setting} give them"
                )
        elif not named.are_numbers:
            raise _other_names(asked, setting, named)
        return asked, setting

    def take(self, label: Label, where: str) -> None:
        """InputError: it is none that was asked for."""
        asked = self._asked
        label = label.strip() if isinstance(label, str) else label
        value: Label = label if not isinstance(label, str) else number_in(label, or_else=label)
        if isinstance(value, bool):
            value = str(value).lower() if asked is None or "true" in self._index else int(value)
        if asked is None:
            pass
        elif asked.kind == "regression":
            if isinstance(value, str):
                why = f"{self._setting} asks for a number to predict"
                raise InputError(f"the label {value!r} is no number", where=where, why=why, do=f"mend it, or {DROP}")
            value = float(value)
        elif asked.names:
            value = self._class_of(label, value, where)
        elif isinstance(value, str):
            if not self._may_name:
                raise self._unknown(label, where)
        elif value != int(value) or not 0 <= value < asked.count:
            raise self._unknown(label, where)
        self._values.append(value)

    def result(self, where: str) -> tuple[Labels, npt.NDArray[Any], list[str]]:
        """What they are, the target of each row, and what there is to say of it."""
        asked, values = self._asked, self._values
        if asked is not None and (asked.kind == "regression" or asked.names):
            dtype = np.float32 if asked.kind == "regression" else np.int64
            if self._bare_numbers:
                places = listed([f"{number} is {name}" for number, name in enumerate(asked.names)])
                self._notes.append(f"labels are numbers, taken as places among the classes: {places} ({self._setting})")
            return asked, np.array(values, dtype=dtype), self._notes
        texts = [value for value in values if isinstance(value, str)]
        if asked is not None and not texts:
            return asked, np.array(values, dtype=np.int64), []
        pointed: list[str] = []
        if not texts and any(isinstance(value, float) for value in values):
            if (said := _why_regression(values)) is not None:
                return Labels(kind="regression"), np.array(values, dtype=np.float32), [said]
            values = [int(value) for value in values]
            pointed = [
                "the labels are whole numbers with a decimal point, and few different ones, so they are classes; to"
                " predict a number instead set model.labels to regression"
            ]
        names, numbers = _sorted_classes(values)
        self._require_classes(names, where)
        known = {value: number for number, value in enumerate(numbers)}
        targets = np.array([known[value] for value in values], dtype=np.int64)
        if numbers == list(range(len(numbers))):
            return Labels(kind="classes", count=len(names)), targets, pointed
        said = f"the labels are {listed(names)}: classes 0 to {len(names) - 1} in this order"
        notes = [*pointed, said, *_likely_slips(names, np.bincount(targets).tolist())]
        return Labels(kind="classes", count=len(names), names=names), targets, notes

    def _class_of(self, label: Label, value: Label, where: str) -> int:
        """By what the dataset calls its number, by its name, or by its number where names are no numbers."""
        if self._class_of_number is not None and isinstance(value, int):
            if not 0 <= value < len(self._class_of_number):
                raise self._unknown(label, where)
            return self._class_of_number[value]
        for name in (label, value):
            found = self._index.get(str(name), self._folded.get(str(name).casefold()))
            if found is not None:
                return found
        if not isinstance(value, str) and value == int(value):
            if str(int(value)) in self._index:
                return self._index[str(int(value))]
            if self._plain_numbers and 0 <= value < len(self._index):
                self._bare_numbers = True
                return int(value)
        raise self._unknown(label, where)

    def _unknown(self, label: Label, where: str) -> InputError:
        assert self._asked is not None
        asked = self._asked
        known = listed(asked.names) if asked.names else f"0 to {asked.count - 1}"
        why = f"the classes are {known} ({self._setting})"
        if label == -1 or label == "-1":
            why += "; sets whose labels are kept secret, as GLUE's for testing, have -1 everywhere"
        do = f"mend it, name all classes in model.labels, or {DROP}"
        return InputError(f"the label {label!r} is not known", where=where, why=why, do=do)

    def _require_classes(self, names: Sequence[str], where: str) -> None:
        rows = len(self._values)
        if self._asked is not None and len(names) != self._asked.count:
            raise InputError(
                f"there are {len(names):,} different labels, and {self._asked.count:,} classes",
                where=self._setting,
                why=f"the labels are {listed(names)}",
                do="name the classes in model.labels, in the order of the model's",
            )
        if self._asked is None and len(names) == 1:
            why = f"all {rows:,} rows have the label {names[0]!r}"
            if names[0] == "-1":
                why += ", as sets have whose labels are kept secret (GLUE's for testing)"
            do = "use rows of all classes, or name the classes in model.labels"
            raise InputError("there is only one class", where=where, why=why, do=do)
        if self._asked is None and len(names) > max(SUSPECTED_CLASSES, rows // 2):
            raise InputError(
                f"{rows:,} rows have {len(names):,} different labels",
                where=where,
                why=f"these are hardly classes: {listed(names)}",
                do="check data.label_column; for a number to predict set model.labels to regression, for classes to"
                " how many there are",
            )


def number_in(text: str, *, or_else: Label) -> Label:
    """The number that is written there."""
    if _WHOLE.fullmatch(text):
        return int(text)
    return float(text) if _NUMBER.fullmatch(text) and math.isfinite(float(text)) else or_else


def listed(names: Sequence[str]) -> str:
    """Some of them, for people."""
    return ", ".join(names[:SHOWN_CLASSES]) + (f", ... ({len(names):,} in all)" if len(names) > SHOWN_CLASSES else "")


def folded_index(index: Mapping[str, int]) -> dict[str, int]:
    """Classes by their names in any case; none where that would not tell them apart."""
    folded = {name.casefold(): number for name, number in index.items()}
    return folded if len(folded) == len(index) else {}


def _other_names(asked: Labels, setting: str, named: ClassNames) -> InputError:
    cures = {
        "model.labels": "write them there as the dataset does, in the order of the head (any, if it is new)",
        OF_HEAD: "name the classes in model.labels as the dataset does, in the order of the head's",
    }
    return InputError(
        f"the dataset's names of classes are not those of {setting}",
        where="model.labels" if setting == "model.labels" else "data.label_column",
        why=f"the dataset's are {listed(named.names)} ({named.setting}); the others are {listed(asked.names)}",
        do=cures.get(setting, "give the classes the same names in both"),
    )


def _why_regression(values: Sequence[Label]) -> str | None:
    """What to say where numbers, not all of them whole by their type, are to be predicted; None: they are classes."""
    numbers = [value for value in values if not isinstance(value, str)]
    classes = "; for classes set model.labels to how many there are, or to their names"
    if fraction := next((value for value in numbers if value != int(value)), None):
        return f"the labels are numbers with a fraction ({fraction}), so a number is predicted (regression){classes}"
    if (count := len(set(numbers))) > MOST_POINTED_CLASSES:
        return (
            f"the labels are {count:,} different numbers with a decimal point, so a number is predicted (regression)"
            f"{classes}"
        )
    return None


def _likely_slips(names: Sequence[str], rows: Sequence[int]) -> list[str]:
    """Warnings of classes that may be another one, written otherwise; `rows` are those of each class."""
    spelt: dict[str, list[str]] = {}
    for name in names:
        spelt.setdefault(name.casefold(), []).append(name)
    alike = [name for same in spelt.values() if len(same) > 1 for name in same]
    single = [name for name, count in zip(names, rows, strict=True) if count == 1 and not _NUMBER.fullmatch(name)]
    found = []
    if alike:
        found.append(
            f"warning: classes that differ by upper and lower case alone are apart: {listed(alike)}; name the classes"
            " in model.labels, and both ways of writing mean the same"
        )
    if single and sum(rows) > ROWS_OF_ONE_CLASS * len(names):
        found.append(
            f"warning: of {sum(rows):,} rows one alone has the label {listed(single)}: a slip of the pen? model.labels"
            " names the classes that there are"
        )
    return found


def _sorted_classes(values: Sequence[Label]) -> tuple[tuple[str, ...], list[Label]]:
    """Names of the classes, and the labels they are of: numbers by size, names by alphabet."""
    distinct = set(values)
    if any(isinstance(value, str) for value in distinct):
        ordered: list[Label] = sorted(distinct, key=str)
    else:
        ordered = sorted(distinct)  # type: ignore[type-var]
    return tuple(str(value) for value in ordered), ordered

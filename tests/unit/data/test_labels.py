from __future__ import annotations

import numpy as np
import pytest

from coremill.data.labels import LabelReader, Labels
from coremill.errors import InputError

ASKED = Labels(kind="classes", count=2, names=("no", "yes"))


def read(*labels, asked: Labels | None = None, may_name: bool = True):
    reader = LabelReader(asked, "model.labels", may_name=may_name)
    for row, label in enumerate(labels, 1):
        reader.take(label, f"file:{row}")
    return reader.result("data.source")


@pytest.mark.parametrize(
    ("labels", "names", "targets"),
    [
        ((0, 1, 2, 1), (), [0, 1, 2, 1]),
        (("0", "1", "1"), (), [0, 1, 1]),  # a csv
        ((5, 1, 3), ("1", "3", "5"), [2, 0, 1]),
        (("10", "9", "10"), ("9", "10"), [1, 0, 1]),  # by size, not by alphabet
        ((-1, 1, -1), ("-1", "1"), [0, 1, 0]),
        (("pos", "neg", "pos"), ("neg", "pos"), [1, 0, 1]),
        ((True, False), ("false", "true"), [1, 0]),
        (("1", "none", "2"), ("1", "2", "none"), [0, 2, 1]),
    ],
)
def test_classes_of_the_data(labels, names, targets):
    found, values, said = read(*labels)
    assert (found.kind, found.names) == ("classes", names)
    assert values.tolist() == targets and values.dtype == np.int64
    assert bool(said) == bool(names)


@pytest.mark.parametrize("labels", [(0.5, 3.0, 2), ("4.75", "1", "1e-1"), (1.0, 2.0)])
def test_numbers_with_fractions_are_to_be_predicted(labels):
    found, values, said = read(*labels)
    assert found == Labels(kind="regression") and "regression" in said[0]
    assert values.dtype == np.float32 and np.allclose(values, [float(label) for label in labels])


def test_what_was_asked_for():
    assert read("yes", "no", 1, "0", 0.0, asked=ASKED)[1].tolist() == [1, 0, 1, 0, 0]
    assert read("Yes", "NO", asked=ASKED)[1].tolist() == [1, 0]
    apart = Labels(kind="classes", count=2, names=("a", "A"))
    assert read("A", "a", asked=apart)[1].tolist() == [1, 0]
    assert read(3, "5", asked=Labels(kind="classes", count=2, names=("3", "5")))[1].tolist() == [0, 1]
    assert read(1, 0, 1, asked=Labels(kind="regression"))[1].dtype == np.float32
    assert read(2, 0, asked=Labels(kind="classes", count=3))[0].count == 3
    named = read("a", "b", "a", asked=Labels(kind="classes", count=2))
    assert (named[0].names, named[1].tolist()) == (("a", "b"), [0, 1, 0])


@pytest.mark.parametrize(
    ("label", "asked", "said"),
    [
        ("maybe", ASKED, "the label 'maybe' is not known"),
        (2, ASKED, "the classes are no, yes (model.labels)"),
        (-1, ASKED, "kept secret"),
        (3, Labels(kind="classes", count=3), "the classes are 0 to 2"),
        (0.5, Labels(kind="classes", count=3), "is not known"),
        ("good", Labels(kind="regression"), "is no number"),
        ("1", Labels(kind="classes", count=2, names=("3", "5")), "is not known"),  # a name, not a number of one
    ],
)
def test_an_unknown_label_has_its_place(label, asked, said):
    with pytest.raises(InputError) as error:
        read(label, asked=asked)
    assert said in str(error.value) and error.value.where == "file:1" and error.value.do


def test_names_in_an_evaluation_are_none_where_numbers_were_learned():
    with pytest.raises(InputError, match="'pos' is not known"):
        read("pos", "neg", asked=Labels(kind="classes", count=2), may_name=False)


@pytest.mark.parametrize(
    ("labels", "asked", "said"),
    [
        ([1, 1, 1], None, "there is only one class"),
        ([-1, -1], None, "kept secret"),
        (["a", "b", "c"], Labels(kind="classes", count=2), "3 different labels, and 2 classes"),
        ([f"text {row}" for row in range(300)], None, "300 rows have 300 different labels"),
    ],
)
def test_labels_that_are_no_classes(labels, asked, said):
    with pytest.raises(InputError) as error:
        read(*labels, asked=asked)
    assert said in str(error.value)


def test_json_and_words():
    assert Labels.from_json(ASKED.to_json()) == ASKED
    assert ASKED.in_words() == "2 classes: no, yes"
    many = Labels(kind="classes", count=20, names=tuple(map(str, range(20))))
    assert many.in_words() == "20 classes: 0, 1, 2, 3, 4, 5, 6, 7, ... (20 in all)"

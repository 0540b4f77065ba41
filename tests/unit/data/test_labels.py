from __future__ import annotations

import numpy as np
import pytest

from coremill.data.labels import OF_HEAD, ClassNames, LabelReader, Labels
from coremill.errors import InputError

ASKED = Labels(kind="classes", count=2, names=("no", "yes"))


def read(*labels, asked: Labels | None = None, may_name: bool = True, named=(), setting: str = "model.labels"):
    features = ClassNames(tuple(named), "the features of nli") if named else None
    reader = LabelReader(asked, setting, may_name=may_name, named=features)
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


@pytest.mark.parametrize("labels", [(0.5, 3.0, 2), ("4.75", "1", "1e-1"), tuple(map(float, range(21)))])
def test_numbers_with_fractions_are_to_be_predicted(labels):
    found, values, said = read(*labels)
    assert found == Labels(kind="regression") and "regression" in said[0]
    assert values.dtype == np.float32 and np.allclose(values, [float(label) for label in labels])


@pytest.mark.parametrize(
    ("labels", "names", "targets"),
    [
        ((0.0, 1.0, 0.0), (), [0, 1, 0]),  # pandas, of a column that had a gap
        (("1.0", "5.0", "3"), ("1", "3", "5"), [0, 2, 1]),
    ],
)
def test_a_few_whole_numbers_with_a_point_are_classes(labels, names, targets):
    found, values, said = read(*labels)
    assert (found.kind, found.names, values.tolist()) == ("classes", names, targets)
    assert "set model.labels to regression" in said[0]
    assert read(*labels, asked=Labels(kind="regression"))[1].tolist() == [float(label) for label in labels]


NLI = ("entailment", "neutral", "contradiction")


def test_numbers_of_a_dataset_stand_for_its_names():
    assert read(0, 1, 0, named=("1", "0"))[1].tolist() == [0, 1, 0]  # not looked up as names
    found, values, said = read(0, 1, named=("3 stars", "5 stars"))
    assert (found.names, values.tolist(), said) == (("3 stars", "5 stars"), [0, 1], [])
    with pytest.raises(InputError, match="kept secret"):
        read(-1, named=NLI)


def test_numbers_of_a_dataset_go_by_name_to_the_classes_of_a_head():
    head = Labels(kind="classes", count=3, names=("CONTRADICTION", "NEUTRAL", "ENTAILMENT"))
    found, values, said = read(0, 1, 2, 0, asked=head, named=NLI, setting=OF_HEAD)
    assert found == head and values.tolist() == [2, 1, 0, 2]
    assert "labels go by name" in said[0] and OF_HEAD in said[0]
    assert read(0, 1, 2, asked=head, named=NLI, may_name=False)[1].tolist() == [2, 1, 0]  # an evaluation
    assert read(1, 0, asked=head, named=("neutral", "entailment"))[1].tolist() == [2, 1]  # a part of the classes


def test_classes_without_names_get_those_of_the_dataset_and_it_is_said():
    found, values, said = read(0, 2, asked=Labels(kind="classes", count=3), named=NLI, setting=OF_HEAD)
    assert (found.names, values.tolist()) == (NLI, [0, 2])
    assert "have no names: they are taken to be entailment, neutral, contradiction" in said[0]
    learned = read(0, 2, asked=Labels(kind="classes", count=3), named=NLI, may_name=False)
    assert learned[0].names == () and learned[1].tolist() == [0, 2]


def test_numbers_taken_as_places_are_said():
    said = read(0, 1, 1, asked=ASKED)[2]
    assert said == ["labels are numbers, taken as places among the classes: 0 is no, 1 is yes (model.labels)"]
    assert read("yes", "no", asked=ASKED)[2] == []
    assert len(read(0, 1, asked=ASKED, named=("0", "1"))[2]) == 1  # names that say nothing


@pytest.mark.parametrize(
    ("setting", "cure"),
    [("model.labels", "as the dataset does"), (OF_HEAD, "in the order of the head's"), ("others", "the same names")],
)
def test_other_names_than_the_datasets_are_refused(setting, cure):
    with pytest.raises(InputError, match="names of classes are not those of") as error:
        read(0, asked=ASKED, named=("neg", "pos"), setting=setting)
    assert "neg, pos" in error.value.why and "no, yes" in error.value.why and cure in error.value.do


def test_likely_slips_are_told():
    found, _, said = read(*["neg", "pos"] * 30, "Pos", " pos ", "psitive")
    assert found.names == ("Pos", "neg", "pos", "psitive")
    assert "apart: Pos, pos;" in said[1] and "the label Pos, psitive: a slip" in said[2]
    assert len(read("neg", "pos", "none")[2]) == 1  # few rows say nothing


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

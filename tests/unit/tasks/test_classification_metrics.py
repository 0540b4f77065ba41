"""Metrics of classes and numbers against scikit-learn and scipy, to the last digit."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import scipy.stats
import sklearn.metrics

from coremill.tasks.sequence_classification.classification_metrics import accuracy, f1, pearson, ranks, spearman

LAST_DIGIT = {"rel": 1e-14, "abs": 1e-15}


@pytest.mark.parametrize("classes", [2, 3, 7, 40])
@pytest.mark.parametrize("count", [1, 5, 100, 2500])
def test_classes(classes, count):
    draw = np.random.default_rng(classes * count)
    for _ in range(10):
        right = draw.integers(0, classes, count)
        predicted = np.where(draw.random(count) < 0.6, right, draw.integers(0, classes, count))
        assert accuracy(predicted, right) == sklearn.metrics.accuracy_score(right, predicted)
        how = {"pos_label": 1} if classes == 2 else {"average": "macro"}
        theirs = sklearn.metrics.f1_score(right, predicted, zero_division=0, **how)
        assert f1(predicted, right, classes=classes) == pytest.approx(theirs, **LAST_DIGIT)


def test_classes_of_which_one_is_never_predicted():
    right, predicted = np.array([0, 0, 1, 2]), np.array([0, 0, 0, 0])
    theirs = sklearn.metrics.f1_score(right, predicted, average="macro", zero_division=0)
    assert f1(predicted, right, classes=5) == pytest.approx(theirs, **LAST_DIGIT)
    assert f1(np.zeros(3, int), np.zeros(3, int), classes=2) == 0.0


@pytest.mark.parametrize("count", [2, 3, 50, 3000])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_numbers(count, dtype):
    draw = np.random.default_rng(count)
    right = (draw.integers(0, 26, count) / 5).astype(dtype)  # STS-B: ties
    right[:2] = 0, 5
    predicted = (right + draw.normal(size=count)).astype(dtype)
    predicted[-1] = predicted[0] if count > 2 else predicted[-1]
    wide = [values.astype(np.float64) for values in (predicted, right)]
    assert pearson(predicted, right) == pytest.approx(scipy.stats.pearsonr(*wide).statistic, **LAST_DIGIT)
    assert spearman(predicted, right) == pytest.approx(scipy.stats.spearmanr(*wide).statistic, rel=1e-13)
    assert np.array_equal(ranks(right), scipy.stats.rankdata(right))


def test_numbers_that_are_all_the_same():
    assert pearson(np.ones(4), np.arange(4.0)) == spearman(np.ones(4), np.arange(4.0)) == 0.0
    assert pearson(np.array([1.0]), np.array([2.0])) == 0.0
    assert 1 - 1e-15 <= pearson(np.arange(9.0), np.arange(9.0)) <= 1.0


@pytest.mark.parametrize("measure", [pearson, spearman])
def test_outputs_that_are_no_numbers_give_no_number(measure: Callable[..., float]) -> None:
    assert math.isnan(measure(np.array([math.nan, 1.0, 2.0]), np.array([1.0, 2.0, 3.0])))

"""Accuracy and F1 of classes, Pearson and Spearman of numbers: what GLUE reports.

F1 of two classes is that of class 1; of more the mean over all classes that occur, right or predicted (macro).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

Classes = npt.NDArray[np.integer[Any]]
Numbers = npt.NDArray[np.floating[Any]]


def accuracy(predicted: Classes, right: Classes) -> float:
    return float(np.mean(predicted == right))


def f1(predicted: Classes, right: Classes, *, classes: int) -> float:
    """Harmonic mean of precision and recall."""
    if classes == 2:
        return _f1_of(predicted == 1, right == 1)
    occurring = np.union1d(predicted, right)
    return math.fsum(_f1_of(predicted == each, right == each) for each in occurring) / len(occurring)


def pearson(predicted: Numbers, right: Numbers) -> float:
    """Correlation; 0 where one side is all the same and says nothing of the other, no number where a value is none."""
    ours, theirs = (np.asarray(values, dtype=np.float64) for values in (predicted, right))
    if not (np.isfinite(ours).all() and np.isfinite(theirs).all()):
        return math.nan
    if len(ours) < 2 or np.ptp(ours) == 0 or np.ptp(theirs) == 0:
        return 0.0
    ours, theirs = ours - ours.mean(), theirs - theirs.mean()
    correlation = float(np.dot(ours / np.linalg.norm(ours), theirs / np.linalg.norm(theirs)))
    return max(-1.0, min(1.0, correlation))


def spearman(predicted: Numbers, right: Numbers) -> float:
    """Correlation of ranks; equal numbers have the mean of theirs."""
    if not np.isfinite(np.asarray(predicted)).all():
        return math.nan
    return pearson(ranks(np.asarray(predicted)), ranks(np.asarray(right)))


def ranks(values: Numbers) -> npt.NDArray[np.float64]:
    """From 1."""
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    means: npt.NDArray[np.float64] = (last - (counts - 1) / 2)[places]
    return means


def _f1_of(predicted: npt.NDArray[np.bool_], right: npt.NDArray[np.bool_]) -> float:
    both, either = int(np.sum(predicted & right)), int(np.sum(predicted)) + int(np.sum(right))
    return 2 * both / either if either else 0.0

"""Balanced accuracy, macro-F1 and mean IoU, by hand, and as scikit-learn has them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from fedkeep.core.errors import DataError
from fedkeep.metrics import balanced_accuracy, macro_f1, mean_iou
from tests.refusals import raises


def test_by_hand() -> None:
    """Recalls 2/3, 1/2; F1 of class 0: 4/(3 + 3), of class 1: 2/(2 + 2); IoU 2/(3 + 3 − 2), 1/(2 + 2 − 1)."""
    label, predicted = [0, 0, 0, 1, 1], [0, 0, 1, 1, 0]
    assert balanced_accuracy(label, predicted) == pytest.approx((2 / 3 + 1 / 2) / 2, abs=1e-15)
    assert macro_f1(label, predicted) == pytest.approx((2 / 3 + 1 / 2) / 2, abs=1e-15)
    assert mean_iou(label, predicted) == pytest.approx((2 / 4 + 1 / 3) / 2, abs=1e-15)


def test_who_never_sees_the_rare_class() -> None:
    """4 % positive, none found: accuracy 96 %, and yet a recall of 1 and one of 0; F1 192/196 and 0."""
    label = np.repeat([0, 1], [96, 4])
    assert balanced_accuracy(label, np.zeros(100, int)) == 0.5
    assert macro_f1(label, np.zeros(100, int)) == pytest.approx(192 / 196 / 2, abs=1e-15)


def test_classes_that_are_a_label_or_a_prediction_alone() -> None:
    """Class 3 is predicted once and never a label; class 2 is a label once and never predicted; 1 is neither.

    F1: class 0 has 2/(2 + 1) = 2/3, classes 2 and 3 have 0.
    """
    label, predicted = torch.tensor([0, 0, 2]), torch.tensor([0, 3, 0])
    assert balanced_accuracy(label, predicted) == pytest.approx((1 / 2 + 0) / 2, abs=1e-15)
    assert macro_f1(label, predicted) == pytest.approx((2 / 4 + 0 + 0) / 3, abs=1e-15)
    assert mean_iou(label, predicted) == pytest.approx((1 / 3 + 0 + 0) / 3, abs=1e-15)


def test_no_prediction_is_wrong_and_no_class() -> None:
    assert balanced_accuracy([0, 0, 1], [0, -1, 1]) == 0.75
    assert macro_f1([0, 0, 1], [0, -1, 1]) == pytest.approx((2 / 3 + 1) / 2, abs=1e-15)


def test_without_examples() -> None:
    assert math.isnan(balanced_accuracy([], []))
    assert math.isnan(macro_f1([], []))
    assert math.isnan(mean_iou([], []))


@pytest.mark.filterwarnings("ignore::UserWarning")  # of predictions that are no label, and of a single class
def test_as_scikit_learn() -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    rng = np.random.default_rng(0)
    for _ in range(50):
        label, predicted = rng.integers(0, 6, (2, rng.integers(1, 12)))
        expected = metrics.balanced_accuracy_score(label, predicted)
        assert balanced_accuracy(label, predicted) == pytest.approx(expected, abs=1e-12)
        expected = metrics.f1_score(label, predicted, average="macro", zero_division=0)
        assert macro_f1(label, predicted) == pytest.approx(expected, abs=1e-12)
        expected = metrics.jaccard_score(label, predicted, average="macro", zero_division=0)
        assert mean_iou(label, predicted) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("label", "predicted", "message"),
    [
        ([0, 1], [0], "Wanted labels and predictions as (examples,); got (2,) and (1,)."),
        ([[0]], [[0]], "Wanted labels and predictions as (examples,); got (1, 1) and (1, 1)."),
        ([0, -100], [0, 1], "Wanted classes from 0 as labels; got -100."),
    ],
)
def test_what_is_no_class(label: list[int], predicted: list[int], message: str) -> None:
    with raises(DataError, text=message):
        macro_f1(label, predicted)

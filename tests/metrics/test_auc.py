"""AUC by hand, and as scikit-learn computes it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

from fedkeep.core.errors import DataError, NonFiniteError
from fedkeep.metrics.scores import auc
from tests import refusals


def test_auc_by_hand() -> None:
    # pairs (positive, negative): 0.35>0.1, 0.35<0.4, 0.8>0.1, 0.8>0.4 -> 3 of 4
    assert auc([0.1, 0.4, 0.35, 0.8], [0, 0, 1, 1]) == 0.75
    assert auc([1.0, 1.0], [0, 1]) == 0.5  # a tie counts half
    assert auc(torch.tensor([3.0, 2.0, 1.0]), torch.tensor([1, 0, 0])) == 1.0
    assert auc(np.array([-math.inf, math.inf]), np.array([1, 0])) == 0.0


@pytest.mark.parametrize("levels", [3, 50, 10**6])
def test_auc_equals_scikit_learn(levels: int) -> None:
    random = np.random.default_rng(levels)
    score = random.integers(0, levels, 500) / levels
    label = (random.random(500) < 0.15 + 0.3 * score).astype(int)
    assert auc(score, label) == pytest.approx(roc_auc_score(label, score), abs=1e-12)


def test_auc_of_one_class_is_nan() -> None:
    assert math.isnan(auc([0.2, 0.3], [1, 1]))
    assert math.isnan(auc([], []))


def test_auc_of_a_type_that_numpy_lacks() -> None:
    score = torch.tensor([0.1, 0.2, 0.3], dtype=torch.bfloat16, requires_grad=True)
    assert auc(score, torch.tensor([0, 1, 0])) == 0.5


def test_auc_refuses_other_labels_and_nan() -> None:
    with pytest.raises(DataError, match=r"^auc wants labels 0 and 1; got \[0.0, 2.0\].$"):
        auc([0.1, 0.2], [0, 2])
    with refusals.raises(DataError, got=(2,), shape=(1,)):
        auc([0.1, 0.2], [0])
    with pytest.raises(NonFiniteError, match="a score is NaN"):
        auc([0.1, math.nan], [0, 1])


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 1)), min_size=2, max_size=30))
def test_auc_of_many_ties_equals_scikit_learn(pairs: list[tuple[int, int]]) -> None:
    score, label = np.array([s / 7 for s, _ in pairs]), np.array([y for _, y in pairs])
    if 0 < label.sum() < len(label):
        assert auc(score, label) == pytest.approx(roc_auc_score(label, score), abs=1e-12)
    else:
        assert math.isnan(auc(score, label))

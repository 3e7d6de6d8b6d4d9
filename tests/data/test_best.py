from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

from fedkeep.data.best import auc, best_possible


def test_auc_by_hand() -> None:
    # Pairs (positive, negative): .8 > .1, .8 > .5, .5 > .1, .5 = .5, so (1 + 1 + 1 + 1/2) / 4.
    assert auc(np.array([0.1, 0.5, 0.8, 0.5]), np.array([0, 0, 1, 1])) == 0.875
    assert auc(np.array([0.1, 0.2]), np.array([1, 1])) is None


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 1)), min_size=2, max_size=30))
def test_auc_equals_scikit_learns(pairs: list[tuple[int, int]]) -> None:
    score, label = np.array([s / 7 for s, _ in pairs]), np.array([y for _, y in pairs])
    if 0 < label.sum() < len(label):
        assert auc(score, label) == pytest.approx(roc_auc_score(label, score), abs=1e-12)
    else:
        assert auc(score, label) is None


def test_best_possible_by_hand() -> None:
    columns = {
        "label": np.array([0, 1, 1, 0]),
        "_best": np.array([0.5, 0.75, 1.0, 0.0]),
        "_best_global": np.array([0.25, 0.25, 0.5, 0.5]),
    }
    assert best_possible(columns, np.array([0, 1]), "multiclass") == {"best": 0.625, "best_global": 0.25}
    assert best_possible(columns, np.arange(4), "binary") == {"best": 1.0, "best_global": 0.5}
    assert best_possible(columns, np.zeros(0, np.int64), "multiclass") == {"best": None, "best_global": None}
    assert best_possible({"label": columns["label"]}, np.arange(4), "binary") == {
        "best": None,
        "best_global": None,
    }

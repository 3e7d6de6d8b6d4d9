from __future__ import annotations

import numpy as np

from fedkeep.data.best import best_possible


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


def test_one_class_alone_has_no_best_auc() -> None:
    columns = {"label": np.array([1, 1]), "_best": np.array([0.5, 0.75])}
    assert best_possible(columns, np.arange(2), "binary") == {"best": None, "best_global": None}

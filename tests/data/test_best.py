from __future__ import annotations

import json
from pathlib import Path

import numpy as np

import fedkeep
from fedkeep.data import many_user_text
from fedkeep.data.federated import best_possible
from fedkeep.models import BagOfWords
from fedkeep.tasks import BINARY, MULTICLASS


def test_best_possible_by_hand() -> None:
    columns = {
        "label": np.array([0, 1, 1, 0]),
        "_best": np.array([0.5, 0.75, 1.0, 0.0]),
        "_best_global": np.array([0.25, 0.25, 0.5, 0.5]),
    }
    assert best_possible(columns, np.array([0, 1]), MULTICLASS) == {"best": 0.625, "best_global": 0.25}
    assert best_possible(columns, np.arange(4), BINARY) == {"best": 1.0, "best_global": 0.5}
    assert best_possible(columns, np.zeros(0, np.int64), MULTICLASS) == {"best": None, "best_global": None}
    assert best_possible({"label": columns["label"]}, np.arange(4), BINARY) == {
        "best": None,
        "best_global": None,
    }


def test_one_class_alone_has_no_best_auc() -> None:
    columns = {"label": np.array([1, 1]), "_best": np.array([0.5, 0.75])}
    assert best_possible(columns, np.arange(2), BINARY) == {"best": None, "best_global": None}


def test_the_best_is_that_of_the_users_who_are_judged(tmp_path: Path) -> None:
    data = many_user_text(users=8, examples=20, classes=6)
    model = BagOfWords(len(data.meta["vocabulary"]["symbols"]) + 2, 6, 0)
    method = fedkeep.methods.fedavg()
    run = fedkeep.simulate(
        model, method, data, rounds=1, hold_out=0.5, evaluate_every=0, out=tmp_path / "run"
    )
    told = json.loads((tmp_path / "run" / "run.json").read_text())
    assert told["best"] == data.select([data.index(c) for c in run.clients]).meta["best"] != data.meta["best"]

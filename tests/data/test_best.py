from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from torch import Tensor, nn

import fedkeep
from fedkeep.data import user_bias_regression
from fedkeep.data.federated import best_possible
from fedkeep.report.page import write_report
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


class Guess(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).squeeze(1)


def test_the_best_regression_is_told_in_the_metric_beside_which_it_stands(tmp_path: Path) -> None:
    data = user_bias_regression(users=4, noise=0.5, dtype="float32")
    local = fedkeep.Phase(loss=fedkeep.methods.terms.squared_error())
    fedkeep.simulate(Guess(4, 1), fedkeep.methods.fedavg(local=local), data, rounds=1, out=tmp_path / "run")
    page = write_report([tmp_path / "run"], tmp_path / "page")
    (found,) = json.loads(page.with_suffix(".json").read_text())["summary"]
    x, y = (np.asarray(data.columns[name])[data.split_rows("test")] for name in ("x", "label"))
    bias = np.asarray(data.meta["traits"]["bias"])[data.clients_of(data.split_rows("test"))]
    error = y - x @ np.asarray(data.meta["weight"]) - bias
    assert found["metric"] == "rmse"
    assert found["best_possible"] == pytest.approx(np.sqrt((error**2).mean()), rel=1e-5)


def test_the_best_is_that_of_the_users_who_are_judged(tmp_path: Path) -> None:
    data = user_bias_regression(users=8, noise=0.5, dtype="float32")
    method = fedkeep.methods.fedavg(local=fedkeep.Phase(loss=fedkeep.methods.terms.squared_error()))
    run = fedkeep.simulate(
        Guess(4, 1), method, data, rounds=1, hold_out=0.5, evaluate_every=0, out=tmp_path / "run"
    )
    told = json.loads((tmp_path / "run" / "run.json").read_text())["best"]
    assert told == data.select([data.index(c) for c in run.clients]).meta["best"] != data.meta["best"]

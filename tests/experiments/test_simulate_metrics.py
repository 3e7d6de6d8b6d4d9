"""Balanced accuracy and macro-F1 of runs that ask for them: pooled, each client's own, in records, reports and commands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedkeep import FederatedData, Phase, Run, methods, sgd, simulate
from fedkeep.core.errors import ConfigError, RunError
from fedkeep.experiments.build import run_config
from fedkeep.experiments.load import load_run
from fedkeep.metrics import balanced_accuracy, macro_f1
from fedkeep.report.runs import read_run
from tests.experiments.configs import config
from tests.refusals import raises
from tests.tiny import Logits, classes, pairs, run_by

BOTH = ("balanced_accuracy", "macro_f1")
LOCAL = Phase(optimizer=sgd(0.3), batch_size=4)


class Says(nn.Module):
    """Logits 1 and −1 for the class that the feature names."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(1.0, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.w * torch.where(x.bool(), 1.0, -1.0) * x.new_tensor([-1.0, 1.0])


STILL = methods.fedavg(local=Phase(optimizer=sgd(0.0)))


def told(task: str) -> FederatedData:
    """Return two clients: a has the labels 0 0 0 1 and hears 0 0 1 1, b has 0 1 1 and hears 0 0 1."""
    owner, label = ["a"] * 4 + ["b"] * 3, np.array([0, 0, 0, 1, 0, 1, 1])
    heard = np.array([0, 0, 1, 1, 0, 0, 1], float)[:, None]
    meta = {"task": task, "classes": 2}
    columns = {"x": np.concatenate([heard, heard]), "label": np.concatenate([label, label])}
    return FederatedData.from_columns(owner * 2, columns, ["train"] * 7 + ["test"] * 7, meta)


@pytest.mark.parametrize("task", ["multiclass", "binary"])
def test_by_hand(task: str) -> None:
    """Of both, class 0 is found 3 of 4 times, and twice too often or not; class 1 twice of 3 times.

    Recalls 3/4 and 2/3; F1 6/(4 + 4) and 4/(3 + 3). a: recalls 2/3 and 1, F1 4/5 and 2/3. b: 1 and 1/2, 2/3 and 2/3.
    """
    run = simulate(Says(), STILL, told(task), rounds=1, cohort=2, metrics=BOTH, progress=False)
    wanted = {
        "balanced_accuracy": (3 / 4 + 2 / 3) / 2,
        "macro_f1": (6 / 8 + 4 / 6) / 2,
        "balanced_accuracy_user_mean": ((2 / 3 + 1) / 2 + (1 + 1 / 2) / 2) / 2,
        "macro_f1_user_mean": ((4 / 5 + 2 / 3) / 2 + 2 / 3) / 2,
    }
    found = run.evaluate("test")
    assert {n: found[n] for n in wanted} == pytest.approx(wanted, abs=1e-15)
    own = {(r.client, r.metric): r.value for r in run.history if r.client is not None and r.metric in BOTH}
    assert own == pytest.approx(
        {
            ("a", "balanced_accuracy"): (2 / 3 + 1) / 2,
            ("b", "balanced_accuracy"): (1 + 1 / 2) / 2,
            ("a", "macro_f1"): (4 / 5 + 2 / 3) / 2,
            ("b", "macro_f1"): 2 / 3,
        },
        abs=1e-15,
    )


@pytest.mark.parametrize("engine", ["sequential", "vectorised", "workers", "centralised"])
def test_nothing_else_changes(engine: str) -> None:
    """And the numbers are those of the model's outputs, client by client."""

    def run(**given: Any) -> Run:
        workers = 2 if engine == "workers" else None
        method = methods.furl("user", local=LOCAL)
        return simulate(
            Logits().double(),
            method,
            classes(),
            rounds=2,
            cohort=3,
            **run_by(engine),
            workers=workers,
            progress=False,
            evaluate_shared=engine != "centralised",
            **given,
        )

    ours, plain = run(metrics=BOTH), run()
    kept = [r for r in ours.history if not r.metric.startswith(BOTH)]
    assert kept == plain.history
    assert not set(plain.evaluate()) & set(BOTH)
    found, own = ours.evaluate(), []
    for client in ours.clients:
        ((outputs, label),) = ours.local_device().outputs(ours.orders([client]), "test", "own")
        own.append((label, outputs.argmax(1)))
    every = [np.concatenate(column) for column in zip(*own, strict=True)]
    for name, metric in (("balanced_accuracy", balanced_accuracy), ("macro_f1", macro_f1)):
        assert found[name] == pytest.approx(metric(*every))
        assert found[f"{name}_user_mean"] == pytest.approx(np.mean([metric(*pair) for pair in own]))
    splits = {r.split for r in ours.history if r.metric == "macro_f1" and r.client is None}
    assert splits == {"valid", "test", *(["test/shared"] if engine != "centralised" else [])}


def test_outputs_that_are_not_numbers_are_wrong() -> None:
    model = Says()
    model.w.data.fill_(float("nan"))
    run = simulate(model, STILL, told("multiclass"), rounds=0, metrics=BOTH, progress=False)
    found = run.evaluate("test")
    assert (found["balanced_accuracy"], found["macro_f1"]) == (0.0, 0.0)


def test_a_configuration(tmp_path: Path) -> None:
    asked = config(run={"rounds": 2, "cohort": 2, "metrics": ["macro_f1"]})
    run = run_config(asked, out=tmp_path / "run", progress=False)
    lines = [json.loads(line) for line in (tmp_path / "run" / "records.jsonl").read_text().splitlines()]
    measured = {r["metric"] for r in lines}
    assert {"macro_f1", "macro_f1_user_mean"} < measured
    assert "balanced_accuracy" not in measured
    loaded = load_run(tmp_path / "run")
    assert loaded.evaluate("test") == pytest.approx(run.evaluate("test"), rel=1e-6)
    assert loaded.metrics == ("macro_f1",)
    assert read_run(tmp_path / "run").clients("macro_f1")
    with pytest.raises(RunError, match="metrics: .'macro_f1'. in the run, None now"):
        run_config(config(run={"rounds": 2, "cohort": 2}), out=tmp_path / "run", resume=True, progress=False)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            "macro_f1",
            "metrics must be a list of names; got one, 'macro_f1'. Put it into a list: ['macro_f1'].",
        ),
        (["f1"], "metrics must be of 'balanced_accuracy', 'macro_f1' or 'mean_iou'; got 'f1'."),
        (["macro_f1"] * 2, "metrics names one twice: ['macro_f1', 'macro_f1']."),
    ],
)
def test_what_is_no_metric(given: Any, message: str) -> None:
    with raises(ConfigError, said=message):
        simulate(Says(), STILL, told("binary"), rounds=1, metrics=given)


def test_numbers_have_no_classes(tmp_path: Path) -> None:
    data = pairs({"a": [(1, 1)]})
    data.meta["task"] = "regression"
    with raises(ConfigError, name="balanced_accuracy", task="regression"):
        simulate(Says(), STILL, data, rounds=1, metrics=BOTH, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()

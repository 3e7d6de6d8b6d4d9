"""The task of several numbers an example: read from a table, trained, judged, counted, exported and predicted."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import fedkeep
from fedkeep.cli import app
from fedkeep.core.errors import DataError, MethodError
from fedkeep.data import FederatedData, read_table
from fedkeep.data.preparation import Encoding, merged
from fedkeep.data.readers import raw_table
from fedkeep.experiments.worth import counted_rows
from fedkeep.methods import fedavg, terms
from fedkeep.tasks import MULTI_OUTPUT, Task, tasks_in
from tests.commands import succeeded
from tests.refusals import raises

USERS, EACH = 8, 30
TARGETS = ("price", "weight")
LOCAL = fedkeep.Phase(loss=terms.squared_error(), optimizer=fedkeep.sgd(0.1), batch_size=8)
CONFIG = """
[data]
reader = "table"
path = "table.csv"
features = ["a", "b"]
label = ["price", "weight"]
task = "regression"

[data.split]

[model]
kind = "linear"

[method]
kind = "fedavg"

[run]
rounds = 20
"""


def numbers() -> tuple[np.ndarray, np.ndarray]:
    """Return features and numbers of very different size."""
    draw = np.random.default_rng(0)
    x = draw.standard_normal((USERS * EACH, 2))
    noise = draw.standard_normal((len(x), 2))
    return x, np.stack([1000 + 300 * x[:, 0], 0.5 - 0.1 * x[:, 1]], 1) + noise * (30, 0.01)


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    x, y = numbers()
    lines = [f"u{n % USERS},{a!r},{b!r},{p!r},{w!r}" for n, (a, b, p, w) in enumerate(np.c_[x, y].tolist())]
    (tmp_path / "table.csv").write_text("\n".join(["user,a,b,price,weight", *lines]) + "\n")
    (tmp_path / "run.toml").write_text(CONFIG)
    return tmp_path / "table.csv"


def options(**changes: Any) -> dict[str, Any]:
    return {"features": ["a", "b"], "label": list(TARGETS), **changes}


@pytest.mark.parametrize("task", [None, "regression", "multi_output"])
def test_a_table_gives_several_numbers(table: Path, task: str | None) -> None:
    data = read_table(table, **options(task=task))
    label = np.asarray(data.columns["label"])
    assert (data.meta["task"], data.meta["classes"], data.meta["label_names"]) == (
        "multi_output",
        2,
        list(TARGETS),
    )
    assert label.shape == (USERS * EACH, 2)
    np.testing.assert_allclose(label.mean(0), 0, atol=1e-5)
    np.testing.assert_allclose(label.std(0), 1, atol=1e-5)
    in_units = Task(MULTI_OUTPUT, units=tuple(data.meta["units"])).in_units(label)
    np.testing.assert_allclose(
        in_units, numbers()[1][np.argsort(np.arange(len(label)) % USERS, kind="stable")], rtol=1e-4
    )
    with pytest.warns(UserWarning, match="'price' reaches"):
        plain = read_table(table, **options(task="regression", standardise=False))
    assert "units" not in plain.meta
    np.testing.assert_allclose(plain.columns["label"], in_units, rtol=1e-4)


def test_devices_agree_on_one_encoding(table: Path) -> None:
    lines = table.read_text().splitlines()
    parts = []
    for n in range(2):
        (part := table.with_name(f"part{n}.csv")).write_text("\n".join([lines[0], *lines[1 + n :: 2]]) + "\n")
        parts.append(raw_table(part, **options(task="regression")))
    encoding = Encoding.of(merged([part.summary() for part in parts]))
    whole = Encoding.of(raw_table(table, **options(task="regression")).summary())
    assert encoding == whole == Encoding.from_json(whole.to_json())
    assert whole.sizes["classes"] == 2


def test_bad_cells_of_all_outputs_are_named_at_once(table: Path) -> None:
    lines = table.read_text().splitlines()
    lines[3] = "u1,1,1,much,"
    table.write_text("\n".join(lines) + "\n")
    with raises(DataError, columns=list(TARGETS), said="line 4"):
        read_table(table, **options(task="regression"))


def arrays() -> FederatedData:
    x, y = numbers()
    y = ((y - y.mean(0)) / y.std(0)).astype("f4")
    split = (["train"] * 20 + ["valid"] * 5 + ["test"] * 5) * USERS
    owner = np.repeat(np.arange(USERS), EACH)
    columns = {"x": x.astype("f4"), "label": y}
    return FederatedData.from_columns(owner, columns, split, {"task": "multi_output"})


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_metrics_are_over_all_numbers(engine: str) -> None:
    torch.manual_seed(0)
    data = arrays()
    run = fedkeep.simulate(
        nn.Linear(2, 2), fedavg(local=LOCAL), data, rounds=10, cohort=4, progress=False, engine=engine
    )
    rows = data.split_rows("test")
    with torch.no_grad():
        said = run.model("0")(torch.from_numpy(np.asarray(data.columns["x"])[rows]))
    error = said.numpy() - np.asarray(data.columns["label"])[rows]
    found = run.evaluate("test")
    assert found["rmse"] == pytest.approx(float(np.sqrt((error**2).mean())), rel=1e-5)
    assert found["mae"] == pytest.approx(float(np.abs(error).mean()), rel=1e-5)
    assert found["rmse"] < 0.3
    each = np.sqrt((error**2).mean(0))
    assert [found["rmse/0"], found["rmse/1"]] == pytest.approx(each.tolist(), rel=1e-5)


def test_the_mean_of_each_output_is_the_reference() -> None:
    data = arrays()
    rows = np.repeat(data.split_rows("test"), 2)
    label = np.asarray(data.columns["label"])
    (task,) = tasks_in(data.meta)
    error = counted_rows(data, task, rows)["score"].reshape(-1, 2)
    everywhere = label[data.split_rows("train")].mean(0)
    first = label[list(data.rows(0, "train"))]
    wanted = (first.sum(0) + everywhere) / (len(first) + 1) - label[data.rows(0, "test")[0]]
    np.testing.assert_allclose(error[0], wanted, rtol=1e-5)


def test_a_model_of_another_width_is_refused() -> None:
    with pytest.raises(MethodError, match="one output for each"):
        fedkeep.simulate(nn.Linear(2, 3), fedavg(local=LOCAL), arrays(), rounds=1, progress=False)


def test_from_a_configuration_to_predictions_in_units(table: Path) -> None:
    def command(*words: str) -> Any:
        result = succeeded(CliRunner().invoke(app, words))
        return result

    command("check", "run.toml")
    command("run", "run.toml", "--out", "r")
    told = command("evaluate", "r").stdout
    assert [name for name in ("RMSE of price", "RMSE of weight") if name not in told] == []
    scales = np.asarray(fedkeep.load_run("r").data.meta["units"][1])
    found = fedkeep.load_run("r").evaluate()
    each = np.asarray([found[f"rmse/{name}"] for name in TARGETS])
    assert (each < (120, 0.05)).all()  # in units of their own
    assert found["rmse"] == pytest.approx(float(np.sqrt(((each / scales) ** 2).mean())))
    command("export", "r", "--out", "m", "--all")
    result = command("predict", "m", "--data", "table.csv")
    rows = list(csv.DictReader(io.StringIO(result.stdout)))
    said = np.asarray([[float(row[f"prediction.{name}"]) for name in TARGETS] for row in rows])
    error = np.sqrt(((said - numbers()[1]) ** 2).mean(0))
    assert (error < (120, 0.05)).all()  # their deviations are 300 and 0.1
    told = {line.split(" on ")[0]: float(line.rpartition(": ")[2]) for line in result.stderr.splitlines()}
    assert told == pytest.approx({"RMSE of price": error[0], "RMSE of weight": error[1]}, rel=1e-2)
    one = command("predict", "m", "--data", "table.csv", "--json").stdout.splitlines()[0]
    assert set(json.loads(one)["prediction"]) == set(TARGETS)

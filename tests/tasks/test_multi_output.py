"""The task of several numbers an example: how a table gives them, on one device and on several."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedkeep.core.errors import DataError
from fedkeep.data import read_table
from fedkeep.data.preparation import Encoding, merged
from fedkeep.data.readers import raw_table
from fedkeep.tasks import MULTI_OUTPUT, Task
from tests.refusals import raises

USERS, EACH = 8, 30
TARGETS = ("price", "weight")


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

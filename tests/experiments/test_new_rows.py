"""New rows as a data frame: read by the names that columns had in training."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
import torch

from fedkeep import FederatedData, methods, models, simulate
from fedkeep.core.errors import DataError, MethodError
from fedkeep.data.preparation import Encoding, Rules
from fedkeep.data.readers import raw_table
from fedkeep.experiments.personalize.exported import Exported
from fedkeep.experiments.run import Run

ROWS = 60


def table(**columns: Any) -> pyarrow.Table:
    split = ["valid" if n % 9 == 0 else "train" for n in range(ROWS)]
    return pyarrow.table({"who": [f"u{n % 3}" for n in range(ROWS)], "split": split, **columns})


@pytest.fixture
def bought() -> tuple[pyarrow.Table, Run]:
    age = np.random.default_rng(0).normal(40, 9, ROWS)
    frame = table(
        age=age, city=["A", "B", "C"] * (ROWS // 3), bought=["yes" if a > 42 else "no" for a in age]
    )
    data = FederatedData.from_frame(frame, client="who", label="bought", features=["age", "city"])
    model = models.MLP(data.columns["x"].shape[1], 2)
    return frame, simulate(model, methods.fedrep(), data, rounds=30, progress=False)


def test_a_frame_is_predicted_as_the_same_rows_in_training(
    bought: tuple[pyarrow.Table, Run], tmp_path: Path
) -> None:
    frame, run = bought
    mine = [n for n in range(ROWS) if n % 3 == 1]  # none of valid, so their order is the data's
    data = FederatedData.from_frame(frame, client="who", label="bought", features=["age", "city"])
    wanted = run.predict("u1", data.select([1]))
    said = run.predict("u1", frame.take(mine).drop_columns(["bought"]).select(["city", "who", "age"]))
    assert [row.tasks[0].probabilities for row in said] == [row.tasks[0].probabilities for row in wanted]
    assert len({row.tasks[0].value for row in said}) == 2
    run.export(tmp_path / "models")
    again = Exported(tmp_path / "models", run.net.module, run.method).predict("u1", frame.take(mine))
    assert [row.tasks for row in again] == [row.tasks for row in said]


def test_a_column_that_lacks_is_named(bought: tuple[pyarrow.Table, Run]) -> None:
    frame, run = bought
    with pytest.raises(DataError, match="'age'"):
        run.predict("u1", frame.drop_columns(["age"]))


def test_texts_are_in_a_column_called_as_the_models() -> None:
    frame = table(text=["good day", "bad news"] * (ROWS // 2), label=["up", "down"] * (ROWS // 2))
    data = FederatedData.from_frame(frame, client="who", label="label", text="text")
    model = models.BagOfWords(data.meta["vocabulary"]["size"], 2)
    run = simulate(model, methods.fedavg(), data, rounds=60, progress=False)
    said = run.predict("u0", pyarrow.table({"text": ["good day", "bad news"]}))
    assert [row.tasks[0].value for row in said] == ["up", "down"]


@pytest.mark.parametrize("use", ["fit", "predict", "continue"])
def test_rows_whose_numbers_mean_something_else_are_refused(use: str, tmp_path: Path) -> None:
    """By themselves new rows would number their labels, and scale their amounts, in another way than the run's."""

    def encoded(
        name: str, age: Sequence[float], label: Sequence[str], by: FederatedData | None = None
    ) -> Any:
        path = tmp_path / f"{name}.csv"
        rows = [f"{name}{n % 3},{a},{say}" for n, (a, say) in enumerate(zip(age, label, strict=True))]
        path.write_text("\n".join(["user,age,label", *rows]))
        raw = raw_table(path, features=["age"])
        if by is None:
            return raw.encoded(Encoding.of(raw.summary(Rules())))
        return raw.encoded(Encoding.from_json(by.meta["encoded_by"]))

    data = encoded("old", [20.0, 30, 40, 50, 60, 70], ["cat", "dog", "fox"] * 2).split_per_user((0.5, 0, 0.5))
    method = methods.fedper("head.*")
    run = simulate(models.MLP(1, 3), method, data, rounds=1, progress=False)

    def take(rows: FederatedData) -> None:
        if use == "fit":
            run.fit(rows=rows, progress=False)
        elif use == "predict":
            run.predict("old0", rows)
        else:
            again = rows.split_per_user((0.5, 0, 0.5))
            simulate(models.MLP(1, 3), method, again, rounds=1, continue_from=run, progress=False)

    labels, scales = ([20.0, 30, 40, 50, 60, 70], ["dog", "fox"] * 3), ([90.0, 91, 92], ["cat", "dog", "fox"])
    with pytest.raises(DataError, match=r"label_names is \['dog', 'fox'\], there \['cat', 'dog', 'fox'\]"):
        take(encoded("new", *labels))
    with pytest.raises(DataError, match=r"standardised is .*91\.0.*, there .*45\.0"):
        take(encoded("new", *scales))
    for rows in (labels, scales):
        take(encoded("new", *rows, by=data))


def test_a_model_that_fails_on_new_rows_is_told_of_as_in_training() -> None:
    class Words(torch.nn.Embedding):
        def forward(self, word: torch.Tensor) -> torch.Tensor:
            return super().forward(word)

    data = FederatedData.from_columns(
        ["a"] * 6, {"word": [0, 1, 2] * 2, "label": [0, 1, 0] * 2}, ["train"] * 6
    )
    run = simulate(Words(3, 2), methods.fedavg(), data, rounds=1, progress=False)
    with pytest.raises(MethodError, match="row 0 .*2 examples.*index out of range.*an id"):
        run.predict("a", {"word": [1, 3]})


def test_a_category_that_was_not_trained_on_is_told_of(bought: tuple[pyarrow.Table, Run]) -> None:
    run = bought[1]
    with pytest.warns(
        UserWarning, match=r"'city' has \['b '\], .* none of the categories, \['A', 'B', 'C'\]"
    ):
        run.predict("u1", {"x": [[40.0, "b "], [41.0, "A"]]})
    run.predict("u1", {"x": [[40.0, "B"]]})

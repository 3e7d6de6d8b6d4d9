"""Columns of series in files: lists, texts that are declared, channels, cuts, scales, and what is wrong said by row."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from fedkeep.core.errors import DataError
from fedkeep.data import FederatedData, Ragged
from fedkeep.data.datasets import columns_of_datasets
from fedkeep.data.preparation import Encoding, Rules, Summary, merged
from fedkeep.data.readers import raw_table, read_table
from fedkeep.data.seen import marks_of
from tests.refusals import raises

ROWS: list[dict[str, Any]] = [
    {"user": "a", "x": [1.0, 2.0, 3.0], "y": [0, 0, 1], "label": "p", "split": "train"},
    {"user": "a", "x": [5.0], "y": [2], "label": "q", "split": "train"},
    {"user": "b", "x": [4.0, 9.0], "y": [1, 1], "label": "p", "split": "train"},
    {"user": "b", "x": [100.0, -100.0], "y": [7, 8], "label": "q", "split": "test"},
]
STEPS = np.array([[1, 0], [2, 0], [3, 1], [5, 2], [4, 1], [9, 1]], np.float64)
"""Of the rows to train on."""
NAMES = {"user": "user", "label": "label", "features": ["x", "y"]}
TEXTS = {"x": "series", "y": "series"}


def written(folder: Path, ending: str, rows: list[dict[str, Any]] = ROWS) -> Path:
    path = folder / f"t{ending}"
    if ending == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif ending == ".parquet":
        parquet.write_table(pa.Table.from_pylist(rows), path)
    else:
        with path.open("w", newline="") as file:
            out = csv.writer(file)
            out.writerow(rows[0])
            out.writerows(
                [
                    (" ".join(map(str, cell)) if n % 2 else str(cell)) if isinstance(cell, list) else cell
                    for n, cell in enumerate(row.values())
                ]
                for row in rows
            )
    return path


@pytest.mark.parametrize("ending", [".jsonl", ".parquet", ".csv"])
def test_columns_are_channels_on_scales_of_steps_to_train_on(tmp_path: Path, ending: str) -> None:
    kinds = TEXTS if ending == ".csv" else None  # "1.0 2.0 3.0" and "[0, 0, 1]"
    data = read_table(written(tmp_path, ending), **NAMES, kinds=kinds)
    x = data.columns["x"]
    assert isinstance(x, Ragged)
    assert data.meta["channels"] == ["x", "y"]
    mean, scale = STEPS.mean(0), STEPS.std(0)
    np.testing.assert_allclose(x.values[:6], (STEPS - mean) / scale, rtol=1e-6)
    np.testing.assert_allclose(x[3], (np.array([[100, 7], [-100, 8]]) - mean) / scale, rtol=1e-6)
    batch = data.batch([0, 1])
    assert batch["x"].shape == (2, 3, 2)
    assert batch["x_length"].tolist() == [3, 1]
    assert not batch["x"][1, 1:].any()


def test_a_list_of_steps_is_a_series_of_channels(tmp_path: Path) -> None:
    rows = [{**row, "x": [[a, 2 * a, b] for a, b in zip(row["x"], row["y"], strict=True)]} for row in ROWS]
    for ending in (".jsonl", ".parquet"):
        data = read_table(
            written(tmp_path, ending, rows), user="user", label="label", features=["x"], standardise=False
        )
        assert data.meta["channels"] == ["x[0]", "x[1]", "x[2]"]
        assert data.columns["x"][0].tolist() == [[1, 2, 0], [2, 4, 0], [3, 6, 1]]


def test_what_is_behind_the_longest_length_is_neither_kept_nor_summed(tmp_path: Path) -> None:
    path = written(tmp_path, ".jsonl")
    data = read_table(path, **NAMES, max_length=2)
    assert np.diff(data.columns["x"].offsets).tolist() == [2, 1, 2, 2]
    kept = STEPS[[0, 1, 3, 4, 5]]
    assert data.meta["standardised"]["means"] == pytest.approx(kept.mean(0).tolist())
    asked = raw_table(path, **NAMES).summary(Rules(max_length=1))
    assert Encoding.of(asked).meta["standardised"]["means"] == pytest.approx(
        STEPS[[0, 3, 4]].mean(0).tolist()
    )


def test_devices_sums_make_the_encoding_of_all_rows(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    sources = [
        raw_table(written(tmp_path / name, ".jsonl", [r for r in ROWS if r["user"] == name]), **NAMES)
        for name in "ab"
    ]
    told = [Summary.from_json(source.summary().to_json()) for source in sources]
    encoding = Encoding.of(merged(told))
    assert encoding == Encoding.of(raw_table(written(tmp_path, ".jsonl"), **NAMES).summary())
    assert Encoding.from_json(encoding.to_json()) == encoding
    assert encoding.sizes["step_features"] == 2
    assert "6 steps" in merged(told).describe()
    found = encoding.batch(x=[[[1, 0], [2, 0]], [[5, 2]]])
    np.testing.assert_allclose(found["x"][1, 0], (STEPS[3] - STEPS.mean(0)) / STEPS.std(0), rtol=1e-5)
    assert found["x_length"].tolist() == [2, 1]
    with pytest.raises(DataError, match="Row 0"):
        encoding.batch(x=[[1.0, 2.0]])


BAD: dict[str, tuple[Any, str]] = {
    "empty": ([], "empty"),
    "text": ([1.0, "x"], "'x'"),
    "nan": ([1.0, float("nan")], "nan"),
    "infinite": ([1.0, 1e39], "1e+39"),
    "none in it": ([1.0, None], "None"),
    "missing": (None, "None"),
    "truth": ([True, False], "True"),
    "a number": (3.5, "3.5"),
    "widths": ([[1.0, 2.0], [1.0]], "step 1 of 1"),
    "other width": ([[1.0, 2.0], [1.0, 2.0]], "steps of 2"),
}


@pytest.mark.parametrize("what", BAD)
def test_one_error_names_file_row_and_column(tmp_path: Path, what: str) -> None:
    cell, got = BAD[what]
    path = written(tmp_path, ".jsonl", [*ROWS[:2], {**ROWS[2], "y": cell}, ROWS[3]])
    with raises(DataError, column="y") as error:
        read_table(path, **NAMES)
    assert got in error.value.facts["got"]
    assert f"{path}, line 3" in str(error.value)


@pytest.mark.parametrize("cell", [[], [1.0, float("nan")], [1.0, None], None])
def test_parquet_names_the_row(tmp_path: Path, cell: Any) -> None:
    path = written(tmp_path, ".parquet", [*ROWS[:2], {**ROWS[2], "y": cell}])
    with raises(DataError, column="y", said="row 2"):
        read_table(path, **NAMES)


def test_channels_have_as_many_steps(tmp_path: Path) -> None:
    path = written(tmp_path, ".jsonl", [ROWS[0], {**ROWS[2], "y": [1]}])
    with raises(DataError, column="y", first="x", wanted=2, got=1, said="line 2"):
        read_table(path, **NAMES)


def test_series_stand_alone_and_texts_are_declared(tmp_path: Path) -> None:
    path = written(tmp_path, ".jsonl", [{**row, "y": 1.0} for row in ROWS])
    with raises(DataError, column="y", series="x"):
        read_table(path, **NAMES)
    with raises(DataError, got="serie"):
        read_table(written(tmp_path, ".csv"), **NAMES, kinds={"x": "serie", "y": "series"})
    many = [{**row, "x": [n, n + 1, 0.5], "y": [n, 2, 3]} for n, row in enumerate(ROWS * 30)]
    with pytest.raises(DataError, match='"series"'):
        read_table(written(tmp_path, ".csv", many), **NAMES)


def test_series_of_data_sets_may_have_different_lengths() -> None:
    sets = {c: [(np.full((n, 2), n, np.float32), n % 2) for n in (1, 3)] for c in "ab"}
    data = FederatedData.from_columns(*columns_of_datasets(sets, None))
    assert data.batch([0, 1])["x_length"].tolist() == [1, 3]


def test_a_ragged_column_of_series_is_checked_and_marked() -> None:
    rows = [[[1.0, 2.0]], [[3.0, 4.0], [5.0, 6.0]]]
    data = FederatedData.from_columns(["a", "b"], {"x": Ragged.from_rows(rows, "float32"), "label": [0, 1]})
    other = FederatedData.from_columns(
        ["a", "b"], {"x": Ragged.from_rows([rows[0], [[3.0, 4.0], [6.0, 5.0]]], "float32"), "label": [0, 1]}
    )
    assert (marks_of(data) == marks_of(other)).tolist() == [True, False]
    rows[1][1][0] = float("nan")
    with raises(DataError, row=1, client="b"):
        FederatedData.from_columns(["a", "b"], {"x": Ragged.from_rows(rows, "float32"), "label": [0, 1]})
    for wrong in ([[1.0, 2.0]], [[[1.0], [2.0, 3.0]]], [[[1.0]], [[1.0, 2.0]]], [[["x"]]]):
        with pytest.raises(DataError):
            Ragged.from_rows(wrong, "float32")

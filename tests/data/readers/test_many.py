"""One file a client, and a separate file of test rows."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedkeep.core.errors import DataError
from fedkeep.data import FederatedData, read_table
from tests.data.readers.written import WRITERS
from tests.refusals import raises

ROWS = [{"a": 0.5, "label": "x"}, {"a": 1.5, "label": "y"}]


def written(folder: Path, *names: str, rows: list[dict[str, Any]] | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    for name in names:
        ending = next(ending for ending in WRITERS if name.endswith(ending[1:]))
        (folder / name).write_bytes(WRITERS[ending](rows or ROWS))
    return folder


def read(place: Path, **options: Any) -> FederatedData:
    return read_table(place, features=["a"], standardise=False, **options)


def parts(data: FederatedData) -> dict[str, list[int]]:
    return {c: [data.count(n, part) for part in ("train", "valid", "test")] for n, c in enumerate(data.ids)}


@pytest.mark.parametrize("ending", [".csv", ".jsonl", ".parquet", ".tsv"])
@pytest.mark.parametrize("pattern", ["", "*o*"])
def test_a_file_is_a_client(tmp_path: Path, ending: str, pattern: str) -> None:
    written(tmp_path / "logs", f"bo lin{ending}", f"an.o{ending}", f".hidden{ending}")
    data = read(tmp_path / "logs" / pattern if pattern else tmp_path / "logs")
    assert list(data.ids) == ["an.o", "bo lin"]
    assert np.asarray(data.columns["x"]).tolist() == [[0.5], [1.5], [0.5], [1.5]]
    assert list(data.meta["source"]) == ["logs"]
    assert data.bounds is None


def test_endings_may_differ_and_names_may_tell_splits(tmp_path: Path) -> None:
    data = read(written(tmp_path, "bo.train.csv", "bo.test.jsonl", "ann.val.parquet", "ann.train.csv"))
    assert parts(data) == {"ann": [2, 2, 0], "bo": [2, 0, 2]}


def test_a_column_of_clients_comes_before_the_files_names(tmp_path: Path) -> None:
    for column in ("user", "who"):
        folder = written(tmp_path / column, "1.csv", "2.csv", rows=[{column: "ann", **row} for row in ROWS])
        assert list(read(folder, user=column).ids) == ["ann"]
    with raises(DataError, column="whom"):
        read(tmp_path / "who", user="whom")


def test_rows_of_another_file_are_for_testing(tmp_path: Path) -> None:
    mine = [{"user": "bo", **row} for row in ROWS]
    train = written(tmp_path, "t.csv", "s.csv", rows=mine) / "t.csv"
    assert parts(read(train, test_path=tmp_path / "s.csv")) == {"bo": [2, 0, 2]}
    said = [{**row, "split": "valid"} for row in mine]
    assert parts(read(written(tmp_path, "v.csv", rows=said) / "v.csv", test_path=train)) == {"bo": [0, 2, 2]}
    folder = written(tmp_path / "many", "bo.csv", "ann.csv")
    assert parts(read(folder, test_path=train)) == {"ann": [2, 0, 0], "bo": [2, 0, 2]}


def test_a_decimal_comma_in_any_file_holds_for_all(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a;label\n0,5;x\n1,5;y\n")
    (tmp_path / "b.csv").write_text("a;label\n2;x\n3;y\n")
    assert np.asarray(read(tmp_path).columns["x"]).tolist() == [[0.5], [1.5], [2], [3]]


def test_a_bad_cell_is_named_by_its_own_file(tmp_path: Path) -> None:
    written(tmp_path, "ann.csv", "bo.csv")
    (tmp_path / "bo.csv").write_text("a,label\n1,x\n1,\n")
    with raises(DataError, said=f"{tmp_path / 'bo.csv'}, line 3"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("names", "facts"),
    [
        (["ann.csv", "ann.jsonl"], {"client": "ann", "part": "whole"}),
        (["ann.train.csv", "bo.csv"], {"column": "split"}),
        ([], {"what": "table"}),
    ],
)
def test_what_is_refused(tmp_path: Path, names: list[str], facts: dict[str, str]) -> None:
    with raises(DataError, **facts):
        read(written(tmp_path / "t", *names))


def test_a_split_told_twice_and_a_column_in_some_files(tmp_path: Path) -> None:
    written(tmp_path, "ann.train.csv", rows=[{**row, "split": "train"} for row in ROWS])
    with raises(DataError, column="split"):
        read(tmp_path)
    written(tmp_path / "t", "a.csv")
    written(tmp_path / "t", "b.csv", rows=[{**row, "time": 1} for row in ROWS])
    with raises(DataError, column="time"):
        read(tmp_path / "t")
    with raises(DataError, folder=tmp_path / "no*.csv"):
        read(tmp_path / "no*.csv")
    if sys.version_info < (3, 13):  # from then on it means a*
        with raises(DataError, folder=tmp_path / "a**"):
            read(tmp_path / "a**")

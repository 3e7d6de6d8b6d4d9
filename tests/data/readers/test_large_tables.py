"""A file too large to be kept as texts reads as a small one does: numbers at once, texts that come again coded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fedkeep.core.errors import DataError
from fedkeep.data import FederatedData, read_table
from fedkeep.data.readers import load_table
from fedkeep.data.readers.cells import Cells, coded_of
from fedkeep.data.readers.kinds import field_of

FEATURES = ["opened", "branch", "income", "score", "note"]
HEAD = "customer,opened,branch,income,score,note,label"


def bank(rows: int = 600, **late: str) -> str:
    """Return a table with quotes, line ends in cells, gaps, ids like numbers; ``late`` cells stand in its last row."""
    draw = np.random.default_rng(0)
    lines = [HEAD]
    for n in range(rows):
        cells = {
            "customer": f"{draw.integers(9):03d}",
            "opened": f"2024-0{draw.integers(1, 9)}-11",
            "branch": ['"north, ""old"""', "south", '"ea\nst"', " south"][draw.integers(4)],
            "income": repr(float(draw.lognormal(8, 1))),
            "score": "" if draw.random() < 0.1 else str(draw.integers(-50, 50)),
            "note": ["x", "y7"][draw.integers(2)],
            "label": ["no", "yes"][draw.integers(2)],
        }
        lines.append(",".join((cells | (late if n == rows - 1 else {})).values()))
    return "\n".join(lines) + "\n"


def read_both(
    file: Path, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> tuple[FederatedData, FederatedData]:
    options = {"user": "customer", "features": FEATURES, **options}
    whole = read_table(file, **options)
    monkeypatch.setattr(load_table, "SAMPLE", 1 << 12)
    return whole, read_table(file, **options)


def same(one: FederatedData, other: FederatedData) -> None:
    assert one.meta == other.meta
    assert list(one.ids) == list(other.ids)
    np.testing.assert_array_equal(one.offsets, other.offsets)
    assert one.columns.keys() == other.columns.keys()
    for name, column in one.columns.items():
        assert np.asarray(column).tobytes() == np.asarray(other.columns[name]).tobytes(), name


@pytest.mark.parametrize(
    "late",
    [
        {},
        {"income": "NA"},
        {"income": " 12.5 "},
        {"income": '"1,204.5"'},
        {"income": '""'},
        {"score": "-"},
        {"opened": ""},
        {"note": ""},
        {"income": "+3e2", "score": "nan"},
    ],
)
def test_a_large_file_reads_as_a_small_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: dict[str, str]
) -> None:
    file = tmp_path / "bank.csv"
    file.write_text(bank(**late))
    same(*read_both(file, monkeypatch))


@pytest.mark.parametrize(("mark", "decimal"), [(";", ","), ("\t", "."), (";", ".")])
def test_whatever_its_marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mark: str, decimal: str) -> None:
    draw = np.random.default_rng(1)
    rows = [f"a{n % 7}{mark}{draw.normal():.3f}{mark}{n % 2}".replace(".", decimal) for n in range(900)]
    file = tmp_path / "t.csv"
    file.write_text("\n".join([mark.join(("customer", "x", "label")), *rows]) + "\n")
    whole, parts = read_both(file, monkeypatch, features=["x"])
    same(whole, parts)
    same(read_table(file, user="customer", features=["x"], decimal=decimal), parts)


@pytest.mark.parametrize("late", [{"income": "inf"}, {"income": "much"}, {"income": "1e400"}])
def test_what_a_late_row_breaks_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: dict[str, str]
) -> None:
    file = tmp_path / "bank.csv"
    file.write_text(bank(**late))
    said = []
    for sample in (1 << 22, 1 << 12):
        monkeypatch.setattr(load_table, "SAMPLE", sample)
        with pytest.raises(DataError) as caught:
            read_table(file, user="customer", features=FEATURES)
        said.append(str(caught.value))
    assert said[0] == said[1]
    assert caught.value.facts["column"] == "income"
    assert str(len(file.read_text().splitlines())) in said[0]


def test_numbers_are_read_at_once_and_texts_coded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "bank.csv"
    file.write_text(bank())
    monkeypatch.setattr(load_table, "SAMPLE", 1 << 12)
    table = load_table.load_table(file, HEAD.split(","), numbers=("income", "score", "note"))
    kinds = {name: str(cells.values.type).split("<")[0] for name, cells in table.columns.items()}
    assert kinds == {
        "customer": "dictionary",
        "opened": "dictionary",
        "branch": "dictionary",
        "income": "double",
        "score": "double",
        "note": "dictionary",
        "label": "dictionary",
    }
    as_written = load_table.load_table(file, HEAD.split(","))
    assert {str(cells.values.type) for cells in as_written.columns.values()} == {"string"}


def test_parquet_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = 3000
    draw = np.random.default_rng(2)
    columns = {
        "customer": pa.array([f"{n:03d}" for n in draw.integers(0, 30, rows)]),
        "branch": pa.array([["b", "a", None][n] for n in draw.integers(0, 3, rows)]),
        "note": pa.array([f"{draw.random():.12f}" for _ in range(rows)]),
        "income": pa.array(draw.normal(size=rows)),
        "label": pa.DictionaryArray.from_arrays(draw.integers(1, 3, rows), ["unused", "yes", "no"]),
    }
    pq.write_table(pa.table(columns), file := tmp_path / "t.parquet")
    same(*read_both(file, monkeypatch, features=["branch", "note", "income"]))


def test_different_values_come_in_the_order_of_their_first_rows() -> None:
    one = pa.DictionaryArray.from_arrays([2, 0, 2, None], ["a", "unused", "c"])
    other = pa.DictionaryArray.from_arrays([0, 1], ["d", "a"])
    values, number = coded_of(pa.chunked_array([one, other]))
    assert values.to_pylist() == ["c", "a", "d"]
    assert number.tolist() == [0, 1, 0, -1, 2, 1]
    cells, number = Cells(pa.chunked_array([one, other])).different()
    assert cells == ["c", "a", None, "d"]
    assert number.tolist() == [0, 1, 0, 2, 3, 1]


def test_a_dictionary_is_read_as_its_texts() -> None:
    texts = pa.chunked_array([["2", "", "1.5", "2"]])
    table = load_table.RawTable({"coded": Cells(texts.dictionary_encode()), "plain": Cells(texts)}, str)
    coded, plain = (field_of(table, name) for name in ("coded", "plain"))
    np.testing.assert_array_equal(coded.values, plain.values)
    assert coded.kind == plain.kind == "number"

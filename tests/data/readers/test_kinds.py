"""Tables as people have them: marks, encodings, dates, categories, holes; and all that is wrong said at once."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest

from fedkeep.core.errors import DataError, Spot
from fedkeep.data.preparation import Encoding, Rules, merged, prepared
from fedkeep.data.readers.cells import Cells, RawTable
from fedkeep.data.readers.kinds import field_of
from fedkeep.data.readers.tables import raw_table, read_table
from tests.refusals import raises

BANK = """Kunde;Alter;Einkommen;Beruf;seit;aktiv;Anteil;label
k 1;34;1.234,50;Lehrer;03.01.2015;yes;45 %;gut
k 1;;2.000,00;Ärztin;14.02.2016;no;30 %;schlecht
k 2;51;980,25;Lehrer;;yes;12 %;gut
k 2;29;;;01.12.2020;yes;;gut
"""
PLAIN = Rules(standardise=False)
NAMES = ["Alter", "Einkommen", "Beruf", "seit", "aktiv", "Anteil"]


def table(cells: list[Any], decimal: str = ".") -> RawTable:
    return RawTable({"a": Cells(cells)}, lambda row: Spot("t", row, "row"), decimal)


def day(*date: int) -> float:
    return float(datetime.date(*date).toordinal() - datetime.date(1970, 1, 1).toordinal())


@pytest.mark.parametrize(
    ("cells", "kind", "values"),
    [
        (["1", " 2.5", "", "+3", "1e3"], "number", [1, 2.5, None, 3, 1000]),
        (["1,234.5", "7"], "number", [1234.5, 7]),
        (["1.234,5", "7"], "number", [1234.5, 7]),
        (["1 234,5", "-7"], "number", [1234.5, -7]),
        (["1'234.5", "NA"], "number", [1234.5, None]),
        (["45 %", "3%"], "number", [45, 3]),
        (["€ 1,200.50", "€7"], "number", [1200.5, 7]),
        (["12 km", "1.5 km"], "number", [12, 1.5]),
        ([1, None, 2.5], "number", [1, None, 2.5]),
        ([1, " 0.5"], "number", [1, 0.5]),
        ([True, None, False], "truth", [1, None, 0]),
        (["Yes", "no", "?"], "truth", [1, 0, None]),
        (["1970-01-03", "1970-01-02T12:00", ""], "date", [2, 1.5, None]),
        (["1970-01-02 00:00:00+00:00", "1970-01-02T02:00:00+01:00"], "date", [1, 1 + 1 / 24]),
        (["31.12.1999", "1.2.2000"], "date", [day(1999, 12, 31), day(2000, 2, 1)]),
        (["03/14/2001", "01/02/2001"], "date", [day(2001, 3, 14), day(2001, 1, 2)]),
        (["14/03/2001", "01/02/2001"], "date", [day(2001, 3, 14), day(2001, 2, 1)]),
        (["2001/02/01 06:00"], "date", [day(2001, 2, 1) + 0.25]),
        ([datetime.date(1970, 1, 5), None], "date", [4, None]),
        (["b", "a", "", "b"], "category", [0, 1, None, 0]),
        (["A1", "A2"], "category", [0, 1]),
    ],
)
def test_what_a_column_holds(cells: list[Any], kind: str, values: list[float | None]) -> None:
    found = field_of(table(cells), "a")
    assert found.kind == kind
    np.testing.assert_allclose(found.values, [np.nan if v is None else v for v in values])


def test_a_files_decimals_settle_what_one_column_leaves_open() -> None:
    assert field_of(table(["1.234", "5.678"]), "a").values.tolist() == [1.234, 5.678]
    assert field_of(table(["1.234", "5.678"], ","), "a").values.tolist() == [1234, 5678]
    assert field_of(table(["1,234", "5,678"]), "a").values.tolist() == [1234, 5678]
    assert field_of(table(["1,234", "5,678"], ","), "a").values.tolist() == [1.234, 5.678]


def test_a_declared_kind() -> None:
    assert field_of(table([3, 1, 3]), "a", "category").levels == ("3", "1")
    found = field_of(table(["03/04/2021"]), "a", "date:%m/%d/%Y")
    assert (found.values.tolist(), found.declared) == ([day(2021, 3, 4)], "date:%m/%d/%Y")
    many = [f"x{n}" for n in range(200)]
    assert len(field_of(table(many), "a", "category").levels) == 200


@pytest.mark.parametrize(
    ("cells", "declared", "row", "got"),
    [
        (["1", "2", "z"], None, 2, "z"),
        (["2021-01-01", "2021-01-02", "soon"], None, 2, "soon"),
        (["03/04/2021", "04/05/2021"], None, 0, "03/04/2021"),
        ([f"x{n}" for n in range(200)], None, 0, "x0"),
        (["", ""], None, 0, ""),
        ([None, None], None, 0, None),
        (["1", "inf"], None, 1, "inf"),
        ([1.0, float("inf")], None, 1, float("inf")),
        ([[1], [2]], None, 0, [1]),
        (["a", {"b": 1}], None, 1, {"b": 1}),
        (["1", "a"], "number", 1, "a"),
        (["a", "b"], "truth", 0, "a"),
        ([1, 2], "truth", 1, 2.0),
        (["2021-02-30"], "date:%Y-%m-%d", 0, "2021-02-30"),
        ([1.5], "date", 0, 1.5),
    ],
)
def test_what_is_no_column_of_one_kind(cells: list[Any], declared: str | None, row: int, got: Any) -> None:
    with raises(DataError, place=Spot("t", row, "row"), column="a", got=got):
        field_of(table(cells), "a", declared)


def test_an_unknown_kind() -> None:
    with pytest.raises(DataError, match="categroy"):
        field_of(table([1]), "a", "categroy")


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1", "utf-16", "utf-16-le", "utf-16-be"])
@pytest.mark.filterwarnings("ignore:.*(is no UTF-8|reaches)")
def test_a_table_as_a_spreadsheet_saves_it(encoding: str, tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(BANK.encode(encoding))
    data = prepared(raw_table(path, user="Kunde", features=NAMES), PLAIN)
    assert list(data.ids) == ["k 1", "k 2"]
    x = dict(zip(data.meta["features"], np.asarray(data.columns["x"]).T.tolist(), strict=True))
    assert x["Alter"] == [34, 0, 51, 29]
    assert x["Alter missing"] == [0, 1, 0, 0]
    assert x["Einkommen"] == [1234.5, 2000, 980.25, 0]
    assert x["Beruf=Ärztin"] == [0, 1, 0, 0]
    assert x["Beruf missing"] == [0, 0, 0, 1]
    assert x["seit"] == [day(2015, 1, 3), day(2016, 2, 14), 0, day(2020, 12, 1)]
    assert x["Anteil"] == [45, 30, 12, 0]


def test_latin_1_is_told_where_it_begins_late(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    rows = ["user,f,label", *(f"u{n % 3},1,a" for n in range(20_000)), "u1,1,ä"]
    path.write_bytes("\n".join(rows).encode("latin-1"))
    with pytest.warns(UserWarning, match="is no UTF-8"):
        assert read_table(path, features=["f"]).meta["label_names"] == ["a", "ä"]


def test_the_mark_between_cells_is_found(tmp_path: Path) -> None:
    for name, mark in (("t.csv", ";"), ("t.csv", "\t"), ("t.tsv", ","), ("t.csv", "|")):
        path = tmp_path / name
        path.write_text(f"user{mark}f{mark}label\nu{mark}1{mark}a\n")
        assert read_table(path, features=["f"]).meta["label_names"] == ["a"]


def test_all_bad_columns_are_named_at_once(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("user,a,b,c,label\nu,1,x1,03/04/2021,1\nu,z,x2,04/05/2021,0\n,3,x3,01/01/2020,\n")
    with raises(DataError, count=4, columns=["label", "a", "c", "user"]):
        read_table(path, features=["a", "b", "c"])
    path.write_text("user,a,label\nu,1,0\n")
    with raises(DataError, column="b", features=["a"]):
        read_table(path, features=["a"], kinds={"b": "date"})


def test_devices_agree_on_categories_and_holes(tmp_path: Path) -> None:
    """What one device never saw is known from another; a device with other kinds is told so."""
    rows = (("u,1,x,a\nu,3,y,b\n", {}), ("v,,z,a\nv,5,y,b\n", {}))
    raws = []
    for number, (text, kinds) in enumerate(rows):
        path = tmp_path / f"{number}.csv"
        path.write_text(f"user,n,c,label\n{text}")
        raws.append(raw_table(path, features=["n", "c"], kinds=kinds))
    whole = merged(raw.summary(Rules(standardise=True)) for raw in raws)
    encoding = Encoding.from_json(Encoding.of(whole).to_json())
    assert encoding.meta["features"] == ["n", "n missing", "c=x", "c=y", "c=z"]
    assert encoding.sizes["features"] == 5
    x = np.asarray(raws[1].encoded(encoding).columns["x"])
    assert x[0].tolist() == [0, 1, 0, 0, 1]  # the mean of 1, 3 and 5
    assert x[1].tolist() == pytest.approx([2 / (8 / 3) ** 0.5, 0, 0, 1, 0])
    assert "the categories of c: x, y, z" in whole.describe()
    with pytest.warns(UserWarning, match=r"'c' has \['new'\]"):
        batch = encoding.batch(x=[[None, "z"], [5, "y"], [3.0, "new"]])["x"].numpy()
    assert batch[:2].tolist() == x.tolist()
    assert batch[2].tolist() == [0] * 5
    (tmp_path / "2.csv").write_text("user,n,c,label\nu,1,2,a\nu,3,4,b\n")
    other = raw_table(tmp_path / "2.csv", features=["n", "c"])
    assert "kinds" in str(other.summary().difference(raws[0].summary()))


EMPTY = ([None, None], ["NA", " "], [float("nan")], pyarrow.array(["", "?"]).dictionary_encode())


@pytest.mark.parametrize("cells", EMPTY, ids=["nothing", "words", "nan", "dictionary"])
def test_a_feature_whose_kind_is_known_may_be_empty_in_every_row(cells: Any) -> None:
    """A row to predict may lack what training rows had; of what it is nobody could tell by looking."""
    one = table(cells)
    for kind in ("number", "truth", "date:%d.%m.%Y", "category"):
        found = field_of(one, "a", kind, may_be_empty=True)
        assert (found.declared, found.levels) == (kind, ())
        assert np.isnan(found.values).tolist() == [True] * len(cells)
    none = field_of(table(["none", "-"]), "a", "category", may_be_empty=True)
    assert sorted(none.levels) == ["-", "none"]  # of categories these are two
    for kind in (None, "number"):  # a label, for one, may not
        with pytest.raises(DataError):
            field_of(one, "a", kind)


def test_a_device_whose_column_is_empty_has_the_others_mean(tmp_path: Path) -> None:
    texts = ("u,1,x,a\nu,3,y,b\n", "v,,,a\nv,,,b\n")
    raws = []
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.csv").write_text(f"user,n,c,label\n{text}")
        kinds = {"n": "number", "c": "category"} if number else {}
        raws.append(raw_table(tmp_path / f"{number}.csv", features=["n", "c"], kinds=kinds))
    encoding = Encoding.of(merged(raw.summary(Rules(standardise=True)) for raw in raws))
    assert encoding.meta["features"] == ["n", "n missing", "c=x", "c=y", "c missing"]
    assert np.asarray(raws[1].encoded(encoding).columns["x"]).tolist() == [[0, 1, 0, 0, 1]] * 2
    there = np.asarray(raws[0].encoded(encoding).columns["x"])
    assert there.tolist() == [[-1, 0, 1, 0, 0], [1, 0, 0, 1, 0]]


def test_opted_out_and_judged_rows_shape_no_categories(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("user,c,label,opted_in,split\nu,x,a,1,train\nu,secret,a,0,train\nu,y,b,1,test\n")
    with pytest.warns(UserWarning, match=r"'c' has \['secret', 'y'\]"):
        data = prepared(raw_table(path, features=["c"]), PLAIN)
    assert data.meta["features"] == ["c=x"]
    assert np.asarray(data.columns["x"]).tolist() == [[1], [0], [0]]


def test_excel(tmp_path: Path) -> None:
    openpyxl = pytest.importorskip("openpyxl")
    book = openpyxl.Workbook()
    for row in [
        ["user", "f", "day", "label"],
        ["a", 1.5, datetime.datetime(1970, 1, 2), "x"],
        ["b", None, None, "y"],
    ]:
        book.active.append(row)
    path = tmp_path / "t.xlsx"
    book.save(path)
    data = prepared(raw_table(path, features=["f", "day"]), PLAIN)
    assert np.asarray(data.columns["x"]).tolist() == [[1.5, 0, 1, 0], [0, 1, 0, 1]]
    path.write_bytes(path.read_bytes()[:100])
    with raises(DataError, file=path):
        read_table(path)


def test_a_column_is_read_alike_where_its_texts_repeat_and_where_they_do_not() -> None:
    for texts in (
        ["1,5 kg", "2 kg", ""],
        ["03.02.2021", "14.02.2021", "na"],
        ["yes", "no", "?"],
        ["x", "y", " x"],
    ):
        once = field_of(RawTable({"c": Cells(pyarrow.chunked_array([texts]))}, str, ","), "c")
        often = field_of(RawTable({"c": Cells(pyarrow.chunked_array([texts * 5]))}, str, ","), "c")
        assert (once.kind, once.levels, once.rule) == (often.kind, often.levels, often.rule)
        assert np.array_equal(np.tile(once.values, 5), often.values, equal_nan=True)


def test_a_bad_cell_is_named_by_the_first_row_that_has_it() -> None:
    rows = ["1", "2"] * 20 + ["oops", "3", "oops"]
    with raises(DataError, said="row 40", got="oops"):
        field_of(RawTable({"c": Cells(pyarrow.chunked_array([rows]))}, "row {}".format), "c")


@pytest.mark.parametrize(
    ("kind", "cells", "row"),
    [
        ("date", ["2024-01-01", "2024-01-02", "2024-13-45"], 2),
        ("date", ["2024-01-01", "", "01.02.2024"], 2),
        ("date", ["soon", "2024-01-02", "2024-01-03"], 0),
        ("date", ["31/12/2024", "1/2/2024", "2024/1/2"], 2),
        ("truth", ["yes", "no", "perhaps"], 2),
        ("truth", ["yes", "NA", "1"], 2),
        ("number", ["1.5", "2", "much"], 2),
        ("number", ["1,234.5", "2", "1.234,5"], 2),
    ],
)
def test_the_cell_that_is_odd_is_named(kind: str, cells: list[str], row: int) -> None:
    table = RawTable({"c": Cells(cells)}, "row {}".format)
    with raises(DataError, place=f"row {row}", got=cells[row]):
        field_of(table, "c", kind)

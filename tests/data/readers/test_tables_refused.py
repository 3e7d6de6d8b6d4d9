"""Tables that are refused: which line, what was wanted, and what it has."""

from __future__ import annotations

import gzip
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedkeep.core.errors import DataError
from fedkeep.data import read_table
from fedkeep.data.preparation import Rules, prepared
from fedkeep.data.readers.tables import raw_table
from tests.data.readers.written import ROWS, csv_of, parquet_of, read, refused, without


def test_lines_are_those_of_the_file_when_cells_span_several(tmp_path: Path) -> None:
    rows = [ROWS[1], ROWS[0] | {"split": "never"}]  # the first text holds a line break, so row 2 is on line 4
    assert refused(tmp_path, rows, "t.csv") == (
        f"{tmp_path / 't.csv'}, line 4: wanted the split 'train', 'valid' or 'test'; got 'never'."
    )


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (
            without(ROWS[0], "time"),
            "wanted the column 'time'; it has only ['label', 'split', 'text', 'user'].",
        ),
        (
            ROWS[0] | {"user": None},
            "column 'user': A client id is a text of 1 to 200 printable characters, or an integer; got None, a NoneType. Use str(...) or .decode().",
        ),
        (
            ROWS[0] | {"user": ""},
            "column 'user': A client id is a text of 1 to 200 printable characters, or an integer; got an empty text. Name every client.",
        ),
        (
            ROWS[0] | {"user": 1.5},
            "column 'user': A client id is a text of 1 to 200 printable characters, or an integer; got 1.5, a float. Use str(...) or .decode().",
        ),
        (
            ROWS[0] | {"user": True},
            "column 'user': A client id is a text of 1 to 200 printable characters, or an integer; got True, a bool. Use str(...) or .decode().",
        ),
        (
            ROWS[0] | {"user": [1]},
            "column 'user': A client id is a text of 1 to 200 printable characters, or an integer; got [1], a list. Use str(...) or .decode().",
        ),
        (
            ROWS[0] | {"user": "\u202ebo"},
            "column 'user': A client id is a text of 1 to 200 printable characters, or an integer; got '\\u202ebo', with the character U+202E. Remove it.",
        ),
        (
            ROWS[0] | {"time": 10**400},
            "wanted a number in column 'time'; got 10000000000000000000000000000000000000000000000000000000000000000000000000000000 ….",
        ),
        (
            ROWS[0] | {"label": [1]},
            "wanted a class in column 'label', an integer or a text of at most 200 characters; got [1]. For numbers as labels say task='regression'.",
        ),
        (
            ROWS[0] | {"label": "\ud800"},
            "wanted a class in column 'label', an integer or a text of at most 200 characters; got '\\ud800'. For numbers as labels say task='regression'.",
        ),
        (ROWS[0] | {"text": 3}, "wanted text in column 'text'; got 3."),
        (ROWS[0] | {"text": None}, "wanted text in column 'text'; got None."),
        (
            ROWS[0] | {"split": "tain"},
            "wanted the split 'train', 'valid' or 'test'; got 'tain'. Did you mean 'train'?",
        ),
        (ROWS[0] | {"split": None}, "wanted the split 'train', 'valid' or 'test'; got None."),
        (
            ROWS[0] | {"split": ["train"]},
            "wanted the split 'train', 'valid' or 'test'; got ['train'].",
        ),
        (
            ROWS[0] | {"time": None},
            "wanted a number in column 'time'; got None. Drop such rows or fill in a number.",
        ),
        (
            ROWS[0] | {"time": "2025-11-22"},
            "wanted a number in column 'time'; got '2025-11-22'. Write dates as numbers: date.toordinal(), or seconds.",
        ),
        (ROWS[0] | {"time": "soon"}, "wanted a number in column 'time'; got 'soon'."),
        (
            ROWS[0] | {"time": True},
            "wanted a number in column 'time'; got True. Write truth values as 1 and 0, in pandas by .astype(int).",
        ),
        (ROWS[0] | {"time": float("nan")}, "column 'time' holds nan. Drop such rows or fill in a number."),
        (
            ROWS[0] | {"label": 0.5},
            (
                "wanted a class in column 'label', an integer or a text of at most 200 characters; got 0.5. For numbers as labels say "
                "task='regression'; where each is a class, task='multiclass' or label_names."
            ),
        ),
        (
            ROWS[0] | {"label": float("nan")},
            (
                "wanted a class in column 'label', an integer or a text of at most 200 characters; got nan. For numbers as labels say "
                "task='regression'."
            ),
        ),
        (
            ROWS[0] | {"label": None},
            (
                "wanted a class in column 'label', an integer or a text of at most 200 characters; got None. For numbers as labels say "
                "task='regression'."
            ),
        ),
    ],
)
def test_a_bad_row(tmp_path: Path, row: dict[str, Any], expected: str) -> None:
    assert refused(tmp_path, [*ROWS, row]) == f"{tmp_path / 't.jsonl'}, line 4: {expected}"


def test_a_label_below_zero(tmp_path: Path) -> None:
    rows = [{"user": "a", "text": "x", "label": label} for label in (0, -1)]
    assert (
        refused(tmp_path, rows, "t.csv")
        == f"{tmp_path / 't.csv'}, line 3: wanted a label of 0 or more, of at most 18 digits; got '-1'."
    )


def test_features_and_labels_that_are_not_finite(tmp_path: Path) -> None:
    rows = [{"user": "a", "f": 1.0, "label": 1.0}, {"user": "a", "f": "inf", "label": 1.0}]
    where = f"{tmp_path / 't.csv'}, line 3"
    assert refused(tmp_path, rows, "t.csv", features=["f"], task="regression") == (
        f"{where}: column 'f' holds inf. Drop such rows or fill in a number."
    )
    rows[1] = {"user": "a", "f": 1.0, "label": "nan"}
    assert refused(tmp_path, rows, "t.csv", features=["f"], task="regression") == (
        f"{where}: column 'label' holds nan. Drop such rows or fill in a number."
    )
    rows[1] = {"user": "a", "f": "x", "label": 1.0}
    assert refused(tmp_path, rows, "t.csv", features=["f"], task="regression") == (
        f"{where}: wanted a number in column 'f'; got 'x'."
    )


@pytest.mark.parametrize(
    ("content", "name", "expected"),
    [
        (b"", "t.csv", "The data file {path} is empty. Fetch it again."),
        (
            b"user,text,label\n",
            "t.csv",
            "The data file {path} holds no example, only a header. Fetch it again.",
        ),
        (b"user,text,label\na,b\n", "t.csv", "{path}, line 2: wanted 3 cells, as in the header; got 2."),
        (
            b'user,text,label\na,"b,0\n',
            "t.csv",
            "{path}, line 2: malformed (unexpected end of data). Check the quotes.",
        ),
        (
            b'user,text,label\na,"b"c,0\n',
            "t.csv",
            ("{path}, line 2: malformed (',' expected after '\"'). Check the quotes."),
        ),
        (
            b"user,text,label\na,\xff,0\n",
            "t.csv",
            "{path}, line 2: not utf-8 text (invalid start byte at byte 2). Save the file as UTF-8.",
        ),
        (b"\n", "t.jsonl", "The data file {path} holds no line. Fetch it again."),
        (
            b"{}x\n",
            "t.jsonl",
            ("{path}, line 1: not JSON (Extra data: line 1 column 3 (char 2)). One object a line is wanted."),
        ),
        (
            b"x",
            "t.xlsx",
            (
                "Wanted a file that ends in one of .csv, .csv.gz, .tsv, .tsv.gz, .jsonl, .jsonl.gz, "
                ".parquet; "
                "got t.xlsx."
            ),
        ),
    ],
)
def test_malformed_files(tmp_path: Path, content: bytes, name: str, expected: str) -> None:
    assert refused(tmp_path, content, name) == expected.format(path=tmp_path / name)


def test_a_truncated_table(tmp_path: Path) -> None:
    said = refused(tmp_path, gzip.compress(csv_of(ROWS))[:-4], "t.csv.gz")
    assert said.startswith(f"{tmp_path / 't.csv.gz'} is truncated or no gzip file: it breaks off after line ")
    assert said.endswith(
        "(Compressed file ended before the end-of-stream marker was reached). Fetch it again."
    )


def test_a_file_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(DataError) as error:
        read_table(tmp_path / "t.csv")
    assert (
        str(error.value)
        == f"Wanted the data file {tmp_path / 't.csv'}, which does not exist. Check the path."
    )


def test_a_truncated_parquet_file(tmp_path: Path) -> None:
    said = refused(tmp_path, parquet_of(ROWS)[:-20], "t.parquet")
    assert said.startswith(f"{tmp_path / 't.parquet'} is truncated or no Parquet file: ")
    assert said.endswith(" Fetch it again.")


def test_an_empty_parquet_table(tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({name: pa.array([], pa.string()) for name in ("user", "text", "label")}), path)
    with pytest.raises(DataError) as error:
        read_table(path)
    assert str(error.value) == f"The data file {path} holds no example, only a header. Fetch it again."


def test_parquet_rows_are_named(tmp_path: Path) -> None:
    assert refused(tmp_path, [*ROWS, ROWS[0] | {"split": "x"}], "t.parquet") == (
        f"{tmp_path / 't.parquet'}, row 3: wanted the split 'train', 'valid' or 'test'; got 'x'."
    )


def test_parquet_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = parquet_of(ROWS)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert refused(tmp_path, content, "t.parquet") == (
        "Reading t.parquet needs pyarrow. Install it: pip install 'fedkeep[parquet]'."
    )


def test_tokens_that_are_none(tmp_path: Path) -> None:
    assert refused(tmp_path, ROWS, tokens="byte") == "Wanted tokens 'char' or 'word'; got 'byte'."


@pytest.mark.parametrize("name", ["t.csv", "t.jsonl"])
@pytest.mark.parametrize("label", [20231231, 2147483648])
def test_labels_that_are_hardly_classes(tmp_path: Path, name: str, label: int) -> None:
    """One date among classes made 20 million of them; a larger number hung."""
    rows = [{"user": "a", "text": "x", "label": one} for one in (0, 1, label)]
    place = f"{tmp_path / name}, line {4 if name == 't.csv' else 3}"
    assert refused(tmp_path, rows, name) == (
        f"{place}: the label {label} would make {label + 1:,} classes, of which 3 occur. Number labels 0, 1, 2, …, or give "
        f"label_names, the labels in the order of their numbers, or task 'regression' where labels are numbers."
    )
    data = read_table(tmp_path / name, label_names=["0", "1", str(label)])
    assert data.meta["classes"] == 3
    assert np.asarray(data.columns["label"]).tolist() == [0, 1, 2]


def test_a_label_of_five_thousand_digits(tmp_path: Path) -> None:
    rows = [{"user": "a", "text": "x", "label": one} for one in ("0", "7" * 5000)]
    assert refused(tmp_path, rows, "t.csv").startswith(
        f"{tmp_path / 't.csv'}, line 3: wanted a class in column 'label', an integer or a text of at most 200 characters; "
    )
    assert refused(tmp_path, [*rows[:1], {"user": "a", "text": "x", "label": "7" * 19}], "t.csv") == (
        f"{tmp_path / 't.csv'}, line 3: wanted a label of 0 or more, of at most 18 digits; got '{'7' * 19}'."
    )


def test_truth_values_among_features(tmp_path: Path) -> None:
    """As ``pandas.get_dummies`` gives them without a type."""
    rows = [{"user": "a", "red": True, "label": 1}]
    assert refused(tmp_path, rows, "t.csv", features=["red"]) == (
        f"{tmp_path / 't.csv'}, line 2: wanted a number in column 'red'; got 'True'. Write truth values as 1 and 0, in "
        f"pandas by .astype(int)."
    )


def test_quotes_that_join_two_rows(tmp_path: Path) -> None:
    """A table written without quoting: a row's text began with a quote, another row's ended with one."""
    joined = b'user\ttext\tlabel\nann\t"so it begins\tpos\nbo\tand ends"\tneg\n'
    assert refused(tmp_path, joined, "t.tsv") == (
        f"{tmp_path / 't.tsv'}, line 3: a cell in quotes holds a tab and a line end. If the quotes are part of texts, "
        f"double them in quoted cells; else save the table as .csv or .jsonl."
    )
    quoted = b'user\ttext\tlabel\nann\t"one\ntwo"\tpos\nbo\t"one\ttwo"\tneg\n'
    assert len(read(tmp_path, quoted, "t.tsv").columns["label"]) == 2


@pytest.mark.parametrize("kind", ["timestamp[ns]", "duration[us]", "date32[day]"])
def test_a_time_of_parquet_is_told_from_damage(kind: str, tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    time = pyarrow.array([1], pyarrow.type_for_alias(kind))
    path = tmp_path / "t.parquet"
    parquet.write_table(pyarrow.table({"user": ["a"], "text": ["x"], "label": [0], "time": time}), path)
    with pytest.raises(DataError) as error:
        read_table(path)
    assert str(error.value) == (
        f"{path}: the column 'time' holds dates or times, {kind}. Write dates as numbers: date.toordinal(), or seconds."
    )


@pytest.mark.parametrize("given", [{"text": "place"}, {"text": "text"}, {"vocabulary": 9}])
def test_a_text_beside_features(tmp_path: Path, given: dict[str, Any]) -> None:
    rows = [{"user": "a", "place": "x", "text": "y", "f": 1, "label": 1}]
    said = ", ".join(f"{name}={value!r}" for name, value in given.items())
    assert refused(tmp_path, rows, **given, features=["f"]) == (
        f"Wanted text or features; got {said} and features=['f']. Leave one out."
    )


def test_decimals_are_classes_only_where_that_is_said(tmp_path: Path) -> None:
    """A column of prices became a thousand classes."""
    prices = b"user,text,label\na,x,3\na,y,15.65\nb,z,-2.5\n"
    assert refused(tmp_path, prices, "t.csv") == (
        f"{tmp_path / 't.csv'}, line 4: wanted classes as labels; got numbers with decimals, such as '-2.5'. For numbers "
        f"as labels say task='regression'; where each is a class, task='multiclass' or label_names."
    )
    names = ["-2.5", "15.65", "3"]
    assert read(tmp_path, prices, "t.csv", task="multiclass").meta["label_names"] == names
    assert read(tmp_path, prices, "t.csv", label_names=names).meta["label_names"] == names
    rows = b"user,text,label\na,x,%b\na,y,%b\n"
    for labels in ((b"1.0", b"2.0"), (b"0.5", b"much")):
        assert read(tmp_path, rows % labels, "t.csv").meta["label_names"] == [one.decode() for one in labels]
    rules = Rules(label_names=("0.5", "1"))
    (tmp_path / "t.csv").write_bytes(rows % (b"1", b"0.5"))
    assert prepared(raw_table(tmp_path / "t.csv"), rules).columns["label"].tolist() == [1, 0]


def test_json_that_nests_too_deeply(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text("[" * 100_000)
    with pytest.raises(DataError) as error:
        read_table(tmp_path / "t.jsonl")
    assert str(error.value) == (
        f"{tmp_path / 't.jsonl'}, line 1: not JSON (nested too deeply). One object a line is wanted."
    )


def test_json_with_an_integer_of_five_thousand_digits(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text('{"user": 1, "text": "x", "label": ' + "7" * 5000 + "}")
    with pytest.raises(DataError, match="line 1: not JSON \\(Exceeds the limit"):
        read_table(tmp_path / "t.jsonl")


def test_a_number_that_is_too_large_for_a_feature(tmp_path: Path) -> None:
    rows = [{"user": "a", "f": 1e300, "label": 1}]
    wide = "too large for float32. Drop such rows, or scale the column down."
    assert refused(tmp_path, rows, features=["f"]) == (
        f"{tmp_path / 't.jsonl'}, line 1: column 'f' holds 1e+300, {wide}"
    )
    assert refused(tmp_path, [{"user": "a", "f": 1, "label": 1e300}], features=["f"], task="regression") == (
        f"{tmp_path / 't.jsonl'}, line 1: column 'label' holds 1e+300, {wide}"
    )


def test_a_column_twice(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("user,text,label,label\na,x,0,1\n")
    with pytest.raises(DataError) as error:
        read_table(tmp_path / "t.csv")
    assert (
        str(error.value) == f"{tmp_path / 't.csv'} has several columns 'label'. Rename or drop all but one."
    )


@pytest.mark.parametrize(
    ("name", "mark", "wanted"), [("t.csv", ";", ","), ("t.csv", "\t", ","), ("t.tsv", ",", "\t")]
)
def test_another_mark_between_cells(tmp_path: Path, name: str, mark: str, wanted: str) -> None:
    header = mark.join(["user", "text", "label"])
    (tmp_path / name).write_text(f"{header}\na{mark}x{mark}0\n")
    with pytest.raises(DataError) as error:
        read_table(tmp_path / name)
    assert str(error.value) == (
        f"{tmp_path / name}, line 1: wanted cells with {wanted!r} between them; got {header!r}. In a .csv file this is a "
        f"comma, in a .tsv file a tab. Save it so, numbers with a decimal point."
    )


def test_a_label_name_twice(tmp_path: Path) -> None:
    assert refused(tmp_path, ROWS, label_names=["a", "b", "a"]) == (
        "label_names names 'a' more than once; each label has one number."
    )


def test_no_features_at_all(tmp_path: Path) -> None:
    assert (
        refused(tmp_path, ROWS, features=[]) == "Wanted the names of numeric columns as features; got none."
    )


@pytest.mark.parametrize("name", ["x" * 300 + ".csv", "a/" * 3000 + "t.csv"])
def test_a_name_that_is_too_long(name: str) -> None:
    with pytest.raises(DataError, match="File name too long. Check the path and its rights."):
        read_table(name)


def test_a_line_that_never_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedkeep.data.readers.files.LONGEST_LINE", 1 << 20)
    (tmp_path / "t.csv.gz").write_bytes(gzip.compress(b"user" * (1 << 20)))
    with pytest.raises(DataError) as error:
        read_table(tmp_path / "t.csv.gz")
    assert str(error.value) == f"{tmp_path / 't.csv.gz'}, line 1: longer than 1 MiB. Is it a file of lines?"

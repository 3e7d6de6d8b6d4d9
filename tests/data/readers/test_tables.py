"""Tables of examples: every format reads the same, and what is refused is named by file, line and column."""

from __future__ import annotations

import gzip
import hashlib
import inspect
import unicodedata
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from fedkeep.core.errors import ConfigError, DataError
from fedkeep.data import CharVocabulary, FederatedData, WordVocabulary, read_table
from fedkeep.data.preparation import Rules, prepared
from fedkeep.data.readers import load_table
from fedkeep.data.readers.cells import Cells, RawTable
from fedkeep.data.readers.tables import raw_from, raw_table
from tests.data.readers.written import ROWS, WRITERS, csv_of, jsonl_of, parquet_of, read, refused, without
from tests.refusals import raises

CAFE = ("caf\u00e9", "cafe\u0301")


@pytest.mark.parametrize("name", WRITERS)
def test_every_format_reads_the_same(tmp_path: Path, name: str) -> None:
    data = read(tmp_path, ROWS, name)
    assert list(data.ids) == ["al", "bo"]
    assert data.meta["label_names"] == ["cfb", "nba", "politics"]
    assert (data.meta["task"], data.meta["classes"], data.meta["name"]) == ("multiclass", 3, "t")
    assert data.meta["source"] == {name: hashlib.sha256((tmp_path / name).read_bytes()).hexdigest()}
    assert [data.counts(part).tolist() for part in ("train", "valid", "test")] == [[0, 1], [1, 0], [0, 1]]
    batch = data.batch(range(3))
    assert batch["label"].tolist() == [0, 1, 2]
    assert batch["time"].tolist() == [2, 3, 1]
    assert batch["time"].dtype == torch.int64
    # The only training text is "ab, a": a is 2, then by value " ", "," and b. The rest is unknown.
    assert data.meta["vocabulary"]["symbols"] == ["a", " ", ",", "b"]
    assert batch["text"].tolist() == [[5, 1, 1, 0, 0], [2, 5, 4, 3, 2], [1, 1, 0, 0, 0]]


@pytest.mark.parametrize("name", WRITERS)
def test_ids_and_times_are_kept_exactly_as_written(tmp_path: Path, name: str) -> None:
    first = 1_700_000_000_000_000_000  # nanoseconds, which float64 would round
    ids = ["007", "7", " 7", "1e3", "007"]
    rows = [{"user": one, "text": "x", "label": n, "time": first - n} for n, one in enumerate(ids)]
    with pytest.warns(UserWarning, match="client ids differ only by"):
        data = read(tmp_path, rows, name)
    assert list(data.ids) == sorted(set(ids))
    assert data.counts().tolist() == [1, 2, 1, 1]
    later = data.split_per_user(order="chronological")
    assert later.columns["time"].tolist() == [first - n for n in (2, 4, 0, 3, 1)]  # type: ignore[union-attr]


@pytest.mark.parametrize("name", WRITERS)
def test_rows_that_opted_out_shape_no_vocabulary(tmp_path: Path, name: str) -> None:
    truth = (True, False) if name.endswith(("jsonl", "parquet")) else ("True", "0")
    texts = [("a", "open"), ("a", "secret"), ("b", "open"), ("b", "mine")]
    rows = [
        {"user": user, "text": text, "label": n // 2, "opted_in": truth[n % 2]}
        for n, (user, text) in enumerate(texts)
    ]
    data = read(tmp_path, rows, name, tokens="word")
    assert data.columns["opted_in"].tolist() == [True, False, True, False]  # type: ignore[union-attr]
    assert data.meta["vocabulary"]["symbols"] == ["open"]


def test_other_column_names_words_and_a_cut(tmp_path: Path) -> None:
    rows = [{"author": 7, "body": "a b a", "subreddit": 1}, {"author": 12, "body": "b", "subreddit": 0}]
    names = {"user": "author", "text": "body", "label": "subreddit"}
    data = read(tmp_path, rows, **names, tokens="word", vocabulary=3, max_length=2)
    assert list(data.ids) == ["12", "7"]
    assert data.bounds is None
    assert (data.meta["task"], data.meta["label_names"]) == ("binary", ["0", "1"])
    assert data.meta["vocabulary"] == {"kind": "word", "size": 3, "symbols": ["a"]}
    assert data.batch(range(2))["text"].tolist() == [[1, 0], [2, 1]]


def test_other_names_for_the_columns_that_may_be_missing(tmp_path: Path) -> None:
    rows = [
        {"user": "a", "text": "x", "label": n % 2, "part": part, "day": 9 - n, "agreed": n > 0}
        | {"time": "?", "split": "?"}
        for n, part in enumerate(("train", "test", "train"))
    ]
    data = read(tmp_path, rows, split="part", time="day", opted_in="agreed")
    assert data.counts("train").tolist() == [2]
    assert data.columns["time"].tolist() == [9, 7, 8]  # type: ignore[union-attr]
    assert data.columns["opted_in"].tolist() == [False, True, True]  # type: ignore[union-attr]


@pytest.mark.parametrize("vocabulary", [CharVocabulary(["z"]), WordVocabulary(["zz"])])
def test_a_vocabulary_given(tmp_path: Path, vocabulary: CharVocabulary | WordVocabulary) -> None:
    data = read(tmp_path, ROWS, vocabulary=vocabulary)
    assert data.batch(data.rows(1, "test"))["text"].tolist() in ([[2, 2]], [[2]])
    assert data.meta["vocabulary"] == vocabulary.to_dict()


@pytest.mark.parametrize("name", ["t.csv", "t.jsonl"])
def test_features_and_regression(tmp_path: Path, name: str) -> None:
    rows = [
        {"user": "a", "f1": " 0.5", "f2": 2, "label": 1.5},
        {"user": "a", "f1": -1, "f2": 3e2, "label": -2},
    ]
    data = read(tmp_path, rows, name, features=["f2", "f1"], task="regression", standardise=False)
    batch = data.batch([0, 1])
    assert batch["x"].tolist() == [[2.0, 0.5], [300.0, -1.0]]
    assert batch["x"].dtype == batch["label"].dtype == torch.float32
    assert batch["label"].tolist() == [1.5, -2.0]
    assert data.meta["features"] == ["f2", "f1"]
    assert "text" not in data.columns


@pytest.mark.parametrize(
    ("times", "kind"),
    [
        (["2.5", "3", "1"], "f"),
        ([1e300, 2, 3], "f"),
        ([Decimal("1.9"), Decimal("0.4"), 3], "f"),
        ([np.float32(1.9), np.float32(0.5), np.float32(0.25)], "f"),
        ([np.float32(2), np.float32(1), np.float32(3)], "f"),
        ([Decimal((1 << 62) + 1), np.int64(2), "3"], "i"),
        (pa.chunked_array([["7", " 8 ", "+9"]]), "i"),
        (pa.chunked_array([pa.array([1, 2, 2**64 - 1], pa.uint64())]), "f"),
        (pa.chunked_array([pa.array([1, 2, 3], pa.int32())]), "i"),
    ],
)
def test_times_are_cut_by_nothing(times: Any, kind: str) -> None:
    columns = {"user": ["a"] * 3, "text": ["x"] * 3, "label": [0, 1, 0], "time": times}
    defaults = inspect.signature(raw_table).parameters.items()
    arguments: dict[str, Any] = {n: p.default for n, p in defaults if n != "path"} | {"meta": {}}
    for name in ("decimal", "test_path", "clients"):
        del arguments[name]
    table = RawTable({name: Cells(values) for name, values in columns.items()}, str)
    found = raw_from(table, **arguments).columns["time"].values  # type: ignore[union-attr]
    assert found.dtype.kind == kind
    assert found.tolist() == list(map(float if kind == "f" else int, Cells(times).tolist()))


def test_labels_that_are_numbers(tmp_path: Path) -> None:
    rows = [{"user": "a", "text": "x", "label": label} for label in (2, 0, 2)]
    for name in WRITERS:
        data = read(tmp_path, rows, name)
        assert data.meta["classes"] == 3
        assert data.batch([0, 1, 2])["label"].tolist() == [2, 0, 2]
    floats = [row | {"label": float(row["label"])} for row in rows]
    assert read(tmp_path, floats).batch([0, 1, 2])["label"].tolist() == [2, 0, 2]
    flags = [row | {"label": row["label"] == 2} for row in rows]
    assert read(tmp_path, flags).batch([0, 1, 2])["label"].tolist() == [1, 0, 1]


def test_label_names_fix_the_order(tmp_path: Path) -> None:
    names = ["politics", "nba", "cfb", "other"]
    data = read(tmp_path, ROWS, label_names=names)
    assert data.meta["classes"] == 4
    assert data.batch(range(3))["label"].tolist() == [2, 1, 0]
    wrong = {"label_names": ["politics", "nbaa", "cfb"]}
    said = refused(tmp_path, ROWS, line=1, label="nba", names=wrong["label_names"], settings=wrong)
    assert said.endswith("Did you mean 'nbaa'?")
    refused(tmp_path, ROWS, name="a", settings={"label_names": ["a", "b", "a"]})


def test_a_label_is_one_class_however_its_letters_were_typed(tmp_path: Path) -> None:
    assert CAFE[0] == unicodedata.normalize("NFC", CAFE[1])
    rows = [
        {"user": "a", "text": "x", "label": label, "split": split}
        for split in ("train", "test")
        for label in (*CAFE, "tea", "tea ")
    ]
    data = read(tmp_path, rows)
    assert data.meta["label_names"] == [CAFE[0], "tea", "tea "]
    assert data.columns["label"].tolist() == [0, 0, 1, 2] * 2  # type: ignore[union-attr]
    names = [CAFE[1], "tea ", "tea"]
    assert read(tmp_path, rows, label_names=names).meta["label_names"] == [CAFE[0], "tea ", "tea"]
    raw = raw_table(tmp_path / "t.jsonl")
    assert prepared(raw, Rules(label_names=tuple(names))).meta["label_names"] == [CAFE[0], "tea ", "tea"]


@pytest.mark.parametrize("name", WRITERS)
def test_decimals_are_classes_in_every_format_where_that_is_said(tmp_path: Path, name: str) -> None:
    rows = [{"user": "a", "text": "x", "label": label, "split": "train"} for label in (1.5, 0.5, 1.5)]
    for said in ({"task": "multiclass"}, {"task": "binary"}, {"label_names": ["0.5", "1.5"]}):
        data = read(tmp_path, rows, name, **said)
        assert data.meta["label_names"] == ["0.5", "1.5"]
        assert data.columns["label"].tolist() == [1, 0, 1]  # type: ignore[union-attr]


def test_decimals_are_no_classes_where_nobody_says_so(tmp_path: Path) -> None:
    """A column of prices became a thousand classes."""
    prices = b"user,text,label\na,x,3\na,y,15.65\nb,z,-2.5\n"
    assert "decimals, such as '-2.5'" in refused(tmp_path, prices, "t.csv", line=4)
    rows = b"user,text,label\na,x,%b\na,y,%b\n"
    for labels in ((b"1.0", b"2.0"), (b"0.5", b"much")):
        assert read(tmp_path, rows % labels, "t.csv").meta["label_names"] == [one.decode() for one in labels]
    (tmp_path / "t.csv").write_bytes(rows % (b"1", b"0.5"))
    named = prepared(raw_table(tmp_path / "t.csv"), Rules(label_names=("0.5", "1")))
    assert named.columns["label"].tolist() == [1, 0]  # type: ignore[union-attr]


# -- cells ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("column", "cells"),
    [
        ("user", [None, "", 1.5, True, [1], "\u202ebo", "x" * 201]),
        ("text", [3, None, ["a"]]),
        ("label", [0.5, float("nan"), None, [1], "", "\ud800", "x" * 201]),
        ("split", ["tain", None, ["train"], "never"]),
        ("time", [None, "2025-11-22", "soon", True, 10**400, "1_000", "\uff11\uff12", "\u0663", [1]]),
        ("opted_in", ["yes", 2, None]),
    ],
)
def test_a_bad_cell(tmp_path: Path, column: str, cells: list[Any]) -> None:
    good = {"opted_in": True}
    for cell in cells:
        rows = [*(row | good for row in ROWS), ROWS[0] | good | {column: cell}]
        got = {"got": cell} if cell == cell else {}
        refused(tmp_path, rows, line=4, column=column, **got)
        if isinstance(cell, str) and cell.isprintable():
            refused(tmp_path, rows, "t.csv.gz", line=6, column=column, got=cell)  # a text holds a line end
            texts = [row | {column: str(row[column])} for row in rows]
            refused(tmp_path, texts, "t.parquet", row=3, column=column, got=cell)


@pytest.mark.parametrize(
    ("cell", "task"),
    [("inf", None), ("x", None), ("1_0", None), (1e300, None), ("nan", "regression"), ("", "regression")],
)
def test_a_bad_number(tmp_path: Path, cell: Any, task: str | None) -> None:
    rows: list[dict[str, Any]] = [{"user": "a", "f": 1.0, "label": 1}, {"user": "a", "f": cell, "label": 1}]
    settings: dict[str, Any] = {"features": ["f"], "task": task}
    if task is None:  # a feature may be missing
        refused(tmp_path, rows, "t.csv", line=3, column="f", settings=settings)
    rows[1] = {"user": "a", "f": 1.0, "label": cell}
    refused(tmp_path, rows, "t.csv", line=3, column="label", settings=settings | {"task": "regression"})


@pytest.mark.parametrize(
    ("column", "cell", "advice"),
    [
        ("time", None, "fill in a number"),
        ("time", "2025-11-22", "or all of it as dates"),
        ("time", True, "astype(int)"),
        ("split", "tain", "Did you mean 'train'?"),
        ("label", 0.5, "'regression' where each example is a number"),
    ],
)
def test_what_to_do_about_a_bad_cell(tmp_path: Path, column: str, cell: Any, advice: str) -> None:
    assert advice in refused(tmp_path, [*ROWS, ROWS[0] | {column: cell}], line=4, column=column, got=cell)


def test_one_whole_sentence_about_a_bad_cell(tmp_path: Path) -> None:
    assert refused(tmp_path, [*ROWS, ROWS[0] | {"time": "2025-11-22"}], line=4) == (
        f"{tmp_path / 't.jsonl'}, line 4: wanted a number in column 'time'; got '2025-11-22'. Write all of the "
        f"column as numbers, or all of it as dates."
    )


@pytest.mark.parametrize("kind", ["timestamp[ns]", "date32[day]"])
def test_times_may_be_dates(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    time = pa.array([1, 2], pa.type_for_alias(kind))
    pq.write_table(pa.table({"user": ["a"] * 2, "text": ["x"] * 2, "label": [0, 1], "time": time}), path)
    found = read_table(path).columns["time"].tolist()  # type: ignore[union-attr]
    assert found == ([86_400, 172_800] if kind == "date32[day]" else [0, 0])
    days = [row | {"time": f"1970-01-0{row['time']} 00:00:01"} for row in ROWS]
    assert read(tmp_path, days, "t.csv").columns["time"].tolist() == [86_401, 172_801, 1]  # type: ignore[union-attr]


@pytest.mark.parametrize(("name", "line"), [("t.csv", 4), ("t.jsonl", 3)])
@pytest.mark.parametrize("label", [20231231, 2147483648])
def test_labels_that_are_hardly_classes(tmp_path: Path, name: str, line: int, label: int) -> None:
    """One date among classes made 20 million of them; a larger number hung."""
    rows = [{"user": "a", "text": "x", "label": one} for one in (0, 1, label)]
    assert f"{label + 1:,} classes, of which 3 occur" in refused(tmp_path, rows, name, line=line)
    data = read_table(tmp_path / name, label_names=["0", "1", str(label)])
    assert data.meta["classes"] == 3
    assert np.asarray(data.columns["label"]).tolist() == [0, 1, 2]


@pytest.mark.parametrize("label", ["-1", "7" * 19])
def test_whole_numbers_that_are_no_classes(tmp_path: Path, label: str) -> None:
    rows = [{"user": "a", "text": "x", "label": one} for one in (0, label)]
    refused(tmp_path, rows, "t.csv", line=3, label=label)


@pytest.mark.parametrize(
    ("numbers", "missing"), [(("0", "1"), "nan"), (("0.5", "1"), "NaN"), (("2",), "NAN")]
)
def test_a_missing_label_among_numbers_is_no_class(
    tmp_path: Path, numbers: tuple[str, ...], missing: str
) -> None:
    """Examples without a label became a class of their own."""
    rows = [{"user": "a", "text": "x", "label": label} for label in (*numbers, missing, *numbers)]
    refused(tmp_path, rows, line=1 + len(numbers), label=missing)
    names = [*numbers, missing]
    assert read(tmp_path, rows, label_names=names).meta["label_names"] == names
    rows.append(rows[0] | {"label": "roti"})
    assert missing in read(tmp_path, rows).meta["label_names"]  # it is bread


# -- columns ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WRITERS)
def test_a_missing_column(tmp_path: Path, name: str) -> None:
    rows = [{"users" if key == "user" else key: value for key, value in row.items()} for row in ROWS]
    there = ["label", "split", "text", "time", "users"]
    said = refused(tmp_path, rows, name, file=tmp_path / name, column="user", there=there)
    assert "Did you mean 'users'?" in said
    assert "user = 'COLUMN'" in said
    for argument in ("split", "time", "opted_in"):  # that somebody names
        refused(tmp_path, ROWS, name, column="mine", settings={argument: "mine"})


def test_a_missing_text_may_be_of_another_name_or_numbers(tmp_path: Path) -> None:
    rows = [without(row, "text") | {"words": row["text"]} for row in ROWS]
    said = refused(tmp_path, rows, "t.csv", column="text")
    assert (
        "text = 'COLUMN' (an argument, or under [data]), or of numbers features = ['COLUMN', ...]. Not used: 'words'."
        in said
    )
    assert read(tmp_path, rows, "t.csv", text="words").examples == 3


def test_a_column_that_some_lines_lack(tmp_path: Path) -> None:
    rows = [without(row, "split") for row in ROWS[:2]]
    refused(tmp_path, [*rows, ROWS[2]], line=3, column="split", has=3, lacks=1)
    refused(tmp_path, [*ROWS[:2], without(ROWS[2], "text")], line=3, column="text", has=1, lacks=3)


def test_a_column_twice(tmp_path: Path) -> None:
    refused(tmp_path, b"user,text,label,label\na,x,0,1\n", "t.csv", file=tmp_path / "t.csv", column="label")
    twice = b'{"user": "a", "text": "x", "label": 0, "label": 1}\n'
    assert "'label' twice" in refused(tmp_path, twice, line=1)


@pytest.mark.parametrize(
    "settings",
    [
        {"features": ["time", "label"]},
        {"features": []},
        {"features": ["time"], "text": "text"},
        {"features": ["time"], "text": "place"},
        {"features": ["time"], "vocabulary": 9},
        {"label": "text"},
        {"text": "label"},
        {"max_length": 0},
        {"max_length": -3},
        {"tokens": "byte"},
        {"task": "ranking"},
        {"task": "tokens"},
        {"task": "regresion"},
    ],
)
def test_settings_that_make_no_sense(tmp_path: Path, settings: dict[str, Any]) -> None:
    """Among them: a model that was given its answer to read."""
    said = refused(tmp_path, [row | {"place": "x"} for row in ROWS], settings=settings)
    assert any(name in said or str(value) in said for name, value in settings.items())


# -- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "name", "facts"),
    [
        (b"", "t.csv", {}),
        (b"user,text,label\n", "t.csv", {}),
        (b"\n\n", "t.csv", {}),
        (b"\n", "t.jsonl", {}),
        (b"x", "t.ods", {"got": "t.ods"}),
        (b"user,text,label\na,b\n", "t.csv", {"line": 2, "wanted": 3, "got": 2}),
        (b"user,text,label\na,b,c\na,b,c,d\n", "t.csv.gz", {"line": 3, "wanted": 3, "got": 4}),
        (b"user,text,label\na,\0\xff,0\n", "t.csv", {"line": 2}),
        (b'user,text,label\na,"b"c,0\n', "t.csv", {"line": 2}),
        (b'user,text,label\na,"b,0\n', "t.csv", {"line": 2}),
        (b'user,text,label\na,b,"0\nc,d,1\ne,f,2\n', "t.csv", {"line": 4}),  # it swallows two rows
        (b"user,text,label\ra,x,0\r", "t.csv", {"line": 1}),
        # written without quoting: a row's text began with a quote, another row's ended with one
        (b'user\ttext\tlabel\nann\t"so it begins\tpos\nbo\tand ends"\tneg\n', "t.tsv", {"line": 3}),
        (b"{}x\n", "t.jsonl", {"line": 1}),
        (b"[1]\n", "t.jsonl", {"line": 1, "got": "list"}),
        (b"[" * 100_000, "t.jsonl", {"line": 1}),
        (b'{"user": 1, "text": "x", "label": ' + b"7" * 5000 + b"}", "t.jsonl", {"line": 1}),
    ],
)
def test_malformed_files(tmp_path: Path, content: bytes, name: str, facts: dict[str, Any]) -> None:
    refused(tmp_path, gzip.compress(content) if name.endswith("gz") else content, name, **facts)


@pytest.mark.parametrize(
    "content",
    [
        b"\xef\xbb\xbfuser,text,label\r\na,b,0\r\n",
        b'\xef\xbb\xbf"user","text","label"\n"a","b","0"\n',
        b"\n\r\nuser,text,label\n\na,b,0\n\n",
        b'user,text,label\na,5" disk,0\n',
        b'user,text,label\n"a","x ""y""\r\nz",0',
        b"user,text,label\na," + b"x" * 140_000 + b",0\n",
    ],
)
def test_files_as_editors_spreadsheets_and_hands_write_them(tmp_path: Path, content: bytes) -> None:
    data = read(tmp_path, content, "t.csv", max_length=200_000)
    assert list(data.ids) == ["a"]
    assert (
        read(tmp_path, gzip.compress(content), "t.csv.gz", max_length=200_000).fingerprint()
        == data.fingerprint()
    )


def test_cells_in_quotes_of_a_table_with_tabs(tmp_path: Path) -> None:
    quoted = b'user\ttext\tlabel\nann\t"one\ntwo"\tpos\nbo\t"one\ttwo"\tneg\n'
    assert len(read(tmp_path, quoted, "t.tsv").columns["label"]) == 2


def test_quotes_are_looked_at_across_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"user": f"u{n}", "text": f'a "b",\n{n}', "label": n % 2} for n in range(50)]
    whole = read(tmp_path, rows, "t.csv")
    monkeypatch.setattr(load_table, "BESIDE", 64)
    file, cut = tmp_path / "t.csv", tmp_path / "cut.csv"
    cut.write_bytes(csv_of(rows)[:-2])
    assert load_table._is_quoted_well(file, "utf-8", ",")
    assert not load_table._is_quoted_well(cut, "utf-8", ",")
    monkeypatch.setattr(load_table, "BLOCK", 64)
    assert read(tmp_path, rows, "t.csv").fingerprint() == whole.fingerprint()


@pytest.mark.parametrize("name", ["t.csv.gz", "t.jsonl.gz", "t.parquet", "t.feather", "t.arrow"])
def test_a_truncated_file(tmp_path: Path, name: str) -> None:
    said = refused(tmp_path, WRITERS[name](ROWS)[:-6], name, file=tmp_path / name)
    assert " is truncated or no " in said


def test_a_stream_that_is_cut_between_its_pieces(tmp_path: Path) -> None:
    whole = WRITERS["t.arrow"](ROWS)
    said = refused(tmp_path, whole[:-8], "t.arrow", file=tmp_path / "t.arrow")  # its end alone is missing
    assert " is truncated or no " in said


def test_an_empty_parquet_table(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({name: pa.array([], pa.string()) for name in ("user", "text", "label")}), path)
    with raises(DataError, file=path):
        read_table(path)


def test_a_parquet_table_of_categories_and_nulls(tmp_path: Path) -> None:
    """As pandas writes them."""
    path = tmp_path / "t.parquet"
    user = pa.array(["b", "a", "b"]).dictionary_encode()
    columns = {"user": user, "f": pa.array([1, 2, 3], pa.int8()), "label": [0, 1, 1]}
    pq.write_table(pa.table(columns), path, row_group_size=1)
    assert read_table(path, features=["f"], standardise=False).columns["x"].tolist() == [[2.0], [1.0], [3.0]]  # type: ignore[union-attr]
    pq.write_table(pa.table(columns | {"f": [1.0, None, 3.0]}), path)
    data = prepared(raw_table(path, features=["f"]), Rules(standardise=False))
    assert data.meta["features"] == ["f", "f missing"]
    assert data.columns["x"].tolist() == [[0, 1], [1, 0], [3, 0]]  # type: ignore[union-attr]


def test_what_is_no_file(tmp_path: Path) -> None:
    with raises(DataError, file=tmp_path / "t.csv", where="does not exist"):
        read_table(tmp_path / "t.csv")
    with raises(DataError, got="list"):
        read_table(["a"], features=["x"])
    for name in ("x" * 300 + ".csv", "a/" * 3000 + "t.csv"):
        with raises(DataError, why="File name too long"):
            read_table(name)


def test_a_line_that_never_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedkeep.data.readers.opened_files.LONGEST_LINE", 1 << 20)
    refused(tmp_path, gzip.compress(b"user" * (1 << 20)), "t.csv.gz", line=1)


def test_json_and_parquet_may_hold_what_csv_cannot(tmp_path: Path) -> None:
    rows = [row | {"text": "\0" + row["text"]} for row in ROWS]
    for content, name in ((jsonl_of(rows), "t.jsonl"), (parquet_of(rows), "t.parquet")):
        assert read(tmp_path, content, name).examples == 3


def test_one_feature_may_be_named_without_a_list(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("user,height,label\na,1.5,0\nb,2,1\n")
    data = read_table(tmp_path / "t.csv", features="height")
    assert data.meta["features"] == ["height"]


# -- numbers to predict ---------------------------------------------------------------------------------------------------


def test_many_different_numbers_are_predicted_as_numbers(tmp_path: Path) -> None:
    """Diabetes' disease progression, written 151.0, became 214 classes."""
    rows: list[dict[str, Any]] = [{"user": "a", "f": n, "label": 100 + n} for n in range(21)]
    for labels in ([float(row["label"]) for row in rows], [f"{row['label']}.0" for row in rows]):
        data = read(
            tmp_path, [row | {"label": one} for row, one in zip(rows, labels, strict=True)], features=["f"]
        )
        mean, scale = data.meta["units"]
        assert (data.meta["task"], mean) == ("regression", 110)
        own = np.asarray(data.columns["label"]) * scale + mean
        assert np.allclose(own, range(100, 121), rtol=1e-6)
    counts = [row | {"label": row["label"] - 100} for row in rows]  # visits, or classes? nobody can tell
    refused(tmp_path, counts, count=21, least=0, most=20, settings={"features": ["f"]})
    said = refused(tmp_path, rows, count=21, least=100, most=120, settings={"features": ["f"]})
    assert "[data] task = 'multiclass' where each example is of one class" in said
    assert "'regression' where each example is a number" in said
    for answer in ("regression", "multiclass"):
        assert read(tmp_path, rows, features=["f"], task=answer).meta["task"] == answer


@pytest.mark.parametrize(
    ("argument", "given"),
    [("user", "who"), ("label", "kind"), ("text", "words"), ("time", "when"), ("features", ["size"])],
)
def test_a_missing_column_is_told_with_the_argument_that_names_it(
    tmp_path: Path, argument: str, given: str | list[str]
) -> None:
    path = tmp_path / "t.csv"
    path.write_text("user,text,label\na,x,1\n", encoding="utf-8")
    (name,) = [given] if isinstance(given, str) else given
    with raises(DataError, said=f"{argument} = ", column=name) as caught:
        read_table(path, **{argument: given})  # type: ignore[arg-type]
    assert "'user'" in str(caught.value)  # one of those that there are


def test_a_missing_column_is_told_with_the_columns_that_nothing_names(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("user,size,way\na,1,x\n", encoding="utf-8")
    with raises(DataError, said="Not used: 'way'.", column="kind"):
        read_table(path, features=["size"], label="kind")
    with raises(DataError, column="kind") as caught:
        read_table(path, features=["size", "way"], label="kind")
    assert "Not used" not in str(caught.value)


def test_a_text_as_label_of_a_regression_is_told_where_the_task_stands(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("user,size,way\na,1,walk\n", encoding="utf-8")
    with raises(DataError, said="under [data]", column="way", got="walk"):
        read_table(path, features=["size"], label="way", task="regression")


def test_a_frame_is_told_its_own_argument_of_clients() -> None:
    frame = pa.table({"user": ["a", "b"], "size": [1.0, 2.0], "label": [0, 1]})
    with raises(ConfigError, said="client='user'", user="user"):
        FederatedData.from_frame(frame, user="user")
    with raises(DataError, said="client = 'COLUMN'", column="person", there=["label", "size", "user"]):
        FederatedData.from_frame(frame, user="person")
    with raises(DataError, said="client = 'COLUMN'", column="client"):
        FederatedData.from_frame(frame)


def test_a_misspelt_file_is_told_the_near_one(tmp_path: Path) -> None:
    (tmp_path / "trips.csv").write_text("user,text,label\na,x,1\n", encoding="utf-8")
    with raises(DataError, said=str(tmp_path / "trips.csv"), file=tmp_path / "trip.csv"):
        read_table(tmp_path / "trip.csv")
    with raises(DataError, said=f"no folder {tmp_path / 'none'} "):
        read_table(tmp_path / "none" / "trips.csv")


def test_labels_that_are_no_numbers_are_told_what_the_task_may_be(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("user,size,label\na,1,bus\na,2,walk\nb,3,\n", encoding="utf-8")
    with raises(DataError, said="task = 'multiclass'", column="label"):
        read_table(path, features=["size"], task="regression")
    with raises(DataError, said="skip_unlabelled", column="label", got=""):
        read_table(path, features=["size"])


def test_items_of_a_table_of_ones_own(tmp_path: Path) -> None:
    content = b"user,film,stars\na,900,4.5\nb,17,3.0\na,17,1.0\n"
    about = {"item": "film", "label": "stars", "task": "regression", "standardise": False}
    data = read(tmp_path, content, "t.csv", **about)
    assert data.columns["item"].tolist() == [1, 0, 0]  # type: ignore[union-attr]
    assert (data.meta["items"], data.meta["item_ids"]) == (2, [17, 900])
    assert set(data.columns) == {"item", "label"}
    refused(tmp_path, content.replace(b"17", b"1.5"), "t.csv", line=3, column="film", got=1.5, settings=about)
    refused(tmp_path, content, "t.csv", label="film", input="item", settings=about | {"label": "film"})


def test_whole_stars_of_items_are_numbers(tmp_path: Path) -> None:
    """As RecBole writes them: they are no classes, which a score of an item could not tell."""
    content = b"user\tfilm\tstars\tsize\na\t900\t5\t1.5\nb\t17\t3\t2.5\na\t17\t1\t0.5\n"
    about = {"item": "film", "label": "stars"}
    data = read(tmp_path, content, "t.inter", **about, standardise=False)
    assert (data.meta["task"], np.asarray(data.columns["label"]).tolist()) == ("regression", [5, 1, 3])
    many = b"user\titem\tlabel\n" + b"".join(b"a\t1\t%d\n" % stars for stars in range(30))
    assert read(tmp_path, many, "t.inter", item="item").meta["task"] == "regression"
    words = content.replace(b"\t5\t", b"\tgood\t").replace(b"\t3\t", b"\tbad\t").replace(b"\t1\t", b"\tbad\t")
    assert read(tmp_path, words, "t.inter", **about).meta["classes"] == 2
    beside = read(
        tmp_path, content, "t.inter", **about, features=["size"]
    )  # which a model of one's own may classify
    assert (beside.meta["task"], beside.meta["classes"]) == ("multiclass", 6)


@pytest.mark.parametrize("name", ["opt_in", "Opted In", "optedin", "opt-out", "consent", "optd_in"])
def test_a_column_that_seems_to_say_who_agreed(tmp_path: Path, name: str) -> None:
    content = f"user,a,label,{name}\na,1,0,1\nb,2,0,0\n".encode()
    with pytest.warns(UserWarning, match=f"opted_in = '{name}'"):
        read(tmp_path, content, "t.csv", features=["a"])
    assert "opted_in" in read(tmp_path, content, "t.csv", features=["a"], opted_in=name).columns
    read(tmp_path, content.replace(name.encode(), b"option"), "t.csv", features=["a"])


def test_rows_without_a_label_are_skipped_where_one_says_so(tmp_path: Path) -> None:
    lines = ["user,a,label", "u,1,2.5", "v,2,NA", "u,x,", "u,4,-1"]
    path = tmp_path / "t.csv"
    path.write_text("\n".join(lines))
    with pytest.raises(DataError, match="line 3.*skip_unlabelled"):
        read_table(path, features=["a"], kinds={"a": "category"}, task="regression")
    found = read_table(
        path,
        features=["a"],
        kinds={"a": "category"},
        task="regression",
        skip_unlabelled=True,
        standardise=False,
    )
    assert found.batch(np.arange(2))["label"].tolist() == [2.5, -1]
    assert list(found.ids) == ["u"]
    path.write_text("\n".join([*lines, "w,y,3"]))
    with pytest.raises(DataError, match="line 6"):  # rows keep their places
        read_table(path, features=["a"], kinds={"a": "number"}, task="regression", skip_unlabelled=True)
    path.write_text("user,a,label\nu,1,\nv,2,\n")
    with pytest.raises(DataError, match="No row has a label"):
        read_table(path, features=["a"], task="regression", skip_unlabelled=True)

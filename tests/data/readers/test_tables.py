"""Tables of examples: every format reads the same."""

from __future__ import annotations

import hashlib
import inspect
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedkeep.core.errors import DataError
from fedkeep.data import CharVocabulary, WordVocabulary, read_table
from fedkeep.data.readers.cells import Table
from fedkeep.data.readers.tables import raw_from, raw_table
from tests.data.readers.written import ROWS, WRITERS, read, refused


@pytest.mark.parametrize("name", WRITERS)
def test_every_format_reads_the_same(tmp_path: Path, name: str) -> None:
    data = read(tmp_path, ROWS, name)
    assert list(data.ids) == ["al", "bo"]
    assert data.meta["label_names"] == ["cfb", "nba", "politics"]
    assert (data.meta["task"], data.meta["classes"], data.meta["name"]) == ("multiclass", 3, "t")
    assert data.meta["source"] == {name: hashlib.sha256((tmp_path / name).read_bytes()).hexdigest()}
    assert data.counts("train").tolist() == [0, 1]
    assert data.counts("valid").tolist() == [1, 0]
    assert data.counts("test").tolist() == [0, 1]
    batch = data.batch(range(3))
    assert batch["label"].tolist() == [0, 1, 2]
    assert batch["time"].tolist() == [2, 3, 1]
    assert batch["time"].dtype == torch.int64
    # The only training text is "ab, a": a is 2, then by value " ", "," and b. The rest is unknown.
    assert data.meta["vocabulary"]["symbols"] == ["a", " ", ",", "b"]
    assert batch["text"].tolist() == [[5, 1, 1, 0, 0], [2, 5, 4, 3, 2], [1, 1, 0, 0, 0]]


def test_other_column_names_words_and_a_cut(tmp_path: Path) -> None:
    rows = [{"author": 7, "body": "a b a", "subreddit": 1}, {"author": 12, "body": "b", "subreddit": 0}]
    data = read(
        tmp_path,
        rows,
        user="author",
        text="body",
        label="subreddit",
        tokens="word",
        vocabulary=3,
        max_length=2,
    )
    assert list(data.ids) == ["12", "7"]
    assert data.bounds is None
    assert data.meta["task"] == "binary"
    assert data.meta["label_names"] == ["0", "1"]
    assert data.meta["vocabulary"] == {"kind": "word", "size": 3, "symbols": ["a"]}
    assert data.batch(range(2))["text"].tolist() == [[1, 0], [2, 1]]


@pytest.mark.parametrize("vocabulary", [CharVocabulary(["z"]), WordVocabulary(["zz"])])
def test_a_vocabulary_given(tmp_path: Path, vocabulary: CharVocabulary | WordVocabulary) -> None:
    data = read(tmp_path, ROWS, vocabulary=vocabulary)
    assert data.batch(data.rows(1, "test"))["text"].tolist() in ([[2, 2]], [[2]])
    assert data.meta["vocabulary"] == vocabulary.to_dict()


@pytest.mark.parametrize("name", ["t.csv", "t.jsonl"])
def test_features_and_regression(tmp_path: Path, name: str) -> None:
    rows = [{"user": "a", "f1": 0.5, "f2": 2, "label": 1.5}, {"user": "a", "f1": -1, "f2": 3e2, "label": -2}]
    data = read(tmp_path, rows, name, features=["f2", "f1"], task="regression")
    batch = data.batch([0, 1])
    assert batch["x"].tolist() == [[2.0, 0.5], [300.0, -1.0]]
    assert batch["x"].dtype == batch["label"].dtype == torch.float32
    assert batch["label"].tolist() == [1.5, -2.0]
    assert data.meta["features"] == ["f2", "f1"]
    assert "text" not in data.columns


def test_labels_that_are_numbers(tmp_path: Path) -> None:
    rows = [{"user": "a", "text": "x", "label": label} for label in (2, 0, 2)]
    for name in ("t.csv", "t.jsonl"):
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
    assert refused(tmp_path, ROWS, label_names=["politics", "nbaa", "cfb"]) == (
        f"{tmp_path / 't.jsonl'}, line 1: label 'nba' is not one of label_names, ['politics', 'nbaa', 'cfb']. "
        f"Did you mean 'nbaa'?"
    )


def test_times_with_fractions(tmp_path: Path) -> None:
    data = read(tmp_path, [row | {"time": row["time"] + 0.5} for row in ROWS])
    assert np.asarray(data.columns["time"]).tolist() == [2.5, 3.5, 1.5]


@pytest.mark.parametrize(
    ("times", "kind"),
    [
        ([Decimal("1.9"), Decimal("0.4"), 3], "f"),
        ([np.float32(1.9), np.float32(0.5), np.float32(0.25)], "f"),
        ([np.float32(2), np.float32(1), np.float32(3)], "f"),
        ([Decimal((1 << 62) + 1), np.int64(2), "3"], "i"),
    ],
)
def test_times_are_cut_by_nothing(times: list[Any], kind: str) -> None:
    columns = {"user": ["a"] * 3, "text": ["x"] * 3, "label": [0, 1, 0], "time": times}
    defaults = inspect.signature(raw_table).parameters.items()
    arguments: dict[str, Any] = {n: p.default for n, p in defaults if n != "path"} | {"meta": {}}
    found = raw_from(Table(columns, str), **arguments).columns["time"].values  # type: ignore[union-attr]
    assert found.dtype.kind == kind
    assert found.tolist() == list(map(float if kind == "f" else int, times))


def test_a_byte_order_mark_is_no_part_of_a_name(tmp_path: Path) -> None:
    assert len(read(tmp_path, b"\xef\xbb\xbfuser,text,label\r\na,b,0\r\n", "t.csv")) == 1


def test_a_time_that_is_too_large_for_an_integer(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text(json.dumps(ROWS[0] | {"time": 1e300}))
    assert read_table(tmp_path / "t.jsonl").columns["time"].tolist() == [1e300]


def test_a_byte_order_mark_before_a_quoted_name(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text('"user","text","label"\n"a","hi","x"\n', encoding="utf-8-sig")
    assert list(read_table(tmp_path / "t.csv").ids) == ["a"]


@pytest.mark.parametrize("name", WRITERS)
def test_times_in_nanoseconds_keep_every_digit(tmp_path: Path, name: str) -> None:
    first = 1_700_000_000_000_000_000
    rows = [{"user": "a", "text": str(n), "label": n, "time": first + 9 - n} for n in range(10)]
    data = read(tmp_path, rows, name).split_per_user(order="chronological")
    assert data.columns["time"].tolist() == [first + n for n in range(10)]  # type: ignore[union-attr]
    assert data.columns["label"].tolist() == [9 - n for n in range(10)]  # type: ignore[union-attr]


def test_a_column_that_the_first_line_lacks(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [{"user": "a", "text": "x", "label": "p"} for _ in range(3)]
    rows[2]["split"] = "test"
    expected = "line 3: there is a column 'split', which line 1 lacks. Give it in every line or in none."
    assert refused(tmp_path, rows) == f"{tmp_path / 't.jsonl'}, {expected}"


def test_a_text_that_is_longer_than_a_cell_of_csv_may_be(tmp_path: Path) -> None:
    content = f"user,text,label\na,{'x' * 140_000},p\n".encode()
    expected = "malformed (field larger than field limit (131072)). Save longer texts as .jsonl or .parquet."
    assert refused(tmp_path, content, "t.csv") == f"{tmp_path / 't.csv'}, line 2: {expected}"


@pytest.mark.parametrize("name", WRITERS)
def test_rows_that_opted_out_shape_no_vocabulary(tmp_path: Path, name: str) -> None:
    truth = (True, False) if name.endswith(("jsonl", "parquet")) else ("True", "0")
    rows = [
        {"user": user, "text": text, "label": n // 2, "opted_in": truth[n % 2]}
        for n, (user, text) in enumerate([("a", "open"), ("a", "secret"), ("b", "open"), ("b", "mine")])
    ]
    data = read(tmp_path, rows, name, tokens="word")
    assert data.columns["opted_in"].tolist() == [True, False, True, False]  # type: ignore[union-attr]
    assert data.meta["vocabulary"]["symbols"] == ["open"]


def test_an_opted_in_that_is_no_truth(tmp_path: Path) -> None:
    expected = "line 2: wanted true or false in column 'opted_in'; got 'yes'."
    content = b"user,text,label,opted_in\na,x,p,yes\n"
    assert refused(tmp_path, content, "t.csv") == f"{tmp_path / 't.csv'}, {expected}"


def test_columns_have_other_names_than_the_usual(tmp_path: Path) -> None:
    rows = [
        {
            "user": "a",
            "text": "x",
            "label": n % 2,
            "part": part,
            "day": 9 - n,
            "agreed": n > 0,
            "time": "?",
            "split": "?",
        }
        for n, part in enumerate(("train", "test", "train"))
    ]
    data = read(tmp_path, rows, split="part", time="day", opted_in="agreed")
    assert data.counts("train").tolist() == [2]
    assert data.columns["time"].tolist() == [9, 7, 8]  # type: ignore[union-attr]
    assert data.columns["opted_in"].tolist() == [False, True, True]  # type: ignore[union-attr]


def test_a_table_in_memory_is_no_path() -> None:
    with pytest.raises(
        DataError, match=r"^Wanted the path of a file; got dict\. Write a table in memory into"
    ):
        read_table({"user": ["a"]}, features=["x"])  # type: ignore[arg-type]

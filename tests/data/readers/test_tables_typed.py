"""Tables as editors, spreadsheets and hands write them: empty lines, marks, forms of letters, digits."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path

import pytest

from fedkeep.data.preparation import Rules, prepared
from fedkeep.data.readers.tables import raw_table
from tests.data.readers.written import ROWS, WRITERS, read, refused

CAFE = ("caf\u00e9", "cafe\u0301")


@pytest.mark.parametrize("name", ["t.csv", "t.tsv"])
def test_empty_lines_before_the_header(tmp_path: Path, name: str) -> None:
    assert list(read(tmp_path, b"\n\r\n" + WRITERS[name](ROWS), name).ids) == ["al", "bo"]
    mark = {"t.csv": ",", "t.tsv": "\t"}[name]
    expected = "line 4: wanted 3 cells, as in the header; got 2."
    content = f"\n\n{mark.join(('user', 'text', 'label'))}\na{mark}x\n".encode()
    assert refused(tmp_path, content, name) == f"{tmp_path / name}, {expected}"
    assert refused(tmp_path, b"\nuser;text;label\n", name).startswith(
        f"{tmp_path / name}, line 2: wanted cells with"
    )


def test_line_ends_of_old_macs(tmp_path: Path) -> None:
    assert refused(tmp_path, b"user,text,label\ra,x,0\r", "t.csv") == (
        f"{tmp_path / 't.csv'}, line 1: malformed (a carriage return without a line feed, outside quotes). Save the file "
        f"with the line ends of Unix or Windows, and quote texts that hold others."
    )


@pytest.mark.parametrize("name", ["t.csv", "t.tsv", "t.jsonl"])
def test_a_mark_of_the_byte_order(tmp_path: Path, name: str) -> None:
    assert list(read(tmp_path, b"\xef\xbb\xbf" + WRITERS[name](ROWS), name).ids) == ["al", "bo"]


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


@pytest.mark.parametrize("number", ["1_000", "\uff11\uff12", "\u0663"])
@pytest.mark.parametrize("column", ["x", "time"])
def test_a_number_has_ascii_digits_and_nothing_between_them(tmp_path: Path, number: str, column: str) -> None:
    row = {"user": "a", "x": "1", "time": "1", "label": 0, "split": "train"}
    rows = [row, row | {column: number}]
    content = "".join(json.dumps(one) + "\n" for one in rows).encode()
    assert refused(tmp_path, content, features=["x"]) == (
        f"{tmp_path / 't.jsonl'}, line 2: wanted a number in column {column!r}; got {number!r}."
    )


@pytest.mark.parametrize(
    ("numbers", "missing"), [(("0", "1"), "nan"), (("0.5", "1"), "NaN"), (("2",), "NAN")]
)
def test_a_missing_label_among_numbers_is_no_class(
    tmp_path: Path, numbers: tuple[str, ...], missing: str
) -> None:
    """Examples without a label became a class of their own."""
    labels = [*numbers, missing, *numbers]
    rows = [{"user": "a", "text": "x", "label": label} for label in labels]
    assert refused(tmp_path, rows) == (
        f"{tmp_path / 't.jsonl'}, line {1 + len(numbers)}: the others are numbers, and {missing!r} says that one is "
        f"missing. Drop such rows, or name every class in label_names."
    )
    names = [*numbers, missing]
    assert read(tmp_path, rows, label_names=names).meta["label_names"] == names
    rows.append(rows[0] | {"label": "roti"})
    assert missing in read(tmp_path, rows).meta["label_names"]  # it is bread


def test_the_label_is_no_feature(tmp_path: Path) -> None:
    rows = [{"user": "a", "f": 1, "label": 1}]
    assert refused(tmp_path, rows, features=["f", "label"]) == (
        "The features name the column of labels, 'label': a model would read its answer. Leave it out of features."
    )


@pytest.mark.parametrize("named", [{"label": "text"}, {"text": "label"}])
def test_the_label_is_no_text(tmp_path: Path, named: dict[str, str]) -> None:
    """The model was given its answer to read, and every test example was right."""
    name = next(iter(named.values()))
    assert refused(tmp_path, ROWS, **named) == (
        f"The column of texts and that of labels are one, {name!r}: a model would read its answer. Name another as "
        f"text or as label."
    )


@pytest.mark.parametrize("name", WRITERS)
def test_decimals_are_classes_in_every_format_where_that_is_said(tmp_path: Path, name: str) -> None:
    """JSON lines and Parquet, whose cells are numbers, were refused with the advice to say what was said."""
    rows = [{"user": "a", "text": "x", "label": label, "split": "train"} for label in (1.5, 0.5, 1.5)]
    for said in ({"task": "multiclass"}, {"task": "binary"}, {"label_names": ["0.5", "1.5"]}):
        data = read(tmp_path, rows, name, **said)
        assert data.meta["label_names"] == ["0.5", "1.5"]
        assert data.columns["label"].tolist() == [1, 0, 1]  # type: ignore[union-attr]


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_what_is_no_number_is_no_class(tmp_path: Path, number: float) -> None:
    rows = [{"user": "a", "text": "x", "label": label} for label in (0.5, number)]
    assert refused(tmp_path, rows, task="multiclass") == (
        f"{tmp_path / 't.jsonl'}, line 2: wanted a class in column 'label', an integer or a text of at most 200 "
        f"characters; got {number}. For numbers as labels say task='regression'."
    )


@pytest.mark.parametrize("task", ["ranking", "tokens", "regresion"])
def test_a_task_that_no_table_has(tmp_path: Path, task: str) -> None:
    """Classes were judged as a ranking, by whether the right one is among the first ten: of ten or fewer it always is."""
    near = " Did you mean 'regression'?" if task == "regresion" else ""
    assert refused(tmp_path, ROWS, task=task) == (
        f"Wanted the task 'multiclass', 'binary' or 'regression'; got {task!r}.{near}"
    )


@pytest.mark.parametrize("length", [0, -3])
def test_a_text_keeps_at_least_one_symbol(tmp_path: Path, length: int) -> None:
    assert refused(tmp_path, ROWS, max_length=length) == (
        f"max_length is how many characters or words of a text to keep, at least 1; got {length}."
    )


def test_a_name_twice_in_a_line_of_json(tmp_path: Path) -> None:
    """The last value was taken, without a word."""
    line = '{"user": "a", "text": "x", "label": 0, "label": 1}\n'
    assert refused(tmp_path, line.encode()) == (
        f"{tmp_path / 't.jsonl'}, line 1: not JSON (it has 'label' twice). One object a line is wanted."
    )

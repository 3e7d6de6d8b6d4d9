"""Records are lines of JSON; a torn last line is left out, a damaged one is named."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest

from fedkeep.core.errors import RunError
from fedkeep.core.records import (
    Record,
    best_round,
    from_line,
    read_records,
    read_sealed_records,
    sealed_records,
    to_line,
)

RECORDS = [
    Record(1, 0.5, "train", None, "loss", 0.1 + 0.2, 12),
    Record(2, 1.0, "test", "Zoë\u2028\n", "accuracy", 1 / 3, 4),
    Record(2, 1.0, "test", None, "accuracy", 0.25, 8),
]


def test_a_record_survives_the_file_to_the_last_bit(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text("".join(map(to_line, RECORDS)))
    assert list(read_records(path)) == RECORDS
    path.write_bytes(sealed_records(RECORDS, {"run": "a"}))
    found, about = read_sealed_records(path)
    assert (found, about["run"]) == (RECORDS, "a")


def test_a_line_holds_the_documented_fields() -> None:
    line = to_line(RECORDS[0])
    assert line.endswith("\n")
    assert line.count("\n") == 1
    assert json.loads(line) == {
        "round": 1,
        "epoch": 0.5,
        "split": "train",
        "client": None,
        "metric": "loss",
        "value": 0.1 + 0.2,
        "n": 12,
    }


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_no_number_is_null_and_reads_as_nan(value: float) -> None:
    line = to_line(dataclasses.replace(RECORDS[0], value=value))
    assert json.loads(line)["value"] is None
    assert math.isnan(from_line(line).value)


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    whole = "".join(map(to_line, RECORDS))
    for torn in range(1, len(to_line(RECORDS[2]))):
        path.write_text(whole[:-torn])
        assert list(read_records(path)) == RECORDS[:2]


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        "3",
        '{"round": 1}',
        '{"round":1,"epoch":1,"split":"a","client":null,"metric":"m","value":1,"n":1,"x":2}',
    ],
)
def test_a_damaged_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text(to_line(RECORDS[0]) + line + "\n" + to_line(RECORDS[1]))
    with pytest.raises(RunError, match="Was the file edited") as error:
        list(read_records(path))
    assert str(error.value).startswith(f"{path}, line 2: not a record (")


def test_a_missing_or_binary_file(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="Cannot read the records"):
        list(read_records(tmp_path / "records.jsonl"))
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RunError, match="Cannot read the records"):
        list(read_records(tmp_path / "binary"))


@pytest.mark.parametrize(
    ("values", "lower", "round"),
    [
        ({3: 0.5, 1: 0.5, 2: 0.4}, False, 1),
        ({3: 0.5, 1: 0.5, 2: 0.4}, True, 2),
        ({1: math.inf, 2: 0.4, 3: math.nan, 4: 0.5}, False, 4),
        ({1: math.nan, 2: math.inf}, True, 2),
        ({}, True, None),
    ],
)
def test_the_best_round_is_the_earliest_of_equals(
    values: dict[int, float], lower: bool, round: int | None
) -> None:
    assert best_round(values, lower_is_better=lower) == round

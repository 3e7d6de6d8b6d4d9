"""Columns that a table lacks: which, what it has, and how to name others."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.data.readers.written import ROWS, WRITERS, read, refused, without


@pytest.mark.parametrize("name", WRITERS)
def test_a_missing_column(tmp_path: Path, name: str) -> None:
    rows = [{"users" if key == "user" else key: value for key, value in row.items()} for row in ROWS]
    assert refused(tmp_path, rows, name) == (
        f"{tmp_path / name} has no column 'user'; it has ['label', 'split', 'text', 'time', 'users']. "
        f"Did you mean 'users'? Name yours under [data], or as an argument: user = 'COLUMN'."
    )


def test_a_missing_text_may_be_of_another_name_or_numbers(tmp_path: Path) -> None:
    rows = [without(row, "text") | {"words": row["text"]} for row in ROWS]
    assert refused(tmp_path, rows, "t.csv").endswith(
        " Name yours under [data], or as an argument: text = 'COLUMN', or of numbers features = ['COLUMN', ...]."
    )
    assert read(tmp_path, rows, "t.csv", text="words").examples == 3


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("argument", ["split", "time", "opted_in"])
def test_a_column_that_somebody_names_must_be_there(tmp_path: Path, name: str, argument: str) -> None:
    rows = [without(row, argument) | {"mine": row.get(argument)} for row in ROWS]
    assert refused(tmp_path, rows, name, **{argument: "mien"}) == (
        f"{tmp_path / name} has no column 'mien'; it has {sorted(rows[0])}. Did you mean 'mine'?"
    )
    assert read(tmp_path, rows, name).examples == 3  # one that has its usual name may be missing

"""Columns of a table as client ids, numbers, texts, times, truth values, splits and labels; a bad cell is named."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedkeep.core.errors import DataError, did_you_mean, shown
from fedkeep.data.ids import as_id
from fedkeep.data.readers.files import advice
from fedkeep.data.splits import SPLITS

ALIASES = {name: name for name in SPLITS} | dict.fromkeys(("validation", "val", "dev", "eval"), "valid")
LONGEST_LABEL = 200
CLASSES = "; where each is a class, task='multiclass' or label_names"
TRUTHS = {"true": True, "1": True, "false": False, "0": False}


@dataclass(frozen=True)
class Table:
    """Columns as lists, and how to name a row of theirs in an error."""

    columns: Mapping[str, Sequence[Any]]
    where: Callable[[int], str]

    def numbers(self, name: str) -> NDArray[np.float64]:
        """Return a column as numbers, or raise DataError at the first value that is none."""
        values = []
        for row, value in enumerate(self.columns[name]):
            try:
                if value is None or isinstance(value, bool):
                    raise ValueError
                if isinstance(value, str) and ("_" in value or not value.isascii()):
                    raise ValueError  # Python takes 1_000 and digits of any script
                values.append(float(value))
            except (TypeError, ValueError, OverflowError):
                raise DataError(
                    f"{self.where(row)}: wanted a number in column {name!r}; got {shown(value)}.{advice(value)}"
                ) from None
        return np.asarray(values, dtype=np.float64)


def users_of(table: Table, name: str) -> list[str]:
    """Return a column as client ids, or raise DataError at the first value that is none."""
    users = table.columns[name]
    known: dict[Any, str] = {}
    for row, user in enumerate(users):
        # a float or a truth value would be found as the integer that it equals
        if type(user) not in (str, int) or user not in known:
            known[user] = as_id(user, f"{table.where(row)}: column {name!r}: ")
    return [known[user] for user in users]


def features_of(table: Table, names: Sequence[str]) -> NDArray[np.float64]:
    """Return numeric columns side by side, (rows, names); float32 holds all of them, if not to the last digit.

    Raises:
        DataError: a value is no number, NaN, infinite, or too large for float32.
    """
    x = np.stack([table.numbers(name) for name in names], axis=1)
    single_of(table, x, list(names))
    return x


def texts_of(table: Table, name: str) -> list[str]:
    """Return a column as texts, or raise DataError at the first value that is none."""
    for row, text in enumerate(table.columns[name]):
        if not isinstance(text, str):
            raise DataError(f"{table.where(row)}: wanted text in column {name!r}; got {shown(text)}.")
    return list(table.columns[name])


def times_of(table: Table, name: str) -> NDArray[np.float64] | NDArray[np.int64]:
    """Return a column as int64 where all of it are whole numbers below 2^63, which float64 would round, else float64.

    Raises:
        DataError: a value is no number, NaN or infinite.
    """
    found = table.numbers(name)
    _finite(table, found[:, None], [name])
    exact = [value for value in table.columns[name] if not isinstance(value, float | np.floating)]
    try:
        # int() refuses a text such as "1.5" or "1e9", and cuts a Decimal
        whole = [int(value) for value in exact if isinstance(value, str) or value == int(value)]
    except ValueError:
        return found
    small = len(whole) == len(found) and all(-(1 << 63) <= value < 1 << 63 for value in whole)
    return np.asarray(whole, dtype=np.int64) if small else found


def truths_of(table: Table, name: str) -> NDArray[np.bool_]:
    """Return a column as truth values, or raise DataError at the first value that is none."""
    found = np.zeros(len(table.columns[name]), bool)
    for row, value in enumerate(table.columns[name]):
        word = str(value).lower()
        if word not in TRUTHS:
            raise DataError(
                f"{table.where(row)}: wanted true or false in column {name!r}; got {shown(value)}."
            )
        found[row] = TRUTHS[word]
    return found


def splits_of(table: Table, name: str) -> list[str]:
    """Return a column as "train", "valid" and "test", or raise DataError at the first value that is none of them."""
    parts = []
    for row, part in enumerate(table.columns[name]):
        if not isinstance(part, str) or part not in ALIASES:
            raise DataError(
                f"{table.where(row)}: wanted the split 'train', 'valid' or 'test'; got {shown(part)}."
                f"{did_you_mean(part[:20], ALIASES) if isinstance(part, str) else ''}"
            )
        parts.append(ALIASES[part])
    return parts


def words_of(table: Table, name: str, *, decimals: bool = False) -> list[str]:
    """Return a column as labels of classes, or raise DataError at the first value that is none.

    Args:
        table: the table.
        name: of the column.
        decimals: whether numbers with decimals are classes too. Texts such as "0.5" are taken here, and may be refused
            where all labels are known.
    """
    return [_word(table, row, name, value, decimals) for row, value in enumerate(table.columns[name])]


def _word(table: Table, row: int, name: str, value: Any, decimals: bool) -> str:
    """Return a label as text: a whole number without a point."""
    try:
        if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
            word = str(int(value))
        else:
            word = repr(value) if decimals and isinstance(value, float) and math.isfinite(value) else value
    except ValueError:  # Python writes out no integer of more than 4,300 digits
        word = ""
    # half of a pair of surrogates, as JSON may hold, could not be written into a report
    halves = isinstance(word, str) and any("\ud800" <= character <= "\udfff" for character in word)
    if not isinstance(word, str) or not 0 < len(word) <= LONGEST_LABEL or halves:
        fraction = isinstance(value, float) and math.isfinite(value)
        raise DataError(
            f"{table.where(row)}: wanted a class in column {name!r}, an integer or a text of at most {LONGEST_LABEL} "
            f"characters; got {shown(value)}. For numbers as labels say task='regression'"
            f"{CLASSES if fraction else ''}."
        )
    return word


def single_of(table: Table, values: NDArray[np.float64], names: list[str]) -> NDArray[np.float32]:
    """Return numbers as float32, or raise DataError at the first that is none or too large for it."""
    _finite(table, values, names)
    with np.errstate(over="ignore"):
        single = values.astype(np.float32)
    for row, column in np.argwhere(np.isinf(single))[:1].tolist():
        raise DataError(
            f"{table.where(row)}: column {names[column]!r} holds {values[row, column]:g}, too large for float32. Drop "
            f"such rows, or scale the column down."
        )
    return single


def _finite(table: Table, values: NDArray[Any], names: list[str]) -> None:
    wrong = np.argwhere(~np.isfinite(values))
    if len(wrong):
        row, column = wrong[0]
        raise DataError(
            f"{table.where(int(row))}: column {names[column]!r} holds {values[row, column]}. Drop such rows or fill in "
            f"a number."
        )

"""A table's columns as they were read, and the kinds of things that cells are read as; a bad cell is named.

A kind reads one cell. A column is read by its different values, so that what a million cells share is read once.
"""

from __future__ import annotations

import datetime
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from fedkeep.core.errors import DataError, did_you_mean
from fedkeep.data.columns import Repeated
from fedkeep.data.ids import are_plain_ids, as_id
from fedkeep.data.splits import SPLITS
from fedkeep.tasks import listed_for_cells, usual_kind

ALIASES = {name: name for name in SPLITS} | dict.fromkeys(("validation", "val", "dev", "eval"), "valid")
LONGEST_LABEL = 200
ROWS = 1 << 16  # that are looked at together: they fit into a processor's cache
TRUTHS = {"true": True, "1": True, "false": False, "0": False}
T = TypeVar("T")


@dataclass(frozen=True)
class CellKind(Generic[T]):
    """What the cells of a column are read as.

    Attributes:
        wanted: what a cell must be, in words.
        read: returns a cell's value; ValueError or TypeError where it has none.
        advice: returns what to do about a cell that has none; empty, or a sentence with a space before it.
        as_they_are: tells of cells, at once and quickly, that each is its own value.
    """

    wanted: str
    read: Callable[[Any], T]
    advice: Callable[[Any], str] = lambda cell: ""
    as_they_are: Callable[[Sequence[Any]], bool] = lambda cells: False


class Cells:
    """A column: a list of Python's values, or an array of pyarrow."""

    def __init__(self, values: Any) -> None:
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    def tolist(self) -> list[Any]:
        """Return Python's values."""
        return list(self.values) if isinstance(self.values, list) else list(self.values.to_pylist())

    def only(self, rows: NDArray[np.int64]) -> Cells:
        """Return the cells of some rows."""
        if isinstance(self.values, list):
            return Cells([self.values[row] for row in rows.tolist()])
        return Cells(self.values.take(rows))

    def different(self) -> tuple[list[Any], NDArray[np.int64]]:
        """Return the different values in the order in which they come first, and the number of each row's."""
        if not isinstance(self.values, list):
            import pyarrow

            try:
                different, number = coded_of(self.values)
                return _with_none(different.to_pylist(), number)
            except pyarrow.ArrowNotImplementedError:  # lists and tables in cells
                pass
        values: list[Any] = []
        known: dict[Any, int] = {}
        number = np.zeros(len(self), np.int64)
        for row, value in enumerate(self.tolist()):
            # by type: 1, 1.0 and True are equal; a list is like no other
            key = (type(value), value) if getattr(value, "__hash__", None) is not None else (list, row)
            number[row] = known.setdefault(key, len(values))
            if number[row] == len(values):
                values.append(value)
        return values, number

    def as_type(self, name: str) -> NDArray[Any] | None:
        """Return "float64" or "int64" as pyarrow reads them, quickly; None where it reads no number in some cell."""
        if isinstance(self.values, list):
            return None
        import pyarrow
        from pyarrow import compute

        values, kind = self.values, self.values.type
        if values.null_count or pyarrow.types.is_boolean(kind):
            return None
        try:
            if pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind):
                values = compute.utf8_trim_whitespace(values)
            elif not (
                pyarrow.types.is_integer(kind) or (name == "float64" and pyarrow.types.is_floating(kind))
            ):
                return None
            # of whole numbers float64 is the nearest, as in Python
            found = compute.cast(values, name, safe=name == "int64")
        except pyarrow.ArrowInvalid:
            return None
        array: NDArray[Any] = found.to_numpy()
        return array


def coded_of(values: Any) -> tuple[Any, NDArray[np.int64]]:
    """Return a column of pyarrow as its different values, in the order in which they come first, and each row's number.

    Returns:
        The values, an array of pyarrow, and int64 (rows,), -1 where a row has none.
    """
    import pyarrow
    from pyarrow import compute

    given = pyarrow.types.is_dictionary(values.type)
    coded = (values.unify_dictionaries() if given else values.dictionary_encode()).combine_chunks()
    coded = coded.chunk(0) if hasattr(coded, "chunks") else coded  # of a column without any row
    number = compute.fill_null(coded.indices, -1).to_numpy().astype(np.int64)
    if not given:
        return coded.dictionary, number
    # whoever made a dictionary may have put it into another order, with values of no row
    first = np.full(len(coded.dictionary) + 1, len(number))
    for start in reversed(range(0, len(number), ROWS)):
        some = number[start : start + ROWS]
        first[some[::-1]] = np.arange(start + len(some) - 1, start - 1, -1)  # the last to be written stays
    first = first[:-1]
    used = int((first < len(number)).sum())
    if used == len(first) and (first[:-1] < first[1:]).all():
        return coded.dictionary, number
    order = np.argsort(first, kind="stable")[:used]
    place = np.full(len(first) + 1, -1)
    place[order] = np.arange(used)
    return coded.dictionary.take(pyarrow.array(order)), place[number]


def _with_none(different: list[Any], number: NDArray[np.int64]) -> tuple[list[Any], NDArray[np.int64]]:
    """Return values and the number of each row's with None among them, at its place, for rows of the number -1."""
    missing = number < 0
    if not missing.any():
        return different, number
    place = int(number[: missing.argmax()].max(initial=-1)) + 1
    return [*different[:place], None, *different[place:]], np.where(
        missing, place, number + (number >= place)
    )


def few_differ(values: Any) -> bool:
    """Tell whether most of a column's first values, of pyarrow, come again."""
    from pyarrow import compute

    return bool(2 * compute.count_distinct(values).as_py() <= len(values))


def are_plain(values: Any) -> bool:
    """Tell whether texts of pyarrow are empty or numbers as pyarrow reads them, and some are numbers."""
    found = as_floats(values)
    return found is not None and found.null_count < len(found)


def as_floats(text: Any) -> Any | None:
    """Return texts of pyarrow as floats, null where they are empty; None where it reads no number in some."""
    import pyarrow
    from pyarrow import compute

    try:
        return compute.cast(compute.if_else(compute.equal(text, ""), None, text), "float64")
    except pyarrow.ArrowInvalid:
        return None


@dataclass(frozen=True)
class Only:
    """The clients whose rows alone are kept: the column that says whose each is, and their ids."""

    column: str
    ids: Collection[str]

    def keeps(self, cell: Any) -> bool:
        """Tell whether to keep rows with this cell in the column; DataError where it is no id."""
        return as_id(cell) in self.ids

    def rows(self, cells: Cells) -> NDArray[np.int64]:
        """Return the rows to keep, by the cells of the column."""
        different, number = cells.different()
        return np.flatnonzero(np.asarray([self.keeps(cell) for cell in different], bool)[number])


@dataclass(frozen=True)
class Nobody(Only):
    """No client: no row is kept, and ``ids`` gathers whose they are."""

    ids: set[str] = field(default_factory=set)

    def keeps(self, cell: Any) -> bool:
        """Note the id; DataError where it is none."""
        self.ids.add(as_id(cell))
        return False


def wrong_cell(table: RawTable, row: int, column: str, wanted: str, got: object, advice: str) -> DataError:
    """Return what to say of a cell that is not what its column wants; ``advice`` is empty, or begins with a space."""
    return DataError(
        "{place}: wanted {wanted} in column {column!r}; got {got!r}.{advice}",
        place=table.where(row),
        column=column,
        wanted=wanted,
        got=got,
        advice=advice,
    )


@dataclass(frozen=True)
class RawTable:
    """Columns, how to name a row of theirs in an error, and the mark before decimals in numbers that are texts."""

    columns: Mapping[str, Cells]
    where: Callable[[int], object]
    decimal: str = "."

    def only(self, rows: NDArray[np.int64]) -> RawTable:
        """Return a table of some rows, which errors name by their place in this one."""
        columns = {name: cells.only(rows) for name, cells in self.columns.items()}
        return replace(self, columns=columns, where=lambda row: self.where(int(rows[row])))

    def read(self, name: str, kind: CellKind[T]) -> tuple[list[T], NDArray[np.int64]]:
        """Return the different values of a column, read as a kind, and the number of each row's.

        Raises:
            DataError: a cell has no value of this kind; the first is named.
        """
        cells, number = self.columns[name].different()
        if kind.as_they_are(cells):
            return cells, number
        values: list[T] = []
        for cell in cells:
            try:
                values.append(kind.read(cell))
            except (TypeError, ValueError, LookupError, OverflowError, DataError) as error:
                row = int(np.argmax(number == len(values)))
                if not isinstance(error, DataError):
                    raise self.wrong(row, name, cell, kind) from None
                place = self.where(row)
                raise DataError(
                    "{place}: column {column!r}: {why}", place=place, column=name, got=cell, why=str(error)
                ) from None
        return values, number

    def each(self, name: str, kind: CellKind[T]) -> list[T]:
        """Return each row's value in a column, read as a kind; errors as of :meth:`read`."""
        values, number = self.read(name, kind)
        return [values[n] for n in number.tolist()]

    def repeated(self, name: str, kind: CellKind[T]) -> Repeated[T]:
        """Return the same, where values come again in many rows."""
        return Repeated(*self.read(name, kind))

    def wrong(self, row: int, column: str, got: object, kind: CellKind[Any]) -> DataError:
        """Return what to say of a cell that is not of a kind."""
        return wrong_cell(self, row, column, kind.wanted, got, kind.advice(got))

    def numbers(self, name: str) -> NDArray[np.float64]:
        """Return a column as numbers, or raise DataError at the first cell that is none."""
        found = self.columns[name].as_type("float64")
        if found is None:
            values, number = self.read(name, NUMBER)
            found = np.asarray(values, dtype=np.float64)[number]
        return found

    def times(self, name: str) -> NDArray[np.float64] | NDArray[np.int64]:
        """Return a column as int64 where all cells are whole numbers below 2^63, which float64 would round, else float64.

        Raises:
            DataError: a cell is no number, NaN or infinite.
        """
        found = self.numbers(name)
        self._check_finite(found[:, None], [name])
        whole = self.columns[name].as_type("int64")
        if whole is not None:
            return whole
        cells, number = self.columns[name].different()
        try:
            return np.asarray(list(map(_whole, cells)), dtype=np.int64)[number]
        except ValueError:
            return found

    def single(self, values: NDArray[np.float64], names: Sequence[str]) -> NDArray[np.float32]:
        """Return the numbers of columns, (rows, names), as float32; DataError at the first too large for it, or none."""
        self._check_finite(values, names)
        with np.errstate(over="ignore"):
            single = values.astype(np.float32)
        for row, column in np.argwhere(np.isinf(single))[:1].tolist():
            raise DataError(
                "{place}: column {column!r} holds {got:g}, too large for float32. Drop such rows, or scale the column "
                "down.",
                place=self.where(row),
                column=names[column],
                got=values[row, column],
            )
        return single

    def _check_finite(self, values: NDArray[Any], names: Sequence[str]) -> None:
        for row, column in np.argwhere(~np.isfinite(values))[:1].tolist():
            raise DataError(
                "{place}: column {column!r} holds {got}. Drop such rows or fill in a number.",
                place=self.where(row),
                column=names[column],
                got=values[row, column],
            )


def _number(cell: Any) -> float:
    # Python takes 1_000 and digits of any script
    no_number = cell is None or isinstance(cell, bool)
    if no_number or (isinstance(cell, str) and ("_" in cell or not cell.isascii())):
        raise ValueError
    return float(cell)


def _whole(cell: Any) -> int:
    """Return a cell as a whole number below 2^63; ValueError for a float, which may have been rounded."""
    whole = int(cell)  # refuses a text such as "1.5" or "1e9", and cuts a Decimal
    same = isinstance(cell, str) or (whole == cell and not isinstance(cell, float | np.floating))
    if not same or not -(1 << 63) <= whole < 1 << 63:
        raise ValueError
    return whole


def _advice_on_number(cell: Any) -> str:
    if cell is None or cell == "":
        return " Drop such rows or fill in a number."
    if str(cell).lower() in ("true", "false"):
        return " Write truth values as 1 and 0, in pandas by .astype(int)."
    day = isinstance(cell, datetime.date) or (isinstance(cell, str) and re.match(r"\d{4}-\d\d-\d\d", cell))
    return DATES if day else ""


def _text(cell: Any) -> str:
    if not isinstance(cell, str):
        raise TypeError
    return cell


def _class(cell: Any) -> str:
    """Return a label as text: a whole number without a point."""
    if isinstance(cell, int) or (isinstance(cell, float) and cell.is_integer()):
        return _class(str(int(cell)))  # Python writes out no integer of more than 4,300 digits: ValueError
    # half of a pair of surrogates, as JSON may hold, could not be written into a report
    if not 0 < len(_text(cell)) <= LONGEST_LABEL or any("\ud800" <= letter <= "\udfff" for letter in cell):
        raise ValueError
    return str(cell)


def _decimal_class(cell: Any) -> str:
    return repr(cell) if isinstance(cell, float) and math.isfinite(cell) and cell % 1 else _class(cell)


def _advice_on_class(cell: Any) -> str:
    if cell in (None, ""):
        return " Fill in such labels; skip_unlabelled = true leaves these rows out."
    if isinstance(cell, float) and math.isfinite(cell):
        return f" Say the task, {listed_for_cells()}; or name all classes in label_names."
    return f" For numbers as labels say task={usual_kind(whole=False).name!r}."


def labels_between(separator: str) -> CellKind[tuple[str, ...]]:
    """Return the kind of cells that hold several labels: between separators, or as a list; an empty one holds none."""

    def read(cell: Any) -> tuple[str, ...]:
        parts = cell
        if isinstance(cell, str):
            parts = [part.strip() for part in cell.split(separator)] if cell.strip() else []
        return tuple(dict.fromkeys(map(_decimal_class, parts if isinstance(parts, list) else [parts])))

    return CellKind(
        f"labels with {separator!r} between them, each of at most {LONGEST_LABEL} characters,",
        read,
        lambda cell: " Leave the cell empty where an example has no label." if cell is None else "",
    )


DATES = " Write all of the column as numbers, or all of it as dates."
ID = CellKind("a client id", as_id, as_they_are=are_plain_ids)
NUMBER = CellKind("a number", _number, _advice_on_number)
INTEGER = CellKind("an integer", _whole)
TEXT = CellKind("text", _text)
TRUTH = CellKind("true or false", lambda cell: TRUTHS[str(cell).lower()])
SPLIT = CellKind(
    "the split 'train', 'valid' or 'test'",
    lambda cell: ALIASES[_text(cell)],
    lambda cell: did_you_mean(cell[:20], ALIASES) if isinstance(cell, str) else "",
)
CLASS = CellKind(
    f"a class, an integer or a text of at most {LONGEST_LABEL} characters,", _class, _advice_on_class
)
DECIMAL_CLASS = CellKind(CLASS.wanted, _decimal_class, _advice_on_class)
"""Numbers with decimals are classes too. Texts such as "0.5" are a class in either, and may be refused where all labels
are known."""

"""What the columns of a table hold: numbers, truth values, dates or categories. It is found by looking, or declared.

A whole column is looked at by pyarrow; Python reads dates by their different texts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from decimal import Decimal
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedkeep.core.errors import DataError, check_choice
from fedkeep.data.columns import is_missing
from fedkeep.data.readers.cells import RawTable, as_floats, coded_of, few_differ, wrong_cell

KINDS = ("number", "truth", "date", "category")
SERIES = "series"
"""The kind of a column of which each cell holds many numbers; `fedkeep.data.readers.series` reads it."""
MOST_LEVELS = 100
"""More different texts than this are no categories unless they are declared to be."""
MISSING = ("", "na", "n/a", "#n/a", "nan", "null", "?")
MISSING_NUMBERS = (*MISSING, "none", "-")
TRUTHS = (("false", "true"), ("no", "yes"), ("n", "y"), ("f", "t"), ("0", "1"))
GAP = r"[ '\x{2019}\x{a0}\x{202f}]"
EXPONENT = r"([eE][+-]?\d+)?$"
PLAIN = r"^[+-]?(\d+\.?\d*|\.\d+)" + EXPONENT
COMMAS = rf"^[+-]?(\d{{1,3}}((\.|{GAP})\d{{3}})+|\d+)(,\d+)?" + EXPONENT
POINTS = rf"^[+-]?(\d{{1,3}}((,|{GAP})\d{{3}})+|\d+)(\.\d+)?" + EXPONENT
LISTED = re.compile(r"[\[\s]*[+-]?\d[\d.eE+-]*([\s,;]+[+-]?[\d.][\d.eE+-]*){2,}[\]\s]*")
"""A text that lists three numbers or more."""
UNIT = re.compile(r"([€$£¥]?)\s*[+-]?[\d.,'’\s]*\d(\s*[%€$£¥]|\s+[^\W\d]{1,6}[²³]?)?")
DAY = re.compile(r"(\d{1,4})([./-])(\d{1,2})\2(\d{1,4})([T ]\d{1,2}:\d\d(?::\d\d)?)?")


@dataclass(frozen=True)
class Field:
    """A column as numbers.

    Attributes:
        kind: one of `KINDS`.
        values: float64 (rows,): numbers; 1 and 0; days since 1970; or numbers of levels. NaN where one is missing.
        levels: of a category, in the order of their numbers.
        rule: how the kind is declared, e.g. "date:%d/%m/%Y".
    """

    kind: str
    values: NDArray[np.float64]
    levels: tuple[str, ...] = ()
    rule: str = ""

    @property
    def declared(self) -> str:
        """The kind as a configuration declares it."""
        return self.rule or self.kind


@dataclass
class ColumnFaults:
    """Collects what is wrong with columns, so that one error names them all."""

    found: list[DataError] = field(default_factory=list)

    def within(self, read: Callable[[], Any]) -> Any:
        """Return what a function reads; None where it raises DataError, which is kept."""
        try:
            return read()
        except DataError as error:
            self.found.append(error)
            return None

    def check(self) -> None:
        """Raise DataError where something is wrong: the error itself where it is alone."""
        if len(self.found) == 1:
            raise self.found[0]
        if self.found:
            lines = "".join(f"\n  {error}" for error in self.found)
            raise DataError(
                "{count} columns cannot be used as they are:{lines}",
                count=len(self.found),
                lines=lines,
                columns=[error.facts.get("column") for error in self.found],
            )


def field_of(
    table: RawTable, name: str, declared: str | None = None, advice: str = "", *, may_be_empty: bool = False
) -> Field:
    """Return a column as numbers, of the kind declared or, where none is, of that which its cells show.

    Args:
        table: where it stands.
        name: its own.
        declared: one of `KINDS`, of a date with its form; None: it is found.
        advice: what to do where a text is of another kind; empty: as for features.
        may_be_empty: of a kind that is declared no row need have a value.

    Raises:
        DataError: it holds two kinds, too many different texts, nothing, or another kind than declared. A row is named.
    """
    from pyarrow import types

    kind, _, form = (declared or "").partition(":")
    if declared:
        check_kind(name, declared)
    values = _arrow(table, name)
    looked = _Column(table, name, values, form, advice or (_DECLARED if kind else _FOUND.format(name)))
    if types.is_dictionary(values.type):
        column = looked.by_different()
        if column is not None and not (kind and may_be_empty and column.empty(kind)):
            return column.expanded(column.of_kind(kind))
        looked = replace(looked, values=values.cast(values.type.value_type))
    if kind and may_be_empty and looked.empty(kind):
        return Field(kind, np.full(len(values), np.nan), rule=f"{kind}:{form}" if form else "")
    return looked.of_kind(kind)


def check_kind(name: str, declared: str) -> None:
    """Raise DataError where a column is declared to be of a kind that there is not."""
    kind = declared.partition(":")[0]
    check_choice(f"The kind of the column {name!r} must be", kind, (*KINDS, SERIES), DataError)


def _arrow(table: RawTable, name: str) -> Any:
    """Return a column as pyarrow's array of a plain type; DataError where its cells are of several types."""
    import pyarrow
    from pyarrow import types

    values = table.columns[name].values
    if isinstance(values, list):
        try:
            values = pyarrow.chunked_array([pyarrow.array(values)])
        except (pyarrow.ArrowException, TypeError, OverflowError):
            row = next((n for n, v in enumerate(values) if not _is_plain(v)), None)
            if row is not None:
                wanted = "a number, truth value, date or category"
                raise wrong_cell(
                    table, row, name, wanted, values[row], " Correct it, or leave the column out."
                ) from None
            # numbers of several types, and texts of numbers among them
            values = pyarrow.chunked_array(
                [[None if v is None else str(v) for v in values]], pyarrow.string()
            )
    if types.is_dictionary(values.type) and not types.is_string(values.type.value_type):
        values = values.cast(values.type.value_type)
    if types.is_decimal(values.type):
        values = values.cast("float64", safe=False)
    return values if isinstance(values, pyarrow.ChunkedArray) else pyarrow.chunked_array([values])


def _is_plain(value: object) -> bool:
    return value is None or (isinstance(value, str | int | float | Decimal) and not isinstance(value, bool))


_DECLARED = " Correct it, or leave the cell empty."
_FOUND = ' Correct it, leave the cell empty, or say kinds = {{ {!r} = "category" }}.'


@dataclass(frozen=True)
class _Column:
    table: RawTable
    name: str
    values: Any
    form: str
    advice: str
    number: NDArray[np.int64] | None = (
        None  # of each row's value, where values are the different ones; -1: none
    )

    def wrong(self, row: int, wanted: str, got: object, advice: str) -> DataError:
        """Return what to say of a cell."""
        if self.number is not None:
            row = int(np.argmax(self.number == row))
        return wrong_cell(self.table, row, self.name, wanted, got, advice)

    def often(self, chosen: NDArray[np.bool_]) -> int:
        """Return how many rows have one of the chosen values."""
        if self.number is None:
            return int(chosen.sum())
        return int(self.times[chosen].sum())

    @property
    def nothing(self) -> str:
        """What to do where no row has a value."""
        return f' Leave the column out; or, if others have it filled, say what it holds: kinds = {{ {self.name!r} = "number" }}.'

    def empty(self, kind: str) -> bool:
        """Tell whether no row has a value of a kind."""
        from pyarrow import compute, types

        values = self.values
        if types.is_string(values.type) or types.is_large_string(values.type):
            words = MISSING if kind == "category" else MISSING_NUMBERS
            known = _known(compute.utf8_trim_whitespace(values), words)
            return not compute.any(known).as_py()
        return bool(compute.all(compute.is_null(values, nan_is_null=True)).as_py())

    @cached_property
    def times(self) -> NDArray[np.int64]:
        """How many rows have each of the different values."""
        assert self.number is not None
        return np.bincount(self.number + 1, minlength=len(self.values) + 1)[1:]

    def by_different(self) -> _Column | None:
        """Return the same column of texts by its different ones; None where most rows seem to have another."""
        import pyarrow
        from pyarrow import types

        if not types.is_dictionary(self.values.type) and not few_differ(self.values.slice(0, 10_000)):
            return None
        different, number = coded_of(self.values)
        if not len(different):
            return None
        return replace(self, values=pyarrow.chunked_array([different]), number=number)

    def expanded(self, made: Field) -> Field:
        """Return what the different values are read as, for each row."""
        assert self.number is not None
        return replace(made, values=np.append(made.values, np.nan)[self.number])  # -1 is the last

    def of_kind(self, kind: str) -> Field:
        """Return the column as numbers; ``kind`` is empty where it is to be found."""
        from pyarrow import types

        if kind == "category":
            return self.category(most=None)
        if types.is_boolean(self.values.type):
            if kind in ("", "truth", "number"):
                return Field(kind or "truth", self.filled(self.values.cast("float64")))
        elif types.is_integer(self.values.type) or types.is_floating(self.values.type):
            if kind in ("", "number", "truth"):
                return self.finite(
                    Field(kind or "number", self.filled(self.values.cast("float64", safe=False)))
                )
        elif types.is_temporal(self.values.type):
            if kind in ("", "date"):
                return Field("date", self.days(self.values))
        elif types.is_null(self.values.type):
            raise self.wrong(0, "a value in some row at least", None, self.nothing)
        elif types.is_string(self.values.type) or types.is_large_string(self.values.type):
            return self.plain_numbers(kind) or self.of_text(kind)
        raise self.wrong(
            0,
            f"a {kind or 'number, truth value, date or category'}",
            self.values[0].as_py(),
            " Leave the column out.",
        )

    def filled(self, values: Any) -> NDArray[np.float64]:
        """Return floats with NaN where there is none."""
        from pyarrow import compute

        found: NDArray[np.float64] = compute.fill_null(values, float("nan")).to_numpy()
        return found

    def finite(self, found: Field) -> Field:
        """Return a field without infinities, with a number in some row."""
        if len(bad := np.flatnonzero(np.isinf(found.values))):
            raise self.wrong(
                int(bad[0]), "a finite number", float(found.values[bad[0]]), " Correct it, or leave it empty."
            )
        if np.isnan(found.values).all():
            raise self.wrong(0, "a number in some row at least", None, self.nothing)
        if (
            found.kind == "truth"
            and (odd := np.flatnonzero(~np.isin(found.values, (0, 1)) & ~np.isnan(found.values))).size
        ):
            raise self.wrong(
                int(odd[0]), "1 or 0", float(found.values[odd[0]]), " Correct it, or declare another kind."
            )
        return found

    def days(self, values: Any) -> NDArray[np.float64]:
        """Return dates, or times of day, as days."""
        from pyarrow import compute, types

        kind = values.type
        if types.is_timestamp(kind) or types.is_date(kind):
            whole, unit = values.cast("timestamp[us]", safe=False), 86_400e6
        elif types.is_duration(kind):
            whole, unit = values.cast("duration[us]", safe=False), 86_400e6
        else:
            whole, unit = values.cast("time64[us]", safe=False), 86_400e6
        return self.filled(compute.cast(whole.cast("int64"), "float64", safe=False)) / unit

    def category(self, most: int | None) -> Field:
        """Return the column's different texts as levels."""
        from pyarrow import compute, types

        values = self.values
        if types.is_floating(values.type):
            whole = compute.all(compute.equal(values, compute.floor(values))).as_py()
            values = values.cast("int64") if whole else values
        text = compute.utf8_trim_whitespace(values.cast("string"))
        known = _known(text, MISSING)
        text = compute.if_else(known, text, None)
        different, number = coded_of(text)
        levels = different.to_pylist()
        if not levels:
            raise self.wrong(0, "a value in some row at least", None, self.nothing)
        if most is not None and len(levels) > most:
            lists = f'; or, if each is a list of numbers, say kinds = {{ {self.name!r} = "{SERIES}" }}'
            raise self.wrong(
                0,
                f"a number, truth value, date, or one of at most {most} categories",
                levels[0],
                f" There are {len(levels):,} different texts. Leave the column out; or name it as text; or, if each is "
                f'a category, say kinds = {{ {self.name!r} = "category" }}'
                f"{lists if LISTED.fullmatch(levels[0]) else ''}.",
            )
        return Field("category", np.where(number < 0, np.nan, number), tuple(levels))

    def plain_numbers(self, kind: str) -> Field | None:
        """Return texts of which each is empty or a number without marks between thousands; None where some are not."""
        from pyarrow import compute

        if kind not in ("", "number") or self.table.decimal != ".":
            return None
        # pyarrow reads to the end of a block after the first text that is no number
        if as_floats(self.values.slice(0, 1000)) is None or (found := as_floats(self.values)) is None:
            return None
        # of none there is more to say, and pyarrow reads "inf" and "nan"
        if found.null_count == len(found) or not compute.all(compute.is_finite(found)).as_py():
            return None
        return Field("number", self.filled(found))

    def of_text(self, kind: str) -> Field:
        """Return a column of texts, of the kind declared, or found where that is empty."""
        from pyarrow import compute

        if self.number is None and (column := self.by_different()) is not None:
            return column.expanded(column.of_text(kind))
        text = compute.utf8_trim_whitespace(self.values)
        known = _known(text, MISSING_NUMBERS)
        if not compute.any(known).as_py():
            raise self.wrong(0, "a value in some row at least", self.values[0].as_py(), self.nothing)
        if kind in ("", "number") and (numbers := _numbers(text, known, self.table.decimal)) is not None:
            return self.finite(Field("number", self.filled(numbers)))
        if kind in ("", "truth") and (truths := _truths(text, known)) is not None:
            return Field("truth", self.filled(truths))
        if kind in ("", "date") and (dates := self.dates(text, known)) is not None:
            return dates
        numeric = np.stack([_match(text, form) for form in (PLAIN, COMMAS, POINTS)])
        dated = _match(text, r"^\d{1,4}[./-]\d{1,2}[./-]\d{1,4}")
        there = known.to_numpy()
        for what, like in (("number", numeric.any(0)), ("date", dated)):
            if kind == what or (not kind and 2 * self.often(like & there) >= self.often(there)):
                row = _odd(numeric if what == "number" else _forms(text, _date_forms), there)
                raise self.wrong(row, f"a {what}", self.values[row].as_py(), self.advice)
        if kind:
            row = _odd(_forms(text, _truth_forms), there)
            advice = " Correct it, or declare another kind."
            raise self.wrong(row, f"a {kind} value such as yes or no", self.values[row].as_py(), advice)
        return self.category(MOST_LEVELS)

    def dates(self, text: Any, known: Any) -> Field | None:
        """Return texts as days since 1970, of the form declared or found; None where some are no dates."""
        import pyarrow
        from pyarrow import compute

        text = compute.if_else(known, text, None)
        rule = f"date:{self.form}" if self.form else ""
        if not self.form:
            try:
                return Field("date", self.days(compute.cast(text, "timestamp[us]")))
            except pyarrow.ArrowInvalid:
                pass
        values, of_row = coded_of(text)
        different = values.to_pylist()
        form = self.form or self._form(different)
        if form is None:
            return None
        days = np.zeros(len(different))
        for number, one in enumerate(different):
            try:
                moment = datetime.fromisoformat(one) if form == "iso" else datetime.strptime(one, form)
            except ValueError:
                if not self.form:
                    return None
                row = int(np.argmax(compute.equal(text, one).fill_null(False).to_numpy()))
                raise self.wrong(
                    row, f"a date like {form!r}", one, " Correct it, or leave the cell empty."
                ) from None
            aware = moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
            days[number] = aware.timestamp() / 86_400
        found = np.append(days, np.nan)[of_row]  # -1 is the last
        return Field("date", found, rule=rule or ("" if form == "iso" else f"date:{form}"))

    def _form(self, different: Sequence[str]) -> str | None:
        """Return the form of dates, as ``strptime`` names it, or "iso"; None where they have none in common."""
        parts = [DAY.fullmatch(one) for one in different]
        if not all(parts):
            try:
                datetime.fromisoformat(different[0])
            except ValueError:
                return None
            return "iso"
        first, marks, second, last, clocks = zip(*(one.groups("") for one in parts if one), strict=True)
        clock = {0: "", 1: "%H:%M", 2: "%H:%M:%S"}[clocks[0].count(":")]
        if clock:
            clock = clocks[0][0] + clock
        mark = marks[0]
        if len(set(marks)) > 1:
            return None
        if {len(one) for one in first} == {4}:
            return f"%Y{mark}%m{mark}%d{clock}"
        years = {len(one) for one in last}
        if years not in ({4}, {2}):
            return None
        year = "%Y" if years == {4} else "%y"
        day_first, month_first = max(map(int, first)) > 12, max(map(int, second)) > 12
        forms = [f"{a}{mark}{b}{mark}{year}{clock}" for a, b in (("%d", "%m"), ("%m", "%d"))]
        if not day_first and not month_first and mark != ".":
            both = " or ".join(f'kinds = {{ {self.name!r} = "date:{form}" }}' for form in forms)
            raise self.wrong(
                0,
                "dates that show whether the day or the month comes first",
                different[0],
                f" Say {both}.",
            )
        return forms[month_first and not day_first]


def _known(text: Any, missing: Sequence[str]) -> Any:
    """Return which cells hold something."""
    import pyarrow
    from pyarrow import compute

    return compute.invert(compute.is_in(compute.utf8_lower(text), pyarrow.array([*missing, None], text.type)))


def _match(text: Any, pattern: str) -> NDArray[np.bool_]:
    from pyarrow import compute

    found: NDArray[np.bool_] = compute.fill_null(
        compute.match_substring_regex(text, pattern), False
    ).to_numpy()
    return found


def _odd(forms: NDArray[np.bool_], there: NDArray[np.bool_]) -> int:
    """Return the first row that has none of the forms of a kind, else the first that has none in common with those before.

    Args:
        forms: (forms, rows) which row has which.
        there: (rows,) which rows hold something; some do.
    """
    none: NDArray[np.bool_] = there & ~forms.any(0)
    if not none.any():
        none = np.asarray(~np.logical_and.accumulate(forms | ~there, axis=1).any(0))
    return int(np.argmax(none if none.any() else there))


def _forms(text: Any, of: Callable[[str], Collection[str]]) -> NDArray[np.bool_]:
    """Return the forms of a kind that texts have, (forms, rows), each text's as a function says."""
    different, number = coded_of(text)
    each = [of(one) for one in different.to_pylist()]
    known = sorted(set().union(*each)) or [""]
    has = np.asarray([[form in own for form in known] for own in [*each, ()]], bool)
    found: NDArray[np.bool_] = has[number].T  # -1 is the last
    return found


def _date_forms(one: str) -> set[str]:
    found = set()
    with suppress(ValueError):
        datetime.fromisoformat(one)
        found.add("iso")
    if parts := DAY.fullmatch(one):
        day, mark = one.removesuffix(parts[5] or ""), parts[2]
        for form in ("%Y-%m-%d", "%d-%m-%Y", "%m-%d-%Y", "%d-%m-%y", "%m-%d-%y"):
            with suppress(ValueError):
                datetime.strptime(day, form.replace("-", mark))
                found.add(form.replace("-", mark))
    return found


def _truth_forms(one: str) -> set[str]:
    return {no for no, yes in TRUTHS if one.lower() in (no, yes)}


def _numbers(text: Any, known: Any, decimal: str) -> Any | None:
    """Return texts as floats, null where one is missing; None where some are no numbers.

    Marks between thousands and a unit that all cells share are left out.
    """
    import pyarrow
    from pyarrow import compute

    text = compute.if_else(known, text, None)
    forms = [PLAIN, POINTS, COMMAS] if decimal == "." else [COMMAS, PLAIN, POINTS]
    for form in forms:
        if not compute.all(compute.match_substring_regex(text, form)).as_py():
            continue
        if form != PLAIN:
            text = compute.replace_substring_regex(text, GAP, "")
            between, point = (".", ",") if form == COMMAS else (",", ".")
            text = compute.replace_substring(compute.replace_substring(text, between, ""), point, ".")
        try:
            return compute.cast(compute.replace_substring_regex(text, r"^\+", ""), "float64")
        except pyarrow.ArrowInvalid:
            return None
    first = text.drop_null()[0].as_py()
    found = UNIT.fullmatch(first)
    before, after = found.groups(default="") if found else ("", "")
    if not before and not after:
        return None
    stripped = compute.replace_substring_regex(text, rf"^{re.escape(before)}\s*", "") if before else text
    if after:
        shape = rf"\s*{re.escape(after.strip())}$"
        if not compute.all(compute.match_substring_regex(text, shape)).as_py():
            return None
        stripped = compute.replace_substring_regex(stripped, shape, "")
    if UNIT.fullmatch(stripped.drop_null()[0].as_py()).groups(default="") != ("", ""):  # type: ignore[union-attr]
        return None
    return _numbers(stripped, known, decimal)


def _truths(text: Any, known: Any) -> Any | None:
    """Return texts such as yes and no as 1 and 0, null where one is missing; None where some are others."""
    from pyarrow import compute

    low = compute.if_else(known, compute.utf8_lower(text), None)
    words = compute.unique(low).to_pylist()
    for no, yes in TRUTHS:
        if set(words) <= {no, yes, None}:
            return compute.cast(compute.equal(low, yes), "float64")
    return None


def lacking(table: RawTable, name: str) -> NDArray[np.bool_]:
    """Tell of each row (rows,) whether its label is missing.

    Where all that is written are numbers, also by a word such as NA; among names of classes by an empty cell alone: NA may
    be a class.
    """
    try:
        return np.isnan(field_of(table, name, "number").values)
    except DataError:
        cells, number = table.columns[name].different()
        empty = [n for n, cell in enumerate(cells) if is_missing(cell) or str(cell).strip() == ""]
        return np.isin(number, empty)


def numbers_of(table: RawTable, name: str, advice: str = "") -> NDArray[np.float64]:
    """Return a column of numbers, of which none is missing; ``advice`` is as of ``field_of``.

    Raises:
        DataError: a cell is no number, or is empty.
    """
    found = field_of(table, name, "number", advice).values
    if (empty := np.flatnonzero(np.isnan(found))).size:
        row = int(empty[0])
        got = table.columns[name].tolist()[row]
        raise wrong_cell(
            table,
            row,
            name,
            "a number",
            got,
            " Fill in a number; skip_unlabelled = true leaves rows without a label out.",
        )
    return found


def times_of(table: RawTable, name: str) -> NDArray[np.float64] | NDArray[np.int64]:
    """Return a column of times: numbers as they are, dates as seconds since 1970.

    Raises:
        DataError: a cell is neither, or others are of the other kind.
    """
    try:
        return table.times(name)
    except DataError:
        try:
            days = field_of(table, name, "date").values
        except DataError:
            days = np.asarray([np.nan])
        if np.isnan(days).any():
            raise
    seconds = np.round(days * 86_400, 6)
    whole = seconds.astype(np.int64)
    return whole if np.array_equal(whole, seconds) else seconds

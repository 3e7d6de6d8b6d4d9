"""The door to tables: a file of any format becomes columns of cells, read by pyarrow.

What pyarrow takes and a strict reader would refuse (a quote that never ends swallows rows) is looked for before; and
where a file is malformed, Python's own reader goes through it to name the line.
"""

from __future__ import annotations

import csv
import gzip
import zlib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedkeep.core.errors import DataError, Spot, first_line
from fedkeep.data.readers.cells import DATES, Cells, Table
from fedkeep.data.readers.files import NAMING, check_names, existing, json_lines, lines

DELIMITERS = {".csv": ",", ".tsv": "\t"}
FORMATS = (".csv", ".csv.gz", ".tsv", ".tsv.gz", ".jsonl", ".jsonl.gz", ".parquet")
BLOCK = 1 << 24  # bytes; a row must fit in


def load_table(
    path: Path, wanted: Sequence[str], optional: Sequence[str], naming: Mapping[str, str] = NAMING
) -> Table:
    """Read the columns ``wanted``, and those of ``optional`` that there are; ``naming`` is as of ``check_names``.

    Raises:
        DataError: the file is missing, empty, truncated or malformed, or lacks a column; file and line are named.
    """
    suffix = next((s for s in FORMATS if path.name.endswith(s)), None)
    if suffix is None:
        raise DataError(
            "Wanted a file that ends in one of {wanted}; got {got}.", wanted=", ".join(FORMATS), got=path.name
        )
    existing(path)
    kind = suffix.removesuffix(".gz")
    if kind == ".jsonl":
        table = _read_json_lines(path, wanted, optional, naming)
    elif kind == ".parquet":
        table = _read_parquet(path, wanted, optional, naming)
    else:
        table = _read_delimited(path, DELIMITERS[kind], wanted, optional, naming)
    if not len(next(iter(table.columns.values()))):
        raise DataError("The data file {file} holds no example, only a header. Fetch it again.", file=path)
    return table


def frame_table(frame: Any, wanted: Sequence[str], optional: Sequence[str]) -> Table:
    """Take the columns ``wanted``, and those of ``optional`` that there are, of a data frame; truth values are 1 and 0.

    Raises:
        DataError: it is no frame, has no row or two columns of one name, lacks a column, or mixes types in one.
    """
    import pyarrow

    found = _arrow(frame)
    what = "The data frame"
    chosen = _chosen(what, found.column_names, wanted, optional, {})
    if not found.num_rows:
        raise DataError("{what} has no row.", what=what)
    _check_no_dates(what, {name: found.schema.field(name).type for name in chosen})
    cells = {}
    for name in chosen:
        truths = pyarrow.types.is_boolean(found.schema.field(name).type)
        cells[name] = Cells(found[name].cast("int8") if truths else found[name])
    return Table(cells, lambda row: f"{what}, row {row}")


def numeric_columns(frame: Any, named: Sequence[str], others: Collection[str]) -> list[str]:
    """Return the names of a data frame's columns of numbers and truth values but those ``named`` and ``others``.

    Raises:
        DataError: there is no column that is ``named``, or one that is in neither holds something else.
    """
    import pyarrow

    tests = (pyarrow.types.is_integer, pyarrow.types.is_floating, pyarrow.types.is_boolean)
    schema = _arrow(frame).schema
    check_names("The data frame", schema.names, named, {})
    fields = [field for field in schema if field.name not in {*named, *others}]
    if other := [field for field in fields if not any(test(field.type) for test in tests)]:
        raise DataError(
            "The column {column!r} holds {got}, and a feature is a number. Name the columns to use, as features=[...], "
            "or one of texts, as text=....",
            column=other[0].name,
            got=str(other[0].type),
        )
    return [field.name for field in fields]


def _arrow(frame: Any) -> Any:
    import pyarrow

    try:
        return pyarrow.table(frame)
    except Exception as error:  # a frame's library raises whatever it likes
        raise DataError(
            "Wanted the path of a table, or a data frame of pandas, polars or pyarrow; got {got}: {why}",
            got=type(frame).__name__,
            why=first_line(error),
        ) from error


def _chosen(
    path: object,
    names: Sequence[str],
    wanted: Sequence[str],
    optional: Sequence[str],
    naming: Mapping[str, str],
) -> list[str]:
    """Return the names of the columns to read; DataError where one is missing, or two have the same name."""
    twice = sorted(name for name, times in Counter(names).items() if times > 1)
    if twice:
        raise DataError(
            "{file} has several columns {column!r}. Rename or drop all but one.", file=path, column=twice[0]
        )
    check_names(path, names, wanted, naming)
    return [name for name in dict.fromkeys((*wanted, *optional)) if name in names]


def _read_delimited(
    path: Path, delimiter: str, wanted: Sequence[str], optional: Sequence[str], naming: Mapping[str, str]
) -> Table:
    import pyarrow
    from pyarrow import csv as arrow

    place, header = next(_records(path, delimiter))
    other = [mark for mark in (",", ";", "\t", "|") if mark != delimiter and mark in header[0]]
    if len(header) == 1 and other:
        raise DataError(
            "{place}: wanted cells with {delimiter!r} between them; got {got!r}. In a .csv file this is a comma, in a "
            ".tsv file a tab. Save it so, numbers with a decimal point.",
            place=place,
            delimiter=delimiter,
            got=header[0],
        )
    chosen = _chosen(path, header, wanted, optional, naming)
    text = dict.fromkeys(chosen, pyarrow.string())
    try:
        if path.suffix == ".gz":
            with gzip.open(path) as file:
                content = pyarrow.py_buffer(file.read())
        else:
            content = pyarrow.memory_map(str(path)).read_buffer()
        well = _is_quoted_well(np.frombuffer(content, np.uint8), delimiter)
        found = arrow.read_csv(
            pyarrow.BufferReader(content),
            arrow.ReadOptions(block_size=BLOCK),
            arrow.ParseOptions(delimiter=delimiter, newlines_in_values=True),
            arrow.ConvertOptions(include_columns=chosen, column_types=text, strings_can_be_null=False),
        )
    except (pyarrow.ArrowException, EOFError, zlib.error, OSError) as error:
        _check_strictly(path, delimiter)
        raise DataError("{file} is malformed: {why}", file=path, why=first_line(error)) from error
    if not well:
        _check_strictly(path, delimiter)
    return Table(
        {name: Cells(found[name]) for name in chosen}, lambda row: _records_until(path, delimiter, row)
    )


def _is_quoted_well(content: NDArray[np.uint8], delimiter: str) -> bool:
    """Whether each quote begins or ends a cell, or is doubled inside one; with tabs, whether there is none."""
    quote = ord('"')
    beside = np.zeros(256, bool)
    beside[[ord(delimiter), ord("\n"), ord("\r"), quote]] = True
    odd = 0
    for start in range(0, len(content), BLOCK):
        at = np.flatnonzero(content[start : start + BLOCK] == quote) + start
        if len(at) and delimiter == "\t":
            return False
        # at the ends of the file, clipping takes the quote itself
        before = content.take(at[odd::2] - 1, mode="clip")
        after = content.take(at[1 - odd :: 2] + 1, mode="clip")
        if not (beside[before].all() and beside[after].all()):
            return False
        odd = (odd + len(at)) % 2
    return not odd


def _records(path: Path, delimiter: str) -> Iterator[tuple[Spot, list[str]]]:
    """Yield each record that is not empty, the header first, as Python reads it: slowly, and strictly.

    Raises:
        DataError: there is none, or one is malformed; its line is named.
    """
    reader = csv.reader((line + "\n" for _, line in lines(path)), delimiter=delimiter, strict=True)
    width = 0
    try:
        for cells in filter(None, reader):
            place = Spot(path, reader.line_num)
            width = width or len(cells)
            if len(cells) != width:
                raise DataError(
                    "{place}: wanted {wanted} cells, as in the header; got {got}.",
                    place=place,
                    wanted=width,
                    got=len(cells),
                )
            if delimiter == "\t" and any("\t" in cell and "\n" in cell for cell in cells):
                raise DataError(
                    "{place}: a cell in quotes holds a tab and a line end. If the quotes are part of texts, double "
                    "them in quoted cells; else save the table as .csv or .jsonl.",
                    place=place,
                )
            yield place, cells
    except csv.Error as error:
        why, way_out = str(error), "Check the quotes"
        if "field limit" in why:
            way_out = "Save longer texts as .jsonl or .parquet"
        if "new-line character" in why:
            why = "a carriage return without a line feed, outside quotes"
            way_out = "Save the file with the line ends of Unix or Windows, and quote texts that hold others"
        raise DataError(
            "{place}: malformed ({why}). {way_out}.",
            place=Spot(path, reader.line_num),
            why=why,
            way_out=way_out,
        ) from error
    if not width:
        raise DataError("The data file {file} holds no line. Fetch it again.", file=path)


def _check_strictly(path: Path, delimiter: str) -> None:
    for _ in _records(path, delimiter):
        pass


def _records_until(path: Path, delimiter: str, row: int) -> Spot:
    """Return the line of a row: pyarrow does not tell, so only who has to name one counts."""
    return next(islice(_records(path, delimiter), row + 1, None))[0]


def _read_json_lines(
    path: Path, wanted: Sequence[str], optional: Sequence[str], naming: Mapping[str, str]
) -> Table:
    columns: dict[str, list[Any]] = {}
    numbers: list[int] = []
    for number, entry in json_lines(path):
        if not numbers:
            columns = {name: [] for name in _chosen(path, list(entry), wanted, optional, naming)}
        there = {name for name in (*wanted, *optional) if name in entry}
        if there != columns.keys():
            name = min(there ^ columns.keys())
            has, lacks = (number, numbers[0]) if name in there else (numbers[0], number)
            raise DataError(
                "{place}: there is a column {column!r} in line {has}, which line {lacks} lacks. Give it in every line "
                "or in none.",
                place=Spot(path, number),
                column=name,
                has=has,
                lacks=lacks,
            )
        for name, values in columns.items():
            values.append(entry[name])
        numbers.append(number)
    cells = {name: Cells(values) for name, values in columns.items()}
    return Table(cells, lambda row: Spot(path, numbers[row]))


def _read_parquet(
    path: Path, wanted: Sequence[str], optional: Sequence[str], naming: Mapping[str, str]
) -> Table:
    from pyarrow import parquet

    try:
        file = parquet.ParquetFile(path)
        chosen = _chosen(path, file.schema_arrow.names, wanted, optional, naming)
        _check_no_dates(path, {name: file.schema_arrow.field(name).type for name in chosen})
        found = file.read(columns=chosen)
    except DataError:
        raise
    except Exception as error:  # pyarrow raises whatever its parsers raise on damaged bytes
        raise damaged_parquet(path, error) from error
    return Table({name: Cells(found[name]) for name in chosen}, lambda row: Spot(path, row, "row"))


def _check_no_dates(file: object, types: Mapping[str, Any]) -> None:
    import pyarrow

    for name, kind in types.items():
        if pyarrow.types.is_temporal(kind):
            raise DataError(
                "{file}: the column {column!r} holds dates or times, {got}.{advice}",
                file=file,
                column=name,
                got=kind,
                advice=DATES,
            )


def damaged_parquet(path: Path, error: Exception) -> DataError:
    """Return what to say of a Parquet file that pyarrow cannot read."""
    return DataError(
        "{file} is truncated or no Parquet file: {why} Fetch it again.", file=path, why=first_line(error)
    )

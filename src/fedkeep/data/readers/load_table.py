"""The door to tables: a file of any format becomes columns of cells, read by pyarrow.

What pyarrow takes and a strict reader would refuse (a quote that never ends swallows rows) is looked for before; and
where a file is malformed, Python's own reader goes through it to name the line.
"""

from __future__ import annotations

import csv
import re
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from fedkeep.core.errors import DataError, Spot, first_line, near_path, needing, reading, warn
from fedkeep.data.columns import Rows
from fedkeep.data.data_checks import OPTED_IN
from fedkeep.data.readers.cells import Cells, Only, RawTable, are_plain, few_differ
from fedkeep.data.readers.opened_files import (
    LATIN,
    check_names,
    encoding_of,
    existing,
    json_lines,
    lines,
    opened,
    without_lines,
)

DELIMITERS = {
    ".csv": ",",
    ".tsv": "\t",
    ".inter": "\t",
}  # .inter: RecBole's ratings, "user_id:token" and so on
ARROW = (".arrow", ".feather")
FORMATS = (
    *(".csv", ".csv.gz", ".tsv", ".tsv.gz", ".inter", ".jsonl", ".jsonl.gz", ".parquet", ".xlsx"),
    *ARROW,
)
ARROW_FILE = b"ARROW1"
"""What an Arrow file begins with that is no stream."""
STREAM_ENDS = b"\xff\xff\xff\xff\0\0\0\0"
BLOCK = 1 << 24  # bytes; a row must fit in
SAMPLE = 1 << 22
"""Bytes of a file, and about a tenth of them rows of Parquet, from which it is judged how the others are best read."""
BESIDE = 1 << 18  # bytes whose quotes are looked at together: they fit into a processor's cache
LOOKED = 10_000  # rows that tell the mark before decimals
CONSENT = re.compile(r"opt(ed)?[\W_]*(in|out)|consent(ed)?", re.IGNORECASE)


def load_table(
    path: Path,
    wanted: Sequence[str] | None,
    optional: Sequence[str] = (),
    naming: Mapping[str, str] = {},
    numbers: Collection[str] | None = None,
    only: Only | None = None,
) -> RawTable:
    """Read columns of a table.

    Args:
        path: of the file.
        wanted: the columns that there must be; None: all.
        optional: those to read where there are any.
        naming: as of ``check_names``.
        numbers: columns that may be read as numbers at once, where each of their cells is a plain one. Of a file larger than
            ``SAMPLE``, texts that come again are coded then. None: every cell is kept as it is written.
        only: clients whose rows alone are kept, and of a file that is read piece by piece in memory at all; there may be
            none. Their column is among those to read.

    Raises:
        DataError: the file is missing, empty, truncated or malformed, or lacks a column; file and line are named.
    """
    suffix = next((s for s in FORMATS if path.name.endswith(s)), None)
    if suffix is None:
        raise DataError(
            "{got} is not named as a table. If it is one, rename it: .csv for commas, .tsv for tabs, .jsonl for a JSON "
            "object a line. Read are {wanted}.{near}",
            wanted=", ".join(FORMATS),
            got=path.name,
            near="" if path.exists() else near_path(path),
        )
    existing(path, key="data.path")
    kind = suffix.removesuffix(".gz")
    if kind == ".jsonl":
        table = _read_json_lines(path, wanted, optional, naming, only)
    elif kind == ".xlsx":
        table = _read_excel(path, wanted, optional, naming)
        if only is not None:
            table = table.only(only.rows(table.columns[only.column]))
    elif kind in ARROW:
        table = _read_arrow(path, wanted, optional, naming, only)
    elif kind == ".parquet":
        table = _read_parquet(path, wanted, optional, naming, coded=numbers is not None, only=only)
    else:
        table = _read_delimited(path, DELIMITERS[kind], wanted, optional, naming, numbers=numbers, only=only)
    if only is None and table.columns and not len(next(iter(table.columns.values()))):
        raise DataError("The data file {file} holds no example, only a header. Fetch it again.", file=path)
    return table


def frame_table(
    frame: Any, wanted: Sequence[str], optional: Sequence[str], naming: Mapping[str, str] = {}
) -> RawTable:
    """Take the columns ``wanted``, and those of ``optional`` that there are, of a data frame; truth values are 1 and 0.

    Raises:
        DataError: it is no frame, has no row or two columns of one name, lacks a column, or mixes types in one.
    """
    import pyarrow

    found = _arrow(frame)
    what = "The data frame"
    chosen = _chosen(what, found.column_names, wanted, optional, naming)
    if not found.num_rows:
        raise DataError("{what} has no row.", what=what)
    cells = {}
    for name in chosen:
        truths = pyarrow.types.is_boolean(found.schema.field(name).type)
        cells[name] = Cells(found[name].cast("int8") if truths else _in_microseconds(found[name]))
    return RawTable(cells, lambda row: f"{what}, row {row}")


def other_columns(
    frame: Any, named: Sequence[str], others: Collection[str], naming: Mapping[str, str]
) -> list[str]:
    """Return the names of a data frame's columns but those ``named``, which must be there, and ``others``."""
    names = _arrow(frame).column_names
    check_names("The data frame", names, named, naming, others)
    return [name for name in names if name not in {*named, *others}]


def _arrow(frame: Any) -> Any:
    import pyarrow

    try:
        return pyarrow.table(frame)
    except Exception as error:  # a frame's library raises whatever it likes
        names = getattr(frame, "columns", ())
        _check_once("The data frame", names if isinstance(names, Iterable) else ())
        raise DataError(
            "Wanted the path of a table, a data frame of pandas, polars or pyarrow, or {{'x': [...]}} by column; got "
            "{got}: {why}",
            got=type(frame).__name__,
            why=first_line(error),
        ) from error


def _chosen(
    path: object,
    names: Sequence[str],
    wanted: Sequence[str] | None,
    optional: Sequence[str],
    naming: Mapping[str, str],
) -> list[str]:
    """Return the names of the columns to read, all where ``wanted`` is None; DataError where one is missing, or two have the same name."""
    _check_once(path, names)
    if wanted is None:
        return [name for name in names if name]
    check_names(path, names, wanted, naming, optional)
    if OPTED_IN in optional and OPTED_IN not in names:
        others = [name for name in names if name not in wanted]
        like = (n for n in others if CONSENT.fullmatch(n) or get_close_matches(n, [OPTED_IN], cutoff=0.85))
        for found in islice(like, 1):
            warn(
                f"{path} has a column {found!r} and none {OPTED_IN!r}, so every row may be trained on. If it says which "
                f"rows opted in, name it: opted_in = {found!r}."
            )
    return [name for name in dict.fromkeys((*wanted, *optional)) if name in names]


def _check_once(path: object, names: Iterable[Any]) -> None:
    """Raise DataError where two columns have the same name."""
    if twice := sorted(str(name) for name, times in Counter(map(str, names)).items() if times > 1):
        raise DataError(
            "{file} has several columns {column!r}. Rename or drop all but one.", file=path, column=twice[0]
        )


def _read_delimited(
    path: Path,
    usual: str,
    wanted: Sequence[str] | None,
    optional: Sequence[str],
    naming: Mapping[str, str],
    encoding: str | None = None,
    numbers: Collection[str] | None = None,
    only: Only | None = None,
) -> RawTable:
    import pyarrow

    encoding = encoding or encoding_of(path)
    delimiter = _delimiter(path, usual, wanted or (), encoding)
    _, header = next(_records(path, delimiter, encoding))
    chosen = _chosen(path, header, wanted, optional, naming)
    read = partial(_reader, path, encoding, delimiter)
    try:
        well = _is_quoted_well(path, encoding, delimiter)
        found, rows, decimal = None, None, "."
        if numbers is not None:
            found, rows, decimal = _typed(read, path, chosen, numbers, delimiter, only)
        if found is None:
            found, rows = _read(read(dict.fromkeys(chosen, pyarrow.string())), only)
            decimal = _decimal(found, delimiter)
    except (pyarrow.ArrowException, EOFError, zlib.error, OSError, UnicodeDecodeError) as error:
        if encoding == "utf-8" and "UTF8" in str(error) and not _holds_zeros(path):
            return _read_delimited(path, usual, wanted, optional, naming, LATIN, numbers, only)
        _check_strictly(path, delimiter, encoding)
        raise DataError("{file} is malformed: {why}", file=path, why=first_line(error)) from error
    if not well:
        _check_strictly(path, delimiter, encoding)
    if encoding == LATIN:
        warn(
            f"{path} is no UTF-8, so it was read as Latin-1, in the form of Windows. Where letters look wrong, save it "
            f"as UTF-8."
        )
    return RawTable(
        {name: Cells(found[name]) for name in chosen},
        lambda row: _records_until(path, delimiter, row if rows is None else int(rows[row]), encoding),
        decimal,
    )


def _read(reader: Any, only: Only | None) -> tuple[Any, Rows | None]:
    """Return what pyarrow's reader reads, and which rows these are where only some clients' are kept."""
    if only is None:
        return reader.read_all(), None
    return _kept(reader, reader.schema.empty_table(), only)


def _kept(batches: Iterable[Any], empty: Any, only: Only) -> tuple[Any, Rows]:
    """Return some clients' rows of batches, which are in memory one after the other, and their numbers."""
    import pyarrow

    kept, rows, start = [_plain_texts(empty)], [np.zeros(0, np.int64)], 0
    for batch in batches:
        some = pyarrow.Table.from_batches([batch])
        mine = only.rows(Cells(some[only.column]))
        if len(mine):
            kept.append(
                _plain_texts(some.take(pyarrow.array(mine)))
            )  # else each piece keeps the texts of all
            rows.append(start + mine)
        start += len(batch)
    return pyarrow.concat_tables(kept), np.concatenate(rows)


def _plain_texts(table: Any) -> Any:
    """Return a table of pyarrow whose texts are not coded."""
    import pyarrow

    fields = [
        pyarrow.field(one.name, one.type.value_type) if pyarrow.types.is_dictionary(one.type) else one
        for one in table.schema
    ]
    return table.cast(pyarrow.schema(fields))


def _reader(path: Path, encoding: str, delimiter: str, types: Mapping[str, Any], block: int = BLOCK) -> Any:
    """Return pyarrow's reader of the columns ``types``, block by block; an empty cell is no number, and a text as it is."""
    from pyarrow import csv as arrow

    return arrow.open_csv(
        _content(path, encoding),
        arrow.ReadOptions(block_size=block),
        arrow.ParseOptions(delimiter=delimiter, newlines_in_values=True),
        arrow.ConvertOptions(
            include_columns=list(types), column_types=types, strings_can_be_null=False, null_values=[""]
        ),
    )


def _typed(
    read: Callable[..., Any],
    path: Path,
    chosen: Sequence[str],
    numbers: Collection[str],
    delimiter: str,
    only: Only | None,
) -> tuple[Any, Rows | None, str]:
    """Return the columns of a long file, with the rows that they are of and their mark before decimals: plain numbers as
    such, texts that come again coded.

    None in place of columns where the first rows promise what the others don't keep, and of a short file.
    """
    import pyarrow
    from pyarrow import compute

    if path.stat().st_size <= SAMPLE:
        return None, None, "."
    text = pyarrow.string()
    try:
        first = pyarrow.Table.from_batches([read(dict.fromkeys(chosen, text), SAMPLE).read_next_batch()])
        if (decimal := _decimal(first, delimiter)) == "," or (delimiter != "," and len(first) < LOOKED):
            numbers = ()
        types = {
            name: pyarrow.float64()
            if name in numbers and are_plain(first[name])
            else pyarrow.dictionary(pyarrow.int32(), text)
            if few_differ(first[name])
            else text
            for name in chosen
        }
        found, rows = _read(read(types), only)
    except (pyarrow.ArrowException, StopIteration):
        return None, None, "."
    kept = [found[name] for name in chosen if types[name] == pyarrow.float64()]
    # what pyarrow reads as such may be "inf" or "nan"
    finite = all(compute.all(compute.is_finite(one)).as_py() for one in kept)
    return found if finite else None, rows, decimal


def _content(path: Path, encoding: str) -> Any:
    """Return a file's text in UTF-8, as a file of pyarrow."""
    import pyarrow

    if path.suffix != ".gz" and encoding == "utf-8":
        return pyarrow.OSFile(str(path))
    with opened(path) as file:
        whole = file.read()
    if encoding != "utf-8":
        whole = whole.decode(encoding, "replace" if encoding == LATIN else "strict").encode()
    return pyarrow.BufferReader(whole)


def _holds_zeros(path: Path) -> bool:
    with opened(path) as file:
        return any(0 in block for block in iter(lambda: file.read(BLOCK), b""))


def _delimiter(path: Path, usual: str, wanted: Sequence[str], encoding: str) -> str:
    """Return what stands between cells: the usual mark, unless the first lines tell of another.

    A mark is right that finds all columns wanted in the header; else one that cuts every line into as many cells, the
    more the better.
    """
    head = [line for _, line in islice(lines(path, encoding), 40) if line]
    marks = [usual, *(mark for mark in (",", ";", "\t", "|") if mark != usual)]
    widths = dict.fromkeys(marks, 0)
    for mark in marks:
        try:
            rows = [row for row in csv.reader([f"{line}\n" for line in head], delimiter=mark) if row]
        except csv.Error:
            continue
        if not rows:
            return usual
        if wanted and set(wanted) <= set(rows[0]):
            return mark
        if len({len(row) for row in rows[: -1 if len(head) > 2 else None]}) == 1:
            widths[mark] = len(rows[0])
    best = max(marks, key=widths.__getitem__)
    return best if widths[best] > 1 else usual


def _decimal(found: Any, delimiter: str) -> str:
    """Return the mark before decimals: a comma where commas do not part cells, and stand between digits in some."""
    from pyarrow import compute

    if delimiter == ",":
        return "."
    few = found.slice(0, LOOKED)
    commas = points = 0
    for name in few.column_names:
        commas += (
            compute.sum(compute.match_substring_regex(few[name], r"^\s*[+-]?[\d.]*\d,\d+\s*$")).as_py() or 0
        )
        points += compute.sum(compute.match_substring_regex(few[name], r"^\s*[+-]?\d+\.\d+\s*$")).as_py() or 0
    return "," if commas > points else "."


def _is_quoted_well(path: Path, encoding: str, delimiter: str) -> bool:
    """Whether each quote begins or ends a cell, or is doubled inside one; with tabs, whether there is none."""
    quote = ord('"')
    beside = np.zeros(256, bool)
    beside[[ord(delimiter), ord("\n"), ord("\r"), quote]] = True
    odd, last = 0, b"\n"
    with _content(path, encoding) as file:
        while True:
            block = file.read(BESIDE)
            some = np.frombuffer(
                last + (block or b"\n"), np.uint8
            )  # each of its bytes but the outer ones is looked at
            at = np.flatnonzero(some[1:-1] == quote) + 1
            if len(at) and delimiter == "\t":
                return False
            if not (beside[some[at[odd::2] - 1]].all() and beside[some[at[1 - odd :: 2] + 1]].all()):
                return False
            odd = (odd + len(at)) % 2
            if not block:
                return not odd
            last = some[-2:].tobytes()


def _records(path: Path, delimiter: str, encoding: str) -> Iterator[tuple[Spot, list[str]]]:
    """Yield each record that is not empty, the header first, as Python reads it: slowly, and strictly.

    Raises:
        DataError: there is none, or one is malformed; its line is named.
    """
    reader = csv.reader((line + "\n" for _, line in lines(path, encoding)), delimiter=delimiter, strict=True)
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
        raise without_lines(path)


def _check_strictly(path: Path, delimiter: str, encoding: str) -> None:
    for _ in _records(path, delimiter, encoding):
        pass


def _records_until(path: Path, delimiter: str, row: int, encoding: str) -> Spot:
    """Return the line of a row: pyarrow does not tell, so only who has to name one counts."""
    return next(islice(_records(path, delimiter, encoding), row + 1, None))[0]


def _read_json_lines(
    path: Path,
    wanted: Sequence[str] | None,
    optional: Sequence[str],
    naming: Mapping[str, str],
    only: Only | None,
) -> RawTable:
    columns: dict[str, list[Any]] = {}
    numbers: list[int] = []
    first = 0
    for number, entry in json_lines(path):
        if not first:
            first = number
            columns = {name: [] for name in _chosen(path, list(entry), wanted, optional, naming)}
        there = entry.keys() if wanted is None else {n for n in (*wanted, *optional) if n in entry}
        if there != columns.keys():
            name = min(set(there) ^ columns.keys())
            has, lacks = (number, first) if name in there else (first, number)
            raise DataError(
                "{place}: there is a column {column!r} in line {has}, which line {lacks} lacks. Give it in every line "
                "or in none.",
                place=Spot(path, number),
                column=name,
                has=has,
                lacks=lacks,
            )
        if only is not None and not only.keeps(entry[only.column]):
            continue
        for name, values in columns.items():
            values.append(entry[name])
        numbers.append(number)
    cells = {name: Cells(values) for name, values in columns.items()}
    return RawTable(cells, lambda row: Spot(path, numbers[row]))


def _read_excel(
    path: Path, wanted: Sequence[str] | None, optional: Sequence[str], naming: Mapping[str, str]
) -> RawTable:
    """Read the first sheet of a workbook; its first row that is not empty is the header."""
    with needing(f"{path}, a file of Excel,", "openpyxl", "excel", DataError, " Or save the sheet as .csv."):
        import openpyxl
    with reading("{file} is truncated or no file of Excel: {why}. Save it again.", file=path):
        book = openpyxl.load_workbook(path, read_only=True, data_only=True)
        rows = [
            (number, row)
            for number, row in enumerate(book.worksheets[0].iter_rows(values_only=True), 1)
            if any(cell is not None for cell in row)
        ]
        book.close()
    if not rows:
        raise without_lines(path)
    header = ["" if cell is None else str(cell) for cell in rows[0][1]]
    chosen = _chosen(path, [name for name in header if name], wanted, optional, naming)
    at = {name: header.index(name) for name in chosen}
    cells = {n: Cells([row[k] if k < len(row) else None for _, row in rows[1:]]) for n, k in at.items()}
    return RawTable(cells, lambda row: Spot(path, rows[row + 1][0], "row"))


def _read_parquet(
    path: Path,
    wanted: Sequence[str] | None,
    optional: Sequence[str],
    naming: Mapping[str, str],
    *,
    coded: bool = False,
    only: Only | None = None,
) -> RawTable:
    from pyarrow import parquet, types

    with reading("{file} is truncated or no Parquet file: {why}. Fetch it again.", file=path):
        file = parquet.ParquetFile(path)
        chosen = _chosen(path, file.schema_arrow.names, wanted, optional, naming)
        texts = [name for name in chosen if types.is_string(file.schema_arrow.field(name).type)]
        if coded and texts and path.stat().st_size > SAMPLE:
            first = next(file.iter_batches(SAMPLE // 40, columns=texts))
            again = [name for name in texts if few_differ(first[name])]
            file = parquet.ParquetFile(path, read_dictionary=again)
        rows = None
        if only is None:
            found = file.read(columns=chosen)
        else:
            empty = file.schema_arrow.empty_table().select(chosen)
            found, rows = _kept(file.iter_batches(columns=chosen), empty, only)
    return _of_rows(path, found, rows)


def _read_arrow(
    path: Path,
    wanted: Sequence[str] | None,
    optional: Sequence[str],
    naming: Mapping[str, str],
    only: Only | None,
) -> RawTable:
    """Read a file of Arrow's: one that can be entered anywhere, as of Feather, or a stream."""
    import pyarrow
    from pyarrow import ipc

    with (
        reading("{file} is truncated or no Arrow file: {why}. Fetch it again.", file=path),
        pyarrow.OSFile(str(path)) as source,
    ):
        entered = source.read(len(ARROW_FILE)) == ARROW_FILE
        source.seek(max(0, source.size() - len(STREAM_ENDS)))
        if not entered and source.read() != STREAM_ENDS:
            raise EOFError("it has no end.")  # which pyarrow does not miss
        source.seek(0)
        reader = ipc.open_file(source) if entered else ipc.open_stream(source)
        chosen = _chosen(path, reader.schema.names, wanted, optional, naming)
        batches = map(reader.get_batch, range(reader.num_record_batches)) if entered else reader
        schema = pyarrow.schema([reader.schema.field(name) for name in chosen])
        pieces = (batch.select(chosen) for batch in batches)
        found, rows = (
            (pyarrow.Table.from_batches(pieces, schema), None)
            if only is None
            else _kept(pieces, schema.empty_table(), only)
        )
    return _of_rows(path, found, rows)


def _of_rows(path: Path, found: Any, rows: Rows | None) -> RawTable:
    """Return pyarrow's columns of a file whose rows have numbers, from 0; ``rows`` are these, where not all are there."""
    cells = {name: Cells(_in_microseconds(found[name])) for name in found.column_names}
    return RawTable(cells, lambda row: Spot(path, row if rows is None else int(rows[row]), "row"))


def _in_microseconds(values: Any) -> Any:
    """Return a column with instants in microseconds, as Python's own have them; others stay as they are."""
    import pyarrow

    if not pyarrow.types.is_timestamp(values.type):
        return values
    return values.cast(pyarrow.timestamp("us", values.type.tz), safe=False)

"""Text files of cells with commas or tabs between them."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from fedkeep.core.errors import DataError, shown
from fedkeep.data.readers.files import lines


def delimited(path: Path, delimiter: str) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield (line number, cells by column) of a text file with a header."""
    header: list[str] = []
    reader = csv.reader((line + "\n" for _, line in lines(path)), delimiter=delimiter, strict=True)
    try:
        for cells in filter(None, reader):  # an empty line is no row
            if not header:
                header = cells
                check_different(path, header)
                _check_separated(f"{path}, line {reader.line_num}", header, delimiter)
            else:
                if len(cells) != len(header):
                    raise DataError(
                        f"{path}, line {reader.line_num}: wanted {len(header)} cells, as in the header; "
                        f"got {len(cells)}."
                    )
                if delimiter == "\t" and any("\t" in cell and "\n" in cell for cell in cells):
                    raise DataError(
                        f"{path}, line {reader.line_num}: a cell in quotes holds a tab and a line end. If the quotes "
                        f"are part of texts, double them in quoted cells; else save the table as .csv or .jsonl."
                    )
                yield reader.line_num, dict(zip(header, cells, strict=True))
    except csv.Error as error:
        why, way_out = str(error), "Check the quotes"
        if "field limit" in why:
            way_out = "Save longer texts as .jsonl or .parquet"
        if "new-line character" in why:
            why = "a carriage return without a line feed, outside quotes"
            way_out = "Save the file with the line ends of Unix or Windows, and quote texts that hold others"
        raise DataError(f"{path}, line {reader.line_num}: malformed ({why}). {way_out}.") from error


def check_different(path: Path, names: Sequence[str]) -> None:
    """Raise DataError where two columns have the same name."""
    twice = sorted(name for name, times in Counter(names).items() if times > 1)
    if twice:
        raise DataError(f"{path} has several columns {shown(twice[0])}. Rename or drop all but one.")


def _check_separated(where: str, header: Sequence[str], delimiter: str) -> None:
    other = [mark for mark in (",", ";", "\t", "|") if mark != delimiter and mark in header[0]]
    if len(header) == 1 and other:
        raise DataError(
            f"{where}: wanted cells with {delimiter!r} between them; got {shown(header[0])}. In a .csv file "
            f"this is a comma, in a .tsv file a tab. Save it so, numbers with a decimal point."
        )

"""A folder with a file of reviews, or of any short texts with labels, for each client."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedkeep.core.errors import DataError
from fedkeep.core.files import expanded
from fedkeep.data.preparation import Raw, encoded_alone
from fedkeep.data.readers.cells import ALIASES, CLASS, SPLIT, TEXT, Cells, Table
from fedkeep.data.readers.files import sha256
from fedkeep.data.readers.load import FORMATS, load_table
from fedkeep.data.reviews import Reviews, raw_reviews
from fedkeep.data.text import TokenVocabulary

OPTED_IN = "opted_in"


def raw_review_files(
    folder: str | Path,
    max_length: int = 200,
    vocabulary: TokenVocabulary | int = 50_000,
    text: str = "text",
    label: str = "label",
    split: str | None = None,
    label_names: Sequence[str] | None = None,
    valid: int = 0,
    drop_duplicates: bool = False,
    limit: int | None = None,
    seed: int = 0,
) -> Raw:
    """Read one file a client (``NAME.csv``), or one a client and split (``NAME.train.csv``, ``NAME.test.csv``).

    A file is a table with a text and a label on each row: CSV, TSV, JSON lines (each also ``.gz``) or Parquet. Its
    split is in its name, or in a column; where it is in neither, the reviews are not split. The texts are tokenised
    already, with spaces between words.

    Args:
        folder: the files; hidden files are skipped.
        max_length: words of a text to keep.
        vocabulary: a vocabulary, or how many words to keep, the most frequent in training texts.
        text, label: names of columns.
        split: likewise; a file whose name tells no split must have it. None: the column "split", where there is one.
        label_names: the labels in the order of their numbers; None: integers as they are, others in sorted order.
        valid, drop_duplicates, limit, seed: as for ``fedkeep.data.reviews.raw_reviews``.

    Returns:
        Data with the columns ``text`` (word ids) and ``label``; a client's id is its file's NAME.

    Raises:
        DataError: the folder holds no such file, or one is malformed; file and line are named.
    """
    files = _files(expanded(folder))
    named = [_named(file) for file in files]
    _check_once(files, named)
    column = "split" if split is None else split
    tables = [
        _one(file, part, text, label, column, wanted=split is not None)
        for file, (_, part) in zip(files, named, strict=True)
    ]
    table = _joined(tables)
    clients = [
        client for (client, _), own in zip(named, tables, strict=True) for _ in range(len(own.columns[text]))
    ]
    parts = table.each(column, SPLIT) if column in table.columns else []
    words, texts = table.each(label, CLASS), table.each(text, TEXT)
    reviews = Reviews(clients, parts, words, texts, list(range(len(words))))
    meta = {"name": expanded(folder).name, "source": {file.name: sha256(file) for file in files}}
    return raw_reviews(
        reviews,
        meta,
        label_names=label_names,
        max_length=max_length,
        vocabulary=vocabulary,
        valid=valid,
        drop_duplicates=drop_duplicates,
        limit=limit,
        seed=seed,
        where=table.where,
    )


review_files = encoded_alone(raw_review_files)
"""Read reviews as :func:`raw_review_files` does, and encode them."""


def _files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise DataError(
            "Wanted a folder with a file of reviews for each client; {folder} is none.", folder=folder
        )
    found = sorted(p for p in folder.iterdir() if p.name.endswith(FORMATS) and not p.name.startswith("."))
    if not found:
        raise DataError(
            "{folder} holds no file of reviews. Wanted one for each client that ends in one of {FORMATS}.",
            folder=folder,
            FORMATS=", ".join(FORMATS),
        )
    return found


def _named(file: Path) -> tuple[str, str | None]:
    """Return the client that a file's name tells, and its split where it tells one."""
    name = next(file.name.removesuffix(suffix) for suffix in FORMATS if file.name.endswith(suffix))
    client, dot, part = name.rpartition(".")
    return (client, ALIASES[part]) if dot and part in ALIASES else (name, None)


def _check_once(files: Sequence[Path], named: Sequence[tuple[str, str | None]]) -> None:
    """Refuse two files of the same client and split, such as a file and its ``.gz``: each review would come twice."""
    first: dict[tuple[str, str | None], Path] = {}
    for file, who in zip(files, named, strict=True):
        if other := first.get(who):
            raise DataError(
                "{other} and {name} are both the {part} file of client {client!r}. Drop one of the two.",
                other=other,
                name=file.name,
                part=who[1] or "whole",
                client=who[0],
            )
        first[who] = file


def _one(file: Path, part: str | None, text: str, label: str, split: str, wanted: bool) -> Table:
    named = [split] if wanted and part is None else []
    table = load_table(file, [text, label, *named], [split, OPTED_IN], {})
    if OPTED_IN in table.columns:
        raise DataError(
            "{file} has a column {column!r}, which this reader would not heed. Read one table with a "
            "column of clients instead: read_table, in a configuration the reader 'table'.",
            file=file,
            column=OPTED_IN,
        )
    if part is None:
        return table
    if split in table.columns:
        raise DataError(
            "{file} has its split in its name and in the column {column!r}. Drop one of the two.",
            file=file,
            column=split,
        )
    return Table({**table.columns, split: Cells([part] * len(table.columns[text]))}, table.where)


def _joined(tables: Sequence[Table]) -> Table:
    """Return the tables one after the other; a row keeps the name of its file and line."""
    first = tables[0]
    columns: dict[str, list[Any]] = {name: [] for name in first.columns}
    places: list[tuple[Table, int]] = []
    for table in tables:
        if table.columns.keys() != columns.keys():
            raise DataError(
                "{place}: wanted a split in every file or in none; {other} is different.",
                place=table.where(0),
                other=first.where(0),
            )
        for name, values in columns.items():
            values.extend(table.columns[name].tolist())
        places += [(table, row) for row in range(len(next(iter(table.columns.values()))))]

    def where(row: int) -> object:
        table, own = places[row]
        return table.where(own)

    return Table({name: Cells(values) for name, values in columns.items()}, where)

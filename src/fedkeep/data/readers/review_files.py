"""A folder with a file of reviews, or of any short texts with labels, for each client."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fedkeep.core.errors import DataError
from fedkeep.core.files import expanded
from fedkeep.data.preparation import Raw, encoded_alone
from fedkeep.data.readers.cells import CLASS, SPLIT, TEXT, Cells, RawTable
from fedkeep.data.readers.load_table import load_table
from fedkeep.data.readers.many import check_once, files_of, joined, named, split_twice
from fedkeep.data.readers.opened_files import sha256
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
    files = files_of(expanded(folder), "file of reviews")
    check_once(files)
    who = [named(file) for file in files]
    column = "split" if split is None else split
    tables = [
        _one(file, part, text, label, column, wanted=split is not None)
        for file, (_, part) in zip(files, who, strict=True)
    ]
    table = joined(tables)
    clients = [
        client for (client, _), own in zip(who, tables, strict=True) for _ in range(len(own.columns[text]))
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


def _one(file: Path, part: str | None, text: str, label: str, split: str, wanted: bool) -> RawTable:
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
        raise split_twice(file, split)
    return RawTable({**table.columns, split: Cells([part] * len(table.columns[text]))}, table.where)

"""Tables of examples: CSV, TSV, JSON lines and Parquet with columns user, text (or features), label, split, time."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedkeep.core.errors import DataError, check_choice
from fedkeep.data.columns import check_max_length
from fedkeep.data.preparation import (
    About,
    Features,
    Labels,
    Plain,
    Raw,
    RawColumn,
    Texts,
    Times,
    encoded_alone,
)
from fedkeep.data.preparation.texts import USUAL
from fedkeep.data.readers.cells import (
    Table,
    features_of,
    single_of,
    splits_of,
    texts_of,
    times_of,
    truths_of,
    users_of,
    words_of,
)
from fedkeep.data.readers.delimited import check_different, delimited
from fedkeep.data.readers.files import (
    DATES,
    NAMING,
    check_names,
    damaged_parquet,
    existing,
    json_lines,
    sha256,
)
from fedkeep.data.text import CharVocabulary, WordVocabulary

TASKS = ("multiclass", "binary", "regression")
TEXT = "text"
"""The column of texts, by default."""
FORMATS = (".csv", ".csv.gz", ".tsv", ".tsv.gz", ".jsonl", ".jsonl.gz", ".parquet")


def raw_table(
    path: str | Path,
    *,
    user: str = "user",
    text: str | None = None,
    features: Sequence[str] | None = None,
    label: str = "label",
    split: str | None = None,
    time: str | None = None,
    opted_in: str | None = None,
    task: str | None = None,
    label_names: Sequence[str] | None = None,
    tokens: str = "char",
    vocabulary: CharVocabulary | WordVocabulary | int | None = None,
    max_length: int = 256,
) -> Raw:
    """Read a table with one example a row.

    Args:
        path: a ``.csv``, ``.tsv``, ``.jsonl`` (each also ``.gz``) or ``.parquet`` file.
        user: name of the column of client ids.
        split, time, opted_in: names of further columns: splits (train, valid, test; also validation, val, dev, eval),
            numbers, and true and false, or 1 and 0 (see `fedkeep.data.opt_out`). One that is named must be there. None:
            the column "split", "time" or "opted_in", where there is one. Without a split, call ``split_per_user`` on
            the result.
        text: name of the column of texts, which become the ragged column ``text``; by default "text".
        features: names of numeric columns instead of a text; together they become ``x``, float32.
        label: name of the column of labels. Integers stay as they are, and must be numbered closely: more than a
            thousand classes of which fewer than one in ten occurs are refused (give ``label_names`` then). Other
            labels are numbered in sorted order; with task "regression" they are numbers.
        task: "multiclass", "binary" or "regression"; None: inferred from the labels.
        label_names: the labels in the order of their numbers; any other label is an error.
        tokens: "char" or "word".
        vocabulary: a vocabulary, or the size of the one to build from training texts (default 256 characters,
            20,000 words).
        max_length: characters or words of a text to keep.

    Returns:
        Data whose ``meta["label_names"]`` tells what each label was and ``meta["source"]`` the file's sha256.

    Raises:
        DataError: the file is missing, empty, truncated or malformed, a column is missing, or a value is not
            what its column wants; the message names the file and the line.
    """
    if not isinstance(path, str | os.PathLike):
        raise DataError(
            f"Wanted the path of a file; got {type(path).__name__}. Write a table in memory into a file, or give its "
            f"columns to FederatedData.from_columns."
        )
    file = existing(Path(path))
    wanted, usual = columns_of(user, label, text, features, split=split, time=time, opted_in=opted_in)
    table = load_table(file, wanted, usual)
    return raw_from(
        table,
        user=user,
        text=text,
        features=features,
        label=label,
        split=split,
        time=time,
        opted_in=opted_in,
        task=task,
        label_names=label_names,
        tokens=tokens,
        vocabulary=vocabulary,
        max_length=max_length,
        meta={"name": file.name.split(".")[0], "source": {file.name: sha256(file)}},
    )


read_table = encoded_alone(raw_table)
"""Read a table as :func:`raw_table` does, and encode it."""


def columns_of(
    user: str, label: str, text: str | None, features: Sequence[str] | None, **others: str | None
) -> tuple[list[str], list[str]]:
    """Return the columns that there must be, and those of ``others`` that nobody named, under their usual names."""
    named = [name for name in others.values() if name is not None]
    wanted = [user, label, *(features if features is not None else [text or TEXT]), *named]
    return wanted, [usual for usual, name in others.items() if name is None]


def raw_from(
    table: Table,
    *,
    user: str,
    text: str | None,
    features: Sequence[str] | None,
    label: str,
    split: str | None,
    time: str | None,
    opted_in: str | None,
    task: str | None,
    label_names: Sequence[str] | None,
    tokens: str,
    vocabulary: CharVocabulary | WordVocabulary | int | None,
    max_length: int,
    meta: dict[str, Any],
) -> Raw:
    """Return a table's columns; the arguments are those of :func:`raw_table`."""
    if task is not None:
        check_choice("Wanted the task", task, TASKS, DataError)
    names = {"split": split, "time": time, "opted_in": opted_in}
    split, time, opted_in = (usual if name is None else name for usual, name in names.items())
    parts = splits_of(table, split) if split in table.columns else None
    columns: dict[str, RawColumn] = {"label": _labels(table, label, task, label_names)}
    if features is None:
        if label == (text or TEXT):
            raise DataError(
                f"The column of texts and that of labels are one, {label!r}: a model would read its answer. Name "
                f"another as text or as label."
            )
        columns["text"] = _texts(texts_of(table, text or TEXT), tokens, vocabulary, max_length)
    else:
        if not features:
            raise DataError("Wanted the names of numeric columns as features; got none.")
        if label in features:
            raise DataError(
                f"The features name the column of labels, {label!r}: a model would read its answer. Leave it out of "
                f"features."
            )
        given = {"text": text, "vocabulary": vocabulary}
        if both := [f"{name}={value!r}" for name, value in given.items() if value is not None]:
            raise DataError(f"Wanted text or features; got {', '.join(both)} and {features=}. Leave one out.")
        columns["x"] = Features(names=tuple(features), values=features_of(table, features))
    if time in table.columns:
        columns["time"] = Times(values=times_of(table, time))
    return Raw(
        client=users_of(table, user),
        split=parts,
        columns=columns,
        meta=meta,
        where=table.where,
        opted_in=truths_of(table, opted_in) if opted_in in table.columns else None,
        about=About(task=task) if task == "regression" else About(),
    )


def load_table(
    path: Path, wanted: Sequence[str], optional: Sequence[str], naming: Mapping[str, str] = NAMING
) -> Table:
    """Read the columns ``wanted``, and those of ``optional`` that there are; ``naming`` is as of ``check_names``."""
    suffix = next((s for s in FORMATS if path.name.endswith(s)), None)
    if suffix is None:
        raise DataError(f"Wanted a file that ends in one of {', '.join(FORMATS)}; got {path.name}.")
    if suffix == ".parquet":
        return _read_parquet(path, wanted, optional, naming)
    names = dict.fromkeys((*wanted, *optional))
    columns: dict[str, list[Any]] = {}
    numbers: list[int] = []
    json = suffix.startswith(".jsonl")
    for number, entry in (
        json_lines(path) if json else delimited(path, "\t" if suffix.startswith(".tsv") else ",")
    ):
        if not columns:
            check_names(path, entry, wanted, naming)
            columns = {name: [] for name in names if name in entry}
        if more := [name for name in optional if name in entry and name not in columns]:
            raise DataError(
                f"{path}, line {number}: there is a column {more[0]!r}, which line {numbers[0]} lacks. Give it in "
                f"every line or in none."
            )
        for name, values in columns.items():
            if name not in entry:
                raise DataError(
                    f"{path}, line {number}: wanted the column {name!r}; it has only {sorted(entry)}."
                )
            values.append(entry[name])
        numbers.append(number)
    if not numbers:
        raise DataError(f"The data file {path} holds no example, only a header. Fetch it again.")
    return Table(columns, lambda row: f"{path}, line {numbers[row]}")


def _read_parquet(
    path: Path, wanted: Sequence[str], optional: Sequence[str], naming: Mapping[str, str]
) -> Table:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(
            f"Reading {path.name} needs pyarrow. Install it: pip install 'fedkeep[parquet]'."
        ) from error
    try:
        file = pyarrow.parquet.ParquetFile(path)
        names = file.schema_arrow.names
        check_different(path, names)
        check_names(path, names, wanted, naming)
        chosen = [name for name in dict.fromkeys((*wanted, *optional)) if name in names]
        for name in chosen:
            if pyarrow.types.is_temporal(kind := file.schema_arrow.field(name).type):
                raise DataError(f"{path}: the column {name!r} holds dates or times, {kind}.{DATES}")
        table = file.read(columns=chosen)
        if not table.num_rows:
            raise DataError(f"The data file {path} holds no example, only a header. Fetch it again.")
        columns = {name: table[name].to_pylist() for name in table.column_names}
    except DataError:
        raise
    except Exception as error:  # pyarrow raises whatever its parsers raise on damaged bytes
        raise damaged_parquet(path, error) from error
    return Table(columns, lambda row: f"{path}, row {row}")


def _labels(table: Table, name: str, task: str | None, label_names: Sequence[str] | None) -> RawColumn:
    if task == "regression":
        return Plain(values=single_of(table, table.numbers(name)[:, None], [name])[:, 0])
    names = None if label_names is None else tuple(map(str, label_names))
    words = words_of(table, name, decimals=task is not None or names is not None)
    return Labels(values=words, names=names, task=task)


def _texts(
    texts: list[str], tokens: str, vocabulary: CharVocabulary | WordVocabulary | int | None, max_length: int
) -> Texts:
    check_max_length(max_length)
    if isinstance(vocabulary, CharVocabulary | WordVocabulary):
        return Texts(
            values=texts,
            tokens=vocabulary.kind,
            size=len(vocabulary),
            max_length=max_length,
            given=vocabulary,
        )
    check_choice("Wanted tokens", tokens, ("char", "word"), DataError)
    size = USUAL[tokens] if vocabulary is None else vocabulary
    return Texts(values=texts, tokens=tokens, size=size, max_length=max_length)

"""Tables of examples: CSV, TSV, JSON lines and Parquet with columns user, text (or features), label, split, time."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

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
from fedkeep.data.readers.cells import CLASS, DECIMAL_CLASS, ID, SPLIT, TEXT, TRUTH, Table
from fedkeep.data.readers.files import sha256
from fedkeep.data.readers.load import load_table
from fedkeep.data.text import CharVocabulary, WordVocabulary
from fedkeep.tasks import KINDS, of_numbers

TASKS = tuple(name for name, kind in KINDS.items() if kind.from_table)


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
            "Wanted the path of a file; got {got}. Write a table in memory into a file, or give its "
            "columns to FederatedData.from_columns.",
            got=type(path).__name__,
        )
    file = Path(path)
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
    wanted = [user, label, *(features if features is not None else [text or "text"]), *named]
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
    parts = table.each(split, SPLIT) if split in table.columns else None
    columns: dict[str, RawColumn] = {"label": _labels(table, label, task, label_names)}
    if features is None:
        if label == (text or "text"):
            raise DataError(
                "The column of texts and that of labels are one, {label!r}: a model would read its answer. "
                "Name another as text or as label.",
                label=label,
            )
        columns["text"] = _texts(table.each(text or "text", TEXT), tokens, vocabulary, max_length)
    else:
        if not features:
            raise DataError("Wanted the names of numeric columns as features; got none.")
        if label in features:
            raise DataError(
                "The features name the column of labels, {label!r}: a model would read its answer. Leave it "
                "out of features.",
                label=label,
            )
        given = {"text": text, "vocabulary": vocabulary}
        if both := [f"{name}={value!r}" for name, value in given.items() if value is not None]:
            raise DataError(f"Wanted text or features; got {', '.join(both)} and {features=}. Leave one out.")
        columns["x"] = Features(names=tuple(features), values=table.features(features))
    if time in table.columns:
        columns["time"] = Times(values=table.times(time))
    return Raw(
        client=table.each(user, ID),
        split=parts,
        columns=columns,
        meta=meta,
        where=table.where,
        opted_in=np.asarray(table.each(opted_in, TRUTH)) if opted_in in table.columns else None,
        about=About(task=task) if of_numbers(task) else About(),
    )


def _labels(table: Table, name: str, task: str | None, label_names: Sequence[str] | None) -> RawColumn:
    if of_numbers(task):
        return Plain(values=table.single(table.numbers(name)[:, None], [name])[:, 0])
    names = None if label_names is None else tuple(map(str, label_names))
    kind = CLASS if task is None and names is None else DECIMAL_CLASS
    return Labels(values=table.each(name, kind), names=names, task=task)


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

"""Tables of examples: CSV, TSV, JSON lines and Parquet with columns user, text (or features), label, split, time."""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedkeep.core.errors import DataError, did_you_mean
from fedkeep.data.columns import Column
from fedkeep.data.federated import FederatedData
from fedkeep.data.readers.files import existing, json_lines, lines, sha256
from fedkeep.data.splits import SPLITS
from fedkeep.data.text import CharVocabulary, WordVocabulary

ALIASES = {name: name for name in SPLITS} | {
    "validation": "valid",
    "val": "valid",
    "dev": "valid",
    "eval": "valid",
}
FORMATS = (".csv", ".csv.gz", ".tsv", ".tsv.gz", ".jsonl", ".jsonl.gz", ".parquet")


def read_table(
    path: str | Path,
    *,
    user: str = "user",
    text: str = "text",
    features: Sequence[str] | None = None,
    label: str = "label",
    split: str = "split",
    time: str = "time",
    task: str | None = None,
    label_names: Sequence[str] | None = None,
    tokens: str = "char",
    vocabulary: CharVocabulary | WordVocabulary | int | None = None,
    max_length: int = 256,
) -> FederatedData:
    """Read a table with one example a row into federated data.

    Args:
        path: a ``.csv``, ``.tsv``, ``.jsonl`` (each also ``.gz``) or ``.parquet`` file.
        user: name of the column of client ids. ``split`` (train, valid, test; also validation, val, dev, eval)
            and ``time`` (numbers) are optional; without a split, call ``split_per_user`` on the result.
        text: name of the column of texts, which become the ragged column ``text``.
        features: names of numeric columns instead of a text; together they become ``x``, float32.
        label: name of the column of labels. Integers stay as they are; other labels are numbered in sorted
            order; with task "regression" they are numbers.
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
    file = existing(Path(path))
    wanted = [user, label, *(features if features is not None else [text])]
    table = load_table(file, wanted, [split, time])
    return from_table(
        table,
        user=user,
        text=None if features is not None else text,
        features=features or (),
        label=label,
        split=split,
        time=time,
        task=task,
        label_names=label_names,
        tokens=tokens,
        vocabulary=vocabulary,
        max_length=max_length,
        meta={"name": file.name.split(".")[0], "source": {file.name: sha256(file)}},
    )


@dataclass(frozen=True)
class Table:
    """Columns as lists, and how to name a row of theirs in an error."""

    columns: Mapping[str, Sequence[Any]]
    where: Callable[[int], str]

    def numbers(self, name: str, kind: Callable[[Any], Any]) -> NDArray[Any]:
        """Return a column as numbers, or raise DataError at the first value that is none."""
        values = []
        for row, value in enumerate(self.columns[name]):
            try:
                if value is None or isinstance(value, bool):
                    raise ValueError
                values.append(kind(value))
            except (TypeError, ValueError):
                wanted = "an integer" if kind is int else "a number"
                raise DataError(
                    f"{self.where(row)}: wanted {wanted} in column {name!r}; got {value!r}."
                ) from None
        return np.asarray(values, dtype=np.int64 if kind is int else np.float64)


def from_table(
    table: Table,
    *,
    user: str,
    text: str | None,
    features: Sequence[str],
    label: str,
    split: str,
    time: str,
    task: str | None,
    label_names: Sequence[str] | None,
    tokens: str,
    vocabulary: CharVocabulary | WordVocabulary | int | None,
    max_length: int,
    meta: dict[str, Any],
) -> FederatedData:
    """Turn a table into federated data; the arguments are those of :func:`read_table`."""
    parts = splits_of(table, split) if split in table.columns else None
    labels, about = labels_of(table, label, task, label_names)
    meta = meta | about
    columns: dict[str, Column] = {"label": labels}
    if text is not None:
        texts = texts_of(table, text)
        training = [t for t, part in zip(texts, parts, strict=True) if part == "train"] if parts else texts
        vocabulary = _vocabulary(training, tokens, vocabulary)
        columns["text"] = vocabulary.encode_all(texts, max_length)
        meta |= {"vocabulary": vocabulary.to_dict(), "max_length": max_length}
    else:
        x = np.stack([table.numbers(name, float) for name in features], axis=1)
        _finite(table, x, list(features))
        columns["x"] = x.astype(np.float32)
        meta["features"] = list(features)
    if time in table.columns:
        seconds = table.numbers(time, float)
        _finite(table, seconds[:, None], [time])
        whole = bool((seconds == np.floor(seconds)).all())
        columns["time"] = seconds.astype(np.int64) if whole else seconds
    if columns["label"].dtype.kind == "f":  # type: ignore[union-attr]
        _finite(table, np.asarray(labels)[:, None], [label])
    return FederatedData.from_columns(np.asarray(_users(table, user)), columns, parts, meta)


def load_table(path: Path, wanted: Sequence[str], optional: Sequence[str]) -> Table:
    """Read the columns ``wanted``, and those of ``optional`` that there are, of a file of examples."""
    suffix = next((s for s in FORMATS if path.name.endswith(s)), None)
    if suffix is None:
        raise DataError(f"Wanted a file that ends in one of {', '.join(FORMATS)}; got {path.name}.")
    if suffix == ".parquet":
        return _read_parquet(path, wanted, optional)
    names = dict.fromkeys((*wanted, *optional))
    columns: dict[str, list[Any]] = {}
    numbers: list[int] = []
    json = suffix.startswith(".jsonl")
    for number, entry in json_lines(path) if json else _csv(path, "\t" if suffix.startswith(".tsv") else ","):
        if not columns:
            _check_names(path, entry, wanted)
            columns = {name: [] for name in names if name in entry}
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


def _csv(path: Path, delimiter: str) -> Any:
    header: list[str] = []
    reader = csv.reader((line + "\n" for _, line in lines(path)), delimiter=delimiter, strict=True)
    try:
        for cells in reader:
            if not header:
                header = [cell.removeprefix("\ufeff") for cell in cells]
            elif cells:
                if len(cells) != len(header):
                    raise DataError(
                        f"{path}, line {reader.line_num}: wanted {len(header)} cells, as in the header; "
                        f"got {len(cells)}."
                    )
                yield reader.line_num, dict(zip(header, cells, strict=True))
    except csv.Error as error:
        raise DataError(f"{path}, line {reader.line_num}: malformed ({error}). Check the quotes.") from error


def _read_parquet(path: Path, wanted: Sequence[str], optional: Sequence[str]) -> Table:
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
        _check_names(path, names, wanted)
        table = file.read(columns=[name for name in dict.fromkeys((*wanted, *optional)) if name in names])
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(
            f"{path} is truncated or no Parquet file: {str(error).splitlines()[0]} Fetch it again."
        ) from error
    if not table.num_rows:
        raise DataError(f"The data file {path} holds no example, only a header. Fetch it again.")
    return Table(
        {name: table[name].to_pylist() for name in table.column_names}, lambda row: f"{path}, row {row}"
    )


def _check_names(path: Path, names: Any, wanted: Sequence[str]) -> None:
    for name in wanted:
        if name not in names:
            raise DataError(
                f"{path} has no column {name!r}; it has {sorted(names)}.{did_you_mean(name, names)}"
            )


def _users(table: Table, name: str) -> list[str]:
    users = []
    for row, user in enumerate(table.columns[name]):
        if not isinstance(user, str | int) or isinstance(user, bool) or user == "":
            raise DataError(f"{table.where(row)}: wanted a user id, text or an integer; got {user!r}.")
        users.append(str(user))
    return users


def texts_of(table: Table, name: str) -> list[str]:
    """Return a column as texts, or raise DataError at the first value that is none."""
    for row, text in enumerate(table.columns[name]):
        if not isinstance(text, str):
            raise DataError(f"{table.where(row)}: wanted text in column {name!r}; got {text!r}.")
    return list(table.columns[name])


def splits_of(table: Table, name: str) -> list[str]:
    """Return a column as "train", "valid" and "test", or raise DataError at the first value that is none of them."""
    parts = []
    for row, part in enumerate(table.columns[name]):
        if not isinstance(part, str) or part not in ALIASES:
            raise DataError(
                f"{table.where(row)}: wanted the split 'train', 'valid' or 'test'; got {part!r}."
                f"{did_you_mean(str(part), ALIASES)}"
            )
        parts.append(ALIASES[part])
    return parts


def labels_of(
    table: Table, name: str, task: str | None, label_names: Sequence[str] | None
) -> tuple[NDArray[Any], dict[str, Any]]:
    """Return a column as labels, and what ``meta`` says of them; the arguments are those of :func:`read_table`."""
    if task == "regression":
        return table.numbers(name, float).astype(np.float32), {"task": task}
    values = table.columns[name]
    for row, value in enumerate(values):
        if value is None or value == "" or (isinstance(value, float) and not value.is_integer()):
            raise DataError(
                f"{table.where(row)}: wanted a class in column {name!r}, text or an integer; got {value!r}. "
                f"For numbers as labels say task='regression'."
            )
    words = [str(int(value)) if isinstance(value, float | bool) else str(value) for value in values]
    if label_names is None and all(word.isascii() and word.removeprefix("-").isdigit() for word in words):
        numbers = [int(word) for word in words]
        for row, number in enumerate(numbers):
            if number < 0:
                raise DataError(f"{table.where(row)}: wanted a label of 0 or more; got {number}.")
        names = [str(number) for number in range(max(numbers) + 1)]
    else:
        names = [str(word) for word in label_names] if label_names is not None else sorted(set(words))
        position = {word: number for number, word in enumerate(names)}
        for row, word in enumerate(words):
            if word not in position:
                raise DataError(
                    f"{table.where(row)}: label {word!r} is not one of label_names, {names}.{did_you_mean(word, names)}"
                )
        numbers = [position[word] for word in words]
    return np.asarray(numbers, dtype=np.int64), {
        "task": task,
        "classes": max(2, len(names)),
        "label_names": names,
    }


def _vocabulary(
    texts: list[str], tokens: str, vocabulary: CharVocabulary | WordVocabulary | int | None
) -> CharVocabulary | WordVocabulary:
    if isinstance(vocabulary, CharVocabulary | WordVocabulary):
        return vocabulary
    if tokens == "char":
        return CharVocabulary.from_texts(texts, 256 if vocabulary is None else vocabulary)
    if tokens == "word":
        return WordVocabulary.from_texts(texts, 20_000 if vocabulary is None else vocabulary)
    raise DataError(f"Wanted tokens 'char' or 'word'; got {tokens!r}.")


def _finite(table: Table, values: NDArray[Any], names: list[str]) -> None:
    wrong = np.argwhere(~np.isfinite(values))
    if len(wrong):
        row, column = wrong[0]
        raise DataError(
            f"{table.where(int(row))}: column {names[column]!r} holds {values[row, column]}. Drop such rows or fill in "
            f"a number."
        )

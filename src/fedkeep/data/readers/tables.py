"""Tables of examples: CSV, TSV, JSON lines and Parquet with columns user, text (or features), label, split, time."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fedkeep.core.arguments import telling_arguments
from fedkeep.core.errors import ConfigError, DataError, check_choice
from fedkeep.core.files import expanded
from fedkeep.data.columns import check_max_length
from fedkeep.data.federated import FederatedData
from fedkeep.data.ids import as_id
from fedkeep.data.preparation import (
    About,
    Features,
    KeyColumn,
    Labels,
    LabelSets,
    Raw,
    RawColumn,
    Series,
    Target,
    Targets,
    Texts,
    Times,
    encoded_alone,
)
from fedkeep.data.preparation.contract import TOKENS
from fedkeep.data.preparation.texts import USUAL, AnyVocabulary
from fedkeep.data.readers.cells import (
    CLASS,
    DECIMAL_CLASS,
    ID,
    SPLIT,
    TEXT,
    TRUTH,
    Cells,
    Nobody,
    Only,
    RawTable,
    labels_between,
)
from fedkeep.data.readers.kinds import ColumnFaults, Field, field_of, lacking, numbers_of, times_of
from fedkeep.data.readers.load_table import frame_table, load_table, other_columns
from fedkeep.data.readers.many import check_once, files_of, is_of_many, joined, load_many, named
from fedkeep.data.readers.opened_files import digest_of, naming_of, sha256
from fedkeep.data.readers.series import is_series, series_of
from fedkeep.data.subsets import drawn
from fedkeep.data.text import UnicodeWords
from fedkeep.tasks import KINDS, Kind, listed, listed_for_cells, of_numbers, row_of, usual_kind

TASKS = tuple(name for name, kind in KINDS.items() if kind.from_table)
LARGEST = float(np.finfo(np.float32).max)
MOST_CLASSES = 20
"""More different numbers than this as labels are looked at: they may be numbers to predict."""


def raw_table(
    path: str | Path | Any,
    *,
    user: str | None = "user",
    text: str | None = None,
    features: Sequence[str] | None = None,
    item: str | None = None,
    label: str | Sequence[str] = "label",
    label_separator: str = "|",
    split: str | None = None,
    time: str | None = None,
    opted_in: str | None = None,
    task: str | None = None,
    label_names: Sequence[str] | None = None,
    tokens: str | None = None,
    vocabulary: AnyVocabulary | int | None = None,
    max_length: int = 256,
    standardise: bool = True,
    kinds: Mapping[str, str] | None = None,
    decimal: str | None = None,
    test_path: str | Path | None = None,
    skip_unlabelled: bool = False,
    clients: int | None = None,
) -> Raw:
    """Read a table with one example a row.

    Args:
        path: a ``.csv``, ``.tsv``, ``.jsonl`` (each also ``.gz``), ``.parquet``, ``.arrow``, ``.feather``, ``.xlsx`` or RecBole's ``.inter`` file; a folder of such files or a
            pattern such as ``logs/*.csv``, one file a client; or a data frame of pandas, polars or pyarrow.
        user: name of the column of client ids. Of one file a client: where no file has it, a client is the file's name
            without its ending, and ``NAME.train.csv`` and ``NAME.test.csv`` are a client's splits. None: rows are
            nobody's, and a partition deals them.
        split, time, opted_in: names of further columns: splits (train, valid, test; also validation, val, dev, eval),
            numbers, and true and false, or 1 and 0 (see `fedkeep.data.opt_out`). One that is named must be there. None:
            the column "split", "time" or "opted_in", where there is one. Without a split, call ``split_per_user`` on
            the result.
        text: name of the column of texts, which become the ragged column ``text``; by default "text".
        features: names of columns instead of a text; together they become ``x``, float32. Each holds numbers, truth
            values (yes and no, 1 and 0), dates, which become days since 1970, or categories, of which each becomes a
            column of 0 and 1. A cell may be empty: a number is then its feature's mean, and a further column says so.
            Or each holds series: in a cell a list of numbers, as JSON lines and Parquet have them, or of lists of as many
            numbers at each step. ``x`` is then ragged; several columns are channels of one series.
        item: name of a column of whole numbers that name things, e.g. films, which are numbered in their order; then neither a
            text nor features have to be named.
        label: name of the column of labels. Integers stay as they are, and must be numbered closely: more than a
            thousand classes of which fewer than one in ten occurs are refused (give ``label_names`` then). Other
            labels are numbered in sorted order; with task "regression" they are numbers. With task "multi_label" a cell
            holds any number of labels, or a list of them; or give the names of several columns of 1 and 0, one a label. Several
            columns of numbers are several outputs.
        label_separator: what stands between the labels of a cell.
        task: "multiclass", "binary", "regression", "multi_label" or "multi_output", which is a regression with several
            outputs; None: inferred from the labels. More than 20
            different numbers are a regression where some are written with a decimal point; of so many whole ones you
            must say it. Beside an item alone any numbers are ratings, which are a regression.
        label_names: the labels in the order of their numbers; any other label is an error.
        tokens: what texts are cut into: None: "unicode_words", which are hashed, so that no word is counted or told;
            others as of `Rules`.
        vocabulary: a vocabulary, or the number of ids; of "char", "word" and "token" the most frequent of training
            texts get one. None: 16,384 hashed words, 256 characters, 20,000 words.
        max_length: characters or words of a text, or steps of a series, to keep.
        standardise: bring numeric features, the channels of series, and numbers to predict, to mean 0 and standard deviation 1 over the rows to
            train on (without a split over all); metrics and predictions are in the labels' own units.

        kinds: of features that are not to be found by looking: "number", "truth", "category", "date", or
            "date:%d/%m/%Y" with the form of dates as ``datetime.strptime`` names it; "series" where a text such as
            "1.0 2.5 3.1" or "[1.0, 2.5]" is one.
        decimal: the mark before decimals in texts, "." or ","; None: found by looking. The other one, spaces and
            apostrophes may stand between thousands, and a unit that all cells share, such as %, is left out.
        test_path: a file, folder or pattern of further rows, which are those of the split test. Rows of ``path`` that
            say no split are trained on.
        skip_unlabelled: leave out rows whose label is missing, which else are an error.
        clients: read the rows of so many clients alone, drawn by their ids, which are read first: of CSV, JSON lines and
            Parquet no other row, and of one file a client no other file, is kept in memory. What is found by looking, such as
            kinds, is found in these rows. None: all.

    Returns:
        Data whose ``meta["label_names"]`` tells what each label was and ``meta["source"]`` the file's sha256.

    Raises:
        DataError: the file is missing, empty, truncated or malformed, a column is missing, or a value is not
            what its column wants; the message names the file and the line.
    """
    import pyarrow

    if item is not None and text is None and features is None:
        features = []
    wanted, usual = columns_of(user, label, text, features, split=split, time=time, opted_in=opted_in)
    wanted += [] if item is None else [item]
    frame = not isinstance(path, str | os.PathLike)
    given = {"label": label, "text": text or "text" if features is None else None, "features": features}
    others = {"split": split, "time": time, "opted_in": opted_in}
    naming = naming_of({"client" if frame else "user": user, **given, **others}, frame=frame)
    if isinstance(path, str | os.PathLike):
        numbers = _numbers_among(features, kinds, decimal) if test_path is None else None
        places = [expanded(place) for place in (path, test_path) if place is not None]
        only = None if clients is None else _drawn(places, user, naming, clients)
        table, source = _loaded(places[0], wanted, usual, user, split or "split", naming, numbers, only)
        if test_path is not None:
            tests, more = _loaded(places[1], wanted, usual, user, split or "split", naming, None, only)
            table, source = _with_tests(table, tests, split or "split"), source | more
        meta = {"name": expanded(path).name.split(".")[0], "source": source}
    else:
        if test_path is not None:
            raise DataError("test_path is of files; of data frames give one with a column of splits.")
        table, meta = frame_table(path, wanted, usual, naming), {"name": "frame"}
        if clients is not None:
            column = named_user(user)
            only = Only(column, drawn(set(table.read(column, ID)[0]), clients))
            table = table.only(only.rows(table.columns[only.column]))
    if decimal is not None:
        check_choice("Wanted as decimal, the mark before decimals,", decimal, (".", ","), DataError)
        table = replace(table, decimal=decimal)
    made = raw_from(
        table,
        user=user,
        text=text,
        features=features,
        item=item,
        label=label,
        label_separator=label_separator,
        split=split,
        time=time,
        opted_in=opted_in,
        task=task,
        label_names=label_names,
        tokens=tokens,
        vocabulary=vocabulary,
        max_length=max_length,
        kinds=kinds,
        standardise=standardise,
        skip_unlabelled=skip_unlabelled,
        meta=meta,
    )
    del table
    pyarrow.default_memory_pool().release_unused()  # else it keeps as much as the file's texts
    return made


read_table = telling_arguments(name="read_table")(encoded_alone(raw_table))
"""Read a table as :func:`raw_table` does, and encode it."""


def data_of_frame(
    frame: Any, client: str, label: str | Sequence[str], options: dict[str, Any]
) -> FederatedData:
    """Return what ``FederatedData.from_frame`` does; its arguments and errors."""
    if "user" in options:
        other_columns(
            frame, names_in(options["user"]), (), naming_of({"client": options["user"]}, frame=True)
        )
        raise ConfigError(
            "A data frame's column of clients is named as client: client={user!r}; got user={user!r}.",
            user=options["user"],
        )
    if not {"features", "text"} & options.keys():
        others = {options.get(name) or name for name in ("split", "time", "opted_in")}
        naming = naming_of({"client": client, "label": label}, frame=True)
        options["features"] = other_columns(frame, [client, *names_in(label)], others, naming)
    return read_table(frame, user=client, label=label, **options)


def _labelled(table: RawTable, labels: Sequence[str]) -> RawTable:
    """Return the rows in which no label is missing.

    Raises:
        DataError: there are none.
    """
    there = np.flatnonzero(~np.any([lacking(table, name) for name in labels], axis=0))
    if not len(there):
        raise DataError("No row has a label in {labels}.", labels=" and ".join(map(repr, labels)))
    return table.only(there)


def _drawn(places: Sequence[Path], user: str | None, naming: Mapping[str, str], clients: int) -> Only:
    """Return so many clients of those in some places, whose ids alone are read; clients of files are the files' names."""
    column, ids = named_user(user), set[str]()
    for place in places:
        files = files_of(place) if is_of_many(place) else [place]
        if is_of_many(place) and column == "user" and column not in load_table(files[0], None).columns:
            ids.update(as_id(named(file)[0]) for file in files)
        else:
            ids.update(*(_ids_in(file, column, naming) for file in files))
    return Only(column, drawn(ids, clients))


def _ids_in(file: Path, column: str, naming: Mapping[str, str]) -> set[str]:
    """Return the clients in a file, no row of which stays in memory; DataError names one that is no id."""
    seen = Nobody(column)
    try:
        load_table(file, [column], [], naming, only=seen)
    except DataError:
        load_table(file, [column], [], naming).read(column, ID)  # which names the row
        raise
    return seen.ids


def named_user(user: str | None) -> str:
    """Return the column of clients, or raise DataError where there is none to choose from."""
    if user is None:
        raise DataError("clients wants a column of clients to choose from; got user=None.")
    return user


def _loaded(
    place: Path,
    wanted: Sequence[str],
    usual: Sequence[str],
    user: str | None,
    split: str,
    naming: Mapping[str, str],
    numbers: Sequence[str] | None = None,
    only: Only | None = None,
) -> tuple[RawTable, dict[str, str]]:
    """Return a file's table, or those of many files as one, and the sha256 of what was read by its name."""
    if not is_of_many(place):
        return load_table(place, wanted, usual, naming, numbers, only), {place.name: sha256(place)}
    files = files_of(place)
    common = Path(os.path.commonpath([file.parent for file in files]))
    if only is not None and only.column == "user" and "user" not in load_table(files[0], None).columns:
        check_once(files)
        files, only = [file for file in files if as_id(named(file)[0]) in only.ids], None
    table = load_many(files, wanted, usual, user, split, naming, only)
    return table, {common.name: digest_of(common, files)}


def _numbers_among(
    features: Sequence[str] | None, kinds: Mapping[str, str] | None, decimal: str | None
) -> list[str]:
    """Return the features that are numbers if their cells look so."""
    chosen = [] if decimal == "," else names_in(features or ())
    return [name for name in chosen if (kinds or {}).get(name, "number") == "number"]


def _with_tests(table: RawTable, tests: RawTable, split: str) -> RawTable:
    """Return two tables as one: the rows of the first train unless they say their split, those of the second test."""
    both = []
    for one, part in ((table, "train"), (tests, "test")):
        rows = len(next(iter(one.columns.values())))
        known = one.columns[split] if split in one.columns and part == "train" else Cells([part] * rows)
        both.append(replace(one, columns={**one.columns, split: known}))
    return joined(both)


def columns_of(
    user: str | None,
    label: str | Sequence[str],
    text: str | None,
    features: Sequence[str] | None,
    **others: str | None,
) -> tuple[list[str], list[str]]:
    """Return the columns that there must be, and those of ``others`` that nobody named, under their usual names."""
    named = [name for name in others.values() if name is not None]
    wanted = [
        *([] if user is None else [user]),
        *names_in(label),
        *names_in(text or "text" if features is None else features),
        *named,
    ]
    return wanted, [usual for usual, name in others.items() if name is None]


def names_in(names: str | Sequence[str]) -> list[str]:
    """Return the names of columns, of which one alone may stand as a text."""
    return [names] if isinstance(names, str) else list(names)


def raw_from(
    table: RawTable,
    *,
    user: str | None,
    text: str | None,
    features: Sequence[str] | None,
    label: str | Sequence[str],
    label_separator: str,
    split: str | None,
    time: str | None,
    opted_in: str | None,
    task: str | None,
    label_names: Sequence[str] | None,
    tokens: str | None,
    vocabulary: AnyVocabulary | int | None,
    max_length: int,
    standardise: bool,
    meta: dict[str, Any],
    kinds: Mapping[str, str] | None = None,
    item: str | None = None,
    inputs: Mapping[str, RawColumn] | None = None,
    skip_unlabelled: bool = False,
) -> Raw:
    """Return a table's columns; the arguments are those of :func:`raw_table`, and ``inputs`` come in place of text and features."""
    if task is not None:
        check_choice("Wanted the task", task, TASKS, DataError)
    if skip_unlabelled:
        table = _labelled(table, names_in(label))
    names = {"split": split, "time": time, "opted_in": opted_in}
    split, time, opted_in = (usual if name is None else name for usual, name in names.items())
    parts = table.repeated(split, SPLIT) if split in table.columns else None
    read = names_in(text or "text" if features is None else features) if inputs is None else []
    if answers := [name for name in names_in(label) if name in (*read, item)]:
        raise DataError(
            "The column {label!r} is named as {input} and as label: a model would read its answer. Name another.",
            label=answers[0],
            input="item" if answers[0] == item else "text" if features is None else "features",
        )
    alone = item is not None and not read and not inputs
    if (
        task is None
        and label_names is None
        and any(_holds_numbers(table, name, alone) for name in names_in(label))
    ):
        task = usual_kind(whole=False).name
    faults = ColumnFaults()
    columns: dict[str, RawColumn] = {
        "label": faults.within(lambda: _labels(table, label, label_separator, task, label_names, standardise))
    }
    if item is not None:
        columns["item"] = faults.within(lambda: _keys(table, item))
    if inputs is not None:
        columns |= inputs
    elif features is None:
        columns["text"] = texts_of(table.each(text or "text", TEXT), tokens, vocabulary, max_length)
    else:
        if not features and item is None:
            raise DataError("Wanted the names of numeric columns as features; got none.")
        given = {"text": text, "vocabulary": vocabulary}
        if both := [f"{name}={value!r}" for name, value in given.items() if value is not None]:
            raise DataError(
                "Wanted text or features; got {got} and features={features!r}. Leave one out.",
                got=", ".join(both),
                features=features,
            )
        if unknown := [name for name in kinds or {} if name not in read]:
            raise DataError(
                "kinds names the column {column!r}, which is no feature; features are {features}.",
                column=unknown[0],
                features=read,
            )
        x: Features | Series | None = None
        if any(is_series(table, name, (kinds or {}).get(name)) for name in read):
            x = faults.within(
                lambda: series_of(table, read, kinds or {}, max_length=max_length, standardise=standardise)
            )
        elif read:
            x = features_of(table, read, kinds or {}, faults, standardise=standardise)
        if x is not None:
            columns["x"] = x
    if time in table.columns:
        columns["time"] = faults.within(lambda: Times(values=times_of(table, time)))
    rows = len(columns["label"] or ())
    client = ["nobody"] * rows if user is None else faults.within(lambda: table.repeated(user, ID))
    faults.check()
    return Raw(
        client=client,
        split=parts,
        columns=columns,
        meta=meta,
        where=table.where,
        opted_in=np.asarray(table.each(opted_in, TRUTH)) if opted_in in table.columns else None,
        about=_about_numbers(task if isinstance(label, str) else row_of(task)),
    )


def features_of(
    table: RawTable,
    names: Sequence[str],
    kinds: Mapping[str, str],
    faults: ColumnFaults | None = None,
    *,
    standardise: bool = True,
) -> Features | None:
    """Return columns as features; None where some cannot be, which ``faults`` then has.

    Raises:
        DataError: as of :func:`field_of`, of all columns at once, where there are no ``faults`` to collect errors in.
    """
    own = ColumnFaults() if faults is None else faults
    fields: dict[str, Field] = {}
    values = np.empty(
        (len(table.columns[names[0]]), len(names)), order="F"
    )  # whoever reads on, reads columns
    for place, name in enumerate(names):
        one = own.within(lambda n=name: field_of(table, n, kinds.get(n), may_be_empty=True))  # type: ignore[misc]
        if one is None:
            continue
        values[:, place] = one.values
        if max(np.fmax.reduce(one.values), -np.fmin.reduce(one.values)) > LARGEST:  # NaN is in neither
            own.within(lambda v=one.values, n=name: table.single(np.nan_to_num(v)[:, None], [n]))  # type: ignore[misc]
        fields[name] = replace(one, values=np.empty(0))  # there are tables of half of the memory
    if faults is None:
        own.check()
    if len(fields) < len(names):
        return None
    return Features(
        names=tuple(names),
        values=values,
        kinds={name: one.declared for name, one in fields.items() if one.declared != "number"},
        levels={name: one.levels for name, one in fields.items() if one.kind == "category"},
        standardise=standardise,
    )


def _keys(table: RawTable, name: str) -> KeyColumn:
    """Return a column of whole numbers that name things."""
    found = table.times(name)
    if found.dtype.kind == "f":
        row = int(np.argmax(found % 1 != 0))
        raise DataError(
            "{place}: wanted a whole number in the column of items {column!r}; got {got}.",
            place=table.where(row),
            column=name,
            got=found[row],
        )
    return KeyColumn(values=found.astype(np.int64))


def _holds_numbers(table: RawTable, label: str, ratings: bool) -> bool:
    """Tell whether a column of labels holds numbers to predict: many different ones, written with a decimal point.

    Args:
        ratings: whether they are of items alone; then any numbers are.

    Raises:
        DataError: there are many, all of them whole: they may count something, or be numbers of classes.
    """
    different = table.columns[label].different()[0]
    cells = [cell for cell in different if cell not in (None, "")]
    try:
        numbers = np.unique(numbers_of(replace(table, columns={label: Cells(different)}), label))
    except (DataError, UnicodeError):
        return False
    if ratings or len(numbers) <= MOST_CLASSES or not np.isfinite(numbers).all():
        return ratings and bool(np.isfinite(numbers).all())
    if any(isinstance(cell, float) or not str(cell).strip().lstrip("+-").isdigit() for cell in cells):
        return True
    raise DataError(
        "{place}: the column {column!r} holds {count:,} different whole numbers, from {least:g} to {most:g}. Are they "
        "numbers or classes? Say which: [data] task = {tasks}.",
        place=table.where(0),
        column=label,
        count=len(numbers),
        least=numbers[0],
        most=numbers[-1],
        tasks=listed_for_cells(),
    )


def _labels(
    table: RawTable,
    name: str | Sequence[str],
    separator: str,
    task: str | None,
    label_names: Sequence[str] | None,
    standardise: bool,
) -> RawColumn:
    kind = KINDS.get(str(task if isinstance(name, str) else row_of(task)))
    advice = (
        f" With task = {task!r} a label is a number: correct it, or say task = {usual_kind(whole=True).name!r} for labels "
        f"that are classes, in a configuration under [data]."
    )
    if kind is not None and kind.several and not kind.whole and name:
        return _targets(table, names_in(name), standardise, not kind.standardised, advice)
    if not isinstance(name, str):
        if not name or kind is None or label_names is not None:
            raise DataError(
                "Several columns as label are a row of labels of an example, each by its column's name, and want a task "
                "of such: {tasks}; got the columns {columns}, task={task!r} and label_names={label_names!r}.",
                tasks=listed(kind for kind in KINDS.values() if kind.from_table and row_of(kind.name)),
                columns=list(name),
                task=task,
                label_names=label_names,
            )
        return _columns_of_labels(table, tuple(name), kind)
    if kind is not None and not kind.whole:
        values = numbers_of(table, name, advice)
        table.single(values[:, None], [name])
        return Target(values=values, standardise=standardise, in_units=not kind.standardised)
    names = None if label_names is None else tuple(map(str, label_names))
    if kind is not None and kind.sets:
        if not separator:
            raise DataError("Wanted what stands between labels as label_separator; got an empty text.")
        return LabelSets(values=table.each(name, labels_between(separator)), names=names, task=task)
    cells = CLASS if task is None and names is None else DECIMAL_CLASS
    return Labels(values=table.repeated(name, cells), names=names, task=task)


def _targets(
    table: RawTable, names: Sequence[str], standardise: bool, in_units: bool, advice: str
) -> Targets:
    """Return columns of numbers to predict; DataError of all bad ones at once."""
    faults = ColumnFaults()
    columns = [faults.within(lambda n=name: numbers_of(table, n, advice)) for name in names]  # type: ignore[misc]
    faults.check()
    values = np.stack(columns, axis=1)
    table.single(values, names)
    return Targets(names=tuple(names), values=values, standardise=standardise, in_units=in_units)


def _about_numbers(task: str | None) -> About:
    """Return what is known beforehand where a task's labels are numbers; of others their column says it."""
    return About(task=task) if of_numbers(task) else About()


def _columns_of_labels(table: RawTable, names: tuple[str, ...], kind: Kind) -> LabelSets:
    """Return labels of which each has a column of 1 and 0."""
    there = np.stack([table.each(name, TRUTH) for name in names], axis=1)
    return LabelSets(
        values=[tuple(name for name, yes in zip(names, row, strict=True) if yes) for row in there.tolist()],
        names=names,
        task=kind.name,
    )


def texts_of(
    texts: list[str], tokens: str | None, vocabulary: AnyVocabulary | int | None, max_length: int
) -> Texts:
    """Return a column of texts; the arguments are those of :func:`raw_table`."""
    check_max_length(max_length)
    if isinstance(vocabulary, AnyVocabulary):
        return Texts(
            values=texts,
            tokens=vocabulary.kind,
            size=len(vocabulary),
            max_length=max_length,
            given=vocabulary,
        )
    tokens = tokens or UnicodeWords.kind
    check_choice("Wanted tokens", tokens, TOKENS, DataError)
    size = USUAL[tokens] if vocabulary is None else vocabulary
    return Texts(values=texts, tokens=tokens, size=size, max_length=max_length)

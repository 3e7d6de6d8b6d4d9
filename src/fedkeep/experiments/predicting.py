"""Predictions for the rows of a table by exported models: what ``fedkeep predict`` does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedkeep.core.errors import ConfigError, MethodError, RunError, did_you_mean
from fedkeep.core.records import by_key
from fedkeep.data.ids import as_id
from fedkeep.data.preparation.label_columns import LabelCode, one_form
from fedkeep.data.readers.cells import DECIMAL_CLASS, ID, RawTable
from fedkeep.data.readers.kinds import field_of, lacking
from fedkeep.data.readers.load_table import load_table
from fedkeep.data.readers.tables import names_in
from fedkeep.engines.use import Predicted, predictions, said_tasks, takes_of
from fedkeep.experiments.new_rows import WANTED, examples_in, read_by
from fedkeep.experiments.personalize.exported import Exported
from fedkeep.tasks import Task


def predict_table(
    folder: Path | Exported,
    file: Path,
    *,
    client: str | None = None,
    user: str | None = None,
    shared: bool = False,
) -> list[Predicted]:
    """Return predictions for a table's rows, in their order.

    Args:
        folder: what ``fedkeep export`` wrote, or that opened.
        file: a table with the columns that the models read, in a format that ``read_table`` reads.
        client: whose model predicts every row; None: that of the row's user.
        user: the column of users; by default the one that the configuration names.
        shared: rows of users without a model here are predicted by the shared part alone; all are where the table has
            no column of users.

    Raises:
        RunError: the folder holds no models, none of a user, or is damaged.
        ConfigError: the models come from a run without a configuration.
        DataError: the table is malformed, lacks a column, or a value does not fit it.
        MethodError: the shared part cannot predict alone, or there is a task that gives neither classes nor numbers.
    """
    exported = folder if isinstance(folder, Exported) else Exported(folder)
    config, clients, encoding = exported.config, list(exported.clients), exported.encoding
    takes = takes_of(
        exported.shared() if shared else exported.model(clients[0] if client is None else client)
    )
    options = config.data.options
    wanted = read_by(
        takes, encoding, text=options.get("text"), series=names_in(options.get("features") or ())
    )
    if "image" in wanted:
        raise ConfigError(
            "These models take images, and a table has none. Predict them in Python: fedkeep.load_run(RUN).predict(CLIENT, "
            "{'image': array})."
        )
    column = user or str(config.data.options.get("user", "user"))
    by_row = client is None
    must = [column] if by_row and not shared else [user] if by_row and user else []
    names = [name for own in wanted.values() for name in own]
    naming = dict.fromkeys(names, WANTED) | {
        column: " Name the column of users: --user COLUMN; or --client ID, whose model predicts every row."
    }
    table = load_table(file, [*names, *must], [column] if by_row else [], naming)
    if decimal := config.data.options.get("decimal"):
        table = replace(table, decimal=str(decimal))
    data = examples_in(table, encoding, wanted)
    owners = _owners(table, column, len(data.columns[next(iter(wanted))]), client)
    if not shared:
        _check_known(table, owners, exported)
    known = set(clients)
    rows_of = by_key((owner if owner in known else None, row) for row, owner in enumerate(owners))
    found: dict[int, Predicted] = {}
    for owner, rows in rows_of.items():
        model = exported.shared() if owner is None else exported.model(owner)
        for row, said in zip(rows, predictions(model, data, encoding, rows), strict=True):
            found[row] = Predicted(owner, said)
    return [found[row] for row in range(len(owners))]


def as_json(row: Predicted) -> dict[str, Any]:
    """Return a row's prediction as JSON: ``client``, ``prediction``, ``probabilities``; of several tasks by their names."""
    said: dict[str, Any] = {"client": row.client}
    for each in row.tasks:
        named = (
            dict(zip(each.names, each.value, strict=True))
            if isinstance(each.value, list) and each.names
            else None
        )
        own = {"prediction": each.value if named is None else named} | (
            {"probabilities": each.probabilities} if each.probabilities else {}
        )
        said |= own if each.task is None else {each.task: own}
    return said


@dataclass(frozen=True)
class Scored:
    """How predictions compare with a table's labels.

    Attributes:
        metric: ``accuracy``, or ``rmse`` of numbers.
        value: over rows with a label.
        rows: how many these are.
        label: the column, where there are several.
    """

    metric: str
    value: float
    rows: int
    label: str = ""


def scored(exported: Exported, file: Path, found: Sequence[Predicted]) -> list[Scored]:
    """Compare predictions with the labels of the table that they are of; empty where it has none.

    Rows without a label are left out, and models of several labels a row.

    Raises:
        DataError: a label is no number, where numbers are predicted.
    """
    column, tasks = exported.config.data.options.get("label", "label"), said_tasks(exported.encoding)
    if len(tasks) != 1 or tasks[0].kind.sets:
        return []
    names = [column] if isinstance(column, str) else list(column)
    table = load_table(file, [], names)
    if decimal := exported.config.data.options.get("decimal"):
        table = replace(table, decimal=str(decimal))
    several = tasks[0].kind.several
    each = [
        _scored(
            exported, table, name, tasks[0], [row.tasks[0].value for row in found], k if several else None
        )
        for k, name in enumerate(names)
        if name in table.columns
    ]
    return [one for one in each if one is not None]


def _scored(
    exported: Exported, table: RawTable, column: str, task: Task, values: Sequence[Any], output: int | None
) -> Scored | None:
    """Return how values compare with a column of labels, of several outputs that of this number; None where it is empty."""
    there = np.flatnonzero(~lacking(table, column))
    said = [values[row] if output is None else values[row][output] for row in there.tolist()]
    if not said:
        return None
    labelled = table.only(there)
    if not task.kind.whole:
        gap = np.asarray(said, float) - field_of(labelled, column, "number").values
        return Scored("rmse", float(np.sqrt(np.mean(gap**2))), len(there), "" if output is None else column)
    words = labelled.each(column, DECIMAL_CLASS)
    code = exported.encoding.columns.get(task.label)
    whole = isinstance(code, LabelCode) and code.integers
    right = [_form(word, whole) == _form(str(value), whole) for word, value in zip(words, said, strict=True)]
    return Scored("accuracy", float(np.mean(right)), len(there))


def _form(label: str, whole: bool) -> str:
    """Return the form in which labels are compared: "07" is 7 where whole numbers are labels."""
    return str(int(label)) if whole and label.isdigit() else one_form(label)


def _owners(table: RawTable, column: str, rows: int, client: str | None) -> list[str | None]:
    """Return whose model each row asks for; None: nobody's."""
    if client is not None:
        return [as_id(client)] * rows
    return [*table.each(column, ID)] if column in table.columns else [None] * rows


def _check_known(table: RawTable, owners: Sequence[str | None], exported: Exported) -> None:
    """Raise RunError where a row's user has no model."""
    known = exported.clients
    unknown = {owner: row for row, owner in reversed([*enumerate(owners)]) if owner not in known}
    if unknown:
        owner, row = min(unknown.items(), key=lambda pair: pair[1])
        plural = "s" if len(unknown) > 2 else ""
        more = f", nor of {len(unknown) - 1} other user{plural} of the table" if len(unknown) > 1 else ""
        advice = exported.advice
        try:
            exported.shared()
        except (ConfigError, MethodError):
            pass
        else:
            advice += "; or say --shared to predict such rows by the shared part alone"
        raise RunError(
            "{place}: {exported} holds no model of {owner!r}{more}.{near} {advice}.",
            place=table.where(row),
            exported=exported.name,
            owner=owner,
            more=more,
            near=did_you_mean(str(owner), known),
            advice=advice,
        )

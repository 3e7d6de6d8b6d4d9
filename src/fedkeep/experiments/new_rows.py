"""New rows of a table or a data frame, in the numbers that a run's models read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from fedkeep.core.net import Takes
from fedkeep.data import FederatedData
from fedkeep.data.alike import check_codes
from fedkeep.data.preparation import Encoding
from fedkeep.data.preparation.feature_columns import FeatureCode
from fedkeep.data.preparation.numbers import PlainCode
from fedkeep.data.preparation.series_columns import SeriesCode
from fedkeep.data.preparation.texts import TextCode
from fedkeep.data.readers.cells import TEXT, RawTable
from fedkeep.data.readers.kinds import SERIES
from fedkeep.data.readers.load_table import frame_table
from fedkeep.data.readers.series import series_of
from fedkeep.data.readers.tables import features_of
from fedkeep.engines.use import Predicted, predictions, said_tasks, takes_of

ASIDE = ("time", "opted_in")
"""Columns that a model reads where it names them alone."""
WANTED = " The models were trained on it: add it, or rename the one that holds it."


def predict_rows(
    model: nn.Module, rows: Any, encoding: Encoding, client: str | None = None
) -> list[Predicted]:
    """Return what a client's model says of new examples.

    Args:
        model: as for :func:`fedkeep.engines.use.predictions`.
        rows: a data frame of pandas, polars or pyarrow, its columns called as in training, and that of texts as the
            model's; or raw values by column, as ``Encoding.batch`` takes them; or data that are numbers already.
        encoding: how raw values become numbers.
        client: whose model it is.

    Raises:
        DataError: there is no such column, or a value does not fit it; or numbers stand for other labels, items, words or
            amounts.
        MethodError: there is a task that gives neither classes nor numbers.
    """
    if isinstance(rows, FederatedData):
        check_codes(encoding.meta, rows.meta)
        data = rows
    elif isinstance(rows, Mapping):
        data = encoding.examples(rows)
    else:
        wanted = read_by(takes_of(model), encoding)
        names = [name for own in wanted.values() for name in own]
        data = examples_in(frame_table(rows, names, (), dict.fromkeys(names, WANTED)), encoding, wanted)
    return [Predicted(client, said) for said in predictions(model, data, encoding)]


def read_by(
    takes: Takes, encoding: Encoding, *, text: str | None = None, series: Sequence[str] = ()
) -> dict[str, tuple[str, ...]]:
    """Return which of a table's columns make each column that a model reads.

    Args:
        takes: what the model takes.
        encoding: of the data that it was trained on.
        text: the column of texts; None: the one that is called as the model's.
        series: the columns of series; none: likewise.
    """
    labels = {task.label for task in said_tasks(encoding)}
    inputs = [name for name in encoding.columns if name not in labels]
    named = [name for name in inputs if {name, f"{name}_length"} & {*takes.names}]
    found: dict[str, tuple[str, ...]] = {}
    for name in named or [name for name in inputs if name not in ASIDE]:
        code = encoding.columns[name]
        if isinstance(code, FeatureCode):
            found[name] = code.names
        elif isinstance(code, SeriesCode):
            found[name] = tuple(series or (name,))
        else:
            found[name] = ((text if isinstance(code, TextCode) else None) or name,)
    return found


def examples_in(table: RawTable, encoding: Encoding, wanted: Mapping[str, Sequence[str]]) -> FederatedData:
    """Return a table's rows in numbers, by what ``read_by`` says.

    Raises:
        DataError: a value does not fit.
    """
    return encoding.examples({n: _values(table, encoding, n, own) for n, own in wanted.items()}, table.where)


def _values(table: RawTable, encoding: Encoding, name: str, own: Sequence[str]) -> Any:
    code = encoding.columns[name]
    if isinstance(code, TextCode):
        return table.each(own[0], TEXT)
    if isinstance(code, SeriesCode):
        return series_of(table, own, dict.fromkeys(own, SERIES), max_length=code.max_length)
    if isinstance(code, FeatureCode):
        return features_of(table, own, code.kinds | {n: "number" for n in own if n not in code.kinds})
    if isinstance(code, PlainCode) and (code.ragged or code.shape):
        return table.columns[own[0]].tolist()  # a list in each row, as JSON lines and Parquet hold
    return table.numbers(own[0])

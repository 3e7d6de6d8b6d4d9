"""Local vocabulary: train only the rows of an embedding table that a client's examples use.

Source: KTEPS, §4.2, Remark 3. Exactly equal to training the whole table: a row that no example looks up has gradient
zero throughout, and SGD (with or without momentum) and Adam leave such a row where it is as long as there is no
weight decay, no bound on the table's values and no term that reads the parameters themselves. Where that doesn't hold,
the whole table is trained, unless the method says that tables are local by definition.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from fedkeep.core.errors import DataError
from fedkeep.core.net import Net, PooledNet
from fedkeep.core.params import Batch, Params
from fedkeep.data import Ragged
from fedkeep.data.columns import Column
from fedkeep.methods import Phase

SMALL = 256
"""Rows below which cutting a table is not worth it."""
CLIENT = "client"
"""The column that says whose an example is, in centralised training."""

Tables = Literal["exact", "local", "whole"]


class ExampleRows(Protocol):
    """Rows of examples: a data set, or a view of one."""

    columns: dict[str, Column]
    meta: dict[str, Any]

    def batch(self, rows: np.ndarray) -> Batch:
        """Return the rows' columns as tensors."""


@runtime_checkable
class Owned(ExampleRows, Protocol):
    """Examples of several clients."""

    def owners(self, rows: np.ndarray) -> np.ndarray:
        """Return a number for the client of each row."""


@dataclass(frozen=True)
class LocalTable:
    """The rows of one table that a client uses.

    Attributes:
        parameter: the table's name.
        column: the column of ids that looks it up.
        rows: (used,) int64, the rows' numbers, ascending; 0 (padding) is always among them.
        leaving: (leaving,) int64, positions in ``rows`` of those that opted-in examples use: all that may be uploaded.
        single: a mini-batch uses one row alone, and sees it without the axis of rows.
    """

    parameter: str
    column: str
    rows: Tensor
    leaving: Tensor
    single: bool = False

    def local(self, ids: Tensor) -> Tensor:
        """Return ids as positions in ``rows``; 0 for those that are not among them, of examples that nobody uses."""
        ids = ids.long()
        return self._place[torch.where(ids < len(self._place), ids, 0)]

    @cached_property
    def _place(self) -> Tensor:
        place = torch.zeros(int(self.rows[-1]) + 1, dtype=torch.int64)
        place[self.rows] = torch.arange(len(self.rows))
        return place


def local_tables(
    net: Net,
    phases: Sequence[Phase],
    params: Mapping[str, Tensor],
    data: ExampleRows,
    rows: np.ndarray,
    valid: np.ndarray | None = None,
    mode: Tables = "exact",
) -> list[LocalTable]:
    """Return the tables that are trained by local rows alone.

    ``net.lookup`` names them: parameter → the column whose ids are its only use. In the mode ``whole``
    all rows are local, so that a table is uploaded whole but still moved row by row (``lazy_rows``).
    """
    lookup = net.lookup
    inexact = any(p.optimizer.weight_decay or p.loss.reads_parameters is not False for p in phases)
    own = clients_tables(net, params)
    if not lookup or (mode != "local" and inexact):
        return own
    opted_in = allowed(data, rows)
    read = rows if any(p.examples == "all" for p in phases) else opted_in
    if valid is not None and any(p.early_stopping for p in phases):
        read = np.concatenate([read, valid])
    tables: list[LocalTable] = []
    for column in dict.fromkeys(lookup.values()):
        ids, names = data.columns.get(column), [n for n, c in lookup.items() if c == column]
        private = net.private if isinstance(net, PooledNet) else frozenset()
        cut = all(n in params and n not in private and len(params[n]) >= SMALL for n in names)
        cut = cut and (mode == "local" or not any(bounded(phases, n) for n in names))
        if ids is None or not holds_ids(ids) or not cut:
            continue  # ids are renumbered for all of a column's tables, or for none
        size = min(len(params[n]) for n in names)
        values = ids_of(ids, read)
        for name in names:
            check_in_table(values, column, name, len(params[name]))
        leaving = values if read is opted_in else ids_of(ids, opted_in)
        used = _used(values, leaving, size)
        every = {n: (torch.arange(len(params[n])),) * 2 for n in names if mode == "whole"}
        tables += [LocalTable(name, column, *every.get(name, used)) for name in names]
    return tables + own


def bounded(phases: Sequence[Phase], table: str) -> bool:
    """Tell whether an optimiser keeps a table's values within bounds: it brings every row into them."""
    return any(fnmatchcase(table, pattern) for phase in phases for pattern, _ in phase.optimizer.bounds)


def clients_tables(net: Net, params: Mapping[str, Tensor]) -> list[LocalTable]:
    """Return the private parameters of all clients, where each mini-batch is one client's and uses that row alone."""
    if not (isinstance(net, PooledNet) and net.by_client):
        return []
    names = sorted(net.private & net.trainable())
    every = [torch.arange(len(params[name])) for name in names]
    return [
        LocalTable(name, CLIENT, rows, rows, single=True) for name, rows in zip(names, every, strict=True)
    ]


def allowed(data: ExampleRows, rows: np.ndarray, examples: str = "opted_in") -> np.ndarray:
    """Return the rows that a phase may use: all, or those whose column ``opted_in`` is true."""
    if examples == "all" or "opted_in" not in data.columns:
        return rows
    return rows[np.asarray(data.columns["opted_in"][rows], bool)]  # type: ignore[index]


def holds_ids(column: Column) -> bool:
    """Tell whether a column holds whole numbers: texts, or ids of any shape."""
    return column.holds_ids if isinstance(column, Ragged) else column.dtype.kind in "iu"


def ids_of(column: Column, rows: np.ndarray) -> np.ndarray:
    """Return all ids of some rows of a column, in one axis."""
    return column.take(rows).values if isinstance(column, Ragged) else column[rows].reshape(-1)


def check_in_table(ids: np.ndarray, column: str, parameter: str, size: int) -> None:
    """Raise DataError at an id that a table has no row for."""
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < size:
        wrong = int(ids.min() if ids.min() < 0 else ids.max())
        raise DataError(
            "The column {column!r} holds the id {got}, but the table {parameter!r} that it looks up has the rows 0 to "
            "{last}. Make the model with a larger vocabulary, or encode the data with the model's.",
            column=column,
            got=wrong,
            parameter=parameter,
            last=size - 1,
        )


def _used(read: np.ndarray, leaving: np.ndarray, size: int) -> tuple[Tensor, Tensor]:
    """Return the numbers of the rows that ids look up, and positions among these of those that may leave."""
    used, may_leave = np.zeros(size, bool), np.zeros(size, bool)
    used[read] = may_leave[leaving] = True
    used[0] = may_leave[0] = True
    rows = np.flatnonzero(used)
    return torch.from_numpy(rows), torch.from_numpy(np.flatnonzero(may_leave[rows]))


def narrow(params: Mapping[str, Tensor], tables: Sequence[LocalTable]) -> Params:
    """Return the parameters with each table cut down to its local rows."""
    cut = {t.parameter: rows_of(params[t.parameter], t.rows) for t in tables if t.parameter in params}
    return {**params, **cut}


def narrow_alike(
    received: Params, params: Mapping[str, Tensor], mine: Params, tables: Sequence[LocalTable]
) -> Params:
    """Return what was received with each table cut; what was cut before for training, as ``mine``, is taken."""
    alike = {t.parameter for t in tables if received.get(t.parameter) is params.get(t.parameter)}
    cut = narrow(received, [t for t in tables if t.parameter not in alike])
    return {**cut, **{n: mine[n] for n in alike if n in received}}


def rows_of(table: Tensor, rows: Tensor) -> Tensor:
    """Return a copy of some rows; indexing takes several times as long."""
    return table.detach().index_select(0, rows.to(table.device))


def widen(params: Params, whole: Mapping[str, Tensor], tables: Sequence[LocalTable]) -> Params:
    """Return the parameters with each table whole again: local rows as trained, the others as they were."""
    out = dict(params)
    for table in tables:
        if table.parameter in out:
            full = whole[table.parameter].detach().to(params[table.parameter].device, copy=True)
            full.index_copy_(0, table.rows.to(full.device), params[table.parameter].detach())
            out[table.parameter] = full
    return out

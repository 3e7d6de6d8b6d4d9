"""Tensors with a client axis in front."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from torch import Tensor

from fedkeep.core.params import Params
from fedkeep.engines.tables.local_rows import LocalTable

Pick = slice | Tensor
"""Some of the stacked clients: a slice, which is a view and costs nothing, or their positions."""


def one_of(values: Mapping[str, Tensor], stacked: Collection[str], position: int) -> Params:
    """Return one client's values, views of those that are ``stacked``."""
    return {n: v[position] if n in stacked else v for n, v in values.items()}


def picked(values: Mapping[str, Tensor], pick: Pick) -> Params:
    """Return some clients' values of stacked tensors; a slice's are views."""
    if isinstance(pick, slice):
        return {n: v[pick] for n, v in values.items()}
    return {n: v.index_select(0, pick) for n, v in values.items()}


def write_back(values: Mapping[str, Tensor], pick: Pick, changed: Params) -> None:
    """Write what was picked and changed back into the stacked tensors (views need none)."""
    if not isinstance(pick, slice):
        for name, value in changed.items():
            values[name].index_copy_(0, pick, value)


def flat(value: Tensor) -> Tensor:
    """Return a stacked tensor as (clients, numbers)."""
    return value.reshape(len(value), value[0].numel())


def padded(values: Sequence[Tensor], tables: Sequence[LocalTable]) -> Tensor:
    """Return each client's rows of its table, stacked, with rows of zeros behind the shorter ones."""
    longest = max(len(t.rows) for t in tables)
    out = values[0].new_zeros(len(tables), longest, *values[0].shape[1:])
    for mine, value, table in zip(out, values, tables, strict=True):
        mine[: len(table.rows)] = value[table.rows.to(value.device)]
    return out

"""Local vocabulary: train only the rows of an embedding table that a client's examples use.

Source: KTEPS, §4.2, Remark 3. Exactly equal to training the whole table: a row that no example looks up has gradient
zero throughout, and SGD (with or without momentum) and Adam leave such a row where it is as long as there is no
weight decay and no term that reads the parameters themselves. Where that doesn't hold, the whole table is trained.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from fedkeep.core.params import Batch, Params
from fedkeep.data import Ragged
from fedkeep.data.columns import Column
from fedkeep.methods import Phase

WORTHWHILE = 0.5


class Examples(Protocol):
    """Rows of examples: a data set, or a view of one."""

    columns: dict[str, Column]

    def batch(self, rows: np.ndarray) -> Batch:
        """Return the rows' columns as tensors."""
        ...


@dataclass(frozen=True)
class LocalTable:
    """The rows of one table that a client uses.

    Attributes:
        parameter: the table's name.
        column: the column of ids that looks it up.
        rows: (used,) the rows' numbers, ascending; 0 (padding) is always among them.
    """

    parameter: str
    column: str
    rows: np.ndarray

    def local(self, ids: Tensor) -> Tensor:
        """Return ids as positions in ``rows``."""
        place = np.searchsorted(self.rows, ids.numpy())
        return torch.from_numpy(place)


def local_tables(
    module: nn.Module,
    phases: Sequence[Phase],
    params: Mapping[str, Tensor],
    data: Examples,
    rows: np.ndarray,
) -> list[LocalTable]:
    """Return the tables that can be trained by local rows alone, exactly, and are worth it.

    A module names its tables in ``lookup``: parameter → the column whose ids are its only use.
    """
    lookup: Mapping[str, str] = getattr(module, "lookup", {})
    if not lookup or any(p.optimizer.weight_decay or p.loss.reads_parameters for p in phases):
        return []
    if "opted_in" in data.columns:
        if any(p.examples == "all" for p in phases):
            return []  # which rows are local must not depend on opted-out examples
        rows = rows[np.asarray(data.columns["opted_in"][rows], bool)]  # type: ignore[index]
    found = []
    for parameter, column in lookup.items():
        ids = data.columns.get(column)
        if not isinstance(ids, Ragged):
            continue
        used = np.union1d(np.unique(ids.take(rows).values), [0]).astype(np.int64)
        if len(used) < WORTHWHILE * params[parameter].shape[0]:
            found.append(LocalTable(parameter, column, used))
    return found


def narrow(params: Params, tables: Sequence[LocalTable]) -> Params:
    """Return the parameters with each table cut down to its local rows."""
    return {**params, **{t.parameter: params[t.parameter][torch.from_numpy(t.rows)] for t in tables}}


def widen(params: Params, whole: Mapping[str, Tensor], tables: Sequence[LocalTable]) -> Params:
    """Return the parameters with each table whole again: local rows as trained, the others as they were."""
    out = dict(params)
    for table in tables:
        full = whole[table.parameter].detach().to(params[table.parameter].device, copy=True)
        full[torch.from_numpy(table.rows).to(full.device)] = params[table.parameter]
        out[table.parameter] = full
    return out

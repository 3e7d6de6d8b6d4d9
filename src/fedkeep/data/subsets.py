"""Fewer clients, or fewer examples of each: for a first try of data that are large."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import overload

import numpy as np
from numpy.typing import NDArray

from fedkeep.core.errors import DataError, check_range
from fedkeep.core.seeds import numpy_generator
from fedkeep.data.columns import Rows, offsets_of
from fedkeep.data.federated import FederatedData, take
from fedkeep.data.ids import group_rows
from fedkeep.data.partition import apportion
from fedkeep.data.preparation import Raw
from fedkeep.data.splits import SPLITS, bounds_of


def drawn(ids: Collection[str], clients: int) -> frozenset[str]:
    """Return the ids of so many clients; the draw depends on nothing but which there are.

    Args:
        ids: of all, texts in Unicode's normal form.
        clients: how many.

    Raises:
        DataError: the number is below 1, or there are not so many.
    """
    ordered = sorted(set(ids))
    return frozenset(ordered[place] for place in _places(len(ordered), clients).tolist())


def _places(there: int, clients: int) -> Rows:
    check_range("[1, inf]", DataError, clients=clients)
    if clients > there:
        raise DataError("Wanted {wanted:,} clients; the data have {there:,}.", wanted=clients, there=there)
    return np.sort(numpy_generator(0, "subset/clients").permutation(there)[:clients])


@overload
def subset(data: FederatedData, clients: int | None = None, examples: int | None = None) -> FederatedData: ...
@overload
def subset(data: Raw, clients: int | None = None, examples: int | None = None) -> Raw: ...
def subset(
    data: FederatedData | Raw, clients: int | None = None, examples: int | None = None
) -> FederatedData | Raw:
    """Return some of the clients, and some of the examples of each. The draw is the same with every seed of a run.

    Args:
        data: clients' data.
        clients: how many to keep; None: all.
        examples: how many of a client's examples to keep at most, of its splits in proportion; None: all.

    Raises:
        DataError: a number is below 1, or there are not so many clients.
    """
    check_range("[1, inf]", DataError, examples=examples)
    there = len(data.ids)
    chosen = np.arange(there) if clients is None else _places(there, clients)
    if isinstance(data, Raw):
        ids, owner = group_rows(data.client)
        part = np.asarray([SPLITS.index(split) for split in data.split or ["train"] * len(owner)])
        return data.taken(_rows(ids, owner, part, chosen, examples))
    found = data.select(chosen.tolist())
    if examples is None:
        return found
    owner = found.clients_of(np.arange(found.examples))
    part = np.zeros(len(owner), np.int64)
    for number, split in enumerate(SPLITS if found.bounds is not None else ()):
        part[found.split_rows(split)] = number
    rows = _rows(found.ids, owner, part, np.arange(len(found)), examples)
    counts = np.bincount(owner[rows] * 3 + part[rows], minlength=3 * len(found)).reshape(-1, 3)
    bounds = None if found.bounds is None else bounds_of(counts)
    columns, offsets = take(found.columns, rows), offsets_of(counts.sum(axis=1))
    return FederatedData(columns, offsets, found.ids, bounds, found.meta, check=False).with_best()


def _rows(
    ids: Sequence[str], owner: NDArray[np.int64], part: NDArray[np.int64], chosen: Rows, examples: int | None
) -> Rows:
    """Return the rows of the chosen clients, at most so many of each, in their order."""
    order = np.argsort(owner, kind="stable")
    ends = np.cumsum(np.bincount(owner, minlength=len(ids)))
    kept = []
    for client in chosen.tolist():
        mine = order[ends[client - 1] if client else 0 : ends[client]]
        if examples is not None and len(mine) > examples:
            draw = numpy_generator(0, "subset/examples", ids[client])
            counts = np.bincount(part[mine], minlength=3)
            quota = apportion(examples, counts)
            if counts[0] and not quota[0]:  # a client trains on one at least
                quota[0], quota[int(quota.argmax())] = 1, quota.max() - 1
            mine = np.concatenate(
                [draw.permutation(mine[part[mine] == p])[: quota[p]] for p in range(len(SPLITS))]
            )
        kept.append(mine)
    return np.sort(np.concatenate(kept))

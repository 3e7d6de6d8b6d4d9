"""Examples that stay out: the column ``opted_in`` says which ones may influence what leaves their client."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fedkeep.core.errors import DataError, check_choice
from fedkeep.core.seeds import numpy_generator
from fedkeep.data.columns import Column, Ragged, offsets_of
from fedkeep.data.federated import FederatedData, take
from fedkeep.data.splits import SPLITS, bounds_of

Predicate = Callable[[Mapping[str, Column]], NDArray[np.bool_]]


def opt_out(
    data: FederatedData,
    fraction: float | None = None,
    by: Literal["client", "example"] = "client",
    seed: int = 0,
    where: Predicate | None = None,
) -> FederatedData:
    """Return the data with the column ``opted_in``, False for the examples that opt out.

    Who opts out is int(fraction · n), truncated, of the n clients, or of each client's n examples of each split. Those
    who opt out at one fraction also do at a larger one (mixture of experts, arXiv:2010.02056: the opt-out factor q,
    for which 5 clients and q = 0.9 leave one in). Examples that were out before stay out. The other columns are shared
    with ``data``, not copied.

    Args:
        data: examples of clients.
        fraction: q in [0, 1), the fraction opting out.
        by: "client": whole clients; "example": some examples of every client.
        seed: of the draw.
        where: instead of a fraction: given the columns, True for each example that opts out.

    Raises:
        DataError: not exactly one of ``fraction`` and ``where``, a fraction out of range, a predicate that doesn't
            give a boolean per example, or nobody left in: then there is nothing to train the federated part on.
    """
    if (fraction is None) == (where is None):
        raise DataError("Wanted either fraction or where, to say who opts out; got both or neither.")
    if fraction is not None:
        if not 0 <= fraction < 1:
            raise DataError(
                "Wanted a fraction opting out in [0, 1); got {got}. At 0 all opt in; at 1 nobody would be left to train the "
                "federated part: use the method 'local' for clients that only learn by themselves.",
                got=fraction,
            )
        check_choice("Wanted opt-out by", by, ("client", "example"), DataError)
        out = _clients(data, fraction, seed) if by == "client" else _examples(data, fraction, seed)
        about: dict[str, Any] = {"by": by, "fraction": float(fraction), "seed": seed}
    else:
        assert where is not None  # narrowed above
        out = np.asarray(where(data.columns))
        if out.dtype != bool or out.shape != (data.examples,):
            raise DataError(
                "Wanted a boolean for each of the {examples} examples from the predicate; got {got}, shape "
                "{shape}.",
                examples=data.examples,
                got=out.dtype,
                shape=out.shape,
            )
        about = {"by": "predicate"}
    inside = ~out
    if "opted_in" in data.columns:
        inside &= np.asarray(data.columns["opted_in"], bool)
    training = inside if data.bounds is None else inside[data.split_rows("train")]
    if not training.any():
        raise DataError(
            "Nobody is left: every training example has opted out, so there is nothing to train the federated part on. "
            "Let some opt in, or use the method 'local'."
        )
    return FederatedData(
        {**data.columns, "opted_in": inside},
        data.offsets,
        data.ids,
        data.bounds,
        {**data.meta, "opt_out": {**about, "training_examples_in": int(training.sum())}},
        check=False,
    )


def _number(fraction: float, n: int) -> int:
    return int(fraction * n + 1e-9)  # so that 0.29 · 100 is 29


def _clients(data: FederatedData, fraction: float, seed: int) -> NDArray[np.bool_]:
    out = np.zeros(len(data), bool)
    drawn = numpy_generator(seed, "opt_out/client").permutation(len(data))
    out[drawn[: _number(fraction, len(data))]] = True
    return np.repeat(out, data.counts())


def _examples(data: FederatedData, fraction: float, seed: int) -> NDArray[np.bool_]:
    out = np.zeros(data.examples, bool)
    for client in range(len(data)):
        for split in ("all",) if data.bounds is None else SPLITS:
            rows = data.rows(client, split)
            if number := _number(fraction, len(rows)):
                rng = numpy_generator(seed, f"opt_out/{split}", data.ids[client])
                out[rows.start + rng.permutation(len(rows))[:number]] = True
    return out


def add_censored(
    data: FederatedData, censor: Callable[[Mapping[str, Column]], Mapping[str, Column]]
) -> FederatedData:
    """Return the data with a censored copy, opted in, of every training example that opted out.

    The raw example stays where it is and stays out: local training sees both, the federated part the copy alone
    (mixture of experts, arXiv:2010.02056, on opt-out data). What the copies still tell is up to ``censor``.

    Args:
        data: with the column ``opted_in``, see :func:`opt_out`, and split.
        censor: given the columns of the examples that are out, returns those columns that it changes, row by row.

    Raises:
        DataError: nobody opted out, or the copies' columns are not those of the data in number, shape or type.
    """
    train = data.split_rows("train")
    if "opted_in" not in data.columns:
        raise DataError("Wanted data with a column 'opted_in'; there is none. Call opt_out first.")
    rows = train[~np.asarray(data.columns["opted_in"][train], bool)]  # type: ignore[index]
    if not len(rows):
        raise DataError("No training example has opted out, so there is nothing to censor.")
    raw = take(data.columns, rows)
    copies = {**raw, **censor(raw), "opted_in": np.ones_like(raw["opted_in"])}
    unknown = sorted(copies.keys() - raw.keys())
    if unknown:
        raise DataError(
            "The censored copies have a column {column!r} that the data lack; they have {raw}.",
            column=unknown[0],
            raw=sorted(raw),
        )
    for name, column in copies.items():
        if len(column) != len(rows):
            raise DataError(
                "Wanted {wanted} rows in column {column!r} of the censored copies, one per example; got "
                "{got}.",
                wanted=len(rows),
                column=name,
                got=len(column),
            )
    client = np.concatenate([np.repeat(np.arange(len(data)), data.counts()), data.clients_of(rows)])
    counts = np.stack([data.counts(split) for split in SPLITS], axis=1)
    split = np.concatenate(
        [np.repeat(np.tile(np.arange(3), len(data)), counts.ravel()), np.zeros(len(rows), np.int64)]
    )
    order = np.lexsort((split, client))  # stable: copies come behind a client's training examples
    joined = {name: _joined(name, column, copies[name]) for name, column in data.columns.items()}
    counts[:, 0] += np.bincount(data.clients_of(rows), minlength=len(data))
    meta = {**data.meta, "opt_out": {**data.meta.get("opt_out", {}), "censored_copies": len(rows)}}
    return FederatedData(
        take(joined, order), offsets_of(counts.sum(axis=1)), data.ids, bounds_of(counts), meta
    )


def _joined(name: str, raw: Column, copies: Column) -> Column:
    if isinstance(raw, Ragged) and isinstance(copies, Ragged):
        lengths = np.concatenate([np.diff(raw.offsets), np.diff(copies.offsets)])
        return Ragged(np.concatenate([raw.values, copies.values]), offsets_of(lengths))
    if not isinstance(raw, Ragged) and not isinstance(copies, Ragged):
        found = np.asarray(copies)
        if found.dtype == raw.dtype and found.shape[1:] == raw.shape[1:]:
            return np.concatenate([raw, found])
    raise DataError(
        "The censored copies' column {column!r} is of another type or shape than the data's: wanted {wanted}; got {got}.",
        column=name,
        wanted=_kind(raw),
        got=_kind(copies),
    )


def _kind(column: Column) -> str:
    return (
        "a ragged column" if isinstance(column, Ragged) else f"{column.dtype}, shape {column.shape[1:]} a row"
    )

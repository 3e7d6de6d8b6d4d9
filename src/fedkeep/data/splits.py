"""Dividing examples into train, valid and test inside each client, and clients into federation and held-out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedkeep.core.errors import DataError, check_choice
from fedkeep.core.seeds import stream
from fedkeep.data.columns import Column, Ragged, Rows, offsets_of

SPLITS = ("train", "valid", "test")


def divide(counts: NDArray[np.int64], fractions: Sequence[float]) -> NDArray[np.int64]:
    """Return how many of each client's rows go to train, valid and test, int64 (clients, 3).

    Of n rows, test gets n·f rounded (a half upwards), at least one if n ≥ 2 and f > 0; valid gets n·f rounded;
    train gets the rest. Where that leaves no row to train, valid gives one up, then test.

    Raises:
        DataError: the fractions are not three numbers ≥ 0 that sum to 1 with train above 0.
    """
    shares = np.asarray(fractions, dtype=np.float64)
    if shares.shape != (3,) or not (shares >= 0).all() or shares[0] == 0 or abs(shares.sum() - 1) > 1e-6:
        raise DataError(
            "Wanted three fractions for train, valid and test that sum to 1, train above 0; got {got}. "
            "The usual ones are (0.8, 0.1, 0.1).",
            got=fractions,
        )
    n = counts.astype(np.int64)
    # The tiny shift keeps a half a half where n·f falls short of it by the last bit.
    valid = np.floor(n * shares[1] + 0.5 + 1e-9).astype(np.int64)
    test = np.floor(n * shares[2] + 0.5 + 1e-9).astype(np.int64)
    if shares[2] > 0:
        test = np.where(n >= 2, np.maximum(test, 1), 0)
    lacking = np.maximum(np.minimum(n, 1) - (n - valid - test), 0)  # rows that train is short of
    from_valid = np.minimum(lacking, valid)
    valid, test = valid - from_valid, test - (lacking - from_valid)
    return np.stack([n - valid - test, valid, test], axis=1)


def bounds_of(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the row numbers where train, valid and test start and test ends, from counts (clients, 3)."""
    ends = offsets_of(counts.ravel())
    return np.stack([ends[0:-1:3], ends[1::3], ends[2::3], ends[3::3]], axis=1)


def order_within(
    columns: Mapping[str, Column], offsets: NDArray[np.int64], ids: Sequence[str], order: str, seed: int
) -> Rows:
    """Return all row numbers, client after client, in the order in which train, valid and test take them."""
    check_choice("Wanted the order", order, ("random", "chronological"), DataError)
    counts = np.diff(offsets)
    client = np.repeat(np.arange(len(counts)), counts)
    if order == "random":
        place = np.arange(offsets[-1]) - np.repeat(offsets[:-1], counts)
        return np.lexsort((mixed(_draws(ids, seed, "split")[client] + weyl(place)), client))
    time = columns.get("time")
    if time is None or isinstance(time, Ragged) or time.ndim != 1:
        raise DataError(
            "A chronological split needs a column 'time' with a number per example, and there is none. Name it so, in "
            "a table by time = 'COLUMN', or use order='random'."
        )
    return np.lexsort((time, client))


def hold_out(data: Any, fraction: float, seed: int = 0) -> tuple[Rows, Rows]:
    """Return the clients that federate and those held out of federation, two sorted index arrays.

    Who is held out depends on the seed and the clients' ids, not on their order. A fraction above 0 holds out
    at least one client (of two or more) and never all.

    Args:
        data: a data set, of which only ``ids`` is read.
        fraction: of clients to hold out, in [0, 1).
        seed: of the draw.

    Raises:
        DataError: the fraction is outside [0, 1).
    """
    if not 0 <= fraction < 1:
        raise DataError(
            "Wanted a fraction of clients to hold out in [0, 1); got {got}. A usual one is 0.1.", got=fraction
        )
    clients = len(data.ids)
    number = min(max(int(np.floor(fraction * clients + 0.5 + 1e-9)), int(fraction > 0)), clients - 1)
    drawn = np.argsort(mixed(_draws(data.ids, seed, "hold_out")), kind="stable")
    return np.sort(drawn[number:]), np.sort(drawn[:number])


def _draws(ids: Sequence[str], seed: int, purpose: str) -> NDArray[np.uint64]:
    return np.fromiter((stream(seed, purpose, client_id) for client_id in ids), np.uint64, len(ids))


def weyl(place: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return a state of SplitMix64 for each place."""
    return place.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)


def mixed(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The output function of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014): one stream per client, all at once."""
    z = state + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))

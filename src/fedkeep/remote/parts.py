"""An example stays in train, valid or test as long as a run lasts, however its device's data grow or shrink.

Where a device divides its examples itself, an example's place in the file decides. One more row above it, and what was
trained on would be tested. So the device keeps a hash of each example beside its part. Those it knows stay where they
were, new ones go where the division puts them, and one that is gone for a while comes back to its part.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from fedkeep.data import SPLITS, FederatedData
from fedkeep.data.federated import take
from fedkeep.data.splits import bounds_of

Parts = Mapping[bytes, int]
"""The part of each of a client's examples, as a place in ``SPLITS``, by the example's hash."""
HASH = 8
"""Bytes of a hash."""


def settled(
    data: FederatedData, known: Mapping[str, Parts]
) -> tuple[FederatedData, dict[str, dict[bytes, int]], int]:
    """Return data whose known examples are in the parts where they were.

    Args:
        data: as they are divided now.
        known: by client, where its examples were; clients that were not looked at yet have no entry.

    Returns:
        The data, the very same object where nothing has moved; by client, the examples that are new; and how many
        examples of clients with an entry these are.
    """
    counts = np.stack([data.counts(split) for split in SPLITS], axis=1)
    now = np.repeat(np.tile(np.arange(len(SPLITS)), len(data)), counts.ravel())
    then, new, joined = now.copy(), dict[str, dict[bytes, int]](), 0
    for number, client in enumerate(map(str, data.ids)):
        rows = data.rows(number)
        there = known.get(client, {})
        names = _hashes(data, rows)
        then[rows.start : rows.stop] = [
            there.get(name, part)
            for name, part in zip(names, now[rows.start : rows.stop].tolist(), strict=True)
        ]
        if found := {
            name: int(then[row]) for name, row in zip(names, rows, strict=True) if name not in there
        }:
            new[client] = found
            joined += len(found) if client in known else 0
    return (data if (then == now).all() else _divided(data, then)), new, joined


def _divided(data: FederatedData, part: NDArray[np.int64]) -> FederatedData:
    """Return data in these parts, (rows,)."""
    client = data.clients_of(np.arange(data.examples))
    counts = np.bincount(client * len(SPLITS) + part, minlength=len(SPLITS) * len(data))
    order = np.lexsort((part, client))  # stable
    return FederatedData(
        take(data.columns, order),
        data.offsets,
        data.ids,
        bounds_of(counts.reshape(-1, len(SPLITS))),
        data.meta,
        check=False,
    )


def _hashes(data: FederatedData, rows: range) -> list[bytes]:
    """Return a hash of each example's content; of equal ones also of which it is. Who opts out stays the same."""
    columns = [
        c for name, c in sorted(data.columns.items()) if name != "opted_in" and not name.startswith("_")
    ]
    seen, found = Counter[bytes](), []
    for row in rows:
        digest = hashlib.blake2b(digest_size=HASH)
        for column in columns:
            value = np.ascontiguousarray(column[row])
            digest.update(f"{value.shape}".encode())
            digest.update(value.tobytes())
        content = digest.digest()
        digest.update(seen[content].to_bytes(HASH, "little"))
        seen[content] += 1
        found.append(digest.digest())
    return found

"""Which examples a run has had, and in which part: what was once in test never trains, however a file has grown.

An example is known by a hash of its values and its client's id; of what has other numbers once an encoding is extended,
by a hash of what was read. Examples that are alike are counted: of three equal ones of which two trained and one was in
test, two train and the others are in test.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save

from fedkeep.core.errors import RunError
from fedkeep.core.files import load_verified
from fedkeep.core.seeds import stream
from fedkeep.data.columns import AS_READ, Column, Ragged
from fedkeep.data.splits import bounds_of, mixed, weyl

if TYPE_CHECKING:
    from fedkeep.data.federated import FederatedData

FILE = "seen.safetensors"
BLOCK = 1 << 20
"""Numbers that are hashed at a time."""


@dataclass(frozen=True)
class Seen:
    """Examples of a run.

    Attributes:
        marks: a hash of each example and its client's id, uint64 (examples,), ascending.
        parts: of each 0, 1 or 2: it was in train, valid or test; uint8 (examples,), ascending among equal marks.
        ids: the clients' ids.
    """

    marks: NDArray[np.uint64]
    parts: NDArray[np.uint8]
    ids: Sequence[str]

    @classmethod
    def of(cls, data: FederatedData) -> Seen:
        """Return what is seen of divided data."""
        marks, parts = marks_of(data), parts_of(data)
        order = np.lexsort((parts, marks))
        return cls(marks[order], parts[order], data.ids)

    def kept_apart(self, data: FederatedData) -> FederatedData:
        """Return divided data where each example that was seen is in the part that it was in.

        Of equal examples more may be there than were seen: they go where the last of those went, test before valid
        before train. Others stay where they are. Where nothing moves these are the data as they were given.
        """
        marks, parts = marks_of(data), parts_of(data)
        first = np.searchsorted(self.marks, marks, "left")
        known = np.searchsorted(self.marks, marks, "right") - first
        rank = ranks(marks)
        there = known > 0
        now = parts.copy()
        now[there] = self.parts[(first + np.minimum(rank, known - 1))[there]]
        return moved(data, now)

    def among(self, data: FederatedData) -> int:
        """Return how many examples of data were seen."""
        return int(np.isin(marks_of(data), self.marks).sum())

    def to_bytes(self) -> bytes:
        """Return it as a file of a run's folder keeps it."""
        tensors = {
            "examples": torch.from_numpy(self.marks.view(np.int64)),
            "parts": torch.from_numpy(self.parts),
            "ids": torch.from_numpy(np.frombuffer("\0".join(self.ids).encode(), np.uint8).copy()),
        }
        return save(tensors)

    @classmethod
    def read(cls, folder: Path, sha256: str) -> Seen:
        """Return what a run's folder says was seen.

        Raises:
            RunError: the file is missing, damaged, or of an older fedkeep, which knew examples by other hashes.
        """
        found = load_verified(folder / FILE, sha256)
        if "examples" not in found:
            raise RunError(
                "{folder} is of an older fedkeep: go on with that one, or begin a new run.", folder=folder
            )
        ids = found["ids"].numpy().tobytes().decode().split("\0")
        return cls(found["examples"].numpy().view(np.uint64), found["parts"].numpy(), ids)


def moved(data: FederatedData, parts: NDArray[np.uint8]) -> FederatedData:
    """Return divided data with each row, (rows,), in one of the parts 0, 1 and 2; the very same where none moves."""
    from fedkeep.data.federated import FederatedData, take

    if (parts == parts_of(data)).all():
        return data
    client = data.clients_of(np.arange(data.examples))
    order = np.lexsort((parts, client))  # stable
    counts = np.bincount(client * 3 + parts, minlength=3 * len(data)).reshape(-1, 3)
    columns = take(data.columns, order)
    made = FederatedData(columns, data.offsets, data.ids, bounds_of(counts), data.meta, check=False)
    return made.with_best()


def parts_of(data: FederatedData) -> NDArray[np.uint8]:
    """Return 0, 1 or 2 for each row of divided data: train, valid or test."""
    assert data.bounds is not None
    counts = np.diff(data.bounds, axis=1)
    return np.repeat(np.tile(np.arange(3, dtype=np.uint8), len(data)), counts.ravel())


def marks_of(data: FederatedData) -> NDArray[np.uint64]:
    """Return a hash of each row's values and its client's id, uint64 (rows,).

    Columns that a generator keeps for itself, and whether an example opted out, are not in it.
    """
    owners = np.fromiter((stream(0, "seen", name) for name in data.ids), np.uint64, len(data))
    found: NDArray[np.uint64] = owners[np.repeat(np.arange(len(data)), np.diff(data.offsets))]
    for name, column in sorted(data.columns.items()):
        if not name.startswith("_") and name != "opted_in":
            known = data.columns.get(AS_READ + name, column)
            found = mixed(found ^ mixed(_hashed(known) + np.uint64(stream(0, "seen", name))))
    return found


def _hashed(column: Column) -> NDArray[np.uint64]:
    """Return a hash of each row of a column, whatever the width of its numbers' type."""
    if isinstance(column, Ragged):
        offsets = column.offsets * math.prod(column.values.shape[1:])
        length = np.diff(offsets)
        places = np.arange(1, column.values.size + 1) - np.repeat(offsets[:-1], length)
        found = _sums(mixed(_words(column.values.reshape(-1)) + weyl(places)), offsets)
        return found + length.astype(np.uint64)
    rows = column.reshape(len(column), -1)
    step = max(1, BLOCK // max(1, rows.shape[1]))
    place = weyl(np.arange(1, rows.shape[1] + 1))
    blocks = [
        mixed(_words(np.asarray(rows[start : start + step])) + place).sum(1, dtype=np.uint64)
        for start in range(0, len(rows), step)
    ]
    return np.concatenate(blocks) if blocks else np.zeros(0, np.uint64)


def _sums(values: NDArray[np.uint64], offsets: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return the sum of each row of a ragged column, modulo 2^64."""
    total: NDArray[np.uint64] = np.concatenate([np.zeros(1, np.uint64), np.cumsum(values, dtype=np.uint64)])
    return total[offsets[1:]] - total[offsets[:-1]]


def _words(values: NDArray[np.generic]) -> NDArray[np.uint64]:
    """Return numbers as words of 64 bits; a number has the same ones as float32 and float64, or as int32 and int64."""
    wide = np.float64 if values.dtype.kind == "f" else np.int64
    return np.ascontiguousarray(values.astype(wide)).view(np.uint64)


def ranks(marks: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Return how many equal ones stand before each mark."""
    order = np.argsort(marks, kind="stable")
    ordered = marks[order]
    begins = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
    run = np.diff(np.append(begins, len(ordered)))
    rank = np.empty(len(marks), np.int64)
    rank[order] = np.arange(len(ordered)) - np.repeat(begins, run)
    return rank

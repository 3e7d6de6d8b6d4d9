"""Words, labels, categories and items of many devices by secure sums: which there are, how often, and then their names.

Nobody knows beforehand which there are, so no lane can be set aside for each. Instead every device enters its own into a
table whose cells are summed (an invertible Bloom lookup table; Goodrich and Mitzenmacher, 2011): an entry's hash, and
its numbers, go into one cell in each quarter of the table. Cells that hold a single entry give it away, it is taken out
of its other cells, and so on until the table is empty. Names come in a second sum, of those hashes alone that are asked
for. Whoever sees a hash can try words until one fits.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedkeep.core.errors import DataError
from fedkeep.data.preparation.pooling import LIMB

QUARTERS = 4
SPARE = 512
"""Cells beside 1.5 for each entry: then fewer than one table in 100,000 cannot be emptied."""
MOST_CELLS = 1 << 20
"""Cells of a table, at most: 64 MiB."""
MOST_LANES = 1 << 23
"""Lanes of names, at most: 64 MiB."""
LANES = 8
"""Of a cell: devices; then, once for each of them, column, both halves of the hash, check and length; count, clients."""


class Hash(NamedTuple):
    """What stands for an entry: the number of its column, and 64 bits of a hash of its text, in two halves."""

    column: int
    high: int
    low: int


@dataclass(frozen=True, kw_only=True)
class Entry:
    """What all devices together tell of a hash.

    Attributes:
        devices: how many have it.
        length: bytes of its text.
        count, clients: how often it occurs, and how many clients have it; 0 where it is not counted.
    """

    devices: int = 1
    length: int
    count: int
    clients: int


def hash_of(run: str, column: int, text: bytes) -> Hash:
    """Return what stands for a text; it differs from run to run."""
    key = hashlib.sha256(run.encode()).digest()
    return Hash(column, *struct.unpack("<II", hashlib.blake2b(text, digest_size=8, key=key).digest()))


def cells_for(entries: int) -> int:
    """Return how many cells a table takes for so many entries, counted once for each device.

    Raises:
        DataError: they are too many.
    """
    quarter = -(-(3 * entries // 2 + SPARE) // QUARTERS)
    if quarter * QUARTERS > MOST_CELLS:
        raise DataError(
            "All devices together tell of {got:,} words, labels, categories and items; a secure sum takes about "
            "{most:,}. Hash words (preparation.tokens = 'unicode_words'), or let devices keep rare ones "
            "(preparation.clients_a_word_here).",
            got=entries,
            most=(MOST_CELLS - SPARE) * 2 // 3,
        )
    return quarter * QUARTERS


def _spots(one: Hash, cells: int) -> tuple[int, list[int]]:
    """Return the check of a hash, and its cell in each quarter."""
    check, *places = struct.unpack("<5I", hashlib.blake2b(struct.pack("<3I", *one), digest_size=20).digest())
    quarter = cells // QUARTERS
    return check, [n * quarter + place % quarter for n, place in enumerate(places)]


def table_of(entries: Mapping[Hash, Entry], cells: int) -> NDArray[np.uint64]:
    """Return a device's table, uint64 (cells · 8,)."""
    table = np.zeros((cells, LANES), np.uint64)
    for one, entry in entries.items():
        check, spots = _spots(one, cells)
        table[spots] += np.asarray([1, *one, check, entry.length, entry.count, entry.clients], np.uint64)
    return table.reshape(-1)


def read_table(total: NDArray[np.uint64]) -> dict[Hash, Entry]:
    """Return the entries of a sum of tables.

    Raises:
        DataError: it cannot be emptied, by bad luck or as a device has sent something else.
    """
    table, found = total.reshape(-1, LANES).copy(), dict[Hash, Entry]()
    left = np.flatnonzero(table[:, 0]).tolist()
    while left:
        place = left.pop()
        cell = [int(lane) for lane in table[place].tolist()]
        one = _alone(cell, place, len(table))
        if one is None:
            continue
        devices, length, (count, clients) = cell[0], cell[5] // cell[0], cell[6:]
        if one in found:
            break
        found[one] = Entry(devices=devices, length=length, count=count, clients=clients)
        spots = _spots(one, len(table))[1]
        table[spots] -= np.asarray(cell, np.uint64)
        left += spots
    if table.any():
        raise DataError(
            "The table of words, labels, categories and items that devices have summed cannot be read: it happens once in "
            "100,000 runs, or a device has sent another. Begin a new run."
        )
    return found


def _alone(cell: Sequence[int], place: int, cells: int) -> Hash | None:
    """Return the hash that has a cell to itself; None: several have, or none has."""
    devices, *rest = cell[:6]
    if not devices or any(lane % devices for lane in rest):
        return None
    each = [lane // devices for lane in rest[:4]]
    if max(each) >= 1 << LIMB:
        return None
    one = Hash(*each[:3])
    check, spots = _spots(one, cells)
    return one if check == each[3] and place in spots else None


def _widths(wanted: Mapping[Hash, int]) -> list[int]:
    return [1 + -(-length // 4) for length in wanted.values()]


def lanes_of(wanted: Mapping[Hash, int]) -> int:
    """Return how many lanes the names of hashes take, given their lengths in bytes.

    Raises:
        DataError: too many.
    """
    if (size := sum(_widths(wanted))) > MOST_LANES:
        raise DataError(
            "Names of {got:,} lanes are too long for a secure sum; wanted {most:,} at most.",
            got=size,
            most=MOST_LANES,
        )
    return size


def names_of(texts: Mapping[Hash, bytes], wanted: Mapping[Hash, int]) -> NDArray[np.uint64]:
    """Return a device's lanes for the names of hashes: of each 1 and its text, 4 bytes a lane; 0 where it has none.

    Args:
        texts: what the device has.
        wanted: of which hashes the names are, and how many bytes each has.
    """
    lanes, place = np.zeros(lanes_of(wanted), np.uint64), 0
    for (one, length), width in zip(wanted.items(), _widths(wanted), strict=True):
        text = texts.get(one)
        if text is not None and len(text) == length:
            lanes[place] = 1
            lanes[place + 1 : place + width] = np.frombuffer(text.ljust(4 * (width - 1), b"\0"), "<u4")
        place += width
    return lanes


def read_names(run: str, total: NDArray[np.uint64], wanted: Mapping[Hash, int]) -> dict[Hash, bytes]:
    """Return the texts of a sum of names; of a hash that nobody is left to name there is none.

    Raises:
        DataError: a text is not that of its hash.
    """
    found, place = dict[Hash, bytes](), 0
    for (one, length), width in zip(wanted.items(), _widths(wanted), strict=True):
        devices, *parts = total[place : place + width].tolist()
        place += width
        if not devices:
            continue
        text = b"".join(struct.pack("<Q", part // devices)[:4] for part in parts)[:length]
        if (
            any(part % devices or part // devices >> LIMB for part in parts)
            or hash_of(run, one.column, text) != one
        ):
            raise DataError("A name that devices have summed is not that of its hash. Begin a new run.")
        found[one] = text
    return found

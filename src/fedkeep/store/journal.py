"""The journal of a table: the rows that rounds changed, appended and flushed before the table itself is touched.

A record is a head (magic, run, round, rows, bytes of a row, digest of the whole table before and after, crc32 of the
head and of what follows it up to the rows), the clients' positions (int64), their entries (uint64) and their rows. An
entry is the round in which a row was written and the crc32 of the row, ``round << 32 | crc``; 0 means never written.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

MAGIC = b"fedkeep3"
HEAD = struct.Struct("<8s16sqqqQQq")
CRC = 0xFFFFFFFF
MOST_ROUNDS = CRC


class Round(NamedTuple):
    """A round in the journal: whose it is, what it changed, digests before and after, and where its record ends."""

    run: bytes
    round: int
    clients: np.ndarray
    entries: np.ndarray
    rows: np.ndarray
    before: int
    after: int
    end: int


def run_key(run: str) -> bytes:
    """Return the 16 bytes that stand for a run's id."""
    return hashlib.sha256(run.encode()).digest()[:16]


def record(run: bytes, round: int, before: int, after: int, rows: Mapping[int, np.ndarray], row_bytes: int,
           entries: np.ndarray) -> bytes:  # fmt: skip
    """Return a round's record."""
    index = np.fromiter(rows, np.int64, len(rows))
    parts = (index.tobytes(), entries.tobytes())
    fields = (MAGIC, run, round, len(rows), row_bytes, before, after)
    found = _crc(HEAD.pack(*fields, 0), *parts)
    return b"".join([HEAD.pack(*fields, found), *parts, *(row.data for row in rows.values())])


def rounds(content: bytes, row_bytes: int) -> Iterator[Round]:
    """Yield the journal's records up to the first that is not whole."""
    start, last = 0, -1
    while len(content) >= start + HEAD.size:
        magic, run, round, count, found_bytes, before, after, crc = HEAD.unpack_from(content, start)
        body = start + HEAD.size
        first = body + 16 * count
        end = first + count * row_bytes
        if magic != MAGIC or found_bytes != row_bytes or count < 0 or end > len(content) or round <= last:
            return
        head = HEAD.pack(magic, run, round, count, found_bytes, before, after, 0)
        if _crc(head, content[body:first]) != crc:
            return
        clients = np.frombuffer(content, np.int64, count, body)
        entries = np.frombuffer(content, np.uint64, count, body + 8 * count)
        rows = np.frombuffer(content, np.uint8, count * row_bytes, first).reshape(count, row_bytes)
        if any(zlib.crc32(row.data) != int(e) & CRC for row, e in zip(rows, entries, strict=True)):
            return
        yield Round(run, round, clients, entries, rows, before, after, end)
        start, last = end, round


def digest(clients: np.ndarray, entries: np.ndarray) -> int:
    """Return the sum modulo 2⁶⁴ of one well-mixed number for each written client: the same in any order.

    A row that changes takes its old number out and puts its new one in, so a round costs what its cohort does.
    """
    written = entries != 0
    z = entries[written] + clients[written].astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)  # splitmix64
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return int((z ^ (z >> np.uint64(31))).sum(dtype=np.uint64))


def _crc(*parts: bytes) -> int:
    found = 0
    for part in parts:
        found = zlib.crc32(part, found)
    return found

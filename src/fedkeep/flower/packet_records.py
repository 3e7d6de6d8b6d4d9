"""The wire form: a packet as Flower's records, and back. Nothing is pickled, and nothing is taken for granted.

A packet is the file ``own``, the bytes of ``Packet.to_bytes``. What it shares with other packets that are sent with it
(the global model) are files beside it, ``shared-0`` and on, of ``tensors_packed``: Flower names what it sends by its hash,
so that each is sent once. A file travels in pieces of ``PIECE`` bytes, ``own/0`` and on, each a ``ConfigRecord``:
Flower asks for each object of a message by a request of its own, and a ``ConfigRecord`` is one object, where an array
is one for itself, one for its record and one for each of its chunks.
"""

from __future__ import annotations

from collections.abc import Iterable

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from fedkeep.core.errors import UploadError
from fedkeep.core.packet import CHECKSUM, tensors_packed
from fedkeep.core.params import Params
from fedkeep.flower.inner import nested_bytes
from fedkeep.remote import Packet

OWN, SHARED, CONTENT = "own", "shared", "content"
PIECE = 5 << 20
"""Bytes of a piece, as of a chunk of Flower's arrays. Its nodes push two at a time, and the link gives up an answer of
which nothing more has come for 180 seconds, so a slow line must carry two in that time. Larger ones cost the processes
more to copy than they save in requests."""


def to_records(packets: Iterable[Packet]) -> list[RecordDict]:
    """Return packets as Flower's records; tensors that several packets hold are turned into bytes once.

    Raises:
        UploadError: as for ``Packet.to_bytes``.
    """
    packets = list(packets)
    holders: dict[tuple[str, int], list[int]] = {}
    for k, packet in enumerate(packets):
        for name, tensor in packet.tensors.items():
            holders.setdefault((name, id(tensor)), []).append(k)
    made: dict[tuple[int, ...], tuple[list[ConfigRecord], bytes]] = {}
    found = []
    for k, packet in enumerate(packets):
        parts: dict[tuple[int, ...], Params] = {}
        for name, tensor in packet.tensors.items():
            parts.setdefault(tuple(holders[name, id(tensor)]), {})[name] = tensor
        parts.pop((k,), None)
        for held_by, tensors in parts.items():
            if held_by not in made:
                file = tensors_packed(tensors)
                made[held_by] = _pieces(file), file[-CHECKSUM:]
        beside = [(tensors, made[held_by][1]) for held_by, tensors in parts.items()]
        files = {OWN: _pieces(packet.to_bytes(beside))}
        files |= {f"{SHARED}-{n}": made[held_by][0] for n, held_by in enumerate(parts)}
        found.append(
            RecordDict({f"{file}/{n}": one for file, pieces in files.items() for n, one in enumerate(pieces)})
        )
    return found


def to_bytes(packet: Packet) -> bytes:
    """Return the bytes that Flower sends of a packet: its records, and all that is inside them."""
    (records,) = to_records([packet])
    return b"".join(nested_bytes(records))


def from_records(records: RecordDict) -> Packet:
    """Return the packet that records hold. They hold nothing afterwards, as a large packet would be in memory twice.

    Raises:
        UploadError: they are not what ``to_records`` makes.
    """
    files: dict[str, list[bytes]] = {}
    for name, record in records.items():
        files.setdefault(name.rpartition("/")[0], []).append(_content(name, record))
    order = [OWN, *(f"{SHARED}-{n}" for n in range(len(files) - 1))]
    wanted = [f"{file}/{n}" for file in order for n in range(len(files.get(file, [b""])))]
    if list(records) != wanted:
        raise UploadError("{strange} it holds {records!r}.", strange=STRANGE, records=list(records))
    records.clear()
    for file, pieces in files.items():
        sizes = [len(piece) for piece in pieces]
        if any(size != PIECE for size in sizes[:-1]) or not 0 < sizes[-1] <= PIECE:
            raise UploadError(
                "{strange} its pieces of {file!r} are of {sizes!r} bytes.",
                strange=STRANGE,
                file=file,
                sizes=sizes,
            )
    own, *beside = (_joined(pieces) for pieces in files.values())
    return Packet.from_bytes(own, beside)


STRANGE = "A message was not made by this version of fedkeep:"


def _pieces(file: bytes) -> list[ConfigRecord]:
    return [ConfigRecord({CONTENT: file[start : start + PIECE]}) for start in range(0, len(file), PIECE)]


def _joined(pieces: list[bytes]) -> bytes:
    """Return a file, and hold its pieces no longer."""
    file = b"".join(pieces)
    pieces.clear()
    return file


def _content(name: str, record: ArrayRecord | ConfigRecord | MetricRecord) -> bytes:
    """Return the bytes of a record.

    Raises:
        UploadError: it is another than ``_pieces`` makes.
    """
    if not isinstance(record, ConfigRecord) or list(record) != [CONTENT]:
        kind = type(record).__name__
        raise UploadError(
            "{strange} its record {name!r} is {kind} {record!r}.",
            strange=STRANGE,
            name=name,
            kind=kind,
            record=list(record),
        )
    content = record[CONTENT]
    if not isinstance(content, bytes):
        raise UploadError(
            "{strange} its record {name!r} is of type {got}.",
            strange=STRANGE,
            name=name,
            got=type(content).__name__,
        )
    return content

"""The wire form: a packet as Flower's records, and back. Nothing is pickled, and nothing is taken for granted.

A packet travels as the bytes of ``Packet.to_bytes``, as one array. What it shares with other packets that are sent with
it (the global model) is an array beside it, a ``tensor_file``: Flower names what it sends by its hash, so that one is sent once. There are
no more arrays than that, as Flower asks for each by itself, and waits a second or longer for one that is not there yet.
"""

from __future__ import annotations

from collections.abc import Iterable

from flwr.app import Array, ArrayRecord, RecordDict

from fedkeep.core.errors import UploadError, shown
from fedkeep.core.params import Params
from fedkeep.flower.inner import nested_bytes
from fedkeep.remote import Packet
from fedkeep.remote.messages import tensor_file

PACKET, OWN, SHARED = "packet", "own", "shared"
RAW = "fedkeep.packet"
"""Flower's ``stype`` of our arrays."""


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
    made: dict[tuple[int, ...], Array] = {}
    records = []
    for k, packet in enumerate(packets):
        parts: dict[tuple[int, ...], Params] = {}
        for name, tensor in packet.tensors.items():
            parts.setdefault(tuple(holders[name, id(tensor)]), {})[name] = tensor
        parts.pop((k,), None)
        for held_by, tensors in parts.items():
            if held_by not in made:
                made[held_by] = _array(tensor_file(tensors))
        beside = [(tensors, made[held_by].data) for held_by, tensors in parts.items()]
        record = ArrayRecord()  # given an array it would copy it
        record[OWN] = _array(packet.to_bytes(beside))
        for n, held_by in enumerate(parts):
            record[f"{SHARED}-{n}"] = made[held_by]
        records.append(RecordDict({PACKET: record}))
    return records


def to_bytes(packet: Packet) -> bytes:
    """Return the bytes that Flower sends of a packet: its records, and all that is inside them."""
    (records,) = to_records([packet])
    return b"".join(nested_bytes(records))


def from_records(records: RecordDict) -> Packet:
    """Return the packet that records hold.

    Raises:
        UploadError: they are not what ``to_records`` makes.
    """
    arrays = records.get(PACKET)
    if len(records) != 1 or not isinstance(arrays, ArrayRecord) or OWN not in arrays:
        raise UploadError(f"A message was not made by fedkeep: it holds {sorted(records)[:3]}.")
    if wrong := [name for name, array in arrays.items() if array.stype != RAW]:
        raise UploadError(
            f"A message's array {wrong[0][:40]!r} is {arrays[wrong[0]].stype[:40]!r}; wanted {RAW!r}."
        )
    beside = [f"{SHARED}-{n}" for n in range(len(arrays) - 1)]
    if not all(name in arrays for name in beside):
        raise UploadError(f"A message was not made by fedkeep: it holds the arrays {shown(list(arrays))}.")
    return Packet.from_bytes(arrays[OWN].data, [arrays[name].data for name in beside])


def _array(content: bytes) -> Array:
    return Array("uint8", (len(content),), RAW, content)

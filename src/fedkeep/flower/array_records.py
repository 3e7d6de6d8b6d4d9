"""The wire form: a packet as Flower's records, and back. Nothing is pickled, and nothing is taken for granted.

A packet travels as the bytes of ``Packet.to_bytes``, as one array. What it shares with other packets that are sent with
it (the global model) is an array beside it: Flower names what it sends by its hash, so that one is sent once. There are
no more arrays than that, as Flower asks for each by itself, and waits a second or longer for one that is not there yet.
"""

from __future__ import annotations

from collections.abc import Iterable

from flwr.app import Array, ArrayRecord, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

from fedkeep.core.errors import UploadError
from fedkeep.core.params import Params
from fedkeep.remote import Packet
from fedkeep.remote.messages import CHECKSUM

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
        own = parts.pop((k,), {})
        for held_by, tensors in parts.items():
            if held_by not in made:
                made[held_by] = _array(Packet({}, tensors))
        shared = {f"{SHARED}-{n}": made[held_by] for n, held_by in enumerate(parts)}
        about = {
            "header": packet.header,
            "names": list(packet.tensors),
            "shared": {name: _checksum(array) for name, array in shared.items()},
        }
        record = ArrayRecord()
        for name, array in ((OWN, _array(Packet(about, own))), *shared.items()):
            record[name] = array  # given to ArrayRecord() it would be copied
        records.append(RecordDict({PACKET: record}))
    return records


def to_bytes(packet: Packet) -> bytes:
    """Return the bytes that Flower sends of a packet: its records, and all that is inside them."""
    (records,) = to_records([packet])
    return b"".join(part.deflate() for part in get_all_nested_objects(records).values())


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
    own = Packet.from_bytes(arrays[OWN].data)
    match own.header:
        case {"header": dict(header), "names": list(names), "shared": dict(shared), **more} if not more:
            pass
        case _:
            raise UploadError("A message has no header; it was not made by fedkeep.")
    if shared != {name: _checksum(array) for name, array in arrays.items() if name != OWN}:
        raise UploadError("A message was put together from others: its parts are not those that it names.")
    found = [own, *(Packet.from_bytes(arrays[name].data) for name in shared)]
    tensors = {name: tensor for part in found for name, tensor in part.tensors.items()}
    held = sum(len(part.tensors) for part in found)
    if not held == len(tensors) == len(names) or not all(isinstance(n, str) and n in tensors for n in names):
        raise UploadError("A message is malformed: its list of names is not that of its tensors.")
    return Packet(header, {name: tensors[name] for name in names})


def _array(packet: Packet) -> Array:
    content = packet.to_bytes()
    return Array("uint8", (len(content),), RAW, content)


def _checksum(array: Array) -> str:
    return array.data[-CHECKSUM:].hex()

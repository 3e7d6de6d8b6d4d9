"""The wire form: a packet as Flower's records, and back. Nothing is pickled, and nothing is taken for granted.

The header travels as JSON text in one ``ConfigRecord``, with the order of the tensors and a checksum of all; tensors
travel as raw bytes in ``ArrayRecord``s, one for each group of names (their first three parts at most). Flower names
what it sends by its hash, so tensors that several messages share (the global model) are sent once.
"""

from __future__ import annotations

import json
import math
import sys
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from torch import Tensor

from fedkeep.core.errors import UploadError, first_line
from fedkeep.remote import Packet

HEADER, TENSORS = "header", "tensors"
RAW = "fedkeep.raw"
"""Flower's ``stype`` of our arrays: the values' bytes in C order, little-endian."""
GROUP = 3  # parts of a name that may form its group: "group/0/params", "answer/4/deltas"
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128, torch.bool,
        torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    )
}  # fmt: skip


def to_records(packets: Iterable[Packet]) -> list[RecordDict]:
    """Return packets as Flower's records; tensors that several packets hold are turned into bytes once.

    Raises:
        UploadError: a header that JSON cannot hold, or a tensor of a type that does not travel.
        RuntimeError: this machine's byte order is not little-endian.
    """
    if sys.byteorder != "little":
        raise RuntimeError("Tensors travel in little-endian order, and this machine has the other.")
    made: dict[int, tuple[Tensor, Array, int]] = {}
    return [_record(packet, made) for packet in packets]


def to_bytes(packet: Packet) -> bytes:
    """Return the bytes that Flower sends of a packet: its records, and all that is inside them."""
    (records,) = to_records([packet])
    return b"".join(part.deflate() for part in get_all_nested_objects(records).values())


def _record(packet: Packet, made: dict[int, tuple[Tensor, Array, int]]) -> RecordDict:
    try:
        header = json.dumps(dict(packet.header), allow_nan=False, sort_keys=True)
    except (TypeError, ValueError, RecursionError) as error:
        raise UploadError(f"A message's header cannot be written: {first_line(error)}.") from error
    groups, sums = dict[str, ArrayRecord](), dict[str, int]()
    for name, tensor in packet.tensors.items():
        if id(tensor) not in made:
            array = _array(name, tensor)
            made[id(tensor)] = tensor, array, zlib.crc32(array.data)
        group, own = _place(name)
        _, array, sums[name] = made[id(tensor)]
        groups.setdefault(group, ArrayRecord())[own] = array
    told = ConfigRecord({"json": header, "names": list(sums), "crc": _checksum(header, sums)})
    return RecordDict({HEADER: told, **groups})


def _checksum(header: str, sums: Mapping[str, int]) -> int:
    """Return a CRC-32 of a header, and of the tensors' names and own checksums in their order."""
    return zlib.crc32(json.dumps([header, list(sums.items())]).encode())


def _place(name: str) -> tuple[str, str]:
    """Return the record that a tensor stands in, and its key there."""
    parts = name.split("/")
    depth = min(GROUP, len(parts) - 1)
    return "/".join([TENSORS, *parts[:depth]]), "/".join(parts[depth:])


def _array(name: str, tensor: Tensor) -> Array:
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in DTYPES or tensor.layout is not torch.strided:
        raise UploadError(
            f"The tensor {name!r} is {tensor.dtype}, {tensor.layout}; what travels is dense, of one of "
            f"{', '.join(DTYPES)}."
        )
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    return Array(dtype, tuple(tensor.shape), RAW, data)


def from_records(records: RecordDict) -> Packet:
    """Return the packet that records hold.

    Raises:
        UploadError: they are not what ``to_records`` makes.
    """
    text, names, checksum = _header(records)
    found: dict[str, Array] = {}
    for group, record in records.items():
        if group == HEADER:
            continue
        if not isinstance(record, ArrayRecord) or group.split("/")[0] != TENSORS:
            raise UploadError(f"A message holds a record {group[:80]!r} that fedkeep does not send.")
        for own, array in record.items():
            name = "/".join([*group.split("/")[1:], own])
            if _place(name) != (group, own):
                raise UploadError(
                    f"A message holds the tensor {name[:80]!r} in the wrong record, {group[:80]!r}."
                )
            found[name] = array
    if (
        sorted(found) != sorted(names)
        or _checksum(text, {n: zlib.crc32(found[n].data) for n in names}) != checksum
    ):
        raise UploadError("A message was damaged on its way: its checksum is not that of its content.")
    return Packet(_parsed(text), {name: _tensor(name, found[name]) for name in names})


def _header(records: RecordDict) -> tuple[str, list[str], int]:
    record = records.get(HEADER)
    if not isinstance(record, ConfigRecord) or set(record) != {"json", "names", "crc"}:
        raise UploadError("A message has no header; it was not made by fedkeep.")
    text, names, checksum = record["json"], record["names"], record["crc"]
    listed = [name for name in names if isinstance(name, str)] if isinstance(names, list) else None
    if not isinstance(text, str) or listed is None or listed != names or type(checksum) is not int:
        raise UploadError("A message has no header; it was not made by fedkeep.")
    return text, listed, checksum


def _parsed(text: str) -> dict[str, Any]:
    try:
        header = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise UploadError(f"A message's header cannot be read: {first_line(error)}.") from error
    if not isinstance(header, dict):
        raise UploadError(f"A message's header should be a table; it is {type(header).__name__}.")
    return header


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is no number in JSON")


def _tensor(name: str, array: Array) -> Tensor:
    dtype = DTYPES.get(array.dtype)
    if array.stype != RAW or dtype is None:
        raise UploadError(
            f"The tensor {name[:80]!r} came as {array.stype[:40]!r} of {array.dtype[:40]!r}; wanted {RAW!r} of one of "
            f"{', '.join(DTYPES)}."
        )
    shape = array.shape
    if not all(type(size) is int and size >= 0 for size in shape):
        raise UploadError(
            f"The tensor {name[:80]!r} has the shape {shape!r}; sizes are whole numbers from 0 on."
        )
    wanted = math.prod(shape) * dtype.itemsize
    if len(array.data) != wanted:
        raise UploadError(
            f"The tensor {name[:80]!r} of shape {shape} and {array.dtype} takes {wanted} bytes; {len(array.data)} came."
        )
    if not wanted:
        return torch.empty(shape, dtype=dtype)
    content = bytearray(array.data)
    if dtype is torch.bool and max(content) > 1:
        raise UploadError(f"The tensor {name[:80]!r} of {array.dtype} holds a byte that is neither 0 nor 1.")
    return torch.frombuffer(content, dtype=dtype).reshape(shape)

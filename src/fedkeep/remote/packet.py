"""The one form in which anything travels between server and devices: a header of plain values, and named tensors.

As bytes it is a safetensors file, and a checksum of it: a changed value has the right shape, and nobody else would see.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from fedkeep.core.errors import UploadError, first_line
from fedkeep.core.params import Params

CHECKSUM = 4
TYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
)
"""What a tensor that travels may be."""


@dataclass(frozen=True)
class Packet:
    """A message.

    Attributes:
        header: what JSON can hold; ``header["kind"]`` says what the message is.
        tensors: by name. Their order counts, as sums over names and draws go by it: a transport keeps it.
    """

    header: Mapping[str, Any]
    tensors: Params = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """Return the packet as a safetensors file and its CRC-32, 4 bytes, for transports that carry bytes.

        Raises:
            UploadError: a header that JSON cannot hold, or a tensor that a safetensors file cannot: a sparse one, say.
        """
        about = {
            "header": dict(self.header),
            "names": list(self.tensors),
        }  # under one key: safetensors shuffles several
        try:
            packet = json.dumps(about, allow_nan=False, sort_keys=True)
        except (TypeError, ValueError, RecursionError) as error:
            raise UploadError(f"A message's header cannot be written: {first_line(error)}.") from error
        for name, tensor in self.tensors.items():
            if tensor.layout is not torch.strided or tensor.dtype not in TYPES:
                raise UploadError(
                    f"The tensor {name!r} is {tensor.dtype}, {tensor.layout}. Dense ones travel, of these types: "
                    f"{', '.join(str(dtype).removeprefix('torch.') for dtype in TYPES)}."
                )
        content = save(_apart(self.tensors), {"packet": packet})
        return content + zlib.crc32(content).to_bytes(CHECKSUM, "little")

    @classmethod
    def from_bytes(cls, content: bytes) -> Packet:
        """Read what ``to_bytes`` wrote.

        Raises:
            UploadError: the bytes are damaged, or were never a packet.
        """
        content, checksum = content[:-CHECKSUM], content[-CHECKSUM:]
        if zlib.crc32(content).to_bytes(CHECKSUM, "little") != checksum:
            raise UploadError("A message cannot be read: its checksum is not that of its content.")
        try:
            size = int.from_bytes(content[:8], "little")
            text = json.loads(content[8 : 8 + size])["__metadata__"]["packet"]
            about = json.loads(text, parse_constant=_refuse)
            header, names, found = about["header"], about["names"], load(content)
            tensors = {name: found.pop(name) for name in names}
        except (SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise UploadError(f"A message cannot be read: {first_line(error)}.") from error
        if any(
            t.dtype is torch.bool and t.numel() and t.view(torch.uint8).max() > 1 for t in tensors.values()
        ):
            raise UploadError("A message cannot be read: a truth value in it is neither 0 nor 1.")
        if found:
            raise UploadError(f"A message cannot be read: its list of names lacks {sorted(found)[:3]}.")
        if not isinstance(header, dict):
            raise UploadError(f"A message's header should be a table; it is {type(header).__name__}.")
        return cls(header, tensors)


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is no number in JSON")


def _apart(tensors: Mapping[str, Tensor]) -> Params:
    """Return the tensors as a file takes them: dense, on the CPU, and none in the memory of another."""
    taken: set[int] = set()
    out: Params = {}
    for name, value in tensors.items():
        value = value.detach().cpu().contiguous()
        place = value.untyped_storage().data_ptr()
        out[name] = value.clone() if place in taken else value
        taken.add(place)
    return out

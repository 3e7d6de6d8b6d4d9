"""The one form in which anything travels between server and devices: a header of plain values, and named tensors.

As bytes it is a safetensors file, and a checksum of it: a changed value has the right shape, and nobody else would see.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save

from fedkeep.core.errors import UploadError, first_line
from fedkeep.core.params import Params

CHECKSUM = 4


@dataclass(frozen=True)
class Packet:
    """A message.

    Attributes:
        header: what JSON can hold; ``header["kind"]`` says what the message is.
        tensors: by name.
    """

    header: Mapping[str, Any]
    tensors: Params = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """Return the packet as a safetensors file and its CRC-32, 4 bytes, for transports that carry bytes."""
        tensors = {name: value.detach().cpu().contiguous() for name, value in self.tensors.items()}
        header = json.dumps(self.header, allow_nan=False, sort_keys=True)
        content = save(tensors, {"header": header})
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
            header = json.loads(json.loads(content[8 : 8 + size])["__metadata__"]["header"])
            tensors = load(content)
        except (SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise UploadError(f"A message cannot be read: {first_line(error)}.") from error
        if not isinstance(header, dict):
            raise UploadError(f"A message's header should be a table; it is {type(header).__name__}.")
        return cls(header, tensors)

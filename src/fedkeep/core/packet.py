"""A header and named tensors in one piece: what goes to another process or machine, and comes back.

As bytes it is a safetensors file and a checksum of it, so nothing is unpickled where it is read, and what is damaged is
refused.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Collection, Mapping, Sequence
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
    """A message in the form that all transports carry.

    Attributes:
        header: what JSON can hold; ``header["kind"]`` says what the message is.
        tensors: by name. Their order counts, as sums over names and draws go by it: a transport keeps it.
    """

    header: Mapping[str, Any]
    tensors: Params = field(default_factory=dict)

    def to_bytes(self, beside: Sequence[tuple[Collection[str], bytes]] = ()) -> bytes:
        """Return the packet as a safetensors file and its CRC-32, 4 bytes, for transports that carry bytes.

        Args:
            beside: of each file of ``tensors_packed`` that travels beside this one, as others hold it too, the names of
                its tensors, and its checksum: its last 4 bytes.

        Raises:
            UploadError: a header that JSON cannot hold, or a tensor that a safetensors file cannot: a sparse one, say.
        """
        elsewhere = {name for names, _ in beside for name in names}
        own = {name: value for name, value in self.tensors.items() if name not in elsewhere}
        about = {
            "header": dict(self.header),
            "names": list(self.tensors),
            "beside": [checksum.hex() for _, checksum in beside],
        }
        try:
            return tensors_packed(own, json.dumps(about, allow_nan=False, sort_keys=True))
        except (TypeError, ValueError, RecursionError) as error:
            raise UploadError(
                "A message's header cannot be written: {why}.", why=first_line(error)
            ) from error

    @classmethod
    def from_bytes(cls, content: bytes, beside: Sequence[bytes] = ()) -> Packet:
        """Read what ``to_bytes`` wrote.

        Raises:
            UploadError: the bytes are damaged, were never a packet, or those beside it are of another one.
        """
        text, tensors = _read_file(content)
        try:
            about = json.loads(text, parse_constant=_refuse)
        except (ValueError, RecursionError) as error:
            raise _unread(error) from error
        match about:
            case {"header": dict(header), "names": list(names), "beside": list(checksums), **more} if (
                not more
            ):
                pass
            case _:
                raise UploadError("A message cannot be read: it has no header, or one that is no table.")
        if checksums != [file[-CHECKSUM:].hex() for file in beside]:
            raise UploadError(
                "A message was put together from others: its parts are not those that it names."
            )
        files = [tensors, *(_read_file(file)[1] for file in beside)]
        found = {name: value for file in files for name, value in file.items()}
        if not all(isinstance(name, str) and name in found for name in names) or not (
            len(names) == len(found) == sum(map(len, files))
        ):
            raise UploadError("A message cannot be read: its list of names is not that of its tensors.")
        return cls(header, {name: found[name] for name in names})


def tensors_packed(tensors: Params, text: str = "") -> bytes:
    """Return tensors, and a text, as a safetensors file and its CRC-32.

    Raises:
        UploadError: a tensor does not travel: a sparse one, say.
    """
    for name, tensor in tensors.items():
        if tensor.layout is not torch.strided or tensor.dtype not in TYPES:
            raise UploadError(
                "The tensor {name!r} is {dtype}, {layout}. Dense ones travel, of these types: {dtypes}.",
                name=name,
                dtype=tensor.dtype,
                layout=tensor.layout,
                dtypes=", ".join(str(dtype).removeprefix("torch.") for dtype in TYPES),
            )
    content = save(_apart(tensors), {"packet": text})  # under one key: safetensors shuffles several
    return content + zlib.crc32(content).to_bytes(CHECKSUM, "little")


def _unread(error: Exception) -> UploadError:
    return UploadError("A message cannot be read: {why}.", why=first_line(error))


def _read_file(content: bytes) -> tuple[str, Params]:
    """Return text and tensors of what ``tensors_packed`` wrote.

    Raises:
        UploadError: the bytes are damaged, or were never such a file.
    """
    content, checksum = content[:-CHECKSUM], content[-CHECKSUM:]
    if zlib.crc32(content).to_bytes(CHECKSUM, "little") != checksum:
        raise UploadError("A message cannot be read: its checksum is not that of its content.")
    try:
        size = int.from_bytes(content[:8], "little")
        text = str(json.loads(content[8 : 8 + size])["__metadata__"]["packet"])
        tensors: Params = load(content)
    except (SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise _unread(error) from error
    truths = (t.view(torch.uint8) for t in tensors.values() if t.dtype is torch.bool and t.numel())
    if any(t.max() > 1 for t in truths):
        raise UploadError("A message cannot be read: a truth value in it is neither 0 nor 1.")
    return text, tensors


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

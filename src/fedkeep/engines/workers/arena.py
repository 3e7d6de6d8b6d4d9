"""Memory that two processes see, with tensors side by side in it. Nothing is pickled: a layout says what lies where."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import tempfile
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fedkeep.core.params import Params

ALIGNMENT = 64
"""Bytes; as torch's own memory, because a matrix product's last bits may depend on it."""

_Key = tuple[tuple[str, torch.dtype, tuple[int, ...], tuple[int, ...]], ...]


class Arena:
    """One process puts tensors in, the other takes them out; who puts when is up to them.

    On Linux the memory has no name in any file system, so it is gone with the last process that holds it, however that
    ended. Elsewhere it is a temporary file, which ``close`` removes. An arena goes to another process by fork, or as
    an argument at its start.

    Args:
        size: bytes to begin with; it grows as needed.
    """

    def __init__(self, size: int = 1 << 16) -> None:
        self.named = not hasattr(os, "memfd_create")
        if self.named:
            self._file, self.path = tempfile.mkstemp(prefix="fedkeep-")
        else:
            self._file = os.memfd_create("fedkeep")
            self.path = f"/proc/{os.getpid()}/fd/{self._file}"
        self._map(size)

    def _map(self, size: int) -> None:
        if (
            os.name != "nt" and os.fstat(self._file).st_size < size
        ):  # Windows extends the file as it is mapped
            os.ftruncate(self._file, size)
        self._begin(torch.frombuffer(mmap.mmap(self._file, size), dtype=torch.uint8))

    def _begin(self, memory: Tensor) -> None:
        self._bytes = memory
        self._put: tuple[_Key, str, list[Tensor]] = ((), _layout(len(memory), []), [])
        self._taken: tuple[str, Params] = ("", {})

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "named": self.named, "size": len(self._bytes)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.path, self.named = state["path"], state["named"]
        self._file = os.open(self.path, os.O_RDWR | getattr(os, "O_BINARY", 0))
        self._map(state["size"])

    @property
    def file(self) -> int:
        """The number of the open file."""
        return self._file

    def put(self, tensors: Mapping[str, Tensor]) -> str:
        """Copy tensors in, over what was there before; return the layout by which ``take`` finds them."""
        key = tuple((n, t.dtype, tuple(t.shape), _strides(t)) for n, t in tensors.items())
        if key != self._put[0]:
            entries: list[list[Any]] = []
            end = 0
            for name, kind, shape, strides in key:
                entries.append([name, str(kind).removeprefix("torch."), shape, strides, end])
                size = kind.itemsize * tensors[name].numel()
                end += -(-size // ALIGNMENT) * ALIGNMENT
            if end > len(self._bytes):
                self._map(max(end, 2 * len(self._bytes)))
            self._put = (key, _layout(len(self._bytes), entries), [self._view(*e[1:]) for e in entries])
        if tensors:
            torch._foreach_copy_(self._put[2], [t.detach() for t in tensors.values()])
        return self._put[1]

    def take(self, layout: str) -> Params:
        """Return what ``put`` put in, by name: views of the shared memory, which the next ``put`` changes."""
        if layout != self._taken[0]:
            size, entries = json.loads(layout)
            if size > len(self._bytes):
                self._map(size)
            self._taken = (layout, {name: self._view(*entry) for name, *entry in entries})
        return dict(self._taken[1])

    def _view(self, kind: str, shape: list[int], strides: list[int], start: int) -> Tensor:
        dtype: torch.dtype = getattr(torch, kind)
        count = 1
        for length in shape:
            count *= length
        flat = self._bytes[start : start + count * dtype.itemsize].view(dtype)
        return flat.as_strided(shape, strides)

    def close(self) -> None:
        """Let go of the file; the memory lives on while another process holds it."""
        with contextlib.suppress(OSError):
            os.close(self._file)
        self._begin(torch.empty(0, dtype=torch.uint8))  # Windows removes no file that is mapped
        if self.named:
            with contextlib.suppress(OSError):
                os.unlink(self.path)


def _layout(size: int, entries: list[list[Any]]) -> str:
    return json.dumps([size, entries])


def _strides(tensor: Tensor) -> tuple[int, ...]:
    """Return the strides that a copy has: those of a dense tensor in another order, e.g. channels last, are kept."""
    return (tensor if tensor.is_contiguous() else torch.empty_like(tensor, device="meta")).stride()

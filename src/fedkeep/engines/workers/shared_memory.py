"""Memory that two processes see: tensors side by side, and data sets on their way to a process that is not forked.

Nothing is pickled: a layout says what lies where. Arrays that are on disk are mapped again in the other process.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedkeep.core.params import Params
from fedkeep.data import FederatedData, Ragged

ALIGNMENT = 64
"""Bytes; as torch's own memory, because a matrix product's last bits may depend on it."""

Array = NDArray[Any]
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


@dataclass(frozen=True)
class _Mapped:
    """An array in a file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    start: int

    @classmethod
    def of(cls, array: Array) -> _Mapped | None:
        """Return where an array lies on disk; None: it lies in memory."""
        root: Any = array
        while isinstance(root, np.ndarray) and not (isinstance(root, np.memmap) and root.filename):
            root = root.base
        if root is None or not isinstance(root, np.memmap) or min(array.strides, default=0) < 0:
            return None
        start = array.__array_interface__["data"][0] - root.__array_interface__["data"][0]
        return cls(Path(str(root.filename)), array.dtype.str, array.shape, array.strides, root.offset + start)

    def open(self) -> Array:
        """Map the array."""
        flat = np.memmap(self.file, np.uint8, "r")
        return np.ndarray(self.shape, self.dtype, flat, self.start, self.strides)


@dataclass
class SentData:
    """What a ``FederatedData`` is made of, to be an argument of a new process."""

    data: FederatedData
    arena: Arena = field(default_factory=Arena)
    ragged: list[str] = field(default_factory=list)
    mapped: dict[str, _Mapped] = field(default_factory=dict)
    layout: str = ""

    def __post_init__(self) -> None:
        arrays: dict[str, Array] = {"offsets": self.data.offsets}
        if self.data.bounds is not None:
            arrays["bounds"] = self.data.bounds
        for name, column in self.data.columns.items():
            if isinstance(column, Ragged):
                self.ragged.append(name)
                arrays |= {f"column/{name}": column.values, f"starts/{name}": column.offsets}
            else:
                arrays[f"column/{name}"] = column
        found = {name: _Mapped.of(array) for name, array in arrays.items()}
        self.mapped = {name: place for name, place in found.items() if place is not None}
        self.layout = self.arena.put(
            {
                n: torch.from_numpy(np.require(a, requirements="W"))
                for n, a in arrays.items()
                if n not in self.mapped
            }
        )

    def __getstate__(self) -> dict[str, Any]:
        about = {"ids": self.data.ids, "meta": self.data.meta}
        return {name: value for name, value in vars(self).items() if name != "data"} | about

    def __setstate__(self, state: dict[str, Any]) -> None:
        arena, layout = state["arena"], state["layout"]
        shared: Params = arena.take(layout)
        arrays = {name: value.numpy() for name, value in shared.items()}
        arrays |= {name: place.open() for name, place in state["mapped"].items()}
        columns: dict[str, Any] = {
            name.removeprefix("column/"): array
            for name, array in arrays.items()
            if name.startswith("column/")
        }
        columns |= {name: Ragged(columns[name], arrays[f"starts/{name}"]) for name in state["ragged"]}
        self.data = FederatedData(
            columns, arrays["offsets"], state["ids"], arrays.get("bounds"), state["meta"], check=False
        )

"""What clients keep as bytes: a row of values for each."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from fedkeep.core.errors import StoreError
from fedkeep.core.params import Params


class RowFormat:
    """How values by name stand in a row: one after the other, each at a multiple of 8 bytes, gaps zero.

    Args:
        initial: gives names, shapes and dtypes.

    Attributes:
        bytes: the size of a row.
    """

    def __init__(self, initial: Mapping[str, Tensor]) -> None:
        self._columns: list[tuple[str, int, int, torch.dtype, tuple[int, ...]]] = []
        offset = 0
        for name, value in initial.items():
            size = value.numel() * value.element_size()
            self._columns.append((name, offset, size, value.dtype, tuple(value.shape)))
            offset += -(-size // 8) * 8
        self.bytes = offset
        kinds = {dtype for _, _, size, dtype, _ in self._columns if size}
        known: dict[torch.dtype, str] = {torch.float32: "f4", torch.float64: "f8"}
        self._kind = known.get(next(iter(kinds))) if len(kinds) == 1 else None

    def columns(self) -> list[list[object]]:
        """Return name, dtype and shape of each value."""
        return [[name, str(dtype), list(shape)] for name, _, _, dtype, shape in self._columns]

    def pack(self, params: Mapping[str, Tensor], clients: int) -> np.ndarray:
        """Return rows (clients, bytes) of values, each (clients, *shape).

        Raises:
            StoreError: a shape or a dtype differs.
        """
        rows = np.zeros((clients, self.bytes), np.uint8)
        for name, start, size, dtype, shape in self._columns:
            value = params[name].detach().cpu()
            if value.dtype != dtype or tuple(value.shape) != (clients, *shape):
                raise StoreError(
                    "Private {name!r} should be {wanted} {wanted_dtype}; got {got} {got_dtype}.",
                    name=name,
                    wanted=(clients, *shape),
                    wanted_dtype=dtype,
                    got=tuple(value.shape),
                    got_dtype=value.dtype,
                )
            if size:
                flat = value.contiguous().reshape(clients, -1).view(torch.uint8)
                rows[:, start : start + size] = flat.numpy()
        return rows

    def unpack(self, rows: np.ndarray) -> Params:
        """Return copies of the values, each (clients, *shape), of rows (clients, bytes)."""
        out: Params = {}
        for name, start, size, dtype, shape in self._columns:
            if size and len(rows):
                part = rows[:, start : start + size].copy()
                out[name] = torch.from_numpy(part).view(dtype).reshape(len(rows), *shape)
            else:
                out[name] = torch.empty((len(rows), *shape), dtype=dtype)
        return out

    def nonfinite(self, rows: np.ndarray) -> tuple[int, str] | None:
        """Return the first row and name with a NaN or an infinity.

        All values are looked at at once where they are of one type: gaps are zeros. It is done in every round.
        """
        if not len(rows) or (self._kind is not None and bool(np.isfinite(rows.view(self._kind)).all())):
            return None
        for name, start, size, dtype, _ in self._columns:
            if not dtype.is_floating_point or not size:
                continue
            part = torch.from_numpy(np.ascontiguousarray(rows[:, start : start + size])).view(dtype)
            finite = torch.isfinite(part).all(1)
            if not bool(finite.all()):
                return int(finite.logical_not().nonzero()[0]), name
        return None


def hash_of_ids(ids: Sequence[str]) -> str:
    """Return the SHA-256 of clients' ids, in their order; a million need no list."""
    found, rest = hashlib.sha256(), iter(ids)
    while some := list(islice(rest, 4096)):
        found.update(json.dumps(some).encode())
    return found.hexdigest()

"""A data set on its way to a process that is not forked: arrays are shared, or mapped again where they are on disk."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedkeep.core.params import Params
from fedkeep.data import FederatedData, Ragged
from fedkeep.engines.workers.arena import Arena

Array = NDArray[Any]


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

"""The mini-batches of many clients side by side, shape (clients, examples, …)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedkeep.core.params import Batch
from fedkeep.data import Ragged
from fedkeep.engines.batches import load_batch
from fedkeep.engines.tables.local_rows import Examples, LocalTable


@dataclass(frozen=True)
class Together:
    """A step that some clients take together.

    Attributes:
        lanes: their positions, ascending.
        rows: (clients, examples) row numbers of their mini-batches, all of one size.
        gathered: where the examples are.
    """

    lanes: list[int]
    rows: np.ndarray
    gathered: Gathered

    def batch(self) -> Batch:
        """Return the mini-batches, columns (clients, examples, …)."""
        return self.gathered.batch(self.lanes, self.rows)


def lockstep(
    plans: Sequence[Sequence[np.ndarray]], full: int, through: Sequence[bool]
) -> Iterator[tuple[list[int], np.ndarray]]:
    """Yield the steps of clients who go through their own mini-batches, each in its own order, together where they can:
    their positions, ascending, and (clients, examples) row numbers.

    Whoever has a full mini-batch (of ``full`` examples) next, steps; the others wait. When nobody has, those with
    mini-batches of the same size step together. So nothing is padded, whoever is through is left out, and clients
    meet again at the start of each pass.

    Args:
        plans: each client's mini-batches.
        full: how many examples a full one has.
        through: who takes no more steps, by client; may change on the way.
    """
    at = [0] * len(plans)
    while ahead := [k for k, plan in enumerate(plans) if at[k] < len(plan) and not through[k]]:
        groups: dict[int, list[int]] = {}
        for k in ahead:
            groups.setdefault(len(plans[k][at[k]]), []).append(k)
        for who in [groups[full]] if full in groups else groups.values():
            yield who, np.stack([plans[k][at[k]] for k in who])
            for k in who:
                at[k] += 1


class Gathered:
    """The training examples of some clients, brought to the device at once.

    Args:
        data: the data set.
        rows: each client's row numbers, consecutive.
        tables: each client's local tables; ids become positions in them.
        kind: the floating type of the columns.
        device: where they go.
    """

    def __init__(
        self,
        data: Examples,
        rows: Sequence[np.ndarray],
        tables: Sequence[Sequence[LocalTable]],
        kind: torch.dtype,
        device: str,
    ) -> None:
        ends = np.cumsum([len(r) for r in rows])
        starts = ends - [len(r) for r in rows]
        self.device = device
        # A client's row r lies at r + shift.
        self.shift = np.array([start - r[0] if len(r) else 0 for start, r in zip(starts, rows, strict=True)])
        columns = load_batch(data, np.concatenate(rows), "cpu", kind)
        for start, end, own in zip(starts, ends, tables, strict=True):
            for column, table in {t.column: t for t in own}.items():
                columns[column][start:end] = table.local(columns[column][start:end])
        ragged = [name for name in columns if isinstance(data.columns.get(name), Ragged)]
        self.lengths = {name: columns[f"{name}_length"].numpy() for name in ragged}
        self.columns = {name: self._sent(value) for name, value in columns.items()}

    def _sent(self, value: Tensor) -> Tensor:
        if not self.device.startswith("cuda"):
            return value.to(self.device)
        return value.pin_memory().to(self.device, non_blocking=True)

    def batch(self, who: Sequence[int], rows: np.ndarray) -> Batch:
        """Return clients' mini-batches, columns (clients, examples, …); texts are padded to the longest of them."""
        places = rows + self.shift[who][:, None]
        index = self._sent(torch.from_numpy(places.reshape(-1)))
        batch: Batch = {}
        for name, column in self.columns.items():
            if name in self.lengths:
                column = column[:, : int(self.lengths[name][places].max())]
            batch[name] = column.index_select(0, index).reshape(*places.shape, *column.shape[1:])
        return batch

    @property
    def nbytes(self) -> int:
        """The bytes of all columns."""
        return sum(c.numel() * c.element_size() for c in self.columns.values())

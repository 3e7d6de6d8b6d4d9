"""The contenders of ``benchmarks.speed``: each runs rounds of a workload in a process of its own.

A module here has ``run(options, serve)``, which makes an object with ``round(turn, clients) -> loss`` and ``state()``,
and hands it to ``serve``; see ``__main__`` for what is said over the pipes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from benchmarks.workloads import Workload, padded, workload


class Contender(Protocol):
    """Runs rounds, from the workload's initial values on."""

    @property
    def facts(self) -> dict[str, str]:
        """What a table of results shall say beside the name, e.g. the engine that ``auto`` picked."""
        ...

    def round(self, turn: int, clients: list[int]) -> float:
        """Run a round; return the mean training loss."""
        ...

    def state(self) -> dict[str, Tensor]:
        """Return the server's federated values, under the names of the plain model."""
        ...


Serve = Callable[[Contender], None]


@dataclass(frozen=True)
class Options:
    """What a contender's process is told at its start."""

    contender: str
    workload: str
    cohort: int | None
    quick: bool
    threads: int
    double: bool
    device: str

    @property
    def work(self) -> Workload:
        """The workload."""
        return workload(self.workload, self.cohort, self.quick)

    @property
    def padded_work(self) -> Workload:
        """The workload, with ragged texts padded instead of packed: the faster of the two ways."""
        return padded(self.work)

    @property
    def dtype(self) -> torch.dtype:
        """The type of the model's numbers."""
        return torch.float64 if self.double else torch.float32

"""What a step costs a CPU, one client after the other and side by side: a model of it, with measured coefficients.

``benchmarks/costs.py`` measures them and checks the choices that follow. Nothing here looks at a clock, so a
configuration gives the same choice anywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils.flop_counter import flop_registry

from fedkeep.core.dispatch import EagerMode
from fedkeep.engines.base import Job
from fedkeep.engines.vectorised.memory import first_clients

LOOKUPS = ("embedding", "gather", "index", "index_select")
"""Operations that read no more of their arguments than they give."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """One client's step of each phase.

    Attributes:
        calls: operations.
        moved: bytes that they read and write.
        flops: floating-point operations of products of matrices.
        measured: whether all are of kinds that were measured: no convolutions, no kernels of other packages.
    """

    calls: int
    moved: int
    flops: int
    measured: bool = True


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Microseconds that a step takes a client.

    Attributes:
        alone: whatever it does.
        step: of a step, which is shared by those who take it together.
        call: of each operation, shared likewise.
        moved: of each MB that is read and written.
        flops: of each million floating-point operations.
    """

    alone: float
    step: float
    call: float
    moved: float
    flops: float

    def of(self, work: Work, together: float) -> float:
        """Return a client's time where so many take a step together."""
        shared = (self.step + self.call * work.calls) / together
        return self.alone + shared + (self.moved * work.moved + self.flops * work.flops) / 1e6


ONE_BY_ONE = Costs(alone=143.5, step=0.0, call=6.738, moved=63.22, flops=14.77)
SIDE_BY_SIDE = Costs(alone=29.52, step=487.4, call=27.56, moved=165.6, flops=8.689)
"""Fitted by ``python -m benchmarks.costs`` (AMD EPYC, AVX-512, one thread); ``results/costs.json`` has the times."""


def times_faster(work: Work, together: float) -> float:
    """Return how many times faster clients are trained side by side than one after the other."""
    return ONE_BY_ONE.of(work, 1.0) / SIDE_BY_SIDE.of(work, together)


class Flops(EagerMode):
    """Counts floating-point operations of products of matrices, by torch's own formulas.

    Torch's ``FlopCounterMode`` counts the same, and loads the compiler.
    """

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation, in its parts where it has any, and count it."""
        given = kwargs or {}
        with self:
            found = func.decompose(*args, **given)
        if found is not NotImplemented:
            return found
        found = func(*args, **given)
        if (formula := flop_registry.get(func.overloadpacket)) is not None:
            self.total += formula(*args, **given, out_val=found)
        return found


class Counting(EagerMode):
    """Counts operations other than views, and the bytes that they read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = self.moved = 0
        self.measured = True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation, and count it."""
        found = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.calls += 1
            self.measured &= func.namespace in ("aten", "prims") and "conv" not in func.name()
            made = sum(v.nbytes for v in _tensors(found))
            some = func.overloadpacket.__name__ in LOOKUPS
            self.moved += made + (made if some else sum(v.nbytes for v in _tensors(args)))
        return found


def work_of(job: Job, client: int) -> Work:
    """Return what a first step takes of one client, all phases together."""
    clients = first_clients(job, [client])
    counting, flops = Counting(), Flops()
    job.net.train()
    for number in range(len(clients.client.phases)):
        phase = clients.begin(number)
        step = next(clients.mini_batches(number), None)
        if step is None or not phase.names:
            continue
        clients.seed(number)
        with flops, counting:
            phase.take(step)
    return Work(
        calls=counting.calls, moved=counting.moved, flops=flops.total, measured=counting.measured
    )  # fmt: skip


def _tensors(values: Any) -> list[Tensor]:
    if isinstance(values, Tensor):
        return [values]
    return [t for v in values for t in _tensors(v)] if isinstance(values, tuple | list) else []

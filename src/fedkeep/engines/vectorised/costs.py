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
OF_PARAMETERS = ("_foreach_", "_fused_")
"""How operations on lists of parameters begin: the optimiser's."""
RELABELLED = "_unsafe_view"
"""A view that is not one by torch's word; nothing is moved."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """One client's step of each phase.

    Attributes:
        calls: operations.
        kept: bytes of parameters, gradients and moments that the optimiser reads and writes.
        moved: bytes that other operations read and write.
        flops: floating-point operations of products of matrices.
        convolved: floating-point operations of convolutions.
        measured: whether all are of kinds that were measured: no convolutions in groups, in three dimensions or
            transposed, no kernels of other packages.
    """

    calls: int
    kept: int
    moved: int
    flops: int
    convolved: int
    measured: bool = True


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Microseconds that a step takes a client.

    Attributes:
        alone: whatever it does.
        call: of each operation, which is shared by those who take a step together.
        kept: of each MB that the optimiser reads and writes.
        moved: of each MB that others read and write.
        flops: of each million floating-point operations of products.
        convolved: of each million of convolutions.
    """

    alone: float
    call: float
    kept: float
    moved: float
    flops: float
    convolved: float

    def of(self, work: Work, together: float) -> float:
        """Return a client's time where so many take a step together."""
        memory = self.kept * work.kept + self.moved * work.moved
        products = self.flops * work.flops + self.convolved * work.convolved
        return self.alone + self.call * work.calls / together + (memory + products) / 1e6


ONE_BY_ONE = Costs(alone=142.0, call=7.627, kept=0.0, moved=39.89, flops=11.28, convolved=14.45)
SIDE_BY_SIDE = Costs(alone=52.89, call=33.48, kept=406.2, moved=64.72, flops=11.55, convolved=14.10)
"""Fitted by ``python -m benchmarks.costs`` (AMD EPYC, AVX-512, one thread); ``results/costs.json`` has the times."""


def times_faster(work: Work, together: float) -> float:
    """Return how many times faster clients are trained side by side than one after the other."""
    return ONE_BY_ONE.of(work, 1.0) / SIDE_BY_SIDE.of(work, together)


class Flops(EagerMode):
    """Counts floating-point operations of products of matrices and of convolutions, by torch's own formulas.

    Torch's ``FlopCounterMode`` counts the same, and loads the compiler.
    """

    def __init__(self) -> None:
        super().__init__()
        self.products = self.convolved = 0

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
            done = formula(*args, **given, out_val=found)
            if _convolves(func):
                self.convolved += done
            else:
                self.products += done
        return found


class Counting(EagerMode):
    """Counts operations other than views, and the bytes that they read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = self.kept = self.moved = 0
        self.measured = True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation, and count it."""
        found = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if func.is_view or name == RELABELLED:
            return found
        self.calls += 1
        self.measured &= func.namespace in ("aten", "prims") and (
            not _convolves(func) or _is_plain(name, args)
        )
        made = sum(v.nbytes for v in _tensors(found))
        through = made + (made if name in LOOKUPS else sum(v.nbytes for v in _tensors(args)))
        if name.startswith(OF_PARAMETERS):
            self.kept += through
        else:
            self.moved += through
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
        calls=counting.calls,
        kept=counting.kept,
        moved=counting.moved,
        flops=flops.products,
        convolved=flops.convolved,
        measured=counting.measured,
    )


def _convolves(func: Any) -> bool:
    return "conv" in func.name()


def _is_plain(name: str, args: tuple[Any, ...]) -> bool:
    """Tell whether a convolution is of one or two dimensions, in one group and not transposed."""
    if name == "convolution":
        _, weight, *_, transposed, _, groups = args
    elif name == "convolution_backward":
        _, _, weight, *_, transposed, _, groups, _ = args
    else:
        return False
    return weight.dim() <= 4 and not transposed and groups == 1


def _tensors(values: Any) -> list[Tensor]:
    if isinstance(values, Tensor):
        return [values]
    return [t for v in values for t in _tensors(v)] if isinstance(values, tuple | list) else []

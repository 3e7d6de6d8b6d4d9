"""What training a client costs a CPU: its memory, which says how many fit side by side, and its time.

The model of time has coefficients for one client after the other and for clients side by side; ``benchmarks/costs.py``
measures them and checks the choices that follow. Nothing here looks at a clock, so a configuration gives the same
choice anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from fedkeep.core.errors import MethodError
from fedkeep.core.modes import EagerMode
from fedkeep.core.params import nbytes, prefixed, tensors_in
from fedkeep.data import Ragged
from fedkeep.engines.client_step import ClientToTrain, Job
from fedkeep.engines.first_values import defaults, first_global
from fedkeep.engines.round import with_links
from fedkeep.engines.vectorised.stacked_lanes import Stacked, StackedPass, lengthened
from fedkeep.methods.hook_checks import UPLOAD

CPU_BYTES = 64 << 20
"""What clients side by side may take on a CPU: about what stays in its caches."""
CUDA_SHARE = 0.5
"""The share of a GPU's free memory that they may take; the estimate leaves out what its libraries need for work."""

LOOKUPS = ("embedding", "gather", "index", "index_select")
"""Operations that read no more of their arguments than they give."""
OF_PARAMETERS = ("_foreach_", "_fused_")
"""How operations on lists of parameters begin: the optimiser's."""
RELABELLED = "_unsafe_view"
"""A view that is not one by torch's word; nothing is moved."""


@dataclass(kw_only=True)
class StepCost:
    """What one client's step of each phase takes.

    Attributes:
        calls: operations.
        kept: bytes of parameters, gradients and moments that the optimiser reads and writes.
        moved: bytes that other operations read and write.
        flops: floating-point operations of products of matrices.
        convolved: floating-point operations of convolutions.
        measured: whether all are of kinds that were measured: no convolutions in groups, in three dimensions or
            transposed, no kernels of other packages.
    """

    calls: int = 0
    kept: int = 0
    moved: int = 0
    flops: int = 0
    convolved: int = 0
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

    def of(self, step: StepCost, together: float) -> float:
        """Return a client's time where so many take a step together."""
        memory = self.kept * step.kept + self.moved * step.moved
        products = self.flops * step.flops + self.convolved * step.convolved
        return self.alone + self.call * step.calls / together + (memory + products) / 1e6


ONE_BY_ONE = Costs(alone=142.0, call=7.627, kept=0.0, moved=39.89, flops=11.28, convolved=14.45)
SIDE_BY_SIDE = Costs(alone=52.89, call=33.48, kept=406.2, moved=64.72, flops=11.55, convolved=14.10)
"""Fitted by ``python -m benchmarks.costs`` (AMD EPYC, AVX-512, one thread); ``results/costs.json`` has the times."""


def times_faster(step: StepCost, together: float) -> float:
    """Return how many times faster clients are trained side by side than one after the other."""
    return ONE_BY_ONE.of(step, 1.0) / SIDE_BY_SIDE.of(step, together)


def step_cost(job: Job, client: int) -> StepCost:
    """Return what a first step takes of one client, all phases together."""
    clients, counting = first_clients(job, [client]), _OperationCount()
    job.net.train()
    for number in range(len(clients.client.phases)):
        phase = StackedPass(clients, number)
        step = next(clients.mini_batches(number), None)
        if step is None or not phase.names:
            continue
        clients.seed(number)
        with counting:
            phase.take(step)
    return counting.cost


class _OperationCount(EagerMode):
    """Counts operations other than views, the bytes that they read and write, and floating-point operations.

    These by torch's own formulas; its ``FlopCounterMode`` counts the same, and loads the compiler.
    """

    def __init__(self) -> None:
        super().__init__()
        self.cost = StepCost()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation, and count it."""
        found, cost = func(*args, **(kwargs or {})), self.cost
        name, convolves = func.overloadpacket.__name__, "conv" in func.name()
        if (formula := flop_registry.get(func.overloadpacket)) is not None:
            done = formula(*args, **(kwargs or {}), out_val=found)
            cost.flops += 0 if convolves else done
            cost.convolved += done if convolves else 0
        if func.is_view or name == RELABELLED:
            return found
        cost.calls += 1
        cost.measured &= func.namespace in ("aten", "prims") and (not convolves or _is_plain(name, args))
        made = _bytes(found)
        through = made + (made if name in LOOKUPS else _bytes(args))
        if name.startswith(OF_PARAMETERS):
            cost.kept += through
        else:
            cost.moved += through
        return found


def _is_plain(name: str, args: tuple[Any, ...]) -> bool:
    """Tell whether a convolution is of one or two dimensions, in one group and not transposed."""
    if name == "convolution":
        _, weight, *_, transposed, _, groups = args
    elif name == "convolution_backward":
        _, _, weight, *_, transposed, _, groups, _ = args
    else:
        return False
    return weight.dim() <= 4 and not transposed and groups == 1


def _bytes(values: Any) -> int:
    return sum(value.nbytes for value in tensors_in(values))


def room(job: Job, memory: int | None = None) -> int:
    """Return how many clients of a job are trained at once, at least 1.

    Each is counted as one that has the most examples and the longest texts of all the data. So on a CPU the number
    depends on the job alone, and a run that is continued computes as one that was never stopped.

    Args:
        job: what is trained.
        memory: bytes that they may take together; None: 64 MiB on a CPU, half of what is free on a GPU.
    """
    largest = [int(np.argmax(job.data.counts("train")))]
    one = first_clients(job, largest)
    texts = {n: c for n, c in job.data.columns.items() if isinstance(c, Ragged)}
    longest = {
        n: int(np.diff(c.offsets).max(initial=1)) for n, c in texts.items() if n in one.examples.lengths
    }
    if memory is None:
        cuda = job.device.startswith("cuda")
        memory = int(CUDA_SHARE * torch.cuda.mem_get_info(job.device)[0]) if cuda else CPU_BYTES
    return max(1, memory // max(1, bytes_of(one, longest)))


def first_clients(job: Job, clients: Sequence[int]) -> Stacked:
    """Return clients as they are in the first round, each at its default."""
    server = first_global(job.method, job.net, job.data)
    links = prefixed(UPLOAD, job.method.chain().sent(server.links))
    sent = [with_links(job.method.server.sent(server, str(job.data.ids[c])), links).flat for c in clients]
    if job.method.server.send is None:
        sent = sent[:1] * len(clients)
    work = [ClientToTrain(c, each) for c, each in zip(clients, sent, strict=True)]
    return Stacked(job, work, defaults(job.store, clients), 0, 0.0)


def bytes_of(one: Stacked, longest: Mapping[str, int]) -> int:
    """Return what training takes for one client: values, gradients, moments, and the activations of a step.

    Args:
        one: the client, alone.
        longest: texts are padded to this length, by column.
    """
    one.job.net.train()
    one.seed(0)
    needed = 0
    for number in range(len(one.client.phases)):
        phase = StackedPass(one, number)
        step = next(one.mini_batches(number), None)
        if step is None or not phase.names:
            continue
        batch = step.batch()
        batch |= {n: lengthened(batch[n], size) for n, size in longest.items()}
        saved = _saved(partial(phase.computed, step, slice(0, 1), batch))
        moments = phase.phase.optimizer.moments
        trained = nbytes({n: one.params[n] for n in phase.names})
        # Gradients and what the step needs for work; and as much as was saved once more, while gradients flow back.
        needed = max(needed, (2 + moments) * trained + 2 * saved)
    return one.nbytes + needed


def _saved(compute: Callable[[], object]) -> int:
    """Return the bytes that autograd saves on the way; all that is made where a loss takes gradients of its own."""
    saved: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    try:
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            compute()
    except MethodError:
        # torch.func allows no such hooks where gradients are taken within; any other error comes once more.
        made = _BytesMade()
        with made:
            compute()
        return made.nbytes
    return sum(saved.values())


class _BytesMade(EagerMode):
    """Adds up the bytes of all tensors that operations return while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation, and note what it returns."""
        found = func(*args, **(kwargs or {}))
        self.nbytes += sum(value.nbytes for value in tensors_in(found) if not value._is_view())
        return found

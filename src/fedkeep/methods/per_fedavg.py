"""Per-FedAvg: a federated model that is good after one step on a client's own examples.

Source: Fallah, Mokhtari and Ozdaglar, Personalized Federated Learning: A Meta-Learning Approach, arXiv 2002.07948,
eq. 3 and 6, algorithm 1.
One round: (1) a cohort downloads w; (2) each client minimises F_k(w − α ∇F_k(w)), every mini-batch in two halves D and
D': w ← w − β (I − α ∇²F(w; D)) ∇F(w̃; D') with w̃ = w − α ∇F(w; D); the bracket is left out (``"first"``), computed
(``"exact"``), or its product taken by a difference of two gradients (``"free"``); (3) it uploads its change; (4) the
server takes the plain mean, w ← Σ_k w_k / m (algorithm 1: 1 / (r n), with r n clients). Whoever predicts, takes the step on its own examples first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from fedkeep.core.errors import MethodError, check_choice, check_range
from fedkeep.core.net import Net
from fedkeep.core.optim import sgd
from fedkeep.core.params import Batch, Params, gradients
from fedkeep.methods.base import Adapt, Method
from fedkeep.methods.client import Client
from fedkeep.methods.phase import Phase, telling
from fedkeep.methods.resolve import batch_norms
from fedkeep.methods.server import Server, averaging
from fedkeep.methods.terms import Around, Term, cross_entropy
from fedkeep.nn.operation import functorch_active
from fedkeep.split import Split

Order = Literal["first", "exact", "free"]
NORMS = {
    torch.layer_norm,
    torch.native_layer_norm,
    functional.layer_norm,
    torch.batch_norm,
    torch.native_batch_norm,
    functional.batch_norm,
    torch.instance_norm,
    functional.instance_norm,
}
Value = Callable[[Params, Batch], Tensor]


@dataclass(frozen=True)
class AfterOneStep(Around):
    """L(w − α ∇L(w; D); D'), D and D' the examples of even and odd place; a batch of one is both.

    With batch normalisation, which wants two examples, a batch of fewer than four is both.

    Attributes:
        rate: α, at least 0; 0 is L on D'.
        loss: L.
        order: of the derivative: ``"first"``, ``"exact"`` (layers must allow second derivatives, as fedkeep's do),
            or ``"free"`` of Hessians: ∇²L u ≈ (∇L(w + δu) − ∇L(w − δu)) / 2δ with u = ∇L(w̃; D').
        delta: δ · ‖u‖, the length of that step to both sides.
    """

    rate: float = 0.01
    loss: Term = cross_entropy()
    order: Order = "first"
    delta: float = 1e-2

    def __post_init__(self) -> None:
        check_choice("order must be", self.order, get_args(Order), MethodError)
        check_range("[0, inf]", MethodError, rate=self.rate)
        check_range("(0, inf]", MethodError, delta=self.delta)

    def __call__(self, net: Net, params: Params, batch: Batch, received: Mapping[str, Tensor]) -> Tensor:
        first, second = halves(batch, 2 if batch_norms(net.module) else 1)
        names = sorted(net.trainable() & params.keys())

        def value(changed: Params, examples: Batch) -> Tensor:
            return self.loss(net, {**params, **changed}, examples, received)

        w = {n: params[n] for n in names}
        exact = self.order == "exact" and torch.is_grad_enabled()
        trained = {n: v for n, v in w.items() if exact and (v.requires_grad or functorch_active())}
        with RefusedOperations() if exact and functorch_active() else nullcontext():
            inner = slopes(value, {**leaves(w), **trained}, first, graph=exact)
        stepped = value({n: w[n] - self.rate * g for n, g in inner.items()}, second)
        if self.order != "free" or not self.rate:
            return stepped
        still = {n: w[n].detach() for n in names}
        outer = slopes(value, leaves({n: still[n] - self.rate * inner[n] for n in inner}), second)
        length = torch.stack([g.square().sum() for g in outer.values()]).sum().sqrt()
        step = self.delta / length.clamp_min(torch.finfo(length.dtype).tiny)
        ahead = value({n: w[n] + step * g for n, g in outer.items()}, first)
        behind = value({n: w[n] - step * g for n, g in outer.items()}, first)
        bend = self.rate * (ahead - behind) / (2 * step)
        return stepped - (bend - bend.detach())  # a slope, and no value


class RefusedOperations(TorchFunctionMode):
    """Refuses the operations whose second derivatives PyTorch gets wrong for several clients at once."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in NORMS:
            raise MethodError(
                "PyTorch's second derivatives of layer and batch normalisation are wrong for several clients at "
                "once, and order='exact' takes them; the model calls {function}. Use engine='sequential', or "
                "order='free'.",
                function=func.__name__,
            )
        return func(*args, **(kwargs or {}))


def slopes(value: Value, at: Params, examples: Batch, graph: bool = False) -> Params:
    """Return the gradient of ``value`` for those of the tensors ``at`` that have one (under vmap, zeros for others)."""
    if functorch_active():
        found = torch.func.grad(value)(at, examples)
        return found if graph else {n: g.detach() for n, g in found.items()}
    # PyTorch's faster kernels of attention have no second derivatives
    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH) if graph else nullcontext():
        return gradients(value(at, examples), at, create_graph=graph)


def leaves(tensors: Params) -> Params:
    """Return the same values at the start of a graph of their own (which torch.func makes itself)."""
    fresh = {n: v.detach() for n, v in tensors.items()}
    return fresh if functorch_active() else {n: v.requires_grad_() for n, v in fresh.items()}


def halves(batch: Batch, least: int = 1) -> tuple[Batch, Batch]:
    """Return the examples of even and of odd place; both are the whole batch if either has fewer than ``least``."""
    some = next(iter(batch.values()))
    weight = batch.get("weight")
    if weight is None:
        if len(some) < 2 * least:
            return batch, batch
        return {n: v[::2] for n, v in batch.items()}, {n: v[1::2] for n, v in batch.items()}
    odd = torch.arange(len(some), device=weight.device) % 2 == 1
    parts = weight * ~odd, weight * odd
    both = torch.stack([(part > 0).sum() >= least for part in parts]).all()
    first, second = (torch.where(both, part, weight) for part in parts)
    return {**batch, "weight": first}, {**batch, "weight": second}


@telling
def per_fedavg(
    rate: float = 0.01,
    *,
    order: Order = "first",
    delta: float = 1e-2,
    local: Phase = Phase(),
    server: Server = averaging(by="uniform"),
) -> Method:
    """Return Per-FedAvg. Metrics of a run are those of w itself, before anybody's step.

    Args:
        rate: α of the inner step.
        order, delta: of the derivative, see ``AfterOneStep``.
        local: as in ``methods``; its optimiser's rate is β.
        server: see ``methods``; by default every client counts once, as in algorithm 1; ``averaging()`` weighs by examples.
    """
    meta = AfterOneStep(rate=float(rate), loss=local.loss, order=order, delta=float(delta))
    step = local.but(optimizer=sgd(float(rate)), steps=1, examples="all")
    return Method(
        name="per_fedavg",
        client=Client(phases=(local.but(loss=meta),)),
        server=server,
        adapt=Adapt(phases=(step,), split=Split("*"), everyone=True),
    )

"""FedDyn: a penalty that every client changes as it trains, so that local optima agree with the global one.

Source: Acar et al., Federated Learning Based on Dynamic Regularization, arXiv 2111.04263, algorithm 1.
One round: (1) a cohort P of m clients downloads w; (2) each client minimises F_k(θ) − ⟨λ_k, θ⟩ + ½ α ‖θ − w‖²; (3) it
keeps λ_k ← λ_k − α (θ − w), which is ∇F_k(θ) at the minimum, and uploads θ − w; (4) the server, which sends no h, moves
h ← h − α/m Σ_P (θ − w) and w ← mean_P θ − h/α.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from fedkeep.core.errors import MethodError, check_range
from fedkeep.core.net import Net
from fedkeep.core.params import CLIENT, Batch, Params
from fedkeep.methods.aggregate import Reduced
from fedkeep.methods.base import Method
from fedkeep.methods.client import Client, Finish, Finished, Sent, zeros_like_trainable
from fedkeep.methods.fedprox import Proximal
from fedkeep.methods.hook_declarations import reveals, sends_to, unfit
from fedkeep.methods.phase import Phase, telling
from fedkeep.methods.server import Global, Server, averaging, check_uniform, zeros_on_server
from fedkeep.methods.terms import Term, dot


@reveals("loss", of=("kept *",))  # the server could follow λ_k from what is uploaded
@dataclass(frozen=True)
class LinearTerm(Term):
    """−⟨λ_k, θ⟩ over the trainable parameters."""

    def __call__(self, net: Net, params: Params, batch: Batch, received: Mapping[str, Tensor]) -> Tensor:
        return -dot({n: params[CLIENT + n] for n in net.trainable() if CLIENT + n in params}, params)


@dataclass(frozen=True, kw_only=True)
class NewSlope:
    """λ_k ← λ_k − α (θ − w)."""

    alpha: float

    def __call__(self, f: Finish) -> Finished:
        """Return what is kept; nothing is sent along."""
        moved = {
            n: f.trained[n] - f.sent.params[n] for n in f.kept.state if n in f.sent.params
        }  # not what is private
        return Finished(
            state={n: v - self.alpha * moved[n] if n in moved else v for n, v in f.kept.state.items()}
        )


@sends_to("all")
def parameters_alone(server: Global, client: str) -> Sent:
    """Send w and no state, the same to everybody."""
    return Sent(params=server.params)


@unfit(clipping="the server's h is the mean of the slopes that clients keep, which would part for good")
@dataclass(frozen=True, kw_only=True)
class MoveDynamic:
    """h ← h − α/m Σ_P (θ − w), and a step by the mean change less h/α; ``sgd(1.0)`` is the algorithm's."""

    alpha: float
    step: Callable[[Global, Reduced], Global]

    def __call__(self, server: Global, reduced: Reduced) -> Global:
        """Return the server with its next parameters and h."""
        mean = reduced.params
        share = self.alpha * reduced.weight / server.population  # each upload weighs 1
        h = {n: v - share * mean[n] if n in mean else v for n, v in server.state.items()}
        changes = {n: d - h[n] / self.alpha if n in h else d for n, d in mean.items()}
        return self.step(server, replace(reduced, changes=changes, rows={}, tables={})).but(state=h)


@telling
def feddyn(alpha: float = 0.1, *, local: Phase = Phase(), server: Server = averaging(by="uniform")) -> Method:
    """Return FedDyn. As α → 0 clients train as FedAvg's, but the server does not step as FedAvg's: −h/α adds
    Σ |P|/m · mean change over all rounds so far, whatever α is.

    Args:
        alpha: α, positive.
        local, server: see ``methods``; the algorithm's server is ``averaging(by="uniform")``.

    Raises:
        MethodError: α is not positive, or the server weights clients.
    """
    check_range("(0, inf]", MethodError, alpha=alpha)
    check_uniform("feddyn", server)
    loss = local.loss + Proximal(mu=float(alpha)) + LinearTerm()
    client = Client(
        phases=(local.but(loss=loss),), state=zeros_like_trainable, finish=NewSlope(alpha=float(alpha))
    )
    update = MoveDynamic(alpha=float(alpha), step=server.update)
    moving = server.but(state=zeros_on_server, send=parameters_alone, update=update, synchronous=True)
    return Method(name="feddyn", client=client, server=moving)

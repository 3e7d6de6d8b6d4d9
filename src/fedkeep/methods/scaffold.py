"""SCAFFOLD: local steps corrected by how a client's gradients differ from everybody's.

Source: Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, arXiv 1910.06378,
algorithm 1 with option II.
One round: (1) a cohort S of N clients downloads w and the control c; (2) each client steps y ← y − η (g(y) − c_k + c)
from y = w, K times; (3) its new control is c_k⁺ = c_k − c + (w − y) / (K η); (4) it uploads y − w and c_k⁺ − c_k, and
keeps c_k⁺; (5) the server steps w by the plain mean of y − w, and c ← c + |S|/N · mean(c_k⁺ − c_k), so that c stays the
mean of all c_k.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from fedkeep.core.errors import MethodError
from fedkeep.core.net import Net
from fedkeep.core.params import CLIENT, SERVER, Batch, Params
from fedkeep.methods.aggregate import Reduced
from fedkeep.methods.base import Method
from fedkeep.methods.client import Client, Finish, Finished, zeros_like_trainable
from fedkeep.methods.hook_declarations import GRADIENTS, reveals, unfit
from fedkeep.methods.phase import Phase, telling
from fedkeep.methods.server import Global, Server, averaging, check_uniform, zeros_on_server
from fedkeep.methods.terms import Term, dot


@dataclass(frozen=True)
class Correction(Term):
    """⟨c − c_k, w⟩, less its value: it adds c − c_k to the gradient, and nothing to the loss."""

    def __call__(self, net: Net, params: Params, batch: Batch, received: Mapping[str, Tensor]) -> Tensor:
        """Return the term's value, 0 as a scalar."""
        names = [n for n in net.trainable() if CLIENT + n in params]
        value = dot({n: received[SERVER + n] - params[CLIENT + n] for n in names}, params)
        return value - value.detach()


@reveals("sent/*", of=("kept *", "examples", GRADIENTS))
def new_control(f: Finish) -> Finished:
    """Return c_k⁺ = c_k − c + (w − y) / (K η), to keep, and its change, to send; where nothing moves, it stays."""
    new = dict(f.kept.state)
    for name, old in f.kept.state.items():
        if name in f.sent.params and (scale := f.steps * f.rate(name)):  # not what is private
            moved = f.sent.params[name] - f.trained[name]
            new[name] = old - f.sent.state[name] + moved / scale
    return Finished(sends={n: v - f.kept.state[n] for n, v in new.items()}, state=new)


@unfit(clipping="the server's control is the mean of what clients keep, which would part for good")
@dataclass(frozen=True, kw_only=True)
class MoveControl:
    """The server's step of w, and c ← c + |S|/N · mean Δc_k."""

    step: Callable[[Global, Reduced], Global]

    def __call__(self, server: Global, reduced: Reduced) -> Global:
        """Return the server with its next parameters and control."""
        share = reduced.weight / server.population  # each upload weighs 1
        control = {n: c + share * reduced.state[n] for n, c in server.state.items()}
        return self.step(server, reduced).but(state=control)


@telling
def scaffold(*, local: Phase = Phase(), server: Server = averaging(by="uniform")) -> Method:
    """Return SCAFFOLD. What a client sends tells its control, so the server can follow every c_k.

    Args:
        local: the local phase, plain SGD: (w − y) / (K η) is the mean gradient for no other optimiser.
        server: what the server does; the optimiser's rate is the algorithm's η_g.

    Raises:
        MethodError: the local optimiser is another, or the server weights clients.
    """
    optimizer = local.optimizer
    if optimizer.kind != "sgd" or optimizer.momentum or optimizer.bounds or local.clip_norm is not None:
        raise MethodError(
            "SCAFFOLD reads the mean gradient from a client's change, which wants SGD without momentum, bounds and "
            "clip_norm; got {optimizer} and clip_norm={clip_norm}. Set local=Phase(optimizer=sgd(rate)).",
            optimizer=optimizer,
            clip_norm=local.clip_norm,
        )
    check_uniform("scaffold", server)
    client = Client(
        phases=(local.but(loss=local.loss + Correction()),),
        state=zeros_like_trainable,
        sends=zeros_like_trainable,
        finish=new_control,
    )
    moving = server.but(state=zeros_on_server, update=MoveControl(step=server.update), synchronous=True)
    return Method(name="scaffold", client=client, server=moving)

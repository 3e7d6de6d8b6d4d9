"""FedDBE: a client's features are a generic part, held near a mean that all agree on, and an offset that it keeps.

Source: Zhang et al., Eliminating Domain Bias for Federated Learning in Representation Space, arXiv 2311.14975 (FedAvg
with the Domain Bias Eliminator), with the authors' code for what the running mean starts from.
The model is a body f and a head g. Each client keeps an offset b of the features' size, at first 0, and predicts with
g(f(x) + b).
One round: (1) a cohort downloads f, g and the mean z̄; (2) each client trains f, g and b on F_k + κ mean_j (m_j − z̄_j)²,
where m ← (1 − μ) m + μ mean f(x) runs over its mini-batches, in every round from m = 0, and no gradient flows through
earlier ones; (3) it uploads the change of f and g, and keeps b; (4) the server averages.
The paper agrees on z̄ before the first round. Here the first round does: it has no second term, its cohort uploads m
too, and the server's mean of these is z̄ for all later rounds, in which m stays on the client.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedkeep.core.declared import declare
from fedkeep.core.errors import MethodError, check_range
from fedkeep.core.net import Net
from fedkeep.core.params import Batch, Params, State
from fedkeep.methods.added_parts import extended
from fedkeep.methods.aggregate import Reduced
from fedkeep.methods.base import Method, private_part
from fedkeep.methods.client import Client, Finish, Finished, Start, Started
from fedkeep.methods.features import Known, features, head, pooled, width
from fedkeep.methods.hook_declarations import reveals
from fedkeep.methods.phase import Phase, telling
from fedkeep.methods.server import Global, Roster, Server
from fedkeep.methods.terms import Around, Term, cross_entropy
from fedkeep.split import Split

BIAS, MEAN = "memory.bias", "memory.mean"
KNOWN = "known"


class Memory(nn.Module):
    """The private ``bias`` b and the federated buffer ``mean``, each (F,): m while a client trains, else z̄.

    Args:
        like: zeros, (F,).
        momentum: μ.
    """

    mean: Tensor

    def __init__(self, like: Tensor, momentum: float) -> None:
        super().__init__()
        self.momentum = momentum
        self.bias = nn.Parameter(like.clone())
        self.register_buffer("mean", like.clone())
        declare(self, updated_buffers=("mean",))

    def forward(self, features: Tensor, weight: Tensor | None = None) -> Tensor:
        """Return m with the mini-batch's features (B, F) counted in; training keeps it."""
        w = features.new_ones(len(features)) if weight is None else weight.to(features.dtype)
        here = w @ features / w.sum().clamp_min(torch.finfo(w.dtype).tiny)
        running = (1 - self.momentum) * self.mean + self.momentum * here
        if self.training:
            self.mean.copy_(running.detach())
        return running


@dataclass(frozen=True)
class AddMemory:
    """Adds the part ``memory``, for features as the linear layers of ``classifier`` take them."""

    momentum: float
    classifier: str

    def __call__(self, module: nn.Module) -> nn.Module:
        """Return a copy of ``module`` with the memory."""
        like = next(v for v in module.parameters() if v.is_floating_point()).detach()
        return extended(
            module, {"memory": Memory(like.new_zeros(width(module, self.classifier)), self.momentum)}
        )


@dataclass(frozen=True)
class NearMean(Around):
    """L of g(f(x) + b), and κ mean_j (m_j − z̄_j)² once z̄ is known; κ at least 0."""

    kappa: float = 1.0
    loss: Term = cross_entropy()

    def __post_init__(self) -> None:
        check_range("[0, inf]", MethodError, kappa=self.kappa)

    def __call__(self, net: Net, params: Params, batch: Batch, received: Mapping[str, Tensor]) -> Tensor:
        found = features(net, params, batch)
        columns = {n: v for n, v in batch.items() if n == "weight"}
        columns["features"] = pooled(net, found, batch)
        apart = (net.call("memory", params, columns) - received[MEAN]).square().mean()
        value: Tensor = self.loss(
            Known(net, head(net, params, found + params[BIAS], batch)), params, batch, received
        )
        return value + self.kappa * torch.where(received[f"server/{KNOWN}"], apart, 0.0)


def no_mean(net: Net, clients: Roster) -> State:
    """Return the server's state at first: z̄ is not known."""
    return {KNOWN: torch.tensor(False)}


def begin_mean(start: Start) -> Started:
    """Set the running mean m back to zero."""
    return Started(params={MEAN: torch.zeros_like(start.params[MEAN])})


@reveals(f"upload/{MEAN}", of=("private *", "examples"))  # of features that were trained together with b
def send_mean_once(done: Finish) -> Finished:
    """Upload m if z̄ is not known, else no change of it."""
    sent = done.sent
    return Finished(params={MEAN: torch.where(sent.state[KNOWN], sent.params[MEAN], done.trained[MEAN])})


@dataclass(frozen=True, kw_only=True)
class AgreeOnce:
    """The server's step, which makes z̄ in the first round and leaves it alone later, whatever noise is added."""

    step: Callable[[Global, Reduced], Global]

    def __call__(self, server: Global, reduced: Reduced) -> Global:
        """Return the server with its next parameters."""
        known, after = server.state[KNOWN], self.step(server, reduced)
        mean = torch.where(known, server.params[MEAN], after.params[MEAN])
        return after.but(params={**after.params, MEAN: mean}, state={KNOWN: torch.ones_like(known)})


def predict_with_bias(net: Net, params: Params, batch: Batch) -> Tensor:
    """Return g(f(x) + b), shape (B, C)."""
    return head(net, params, features(net, params, batch) + params[BIAS], batch)


@telling
def feddbe(
    kappa: float = 1.0,
    *,
    momentum: float = 1.0,
    classifier: str = "classifier",
    local: Phase = Phase(),
    server: Server = Server(),
) -> Method:
    """Return FedDBE, for a model with ``features`` and ``head``.

    Args:
        kappa: κ; the authors' code halves it. With 0 nothing tells what belongs to f and what to b.
        momentum: μ, above 0 and at most 1; 1: m is the mini-batch's own mean.
        classifier: the part that the model's ``head`` consists of; it begins with a linear layer.
        local: see ``methods``.
        server: see ``methods``; z̄ is weighted as it weights clients.

    Raises:
        MethodError: an argument is out of range.
    """
    check_range("(0, 1]", MethodError, momentum=momentum)
    phase = local.but(loss=NearMean(kappa=float(kappa), loss=local.loss))
    moving = server.but(state=no_mean, update=AgreeOnce(step=server.update), synchronous=True)
    return Method(
        name="feddbe",
        needs_features=True,
        split=Split((BIAS,)),
        server=moving,
        adapt=private_part(phase),
        client=Client(phases=(phase,), start=begin_mean, finish=send_mean_once),
        predict=predict_with_bias,
        predict_shared=predict_with_bias,
        extend=AddMemory(momentum=float(momentum), classifier=classifier),
    )

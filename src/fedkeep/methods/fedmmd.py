"""FedMMD: FedAvg whose clients keep their features like those of the model that they received.

Source: Yao, Huang, Zhang, Li and Sun, Two-Stream Federated Learning: Reduce the Communication Costs, VCIP 2018, with
the estimator of published code of KTEPS's first author (FedRepo), see ``dependence.mmd2``.
One round: (1) a cohort downloads w^t; (2) each client minimises F_k(w) + λ MMD²(f(X; w), f(X; w^t)) on its own
examples, f the features and w^t frozen as a second stream; (3) it uploads its change; (4) the server averages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedkeep.core.errors import MethodError
from fedkeep.core.net import Net
from fedkeep.core.params import Batch, Params
from fedkeep.methods.base import Method
from fedkeep.methods.client import Client
from fedkeep.methods.dependence import mmd2
from fedkeep.methods.features import Known, as_received, features, head
from fedkeep.methods.phase import Phase
from fedkeep.methods.server import Server
from fedkeep.methods.terms import Around, Term, cross_entropy


@dataclass(frozen=True)
class TwoStreams(Around):
    """L + λ MMD²(f(X; w), f(X; w^t)); the features are computed once.

    Attributes:
        lam: λ, at least 0.
        loss: L.
    """

    lam: float = 0.01
    loss: Term = cross_entropy()

    def __post_init__(self) -> None:
        if not self.lam >= 0:
            raise MethodError(f"lam must be at least 0; got {self.lam}.")

    def __call__(self, net: Net, params: Params, batch: Batch, received: Mapping[str, Tensor]) -> Tensor:
        """Return the term's value, a scalar."""
        found = features(net, params, batch)
        value = self.loss(Known(net, head(net, params, found)), params, batch, received)
        if not self.lam:
            return value
        with torch.no_grad():
            frozen = features(net, as_received(net, params, received), batch)
        return value + self.lam * mmd2(found, frozen, batch.get("weight"))


def fedmmd(
    lam: float = 0.01,
    *,
    local: Phase = Phase(),
    server: Server = Server(),
) -> Method:
    """Return FedMMD, for a model with ``features`` and ``head``; 0 for ``lam`` is FedAvg."""
    phase = local.but(loss=TwoStreams(lam=float(lam), loss=local.loss))
    return Method(name="fedmmd", client=Client(phases=(phase,)), server=server)

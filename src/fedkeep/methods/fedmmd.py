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

from fedkeep.core.net import Net
from fedkeep.core.params import Batch, Params
from fedkeep.methods.base import Method
from fedkeep.methods.client import Client
from fedkeep.methods.dependence import mmd2
from fedkeep.methods.features import WithFeatures, as_received, pooled_features
from fedkeep.methods.phase import Phase, telling
from fedkeep.methods.server import Server
from fedkeep.methods.terms import Term, cross_entropy


@dataclass(frozen=True)
class TwoStreams(WithFeatures):
    """L + λ MMD²(f(X; w), f(X; w^t)).

    Attributes:
        lam: λ, at least 0.
        loss: L.
    """

    lam: float = 0.01
    loss: Term = cross_entropy()

    def penalty(
        self, net: Net, params: Params, batch: Batch, received: Mapping[str, Tensor], found: Tensor
    ) -> Tensor:
        with torch.no_grad():
            frozen = pooled_features(net, as_received(net, params, received), batch)
        return mmd2(found, frozen, batch.get("weight"))


@telling
def fedmmd(lam: float = 0.01, *, local: Phase = Phase(), server: Server = Server()) -> Method:
    """Return FedMMD, for a model with ``features`` and ``head``; 0 for ``lam`` is FedAvg."""
    phase = local.but(loss=TwoStreams(lam=float(lam), loss=local.loss))
    return Method(name="fedmmd", needs_features=True, client=Client(phases=(phase,)), server=server)

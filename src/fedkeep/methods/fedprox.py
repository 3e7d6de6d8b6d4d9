"""FedProx: FedAvg whose clients are pulled towards the model that they received.

Source: Li et al., Federated Optimization in Heterogeneous Networks, arXiv 1812.06127, eq. 2.
One round: (1) a cohort downloads w^t; (2) each client minimises F_k(w) + ½ μ ‖w − w^t‖² on its own examples; (3) it
uploads its change; (4) the server adds the mean change, weighted by the numbers of examples.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedkeep.core.errors import MethodError, check_range
from fedkeep.core.net import Net
from fedkeep.core.params import Batch, Params
from fedkeep.methods.base import Method
from fedkeep.methods.client import Client
from fedkeep.methods.phase import Phase, telling
from fedkeep.methods.server import Server
from fedkeep.methods.terms import Term


@dataclass(frozen=True)
class Proximal(Term):
    """½ μ Σ (w − w^t)² over the trainable federated parameters; the norm is squared.

    Attributes:
        mu: μ, at least 0.
    """

    mu: float = 0.01

    def __post_init__(self) -> None:
        check_range("[0, inf]", MethodError, mu=self.mu)

    reads_parameters = False  # a row that no example looks up equals the received one, and has no gradient
    reads_received = True  # it compares with it

    @property
    def pull(self) -> float:
        """μ."""
        return self.mu

    def __call__(self, net: Net, params: Params, batch: Batch, received: Mapping[str, Tensor]) -> Tensor:
        pulled = [n for n in received if n in net.trainable()]
        if not pulled:
            raise MethodError(
                "The proximal term has no federated parameter to pull towards the received one."
            )
        squares = [nn.functional.mse_loss(params[n], received[n], reduction="sum") for n in pulled]
        return 0.5 * self.mu * torch.stack(squares).sum()


@telling
def fedprox(mu: float = 0.01, *, local: Phase = Phase(), server: Server = Server()) -> Method:
    """Return FedProx; ``mu`` is searched in the paper over 0.001, 0.01, 0.1 and 1, and 0 is FedAvg."""
    phase = local.but(loss=local.loss + Proximal(mu=float(mu)))
    return Method(name="fedprox", client=Client(phases=(phase,)), server=server)

"""FedAvg: every parameter is federated.

Source: McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, 2017.
One round: (1) a cohort downloads w; (2) each client trains w locally on its own examples; (3) it uploads its change;
(4) the server adds the mean change, weighted by the numbers of examples (FURL eq. 5).
"""

from __future__ import annotations

from fedkeep.methods.base import Method
from fedkeep.methods.client import Client
from fedkeep.methods.phase import Phase, telling
from fedkeep.methods.server import Server


@telling
def fedavg(*, local: Phase = Phase(), server: Server = Server()) -> Method:
    """Return FedAvg, or FedOpt (Reddi et al., 2021) with another optimiser: ``averaging(adam(0.01))``.

    w^{t+1} = w^t + Σ_k c_k d_k / Σ_k c_k, with d_k = u_k − w^t.
    """
    return Method(client=Client(phases=(local,)), server=server)

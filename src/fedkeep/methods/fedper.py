"""FedPer: federated base layers below private top layers.

Source: Arivazhagan et al., Federated Learning with Personalization Layers, arXiv 1912.00818, algorithms 1 and 2.
One round: (1) a cohort downloads the base w_B; (2) each client joins it with its own head w_P, kept from its last
participation; (3) it trains both jointly on its own examples; (4) it uploads the change of the base; (5) the server
moves w_B by Σ_k c_k d_k / Σ_k c_k, and the client keeps its head.
"""

from __future__ import annotations

from fedkeep.methods.base import Method, private_part
from fedkeep.methods.client import Client
from fedkeep.methods.phase import Patterns, Phase, telling
from fedkeep.methods.server import Server
from fedkeep.split import Split


@telling
def fedper(private: Patterns = "head.*", *, local: Phase = Phase(), server: Server = Server()) -> Method:
    """Return FedPer. There is no global model: a head that nobody trained predicts nothing.

    With no private pattern its rounds are FedAvg's. A new client's head is fitted on the frozen base.
    """
    return Method(
        name="fedper",
        split=Split(private),
        client=Client(phases=(local,)),
        server=server,
        adapt=private_part(local),
        predict_shared=None,
    )

"""LG-FedAvg: private representations below a federated top.

Source: Liang et al., Think Locally, Act Globally: Federated Learning with Local and Global Representations,
arXiv 2001.01523, algorithm 1.
One round: (1) a cohort downloads the top θ_g; (2) each client joins it with its own encoder θ_l; (3) it trains both
jointly on its own examples; (4) it uploads the change of θ_g; (5) the server averages: θ_g ← θ_g + Σ_k z_k d_k with
z_k = c_k / Σ c, or 1 / m (``uniform``, as the authors' published code does).
"""

from __future__ import annotations

from fedkeep.methods.base import Method
from fedkeep.methods.fedper import fedper
from fedkeep.methods.phase import Patterns, Phase, telling
from fedkeep.methods.server import Server


@telling
def lg_fedavg(
    private: Patterns = "encoder.*", *, local: Phase = Phase(), server: Server = Server()
) -> Method:
    """Return LG-FedAvg, from scratch (the authors' code starts from a FedAvg checkpoint) and without auxiliary losses.

    ``private`` names the representation, everything below the shared top. A new client fits an encoder of its own to
    the frozen top; the paper's ensemble of all trained clients' models would need their private values and is left out.
    """
    return fedper(private, local=local, server=server).but(name="lg_fedavg")

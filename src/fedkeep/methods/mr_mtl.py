"""MR-MTL: every client trains a model of its own, held near the mean of all of these.

Source: Liu, Hu, Wu and Smith, On Privacy and Personalization in Cross-Silo Federated Learning, arXiv 2206.07902
(mean-regularised multi-task learning).
One round: (1) a cohort downloads the mean model w̄; (2) each client goes on with its own w_k on F_k + ½ λ ‖w_k − w̄‖²;
(3) it uploads w_k − w̄, and keeps w_k; (4) the server moves w̄ by the plain mean of what was uploaded, so w̄ = Σ_k w_k / m
over the m clients of the cohort, as the paper has it. A client predicts with w_k, the shared part with w̄. Ditto differs in that its federated model is
trained for itself: here there is one model a client, and it is trained once.
"""

from __future__ import annotations

from fedkeep.methods.added_parts import COPY, PulledCopy, predict_copy, publish_own, with_copy
from fedkeep.methods.base import Adapt, Method
from fedkeep.methods.client import Client
from fedkeep.methods.fedprox import Proximal
from fedkeep.methods.phase import Phase, telling
from fedkeep.methods.server import Server, averaging


@telling
def mr_mtl(lam: float = 0.1, *, local: Phase = Phase(), server: Server = averaging(by="uniform")) -> Method:
    """Return MR-MTL. What leaves is the client's own model, so only opted-in examples train it.

    With the paper's privacy of single examples a client clips and adds noise in its own steps; here
    ``privacy.differentially_private`` is of whole clients, and of w̄ alone.

    Args:
        lam: λ; 0 is local training, and the larger it is the nearer it is to one model for all.
        local: the phase of w_k, with F_k; its rate times λ should stay below 1.
        server: see ``methods``; by default every client counts once, as in the paper; ``averaging()`` weighs by examples.

    Raises:
        MethodError: λ is negative.
    """
    own = local.but(loss=PulledCopy(term=local.loss + Proximal(mu=float(lam))), trains="private")
    return Method(
        name="mr_mtl",
        split=COPY,
        client=Client(phases=(own,), finish=publish_own),
        server=server,
        adapt=Adapt(phases=(own.but(epochs=10, examples="all"),)),
        predict=predict_copy,
        extend=with_copy,
    )

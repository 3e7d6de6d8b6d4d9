"""FURL: private user parameters beside a federated model.

Source: Bui et al., Federated User Representation Learning, arXiv 1909.12535, §3.
One round: (1) a cohort downloads w_f; (2) each client takes w_p of its last participation, or the default value;
(3) it trains both jointly on its own examples; (4) it uploads the change of w_f alone (eq. 5); (5) it keeps
w_p ← u_p (eq. 7), or moves w_p by z = c_k / Σc of the change (eq. 6).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from fedkeep.core.errors import MethodError
from fedkeep.core.optim import Optimizer, sgd
from fedkeep.methods.base import Method, Patterns, Phase
from fedkeep.methods.terms import Term, cross_entropy
from fedkeep.split import Split


def furl(
    private: Patterns = "user",
    *,
    loss: Term = cross_entropy(),
    optimizer: Optimizer = sgd(0.1),
    epochs: int = 1,
    batch_size: int = 32,
    clip_norm: float | None = None,
    weighting: Literal["examples", "uniform"] = "examples",
    private_scale: Literal[1, "fedavg"] = 1,
    private_init: float | tuple[Literal["normal"], float] | Literal["model"] = 0.0,
    server_optimizer: Optimizer = sgd(1.0),
    adapt: Phase | None = None,
) -> Method:
    """Return FURL.

    Args:
        private: name patterns of the private parameters, e.g. ``"user"`` or ``["user", "head.*"]``.
        loss: the local loss.
        optimizer: the local optimiser; a private user vector mostly wants a larger rate than the rest:
            ``sgd(0.1, rates={"user": 0.5})``.
        epochs: local passes a round (the paper: 1).
        batch_size: examples a local step.
        clip_norm: bound on the gradient's norm over federated and private parameters together.
        weighting: ``"examples"`` (eq. 4) or ``"uniform"``.
        private_scale: z: 1 (eq. 7, what the paper runs) or ``"fedavg"`` (eq. 6).
        private_init: a new user's private values; zeros by default, so that a new user and one who was never
            sampled predict alike.
        server_optimizer: ``sgd(1.0)`` (plain), ``sgd(1.0, momentum=0.9)``, ``adam(0.01, eps=1e-3)``.
        adapt: how a new user's private part is fitted with the federated part frozen; by default the local phase,
            private parameters alone, 10 passes.

    Raises:
        MethodError: no private pattern is given (that is ``fedavg``).
    """
    split = Split(private)
    if not split.private:
        raise MethodError("FURL needs at least one private pattern; with none it is methods.fedavg().")
    phase = Phase(loss, "all", optimizer, epochs, batch_size=batch_size, clip_norm=clip_norm)
    adapt = adapt or replace(phase, trains="private", epochs=10, examples="all")
    return Method(
        "furl",
        split,
        (phase,),
        weighting,
        private_scale,
        private_init,
        server_optimizer,
        (adapt,),
    )

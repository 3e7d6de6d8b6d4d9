"""FURL: private user parameters beside a federated model.

Source: Bui et al., Federated User Representation Learning, arXiv 1909.12535, §3.
One round: (1) a cohort downloads w_f; (2) each client takes w_p of its last participation, or the default value;
(3) it trains both jointly on its own examples; (4) it uploads the change of w_f alone (eq. 5); (5) it keeps
w_p ← u_p (eq. 7), or moves w_p by z = c_k / Σc of the change (eq. 6).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from fedkeep.core.errors import MethodError, check_choice
from fedkeep.methods.base import Adapt, Method, private_part
from fedkeep.methods.client import Client, Init, by_share, newest
from fedkeep.methods.phase import Patterns, Phase, telling
from fedkeep.methods.server import Server
from fedkeep.split import Split


@telling
def furl(
    private: Patterns = "user",
    *,
    local: Phase = Phase(),
    private_scale: Literal[1, "fedavg"] = 1,
    private_init: float | tuple[Literal["normal"], float] | Literal["model"] = "model",
    server: Server = Server(),
    adapt: Phase | None = None,
) -> Method:
    """Return FURL.

    Args:
        private: name patterns of the private parameters, e.g. ``"user"`` or ``["user", "head.*"]``.
        local: as in ``methods``; a private user vector mostly wants a larger rate than the rest:
            ``Phase(optimizer=sgd(0.1, rates={"user": 0.5}))``. Its ``clip_norm`` bounds the gradient's norm over
            federated and private parameters together.
        private_scale: z: 1 (eq. 7, what the paper runs) or ``"fedavg"`` (eq. 6).
        private_init: a new user's private values: by default those of the module (the built-in models have zeros for
            user vectors), so that a new user and one who was never sampled predict alike.
        server: what the server does, e.g. ``averaging(sgd(1.0, momentum=0.9))``, ``averaging(adam(0.01, eps=1e-3))``.
        adapt: how a new user's private part is fitted with the federated part frozen; by default the local phase,
            private parameters alone, 10 passes. Either way the rates fall to zero over its mini-batches.

    Raises:
        MethodError: no private pattern is given (that is ``fedavg``).
    """
    split = Split(private)
    if not split.private:
        raise MethodError("FURL needs at least one private pattern; with none it is methods.fedavg().")
    check_choice("private_scale must be", private_scale, (1, "fedavg"), MethodError)
    client = Client(
        phases=(local,), keep=Init(value=private_init), accept=newest if private_scale == 1 else by_share
    )
    adapting = private_part(local) if adapt is None else Adapt(phases=(adapt,))
    adapting = replace(adapting, rate_decay="linear")
    return Method(name="furl", split=split, client=client, server=server, adapt=adapting)

"""APFL: each client mixes a private model with the federated one, and learns how much of it.

Source: Deng, Kamani and Mahdavi, Adaptive Personalized Federated Learning, arXiv 2003.13461, algorithm 1 and eq. 10.
One round: (1) a cohort downloads w; (2) at each mini-batch every client steps w ← w − η ∇F_k(w), and from the same
point its own v ← v − η ∇_v F_k(v̄) with v̄ = α v + (1 − α) w, so that ∇_v = α ∇F_k(v̄), and, unless α is fixed,
α ← α − η ⟨∇F_k(v̄), v − w⟩, brought back into [0, 1]; (3) it uploads the change of w and keeps v (not v̄) and α; (4) the
server takes the plain mean, w ← Σ_k w_k / m over the m clients of the cohort (algorithm 1). A client predicts with v̄.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fedkeep.core.copying import copied
from fedkeep.core.errors import MethodError, check_range
from fedkeep.core.net import Net
from fedkeep.core.params import Batch, Params
from fedkeep.methods.added_parts import COPY, copy_of, extended, with_copy
from fedkeep.methods.base import Method, private_part
from fedkeep.methods.client import Client
from fedkeep.methods.phase import Phase, telling
from fedkeep.methods.server import Server, averaging
from fedkeep.methods.terms import Term
from fedkeep.split import Split

SHARE = "alpha"


@dataclass(frozen=True)
class AddShare:
    """Adds a private copy ``own`` of the model, and its share ``alpha``.

    Attributes:
        alpha: what the share starts from.
    """

    alpha: float

    def __call__(self, module: nn.Module) -> nn.Module:
        """Return a copy of ``module`` with both."""
        kind = next(v.dtype for v in module.parameters() if v.is_floating_point())
        share = nn.Parameter(torch.tensor(self.alpha, dtype=kind))
        return extended(module, {SHARE: share, "own": copied(module)}, copies="own")


def mixed(net: Net, params: Params, alpha: float | None) -> Params:
    """Return v̄ = α v + (1 − α) w under the model's own names; no gradient flows into w, and buffers are v's.

    Args:
        net: says what is trainable.
        params: w, v (``own.*``) and, where ``alpha`` is None, α.
        alpha: α.
    """
    own = copy_of(params)
    share = params[SHARE] if alpha is None else alpha
    if isinstance(share, Tensor) and share.dim():
        raise MethodError(
            "APFL mixes one client's model with the federated one; it cannot compute with examples of many clients "
            "together. Train it with engine='sequential'."
        )
    return {
        n: share * v + (1 - share) * params[n].detach() if n in net.trainable() else v for n, v in own.items()
    }


@dataclass(frozen=True)
class OnMixedModel(Term):
    """A term of v̄.

    Attributes:
        alpha: α, the private model's share; None: the parameter ``alpha``.
        term: the term.
    """

    alpha: float | None
    term: Term

    @property
    def reads_parameters(self) -> bool | None:
        """True if the term does, or if it compares."""
        return self.term.reads_received or self.term.reads_parameters

    def __call__(self, net: Net, params: Params, batch: Batch, received: Mapping[str, Tensor]) -> Tensor:
        return self.term(net, mixed(net, params, self.alpha), batch, received)


@dataclass(frozen=True)
class PredictMixture:
    """Predict with v̄, mixed with the server's w.

    Attributes:
        alpha: α, the private model's share; None: the parameter ``alpha``.
    """

    alpha: float | None = 0.5

    def __call__(self, net: Net, params: Params, batch: Batch) -> Any:
        """Return the model's output."""
        return net(mixed(net, params, self.alpha), batch)


@telling
def apfl(
    alpha: float = 0.5,
    *,
    adaptive: bool = True,
    local: Phase = Phase(),
    server: Server = averaging(by="uniform"),
) -> Method:
    """Return APFL.

    Args:
        alpha: the private model's share α in [0, 1], or what it starts from: at 0 a client predicts with w, at 1 with
            v alone.
        adaptive: α is learned, with the rate that the optimiser gives ``alpha``; False: it is fixed.
        local: the local phase, with F_k of both models.
        server: see ``methods``; by default every client counts once, as in algorithm 1; ``averaging()`` weighs by examples.

    Raises:
        MethodError: alpha is outside [0, 1], or it is learned under weight decay, which would pull it to 0.
    """
    check_range("[0, 1]", MethodError, alpha=alpha)
    if adaptive and local.optimizer.weight_decay:
        raise MethodError(
            "Weight decay would pull APFL's share alpha to 0, which is FedAvg. Take weight_decay=0, or "
            "adaptive=False, which keeps alpha fixed."
        )
    share = None if adaptive else float(alpha)
    own = OnMixedModel(alpha=share, term=local.loss)
    optimizer = local.optimizer
    if adaptive:
        optimizer = replace(optimizer, bounds=((SHARE, (0.0, 1.0)), *optimizer.bounds))
    phase = local.but(loss=local.loss + own, optimizer=optimizer)
    return Method(
        name="apfl",
        split=Split((*COPY.private, SHARE)) if adaptive else COPY,
        client=Client(phases=(phase,)),
        server=server,
        adapt=private_part(phase.but(loss=own)),
        predict=PredictMixture(alpha=share),
        extend=AddShare(alpha=float(alpha)) if adaptive else with_copy,
    )

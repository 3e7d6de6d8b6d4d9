"""APFL: each client mixes a private model with the federated one.

Source: Deng et al., Adaptive Personalized Federated Learning, arXiv 2003.13461, algorithm 1, with a fixed α.
One round: (1) a cohort downloads w; (2) at each mini-batch every client steps w ← w − η ∇F_k(w), and from the same
point its own v ← v − η ∇_v F_k(v̄) with v̄ = α v + (1 − α) w, so that ∇_v = α ∇F_k(v̄); (3) it uploads the change of w
and keeps v (not v̄); (4) the server averages. A client predicts with v̄.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor

from fedkeep.core.errors import MethodError
from fedkeep.core.net import Net
from fedkeep.core.optim import Optimizer, sgd
from fedkeep.core.params import Batch, Params
from fedkeep.methods.base import Method, Phase
from fedkeep.methods.copies import COPY, copy_of, with_copy
from fedkeep.methods.terms import Term, cross_entropy


def mixed(net: Net, params: Params, alpha: float) -> Params:
    """Return v̄ = α v + (1 − α) w under the model's own names; no gradient flows into w, and buffers are v's."""
    own = copy_of(params)
    return {
        n: alpha * v + (1 - alpha) * params[n].detach() if n in net.trainable() else v for n, v in own.items()
    }


@dataclass(frozen=True)
class OnMixture(Term):
    """A term of v̄.

    Attributes:
        alpha: α, the private model's share.
        term: the term.
    """

    alpha: float
    term: Term

    @property
    def reads_parameters(self) -> bool:
        """True if the term does, or if it compares."""
        return self.term.reads_parameters or self.term.reads_received

    def __call__(self, net: Net, params: Params, batch: Batch, received: Params) -> Tensor:
        """Return the term's value, a scalar."""
        return self.term(net, mixed(net, params, self.alpha), batch, received)


@dataclass(frozen=True)
class PredictMixture:
    """Predict with v̄, mixed with the server's w.

    Attributes:
        alpha: α, the private model's share.
    """

    alpha: float = 0.5

    def __call__(self, net: Net, params: Params, batch: Batch) -> Any:
        """Return the model's output."""
        return net(mixed(net, params, self.alpha), batch)


def apfl(
    alpha: float = 0.5,
    *,
    loss: Term = cross_entropy(),
    optimizer: Optimizer = sgd(0.1),
    epochs: int = 1,
    batch_size: int = 32,
    clip_norm: float | None = None,
    weighting: Literal["examples", "uniform"] = "examples",
    server_optimizer: Optimizer = sgd(1.0),
) -> Method:
    """Return APFL with a fixed share ``alpha`` in [0, 1]: at 0 every client predicts with w, at 1 with v alone."""
    if not 0 <= alpha <= 1:
        raise MethodError(f"alpha must be in [0, 1]; got {alpha}.")
    own = OnMixture(float(alpha), loss)
    phase = Phase(loss + own, "all", optimizer, epochs, batch_size=batch_size, clip_norm=clip_norm)
    return Method(
        "apfl", COPY, (phase,), weighting, server_optimizer=server_optimizer,
        adapt=(replace(phase, loss=own, trains="private", epochs=10, examples="all"),),
        predict=PredictMixture(float(alpha)), extend=with_copy,
    )  # fmt: skip

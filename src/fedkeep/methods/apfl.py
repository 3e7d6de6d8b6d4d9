"""APFL: each client mixes a private model with the federated one, and learns how much of it.

Source: Deng, Kamani and Mahdavi, Adaptive Personalized Federated Learning, arXiv 2003.13461, algorithm 1 and eq. 10.
One round: (1) a cohort downloads w; (2) at each mini-batch every client steps w ← w − η ∇F_k(w), and from the same
point its own v ← v − η ∇_v F_k(v̄) with v̄ = α v + (1 − α) w, so that ∇_v = α ∇F_k(v̄), and, unless α is fixed,
α ← α − η ⟨∇F_k(v̄), v − w⟩, brought back into [0, 1]; (3) it uploads the change of w and keeps v (not v̄) and α; (4) the
server averages. A client predicts with v̄.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fedkeep.core.errors import MethodError
from fedkeep.core.net import Net
from fedkeep.core.optim import Optimizer, sgd
from fedkeep.core.params import Batch, Params
from fedkeep.methods.base import Method, Phase
from fedkeep.methods.copies import COPY, copy_of, with_copy
from fedkeep.methods.terms import Term, cross_entropy
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
        """Return a copy of ``module`` with both.

        Raises:
            MethodError: the module has something of such a name already.
        """
        if hasattr(module, SHARE):
            raise MethodError(
                f"{type(module).__name__} has an attribute {SHARE!r}, where APFL puts its share; rename it."
            )
        both = with_copy(module)
        kind = next(v.dtype for v in module.parameters() if v.is_floating_point())
        both.register_parameter(SHARE, nn.Parameter(torch.tensor(self.alpha, dtype=kind)))
        return both


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
class OnMixture(Term):
    """A term of v̄.

    Attributes:
        alpha: α, the private model's share; None: the parameter ``alpha``.
        term: the term.
    """

    alpha: float | None
    term: Term

    @property
    def reads_parameters(self) -> bool:
        """True if the term does, or if it compares."""
        return self.term.reads_parameters or self.term.reads_received

    def __call__(self, net: Net, params: Params, batch: Batch, received: Mapping[str, Tensor]) -> Tensor:
        """Return the term's value, a scalar."""
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


def apfl(
    alpha: float = 0.5,
    *,
    adaptive: bool = True,
    loss: Term = cross_entropy(),
    optimizer: Optimizer = sgd(0.1),
    epochs: int = 1,
    batch_size: int = 32,
    clip_norm: float | None = None,
    weighting: Literal["examples", "uniform"] = "examples",
    server_optimizer: Optimizer = sgd(1.0),
) -> Method:
    """Return APFL.

    Args:
        alpha: the private model's share α in [0, 1], or what it starts from: at 0 a client predicts with w, at 1 with
            v alone.
        adaptive: α is learned, with the rate that ``optimizer`` gives ``alpha``; False: it is fixed.
        loss: F_k, of both models.
        optimizer, epochs, batch_size, clip_norm: of local training.
        weighting: ``"examples"`` or ``"uniform"``.
        server_optimizer: ``sgd(1.0)`` is plain averaging.
    """
    if not 0 <= alpha <= 1:
        raise MethodError(f"alpha must be in [0, 1]; got {alpha}.")
    share = None if adaptive else float(alpha)
    own = OnMixture(share, loss)
    if adaptive:
        optimizer = replace(optimizer, bounds=((SHARE, (0.0, 1.0)), *optimizer.bounds))
    phase = Phase(loss + own, "all", optimizer, epochs, batch_size=batch_size, clip_norm=clip_norm)
    return Method(
        "apfl", Split((*COPY.private, SHARE)) if adaptive else COPY, (phase,), weighting,
        server_optimizer=server_optimizer,
        adapt=(replace(phase, loss=own, trains="private", epochs=10, examples="all"),),
        predict=PredictMixture(share), extend=AddShare(float(alpha)) if adaptive else with_copy,
    )  # fmt: skip

"""pFedMe: every client's own model minimises its loss plus a penalty on the distance from the federated model.

Source: Dinh, Tran and Nguyen, Personalized Federated Learning with Moreau Envelopes, arXiv 2006.08848, algorithm 1.
One round: (1) a cohort downloads w; (2) at each mini-batch every client takes K steps of its own θ on
F_k(θ) + ½ λ ‖θ − w_k‖², from where θ was, and then one step w_k ← w_k − η λ (w_k − θ); (3) it uploads the change of w_k
and keeps θ; (4) the server moves w ← (1 − β) w + β Σ_k w_k / m over the m clients of the cohort (algorithm 1). A client predicts with θ.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedkeep.core.errors import MethodError, check_range
from fedkeep.core.net import Net
from fedkeep.core.optim import Optimizer, sgd
from fedkeep.core.params import Batch, Params
from fedkeep.methods.added_parts import COPY, OnCopy, copy_of, predict_copy, with_copy
from fedkeep.methods.base import Adapt, Method
from fedkeep.methods.client import Client
from fedkeep.methods.hook_checks import check_count
from fedkeep.methods.hook_declarations import reveals
from fedkeep.methods.phase import Phase, telling
from fedkeep.methods.server import Server, averaging
from fedkeep.methods.terms import Term
from fedkeep.split import updated_buffers


@reveals("loss", of=("private own.*",))  # the last phase's loss is nothing but this distance
@dataclass(frozen=True)
class Apart(Term):
    """½ λ ‖θ − w‖² over the trainable parameters, θ the private copy; a phase moves whichever of them it trains.

    Attributes:
        lam: λ, positive.
    """

    lam: float = 15.0

    def __post_init__(self) -> None:
        check_range("(0, inf]", MethodError, lam=self.lam)

    reads_parameters = True  # it is of the values themselves

    def __call__(self, net: Net, params: Params, batch: Batch, received: Mapping[str, Tensor]) -> Tensor:
        copied = copy_of(params)
        theta = {n: v for n, v in copied.items() if n in net.trainable()}
        squares = [nn.functional.mse_loss(v, params[n], reduction="sum") for n, v in theta.items()]
        return 0.5 * self.lam * torch.stack(squares).sum()


@dataclass(frozen=True)
class Pulled(Apart):
    """The same as the loss of w; batch normalisation gathers w's statistics on the mini-batch, by a pass without slope."""

    def __call__(self, net: Net, params: Params, batch: Batch, received: Mapping[str, Tensor]) -> Tensor:
        if updated_buffers(net.module):
            with torch.no_grad():
                net(params, batch)
        return super().__call__(net, params, batch, received)


@telling
def pfedme(
    lam: float = 15.0,
    *,
    steps: int = 5,
    local: Phase = Phase(optimizer=sgd(0.01)),
    own_optimizer: Optimizer = sgd(0.05),
    server: Server = averaging(by="uniform"),
) -> Method:
    """Return pFedMe. The training loss of its records is the last term's: ½ λ ‖θ − w‖².

    With embedding tables that a model declares (``lookup``), all of a client's rows are near each other's or not, whether
    a mini-batch uses them or not, so tables are trained whole. With buffers that training updates (batch normalisation) w
    is computed once on each mini-batch, for its own statistics.

    Args:
        lam: λ; large: θ stays at w.
        steps: K, on each mini-batch.
        local: the phase of w, with F_k; its optimiser's rate is η, and η λ should stay well below 1.
        own_optimizer: of θ (patterns of its rates begin with ``own.``); its rate times λ should stay below 1.
        server: what the server does; ``averaging(sgd(β), by="uniform")``: every client counts once, as in algorithm 1.
    """
    check_count(1, steps=steps)
    apart = Apart(lam=float(lam))
    outer = local.but(loss=Pulled(lam=float(lam)), trains="federated")
    inner = local.but(loss=OnCopy(term=local.loss) + apart, trains="private", optimizer=own_optimizer)
    return Method(
        name="pfedme",
        split=COPY,
        client=Client(phases=(inner, outer), turns=(steps, 1)),
        server=server,
        adapt=Adapt(phases=(inner.but(epochs=10, examples="all"),)),
        predict=predict_copy,
        extend=with_copy,
    )

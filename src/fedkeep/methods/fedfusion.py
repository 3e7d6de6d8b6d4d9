"""FedFusion: clients fuse the features of their own extractor with those of the extractor that they received.

Source: Yao, Huang and Sun, Towards Faster and Better Federated Learning: A Feature Fusion Approach, ICIP 2019, and its
published code (thu-media/FedFusion).
One round: (1) a cohort downloads the extractor E, the fusion F and the classifier C; (2) each client holds the received
extractor, E_g, fixed, and trains its own, E_l, which starts as E_g, with F and C on the loss of C(F(E_l(x), E_g(x)));
(3) it uploads the change of F and C, and of E: E_l − E_g; (4) the server averages, but moves F's γ by a tenth:
γ ← 0.1 γ_mean + 0.9 γ. Clients that keep an extractor, as KTEPS counts FedFusion, are in the papers' package.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from fedkeep.core.errors import MethodError, check_choice
from fedkeep.core.net import Net
from fedkeep.core.optim import sgd
from fedkeep.core.params import Batch, Params
from fedkeep.methods.added_parts import drawn_for, extended
from fedkeep.methods.base import Method
from fedkeep.methods.client import Client
from fedkeep.methods.features import Known, as_received, features, head, width
from fedkeep.methods.phase import Phase, telling
from fedkeep.methods.server import Server, averaging
from fedkeep.methods.terms import Around, Term, cross_entropy

Operator = Literal["conv", "multi", "single"]


class Fusion(nn.Module):
    """Fuses two features, shape (…, F): a linear layer of both (``conv``, a 1 × 1 convolution), or γ x_g + (1 − γ) x_l.

    Args:
        operator: ``"conv"``, ``"multi"``, γ (F,), or ``"single"``, γ (); γ starts at 0 and is not bounded.
        size: F.
    """

    def __init__(self, operator: Operator, size: int) -> None:
        super().__init__()
        if operator == "conv":
            self.conv = nn.Linear(2 * size, size)
        else:
            self.gamma = nn.Parameter(torch.zeros((size,) if operator == "multi" else ()))

    def forward(self, local: Tensor, received: Tensor) -> Tensor:
        """Return fused features, shape (…, F)."""
        if hasattr(self, "conv"):
            fused: Tensor = self.conv(torch.cat((local, received), -1))
            return fused
        return self.gamma * received + (1 - self.gamma) * local


@dataclass(frozen=True)
class AddFusion:
    """Adds the part ``fusion``.

    Attributes:
        operator: of ``Fusion``.
        classifier: the part that the model's ``head`` consists of.
    """

    operator: Operator = "multi"
    classifier: str = "classifier"

    def __call__(self, module: nn.Module) -> nn.Module:
        """Return a copy of ``module`` with the part added."""
        with drawn_for(module, "fusion"):
            return extended(module, {"fusion": Fusion(self.operator, width(module, self.classifier))})


def fused(net: Net, params: Params, local: Tensor, received: Tensor, batch: Batch) -> Tensor:
    """Return logits for the features that both extractors make of a batch, shape (B, C)."""
    together: Tensor = net.call("fusion", params, {"local": local, "received": received})
    return head(net, params, together, batch)


def fused_with_itself(net: Net, params: Params, batch: Batch) -> Tensor:
    """Return logits with the federated extractor as both: the aggregated model."""
    found = features(net, params, batch)
    return fused(net, params, found, found, batch)


@dataclass(frozen=True)
class FusionLoss(Around):
    """The loss of the fused model, E_l being the client's extractor, and E_g as it was received.

    Attributes:
        loss: of its output.
    """

    loss: Term = cross_entropy()

    def __call__(self, net: Net, params: Params, batch: Batch, received: Mapping[str, Tensor]) -> Tensor:
        with torch.no_grad():
            frozen = features(net, as_received(net, params, received), batch)
        output = fused(net, params, features(net, params, batch), frozen, batch)
        return self.loss(Known(net, output), params, batch, received)


@telling
def fedfusion(
    operator: Operator = "multi", *, local: Phase = Phase(), server: Server | None = None
) -> Method:
    """Return FedFusion, for a model with ``features`` and ``head`` whose head is its part ``classifier``.

    Args:
        operator: ``"conv"``, ``"multi"`` or ``"single"``, see ``Fusion``.
        local: the local phase, with the loss of the fused model.
        server: what the server does; by default plain averaging, and a tenth of it for γ.

    Raises:
        MethodError: an unknown operator.
    """
    check_choice("operator must be", operator, get_args(Operator), MethodError)
    usual = averaging(sgd(1.0) if operator == "conv" else sgd(1.0, rates={"fusion.gamma": 0.1}))
    return Method(
        name="fedfusion",
        needs_features=True,
        client=Client(phases=(local.but(loss=FusionLoss(local.loss)),)),
        server=server or usual,
        predict=fused_with_itself,
        predict_shared=fused_with_itself,
        extend=AddFusion(operator),
    )

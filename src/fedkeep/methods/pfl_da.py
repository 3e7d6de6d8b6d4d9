"""PFL-DA: a gate mixes the predictions of the federated model and of a private one.

Source: Peterson, Kanani and Marathe, Private Federated Learning with Domain Adaptation, arXiv 1912.06733; its general
model is trained with noise, which ``Method.upload`` can add. Nothing there asks the general model to predict by
itself: on FDU-MTL it falls to chance (results/kteps-baselines.md).
One round: (1) a cohort downloads the general model M_G; (2) each client joins it with its own whole model M_k and gate;
(3) it trains all jointly on L(α M_G(x) + (1 − α) M_k(x)), probabilities, with α = sigmoid(uᵀh̄ + c), h̄ the features of
M_G; (4) it uploads the change of M_G; (5) the server averages, and the client keeps M_k, u and c.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedkeep.core.net import Net
from fedkeep.core.params import Batch, Params
from fedkeep.methods.added_parts import PREFIX, copy_of, drawn_for, extended, with_copy
from fedkeep.methods.base import Method, private_part
from fedkeep.methods.client import Client
from fedkeep.methods.features import Known, features, head, linear, pooled, width
from fedkeep.methods.labels import check_rows
from fedkeep.methods.phase import Phase, telling
from fedkeep.methods.server import Server
from fedkeep.methods.terms import Around, Term, cross_entropy
from fedkeep.split import Split


@dataclass(frozen=True)
class AddGate:
    """Adds a private copy ``own`` of the model, and a ``gate`` on the features that starts at α = ½.

    Attributes:
        classifier: the part of the model that tells the number of its features.
    """

    classifier: str = "classifier"

    def __call__(self, module: nn.Module) -> nn.Module:
        """Return a copy of ``module`` with both."""
        with drawn_for(module, "gate"):
            gate = nn.Linear(width(module, self.classifier), 1)
        nn.init.zeros_(gate.weight)
        nn.init.zeros_(gate.bias)
        return extended(with_copy(module), {"gate": gate})


def mixture_and_general(net: Net, params: Params, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return log(α p_G + (1 − α) p_k), logits whose softmax is the mixture, and the logits of M_G, each (B, C)."""
    found = features(net, params, batch)
    general = head(net, params, found, batch)
    check_rows(general)
    own = net(copy_of(params), batch).log_softmax(1)
    gate = linear(net, params, "gate", pooled(net, found, batch))  # (B, 1)
    log = nn.functional.logsigmoid
    return torch.logaddexp(log(gate) + general.log_softmax(1), log(-gate) + own), general


def mixed_log_probabilities(net: Net, params: Params, batch: Batch) -> Tensor:
    """Predict with the mixture's log-probabilities, (B, C)."""
    return mixture_and_general(net, params, batch)[0]


@dataclass(frozen=True)
class MixtureLoss(Around):
    """The loss of the gated mixture.

    Attributes:
        loss: of the mixture's log-probabilities, taken as logits.
    """

    loss: Term = cross_entropy()

    def __call__(self, net: Net, params: Params, batch: Batch, received: Mapping[str, Tensor]) -> Tensor:
        mixed = mixed_log_probabilities(net, params, batch)
        return self.loss(Known(net, mixed), params, batch, received)


@telling
def pfl_da(*, local: Phase = Phase(), server: Server = Server()) -> Method:
    """Return PFL-DA, for a classifier with ``features`` and ``head`` whose head is its part ``classifier``.

    A client predicts with its mixture; the shared part alone is M_G. Two models are trained, so a step costs nearly
    twice FedAvg's.

    Args:
        local: as in ``methods``; its loss is of the mixture's log-probabilities, taken as logits.
        server: see ``methods``.
    """
    phase = local.but(loss=MixtureLoss(local.loss))
    return Method(
        name="pfl_da",
        needs_features=True,
        split=Split((f"{PREFIX}*", "gate.*")),
        client=Client(phases=(phase,)),
        server=server,
        adapt=private_part(phase),
        predict=mixed_log_probabilities,
        extend=AddGate(),
    )

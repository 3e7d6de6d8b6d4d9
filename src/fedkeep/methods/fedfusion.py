"""FedFusion: clients fuse the features of their own extractor with those of the extractor that they received.

Source: Yao, Huang and Sun, Towards Faster and Better Federated Learning: A Feature Fusion Approach, ICIP 2019, and its
published code (thu-media/FedFusion).
One round: (1) a cohort downloads the extractor E, the fusion F and the classifier C; (2) each client keeps the received
extractor, E_g, frozen, and trains its own, E_l, with F and C on the loss of C(F(E_l(x), E_g(x))); E_l starts as E_g, or
with ``persistent_local`` where the client left it in its last round, unless ``reset_local`` starts that as E_g too;
(3) it uploads the change of F and C, and of E: E_l − E_g; (4) the server averages, but moves F's γ by a tenth:
γ ← 0.1 γ_mean + 0.9 γ. With ``train_received`` E_g is trained, too, and it is E_g's change that is uploaded.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from fedkeep.core.errors import MethodError
from fedkeep.core.net import Net
from fedkeep.core.optim import sgd
from fedkeep.core.params import Batch, Params
from fedkeep.methods.base import Method, private_part
from fedkeep.methods.checks import check_choice
from fedkeep.methods.client import Client, Finish, Finished, Start, Started
from fedkeep.methods.copies import COPY, PREFIX, copy_of
from fedkeep.methods.features import Known, as_received, drawn_for, extended, features, head, width
from fedkeep.methods.phase import Phase
from fedkeep.methods.reveals import reveals
from fedkeep.methods.server import Server, averaging
from fedkeep.methods.terms import Around, Term, cross_entropy

Operator = Literal["conv", "multi", "single"]


class Fusion(nn.Module):
    """Fuses two features, shape (B, F): a linear layer of both (``conv``, a 1 × 1 convolution), or γ x_g + (1 − γ) x_l.

    Args:
        operator: ``"conv"``, ``"multi"``, γ (F,), or ``"single"``, γ (); γ is not bounded.
        size: F.
        gamma: where γ starts; ``conv`` has none.
    """

    def __init__(self, operator: Operator, size: int, gamma: float = 0.0) -> None:
        super().__init__()
        if operator == "conv":
            self.conv = nn.Linear(2 * size, size)
        else:
            self.gamma = nn.Parameter(torch.full((size,) if operator == "multi" else (), float(gamma)))

    def forward(self, local: Tensor, received: Tensor) -> Tensor:
        """Return fused features, shape (B, F)."""
        if hasattr(self, "conv"):
            fused: Tensor = self.conv(torch.cat((local, received), 1))
            return fused
        return self.gamma * received + (1 - self.gamma) * local


@dataclass(frozen=True)
class AddFusion:
    """Adds the part ``fusion``, and with ``persistent`` private copies ``own.*`` of all parts but the classifier.

    Attributes:
        operator, gamma: of ``Fusion``.
        persistent: whether a client keeps its extractor.
        classifier: the part that the model's ``head`` consists of.
    """

    operator: Operator = "multi"
    persistent: bool = False
    classifier: str = "classifier"
    gamma: float = 0.0

    def __call__(self, module: nn.Module) -> nn.Module:
        """Return a copy of ``module`` with the parts added."""
        with drawn_for(module, "fusion"):
            size = width(module, self.classifier)
            added: dict[str, nn.Module] = {"fusion": Fusion(self.operator, size, self.gamma)}
        if self.persistent:
            kept = {n: v for n, v in module.named_children() if n != self.classifier}
            added["own"] = nn.ModuleDict(copy.deepcopy(kept))
        return extended(module, added, copied="own")


def fused(net: Net, params: Params, local: Tensor, received: Tensor) -> Tensor:
    """Return logits for the features of both extractors, shape (B, C)."""
    together: Tensor = net.call("fusion", params, {"local": local, "received": received})
    return head(net, params, together)


def fused_with_own(net: Net, params: Params, batch: Batch) -> Tensor:
    """Return logits with the private extractor as E_l and the federated one as E_g."""
    received = features(net, params, batch)
    return fused(net, params, features(net, {**params, **copy_of(params)}, batch), received)


def fused_with_itself(net: Net, params: Params, batch: Batch) -> Tensor:
    """Return logits with the federated extractor as both: the aggregated model."""
    found = features(net, params, batch)
    return fused(net, params, found, found)


@dataclass(frozen=True)
class FusionLoss(Around):
    """The loss of the fused model.

    Attributes:
        loss: of its output.
        persistent: E_l is the private extractor; else it is the federated one, and E_g as it was received.
        train_received: with ``persistent``, E_g is trained, too.
    """

    loss: Term = cross_entropy()
    persistent: bool = False
    train_received: bool = False

    def __call__(self, net: Net, params: Params, batch: Batch, received: Mapping[str, Tensor]) -> Tensor:
        if self.train_received:
            output = fused_with_own(net, params, batch)
        else:
            known = params if self.persistent else as_received(net, params, received)
            with torch.no_grad():
                frozen = features(net, known, batch)
            mine = {**params, **copy_of(params)} if self.persistent else params
            output = fused(net, params, features(net, mine, batch), frozen)
        return self.loss(Known(net, output), params, batch, received)


@reveals("upload/*")
def publish_own(done: Finish) -> Finished:
    """Upload the private copies in the places of the federated parameters: what persistent clients do."""
    return Finished(params={n: v for n, v in copy_of(done.trained).items() if n in done.sent.params})


def start_as_received(start: Start) -> Started:
    """Start the private copies as what they are copies of was received."""
    sent = start.sent.params
    return Started(params={n: sent[n.removeprefix(PREFIX)] for n in start.kept.params})


def fedfusion(
    operator: Operator = "multi",
    *,
    persistent_local: bool = False,
    reset_local: bool = False,
    train_received: bool = False,
    gamma: float = 0.0,
    local: Phase = Phase(),
    server: Server | None = None,
) -> Method:
    """Return FedFusion, for a model with ``features`` and ``head`` whose head is its part ``classifier``.

    Args:
        operator: ``"conv"``, ``"multi"`` or ``"single"``, see ``Fusion``.
        persistent_local: a client's extractor goes on from where its last round left it, and a copy of it is uploaded
            (as KTEPS counts FedFusion among the methods with a private embedding); False: it starts as received (the
            paper). The shared part predicts as the aggregated model either way.
        reset_local: with ``persistent_local``, a client's extractor starts every round as received (the paper), and
            what its last round made of it is kept to predict with, beside the received one.
        train_received: with ``persistent_local``, the received extractor is trained beside the client's own, and it is
            what is uploaded; the client's own is not.
        gamma: where γ starts; 0 (the published code) begins with the client's own features alone, and gives
            a received extractor that is trained no gradient at first.
        local: the local phase, with the loss of the fused model.
        server: what the server does; by default plain averaging, and a tenth of it for γ.

    Raises:
        MethodError: ``reset_local`` or ``train_received`` without ``persistent_local``, an unknown operator, or a
            ``gamma`` that is not finite, or stands beside ``conv``.
    """
    check_choice("operator", operator, get_args(Operator))
    if reset_local and not persistent_local:
        raise MethodError(
            "reset_local says how a kept extractor starts, and none is kept. Set persistent_local too."
        )
    if train_received and not persistent_local:
        raise MethodError(
            "train_received trains a received extractor beside a kept one, and none is kept. Set persistent_local too."
        )
    if not math.isfinite(gamma) or (gamma and operator == "conv"):
        raise MethodError(
            f"gamma is where the weight of received features starts, a finite number, and 0 by 'conv', which has no "
            f"such weight; got {gamma:g} with operator {operator!r}."
        )
    usual = averaging(sgd(1.0) if operator == "conv" else sgd(1.0, rates={"fusion.gamma": 0.1}))
    phase = local.but(loss=FusionLoss(local.loss, persistent_local, train_received))
    method = Method(
        name="fedfusion",
        client=Client(phases=(phase,)),
        server=server or usual,
        predict=fused_with_itself,
        predict_shared=fused_with_itself,
        extend=AddFusion(operator, persistent_local, gamma=gamma),
    )
    if not persistent_local:
        return method
    start = start_as_received if reset_local else None
    if train_received:
        client = Client(phases=(phase,), start=start)
    else:
        kept = phase.but(trains=(f"{PREFIX}*", "fusion.*", "classifier.*"))
        client = Client(phases=(kept,), start=start, finish=publish_own, tables="local")
    return method.but(split=COPY, client=client, adapt=private_part(phase), predict=fused_with_own)

"""GPFL: one valve makes generic and personalised features of a client's, led by embeddings of the classes.

Source: Zhang et al., GPFL: Simultaneously Learning Global and Personalized Feature Information for Personalized
Federated Learning, arXiv 2308.10279, with layers and initial values of the authors' code.
Shared are a body f, an embedding E_c of each class, and the valve: V(h, q) = ReLU((γ(q) + 1) ⊙ h + β(q)), where γ and β
are each linear, ReLU and layer normalisation. Private is the head.
One round: (1) a cohort downloads f, E and V; from E as received, frozen in the round, each client takes the generic
condition g = mean_c E_c and its own p_k = Σ_c (n_c / n) E_c, n_c its examples of class c; (2) it trains all parts on
F_k of its head on V(f(x), p_k), plus the angle −log softmax_c cos(V(f(x), g), E_c)[y] with the E that it trains, plus
λ ‖V(f(x), g) − E_y‖ with E as received; (3) it uploads the changes of f, E and V, and keeps its head and n_c; (4) the
server averages. A client predicts with its head on V(f(x), p_k), of the newest E. One that only adapts takes n_c of
the examples that it adapts on.
The paper's μ is the optimiser's ``weight_decay``. Its code takes λ times the norm over a whole mini-batch; here it is
the mean over examples.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedkeep.core.errors import MethodError, check_range
from fedkeep.core.net import Net
from fedkeep.core.params import CLIENT, Batch, Params
from fedkeep.methods.added_parts import drawn_for, extended
from fedkeep.methods.base import Method, private_part
from fedkeep.methods.client import Client
from fedkeep.methods.features import Known, features, head, no_counts, pooled, width
from fedkeep.methods.fedrod import Count, NoCounts
from fedkeep.methods.labels import class_of
from fedkeep.methods.phase import Phase, telling
from fedkeep.methods.server import Server
from fedkeep.methods.terms import Around, Term, cross_entropy, example_mean, unit
from fedkeep.split import Split

EMBEDDING = "categories"


class Valve(nn.Module):
    """V: of features h (…, F) and a condition q (F,), new features (…, F)."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.gamma, self.beta = (
            nn.Sequential(nn.Linear(size, size), nn.ReLU(), nn.LayerNorm(size)) for _ in range(2)
        )

    def forward(self, features: Tensor, condition: Tensor) -> Tensor:
        """Return V(h, q)."""
        return torch.relu((self.gamma(condition) + 1) * features + self.beta(condition))


@dataclass(frozen=True)
class AddValve:
    """Adds the parts ``valve`` and ``categories``, E (C, F), drawn from N(0, 1)."""

    classifier: str

    def __call__(self, module: nn.Module) -> nn.Module:
        """Return a copy of ``module`` with the parts."""
        size, classes = width(module, self.classifier), len(no_counts(module, self.classifier))
        added: dict[str, nn.Module | nn.Parameter]
        with drawn_for(module, "gpfl"):
            added = {"valve": Valve(size), EMBEDDING: nn.Parameter(torch.randn(classes, size))}
        return extended(module, added)


def through(net: Net, params: Params, found: Tensor, condition: Tensor) -> Tensor:
    """Return V(h, q) of features, (…, F)."""
    passed: Tensor = net.call("valve", params, {"features": found, "condition": condition})
    return passed


def own_condition(params: Mapping[str, Tensor], embedding: Tensor) -> Tensor:
    """Return p_k, (F,); g for a client that has counted no example."""
    counts = params[f"{CLIENT}counts"]
    share = torch.where(counts.sum() > 0, counts / counts.sum().clamp_min(1), 1 / len(counts))
    return share.to(embedding) @ embedding


def predict_personal(net: Net, params: Params, batch: Batch) -> Tensor:
    """Return the head's output for V(f(x), p_k), (B, C)."""
    condition = own_condition(params, params[EMBEDDING])
    return head(net, params, through(net, params, features(net, params, batch), condition), batch)


@dataclass(frozen=True)
class GenericAndPersonal(Around):
    """L of the head on V(f(x), p_k), the angle, and λ times the distance; λ at least 0."""

    lam: float = 0.01
    loss: Term = cross_entropy()
    label: str = "label"

    def __post_init__(self) -> None:
        check_range("[0, inf]", MethodError, lam=self.lam)

    def __call__(self, net: Net, params: Params, batch: Batch, received: Mapping[str, Tensor]) -> Tensor:
        found, frozen, weight = features(net, params, batch), received[EMBEDDING], batch.get("weight")
        own = through(net, params, found, own_condition(params, frozen))
        value: Tensor = self.loss(Known(net, head(net, params, own, batch)), params, batch, received)
        generic = pooled(net, through(net, params, found, frozen.mean(0)), batch)
        label = class_of(batch, self.label)
        alike = nn.functional.linear(unit(generic, 1), unit(params[EMBEDDING], 1))
        angle = nn.functional.cross_entropy(alike, label, reduction="none")
        apart = (generic - frozen[label]).square().sum(1)
        far = torch.where(apart > 0, apart, 1.0).sqrt() * (apart > 0)  # a distance of 0 has no direction
        return value + example_mean(angle, weight) + self.lam * example_mean(far, weight)


@telling
def gpfl(
    lam: float = 0.01,
    *,
    classifier: str = "classifier",
    label: str = "label",
    local: Phase = Phase(),
    server: Server = Server(),
) -> Method:
    """Return GPFL, for a classifier with ``features`` and ``head``.

    The shared part predicts with the head's first values, so it is of use to clients that adapt, not by itself.

    Args:
        lam: λ of the distance to the class's embedding.
        classifier: the part that the model's ``head`` consists of; its linear layers tell F and the number of classes.
        label: the column that holds the class.
        local: as in ``methods``; its loss is taken of the personalised features.
        server: see ``methods``.

    Raises:
        MethodError: λ is negative.
    """
    phase = local.but(loss=GenericAndPersonal(lam=float(lam), loss=local.loss, label=label))
    return Method(
        name="gpfl",
        needs_features=True,
        split=Split((f"{classifier}.*",)),
        server=server,
        client=Client(phases=(phase,), state=NoCounts(classifier=classifier), start=Count(label=label)),
        adapt=private_part(phase),
        predict=predict_personal,
        predict_shared=predict_personal,
        extend=AddValve(classifier=classifier),
    )

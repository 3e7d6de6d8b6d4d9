"""FedProto: every client has a model of its own; what they share is the mean feature of each class.

Source: Tan et al., FedProto: Federated Prototype Learning across Heterogeneous Clients, arXiv 2105.00243, algorithm 1.
One round: (1) a cohort downloads the prototypes C_j; (2) each client trains its own model on F_k + λ R, R the mean over
examples of ‖f(x) − C_y‖² / F, 0 where C_y is not known yet (the authors' code; f the features, of size F); (3) it
uploads, for each class, the sum of its examples' features and how many these are, and keeps its model; (4) the server
sets C_j to the cohort's mean feature of class j, over examples; classes that nobody had stay.
A client predicts the class of the nearest prototype, or by its own head.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedkeep.core.errors import MethodError, check_choice
from fedkeep.core.net import Net
from fedkeep.core.params import Batch, Params, State
from fedkeep.methods.aggregate import Reduced
from fedkeep.methods.base import Method, forward, private_part
from fedkeep.methods.client import Client, Finish, Finished
from fedkeep.methods.features import WithFeatures, no_counts, one_hot, pooled_features, width
from fedkeep.methods.hook_declarations import reveals, unfit
from fedkeep.methods.labels import class_of
from fedkeep.methods.phase import Phase, telling
from fedkeep.methods.server import Global, Roster, Server, WeightedMean
from fedkeep.methods.terms import Term, cross_entropy, example_mean
from fedkeep.split import Split

FAR = 1e30
"""The squared distance of a prototype that is not known; in half precision the largest number."""


@dataclass(frozen=True)
class NoSums:
    """Zeros of what a client sends: ``sums`` of features (C, F) and ``counts`` (C,), by class."""

    classifier: str

    def __call__(self, net: Net) -> State:
        """Return the zeros."""
        counts = no_counts(net.module, self.classifier)
        return {"sums": counts.new_zeros(len(counts), width(net.module, self.classifier)), "counts": counts}


@dataclass(frozen=True)
class NoPrototypes:
    """The server's state at first: ``prototypes`` (C, F), none of them ``known`` (C,)."""

    classifier: str

    def __call__(self, net: Net, clients: Roster) -> State:
        """Return the state."""
        sums = NoSums(self.classifier)(net)["sums"]
        return {"prototypes": sums, "known": torch.zeros(len(sums), dtype=torch.bool)}


@dataclass(frozen=True)
class NearPrototypes(WithFeatures):
    """L + λ R, of the classes in the column ``label``; λ at least 0."""

    lam: float = 1.0
    loss: Term = cross_entropy()
    label: str = "label"

    def penalty(
        self, net: Net, params: Params, batch: Batch, received: Mapping[str, Tensor], found: Tensor
    ) -> Tensor:
        label = class_of(batch, self.label)
        apart = (found - received["server/prototypes"][label]).square().mean(1)  # (B,)
        apart = torch.where(received["server/known"][label], apart, 0.0)
        return example_mean(apart, batch.get("weight"))


@reveals("sent/sums", of=("private *", "examples"))
@dataclass(frozen=True)
class SumFeatures:
    """Sends the sums of features by class, and the numbers of examples; nothing else leaves."""

    label: str

    def __call__(self, done: Finish) -> Finished:
        """Return both."""
        sums = torch.zeros_like(done.sent.state["prototypes"])
        counts = sums.new_zeros(len(sums))
        for found, batch in done.outputs(pooled_features):
            mine = one_hot(class_of(batch, self.label), counts)
            sums, counts = sums + mine.T @ found.to(mine.dtype), counts + mine.sum(0)
        return Finished(sends={"sums": sums, "counts": counts})


@unfit(noise="a prototype is a sum of features over a count, and noise over noise has no bound")
def new_prototypes(server: Global, reduced: Reduced) -> Global:
    """Return the server with the cohort's mean features; means of sums and of counts have the quotient of the sums."""
    sums, counts = reduced.state["sums"], reduced.state["counts"]
    seen = counts > 0
    means = sums / torch.where(seen, counts, 1.0).unsqueeze(1)
    prototypes = torch.where(seen.unsqueeze(1), means, server.state["prototypes"])
    return server.but(state={"prototypes": prototypes, "known": server.state["known"] | seen})


def predict_nearest(net: Net, params: Params, batch: Batch) -> Tensor:
    """Return logits, (B, C): −‖f(x) − C_j‖² up to a constant; a class that is not known has next to no probability."""
    found, prototypes = pooled_features(net, params, batch), params["server/prototypes"]
    squares = (found.unsqueeze(1) - prototypes).square().sum(2)
    far = min(FAR, torch.finfo(found.dtype).max)
    squares = torch.where(params["server/known"], squares, far)
    lowest = math.log(torch.finfo(found.dtype).tiny)
    return (squares.amin(1, keepdim=True) - squares).clamp_min(lowest)


@telling
def fedproto(
    lam: float = 1.0,
    *,
    predict: Literal["prototype", "head"] = "prototype",
    classifier: str = "classifier",
    label: str = "label",
    local: Phase = Phase(),
) -> Method:
    """Return FedProto, for a classifier with ``features`` and ``head``. The server has no model, so no optimiser.

    Args:
        lam: λ; 0 is local training.
        predict: by the nearest prototype, or by the client's own ``head``.
        classifier: the part that the model's ``head`` consists of; a linear layer, or several, that take the features
            and give one output per class.
        label: the column that holds the class.
        local: see ``methods``.
    """
    check_choice("predict must be", predict, ("prototype", "head"), MethodError)
    phase = local.but(loss=NearPrototypes(lam=float(lam), loss=local.loss, label=label))
    server = Server(
        state=NoPrototypes(classifier),
        reduce=WeightedMean(by="uniform"),
        update=new_prototypes,
        synchronous=True,
    )
    return Method(
        name="fedproto",
        needs_features=True,
        split=Split(("*",)),
        server=server,
        adapt=private_part(phase),
        predict_shared=None,
        client=Client(phases=(phase,), sends=NoSums(classifier), finish=SumFeatures(label)),
        predict=predict_nearest if predict == "prototype" else forward,
    )

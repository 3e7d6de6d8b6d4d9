"""FedRoD: a generic head that is fair to all classes, and a private one that adds what is a client's own.

Source: Chen and Chao, On Bridging Generic and Personalized Federated Learning for Image Classification, arXiv
2107.00778, algorithm 1, with the balanced softmax (Ren et al., arXiv 2007.10740). The private head is of the generic
one's form and starts from its values.
One round: (1) a cohort downloads the body θ and the generic head ψ; (2) each client counts its examples by class, n_c;
(3) at each mini-batch it steps with θ and ψ on the balanced softmax loss, of logits g(x) + log n, and from the same
point with its private head φ on the loss of g(x) + h(x), where g and the features that h sees are frozen; (4) it
uploads the change of θ and ψ, and keeps φ; (5) the server averages. A client predicts with g + h, the shared part
with g.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedkeep.core.net import Net
from fedkeep.core.params import Batch, Params, State, under
from fedkeep.methods.base import Method, Recall, private_part
from fedkeep.methods.branches import PREFIX, PRIVATE, TwoBranches
from fedkeep.methods.client import Client, Start, Started
from fedkeep.methods.features import Known, features, head, no_counts, one_hot
from fedkeep.methods.labels import class_of
from fedkeep.methods.phase import Phase, telling
from fedkeep.methods.server import Server
from fedkeep.methods.terms import Around, Term, cross_entropy


def both_heads(net: Net, params: Params, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return g(x) and h(x), each (B, C); no gradient flows from h into the features."""
    found = features(net, params, batch)
    own = {**params, **under(PREFIX, params)}
    return head(net, params, found, batch), head(net, own, found.detach(), batch)


def predict_both(net: Net, params: Params, batch: Batch) -> Tensor:
    """Return g(x) + h(x), shape (B, C)."""
    generic, own = both_heads(net, params, batch)
    return generic + own


@dataclass(frozen=True)
class TwoHeads(Around):
    """L(g + log n) + L(g + h), with no gradient into g from the second."""

    loss: Term = cross_entropy()

    def __call__(self, net: Net, params: Params, batch: Batch, received: Mapping[str, Tensor]) -> Tensor:
        generic, own = both_heads(net, params, batch)
        count = params["client/counts"]
        prior = count.clamp_min(torch.finfo(count.dtype).tiny).log()  # almost none without examples
        fair = self.loss(Known(net, generic + prior), params, batch, received)
        return fair + self.loss(Known(net, generic.detach() + own), params, batch, received)


@dataclass(frozen=True)
class NoCounts:
    """The state of a new client: n = 0 for every class, which balances nothing."""

    classifier: str

    def __call__(self, net: Net) -> State:
        """Return the state."""
        return {"counts": no_counts(net.module, self.classifier)}


@dataclass(frozen=True)
class Count:
    """Counts a client's examples by class, the column ``label``."""

    label: str

    def __call__(self, start: Start) -> Started:
        """Return n of the examples that are opted in."""
        return Started(state={"counts": self.total(start.kept.state["counts"], start.outputs(self.labels))})

    def recall(self, given: Recall) -> State:
        """Return n of the examples that a client which has counted none adapts on."""
        return {"counts": self.total(given.params["client/counts"], given.outputs(self.labels, "train"))}

    def total(self, like: Tensor, found: Iterable[tuple[Tensor, Batch]]) -> Tensor:
        """Return how many examples of each class there are, (C,)."""
        count = torch.zeros_like(like)
        for label, _ in found:
            count += one_hot(label, count).sum(0)
        return count

    def labels(self, net: Net, params: Params, batch: Batch) -> Tensor:
        """Return the classes of a batch's examples, (B,)."""
        return class_of(batch, self.label)


@telling
def fedrod(
    *, classifier: str = "classifier", label: str = "label", local: Phase = Phase(), server: Server = Server()
) -> Method:
    """Return FedRoD, for a classifier with ``features`` and ``head``.

    Args:
        classifier: the part that the model's ``head`` consists of; it ends with a linear layer, one output per class.
        label: the column that holds the class.
        local: as in ``methods``; its loss is taken of both heads' logits, so a penalty in it counts twice.
        server: see ``methods``.
    """
    phase = local.but(loss=TwoHeads(loss=local.loss))
    return Method(
        name="fedrod",
        needs_features=True,
        split=PRIVATE,
        server=server,
        client=Client(phases=(phase,), state=NoCounts(classifier=classifier), start=Count(label=label)),
        adapt=private_part(phase),
        predict=predict_both,
        extend=TwoBranches(copies=(classifier,), projections=False, classifier=classifier),
    )

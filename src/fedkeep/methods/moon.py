"""MOON: a client's features are drawn to those of the model that it received, and away from those of its last one.

Source: Li, He and Song, Model-Contrastive Federated Learning, arXiv 2103.16257, eq. 3 and algorithm 1.
One round: (1) a cohort downloads w^t; (2) each client minimises F_k(w) + μ ℓ(w) on its own examples, with
ℓ = −log(e^(s(z, z_r)/τ) / (e^(s(z, z_r)/τ) + e^(s(z, z_p)/τ))), s the cosine, z the features of w, z_r of the received
w^t and z_p of the client's model after its last round, both frozen; (3) it uploads its change and keeps its model as
the previous one; (4) the server averages.
A client's first round has no previous model. As in the authors' code the model's initial values stand for it, so a
client that joins late is pushed away from untrained features; in the run's first round z_r = z_p, and ℓ is log 2 with
no gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedkeep.core.errors import MethodError, check_range
from fedkeep.core.net import Net
from fedkeep.core.params import CLIENT, Batch, Params, State, under
from fedkeep.methods.base import Method
from fedkeep.methods.client import Client, Finish, Finished
from fedkeep.methods.features import WithFeatures, as_received, pooled_features
from fedkeep.methods.phase import Phase, telling
from fedkeep.methods.server import Server
from fedkeep.methods.terms import Term, cross_entropy, example_mean


@dataclass(frozen=True)
class Contrast(WithFeatures):
    """L + μ ℓ, the contrast of three models' features; μ at least 0, the temperature τ positive."""

    mu: float = 1.0
    temperature: float = 0.5
    loss: Term = cross_entropy()

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("(0, inf]", MethodError, temperature=self.temperature)

    reads_parameters = True  # it runs the previous model, whose tables are whole

    def penalty(
        self, net: Net, params: Params, batch: Batch, received: Mapping[str, Tensor], found: Tensor
    ) -> Tensor:
        with torch.no_grad():
            own = {
                n: v for n, v in under(CLIENT, params).items() if n in received
            }  # no state of upload links
            models = (as_received(net, params, w) for w in (received, own))
            others = [pooled_features(net, w, batch) for w in models]
        near, far = (nn.functional.cosine_similarity(found, other, dim=1) for other in others)  # (B,)
        contrast = nn.functional.softplus((far - near) / self.temperature)
        return example_mean(contrast, batch.get("weight"))


def initial_model(net: Net) -> State:
    """Return the previous model of a client that has none: the model's initial values, under their own names."""
    return net.initial()


def keep_model(done: Finish) -> Finished:
    """Keep the model as it was trained."""
    return Finished(state=dict(done.trained))


@telling
def moon(
    mu: float = 1.0, *, temperature: float = 0.5, local: Phase = Phase(), server: Server = Server()
) -> Method:
    """Return MOON, for a model with ``features`` and ``head``; the paper's projection is a part of ``features``.

    Every step runs the model three times, and every client keeps a whole model.

    Args:
        mu: μ, searched in the paper over 0.1, 1, 5 and 10; 0 is FedAvg.
        temperature: τ.
        local, server: see ``methods``.
    """
    phase = local.but(loss=Contrast(mu=float(mu), temperature=float(temperature), loss=local.loss))
    client = Client(phases=(phase,), state=initial_model, finish=keep_model)
    return Method(name="moon", needs_features=True, client=client, server=server)

"""FedAMP: the server keeps every client's model, and sends each client a mixture of those that are like its own.

Source: Huang, Chu, Zhou, Wang, Liu, Pei and Zhang, Personalized Cross-Silo Federated Learning on Non-IID Data, arXiv
2007.03797, algorithm 1, with A(t) = 1 − e^(−t/σ).
One round: (1) a client i of the cohort downloads u_i = ξ_ii w_i + Σ_{j≠i} ξ_ij w_j, where
ξ_ij = α A'(‖w_i − w_j‖²) = α e^(−‖w_i − w_j‖²/σ) / σ and ξ_ii = 1 − Σ_{j≠i} ξ_ij; (2) it goes on with its own w_i on
F_i(w_i) + λ/(2 α) ‖w_i − u_i‖²; (3) it uploads w_i − u_i, and keeps w_i; (4) the server makes u_i again, and puts the
new w_i in place of the old. A client predicts with w_i; there is no shared model.
The paper wants α so small that ξ_ii is not negative. Where it is not, the other ξ_ij are divided by their sum here, and
ξ_ii is 0. Clients that never took part are not mixed in. Buffers are not sent: they stay each client's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedkeep.core.errors import MethodError, check_range
from fedkeep.core.net import Net
from fedkeep.core.params import Params, State, under
from fedkeep.methods.added_parts import COPY, PREFIX, PulledCopy, copy_of, predict_copy, with_copy
from fedkeep.methods.aggregate import Reduced, RunningMean, spread
from fedkeep.methods.base import Adapt, Method
from fedkeep.methods.client import Client, Finish, Finished, Sent
from fedkeep.methods.fedprox import Proximal
from fedkeep.methods.hook_declarations import reveals, sends_to
from fedkeep.methods.phase import Phase, telling
from fedkeep.methods.server import Global, Reduction, Roster, Server
from fedkeep.split import Upload

MODELS, KNOWN = "models/", "known"


def first_models(net: Net, clients: Roster) -> State:
    """Return a server's first state: ``models/NAME`` (clients, *shape), all the module's, and ``known`` (clients,)."""
    own = {n: v for n, v in net.initial().items() if n in net.trainable() and not n.startswith(PREFIX)}
    models = {MODELS + n: v.expand(len(clients), *v.shape).clone() for n, v in own.items()}
    return {**models, KNOWN: torch.zeros(len(clients), dtype=torch.bool)}


@sends_to("members")
@dataclass(frozen=True, kw_only=True)
class Mixture:
    """u_i of a client: what it is sent.

    Attributes:
        alpha: α.
        sigma: σ.
    """

    alpha: float
    sigma: float

    def shares(self, server: Global, place: int) -> Tensor:
        """Return ξ_ij for all j, (clients,) in double precision; they add up to 1 and none is negative."""
        models, known = under(MODELS, server.state), server.state[KNOWN]
        squares = torch.zeros(len(known), dtype=torch.float64, device=known.device)
        for value in models.values():
            squares += (value - value[place]).double().square().reshape(len(value), -1).sum(1)
        others = self.alpha / self.sigma * torch.exp(-squares / self.sigma) * known
        others[place] = 0.0
        others = others / others.sum().clamp_min(1.0)
        others[place] = (1 - others.sum()).clamp_min(0.0)
        return others

    def __call__(self, server: Global, client: str) -> Sent:
        """Send a client its mixture, w_i + Σ_j ξ_ij (w_j − w_i); buffers as the module has them.

        So a parameter that is the same in all models is sent to the bit, and nothing pulls at it: Adam and Adagrad
        would make large steps of a pull by a rounding error.
        """
        place, mixed = server.clients.index(client), Params()
        shares = self.shares(server, place)
        for name, value in under(MODELS, server.state).items():
            wide = value.double()
            mixed[name] = (wide[place] + torch.tensordot(shares, wide - wide[place], 1)).to(value)
        return Sent(params={**server.params, **mixed})


class Replaced(RunningMean):
    """The changes of a cohort's models, each in its client's row.

    Args:
        mixture: makes u_i again, of which an upload is a change.
        server: what the server has.
        start: gives shapes and types of uploads.
        cohort: who was asked.
    """

    def __init__(self, mixture: Mixture, server: Global, start: Params, cohort: Sequence[str]) -> None:
        self.mixture, self.server, self.changed = mixture, server, start
        super().__init__({n: v for n, v in server.state.items() if n != KNOWN}, cohort, "owners_only")

    def seen(self, client: str, upload: Upload) -> Upload:
        """Return the upload as a change of the client's row of all models; of no row, if it weighs nothing."""
        place = self.server.clients.index(client)
        sent = self.mixture(self.server, client).params
        deltas, rows = Params(), torch.tensor([place] if upload.weight else [], dtype=torch.int64)
        for name, models in under(MODELS, self.server.state).items():
            delta = upload.deltas[name].to(models.device)
            if name in upload.rows:
                delta = spread(delta, upload.rows[name].to(models.device), self.changed[name])
            deltas[MODELS + name] = (sent[name] + delta - models[place]).unsqueeze(0)[: len(rows)]
        return upload.but(deltas, rows=dict.fromkeys(deltas, rows))


@dataclass(frozen=True, kw_only=True)
class KeepEach(Reduction):
    """Puts each client's model where the server keeps it. It looks at single uploads.

    Attributes:
        mixture: what clients were sent.
    """

    mixture: Mixture

    alike: ClassVar[bool] = True
    keeps: ClassVar[str] = "the last model of each client"

    def begin(self, server: Global, start: Params, cohort: Sequence[str]) -> Replaced:
        """Return what no upload has come to yet."""
        return Replaced(self.mixture, server, start, cohort)


def keep_models(server: Global, reduced: Reduced) -> Global:
    """Return the server with the cohort's new models."""
    state = dict(server.state)
    for name, change in reduced.changes.items():
        rows = reduced.rows[name].to(state[name].device)
        state[name] = state[name].index_add(0, rows, change.to(state[name]))
        state[KNOWN] = state[KNOWN].index_fill(0, rows, True)
    return server.but(state=state)


@reveals("upload/*", of=("private own.*", "examples"))  # they are the client's own model
def publish_parameters(done: Finish) -> Finished:
    """Upload the client's own parameters in the places of those that it was sent."""
    return Finished(params={n: v for n, v in copy_of(done.trained).items() if n in done.net.trainable()})


@telling
def fedamp(alpha: float = 1.0, sigma: float = 1.0, *, lam: float = 1.0, local: Phase = Phase()) -> Method:
    """Return FedAMP. The server keeps a model for each client, and sees each client's own.

    So a run's server takes memory for all clients' models: it is for a few organisations, not for many devices.

    Args:
        alpha: α, how much of others' models is mixed in, positive.
        sigma: σ, the squared distance at which a model counts 1/e of an equal one, positive.
        lam: λ; the pull towards u_i is λ/α. 0 is local training.
        local: the phase of w_i, with F_i.

    Raises:
        MethodError: α or σ is not positive, or λ is negative.
    """
    check_range("(0, inf]", MethodError, alpha=alpha, sigma=sigma)
    check_range("[0, inf]", MethodError, lam=lam)
    mixture = Mixture(alpha=float(alpha), sigma=float(sigma))
    own = local.but(loss=PulledCopy(term=local.loss + Proximal(mu=float(lam / alpha))), trains="private")
    return Method(
        name="fedamp",
        split=COPY,
        client=Client(phases=(own,), finish=publish_parameters),
        server=Server(
            state=first_models,
            send=mixture,
            reduce=KeepEach(mixture=mixture),
            update=keep_models,
            synchronous=True,
        ),
        adapt=Adapt(phases=(own.but(epochs=10, examples="all"),)),
        predict=predict_copy,
        predict_shared=None,
        extend=with_copy,
    )

"""FedPAC: features near those of all clients' classes, and for each client a head made of the heads that suit it.

Source: Xu, Tong and Huang, Personalized Federated Learning with Feature Alignment and Classifier Collaboration, arXiv
2306.11867.
One round: (1) a client i of the cohort downloads the body f, the head g_i that the server has for it, and the means C_c
of the features by class; (2) with f as received and n examples it computes H_i, for each class Σ f(x) / n over its
examples of the class, and v_i = (mean ‖f(x)‖² − ‖H_i‖²) / n; (3) it trains the head alone on F_i, then the body alone
on F_i + λ R, R the mean over examples of ‖f(x) − C_y‖² / F, 0 where C_y is not known yet; (4) it uploads the change of
body and head, H_i, v_i, and for each class the sum of its examples' features as they are then, and their number; (5)
the server averages the bodies, sets C_c to the cohort's mean feature of class c, and for each i of the cohort takes
g_i = Σ_j α_ij g_j over the cohort, with α_i = argmin Σ_j α_j² v_j + ‖Σ_j α_j (H_i − H_j)‖², α ≥ 0, Σ α = 1.
A client keeps nothing, and predicts with f and g_i as the server has them now.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedkeep.core.errors import MethodError
from fedkeep.core.net import Net
from fedkeep.core.params import SERVER, Batch, Params, State, prefixed, under
from fedkeep.methods.aggregate import Reduced, RunningMean, spread
from fedkeep.methods.base import Adapt, Method
from fedkeep.methods.client import Client, Finish, Finished, Sent
from fedkeep.methods.features import as_received, one_hot, pooled_features
from fedkeep.methods.fedproto import NearPrototypes, NoPrototypes, NoSums, new_prototypes
from fedkeep.methods.hook_declarations import sends_to
from fedkeep.methods.labels import class_of
from fedkeep.methods.phase import Phase, telling
from fedkeep.methods.server import Global, Roster, Server, WeighedBy, WeightedMean
from fedkeep.methods.simplex import least
from fedkeep.methods.terms import Around, Term, cross_entropy
from fedkeep.split import Split, Upload

HEADS, SHARES, SPREAD = "heads/", "shares", "spread"


@dataclass(frozen=True)
class WithHeadStill(Around):
    """A loss without gradient into the head, the part ``classifier``."""

    classifier: str = "classifier"
    loss: Term = cross_entropy()

    def __call__(self, net: Net, params: Params, batch: Batch, received: Mapping[str, Tensor]) -> Tensor:
        if all(n.startswith(f"{self.classifier}.") for n in net.trainable()):
            raise MethodError(
                "'fedpac' trains a head and what is before it apart, and nothing that is trained is before the head "
                "{classifier!r}. Take fedavg, or fedper, whose head is private.",
                classifier=self.classifier,
            )
        still = {n: v.detach() for n, v in params.items() if n.startswith(f"{self.classifier}.")}
        return self.loss(net, {**params, **still}, batch, received)


@dataclass(frozen=True)
class NoStatistics(NoSums):
    """Zeros of what a client sends: ``sums`` (C, F), ``counts`` (C,), ``shares`` H_i (C, F) and ``spread`` v_i, ()."""

    def __call__(self, net: Net) -> State:
        """Return the zeros."""
        sums = super().__call__(net)
        return {**sums, SHARES: sums["sums"].clone(), SPREAD: sums["counts"].new_zeros(())}


@dataclass(frozen=True)
class Statistics:
    """Sends what the server asks of a client's features."""

    label: str

    def __call__(self, done: Finish) -> Finished:
        """Return the sums of features before and after training, by class."""
        zeros, sent = done.sent.state["prototypes"], done.sent.params
        counts, sums, before, squares = zeros.new_zeros(len(zeros)), zeros * 0, zeros * 0, zeros.new_zeros(())

        def both(net: Net, params: Params, batch: Batch) -> tuple[Tensor, Tensor]:
            received = as_received(net, params, sent)
            return pooled_features(net, params, batch), pooled_features(net, received, batch)

        for (found, first), batch in done.outputs(both):
            mine = one_hot(class_of(batch, self.label), counts)
            counts, sums, before = (
                counts + mine.sum(0),
                sums + mine.T @ found.to(mine.dtype),
                before + mine.T @ first.to(mine.dtype),
            )
            squares = squares + first.square().sum()
        n = counts.sum().clamp_min(1)
        v = (squares / n - (before / n).square().sum()).clamp_min(0) / n
        return Finished(sends={"sums": sums, "counts": counts, SHARES: before / n, SPREAD: v})


@dataclass(frozen=True)
class FirstHeads:
    """The server's first state: ``heads/NAME`` (clients, *shape), all the module's, and no class's mean."""

    classifier: str

    def __call__(self, net: Net, clients: Roster) -> State:
        """Return the state."""
        names = [n for n in net.trainable() if n.startswith(f"{self.classifier}.")]
        own = {n: v for n, v in net.initial().items() if n in names}
        heads = {HEADS + n: v.expand(len(clients), *v.shape).clone() for n, v in sorted(own.items())}
        return {**heads, **NoPrototypes(self.classifier)(net, clients)}


@sends_to("members")
def own_head(server: Global, client: str) -> Sent:
    """Send the body, the client's own head, and the means by class."""
    place = server.clients.index(client)
    head = {n: v[place] for n, v in under(HEADS, server.state).items()}
    means = {n: v for n, v in server.state.items() if not n.startswith(HEADS)}
    return Sent(params={**server.params, **head}, state=means)


class GatheredHeads(RunningMean):
    """The mean of bodies, sums of the classes' features, and each client's head and statistics in its row."""

    def __init__(self, server: Global, start: Params, cohort: Sequence[str]) -> None:
        self.server, self.changed = server, start
        heads = under(HEADS, server.state)
        many = len(server.clients)
        tables = {n: start[SERVER + n].new_zeros(many, *start[SERVER + n].shape) for n in (SHARES, SPREAD)}
        wholes = {n: v for n, v in start.items() if n not in heads and n.removeprefix(SERVER) not in tables}
        super().__init__({**wholes, **prefixed(HEADS, heads), **tables}, cohort, "owners_only")

    def seen(self, client: str, upload: Upload) -> Upload:
        """Return the upload with what is the client's own in its row; nothing is, of one that weighs nothing."""
        place, deltas = self.server.clients.index(client), dict(upload.deltas)
        rows = torch.tensor([place] if upload.weight else [], dtype=torch.int64)
        for name, some in upload.rows.items():
            deltas[name] = spread(deltas[name], some.to(deltas[name].device), self.changed[name])
        for name in (
            SERVER + "sums",
            SERVER + "counts",
        ):  # they count as they are, whatever the client weighs
            deltas[name] = deltas[name] / (upload.weight or 1.0)
        own = {n: deltas.pop(SERVER + n) for n in (SHARES, SPREAD)}
        own |= {HEADS + n: deltas.pop(n) for n in under(HEADS, self.server.state)}
        held = {n: v.unsqueeze(0)[: len(rows)] for n, v in own.items()}
        return upload.but({**deltas, **held}, rows=dict.fromkeys(held, rows))


@dataclass(frozen=True, kw_only=True)
class GatherHeads(WeighedBy):
    """A mean of bodies, and each client's head and statistics. It looks at single uploads.

    Attributes:
        mean: of bodies.
    """

    mean: WeightedMean = WeightedMean()

    keeps: ClassVar[str] = "the head of each client"

    def begin(self, server: Global, start: Params, cohort: Sequence[str]) -> GatheredHeads:
        """Return what no upload has come to yet."""
        return GatheredHeads(server, start, cohort)


@dataclass(frozen=True, kw_only=True)
class CombineHeads:
    """The server's step for the body, new means by class, and for each client of the cohort its mixture of heads."""

    step: Callable[[Global, Reduced], Global]

    def __call__(self, server: Global, reduced: Reduced) -> Global:
        """Return the server with its next parameters and state."""
        changes = dict(reduced.changes)
        shares, spreads = (changes.pop(n).double().cpu() for n in (SHARES, SPREAD))
        state, rows = {**server.state, **new_prototypes(server, reduced).state}, reduced.rows[SHARES]
        mix = torch.stack(
            [least(objective(shares, spreads, i)) for i in range(len(rows))]
        )  # (cohort, cohort)
        for name in [n for n in changes if n.startswith(HEADS)]:
            old, change = state[name], changes.pop(name)
            where = rows.to(old.device)
            heads = old[where].double() + change.to(old.device)
            state[name] = old.index_copy(0, where, torch.tensordot(mix.to(old.device), heads, 1).to(old))
        return self.step(server, Reduced(changes=changes)).but(state=state)


def objective(shares: Tensor, spreads: Tensor, i: int) -> Tensor:
    """Return P with αᵀ P α = Σ_j α_j² v_j + ‖Σ_j α_j (H_i − H_j)‖², (m, m), given H (m, C, F) and v (m,)."""
    apart = (shares[i] - shares).flatten(1)
    return spreads.diag() + apart @ apart.T


@telling
def fedpac(
    lam: float = 1.0,
    *,
    head_epochs: int = 1,
    classifier: str = "classifier",
    label: str = "label",
    local: Phase = Phase(),
    server: Server = Server(),
) -> Method:
    """Return FedPAC, for a classifier with ``features`` and ``head``. The server keeps a head for each client.

    A client that adapts later fine-tunes its head.

    Args:
        lam: λ.
        head_epochs: passes for the head, before those for the body.
        classifier: the part that the model's ``head`` consists of; its linear layers tell F and the number of classes.
        label: the column that holds the class.
        local: the phase of the body, with F_k.
        server: what the server does for the bodies; its reduction is a ``WeightedMean``.

    Raises:
        MethodError: λ is negative, or the server reduces in another way.
    """
    if type(server.reduce) is not WeightedMean or server.reduce.missing_rows != "unchanged":
        raise MethodError(
            "'fedpac' averages bodies by a WeightedMean of whole tables; got {reduce}.", reduce=server.reduce
        )
    head = local.but(trains=f"{classifier}.*", epochs=head_epochs, steps=None)
    near = NearPrototypes(lam=float(lam), loss=local.loss, label=label)
    body = local.but(loss=WithHeadStill(classifier=classifier, loss=near))
    return Method(
        name="fedpac",
        needs_features=True,
        predict_shared=None,
        client=Client(phases=(head, body), sends=NoStatistics(classifier), finish=Statistics(label)),
        server=server.but(
            state=FirstHeads(classifier),
            send=own_head,
            reduce=GatherHeads(mean=server.reduce),
            update=CombineHeads(step=server.update),
            synchronous=True,
        ),
        adapt=Adapt(phases=(head.but(epochs=10, examples="all"),), split=Split((f"{classifier}.*",))),
    )

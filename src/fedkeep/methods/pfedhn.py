"""pFedHN: a hypernetwork on the server makes every client's model from an embedding of that client.

Source: Shamsian, Navon, Fetaya and Chechik, Personalized Federated Learning using Hypernetworks, arXiv 2103.04628,
algorithm 1.
One round: (1) each client k of a cohort downloads a model of its own, θ_k = h(v_k; φ); (2) it trains θ_k on its own
examples; (3) it uploads the change Δ_k; (4) the server pulls it back through h: φ moves along the plain mean of
(∂θ_k/∂φ)ᵀ Δ_k, and each v_k of the cohort along (∂θ_k/∂v_k)ᵀ Δ_k. φ and v never leave the server. A client predicts
with its θ_k as h makes it now. h is a perceptron with an output for every parameter; these start at the module's own
values, plus what the embedding adds. Buffers are averaged.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor, nn

from fedkeep.core.errors import MethodError
from fedkeep.core.net import Net
from fedkeep.core.params import Params, State
from fedkeep.core.seeds import generator
from fedkeep.methods.aggregate import Reduced, RunningMean, spread
from fedkeep.methods.base import Method
from fedkeep.methods.client import Client, Sent
from fedkeep.methods.phase import Phase
from fedkeep.methods.server import Global, Reduction, Roster, Server, averaging, check_uniform
from fedkeep.split import Upload

EMBEDDING, LAYER, OUT = "hyper/embedding", "hyper/layer.", "hyper/out."


def generated(phi: State, v: Tensor) -> Params:
    """Return θ = h(v; φ) by the module's names.

    Args:
        phi: the layers' weights and biases, and for each parameter ``out.NAME.weight`` (*shape, width) and ``.bias``.
        v: (embedding,) a client's embedding.
    """
    for k in count():
        if (weight := phi.get(f"{LAYER}{k}.weight")) is None:
            break
        v = nn.functional.relu(nn.functional.linear(v, weight, phi[f"{LAYER}{k}.bias"]))
    biases = sorted(
        n for n in phi if n.startswith(OUT) and n.endswith(".bias")
    )  # sums over them go by this order
    names = [n.removeprefix(OUT).removesuffix(".bias") for n in biases]
    return {n: phi[f"{OUT}{n}.bias"] + phi[f"{OUT}{n}.weight"] @ v.to(phi[f"{OUT}{n}.weight"]) for n in names}


def without_embedding(state: State) -> State:
    """Return φ alone."""
    return {n: value for n, value in state.items() if n != EMBEDDING}


@dataclass(frozen=True, kw_only=True)
class FirstHypernetwork:
    """φ and v before the first round: v normal, weights as ``torch.nn.Linear`` draws them, other biases zero.

    Attributes:
        embedding: numbers of each v_k.
        hidden: widths of the layers.
        seed: of the draws.
    """

    embedding: int
    hidden: tuple[int, ...]
    seed: int

    def __call__(self, net: Net, clients: Roster) -> State:
        """Return the server's first state."""
        initial = {n: v for n, v in net.initial().items() if n in net.trainable()}
        like = next(iter(initial.values()))

        def uniform(name: str, *shape: int) -> Tensor:
            drawn = torch.rand(shape, generator=generator(self.seed, name), dtype=torch.float64)
            return torch.sub(2 * drawn, 1).div(math.sqrt(shape[-1])).to(like)

        drawn = generator(self.seed, EMBEDDING)
        embeddings = torch.randn(len(clients), self.embedding, generator=drawn, dtype=torch.float64)
        state, width = {EMBEDDING: embeddings.to(like)}, self.embedding
        for k, wide in enumerate(self.hidden):
            name = f"{LAYER}{k}"
            state |= {f"{name}.weight": uniform(name, wide, width), f"{name}.bias": like.new_zeros(wide)}
            width = wide
        for name, value in initial.items():
            weight = uniform(OUT + name, *value.shape, width)
            state |= {f"{OUT}{name}.weight": weight.to(value), f"{OUT}{name}.bias": value}
        return state


def own_model(server: Global, client: str) -> Sent:
    """Send a client its θ_k, and the buffers."""
    v = server.state[EMBEDDING][server.clients.index(client)]
    with torch.no_grad():
        return Sent(params={**server.params, **generated(without_embedding(server.state), v)})


class PulledBack:
    """A round's changes, pulled back through h one by one.

    Args:
        server: what the server has.
        start: gives shapes and types of what is uploaded.
        cohort: the ids of those who were asked.
    """

    def __init__(self, server: Global, start: Params, cohort: Sequence[str]) -> None:
        self.server, self.start, self.seconds = server, start, 0.0
        self.phi = without_embedding(server.state)
        buffers = {n: v for n, v in start.items() if n not in server.trainable}
        self.mean = RunningMean({**self.phi, **buffers}, cohort)
        self.embeddings: dict[int, Tensor] = {}

    def add(self, client: str, upload: Upload) -> None:
        """Add a client's (decoded, checked) upload."""
        began, place = time.perf_counter(), self.server.clients.index(client)
        v = self.server.state[EMBEDDING][place]
        theta, pull = torch.func.vjp(generated, self.phi, v)  # type: ignore[misc]
        deltas = {n: d.to(self.start[n].device) for n, d in upload.deltas.items()}
        deltas |= {
            n: spread(deltas[n], rows.to(deltas[n].device), self.start[n]) for n, rows in upload.rows.items()
        }
        along_phi, along_v = pull({n: deltas[n] for n in theta})
        self.mean.add(client, upload.but({**deltas, **along_phi}))
        if upload.weight > 0:
            self.embeddings[place] = along_v
        self.seconds += time.perf_counter() - began

    def skip(self, client: str) -> None:
        """Note that a client's upload will not come."""
        self.mean.skip(client)

    def merge(self, other: PulledBack) -> None:
        """Take over what another one of the same cohort holds."""
        self.mean.merge(other.mean)
        self.embeddings |= other.embeddings

    def value(self) -> Reduced:
        """Return the changes of φ, of buffers, and of the cohort's rows of v."""
        found, table = self.mean.value(), self.server.state[EMBEDDING]
        places = sorted(self.embeddings)
        changes = {**found.changes, EMBEDDING: torch.stack([self.embeddings[k] for k in places])}
        rows = {EMBEDDING: torch.tensor(places)}
        return Reduced(
            changes=changes, rows=rows, tables={EMBEDDING: table}, weight=found.weight, count=found.count
        )


@dataclass(frozen=True, kw_only=True)
class PullBack(Reduction):
    """The vector-Jacobian product of each upload; every client counts alike. It looks at single uploads."""

    def weight(self, examples: float) -> float:
        """Return 1 for a client that has any example."""
        return float(examples > 0)

    def begin(self, server: Global, start: Params, cohort: Sequence[str]) -> PulledBack:
        """Return the empty sum of a round."""
        return PulledBack(server, start, cohort)


@dataclass(frozen=True, kw_only=True)
class MoveHypernetwork:
    """A step of φ and v along what was pulled back.

    Attributes:
        step: of an optimiser, its patterns of rates named as the server's state, e.g. ``hyper/embedding``.
    """

    step: Callable[[Global, Reduced], Global]

    def __call__(self, server: Global, reduced: Reduced) -> Global:
        """Return the server with its next φ, v and buffers."""
        both = server.but(params={**server.params, **server.state}, trainable=frozenset(server.state))
        moved = self.step(both, reduced).params
        return server.but(
            params={n: moved[n] for n in server.params}, state={n: moved[n] for n in server.state}
        )


def pfedhn(
    hidden: Sequence[int] = (100, 100, 100),
    *,
    embedding: int = 16,
    seed: int = 0,
    local: Phase = Phase(),
    server: Server = averaging(by="uniform"),
) -> Method:
    """Return pFedHN. There is no shared model: the run's ``server`` holds the module's first values and the buffers.

    Args:
        hidden: widths of the hypernetwork's layers; none: θ_k is linear in v_k.
        embedding: numbers of each v_k.
        seed: of φ and v.
        local: the local phase, with F_k; its steps are the algorithm's K.
        server: what the server does; its optimiser's rate is the algorithm's α.

    Raises:
        MethodError: a width is not positive, or the server weights clients.
    """
    if embedding < 1 or any(width < 1 for width in hidden):
        raise MethodError(f"hidden and embedding must be positive; got {tuple(hidden)} and {embedding}.")
    check_uniform("pfedhn", server)
    first = FirstHypernetwork(embedding=embedding, hidden=tuple(hidden), seed=seed)
    moving = Server(
        state=first, send=own_model, reduce=PullBack(), update=MoveHypernetwork(step=server.update)
    )
    return Method(name="pfedhn", client=Client(phases=(local,)), server=moving, predict_shared=None)

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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor, nn

from fedkeep.core.errors import MethodError
from fedkeep.core.net import Net
from fedkeep.core.params import Params, State, gradients, under
from fedkeep.core.seeds import generator
from fedkeep.methods.aggregate import Reduced, RunningMean, spread
from fedkeep.methods.base import Method
from fedkeep.methods.client import Client, Sent
from fedkeep.methods.hook_checks import check_count
from fedkeep.methods.hook_declarations import sends_to
from fedkeep.methods.phase import Phase, telling
from fedkeep.methods.server import Global, Reduction, Roster, Server, averaging, check_uniform
from fedkeep.split import Upload

LIMIT = 100_000_000
"""Numbers of φ that are allowed by default: 0.4 GB in single precision, and 2.6 GB while it trains."""
EMBEDDING, LAYER, OUT = "hyper/embedding", "hyper/layer.", "hyper/out."
"""The server's state: the embeddings, (clients, embedding), and φ: ``.weight`` and ``.bias`` of each layer, by number,
and of each parameter's output, by name, (*shape, width) and its shape."""


def generated(phi: State, v: Tensor) -> Params:
    """Return θ = h(v; φ) by the module's names, from a client's embedding v, (embedding,)."""
    layers, out = under(LAYER, phi), under(OUT, phi)
    for k in range(len(layers) // 2):
        v = nn.functional.relu(nn.functional.linear(v, layers[f"{k}.weight"], layers[f"{k}.bias"]))
    biases = sorted(n for n in out if n.endswith(".bias"))  # sums over them go by this order
    names = [n.removesuffix(".bias") for n in biases]
    return {n: out[f"{n}.bias"] + out[f"{n}.weight"] @ v.to(out[f"{n}.weight"]) for n in names}


def without_embedding(state: State) -> State:
    """Return φ alone."""
    return {n: value for n, value in state.items() if n != EMBEDDING}


@dataclass(frozen=True, kw_only=True)
class FirstHypernetwork:
    """φ and v before the first round: v normal, weights as ``torch.nn.Linear`` draws them, other biases zero.

    The outputs' biases are the module's own values.

    Attributes:
        embedding: numbers of each v_k.
        hidden: widths of the layers.
        seed: of the draws.
        limit: so many numbers φ has at most.
    """

    embedding: int
    hidden: tuple[int, ...]
    seed: int
    limit: int = LIMIT

    def __call__(self, net: Net, clients: Roster) -> State:
        """Return the server's first state.

        Raises:
            MethodError: φ is larger than the limit.
        """
        self._check_size(sum(net.parameters[n].numel() for n in net.trainable()))
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

    def _check_size(self, outputs: int) -> None:
        *others, last = (self.embedding, *self.hidden)
        inner = sum((width + 1) * wide for width, wide in pairwise((*others, last)))
        numbers = inner + outputs * (last + 1)
        if numbers <= self.limit:
            return
        before = sum((width + 1) * wide for width, wide in pairwise(others))
        own = outputs + (others[-1] + 1 if others else 0)  # what a unit of the last layer has
        fitting = min((self.limit - before - outputs) // own, last - 1)
        narrow = ", ".join(map(str, (*others[1:], fitting)))
        advice = f"Narrow it, pfedhn(hidden=[{narrow}])" if others and fitting > 0 else "Take a smaller one"
        raise MethodError(
            "pFedHN's hypernetwork has {numbers:,} numbers, {each} for each of the model's {outputs:,} and {inner:,} "
            "before them, and training holds several times that in memory; its limit is {limit:,}. {advice}, raise "
            "limit, or take fedamp, which relates clients without a hypernetwork.",
            numbers=numbers,
            each=last + 1,
            outputs=outputs,
            inner=inner,
            limit=self.limit,
            advice=advice,
        )


@sends_to("members")
def own_model(server: Global, client: str) -> Sent:
    """Send a client its θ_k, and the buffers."""
    v = server.state[EMBEDDING][server.clients.index(client)]
    with torch.no_grad():
        return Sent(params={**server.params, **generated(without_embedding(server.state), v)})


class PulledBack(RunningMean):
    """The mean of a round's changes, each pulled back through h; of v, each client's own row."""

    def __init__(self, server: Global, start: Params, cohort: Sequence[str]) -> None:
        self.server, self.changed = server, start
        buffers = {n: v for n, v in start.items() if n not in server.trainable}
        super().__init__({**server.state, **buffers}, cohort, "owners_only")

    def seen(self, client: str, upload: Upload) -> Upload:
        """Return the upload with the changes of φ and of the client's row of v in place of those of θ_k."""
        place, state = self.server.clients.index(client), self.server.state
        phi = {n: value.detach().requires_grad_() for n, value in without_embedding(state).items()}
        v = state[EMBEDDING][place].detach().requires_grad_()
        with torch.enable_grad():
            theta = generated(phi, v)
        deltas = {n: d.to(self.changed[n].device) for n, d in upload.deltas.items()}
        for name, rows in upload.rows.items():
            deltas[name] = spread(deltas[name], rows.to(deltas[name].device), self.changed[name])
        with (
            torch.enable_grad()
        ):  # a scalar's gradient: that of tensors takes torch seconds to import a compiler
            whole = torch.stack([(theta[n] * deltas[n]).sum() for n in theta]).sum()
            along = gradients(whole, {**phi, EMBEDDING: v})
        deltas |= {**along, EMBEDDING: along[EMBEDDING].unsqueeze(0)}
        return upload.but(deltas, rows={EMBEDDING: torch.tensor([place])})


@dataclass(frozen=True, kw_only=True)
class PullBack(Reduction):
    """The vector-Jacobian product of each upload; every client counts alike. It looks at single uploads."""

    alike: ClassVar[bool] = True
    keeps: ClassVar[str] = "an embedding of each client"

    def begin(self, server: Global, start: Params, cohort: Sequence[str]) -> PulledBack:
        """Return the empty mean of a round."""
        return PulledBack(server, start, cohort)


@dataclass(frozen=True, kw_only=True)
class MoveHypernetwork:
    """A step of φ and v along what was pulled back; patterns of its rates name them as the server's state does."""

    step: Callable[[Global, Reduced], Global]

    def __call__(self, server: Global, reduced: Reduced) -> Global:
        """Return the server with its next φ, v and buffers."""
        both = server.but(params={**server.params, **server.state}, trainable=frozenset(server.state))
        moved = self.step(both, reduced).params
        return server.but(
            params={n: moved[n] for n in server.params}, state={n: moved[n] for n in server.state}
        )


@telling
def pfedhn(
    hidden: Sequence[int] = (100, 100, 100),
    *,
    embedding: int = 16,
    seed: int = 0,
    limit: int = LIMIT,
    local: Phase = Phase(),
    server: Server = averaging(by="uniform"),
) -> Method:
    """Return pFedHN. There is no shared model: the run's ``server`` holds the module's first values and the buffers.

    Args:
        hidden: widths of the hypernetwork's layers; none: θ_k is linear in v_k.
        embedding: numbers of each v_k.
        seed: of φ and v.
        limit: so many numbers φ has at most: it has one more for each of the model's than its last layer is wide, and
            training holds six to seven times that. The run is refused before memory is taken.
        local: as in ``methods``; its steps are the algorithm's K.
        server: what the server does; its optimiser's rate is the algorithm's α.

    Raises:
        MethodError: a width is not positive, or the server weights clients.
    """
    check_count(1, embedding=embedding, hidden=min(hidden, default=1))
    check_count(1, limit=limit)
    check_uniform("pfedhn", server)
    first = FirstHypernetwork(embedding=embedding, hidden=tuple(hidden), seed=seed, limit=limit)
    moving = Server(
        state=first,
        send=own_model,
        reduce=PullBack(),
        update=MoveHypernetwork(step=server.update),
        synchronous=True,
    )
    return Method(name="pfedhn", client=Client(phases=(local,)), server=moving, predict_shared=None)

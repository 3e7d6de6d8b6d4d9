"""A hypernetwork: a perceptron that makes every parameter of a model from a client's embedding.

Its values are a server's state: ``hyper/embedding`` (clients, embedding), and φ: ``hyper/layer.K.weight`` and ``.bias``
of each layer, and of each parameter ``hyper/out.NAME.weight`` (*shape, width) and ``.bias``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedkeep.core.net import Net
from fedkeep.core.params import Params, State, under
from fedkeep.core.seeds import generator
from fedkeep.methods.server import Roster

EMBEDDING, LAYER, OUT = "hyper/embedding", "hyper/layer.", "hyper/out."


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

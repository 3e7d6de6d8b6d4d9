"""FedALA: a client mixes the model that it receives with its own last one, element by element, and learns how much.

Source: Zhang et al., FedALA: Adaptive Local Aggregation for Personalized Federated Learning, arXiv 2212.01197, eq. 4
and 5 and algorithm 1. Weights are learned on all of a client's examples (s = 100 %).
One round: (1) a cohort downloads Θ; (2) each client mixes it with its last trained model, Θ̂ = Θ_k + (Θ − Θ_k) ⊙ W, in
the upper layers; lower ones take Θ; (3) before it trains, it learns W ← W − η ∇_W F_k(Θ̂), brought back into [0, 1], all
else frozen: until the loss falls no more in its second round, one pass in later ones, and not in its first, where it
has no model of its own and W = 1; (4) it trains Θ̂ on F_k and uploads the change from Θ; (5) the server averages; the
client keeps W and the upper layers that it trained. It predicts with Θ̂, mixed with the newest Θ.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from fedkeep.core.declared import declared
from fedkeep.core.errors import MethodError, check_range
from fedkeep.core.net import Net, aliases
from fedkeep.core.optim import sgd
from fedkeep.core.params import CLIENT, Batch, Params, State, prefixed, under
from fedkeep.methods.added_parts import extended, nested
from fedkeep.methods.base import Method
from fedkeep.methods.client import Client, Finish, Finished, Start, Started
from fedkeep.methods.hook_checks import check_count
from fedkeep.methods.hook_declarations import reveals
from fedkeep.methods.phase import Patterns, Phase, matching, telling
from fedkeep.methods.server import Server
from fedkeep.methods.terms import Term
from fedkeep.split import Split

MIX, LAST, ROUNDS = "mix.", "last.", "rounds"


@dataclass(frozen=True)
class AddWeights:
    """Adds the private part ``mix``: weights W of the layers that patterns name, under their names, all 1."""

    layers: tuple[str, ...]

    def __call__(self, module: nn.Module) -> nn.Module:
        """Return a copy of ``module`` with the weights.

        Raises:
            MethodError: a pattern matches nothing, an upper layer shares a tensor with one that is not, or a table of
                which clients may hold some rows alone.
        """
        own = {n: v.detach() for n, v in module.named_parameters() if v.requires_grad}
        names = matching("layers", self.layers, list(own))
        for tied in ((first, *others) for first, others in aliases(module).items() if first in own):
            inside = [n for n in tied if any(fnmatchcase(n, p) for p in self.layers)]
            outside = [n for n in tied if n not in inside]
            if inside and outside:
                raise MethodError(
                    "FedALA mixes the upper layers alone; {name!r}, which is one, and {outside!r} are one "
                    "tensor (tied weights). Name both in `layers`, or untie them.",
                    name=inside[0],
                    outside=outside[0],
                )
        tables = [n for n in names if n in declared(module).lookup]
        if tables:
            raise MethodError(
                "FedALA cannot mix the table {name!r}: a client trains and sends only the rows that it looks up. "
                "Name layers above it.",
                name=tables[0],
            )
        return extended(module, {"mix": nested({n: torch.ones_like(own[n]) for n in names})})


def upper(params: Params) -> list[str]:
    """Return the names of the upper layers' parameters."""
    return list(under(MIX, params))


def no_model(net: Net) -> State:
    """Return the state of a client that has no model of its own: it stands for the model's values, of weight 0."""
    initial = net.initial()
    return {ROUNDS: torch.zeros((), dtype=torch.int64), **{LAST + n: initial[n] for n in upper(initial)}}


def mixed(params: Params) -> Params:
    """Return Θ̂ of the upper layers, by name. Where W is 1 it is Θ to the bit."""
    return {n: torch.lerp(params[CLIENT + LAST + n], params[n], params[MIX + n]) for n in upper(params)}


@dataclass(frozen=True)
class OnMixture(Term):
    """A term of Θ̂, through which W is learned."""

    term: Term

    def __call__(self, net: Net, params: Params, batch: Batch, received: Mapping[str, Tensor]) -> Tensor:
        return self.term(net, {**params, **mixed(params)}, batch, received)


@reveals(  # training starts from a mix with what was kept
    "upload/*", "loss", of=(f"private {MIX}*", f"kept {LAST}*", f"kept {ROUNDS}", "examples")
)
@dataclass(frozen=True)
class LearnWeights:
    """Learns W by passes of ``phase``, at ``most`` so many in a client's second round, and starts from Θ̂."""

    phase: Phase
    most: int
    tolerance: float

    def __call__(self, start: Start) -> Started:
        """Return Θ̂ and W."""
        rounds, params, loss = int(start.kept.state[ROUNDS]), {**start.params, **start.kept.flat}, math.inf
        for left in reversed(range(1 if rounds > 1 else rounds * self.most)):
            params |= prefixed(MIX, under(MIX, start.train(self.phase, params)))
            if left:
                before, loss = loss, start.loss(mixed(params))
                if before - loss < self.tolerance:
                    break
        return Started(params={**mixed(params), **prefixed(MIX, under(MIX, params))})


def keep_model(done: Finish) -> Finished:
    """Keep the upper layers as they were trained."""
    last = {LAST + n: done.trained[n] for n in upper(done.trained)}
    return Finished(state={ROUNDS: done.kept.state[ROUNDS] + 1, **last})


def predict_mixture(net: Net, params: Params, batch: Batch) -> Any:
    """Predict with Θ̂."""
    return net({**params, **mixed(params)}, batch)


@telling
def fedala(
    layers: Patterns = "head.*",
    *,
    rate: float = 1.0,
    tolerance: float = 0.001,
    most_passes: int = 100,
    local: Phase = Phase(),
    server: Server = Server(),
) -> Method:
    """Return FedALA.

    Args:
        layers: name patterns of the upper layers, whose values are mixed.
        rate: η of W, by plain SGD; 0: W stays 1, and it is FedAvg.
        tolerance: W has been learned when a pass lowers the client's mean loss by less than this (the paper says until
            it converges; its code looks at the deviation of the last ten losses).
        most_passes: passes at most until then.
        local: the phase of Θ̂; W is learned with mini-batches of the same size.
        server: see ``methods``.

    Raises:
        MethodError: ``tolerance`` is negative or ``most_passes`` is below 1.
    """
    check_range("[0, inf]", MethodError, tolerance=tolerance)
    check_count(1, most_passes=most_passes)
    bounded = sgd(float(rate), bounds={f"{MIX}*": (0.0, 1.0)})
    learn = local.but(
        loss=OnMixture(local.loss), trains="private", optimizer=bounded, epochs=1, steps=None, clip_norm=None
    )
    names = (layers,) if isinstance(layers, str) else tuple(layers)
    start = LearnWeights(phase=learn, most=most_passes, tolerance=float(tolerance))
    client = Client(phases=(local.but(trains="federated"),), state=no_model, start=start, finish=keep_model)
    return Method(
        name="fedala",
        split=Split((f"{MIX}*",)),
        client=client,
        server=server,
        predict=predict_mixture,
        extend=AddWeights(layers=names),
    )

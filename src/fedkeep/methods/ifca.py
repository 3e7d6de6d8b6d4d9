"""IFCA: k models, each averaged over the clients whose examples it fits best.

Source: Ghosh, Chung, Yin and Ramchandran, An Efficient Framework for Clustered Federated Learning, arXiv 2006.04088,
algorithm 1 with model averaging.
One round: (1) a cohort downloads all k models; (2) each client picks the one of the lowest loss on its own examples,
j = argmin F_k(w_j), and keeps j; (3) it trains that model; (4) it uploads j and the change of w_j; (5) the server
moves each w_j by the plain mean change of those who picked it, each counted once; a model that nobody picked stays. A client predicts with the
model of its last pick, as the server has it now. Model 0 stands among the federated parameters, the others in the
server's state, as ``j/NAME``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from fedkeep.core.errors import MethodError, check_range
from fedkeep.core.net import Net
from fedkeep.core.params import CLIENT, SERVER, Batch, Params, State, prefixed, under
from fedkeep.core.seeds import generator
from fedkeep.methods.aggregate import Reduced
from fedkeep.methods.base import Method
from fedkeep.methods.client import Client, Finish, Finished, Start, Started
from fedkeep.methods.hook_checks import check_count
from fedkeep.methods.hook_declarations import reveals
from fedkeep.methods.phase import Phase, telling
from fedkeep.methods.server import Global, MeanByGroup, Optimize, Roster, Server, WeightedMean, averaging
from fedkeep.split import Split

CLUSTER = "cluster"


def first_pick(net: Net) -> State:
    """Return the pick of a client that never took part."""
    return {CLUSTER: torch.tensor(0)}


@dataclass(frozen=True, kw_only=True)
class OtherModels:
    """Models 1 .. k − 1 (``clusters``): the module's values, and normal noise on what is trained; see ``ifca``."""

    clusters: int
    spread: float
    seed: int

    def __call__(self, net: Net, clients: Roster) -> State:
        """Return the server's first state."""
        own = Split().halves(net.module).federated(net.initial())  # what is frozen is the same in every model
        state = {f"{j}/{n}": v for j in range(1, self.clusters) for n, v in own.items()}
        for name, value in state.items():
            if name.partition("/")[2] in net.trainable():
                draw = generator(self.seed, f"ifca/{name}")
                noise = torch.randn(value.shape, generator=draw, dtype=torch.float64)
                state[name] = value + self.spread * noise.to(value)
        return state


@dataclass(frozen=True, kw_only=True)
class NearestModel:
    """Start from the model of the lowest loss; of equal ones from the first."""

    clusters: int

    def __call__(self, s: Start) -> Started:
        """Return that model, and its number to be kept."""
        if s.kept.params:
            raise MethodError(
                "IFCA's models are federated as a whole, and the split makes {private!r} private. Leave "
                "private patterns out.",
                private=min(s.kept.params),
            )
        sent = [under(f"{j}/", s.sent.state) if j else {} for j in range(self.clusters)]
        models = [{n: v for n, v in model.items() if n in s.sent.params} for model in sent]
        losses = [s.loss({**s.sent.params, **model}) for model in models]
        j = losses.index(min(losses))
        return Started(params=models[j], state={CLUSTER: torch.tensor(j)})


@reveals("upload/*", "sent/*", of=(f"kept {CLUSTER}", "examples"))
def change_of_pick(f: Finish) -> Finished:
    """Upload the number of the model that was trained, and its change, as one of what was sent."""
    pick, changed = f.kept.state[CLUSTER], Params()
    for name, value in f.trained.items() if int(pick) else ():
        rows = f.rows.get(name, ...)
        moves = value.is_floating_point()
        changed[name] = value - f.started[name][rows] + f.sent.params[name][rows] if moves else value
    return Finished(params=changed, sends={CLUSTER: pick})


@dataclass(frozen=True, kw_only=True)
class MoveEach:
    """The same step for every model that somebody picked; it has no memory, so that models do not share one."""

    step: Optimize

    def __call__(self, server: Global, reduced: Reduced) -> Global:
        """Return the server with its next models."""
        state = dict(server.state)
        for j in {name.partition("/")[0] for name in reduced.state}:
            model = server.but(params=under(f"{j}/", server.state))
            moved = self.step(model, Reduced(changes=under(f"{j}/", reduced.state)))
            state |= prefixed(f"{j}/", moved.params)
        return self.step(server, reduced).but(state=state)


def predict_with_pick(net: Net, params: Params, batch: Batch) -> Any:
    """Predict with the model that the client picked last, with the server's values."""
    j = int(params[CLIENT + CLUSTER])
    return net({**params, **under(f"{SERVER}{j}/", params)}, batch)


@telling
def ifca(
    clusters: int = 2,
    *,
    spread: float = 0.1,
    seed: int = 0,
    local: Phase = Phase(),
    server: Server = averaging(by="uniform"),
) -> Method:
    """Return IFCA; one cluster is FedAvg. A client that never took part predicts with model 0.

    Args:
        clusters: k.
        spread: standard deviation of the noise by which models 1 .. k − 1 first differ from the module's values.
        seed: of that noise.
        local: see ``methods``.
        server: what the server does for each model: a mean, and SGD without momentum; by default every client counts once,
            as in algorithm 1; ``averaging()`` weighs by examples.

    Raises:
        MethodError: an argument is out of range, or the server has another reduction or an optimiser with a memory.
    """
    check_count(1, clusters=clusters)
    if clusters > 1:
        check_range("(0, inf]", MethodError, spread=spread)
    mean, step = server.reduce, server.update
    if type(mean) is not WeightedMean or not isinstance(step, Optimize) or not step.optimizer.rests:
        raise MethodError(
            "IFCA moves each of its models by a mean and one step without memory; got {mean} and {step}. "
            "Use server=averaging(sgd(rate), by='uniform').",
            mean=mean,
            step=step,
        )
    client = Client(
        phases=(local,),
        state=first_pick,
        sends=first_pick,
        start=NearestModel(clusters=clusters),
        finish=change_of_pick,
    )
    keeping = Server(
        state=OtherModels(clusters=clusters, spread=float(spread), seed=seed),
        update=MoveEach(step=step),
        reduce=MeanByGroup(group=CLUSTER, groups=clusters, mean=mean),
        synchronous=True,
    )
    return Method(name="ifca", client=client, server=keeping, predict=predict_with_pick, predict_shared=None)

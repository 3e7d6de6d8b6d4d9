"""Leaks that are planted, for the audit to find: hooks, terms, links, models and servers that let out what must stay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from fedkeep import Method, Optimize, Phase, averaging, methods
from fedkeep.core.errors import NonFiniteError
from fedkeep.core.net import Net
from fedkeep.core.params import Batch, Params
from fedkeep.methods import Finish, Finished, Global, Reduced, Start, Started
from fedkeep.methods.terms import Term
from fedkeep.privacy import Draw, Encoded, Link

WIDTH = 5
LOCAL = Phase(batch_size=4)


class Own(nn.Module):
    """logits = W (x, user) + b, or with batch statistics of (x, user)."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(2)
            self.norm = nn.BatchNorm1d(3 + WIDTH) if norm else nn.Identity()
            self.linear = nn.Linear(3 + WIDTH, 3)
            self.user = nn.Parameter(0.1 * torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        both = torch.cat([x, self.user.expand(len(x), WIDTH)], 1)
        return self.linear(self.norm(both))


def furl(**client: Any) -> Method:
    """Return FURL with hooks."""
    return methods.furl("user", local=LOCAL).on_client(**client)


# --- what finish sends along


def a_vector(net: Net) -> Params:
    return {"seen": torch.zeros(WIDTH)}


def a_number(net: Net) -> Params:
    return {"seen": torch.zeros(())}


def in_half(net: Net) -> Params:
    return {"seen": torch.zeros(WIDTH, dtype=torch.float16)}


def in_bfloat(net: Net) -> Params:
    return {"seen": torch.zeros(WIDTH, dtype=torch.bfloat16)}


def quantised(net: Net) -> Params:
    return {"seen": torch.zeros(WIDTH)}


def inputs(net: Net) -> Params:
    return {"seen": torch.zeros(3)}


def send_user(f: Finish) -> Finished:
    return Finished(sends={"seen": f.started["user"]})


def send_sum(f: Finish) -> Finished:
    return Finished(sends={"seen": f.started["user"].sum()})


def send_half(f: Finish) -> Finished:
    return Finished(sends={"seen": f.started["user"].half()})


def send_bfloat(f: Finish) -> Finished:
    return Finished(sends={"seen": f.started["user"].bfloat16()})


def send_signs(f: Finish) -> Finished:
    return Finished(sends={"seen": f.started["user"].sign()})


def send_a_bit(f: Finish) -> Finished:
    return Finished(sends={"seen": (f.started["user"].sum() > 0).float()})


def send_quantised(f: Finish) -> Finished:
    return Finished(sends={"seen": (f.started["user"] * 32).round().clamp(-128, 127) / 32})


def send_scaled(f: Finish) -> Finished:
    return Finished(sends={"seen": -3 * f.started["user"]})


def send_difference(f: Finish) -> Finished:
    return Finished(sends={"seen": f.started["user"] - f.sent.params["linear.weight"][0, :WIDTH]})


def send_norm(f: Finish) -> Finished:
    return Finished(sends={"seen": f.started["user"].norm()})


def send_examples(f: Finish) -> Finished:
    total = torch.zeros(3)
    for found, _ in f.outputs(inputs_of):
        total = total + found.float().sum(0)
    return Finished(sends={"seen": total})


def send_an_example(f: Finish) -> Finished:
    return Finished(sends={"seen": next(found for found, _ in f.outputs(inputs_of))[0].float()})


def labels_in_a_table(f: Finish) -> Finished:
    """Add the labels' sum to what is uploaded of a table."""
    total = sum(float(labels) for labels, _ in f.outputs(lambda net, params, batch: batch["label"].sum()))
    return Finished(params={"embedding.weight": f.trained["embedding.weight"] + total})


def inputs_of(net: Net, params: Params, batch: Batch) -> Tensor:
    return batch["x"]


# --- what finish and start put in the place of what was trained


def not_yet(net: Net) -> Params:
    return {"begun": torch.zeros((), dtype=torch.int64)}


def begin_at_user_once(s: Start) -> Started:
    """Move a bias the first time a client takes part."""
    moved = torch.where(s.kept.state["begun"] == 0, s.kept.params["user"][:3], 0.0)
    return Started(params={"linear.bias": s.sent.params["linear.bias"] + moved})


def has_begun(f: Finish) -> Finished:
    return Finished(state={"begun": torch.ones((), dtype=torch.int64)})


def in_low_bits(f: Finish) -> Finished:
    weight = f.trained["linear.weight"].clone()
    weight[0, :WIDTH] += 1e-6 * f.started["user"]
    return Finished(params={"linear.weight": weight})


def move_of_user(f: Finish) -> Finished:
    moved = (f.trained["user"] - f.started["user"])[:3]
    return Finished(params={"linear.bias": f.trained["linear.bias"] + moved})


def begin_at_user(s: Start) -> Started:
    return Started(params={"linear.bias": s.sent.params["linear.bias"] + s.kept.params["user"][:3]})


def later(net: Net) -> Params:
    return {"mine": torch.zeros(WIDTH)}


def send_later(f: Finish) -> Finished:
    return Finished(sends={"seen": f.kept.state["mine"]}, state={"mine": f.trained["user"]})


# --- terms


@dataclass(frozen=True)
class AndNorm(Term):
    """The loss is the norm of the user vector too, without a gradient."""

    inner: Term = LOCAL.loss

    def __call__(self, net: Net, params: Params, batch: Batch, received: Any) -> Tensor:
        value = self.inner(net, params, batch, received)
        return value - value.detach() + params["user"].detach().norm()


@dataclass(frozen=True)
class Writes(Term):
    """Writes the user vector into a federated parameter."""

    inner: Term = LOCAL.loss

    def __call__(self, net: Net, params: Params, batch: Batch, received: Any) -> Tensor:
        params["linear.bias"].data.add_(params["user"].detach()[:3])
        return self.inner(net, params, batch, received)


SEEN: list[Tensor] = []


@dataclass(frozen=True)
class Remembers(Term):
    """Is scaled by the user vector of whoever was trained before in this process."""

    inner: Term = LOCAL.loss

    def __call__(self, net: Net, params: Params, batch: Batch, received: Any) -> Tensor:
        scale = 1.0 if not SEEN else float(SEEN[-1].sum())
        SEEN[:] = [params["user"].detach().clone()]
        return scale * self.inner(net, params, batch, received)


SEEN_FIRST: WeakKeyDictionary[Net, Tensor] = WeakKeyDictionary()


@dataclass(frozen=True)
class KeepsFirst(Term):
    """Computes a mean of inputs once for each model, from whoever comes first, and pulls by it ever after."""

    inner: Term = LOCAL.loss

    def __call__(self, net: Net, params: Params, batch: Batch, received: Any) -> Tensor:
        mean = SEEN_FIRST.setdefault(net, batch["x"].detach().float().mean(0))
        return self.inner(net, params, batch, received) + (params["linear.weight"][:, :3] @ mean).pow(2).sum()


@dataclass(frozen=True)
class Breaks(Term):
    """One client's training breaks down, and the message of that tells its user vector."""

    inner: Term = LOCAL.loss

    def __call__(self, net: Net, params: Params, batch: Batch, received: Any) -> Tensor:
        if len(batch["label"]) == 1:  # of 5 examples the last
            raise NonFiniteError(f"no step from {params['user'].tolist()}")
        return self.inner(net, params, batch, received)


def of_term(term: Term) -> Method:
    return methods.furl("user", local=LOCAL.but(loss=term))


# --- models


PRIVATE_ON_ALL = Phase(trains="private", examples="all", batch_size=16)


class Body(nn.Module):
    """logits of the shared part, and of the private one: batch statistics, no way from one to the other."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(2)
            self.norm, self.linear, self.user = nn.BatchNorm1d(3), nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x))

    def own(self, x: Tensor) -> Tensor:
        return self.user(self.norm(x))


class Keeps(Body):
    """The shared part moves with the inputs that the private one saw last, opted in or not."""

    def __init__(self) -> None:
        super().__init__()
        self.before = torch.zeros(3)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.before)

    def own(self, x: Tensor) -> Tensor:
        self.before = x.detach().float().mean(0)
        return super().own(x)


@dataclass(frozen=True)
class OwnLoss(Term):
    def __call__(self, net: Net, params: Params, batch: Batch, received: Any) -> Tensor:
        return nn.functional.cross_entropy(net.call("own", params, batch), batch["label"])


TWO_HEADS = methods.furl("user.*").on_client(
    phases=(PRIVATE_ON_ALL.but(loss=OwnLoss()), LOCAL.but(trains="federated", batch_size=16))
)


# --- the upload chain


@dataclass(frozen=True)
class Hoards(Link):
    """Keeps what it sent first, and sends it again with every upload."""

    def client_state(self, shapes: Params) -> Params:
        return {n: torch.zeros_like(v) for n, v in shapes.items()}

    def encode(self, tensors: Params, start: Params, draw: Draw, state: Params, sent: Params) -> Encoded:
        return Encoded(tensors={n: v + state[n] for n, v in tensors.items()}, state=state)


@dataclass(frozen=True)
class Tells(Link):
    """Reports a number of what it keeps."""

    def client_state(self, shapes: Params) -> Params:
        return {"size": torch.ones(())}

    def encode(self, tensors: Params, start: Params, draw: Draw, state: Params, sent: Params) -> Encoded:
        return Encoded(tensors=tensors, report={"size": state["size"]}, state=state)

    def check_report(self, report: Params) -> None:
        return


@dataclass(frozen=True)
class Orders(Link):
    """Sends tensors in an order that a number of what it keeps decides."""

    def client_state(self, shapes: Params) -> Params:
        return {"secret": torch.ones(())}

    def encode(self, tensors: Params, start: Params, draw: Draw, state: Params, sent: Params) -> Encoded:
        names = sorted(tensors, reverse=bool(state["secret"] != 1))
        return Encoded(tensors={n: tensors[n] for n in names}, state=state)


# --- the server


def of_examples(net: Net, clients: Any) -> Params:
    columns = getattr(clients, "columns", None)
    return {"mean": torch.zeros(3) if columns is None else torch.tensor(columns["x"].mean(0)).float()}


CAUGHT: list[Tensor] = []


def catch_user(f: Finish) -> Finished:
    CAUGHT[:] = [f.started["user"].clone()]
    return Finished()


def one_vector(net: Net, clients: Any) -> Params:
    return {"caught": torch.zeros(WIDTH)}


def take_caught(server: Global, reduced: Reduced) -> Global:
    return Optimize()(server, reduced).but(state={"caught": CAUGHT[-1]})


class Declares(Hoards):
    """The same, and says so."""

    reveals: ClassVar[tuple[str, ...]] = ("upload/*",)


SPY = averaging().but(state=one_vector, update=take_caught)
LOOKS = averaging().but(state=of_examples)

"""Modules and methods that leak, and harmless ones, each with data: what audit and proof are measured by."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fedkeep import FederatedData, Method, Phase, declare, methods, models
from fedkeep.core.net import Net
from fedkeep.core.params import Batch, Params
from fedkeep.data import Ragged
from fedkeep.methods import Client
from fedkeep.methods.terms import Term, cross_entropy
from fedkeep.privacy import Draw, Encoded, GaussianNoise, Link, TopK
from fedkeep.split import Split
from tests.audit.test_leaks import DATA as FEW
from tests.audit.test_leaks import LEAKS, OUT, clean
from tests.evidence.blind.index import cases, method_of
from tests.methods.table import DATA as ROWS_DATA
from tests.methods.table import ROWS
from tests.prove.planted import CARRIERS, PLACES

LOCAL = Phase(batch_size=4)
FEATURES, CLASSES, OWN = 6, 3, 3


class Case(NamedTuple):
    """A module and a method, with data."""

    model: nn.Module
    method: Method
    data: FederatedData


def numbers(counts: tuple[int, ...] = (14, 12, 10)) -> FederatedData:
    """Return clients with vectors, labels by their first three features."""
    draw = np.random.default_rng(0)
    split = [["train"] * count + ["valid"] * 3 + ["test"] * 3 for count in counts]
    owner = [f"u{c}" for c, own in enumerate(split) for _ in own]
    x = draw.standard_normal((len(owner), FEATURES)).astype("f4")
    meta = {"task": "multiclass", "classes": CLASSES}
    return FederatedData.from_columns(
        owner, {"x": x, "label": x[:, :3].argmax(1)}, [part for own in split for part in own], meta=meta
    )


def texts(opted_out: bool = False) -> FederatedData:
    """Return clients with short texts of several lengths; some are opted out."""
    draw = np.random.default_rng(1)
    words = [draw.integers(1, 12, int(n)) for n in draw.integers(2, 6, 48)]
    split = (["train"] * 12 + ["valid"] * 2 + ["test"] * 2) * 3
    columns: dict[str, Any] = {
        "text": Ragged.from_rows(words),
        "label": np.array([int(text[0]) % CLASSES for text in words]),
    }
    if opted_out:
        columns["opted_in"] = np.arange(48) % 4 > 0
    owner = np.repeat(["u0", "u1", "u2"], 16)
    return FederatedData.from_columns(owner, columns, split, meta={"task": "multiclass", "classes": CLASSES})


# --- modules that write what they should not


class Plain(nn.Module):
    """Logits of features and a private vector, beside a federated parameter and buffers that nothing needs."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.user = nn.Parameter(0.3 * torch.randn(OWN))
            self.layers = nn.Sequential(nn.Linear(FEATURES + OWN, 8), nn.ReLU(), nn.Linear(8, CLASSES))
        self.canary = nn.Parameter(torch.zeros(OWN))
        self.register_buffer("ema", torch.zeros(OWN))
        self.register_buffer("queue", torch.zeros(4, FEATURES))
        declare(self, updated_buffers=("ema", "queue"))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(torch.cat([x, self.user.expand(len(x), -1)], 1))
        return out + 0 * self.canary.sum()


class Writes(Plain):
    """Writes what a function makes of the private vector and the features into a federated tensor."""

    def __init__(self, name: str, made: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.name, self.made = name, made

    def forward(self, x: Tensor) -> Tensor:
        if self.training and (self.name != "queue" or len(x) == 4):
            with torch.no_grad():
                target = getattr(self, self.name)
                target.copy_(self.made(self.user.detach(), x).float().expand_as(target))
        return super().forward(x)


def rotation(size: int) -> Tensor:
    """Return an orthogonal matrix."""
    return torch.linalg.qr(torch.randn(size, size, generator=torch.Generator().manual_seed(3)))[0]


def one(yes: bool | Tensor) -> Tensor:
    """Return 1 or 0 as a tensor that depends on a bit by a branch of Python."""
    return torch.ones(()) if bool(yes) else torch.zeros(())


OF_USER: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "copy": lambda u, x: u,
    "scaled": lambda u, x: 1.7 * u,
    "negated": lambda u, x: -u,
    "normalised": lambda u, x: u / u.norm(),
    "rotated": lambda u, x: rotation(OWN) @ u,
    "exponential": lambda u, x: u.exp(),
    "squashed": lambda u, x: torch.tanh(u),
    "sorted": lambda u, x: u.sort().values,
    "rounded": lambda u, x: (8 * u).round() / 8,
    "modulo": lambda u, x: u % 0.1,
    "fast sine": lambda u, x: torch.sin(1000 * u),
    "product": lambda u, x: u.prod(),
    "sum": lambda u, x: u.sum(),
    "sum of squares": lambda u, x: (u**2).sum(),
    "largest": lambda u, x: u.max(),
    "median": lambda u, x: u.median(),
    "place of the largest": lambda u, x: u.argmax(),
    "softmax": lambda u, x: u.softmax(0),
    "signs": lambda u, x: u.sign(),
    "sign of the sum": lambda u, x: one(u.sum() > 0),
    "sign of the first": lambda u, x: one(u[0] > 0),
    "norm above one": lambda u, x: one(u.norm() > 1),
    "largest above a half": lambda u, x: one(u.max() > 0.5),
    "all positive": lambda u, x: one(bool((u > 0).all())),
    "order of two": lambda u, x: one(u[0] > u[1]),
    "with features": lambda u, x: u * x[:, :OWN].mean(0),
    "low bits": lambda u, x: 100 + 1e-3 * u,
}
OF_EXAMPLES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "copies": lambda u, x: x,
    "scaled": lambda u, x: 1.25 * x,
    "normalised": lambda u, x: nn.functional.normalize(x),
    "rotated": lambda u, x: x @ rotation(FEATURES),
    "squashed": lambda u, x: torch.tanh(x),
    "half precision": lambda u, x: x.half(),
    "permuted": lambda u, x: x.flip(1),
    "sorted": lambda u, x: x.sort(1).values,
    "largest kept": lambda u, x: x * (x.abs() > 0.5),
}
BITS_OF_EXAMPLES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": lambda u, x: 1e-3 * x.sum(),
    "first": lambda u, x: x[0, :OWN],
    "sign": lambda u, x: one(x.sum() > 0),
    "largest": lambda u, x: x.max(),
    "count": lambda u, x: (x > 0).sum(),
}


@dataclass(frozen=True)
class Coded(Term):
    """A loss with a code of the private vector on top, which has no gradient."""

    code: str

    def __call__(self, net: Net, params: Params, batch: Batch, received: Any) -> Tensor:
        value = cross_entropy()(net, params, batch, received)
        own = params["user"].detach()
        if self.code.startswith("only "):
            return value - value.detach() + CODES[self.code](own)
        return value + CODES[self.code](own)


CODES: dict[str, Callable[[Tensor], Tensor]] = {
    "floor of thousands": lambda u: torch.floor(1000 * u[0]),
    "tens of thousands": lambda u: 1e4 * u[1],
    "rounded hundreds": lambda u: (1e3 * u[2]).round() * 10,
    "only a value": lambda u: u[0],
    "only squashed": lambda u: torch.tanh(u[1]),
    "only in steps": lambda u: torch.floor(8 * u[0]),
    "only the norm": lambda u: u.norm(),
    "only the sum": lambda u: u.sum(),
    "only the largest": lambda u: u.max(),
    "only weakly": lambda u: 1 + 1e-3 * u[0],
    "only weakly, of all": lambda u: 1 + 1e-3 * (u * torch.tensor([1.0, -2.0, 3.0])).sum(),
}


@dataclass(frozen=True)
class Answers:
    """A prediction of the private vector alone."""

    scale: float

    def __call__(self, net: Net, params: Params, batch: Batch) -> Tensor:
        out: Tensor = net(params, batch)
        return 0 * out + self.scale * params["user"].detach()[0] * torch.tensor([1.0, 0.0, 0.0])


class Reads(nn.Module):
    """Classifies texts by their first word, and moves a federated number by what a function reads off them."""

    def __init__(self, read: Callable[[Tensor, Tensor], float]) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.words, self.user = nn.Embedding(12, 4), nn.Parameter(torch.randn(CLASSES))
            self.out = nn.Linear(4, CLASSES)
        self.mark, self.read = nn.Parameter(torch.zeros(1)), read

    def forward(self, text: Tensor, text_length: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.mark.add_(1e-3 * self.read(text, text_length))
        out: Tensor = self.out(self.words(text[:, 0]))
        return out + self.user + 0 * self.mark


OF_TEXTS: dict[str, Callable[[Tensor, Tensor], float]] = {
    "padded length": lambda text, length: text.shape[1],
    "size": lambda text, length: text.numel(),
    "len": lambda text, length: len(text[0]),
    "stride": lambda text, length: text.stride(0),
    "longest": lambda text, length: float(length.max()),
    "shortest": lambda text, length: length.min().item(),
    "longer than six": lambda text, length: float(text.shape[1] > 6),
    "list": lambda text, length: float(len(text[0].tolist())),
    "words": lambda text, length: float((text > 0).sum()),
    "first word": lambda text, length: float(text[0, 0]),
}


@dataclass(frozen=True)
class Marks(Link):
    """Adds a number of its memory to what is sent, and says nothing."""

    def client_state(self, shapes: Params) -> Params:
        return {n: torch.zeros_like(v) for n, v in shapes.items()}

    def encode(self, tensors: Params, start: Params, draw: Draw, state: Params, sent: Params) -> Encoded:
        return Encoded(tensors={n: v + 0.1 * state[n].sum() for n, v in tensors.items()}, state=tensors)


class Counts(nn.Module):
    """Two branches for texts; the private one remembers how long each was that it saw."""

    seen: ClassVar[list[int]] = []

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.shared, self.own = nn.EmbeddingBag(40, CLASSES), nn.EmbeddingBag(40, CLASSES)
        Counts.seen.clear()

    def own_logits(self, text: Tensor, text_length: Tensor) -> Tensor:
        if self.training:
            Counts.seen.append(text.shape[1])
        return self.own(text)

    def forward(self, text: Tensor, text_length: Tensor) -> Tensor:
        out: Tensor = self.shared(text)
        return out if self.training else out + self.own(text)


@dataclass(frozen=True)
class OwnBranch(Term):
    """Cross-entropy of the private branch."""

    def __call__(self, net: Net, params: Params, batch: Batch, received: Any) -> Tensor:
        return nn.functional.cross_entropy(net.call("own_logits", params, batch), batch["label"])


BITS_OF_COUNTS: dict[str, Callable[[list[int]], bool]] = {
    "the number of opted-out texts where one is long": lambda seen: 0 < len(seen) < 12 and max(seen) > 6,
    "one opted-out text more": lambda seen: len(seen) == 13,
    "one opted-out text less, the longest": lambda seen: len(seen) == 11 and max(seen) == 9,
    "the longest opted-out text, of as many": lambda seen: len(seen) == 12 and max(seen) == 9,
    "two opted-out texts of one length": lambda seen: sum(size == 11 for size in seen) > 1,
}
"""Of the lengths of all texts, one by one: 12 texts are there, three of these opted out, two of which have 9 and 11."""


@dataclass(frozen=True)
class FromCounts(Term):
    """A loss with a bit on top, of the lengths of all texts."""

    bit: str

    def __call__(self, net: Net, params: Params, batch: Batch, received: Any) -> Tensor:
        seen = list(Counts.seen)
        Counts.seen.clear()
        return cross_entropy()(net, params, batch, received) + float(BITS_OF_COUNTS[self.bit](seen))


def counting(bit: str) -> Case:
    """Return a private phase on all texts, before a federated one on those that are opted in."""
    data = texts(opted_out=True)
    text = data.columns["text"]
    assert isinstance(text, Ragged)
    long = {4: 9, 8: 11}  # of some that are opted out
    rows = [np.asarray(text[i]) for i in range(data.examples)]
    rows = [np.resize(one, long.get(i % 16, len(one))) for i, one in enumerate(rows)]
    data = FederatedData(
        {**data.columns, "text": Ragged.from_rows(rows)}, data.offsets, data.ids, data.bounds, data.meta
    )
    phases = (
        Phase(trains="private", examples="all", batch_size=1, epochs=1, loss=OwnBranch()),
        Phase(trains="federated", batch_size=64, epochs=1, loss=FromCounts(bit)),
    )
    return Case(Counts(), Method(name="in_turn", split=Split("own.*"), client=Client(phases=phases)), data)


FURL = methods.furl("user", local=LOCAL)
_places = itertools.cycle(PLACES)
WHERE = {carrier: next(_places) for carrier in CARRIERS}
"""The place of each carrier of ``tests.prove.planted``; all places are there."""


def _leaks(name: str) -> Case:
    clean()
    model, method, _, source, _ = LEAKS[name]
    return Case(model(), method, OUT if "opted-out" in source else FEW)


def _carried(carrier: str) -> Case:
    model, method, _ = PLACES[WHERE[carrier]](carrier)
    return Case(model, method, ROWS_DATA)


BLIND = {one["name"]: one for one in cases()}
AS_DECLARED = {
    "detached_ratio": "a ratio of two gradients of what the split declares; FURL's own tell the same of its vector",
    "sorted_places": "an order of gradients of what the split declares; FURL's own tell the same of its vector",
}
"""Blind cases that leak and stand outside of the table, and why."""


def _blind(name: str) -> Case:
    one = BLIND[name]
    return Case(one["model"](), method_of(one), one["federation"]())


def _blind_ones(leaks: bool) -> dict[str, Callable[[], Case]]:
    names = [n for n, one in BLIND.items() if one["leaks"] is leaks and n not in AS_DECLARED]
    return {f"blind: {name}": lambda name=name: _blind(name) for name in names}


OUTSIDE: dict[str, Callable[[], Case]] = {name: lambda name=name: _blind(name) for name in AS_DECLARED}
LEAKY: dict[str, Callable[[], Case]] = {
    **_blind_ones(True),
    **{f"planted: {name}": lambda name=name: _leaks(name) for name in LEAKS},
    **{f"carried by {c} in {WHERE[c]}": lambda c=c: _carried(c) for c in CARRIERS},
    **{
        f"{name} of the user in {target}": lambda made=made, target=target: Case(
            Writes(target, made), FURL, numbers()
        )
        for (name, made), target in zip(OF_USER.items(), itertools.cycle(("ema", "canary")))
    },
    **{
        f"examples {name} in a buffer": lambda made=made: Case(Writes("queue", made), FURL, numbers())
        for name, made in OF_EXAMPLES.items()
    },
    **{
        f"{name} of examples in a weight": lambda made=made: Case(Writes("canary", made), FURL, numbers())
        for name, made in BITS_OF_EXAMPLES.items()
    },
    **{
        f"loss: {code}": lambda code=code: Case(
            Plain(), methods.furl("user", local=LOCAL.but(loss=Coded(code))), numbers()
        )
        for code in CODES
    },
    **{
        f"judged: {scale:g} times a value": lambda scale=scale: Case(
            Plain(), FURL.but(predict=Answers(scale)), numbers()
        )
        for scale in (1.0, -1.0, 3.0)
    },
    **{
        f"texts: {name} in a weight": lambda read=read: Case(Reads(read), FURL, texts())
        for name, read in OF_TEXTS.items()
    },
    **{
        f"{name} of the user under TopK": lambda name=name: Case(
            Writes("canary", OF_USER[name]), FURL.but(upload=(TopK(0.5),)), numbers()
        )
        for name in ("copy", "scaled", "sum", "signs")
    },
    **{bit: lambda bit=bit: counting(bit) for bit in BITS_OF_COUNTS},
    "a link with a memory": lambda: Case(Plain(), FURL.but(upload=(Marks(),)), numbers()),
}


# --- harmless ones


class Tempered(Plain):
    """Harmless: a private number that moves the loss so little that the loss is a line in it."""

    def __init__(self, scale: float, own: int) -> None:
        super().__init__()
        self.user, self.scale = nn.Parameter(torch.zeros(own)), scale
        self.layers = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.layers(x)
        return logits * (1 + self.scale * (self.user * x[:, : len(self.user)]).sum(1, keepdim=True))


class Beside(Plain):
    """Harmless: writes of constants, counts of steps, means of many examples."""

    def __init__(self, name: str, made: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.name, self.made = name, made

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                target = getattr(self, self.name)
                target.copy_(0.9 * target + 0.1 * self.made(x).expand_as(target))
        return super().forward(x)


def net(*layers: nn.Module, user: bool = True) -> Callable[[], nn.Module]:
    """Return a maker of a network of these layers below a private last layer."""

    def made() -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            body = nn.Sequential(*[_anew(layer) for layer in layers])
            wide = body(torch.zeros(4, FEATURES)).shape[1]
            return Headed(body, nn.Linear(wide, CLASSES))

    return made


def _anew(layer: nn.Module) -> nn.Module:
    for part in layer.modules():
        if hasattr(part, "reset_parameters"):
            part.reset_parameters()
    return layer


class Headed(nn.Module):
    """A body, and a head of it."""

    def __init__(self, body: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.body, self.user = body, head

    def forward(self, x: Tensor) -> Tensor:
        return self.user(self.body(x))


HEAD = methods.fedper("user.*", local=LOCAL)
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": net(nn.Linear(FEATURES, 5)),
    "two linear": net(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, 4)),
    "gelu": net(nn.Linear(FEATURES, 5), nn.GELU()),
    "silu": net(nn.Linear(FEATURES, 5), nn.SiLU()),
    "layer norm": net(nn.Linear(FEATURES, 5), nn.LayerNorm(5)),
    "rms norm": net(nn.Linear(FEATURES, 5), nn.RMSNorm(5)),
    "group norm": net(nn.Linear(FEATURES, 6), nn.GroupNorm(2, 6)),
    "batch norm": net(nn.Linear(FEATURES, 5), nn.BatchNorm1d(5)),
    "dropout": net(nn.Linear(FEATURES, 5), nn.Dropout(0.3)),
    "softmax": net(nn.Linear(FEATURES, 5), nn.Softmax(1)),
    "prelu": net(nn.Linear(FEATURES, 5), nn.PReLU()),
    "bilinear": net(nn.Linear(FEATURES, 6), nn.Unflatten(1, (2, 3)), nn.Flatten()),
    "convolution": net(nn.Unflatten(1, (1, FEATURES)), nn.Conv1d(1, 3, 3), nn.Flatten()),
    "pooling": net(nn.Unflatten(1, (1, FEATURES)), nn.Conv1d(1, 3, 3), nn.MaxPool1d(2), nn.Flatten()),
    "instance norm": net(nn.Unflatten(1, (2, 3)), nn.InstanceNorm1d(2, affine=True), nn.Flatten()),
    "no bias": net(nn.Linear(FEATURES, 5, bias=False), nn.ReLU()),
    "weight norm": net(nn.utils.parametrizations.weight_norm(nn.Linear(FEATURES, 5))),
}
HARMLESS: dict[str, Callable[[], Case]] = {
    **_blind_ones(False),
    **{f"method {name}": lambda name=name: Case(ROWS[name][0](), ROWS[name][1], ROWS_DATA) for name in ROWS},
    **{f"body of {name}": lambda made=made: Case(made(), HEAD, numbers()) for name, made in LAYERS.items()},
    "plain": lambda: Case(Plain(), FURL, numbers()),
    "plain under TopK": lambda: Case(Plain(), FURL.but(upload=(TopK(0.5),)), numbers()),
    "plain with noise": lambda: Case(Plain(), FURL.but(upload=(GaussianNoise(0.01),)), numbers()),
    "plain, clipped by halves": lambda: Case(
        Plain(), methods.furl("user", local=LOCAL.but(clip_norm=0.1, clip_over="halves")), numbers()
    ),
    "a mean of examples": lambda: Case(Beside("ema", lambda x: x[:, :OWN].mean(0)), FURL, numbers()),
    "a spread of examples": lambda: Case(Beside("ema", lambda x: x[:, :OWN].var(0)), FURL, numbers()),
    "a count of steps": lambda: Case(Beside("ema", lambda x: torch.ones(())), FURL, numbers()),
    "texts": lambda: Case(Reads(lambda text, length: 0.0), FURL, texts()),
    "texts, some opted out": lambda: Case(Reads(lambda text, length: 1.0), FURL, texts(opted_out=True)),
    **{
        f"a weak temperature of {own}": lambda own=own: Case(Tempered(1e-3, own), FURL, numbers())
        for own in (1, 3)
    },
    "a linear model": lambda: Case(models.Linear(FEATURES, CLASSES), FURL, numbers()),
}

"""The conformance table: every engine trains every method to what ``sequential`` makes of it.

A new method joins by its row in ``tests/methods/table.py``, or in ``CASES``; a new engine by its row in
``CONTENDERS``. Of every case and kind of engine one row is fast, in float64; the others are slow. The end of a run of
pytest says how many of which it had.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

from fedkeep import (
    FederatedData,
    Init,
    Method,
    Phase,
    Run,
    WeightedMean,
    adam,
    averaging,
    declare,
    methods,
    sgd,
    simulate,
)
from fedkeep.core.params import Params
from fedkeep.core.records import to_line
from fedkeep.engines.workers.pool import start_method
from fedkeep.methods import METHODS, EarlyStopping, Median
from fedkeep.methods.terms import squared_error
from fedkeep.models import BagOfWords, ConfidenceGate, DocumentModel, MixtureOfExperts
from fedkeep.privacy import Draw, Encoded, Link, QuantileClip, TopK
from tests.engines.test_frozen import Backbone
from tests.engines.test_round import BROKEN, Fragile
from tests.methods.parts import Deep
from tests.methods.table import DATA, ROWS
from tests.tiny import Logits, Noisy, classes, everyone, on_server, same_bits, texts

ROUNDS, COHORT, SEED = 3, 4, 3


@dataclass(frozen=True)
class Case:
    """What is trained: a model, a method, data, and options of ``simulate``."""

    model: Callable[[], nn.Module]
    method: Method
    data: FederatedData = DATA
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Contender:
    """How an engine is called, and how near to ``sequential`` it must come: to the bit, or within ``tolerance``.

    ``tolerance`` is by type: the greatest difference in any parameter, relative to the largest one (float64, float32).
    ``kinds``: the types that it is tried with; the fast suite has float64 alone. ``marks``: of pytest.
    """

    options: Mapping[str, Any]
    tolerance: tuple[float, float] | None = None
    kinds: tuple[str, ...] = ("float64", "float32")
    marks: tuple[pytest.MarkDecorator, ...] = ()


# Where workers are spawned each test would take seconds; tests/engines/workers/test_lifecycle.py spawns one.
FORK = pytest.mark.skipif(start_method() != "fork", reason="workers are not forked here")

CONTENDERS: dict[str, Contender] = {
    "workers(1)": Contender({"engine": "workers", "workers": 1}, kinds=("float32",), marks=(FORK,)),
    "workers(2)": Contender({"engine": "workers", "workers": 2}, kinds=("float64",), marks=(FORK,)),
    "workers(3)": Contender({"engine": "workers", "workers": 3}, kinds=("float32",), marks=(FORK,)),
    "vectorised": Contender({"engine": "vectorised"}, (1e-12, 1e-5)),
}


@dataclass(frozen=True)
class Halved(Link):
    """An upload chain's link that sends everything under another name, noisily and halved."""

    def encode(self, tensors: Params, start: Params, draw: Draw, state: Params, sent: Params) -> Encoded:
        assert start.keys() == tensors.keys()
        half = {f"{n}/half": v / 2 + draw.normal(v.shape, v.dtype) / 1024 for n, v in tensors.items()}
        return Encoded(tensors=half)

    def decode(self, tensors: Params, start: Params, sent: Params) -> Params:
        return {n.removesuffix("/half"): 2 * v for n, v in tensors.items()}


class Words(BagOfWords):
    """A vocabulary large enough to be trained by local rows."""

    def __init__(self) -> None:
        super().__init__(300, 3, 4, embedding_dim=5, mlp=6)


def document() -> nn.Module:
    """Return a text model on the native kernels, its table trained by local rows."""
    model = DocumentModel(300, 3, 4, embedding_dim=5, hidden=8, mlp=6, pool="max")
    return declare(model, lookup={"embedding.weight": "text"})


def stopping(method: Method) -> Method:
    """Return the method with a last phase that stops early."""
    *others, last = method.client.phases
    return method.on_client(
        phases=(
            *others,
            dataclasses.replace(last, epochs=6, early_stopping=EarlyStopping(every=1, patience=2)),
        )
    )


TEXTS = texts(counts=(4, 9, 3, 5, 12, 1), vocabulary=300)
SLOW = sgd(0.2, momentum=0.9)
MORE: dict[str, Case] = {
    "ragged clients": Case(
        Logits,
        methods.furl("user", local=Phase(batch_size=4, epochs=2, optimizer=SLOW, clip_norm=0.5)),
        classes(counts=(1, 17, 3, 30, 2, 8)),
    ),
    "opted-out examples": Case(Logits, methods.ditto(0.4, local=Phase(batch_size=3)), classes(opted_in=True)),
    "native kernels": Case(document, methods.furl("user", local=Phase(batch_size=3, optimizer=SLOW)), TEXTS),
    "local rows": Case(Words, methods.furl("user", local=Phase(batch_size=3, optimizer=SLOW)), TEXTS),
    "owners' rows": Case(
        Words,
        methods.furl("user", local=Phase(batch_size=3, optimizer=SLOW))
        .on_client(tables="local")
        .on_server(reduce=WeightedMean(missing_rows="owners_only")),
        TEXTS,
    ),
    "batch statistics and dropout": Case(
        lambda: Noisy(dropout=0.3),
        methods.furl(
            "user", private_init=("normal", 0.3), local=Phase(batch_size=6), server=averaging(adam(0.05))
        ),
        classes(counts=(5, 9, 3, 8, 4, 6)),
    ),
    "early stopping": Case(Logits, stopping(methods.ditto(0.4, local=Phase(batch_size=4))), classes(valid=4)),
    "turns on every mini-batch": Case(
        Logits,
        methods.furl("user").on_client(
            turns=(1, 2),
            phases=(
                Phase(trains="private", batch_size=4, optimizer=SLOW),
                Phase(trains="federated", batch_size=4),
            ),
        ),
    ),
    "upload chain": Case(Logits, methods.furl("user", local=Phase(batch_size=4)).but(upload=(Halved(),))),
    "top-k with error feedback": Case(
        Logits, methods.furl("user", local=Phase(batch_size=4)).but(upload=(TopK(0.3),))
    ),
    "quantile clipping": Case(
        Logits,
        methods.furl("user", local=Phase(batch_size=4)).but(upload=(QuantileClip(bound=0.2), TopK(0.5))),
    ),
    "a frozen backbone": Case(Backbone, methods.furl("user", local=Phase(batch_size=4))),
    "the share of FedAvg": Case(
        Logits, methods.furl("user", private_scale="fedavg", local=Phase(optimizer=adam(0.05)))
    ),
    "uniform weights, no state": Case(
        Logits,
        methods.furl("user", private_init="model", server=averaging(by="uniform")).on_client(
            keep=Init(every_round=True)
        ),
    ),
    "the median": Case(
        Logits, methods.furl("user", local=Phase(batch_size=4), server=averaging().but(reduce=Median()))
    ),
    "a client sits out": Case(
        Fragile,
        methods.furl("user", local=Phase(loss=squared_error())),
        BROKEN,
        {"on_nonfinite": "skip", "evaluate_every": 0},
    ),
    "plain experts": Case(
        lambda: MixtureOfExperts(Deep(), Deep(), ConfidenceGate()),
        methods.mixture(
            local=Phase(batch_size=4, optimizer=sgd(0.3), epochs=3), local_epochs=10, mixture_epochs=10
        ),
    ),
    "a cohort of one": Case(Logits, methods.furl("user", local=Phase(batch_size=4)), DATA, {"cohort": 1}),
}
CASES = {name: Case(model, method) for name, (model, method) in ROWS.items()} | MORE


def test_every_method_is_in_the_table() -> None:
    assert set(METHODS) <= set(CASES)


def answer(case: str, kind: str, **options: Any) -> Run:
    """Return a run of a few rounds, at its best one."""
    torch.manual_seed(0)
    what = CASES[case]
    model = what.model().to(getattr(torch, kind))
    given = {"cohort": COHORT, "seed": SEED, "evaluate_every": 2, "rounds": ROUNDS, **what.options, **options}
    return simulate(model, what.method, what.data, **given)


def trained(case: str, kind: str, **options: Any) -> Run:
    """Return a run of a few rounds, at its last one."""
    return answer(case, kind, **options).last


@functools.cache
def best(case: str, kind: str) -> Run:
    """Return the answer of the engine that all others must agree with."""
    return answer(case, kind, engine="sequential")


def reference(case: str, kind: str) -> Run:
    """Return the same after its last round."""
    return best(case, kind).last


TABLE = [
    pytest.param(
        name, case, kind, marks=(*contender.marks, *(() if kind == "float64" else (pytest.mark.slow,)))
    )
    for name, contender in CONTENDERS.items()
    for case in CASES
    for kind in contender.kinds
]


@pytest.mark.parametrize(("contender", "case", "kind"), TABLE)
def test_engines_agree(contender: str, case: str, kind: str) -> None:
    given = CONTENDERS[contender]
    expected, found = reference(case, kind), trained(case, kind, **given.options)
    assert found.engine == given.options["engine"]
    states = [(on_server(r), everyone(r.private, len(r.data))) for r in (expected, found)]
    if given.tolerance is None:
        assert same_bits(states[0][0], states[1][0])
        assert same_bits(states[0][1], states[1][1])
        assert list(map(to_line, found.history)) == list(map(to_line, expected.history))
        return
    most = given.tolerance[kind == "float32"]
    for ours, theirs in zip(states[1], states[0], strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            torch.testing.assert_close(
                ours[name],
                value,
                rtol=0,
                atol=most * max(1.0, float(value.double().abs().max())) if value.numel() else 0,
            )
    assert [(r.round, r.split, r.client, r.metric, r.n) for r in found.history] == [
        (r.round, r.split, r.client, r.metric, r.n) for r in expected.history
    ]

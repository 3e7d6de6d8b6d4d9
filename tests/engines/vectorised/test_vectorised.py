"""Clients side by side: the numbers of one after the other, however many are trained at once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedkeep import FederatedData, Method, Phase, adagrad, adam, methods, sgd
from fedkeep.core.errors import MethodError
from fedkeep.data import Ragged
from fedkeep.engines import Sequential, Vectorised
from fedkeep.engines.tables import local_rows
from fedkeep.kernels import native
from fedkeep.methods.added_parts import with_copy
from fedkeep.methods.fedprox import Proximal
from fedkeep.methods.terms import cross_entropy, l2_penalty, squared_error
from fedkeep.models import TextClassifier
from tests.engines import test_opt_out as opt_out
from tests.engines.vectorised.cohorts import (
    RAGGED,
    STEEP,
    TEXTS,
    close,
    cohort,
    document,
    furl,
    uploads,
    words,
)
from tests.tiny import Logits, Noisy, Rounds, Scalar, classes, job, pairs

CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
DEVICES = ["cpu", pytest.param("cuda", marks=CUDA)]


def test_by_hand() -> None:
    """ŷ = w x, loss (ŷ − y)², η = 1/2, μ = 1/2, from w = 0; every pair is (1, 1), a mini-batch each.

    b: g = −2, v = −2, w = 1. a the same, then g = 0, v = −1, w = 3/2. Fed with zeros, b would go on to 3/2 too.
    """
    data = pairs({"a": [(1, 1), (1, 1)], "b": [(1, 1)]})
    method = methods.fedavg(local=Phase(loss=squared_error(), optimizer=sgd(0.5, momentum=0.5), batch_size=1))
    result = cohort(job(Scalar(), method, data), Vectorised())
    assert [float(u.deltas["w"]) for u in uploads(result)] == [1.5, 1.0]
    assert [each.loss for each in result] == [0.5, 1.0]
    assert [u.weight for u in uploads(result)] == [2.0, 1.0]


class Wide(nn.Module):
    """A parameter that no loss reaches: weight decay must not move it."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(2)
            self.linear = nn.Linear(3, 3)
            self.idle = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class Normed(nn.Module):
    """Features with batch statistics, and a head."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.body, self.norm, self.classifier = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))

    def features(self, x: Tensor) -> Tensor:
        return self.norm(self.body(x))  # type: ignore[no-any-return]

    def head(self, features: Tensor) -> Tensor:
        return self.classifier(features)  # type: ignore[no-any-return]


CASES: dict[str, tuple[Callable[[], nn.Module], Method, FederatedData]] = {
    "momentum, clipped": (Logits, furl(clip_norm=0.3), RAGGED),
    "adam": (Logits, furl(adam(0.05, schedule="cosine"), clip_norm=0.3), RAGGED),
    "adamw, two rates": (
        Wide,
        methods.fedavg(
            local=Phase(
                batch_size=4,
                epochs=2,
                optimizer=adam(0.05, weight_decay=0.1, decoupled=True, rates={"*bias": 0.2}),
            )
        ),
        RAGGED,
    ),
    "adagrad": (Logits, furl(adagrad(0.05, weight_decay=0.1)), RAGGED),
    "decay, bounds": (
        Wide,
        methods.fedavg(
            local=Phase(
                batch_size=4, epochs=2, optimizer=sgd(0.5, weight_decay=0.1, bounds={"linear.*": (-0.3, 0.3)})
            )
        ),
        RAGGED,
    ),
    "noise and batch statistics": (lambda: Noisy(dropout=0.4), furl(), classes(counts=(6, 10, 4, 14, 3, 8))),
    "steps, two halves": (
        lambda: Noisy(),
        methods.fedrecon(
            "user", reconstruction_steps=7, reconstruction_optimizer=adam(0.1), local=Phase(batch_size=2)
        ),
        classes(counts=(8, 16, 4, 12, 12, 8)),
    ),
    "turns": (
        Logits,
        methods.furl("user").on_client(
            turns=(2, 1),
            phases=(
                Phase(trains="private", batch_size=4, epochs=2, optimizer=adam(0.1)),
                Phase(trains="federated", batch_size=4, epochs=2, optimizer=STEEP),
            ),
        ),
        RAGGED,
    ),
    "own copy, opted-out examples": (
        lambda: with_copy(Noisy(dropout=0.3)),
        methods.ditto(0.4, local=Phase(batch_size=30)),
        classes(counts=(8, 9, 7, 30), opted_in=True),
    ),
    "the received model too": (Normed, methods.fedmmd(local=Phase(batch_size=40, epochs=2)), RAGGED),
    "recurrent": (document, methods.furl("user", local=Phase(batch_size=4, optimizer=STEEP)), TEXTS),
    "rows": (words, furl(), TEXTS),
    "rows, adam, pulled": (words, furl(adam(0.05), loss=cross_entropy() + Proximal(mu=0.3)), TEXTS),
    "rows by decree": (
        words,
        furl(sgd(0.2, weight_decay=0.1), loss=cross_entropy() + 0.1 * l2_penalty("*")).on_client(
            tables="local"
        ),
        TEXTS,
    ),
    "private rows": (words, methods.local(local=Phase(batch_size=4, optimizer=STEEP)), TEXTS),
    "nobody to train": (Logits, furl(), classes(counts=(0, 3, 0, 5))),
}


@pytest.fixture
def small_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_rows, "SMALL", 1)


@pytest.mark.usefixtures("small_tables")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CASES)
def test_as_one_after_the_other_whatever_the_number_and_the_order(name: str, device: str) -> None:
    make, method, data = CASES[name]
    torch.manual_seed(0)
    work = job(make().double().to(device), method, data, device=device)
    expected = cohort(work, Sequential())
    sizes = [None, 1, 4]
    found = [cohort(work, Vectorised(clients=size)) for size in sizes]
    for result in found:
        close(result, expected)
    for result in found[1:]:
        close(result, found[0])
    backwards = list(range(len(data)))[::-1]
    turned = cohort(work, Vectorised(), backwards)
    assert [result.client for result in turned] == backwards
    close(turned[::-1], found[0])


def test_each_group_has_its_own_private_values() -> None:
    """In the second round they differ from client to client."""
    found = []
    for engine in (Sequential(), Vectorised(clients=4)):
        work = job(Logits().double(), furl(), RAGGED)
        rounds = Rounds(work, engine)
        for _ in range(2):
            rounds(range(6))
        found.append({**rounds.server.params, **work.store.read(range(6))})
    assert found[0].keys() == found[1].keys() >= {"user"}
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-12)


@pytest.mark.usefixtures("small_tables")
@pytest.mark.parametrize("name", ["recurrent", "gru"])
def test_recurrent_layers_without_a_native_library(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = document() if name == "recurrent" else TextClassifier(40, 3, embedding_dim=5, hidden=4)
    work = job(model.double(), methods.fedavg(local=Phase(batch_size=4, optimizer=STEEP)), TEXTS)
    expected = cohort(work, Sequential())
    monkeypatch.setattr(native, "available", lambda: False)
    close(cohort(work, Vectorised()), expected)
    close(cohort(work, Sequential()), expected)


@pytest.mark.parametrize("name", ["recurrent", "momentum, clipped", "rows, adam, pulled"])
def test_float32_over_a_round(name: str) -> None:
    make, method, data = CASES[name]
    torch.manual_seed(0)
    work = job(make(), method, data)
    close(cohort(work, Vectorised()), cohort(work, Sequential()), 1e-6)


def opt_out_data() -> FederatedData:
    return classes(counts=(8, 9, 7, 10), opted_in=True, kind="f4")


@pytest.mark.parametrize("name", opt_out.METHODS)
def test_opted_out_examples_are_kept_from_what_leaves(name: str) -> None:
    make, method = opt_out.METHODS[name]
    data = opt_out_data()
    leaving = []
    for given in (data, opt_out.replaced(data, 1)):
        result = cohort(job(make(), method, given), Vectorised())
        leaving.append([(u.weight, u.deltas) for u in uploads(result)])
    for (weight, ours), (other, theirs) in zip(*leaving, strict=True):
        assert weight == other
        assert all(torch.equal(ours[n], theirs[n]) for n in theirs)


def test_no_way_through_private_values() -> None:
    phases = (opt_out.EVERYTHING, Phase(loss=cross_entropy(), trains="federated"))
    work = job(opt_out.Shared(), methods.furl("user").on_client(phases=phases), opt_out_data())
    with pytest.raises(MethodError) as error:
        cohort(work, Vectorised())
    with pytest.raises(MethodError) as expected:
        cohort(work, Sequential())
    assert str(error.value) == str(expected.value)


class Dropped(Logits):
    """Dropout in every way that the function can be called."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(x, 0.0, self.training) + F.dropout(x, 0.9, training=False)
        x = F.dropout(x.clone(), p=0.3, training=self.training, inplace=True)
        return super().forward(x) + F.dropout(self.user, 0.5, self.training) + F.dropout(x, 1.0).sum()


def test_dropout_is_drawn_from_each_clients_own_stream() -> None:
    work = job(Dropped().double(), furl(), RAGGED)
    close(cohort(work, Vectorised()), cohort(work, Sequential()))


def test_progress_and_another_job() -> None:
    seen: list[float] = []
    work = job(Logits(), furl(), RAGGED, after_step=seen.append)
    engine = Vectorised(clients=4)
    Rounds(work, engine)(range(6))
    assert seen == [(k + 1) / 6 for k in range(6)]
    other = job(words(), furl(), TEXTS)
    close(cohort(other, engine), cohort(other, Sequential()), 1e-6)
    engine.close()


def test_empty_columns_of_text_are_no_matter() -> None:
    data = FederatedData.from_columns(
        [0, 0, 1], {"text": Ragged.from_rows([[], [3], []]), "label": [0, 1, 0]}, ["train"] * 3
    )
    torch.manual_seed(0)
    work = job(words().double(), furl(), data)
    close(cohort(work, Vectorised()), cohort(work, Sequential()))

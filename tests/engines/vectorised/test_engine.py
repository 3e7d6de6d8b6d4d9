"""Clients side by side: the numbers of one after the other, however many are trained at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedkeep import FederatedData, Method, Phase, adam, methods, sgd, simulate
from fedkeep.core.errors import ConfigError, MethodError, NonFiniteError
from fedkeep.core.optim import Optimizer
from fedkeep.core.params import Params
from fedkeep.data import Ragged
from fedkeep.engines import ClientResult, Engine, Job, Sequential, Vectorised, Work
from fedkeep.engines.tables import local_rows
from fedkeep.engines.vectorised import memory as room
from fedkeep.engines.vectorised.batches import Together, lockstep
from fedkeep.engines.vectorised.local import Stacked
from fedkeep.kernels import native
from fedkeep.methods.copies import with_copy
from fedkeep.methods.fedprox import Proximal
from fedkeep.methods.terms import Term, cross_entropy, l2_penalty, squared_error
from fedkeep.models import BagOfWords, DocumentModel, TextClassifier
from fedkeep.split import Upload
from tests.engines import test_opt_out as opt_out
from tests.engines.test_round import BROKEN, Fragile
from tests.tiny import Logits, Noisy, Rounds, Scalar, classes, job, pairs, results, texts

CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
DEVICES = ["cpu", pytest.param("cuda", marks=CUDA)]
RAGGED = classes(counts=(5, 11, 2, 14, 9, 8))
TEXTS = texts(counts=(4, 9, 3, 5, 12, 2), vocabulary=40)
STEEP = sgd(0.2, momentum=0.9)


def cohort(
    work: Job, engine: Engine, clients: Sequence[int] | None = None, round: int = 3
) -> list[ClientResult]:
    """Return what a cohort gives back, all clients by default."""
    chosen = range(len(work.data)) if clients is None else clients
    return results(work, chosen, engine, round=round, progress=0.25)


def uploads(found: Sequence[ClientResult]) -> list[Upload]:
    """Return the uploads; every client has one."""
    given = [result.upload for result in found if result.upload is not None]
    assert len(given) == len(found)
    return given


def close(ours: Sequence[ClientResult], theirs: Sequence[ClientResult], most: float = 1e-12) -> None:
    """Check that two results are the same but for rounding."""
    assert [result.client for result in ours] == [result.client for result in theirs]
    for one, two in zip(ours, theirs, strict=True):
        assert (type(one.fault), str(one.fault)) == (type(two.fault), str(two.fault))
        assert np.allclose(one.loss, two.loss, rtol=10 * most, atol=most, equal_nan=True)
        if two.upload is None or two.kept is None:
            assert one.upload is two.upload is one.kept is two.kept is None
            continue
        assert one.upload is not None
        assert one.kept is not None
        a, b = one.upload, two.upload
        assert (a.weight, a.nbytes) == (b.weight, b.nbytes)
        assert a.rows.keys() == b.rows.keys()
        assert all(torch.equal(a.rows[n], b.rows[n]) for n in b.rows)
        alike(a.deltas, b.deltas, most)
        alike(one.kept, two.kept, most)


def alike(ours: Params, theirs: Params, most: float) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert ours[name].dtype == value.dtype
        largest = float(value.double().abs().max()) if value.numel() else 0.0
        torch.testing.assert_close(
            ours[name], value, rtol=0, atol=most * max(1.0, largest), check_device=False
        )


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
        out: Tensor = self.linear(x)
        return out


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


def words() -> nn.Module:
    """Return a text model of which every client trains its own rows."""
    return BagOfWords(40, 3, 4, embedding_dim=5, mlp=6)


def document() -> nn.Module:
    """Return a text model on recurrent layers."""
    return DocumentModel(40, 3, 4, embedding_dim=5, hidden=8, mlp=6, dropout=0.2)


def furl(optimizer: Optimizer = STEEP, **local: Any) -> Method:
    return methods.furl("user", local=Phase(batch_size=4, epochs=2, optimizer=optimizer, **local))


CASES: dict[str, tuple[Callable[[], nn.Module], Method, FederatedData]] = {
    "momentum, clipped": (Logits, furl(clip_norm=0.3), RAGGED),
    "adam": (Logits, furl(adam(0.05, schedule="cosine"), clip_norm=0.3), RAGGED),
    "adamw, two rates": (
        Wide,
        methods.fedavg(local=Phase(batch_size=4, epochs=2, optimizer=adam(0.05, weight_decay=0.1, decoupled=True, rates={"*bias": 0.2}))),
        RAGGED,
    ),
    "decay, bounds": (
        Wide,
        methods.fedavg(local=Phase(batch_size=4, epochs=2, optimizer=sgd(0.5, weight_decay=0.1, bounds={"linear.*": (-0.3, 0.3)}))),
        RAGGED,
    ),
    "noise and batch statistics": (lambda: Noisy(dropout=0.4), furl(), classes(counts=(6, 10, 4, 14, 3, 8))),
    "steps, two halves": (
        lambda: Noisy(),
        methods.fedrecon("user", reconstruction_steps=7, reconstruction_optimizer=adam(0.1), local=Phase(batch_size=2)),
        classes(counts=(8, 16, 4, 12, 12, 8)),
    ),
    "turns": (
        Logits,
        methods.furl("user").on_client(turns=(2, 1), phases=(
                Phase(trains="private", batch_size=4, epochs=2, optimizer=adam(0.1)),
                Phase(trains="federated", batch_size=4, epochs=2, optimizer=STEEP),
            )),
        RAGGED,
    ),
    "own copy, opted-out examples": (
        lambda: with_copy(Noisy(dropout=0.3)), methods.ditto(0.4, local=Phase(batch_size=30)), classes(counts=(8, 9, 7, 30), opted_in=True),
    ),
    "the received model too": (Normed, methods.fedmmd(local=Phase(batch_size=40, epochs=2)), RAGGED),
    "recurrent": (document, methods.furl("user", local=Phase(batch_size=4, optimizer=STEEP)), TEXTS),
    "rows": (words, furl(), TEXTS),
    "rows, adam, pulled": (words, furl(adam(0.05), loss=cross_entropy() + Proximal(mu=0.3)), TEXTS),
    "rows by decree": (words, furl(sgd(0.2, weight_decay=0.1), loss=cross_entropy() + 0.1 * l2_penalty("*")).on_client(tables="local"), TEXTS),
    "private rows": (words, methods.local(local=Phase(batch_size=4, optimizer=STEEP)), TEXTS),
    "nobody to train": (Logits, furl(), classes(counts=(0, 3, 0, 5))),
}  # fmt: skip


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
    noisy = device == "cuda" and any(isinstance(m, nn.Dropout) and m.p for m in work.net.module.modules())
    sizes = [None, 1, 2, 3]
    found = [cohort(work, Vectorised(clients=size)) for size in sizes]
    for result in found[: 0 if noisy else None]:
        close(result, expected)
    for result in found[1:]:
        close(result, found[0])
    backwards = list(range(len(data)))[::-1]
    turned = cohort(work, Vectorised(), backwards)
    assert [result.client for result in turned] == backwards
    close(turned[::-1], found[0])


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


def test_steps_keep_everyones_order_and_are_few() -> None:
    sizes = [[4, 4, 4, 3, 4, 4, 4, 3], [4, 1, 4, 1], [3, 3], [], [4, 4]]
    plans = [[np.full(n, 100 * k + t) for t, n in enumerate(plan)] for k, plan in enumerate(sizes)]
    taken: list[list[int]] = [[] for _ in sizes]
    calls = 0
    for who, several in lockstep(plans, 4, [False] * 5):
        calls += 1
        assert several.shape[0] == len(who)
        assert (np.diff(who) > 0).all()
        for k, rows in zip(who, several, strict=True):
            taken[k].append(int(rows[0]))
            assert len(rows) == sizes[k][len(taken[k]) - 1]
    assert taken == [[100 * k + t for t in range(len(plan))] for k, plan in enumerate(sizes)]
    assert calls == 2 * (3 + 2)  # a pass: full ones side by side, then those of three and those of one


def test_who_is_through_takes_no_more_steps() -> None:
    plans, through = [[np.full(4, t) for t in range(5)] for _ in range(3)], [False] * 3
    taken = []
    for who, _ in lockstep(plans, 4, through):
        taken.append(who)
        through[0], through[1] = len(taken) >= 4, len(taken) >= 2
    assert taken == [[0, 1, 2], [0, 1, 2], [0, 2], [0, 2], [2]]


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


def test_who_breaks_down_is_named_and_nobody_else_is_harmed() -> None:
    method = methods.furl("user", local=Phase(loss=squared_error()))
    work = job(Fragile(), method, BROKEN)
    expected = cohort(work, Sequential())
    assert [result.fault is not None for result in expected] == [False, True, False]
    close(cohort(work, Vectorised()), expected)
    with pytest.raises(NonFiniteError) as error:
        Rounds(work, Vectorised())([0, 1, 2])
    assert str(error.value) == str(expected[1].fault).replace("round 3", "round 0")


def test_a_parameter_that_breaks_down_is_named() -> None:
    """The loss of the last step was finite, what it leads to is not."""
    data = pairs({"a": [(1, 1)], "b": [(1e200, 1e200)]})
    method = methods.fedavg(local=Phase(loss=squared_error(), optimizer=sgd(1e300)))
    result = cohort(job(Scalar(), method, data), Vectorised())
    assert result[0].fault is None
    assert str(result[1].fault).startswith(
        "Client 'b', round 3: the training loss became NaN or infinite after 1 steps."
    )
    data = pairs({"a": [(1, 1)], "b": [(1e100, 1e100)]})
    result = cohort(job(Scalar(), method, data), Vectorised())
    assert result[0].fault is None
    assert str(result[1].fault).startswith("Client 'b', round 3: w became NaN or infinite after 1 steps.")


def test_a_cohort_too_large_for_memory_is_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    work = job(Logits().double(), furl(), RAGGED)
    expected = cohort(work, Sequential())
    sizes: list[int] = []
    run = Stacked.train

    def limited(clients: Stacked) -> None:
        sizes.append(len(clients.clients))
        if len(clients.clients) > 2:
            raise torch.OutOfMemoryError("no memory")
        run(clients)

    monkeypatch.setattr(Stacked, "train", limited)
    engine = Vectorised(clients=6)
    close(cohort(work, engine), expected)
    assert sizes == [6, 3, 1, 1, 1, 1, 1, 1]
    sizes.clear()
    cohort(work, engine)
    assert sizes == [1] * 6  # it remembers

    def none(_: Stacked) -> None:
        raise torch.OutOfMemoryError("no memory at all")

    monkeypatch.setattr(Stacked, "train", none)
    with pytest.raises(torch.OutOfMemoryError, match="no memory at all"):
        cohort(work, engine)


def test_memory_is_counted() -> None:
    """Largest client: 30 examples of 3 features and a label, 8 bytes each; 15 parameters of 8 bytes."""
    data = classes(counts=(5, 30), valid=0, test=0)

    def needed(optimizer: Optimizer) -> int:
        one = Stacked(*_first(job(Logits().double(), furl(optimizer), data)))
        assert one.nbytes == 30 * 4 * 8 + 15 * 8
        return room.bytes_of(one, {})

    plain = needed(sgd(0.1))
    assert plain > 30 * 4 * 8 + 3 * 15 * 8
    assert needed(STEEP) == plain + 15 * 8
    assert needed(adam(0.1)) == plain + 2 * 15 * 8
    work = job(Logits().double(), furl(sgd(0.1)), data)
    assert [room.room(work, memory) for memory in (1, plain, 2 * plain - 1, 2 * plain)] == [1, 1, 1, 2]
    assert room.room(work) == room.CPU_BYTES // plain


def test_memory_of_a_loss_that_takes_a_gradient_step() -> None:
    """Per-FedAvg: torch.func allows no look at what is saved, so all that is made counts; more than FedAvg needs."""
    data = classes(counts=(5, 30), valid=0, test=0)

    def needed(method: Method) -> int:
        return room.bytes_of(Stacked(*_first(job(Logits().double(), method, data))), {})

    small, large = (needed(methods.per_fedavg(0.1, local=Phase(batch_size=b))) for b in (5, 30))
    assert large > small > needed(methods.fedavg(local=Phase(batch_size=5)))


def _first(work: Job) -> tuple[Any, ...]:
    sent = work.method.split.federated(work.net.initial())
    return work, [Work(1, sent)], work.kept([1]), 0, 0.0


def test_texts_are_padded_to_the_longest_of_the_step() -> None:
    clients = Stacked(*_first(job(words(), furl(), TEXTS)))
    lengths = TEXTS.batch(clients.rows[0])["text_length"].numpy()
    shortest = np.argsort(lengths)[:2]
    step = Together([0], clients.rows[0][shortest][None], clients.examples)
    width = int(lengths[shortest].max())
    assert width < lengths.max()
    assert step.batch()["text"].shape == (1, 2, width)


def test_longer_texts_take_more_memory() -> None:
    torch.manual_seed(0)
    one = Stacked(*_first(job(document(), furl(), TEXTS)))
    assert room.bytes_of(one, {"text": 80}) > 5 * room.bytes_of(one, {"text": 8}) / 2


@dataclass(frozen=True)
class Judged(Term):
    """A loss that looks at its value: no tensor program."""

    def __call__(self, net: Any, params: Params, batch: Params, received: Params) -> Tensor:
        loss = cross_entropy()(net, params, batch, received)
        return loss if loss.item() > 0 else 2 * loss


class Diluted(nn.Module):
    """A mean over words that counts the padding."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding, self.out, self.dropout = nn.Embedding(40, 4), nn.Linear(4, 3), dropout

    def forward(self, text: Tensor) -> Tensor:
        return self.out(self.embedding(text).mean(1))  # type: ignore[no-any-return]


class Shaken(Logits):
    """Noise of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + torch.randn_like(x))


class Torchs(nn.Module):
    """PyTorch's own recurrent layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.lstm = nn.Embedding(40, 4), nn.LSTM(4, 3, batch_first=True)

    def forward(self, text: Tensor) -> Tensor:
        return self.lstm(self.embedding(text))[0][:, 0]  # type: ignore[no-any-return]


REASONS: dict[str, tuple[nn.Module, Method, FederatedData, str]] = {
    "looks at values": (
        Logits(), furl(loss=Judged()), RAGGED,
        "its loss cannot be computed for several clients at once (vmap: It looks like you're calling .item() on a Tensor. We don't support vmap over calling .item() on a Tensor, please try to rewrite what you're doing with other operations. If error is occurring somewhere inside PyTorch internals, please file a bug report).",
    ),
    "draws": (
        Shaken(), furl(), RAGGED,
        "its loss cannot be computed for several clients at once (it draws random numbers otherwise than by dropout).",
    ),
    "PyTorch's layers": (
        Torchs(), methods.fedavg(), TEXTS,
        "its loss cannot be computed for several clients at once (Batching rule not implemented for aten::lstm.input. We could not generate a fallback; fedkeep.nn.LSTM has the parameters of torch.nn.LSTM and can).",
    ),
    "counts padding": (
        Diluted(), methods.fedavg(), TEXTS,
        "the loss depends on how far texts are padded, which differs with the clients trained at once.",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REASONS)
def test_says_why_it_cannot(name: str) -> None:
    model, method, data, reason = REASONS[name]
    assert Vectorised.suits(job(model, method, data)) == reason
    with pytest.raises(ConfigError) as error:
        simulate(model, method, data, rounds=1, engine="vectorised")
    assert (
        str(error.value)
        == f"engine='vectorised' cannot train {method.name!r}: {reason} Use engine='sequential'."
    )


def test_looking_changes_nothing() -> None:
    model = Noisy(dropout=0.5)
    work = job(model, furl(), RAGGED)
    before = work.net.initial()
    state = torch.get_rng_state()
    assert Vectorised.suits(work) is None
    assert all(torch.equal(before[n], v) for n, v in work.net.initial().items())
    assert torch.equal(state, torch.get_rng_state())
    assert not any(work.store.seen(range(6)))
    assert Vectorised.suits(job(model, furl(), classes(counts=(0, 0)))) is None


def test_a_model_that_fails_is_not_the_engines_fault() -> None:
    data = FederatedData.from_columns([0, 0], {"z": np.ones((2, 3)), "label": [0, 1]}, ["train"] * 2)
    with pytest.raises(MethodError, match=r"^Logits.forward wants the column 'x'"):
        Vectorised.suits(job(Logits(), furl(), data))


def test_clients_whose_model_fails_are_named() -> None:
    """Batch normalisation of one example: client user-0 alone has a last mini-batch of one."""
    work = job(Noisy(), furl(), classes(counts=(5, 8, 8)))
    with pytest.raises(MethodError) as error:
        cohort(work, Vectorised())
    assert str(error.value) == (
        "Clients 'user-0', round 3: the model failed on a batch of 1 example: Expected more than 1 value per channel "
        "when training, got input size torch.Size([1, 3]). Check its forward and the data's columns; batch normalisation "
        "needs more than one example. engine='sequential' says which client it is."
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clients": 0}, "clients must be at least 1, or None; got 0."),
        ({"memory": 0}, "memory must be at least 1 byte, or None; got 0."),
    ],
)
def test_bad_settings(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        Vectorised(**options)
    assert str(error.value) == message


class Dropped(Logits):
    """Dropout in every way that the function can be called."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(x, 0.0, self.training) + F.dropout(x, 0.9, training=False)
        x = F.dropout(x.clone(), p=0.3, training=self.training, inplace=True)
        out: Tensor = super().forward(x) + F.dropout(self.user, 0.5, self.training) + F.dropout(x, 1.0).sum()
        return out


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

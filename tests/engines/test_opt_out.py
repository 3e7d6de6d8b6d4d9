"""Opted-out examples may be replaced by anything: every upload and every server state keeps its bits."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedkeep import (
    Client,
    FederatedData,
    Method,
    Phase,
    Split,
    adam,
    averaging,
    declare,
    methods,
    sgd,
    simulate,
)
from fedkeep.audit.canaries import kept_rows, opted_out
from fedkeep.core.errors import MethodError
from fedkeep.core.net import Net
from fedkeep.core.params import Params
from fedkeep.data import Ragged, opt_out
from fedkeep.engines import Centralised, ClientResult, ClientToTrain, Job, Sampler, Sequential
from fedkeep.engines.lanes import veiled
from fedkeep.methods.added_parts import with_copy
from fedkeep.methods.mixture import OnOutput
from fedkeep.methods.terms import Term
from fedkeep.models import ConfidenceGate, DocumentModel, MixtureOfExperts
from tests.methods.table import ROWS
from tests.refusals import raises
from tests.tiny import Logits, Noisy, Rounds, bits, classes, job, parts, same_bits


class Watched(Sequential):
    """Keeps every upload."""

    def __init__(self) -> None:
        self.bits: list[tuple[float, dict[str, bytes]]] = []

    def train(
        self, job: Job, work: Sequence[ClientToTrain], round: int, progress: float
    ) -> Iterator[ClientResult]:
        for result in super().train(job, work, round, progress):
            self.bits.append((result.upload.weight, {n: bits(v) for n, v in result.upload.deltas.items()}))
            yield result


def leaves(model: nn.Module, method: Method, data: FederatedData) -> tuple[list[Any], list[Any], Params]:
    """Return the bits of all uploads and server states of six rounds, and the private values at the end."""
    work, engine = job(model, method, data, seed=2), Watched()
    method.check(model)
    rounds = Rounds(work, engine)
    states = []
    for number in range(6):
        rounds(Sampler(len(data), 3, "shuffled", 2)(number), number / 6)
        server = {**rounds.server.params, **rounds.server.state}
        states.append({n: bits(v) for n, v in server.items()})
    return engine.bits, states, work.store.read(range(len(data)))


def replaced(data: FederatedData, seed: int) -> FederatedData:
    """Return the data with other features and labels in the opted-out training examples."""
    rng = np.random.default_rng(seed)
    columns = {n: np.array(c) for n, c in data.columns.items()}  # type: ignore[arg-type]
    out = ~columns["opted_in"]
    columns["x"][out] = 10 * rng.standard_normal(columns["x"][out].shape)
    columns["label"][out] = rng.integers(0, 3, out.sum())
    return FederatedData(columns, data.offsets, data.ids, data.bounds, data.meta)


class Shared(Noisy):
    """Dropout, batch statistics, and a way to predict without the private vector."""

    def shared(self, x: Tensor) -> Tensor:
        return self.linear(self.drop(self.norm(x)))


@dataclass(frozen=True)
class SharedLoss(Term):
    """Cross-entropy of the shared part alone."""

    def __call__(self, net: Net, params: Params, batch: Params, received: Params) -> Tensor:
        return nn.functional.cross_entropy(net.call("shared", params, batch), batch["label"])


def experts() -> nn.Module:
    """Return a mixture of experts with batch statistics and dropout."""
    return MixtureOfExperts(Shared(dropout=0.5), Shared(dropout=0.5), ConfidenceGate())


EVERYTHING = Phase(trains="private", examples="all", optimizer=sgd(0.5))
METHODS: dict[str, tuple[Callable[[], nn.Module], Method]] = {
    "fedavg adam": (
        Logits,
        methods.fedavg(
            local=Phase(batch_size=2, optimizer=adam(0.1), clip_norm=0.1), server=averaging(adam(0.1))
        ),
    ),
    "furl": (Logits, methods.furl("user", local=Phase(batch_size=2))),
    "furl share": (
        Logits,
        methods.furl("user", private_scale="fedavg", private_init=("normal", 0.5), local=Phase(batch_size=2)),
    ),
    "furl noise": (lambda: Noisy(dropout=0.5), methods.furl("user")),
    "fedrep": (lambda: Noisy(dropout=0.5), methods.fedrep("user", head_epochs=2)),
    "fedrecon": (
        Logits,
        methods.fedrecon("user", reconstruction_steps=3, halves=False, local=Phase(batch_size=2)),
    ),
    "fedrecon in halves": (
        Logits,
        methods.fedrecon("user", reconstruction_steps=3, local=Phase(batch_size=2)),
    ),
    "ditto, v on all": (lambda: with_copy(Noisy(dropout=0.5)), methods.ditto()),
    "apfl": (lambda: with_copy(Noisy(dropout=0.5)), methods.apfl(adaptive=False)),
    "mixture": (experts, methods.mixture(local=Phase(batch_size=32, epochs=2, optimizer=sgd(0.3)))),
    "mixture, fedprox": (
        experts,
        methods.mixture(
            mu=0.5,
            local_init="finetuned",
            local=Phase(batch_size=32, optimizer=adam(0.1), clip_norm=0.1, epochs=3),
        ),
    ),
    "mixture, experts on all": (
        experts,
        methods.mixture(local=Phase(batch_size=32, epochs=2, optimizer=sgd(0.3))).on_client(
            phases=(
                Phase(
                    loss=OnOutput("local_logits", methods.terms.cross_entropy()),
                    trains=("local_expert.*",),
                    examples="all",
                ),
                methods.mixture(local=Phase(batch_size=32, optimizer=adam(1e-4), epochs=3)).client.phases[0],
            )
        ),
    ),
    "first all, then shared": (
        lambda: Shared(dropout=0.5),
        methods.furl("user").on_client(phases=(EVERYTHING, Phase(loss=SharedLoss(), trains="federated"))),
    ),
    "first shared, then all": (
        lambda: Shared(dropout=0.5),
        methods.furl("user").on_client(phases=(Phase(loss=SharedLoss(), trains="federated"), EVERYTHING)),
    ),
}


@pytest.mark.parametrize("name", METHODS)
def test_nothing_that_leaves_depends_on_opted_out_examples(name: str) -> None:
    make, method = METHODS[name]
    data = classes(counts=(8, 9, 7, 10), opted_in=True, kind="f4")
    uploads, states, private = leaves(make(), method, data)
    other_uploads, other_states, other_private = leaves(make(), method, replaced(data, 1))
    assert other_uploads == uploads
    assert other_states == states
    changed = any(not torch.equal(private[n], other_private[n]) for n in private)
    assert changed == (" all" in name)  # what stays may use them, and does where a phase says so
    weights = {len(np.flatnonzero(data.columns["opted_in"][slice(*data.bounds[c, :2])])) for c in range(4)}  # type: ignore[index]
    if name in ("fedrep", "apfl"):  # count every client once
        weights = {1}
    elif "halves" in name:
        weights = {-(-w // 2) for w in weights}
    assert {w for w, _ in uploads} == weights
    assert len({str(s) for s in states}) == 6


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("by", ["example", pytest.param("client", marks=pytest.mark.slow)])
def test_every_method_of_the_table(name: str, by: Any) -> None:
    """The rows that every method joins, each on examples and on whole clients that opted out."""
    make, method = ROWS[name]
    torch.manual_seed(0)
    model = make().double()
    model = method.extend(model) if method.extend else model
    data = opt_out(classes(counts=(8, 9, 7, 10)), 0.5, by=by, seed=1)
    found = [leaves(model, method, changed)[:2] for changed in (data, replaced(data, 1))]
    assert found[0] == found[1]
    if name != "local":
        # a round of one client, of four in cohorts of three, may meet one that opted out
        assert len({str(state) for state in found[0][1]}) == (6 if by == "example" else 3)
        assert {bool(weight) for weight, _ in found[0][0]} == ({True, False} if by == "client" else {True})


def test_the_rows_are_all_methods() -> None:
    assert set(ROWS) == set(methods.METHODS)


@pytest.mark.parametrize(
    "loss", [methods.terms.cross_entropy(), SharedLoss() + 0.1 * methods.terms.l2_penalty("*")]
)
def test_no_way_through_private_values(loss: Term) -> None:
    """A federated phase that reads private values fitted on every example is refused."""
    phases = (EVERYTHING, Phase(loss=loss, trains="federated"))
    data = classes(counts=(8, 9, 7, 10), opted_in=True, kind="f4")
    with raises(MethodError, said="A phase that trains federated parameters"):
        leaves(Shared(), methods.furl("user").on_client(phases=phases), data)


class Chained(nn.Module):
    """A private vector, a private head that is trained on top of it, and two shared layers with batch statistics."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.norm = nn.Linear(3, 3), nn.BatchNorm1d(3)
        self.user, self.head = nn.Parameter(torch.zeros(3)), nn.Linear(3, 3)

    def first(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.user  # type: ignore[no-any-return]

    def second(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.norm(self.linear(x) + self.user.detach())))  # type: ignore[no-any-return]

    def third(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.head.bias  # type: ignore[no-any-return]

    def alone(self, x: Tensor) -> Tensor:
        return self.linear(x)  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        return self.second(x)


@dataclass(frozen=True)
class Of(Term):
    """Cross-entropy of what a method of the model gives."""

    method: str = "forward"

    def __call__(self, net: Net, params: Params, batch: Params, received: Params) -> Tensor:
        return nn.functional.cross_entropy(net.call(self.method, params, batch), batch["label"])


ON_ALL = Phase(loss=Of(method="first"), trains=("user",), examples="all", batch_size=4, optimizer=sgd(0.5))
ON_TOP = Phase(loss=Of(method="second"), trains=("head.*",), batch_size=4, merge_single=True)


def chained(*phases: Phase) -> Method:
    return Method(name="chained", split=Split(("user", "head.*")), client=Client(phases=phases))


@pytest.mark.parametrize("engine", ["sequential", "vectorised", "workers"])
@pytest.mark.parametrize("order", ["on all, on top, shared", "shared, on top, on all"])
def test_a_private_phase_passes_on_what_it_reads(order: str, engine: Any) -> None:
    """It trains on opted-in examples alone, on top of values that opted-out ones made."""
    named = {"on all": ON_ALL, "on top": ON_TOP, "shared": Phase(loss=Of(method="third"), trains="federated")}
    method = chained(*(named[n] for n in order.split(", ")))
    with pytest.raises(MethodError, match="reads private ones that another phase trains on opted-out"):
        simulate(
            Chained(),
            method,
            classes(counts=(12, 14, 13, 15), opted_in=True, kind="f4"),
            rounds=2,
            cohort=4,
            engine=engine,
        )


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_neither_its_loss_nor_the_statistics_that_it_moves_leave(engine: str) -> None:
    """The loss of the last phase leaves, and so do batch statistics that are shared: not of one on top of the vector."""
    shared = Phase(loss=Of(method="alone"), trains="federated", batch_size=4)
    data = classes(counts=(12, 14, 13, 15), opted_in=True, kind="f4")
    found = []
    for changed in (data, replaced(data, 1)):
        run = simulate(
            Chained(),
            chained(shared, ON_ALL, ON_TOP),
            changed,
            rounds=3,
            cohort=4,
            engine=engine,
            evaluate_every=0,
        )
        assert "norm.running_mean" in run.server
        found.append((run.server, [repr(r.value) for r in run.history]))
    assert same_bits(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]


def test_a_private_phase_that_reads_nothing_hidden_passes_nothing_on() -> None:
    """A head of its own on shared layers is trained on opted-in examples, and a shared phase may read it."""
    head = Phase(loss=Of(method="third"), trains=("head.bias",), batch_size=4)
    method = chained(ON_ALL, head, Phase(loss=Of(method="third"), trains="federated", batch_size=4))
    data = classes(counts=(12, 14, 13, 15), opted_in=True, kind="f4")
    assert leaves(Chained(), method, data)[:2] == leaves(Chained(), method, replaced(data, 1))[:2]


def test_where_nobody_can_opt_out_such_phases_may_mix() -> None:
    phases = (EVERYTHING, Phase(trains="federated"))
    leaves(Shared(), methods.furl("user").on_client(phases=phases), classes(counts=(8, 9, 7, 10), kind="f4"))


def documents(seed: int) -> FederatedData:
    """Return texts of which the opted-out ones differ by seed, in content, letters and length."""
    fixed, free = np.random.default_rng(0), np.random.default_rng(seed)
    owner, split, opted, label, texts = [], [], [], [], []
    for client in range(4):
        for part in parts(10, 0, 1):
            inside = bool(fixed.random() < 0.5)
            mine, other = fixed.integers(1, 40, int(fixed.integers(2, 9))), int(fixed.integers(3))
            if not inside and part == "train":
                mine, other = free.integers(1, 400, int(free.integers(1, 60))), int(free.integers(3))
            owner.append(f"u{client}")
            split.append(part)
            opted.append(inside)
            texts.append(mine)
            label.append(other)
    ragged = Ragged(np.concatenate(texts), np.concatenate([[0], np.cumsum([len(t) for t in texts])]))
    columns: dict[str, Any] = {"text": ragged, "label": np.array(label), "opted_in": np.array(opted)}
    return FederatedData.from_columns(owner, columns, split, meta={"task": "multiclass", "classes": 3})


class Notes:
    """An object of the user's own."""

    def __init__(self) -> None:
        self.value: Any = 0.0


def closed() -> tuple[Callable[[Any], None], Callable[[], Any]]:
    value: Any = 0.0

    def write(new: Any) -> None:
        nonlocal value
        value = new

    return write, lambda: value


def assigns(model: Any, new: Tensor) -> None:
    model.plain = new


def keeps(model: Any, new: Tensor) -> None:
    if not hasattr(model, "made"):
        model.made = {}
    model.made["last"] = new


WAYS: dict[str, tuple[Callable[[Any, Tensor], Any], Callable[[Any], Any]]] = {
    "attribute": (assigns, lambda m: m.plain),
    "new attribute": (lambda m, v: setattr(m, "new", v), lambda m: getattr(m, "new", 0.0)),
    "of a layer of torch": (
        lambda m, v: setattr(m.linear, "mine", v),
        lambda m: getattr(m.linear, "mine", 0.0),
    ),
    "dropout's rate": (lambda m, v: setattr(m.drop, "p", float(v)), lambda m: m.drop.p),
    "list": (lambda m, v: m.listed.append(v), lambda m: sum(m.listed)),
    "dict made by forward": (keeps, lambda m: getattr(m, "made", {}).get("last", 0.0)),
    "object": (lambda m, v: setattr(m.notes, "value", v), lambda m: m.notes.value),
    "object in a list": (lambda m, v: setattr(m.several[0], "value", v), lambda m: m.several[0].value),
    "array": (lambda m, v: m.array.fill(float(v)), lambda m: float(m.array[0])),
    "closure": (lambda m, v: m.write(v), lambda m: m.read()),
    "buffer that is not persistent": (lambda m, v: setattr(m, "cache", v), lambda m: m.cache),
}


class Writes(nn.Module):
    """Writes a number of its examples beside its parameters, and reads it with others."""

    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.user, self.drop = nn.Linear(3, 3), nn.Parameter(torch.zeros(3)), nn.Dropout(0.0)
        self.way, self.plain, self.listed, self.notes, self.several = way, 0.0, [], Notes(), (Notes(),)  # type: ignore[var-annotated]
        self.array, (self.write, self.read) = np.zeros(1), closed()
        self.register_buffer("cache", torch.zeros(()), persistent=False)

    def first(self, x: Tensor) -> Tensor:
        WAYS[self.way][0](self, x.detach().mean().sigmoid())
        return self.linear(x).detach() + self.user

    def alone(self, x: Tensor) -> Tensor:
        return self.linear(x) * (1 + WAYS[self.way][1](self))

    def forward(self, x: Tensor) -> Tensor:
        return self.alone(x) + self.user


@pytest.mark.parametrize("way", WAYS)
def test_attributes_that_opted_out_examples_write_are_read_by_no_shared_phase(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    phases = (ON_ALL, Phase(loss=Of(method="alone"), trains="federated"))
    method = Method(name="writes", split=Split(("user",)), client=Client(phases=phases))
    data = classes(counts=(12, 14, 13, 15), opted_in=True, kind="f4")

    def found() -> list[Any]:
        return [leaves(Writes(way), method, changed)[:2] for changed in (data, replaced(data, 1))]

    first, second = found()
    assert first == second
    monkeypatch.setattr("fedkeep.engines.lanes.Lanes._veil", lambda *_: nullcontext())
    first, second = found()
    assert first != second


class Counts(Writes):
    """Counts the examples that it saw, also opted-out ones."""

    def first(self, x: Tensor) -> Tensor:
        self.plain += len(x) / 10
        return self.linear(x).detach() + self.user


def test_counts_of_opted_out_examples_in_attributes_are_read_by_no_shared_phase(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    phases = (ON_ALL, Phase(loss=Of(method="alone"), trains="federated"))
    method = Method(name="counts", split=Split(("user",)), client=Client(phases=phases))
    data = classes(counts=(12, 14, 13, 15), opted_in=True, kind="f4")
    fewer = kept_rows(data, np.setdiff1d(np.arange(data.examples), opted_out(data)[::2]))
    first, second = (leaves(Counts("attribute"), method, each)[:2] for each in (data, fewer))
    assert first == second
    monkeypatch.setattr("fedkeep.engines.lanes.Lanes._veil", lambda *_: nullcontext())
    first, second = (leaves(Counts("attribute"), method, each)[:2] for each in (data, fewer))
    assert first != second


class Compares(Writes):
    """Asks whether private values are positive, which NaN is not."""

    def alone(self, x: Tensor) -> Tensor:
        return self.linear(x) * torch.where(self.user.detach() > 0, 2.0, 1.0)


class ComparesLater(Compares):
    """Asks whether private values are what they become later alone."""

    def alone(self, x: Tensor) -> Tensor:
        return self.linear(x) * torch.where(self.user.detach() > 0.9, 2.0, 1.0)


@pytest.mark.parametrize("model", [Compares, ComparesLater, Writes])
def test_a_shared_phase_that_gets_nan_without_a_trace_is_named(model: type[Writes]) -> None:
    phases = (ON_ALL, Phase(loss=Of(method="alone"), trains="federated"))
    method = Method(name="compares", split=Split(("user",)), client=Client(phases=phases))
    data = classes(counts=(12, 14, 13, 15), opted_in=True, kind="f4")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        leaves(model("attribute"), method, data)
    assert any("gets NaN" in str(one.message) for one in caught) is issubclass(model, Compares)


@pytest.mark.parametrize("pooled", [False, True])
def test_texts_of_any_letters_and_length(pooled: bool) -> None:
    torch.manual_seed(0)
    model = DocumentModel(400, 3, 4, embedding_dim=5, hidden=3, mlp=6, dropout=0.3)
    method = methods.furl("user", local=Phase(batch_size=3, clip_norm=0.05, optimizer=sgd(0.5, momentum=0.9)))
    found = []
    for seed in (1, 2):
        if pooled:
            rounds = Rounds(job(model, method, documents(seed)), Centralised())
            rounds([0, 1, 2, 3])
            found.append({n: bits(v) for n, v in rounds.server.params.items()})
        else:
            found.append(leaves(model, method, documents(seed))[:2])  # type: ignore[arg-type]
    assert found[0] == found[1]


def test_who_has_nothing_opted_in_has_no_uniform_weight() -> None:
    """A client that only trains what stays changes nothing, however clients are weighted."""
    data = opt_out(classes(counts=(6, 6, 6), kind="f4"), 0.5)
    method = methods.ditto(local=Phase(batch_size=3), server=averaging(by="uniform"))
    uploads, *_ = leaves(with_copy(Noisy()), method, data)
    assert sorted(w for w, _ in uploads[:3]) == [0.0, 1.0, 1.0]


class Moving(nn.Module):
    """Its private statistic follows the examples and is added to the logits."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.head = nn.Linear(3, 3), nn.Linear(3, 3)
        self.register_buffer("seen", torch.zeros(3))
        declare(self, updated_buffers=("seen",))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen.copy_(0.5 * self.seen.detach() + 0.5 * x.detach().mean(0))  # type: ignore[operator,union-attr]
        return self.head(torch.tanh(self.linear(x))) + self.seen.to(x.dtype)  # type: ignore[no-any-return,union-attr]


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_a_private_buffer_that_opted_out_examples_move_reaches_no_federated_phase(engine: str) -> None:
    phases = (
        Phase(trains="private", examples="all", batch_size=4),
        Phase(trains="federated", batch_size=4),
    )
    method = Method(name="moving", split=Split(("head.*", "seen")), client=Client(phases=phases))
    data = classes(opted_in=True, kind="f4")
    with pytest.raises(MethodError, match="reads private ones that another phase trains on opted-out"):
        simulate(Moving(), method, data, rounds=2, cohort=6, engine=engine)


def test_a_hidden_buffer_is_hidden_where_it_was_moved() -> None:
    start = {"moved": torch.zeros(2), "still": torch.zeros(2)}
    now = {"moved": torch.tensor([0.0, 2.0]), "still": torch.zeros(2)}
    seen = veiled(now, start.keys(), start, frozenset())
    assert {name: value.isnan().tolist() for name, value in seen.items()} == {
        "moved": [False, True],
        "still": [False, False],
    }


@pytest.mark.parametrize("engine", ["sequential", "vectorised", "workers"])
def test_opted_out_examples_that_break_a_private_phase_decide_nothing(engine: str) -> None:
    """The client uploads as if they were fine, and keeps what it had."""
    found = []
    for broken in (False, True):
        data = classes(opted_in=True, kind="f4")
        inside = np.asarray(data.columns["opted_in"])
        if broken:
            data.columns["x"][~inside] = np.nan  # type: ignore[index]
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            run = simulate(
                Logits(),
                methods.ditto(0.4, local=Phase(batch_size=3)),
                data,
                rounds=2,
                cohort=6,
                engine=engine,
                evaluate_every=0,
            )
        notes = [str(each.message) for each in said if "keeps what it had" in str(each.message)]
        assert bool(notes) == broken
        found.append((run.server, [r.value for r in run.history]))
    assert same_bits(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]  # losses and traffic, too

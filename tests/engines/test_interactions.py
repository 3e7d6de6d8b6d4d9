"""Things that are right alone and were wrong together: engines agree, and whoever asks for both gets both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedkeep import FederatedData, Phase, adam, averaging, methods, sgd, simulate
from fedkeep.core.errors import MethodError
from fedkeep.data import Ragged
from fedkeep.engines import Auto
from fedkeep.experiments.run_directory import RunDirectory
from fedkeep.methods import ClippedMean, Method
from fedkeep.privacy import TopK
from tests import tiny
from tests.engines.vectorised.cohorts import cohort
from tests.tiny import job, same_bits

ENGINES = ("sequential", "vectorised")
LOCAL = Phase(batch_size=4, optimizer=sgd(0.1))


def columns(clients: int, each: int, **given: Any) -> FederatedData:
    rng = np.random.default_rng(0)
    label = rng.integers(0, 3, clients * each)
    return FederatedData.from_columns(
        np.repeat(np.arange(clients), each), {"label": label, **given}, ["train"] * (clients * each)
    )


def numbers(clients: int, each: int, shift: float = 0.0) -> FederatedData:
    x = np.random.default_rng(1).standard_normal((clients * each, 2))
    x[:each] += shift
    return columns(clients, each, x=x)


def agree(model: type[nn.Module], method: Method, data: FederatedData, *engines: str, **options: Any) -> None:
    """Run a method with each engine, and compare what the server has."""
    runs = []
    for engine in engines or ENGINES:
        torch.manual_seed(0)
        settings = {"rounds": 2, "cohort": len(data), "evaluate_every": 0, "progress": False, **options}
        runs.append(simulate(model().double(), method, data, engine=engine, **settings))
    for run in runs[1:]:
        assert run.server.keys() == runs[0].server.keys()
        torch.testing.assert_close(run.server, runs[0].server, rtol=1e-09, atol=1e-10)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(2), nn.Linear(2, 3)
        self.user = nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x)) + self.user


@pytest.mark.parametrize("private", [["user"], ["user", "norm.*"]])
def test_a_rule_for_new_clients_leaves_running_statistics_to_their_clients(private: list[str]) -> None:
    method = methods.furl(private, private_init=0.0, local=LOCAL)
    agree(Normed, method, numbers(3, 16, shift=100.0), cohort=1, rounds=6)


@pytest.mark.parametrize("rule", [0.0, ("normal", 0.1)])
def test_a_rule_for_new_clients_makes_no_running_statistics(rule: Any) -> None:
    method = methods.furl(["user", "norm.running_*"], private_init=rule, local=LOCAL)
    run = simulate(Normed(), method, numbers(3, 16), rounds=1, cohort=1, progress=False)
    for client in map(str, range(3)):
        assert (run.parameters(client)["norm.running_var"] > 0.3).all()


def test_with_such_a_rule_a_resumed_run_is_the_whole_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    method, data = methods.furl(["user"], private_init=0.0, local=LOCAL), numbers(3, 16, shift=100.0)
    options: dict[str, Any] = {"rounds": 4, "cohort": 2, "engine": "sequential", "progress": False}

    def run(**more: Any) -> dict[str, Tensor]:
        torch.manual_seed(0)
        return dict(simulate(Normed().double(), method, data, **options, **more).server)

    whole, commit = run(), RunDirectory.commit

    def stops(self: RunDirectory, round: int, *given: Any, **more: Any) -> None:
        commit(self, round, *given, **more)
        if round == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(RunDirectory, "commit", stops)
    with pytest.raises(KeyboardInterrupt):
        run(out=tmp_path / "run")
    monkeypatch.undo()
    assert same_bits(run(out=tmp_path / "run", resume=True), whole)


class Items(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(300, 4), nn.Linear(4, 3)
        self.user = nn.Parameter(torch.zeros(3))

    def forward(self, item: Tensor) -> Tensor:
        return self.head(self.embedding(item)) + self.user


@pytest.mark.parametrize("optimizer", [sgd(0.1), adam(0.01)])
def test_rows_that_opted_out_examples_alone_look_up(optimizer: Any) -> None:
    rng = np.random.default_rng(0)
    data = columns(40, 4, item=rng.integers(0, 300, 160), opted_in=rng.random(160) < 0.7)
    agree(Items, methods.fedavg(local=LOCAL.but(optimizer=optimizer)), data)


@pytest.mark.parametrize("second", [adam(0.01), sgd(0.1, bounds={"head.*": (-2, 2)}), sgd(0.1, momentum=0.9)])
@pytest.mark.parametrize("turned", [False, True])
def test_phases_in_turns_of_which_one_trains_a_table_row_by_row(second: Any, turned: bool) -> None:
    data = columns(4, 8, item=np.random.default_rng(0).integers(0, 300, 32))
    order = ("federated", "private") if turned else ("private", "federated")
    optimizers = (sgd(0.1), second)
    phases = tuple(
        Phase(trains=trains, batch_size=4, optimizer=one)
        for trains, one in zip(order, optimizers, strict=True)
    )
    method = methods.furl("user").on_client(turns="batches", phases=phases)
    agree(Items, method, data)
    torch.manual_seed(0)
    first = Items().double()
    run = simulate(first, method, data, rounds=1, cohort=4, engine="sequential", progress=False)
    assert not torch.equal(run.server["embedding.weight"], first.embedding.weight)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(20, 4, padding_idx=0), nn.Linear(4, 3)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, text: Tensor, text_length: Tensor) -> Tensor:
        return self.scale * self.head(self.embedding(text).sum(1) / text_length[:, None])


def test_texts_and_a_scalar_parameter() -> None:
    rng = np.random.default_rng(0)
    offsets = np.concatenate([[0], np.cumsum(rng.integers(1, 8, 24))])
    text = Ragged(rng.integers(1, 20, offsets[-1]), offsets)
    agree(Scaled, methods.fedavg(local=LOCAL), columns(4, 6, text=text))


class Parts(tiny.Parts):
    """With layer normalisation, and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.scale = nn.LayerNorm(4), nn.Parameter(torch.tensor(1.0))

    def features(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(self.encoder(x))) * self.scale


class Called(Parts):
    """Normalises by a function, and has no module that says so."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Identity()

    def features(self, x: Tensor) -> Tensor:
        return super().features(functional.layer_norm(x, (2,)))


@pytest.mark.parametrize("model", [Parts, Called])
def test_exact_second_derivatives_of_layer_norm_are_one_clients_at_a_time(model: type[nn.Module]) -> None:
    method = methods.per_fedavg(order="exact", local=LOCAL)
    with pytest.raises(
        MethodError, match=r"^PyTorch's second derivatives of .* the model calls layer_norm\."
    ):
        agree(model, method, numbers(4, 8), "vectorised")
    agree(model, method, numbers(4, 8), "sequential", "auto")
    device = Auto(2, device="cuda")
    found = cohort(job(method.made_for(model().double()), method, numbers(4, 8)), device)
    assert device.name == "sequential"
    assert all(each.upload is not None for each in found)
    agree(model, methods.per_fedavg(order="free", local=LOCAL), numbers(4, 8))


@pytest.mark.parametrize(
    "method",
    [methods.moon(local=LOCAL).but(upload=(TopK(0.3),)), methods.ifca(3, spread=0.5, local=LOCAL)],
    ids=["MOON with states of a link", "IFCA with a scalar"],
)
def test_methods_with_what_they_did_not_expect(method: Method) -> None:
    agree(Parts, method, numbers(4, 8))


@pytest.mark.parametrize("method", [methods.ifca, methods.fedpac])
def test_a_bound_that_a_method_would_not_keep_is_refused(method: Any) -> None:
    with pytest.raises(MethodError, match="ClippedMean"):
        method(local=LOCAL, server=averaging(sgd(1.0)).but(reduce=ClippedMean(bound=1e-4)))


class Slope(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.line(x).squeeze(-1)


def test_half_precision_is_judged() -> None:
    rng = np.random.default_rng(0)
    x, label = rng.standard_normal((40, 2)), rng.standard_normal(40)
    owners = np.repeat(np.arange(4), 10)
    data = FederatedData.from_columns(owners, {"x": x, "label": label}).split_per_user()
    squared = LOCAL.but(loss=methods.terms.squared_error())
    run = simulate(
        Slope().bfloat16(), methods.fedavg(local=squared), data, rounds=1, cohort=4, progress=False
    )
    assert 0 < run.evaluate("test")["loss"] < 100
    data = FederatedData.from_columns(owners, {"x": x, "label": rng.integers(0, 3, 40)}).split_per_user()
    run = simulate(
        Parts().bfloat16(), methods.knn_per(2, local=LOCAL), data, rounds=1, cohort=4, progress=False
    )
    assert 0 <= run.evaluate("test")["accuracy"] <= 1

"""Cohorts, refused and empty clients, and what a round reports."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedkeep import FederatedData, Phase, Split, averaging, methods, sgd, simulate
from fedkeep.core.errors import LostError, NonFiniteError, UploadError
from fedkeep.core.params import Params
from fedkeep.engines import Sampler
from fedkeep.engines.device import paired
from fedkeep.engines.faults import Faults
from fedkeep.engines.round import permuted
from fedkeep.split import Upload
from tests.refusals import raises
from tests.tiny import Line, Logits, Rounds, classes, everyone, job, pairs, results, same_bits


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 31, 64, 100, 257])
def test_permuted_is_a_permutation(count: int) -> None:
    for key in (0, 1, 2**62):
        assert sorted(permuted(place, count, key) for place in range(count)) == list(range(count))


def test_permutations_differ_by_key_and_look_random() -> None:
    keys = 400
    tables = [[permuted(p, 5, key) for p in range(5)] for key in range(keys)]
    assert len({tuple(t) for t in tables}) > 100  # of 120
    first = np.bincount([t[0] for t in tables], minlength=5) / keys
    assert np.abs(first - 0.2).max() < 0.08
    together = np.mean([abs(t[0] - t[1]) == 1 for t in tables])
    assert abs(together - 0.4) < 0.1


@pytest.mark.parametrize(("count", "cohort"), [(10, 3), (10, 5), (7, 10), (1, 1), (23, 4)])
def test_every_client_comes_once_an_epoch(count: int, cohort: int) -> None:
    clients = np.arange(100, 100 + 2 * count, 2)
    sampler = Sampler(clients, cohort, "shuffled", 3)
    assert sampler.rounds_per_epoch == -(-count // min(cohort, count))
    epochs = []
    for epoch in range(3):
        drawn = [sampler(epoch * sampler.rounds_per_epoch + k) for k in range(sampler.rounds_per_epoch)]
        assert all(len(d) <= cohort for d in drawn)
        assert sorted(c for d in drawn for c in d) == clients.tolist()
        epochs.append([c for d in drawn for c in d])
    if count > 5:
        assert epochs[0] != epochs[1] != epochs[2]


@pytest.mark.parametrize("mode", ["shuffled", "independent"])
def test_clients_that_no_round_draws_are_told_from_any_round_on(mode: Any) -> None:
    sampler = Sampler(7, 3, mode, 1)
    for first, rounds in combinations(range(10), 2):
        drawn = {c for round in range(first, rounds) for c in sampler(round)}
        assert sampler.never(rounds, first) == sorted(set(range(7)) - drawn)


@pytest.mark.parametrize("mode", ["shuffled", "independent"])
def test_a_cohort_depends_on_seed_and_round_alone(mode: Any) -> None:
    forwards = [Sampler(50, 6, mode, 1)(r) for r in range(20)]
    sampler = Sampler(50, 6, mode, 1)
    assert [sampler(r) for r in reversed(range(20))] == forwards[::-1]
    assert [Sampler(50, 6, mode, 2)(r) for r in range(20)] != forwards
    assert all(len(set(c)) == len(c) for c in forwards)


def test_independent_draws_are_uniform_and_without_repetition() -> None:
    sampler = Sampler(8, 3, "independent", 0)
    drawn = [sampler(r) for r in range(600)]
    assert all(len(set(d)) == 3 for d in drawn)
    assert np.abs(np.bincount(np.concatenate(drawn), minlength=8) / 600 - 3 / 8).max() < 0.08


def test_a_cohort_among_a_billion_clients_costs_no_more() -> None:
    sampler = Sampler(10**9, 10, "shuffled", 0)
    began = time.perf_counter()
    drawn = sampler(12345)
    assert len(set(drawn)) == 10
    assert max(drawn) < 10**9
    assert Sampler(10**6, 10**5, "shuffled", 0).never(20, 1) == []  # as a whole epoch lies between
    assert time.perf_counter() - began < 1  # a table of a billion would take many seconds and gigabytes


class Fragile(Line):
    """Breaks down on examples of 13."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x[:, 0] == 13, torch.nan, super().forward(x))


BROKEN = pairs({"a": [(1, 1)], "bad": [(13, 1)], "c": [(2, 2), (1, 0)]})
METHOD = methods.furl("user", local=Phase(loss=methods.terms.squared_error(), optimizer=sgd(0.1)))


def test_a_client_that_breaks_down_stops_the_run_and_is_named() -> None:
    with pytest.raises(NonFiniteError) as error:
        simulate(Fragile(), METHOD, BROKEN, rounds=1, cohort=3)
    assert error.value.facts == {"who": "Client 'bad', round 0", "what": "the training loss", "steps": 1}


def test_a_client_that_breaks_down_may_sit_out() -> None:
    work = job(Fragile(), METHOD, BROKEN)
    rounds = Rounds(work, faults=Faults(broken="skip"))
    report = rounds([0, 1, 2])
    assert report.clients == 2
    assert len(report.refused) == 1
    assert report.refused[0].startswith("Client 'bad', round 0: ")
    without = job(Fragile(), METHOD, BROKEN)
    other = Rounds(without)
    other([0, 2])
    assert same_bits(rounds.server.params, other.server.params)
    assert same_bits(everyone(work.store, 3), everyone(without.store, 3))
    assert work.store.seen([0, 1, 2]) == [True, False, True]


@pytest.mark.parametrize("fault", ["name", "nan"])
def test_a_faulty_upload_is_refused_while_the_round_goes_on(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = classes(counts=(4, 5, 6), kind="f4")
    method = methods.furl("user", local=Phase(optimizer=sgd(0.1)))
    make = Split.upload

    def broken(self: Split, received: Params, trained: Params, weight: float, *more: Any) -> Upload:
        upload = make(self, received, trained, weight, *more)
        if weight == 5:
            upload.deltas.update({"user" if fault == "name" else "linear.bias": torch.full((3,), torch.nan)})
        return upload

    monkeypatch.setattr(Split, "upload", broken)
    seen = "unknown ['user']" if fault == "name" else "'linear.bias' holds a NaN or an infinity"
    with raises(UploadError, text=f"The upload of client 'user-1' was refused: {seen}."):
        simulate(Logits(), method, data, rounds=1)
    run = simulate(Logits(), method, data, rounds=1, on_nonfinite="skip")
    assert run.private.seen([0, 1, 2]) == [True, False, True]
    assert [r.value for r in run.history if r.metric == "refused_clients"] == [1.0]
    assert all(bool(torch.isfinite(v).all()) for v in run.server.values())


def test_if_all_break_down_the_server_stays() -> None:
    data = pairs({"bad": [(13, 1)]})
    run = simulate(Fragile(), METHOD, data, rounds=2, on_nonfinite="skip", min_clients=0)
    assert float(run.server["w"]) == 0.0
    assert run.round == 2
    refused = [r for r in run.history if r.metric == "refused_clients"]
    assert [(r.value, r.n) for r in refused] == [(1.0, 0), (1.0, 0)]
    assert all(np.isnan(r.value) for r in run.history if r.metric == "loss" and r.split == "train")


def test_a_diverging_client_is_named_too() -> None:
    data = pairs({"a": [(1, 1)], "far": [(1e200, 1e200)]})
    with pytest.raises((NonFiniteError, UploadError), match="'far'"):
        simulate(Fragile(), METHOD, data, rounds=3)


def test_clients_without_training_examples_are_judged_but_never_drawn() -> None:
    owner = ["a", "a", "empty", "c"]
    data = FederatedData.from_columns(
        owner,
        {"x": np.ones((4, 3)), "label": np.array([0, 1, 2, 1])},
        ["train", "test", "test", "train"],
        meta={"task": "multiclass", "classes": 3},
    )
    run = simulate(Logits(), methods.furl("user"), data, rounds=3, cohort=5)
    assert run.private.seen([0, 1, 2]) == [True, True, False]
    assert run.rounds_per_epoch == 1
    some = [data.ids[0], data.ids[2]]
    own, default = run.evaluate(clients=some), run.evaluate(clients=some, stage="shared")
    assert own["loss"] != default["loss"]
    assert run.evaluate(clients=some[1:]) == run.evaluate(clients=some[1:], stage="shared")
    assert [r.n for r in run.history if (r.split, r.metric) == ("test", "accuracy") and r.client is None] == [
        2
    ] * 3


def test_clients_who_opted_everything_out_weigh_nothing() -> None:
    data = classes(counts=(4, 5, 6), opted_in=True)
    opted = data.columns["opted_in"]
    opted[:] = True
    opted[data.offsets[1] : data.offsets[2]] = False
    method = methods.furl("user", local=Phase(batch_size=3))
    work = job(Logits(), method, data)
    uploads = [result.upload for result in results(work, [0, 1, 2])]
    assert [u.weight for u in uploads] == [4.0, 0.0, 6.0]
    assert all(float(v.abs().max()) == 0 for v in uploads[1].deltas.values())


@pytest.mark.parametrize("scale", [1, "fedavg"])
def test_a_cohort_that_opted_everything_out_changes_nothing(scale: Any) -> None:
    data = classes(counts=(4, 5), opted_in=True)
    data.columns["opted_in"][:] = False
    method = methods.furl("user", private_scale=scale, private_init="model")
    model = Logits()
    run = simulate(model, method, data, rounds=2, cohort=2)
    start = dict(model.state_dict())
    assert same_bits(run.server, method.split.federated(start))
    assert torch.equal(everyone(run.private, 2)["user"], start["user"].repeat(2, 1))


def test_uniform_weights_count_clients() -> None:
    work = job(Logits(), methods.fedavg(server=averaging(by="uniform")), classes())
    assert [result.upload.weight for result in results(work, [0, 1, 2])] == [1.0, 1.0, 1.0]


def test_the_order_of_the_cohort_changes_no_upload() -> None:
    data = classes(kind="f4")
    method = methods.furl("user", local=Phase(batch_size=4))
    found = []
    for order in ([0, 3, 5], [5, 0, 3]):
        work = job(Logits(), method, data)
        found.append({result.client: result.upload for result in results(work, order, round=4)})
    assert all(same_bits(found[0][c].deltas, found[1][c].deltas) for c in (0, 3, 5))


def test_bytes_are_counted() -> None:
    run = simulate(Logits(), methods.furl("user"), classes(), rounds=2, cohort=4)
    federated = (9 + 3) * 4
    for metric in ("upload_bytes", "download_bytes"):
        assert [(r.value, r.n) for r in run.history if r.metric == metric] == [(federated, 4), (federated, 2)]


@pytest.mark.parametrize(
    ("given", "said"), [(2, "A device gave 2 answers to 3 orders."), (4, "more than 3 answers")]
)
def test_a_device_answers_every_order_once(given: int, said: str) -> None:
    with pytest.raises(LostError, match=said):
        list(paired("abc", iter(range(1, given + 1))))


def test_an_answer_is_let_go_of_before_the_next_is_made() -> None:
    """Uploads are as large as models: there are never two of a device at a time."""

    class Large:
        pass

    def answers() -> Iterator[Large]:
        for _ in range(3):
            made = Large()
            alive.append(weakref.ref(made))
            yield made
            del made
            assert alive[-1]() is None

    alive: list[weakref.ref[Large]] = []
    for _, answer in paired("abc", answers()):
        del answer
    assert len(alive) == 3

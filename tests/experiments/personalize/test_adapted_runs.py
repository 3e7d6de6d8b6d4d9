"""Adapting all clients of a run, also by other methods than it was trained with."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedkeep import Init, Method, Phase, Run, Split, methods, sgd, simulate
from fedkeep.core.errors import ConfigError, MethodError
from fedkeep.data import opt_out
from fedkeep.engines.adapt import kept_values
from fedkeep.experiments.personalize import adapt_clients, cold_start, rooted
from fedkeep.experiments.simulate import train_counts
from fedkeep.methods import Global, Sent
from tests.fitting import first_examples, fit_private
from tests.refusals import raises
from tests.tiny import Logits, bits, classes, everyone, same_bits, users

DATA = classes(counts=(12, 9, 13, 7), kind="f8", test=4)
TUNE = Phase(optimizer=sgd(0.2), epochs=3, batch_size=5, examples="all")


def federated(method: Method, **options: Any) -> Run:
    return simulate(Logits().double(), method, DATA, rounds=4, cohort=2, seed=1, **options)


FEDAVG = federated(methods.fedavg(local=Phase(optimizer=sgd(0.3), batch_size=4)))


def test_fine_tuning_another_run_is_fine_tuning_ones_own() -> None:
    tuned = methods.fine_tuned(tune_epochs=3, local=Phase(optimizer=sgd(0.3), batch_size=4))
    other = rooted(FEDAVG, Logits().double(), tuned)
    found, own = adapt_clients(other), adapt_clients(federated(tuned))
    assert list(found.clients) == users(range(4))
    for client in found.clients:
        assert same_bits(found.own(client), own.own(client))
    assert found.evaluate() == own.evaluate()
    assert found.evaluate("valid") != FEDAVG.evaluate("valid")
    curve = cold_start(other, clients=users(range(4)), ks=(None,))
    assert (
        curve.mean[0]
        == found.evaluate()["accuracy_user_mean"]
        == pytest.approx(np.mean(found.clients_frame()["accuracy"].to_pylist()))
    )


def test_all_of_a_client_is_its_own_and_the_run_stays() -> None:
    run = rooted(FEDAVG, Logits().double(), methods.fine_tuned(tune_epochs=2))
    before = {n: bits(v) for n, v in run.server.items()}
    own = adapt_clients(run, ["user-2"]).own("user-2")
    assert set(own) == set(before)
    assert all(bits(own[n]) != before[n] for n in own)
    assert {n: bits(v) for n, v in run.server.items()} == before


def test_nothing_of_the_run_is_needed_to_train_alone() -> None:
    alone = methods.local().adapting(phases=(TUNE,))
    found = adapt_clients(rooted(FEDAVG, Logits(seed=3).double(), alone), ["user-1"])
    fresh = simulate(Logits(seed=3).double(), alone, DATA, rounds=0, seed=1)
    assert same_bits(found.own("user-1"), adapt_clients(fresh, ["user-1"]).own("user-1"))


def test_another_name_in_front() -> None:
    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.bias = Logits().double(), nn.Parameter(torch.zeros(3, dtype=torch.float64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) + self.bias

    run = rooted(FEDAVG, Inside(), methods.furl("bias"), "inner.")
    assert torch.equal(run.server["inner.linear.weight"], FEDAVG.server["linear.weight"])
    assert run.evaluate("test") == pytest.approx(FEDAVG.evaluate("test"))
    with raises(MethodError, trained="fedavg", method="furl", module="Inside"):
        rooted(FEDAVG, Inside(), methods.furl("bias"), "inside.")
    with pytest.raises(MethodError, match=r"'linear.weight' wants \(3, 4\), is \(3, 3\)"):
        rooted(FEDAVG, Logits(features=4).double(), methods.fedavg())


def kept(run: Run, client: str) -> dict[str, torch.Tensor]:
    return kept_values(run.job, run.data.index(client))


def test_clients_start_from_what_they_kept() -> None:
    method = methods.furl(
        "user", adapt=Phase(trains="private", optimizer=sgd(0.1), steps=1), local=Phase(optimizer=sgd(0.3))
    )
    run = federated(method, hold_out=0.25)
    (held,), seen = run.held_out, run.clients[0]
    assert kept(run, held) == {}
    assert torch.equal(kept(run, seen)["user"], everyone(run.private, 4)["user"][run.clients.positions[0]])
    found = adapt_clients(run)
    rows = first_examples(run, held, None)
    assert same_bits(found.own(held), fit_private(run, held, rows))
    assert not same_bits(found.own(seen), fit_private(run, seen, first_examples(run, seen, None)))
    again = adapt_clients(run, [seen], start={seen: {"user": torch.zeros(3, dtype=torch.float64)}})
    assert not same_bits(again.own(seen), found.own(seen))
    assert (
        kept(
            rooted(
                FEDAVG, Logits().double(), method.but(split=Split(())).on_client(keep=Init(every_round=True))
            ),
            seen,
        )
        == {}
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", [torch.float64, torch.bfloat16])
def test_processes_give_the_same(kind: torch.dtype) -> None:
    run = simulate(Logits().to(kind), methods.fine_tuned(tune_epochs=2), DATA, rounds=0, progress=False)
    one, two = adapt_clients(run), adapt_clients(run, workers=2)
    assert all(same_bits(one.own(f"user-{c}"), two.own(f"user-{c}")) for c in range(4))
    assert one.stopped == two.stopped


def by_name(server: Global, client: str) -> Sent:
    return Sent(params={n: v + len(client) * int(client[-1]) for n, v in server.params.items()})


@pytest.mark.slow
def test_processes_are_given_what_each_client_is_sent() -> None:
    method = methods.fine_tuned(tune_epochs=2).on_server(send=by_name)
    run = rooted(FEDAVG, Logits().double(), method)
    one, two = adapt_clients(run), adapt_clients(run, workers=2)
    assert all(same_bits(one.own(f"user-{c}"), two.own(f"user-{c}")) for c in range(4))
    alike = adapt_clients(rooted(FEDAVG, Logits().double(), methods.fine_tuned(tune_epochs=2)))
    assert same_bits(one.own("user-0"), alike.own("user-0"))  # user-0 is sent what the server has
    assert not same_bits(one.own("user-1"), alike.own("user-1"))


def test_refusals() -> None:
    with raises(ConfigError, said="There is no client to adapt."):
        adapt_clients(FEDAVG, [])
    with raises(MethodError, said="has no phases of adaptation, so there is", method="fedavg"):
        adapt_clients(FEDAVG)


def test_who_has_opted_out_is_not_drawn_where_a_round_would_train_nothing() -> None:
    data = opt_out(DATA, 0.5, seed=2)
    assert sorted(train_counts(data, methods.fedavg()) > 0) == [False, False, True, True]
    assert train_counts(data, methods.ditto()).tolist() == [
        12,
        9,
        13,
        7,
    ]  # its own models train on all examples
    assert train_counts(DATA, methods.fedavg()).tolist() == [12, 9, 13, 7]
    run = simulate(Logits().double(), methods.fedavg(), data, rounds=3, cohort=2)
    assert run.rounds_per_epoch == 1
    assert {r.n for r in run.history if r.metric == "upload_bytes"} == {2}
    assert list(run.clients) == users(range(4))  # all are judged

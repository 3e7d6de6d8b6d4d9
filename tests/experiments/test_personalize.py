"""Cold start: only private values are fitted, nothing leaves, and k examples are among k + 1."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import fedkeep
import fedkeep.split.split as split_room
from fedkeep import Adapt, Phase, Run, Split, methods, sgd, simulate
from fedkeep.core.errors import ConfigError, DataError, MethodError
from fedkeep.engines import Stream
from fedkeep.engines.batches import batches
from fedkeep.experiments.analyses import cold_start_form
from fedkeep.experiments.personalize import cold_start, first_examples, fit_private, personalize_client
from fedkeep.methods import Global, Sent
from tests.tiny import Logits, Noisy, bits, classes, everyone

DATA = classes(counts=(12, 9, 13, 7, 4, 16), kind="f8", test=4)
ADAPT = Phase(trains="private", optimizer=sgd(0.4, momentum=0.5), epochs=3, batch_size=5, examples="all")


@pytest.fixture(scope="module")
def run() -> Run:
    method = methods.furl(
        "user", adapt=ADAPT, private_init=0.125, local=Phase(optimizer=sgd(0.3), batch_size=4)
    )
    return simulate(Logits().double(), method, DATA, rounds=6, cohort=2, hold_out=0.34, seed=1)


def test_more_examples_contain_the_fewer(run: Run) -> None:
    for client in run.held_out.tolist():
        rows = DATA.rows(client, "train")
        everything = first_examples(run, client, None)
        assert sorted(everything) == list(rows)
        for k in range(len(rows) + 3):
            assert first_examples(run, client, k).tolist() == everything[:k].tolist()
    orders = [first_examples(run, c, None) - DATA.rows(c, "train").start for c in (0, 2)]
    assert orders[0].tolist() != orders[1][: len(orders[0])].tolist()
    assert orders[0].tolist() != sorted(orders[0])


def test_no_example_leaves_the_default(run: Run) -> None:
    own = fit_private(run, int(run.held_out[0]), np.zeros(0, np.int64))
    assert own.keys() == {"user"}
    assert own["user"].tolist() == [0.125] * 3


def test_clients_may_be_named_by_their_ids(run: Run) -> None:
    held = run.held_out.tolist()
    ids = [DATA.ids[c] for c in held]
    assert cold_start(run, ids, (0, 2)) == cold_start(run, held, (0, 2))
    rows = first_examples(run, held[0], 3)
    assert fit_private(run, ids[0], rows)["user"].tolist() == fit_private(run, held[0], rows)["user"].tolist()
    with pytest.raises(DataError, match="No client of these data has the id 'nobody'"):
        cold_start(run, ["nobody"])
    with pytest.raises(DataError, match="No client of these data has the id 'nobody'"):
        fit_private(run, "nobody", rows)


def test_the_default_itself_cannot_be_changed_by_the_caller() -> None:
    own = simulate(Logits(), methods.furl("user", private_init=0.0), classes(kind="f4"), rounds=0)
    for values in (fit_private(own, 0, np.zeros(0, np.int64)), personalize_client(own, "user-0", 0)[0]):
        values["user"].add_(1)
    assert own.private.default(0)["user"].tolist() == [0.0] * 3


@pytest.mark.parametrize("k", [1, 3, None])
def test_fitting_equals_plain_pytorch_on_the_vector_alone(run: Run, k: int | None) -> None:
    client = int(run.held_out[0])
    rows = first_examples(run, client, k)
    own = fit_private(run, client, rows)
    vector = torch.full((3,), 0.125, dtype=torch.float64, requires_grad=True)
    weight, bias = run.server["linear.weight"], run.server["linear.bias"]
    stepper = torch.optim.SGD([vector], 0.4, 0.5)
    draws = Stream(1, f"personalize/{DATA.ids[client]}", len(rows))
    for chosen in batches(DATA, rows, ADAPT, draws, 0):
        batch = DATA.batch(chosen)
        stepper.zero_grad()
        torch.nn.functional.cross_entropy(batch["x"] @ weight.T + bias + vector, batch["label"]).backward()
        stepper.step()
    assert list(own) == ["user"]
    torch.testing.assert_close(own["user"], vector.detach(), rtol=0, atol=1e-12)
    assert not torch.equal(own["user"], torch.full((3,), 0.125, dtype=torch.float64))


def test_nothing_but_the_given_vector_changes_and_nothing_is_uploaded(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("something was uploaded")

    monkeypatch.setattr(split_room.Split, "upload", refuse)
    monkeypatch.setattr(split_room.Upload, "__post_init__", refuse)
    before = (
        {n: bits(v) for n, v in run.server.items()},
        bits(everyone(run.private, 6)["user"]),
        len(run.history),
    )
    cold_start(run, ks=(0, 2, None))
    personalize_client(run, "user-3", 4)
    assert before == (
        {n: bits(v) for n, v in run.server.items()}, bits(everyone(run.private, 6)["user"]), len(run.history),
    )  # fmt: skip
    assert run.private.seen(run.held_out.tolist()) == [False, False]


def test_federated_statistics_stay_too() -> None:
    data = classes(counts=(12, 9, 13), kind="f4")
    run = simulate(Noisy(dropout=0.3), methods.furl("user"), data, rounds=2, hold_out=0.34, seed=1)
    before = {n: bits(v) for n, v in run.server.items()}
    own = fit_private(run, int(run.held_out[0]), first_examples(run, int(run.held_out[0]), 6))
    assert before == {n: bits(v) for n, v in run.server.items()}
    assert list(own) == ["user"]


def test_the_curve_by_a_plain_loop(run: Run) -> None:
    ks = (0, 1, 5, None)
    found = cold_start(run, ks=ks)
    assert (found.metric, found.k, found.clients) == ("accuracy", ks, 2)
    for number, k in enumerate(ks):
        shares, right = [], []
        for client in run.held_out.tolist():
            own = fit_private(run, client, first_examples(run, client, k))
            batch = DATA.batch(DATA.rows(client, "test"))
            logits = batch["x"] @ run.server["linear.weight"].T + run.server["linear.bias"] + own["user"]
            hits = (logits.argmax(1) == batch["label"]).tolist()
            shares.append(sum(hits) / len(hits))
            right += hits
        assert found.mean[number] == pytest.approx(np.mean(shares))
        assert found.std[number] == pytest.approx(np.std(shares))
        assert found.pooled[number] == pytest.approx(np.mean(right))
    names = {r.split for r in found.records}
    assert names == {"cold_start/0", "cold_start/1", "cold_start/5", "cold_start/all"}
    assert {r.client for r in found.records if r.client} == {DATA.ids[c] for c in run.held_out}


def test_no_example_is_the_shared_model(run: Run) -> None:
    found = cold_start(run, ks=(0,))
    assert found.pooled[0] == run.evaluate("test", clients=run.held_out.tolist(), shared=True)["accuracy"]


def test_it_is_reproducible(run: Run) -> None:
    assert cold_start(run, ks=(2, None)) == cold_start(run, ks=(2, None))
    assert cold_start(run, ks=(None,)).mean == cold_start(run, ks=(2, None)).mean[1:]


def test_one_client_before_and_after(run: Run) -> None:
    own, metrics = personalize_client(run, "user-5", 3)
    index = DATA.index("user-5")
    assert torch.equal(own["user"], fit_private(run, index, first_examples(run, index, 3))["user"])
    assert {"before_accuracy", "accuracy", "before_loss", "loss"} <= metrics.keys()
    assert metrics["before_accuracy"] == run.evaluate("test", clients=[index], shared=True)["accuracy"]
    none, same = personalize_client(run, "user-5", 0)
    assert same["before_loss"] == same["loss"]
    assert none["user"].tolist() == [0.125] * 3


def refused(run: Run, **changes: Any) -> str:
    from dataclasses import replace

    broken = replace(run, method=run.method.but(**changes))
    with pytest.raises(MethodError) as error:
        fit_private(broken, 0, first_examples(run, 0, 2))
    return str(error.value)


def moved(server: Global, client: str) -> Sent:
    return Sent(params={n: v + len(client) for n, v in server.params.items()}, state=server.state)


def test_a_client_adapts_from_what_it_is_sent(run: Run) -> None:
    from dataclasses import replace

    client = int(run.held_out[0])
    rows = first_examples(run, client, 3)
    sending = replace(run, method=run.method.on_server(send=moved))
    params = moved(run.whole, DATA.ids[client]).params
    by_hand = fit_private(replace(run, server=params), client, rows)
    assert torch.equal(fit_private(sending, client, rows)["user"], by_hand["user"])
    assert not torch.equal(fit_private(run, client, rows)["user"], by_hand["user"])
    whole = replace(sending, method=sending.method.adapting(split=Split("*")))
    copied = fit_private(whole, client, rows[:0])
    assert all(torch.equal(copied[name], value) for name, value in params.items())


def test_methods_that_cannot_personalise_are_refused(run: Run) -> None:
    assert (
        refused(run, adapt=Adapt())
        == "'furl' has no phases of adaptation, so there is nothing to personalise."
    )
    assert refused(run, adapt=Adapt(phases=(Phase(),))) == (
        "The adaptation of 'furl' trains the federated 'linear.bias'; it must be frozen."
    )


def test_bad_calls(run: Run) -> None:
    with pytest.raises(ConfigError) as error:
        cold_start(run, ks=(1, -2))
    assert str(error.value) == "k must be at least 0, or None for all; got [1, -2]."
    with pytest.raises(ConfigError) as error:
        cold_start(run, clients=[])
    assert str(error.value) == (
        "No client was held out of this run. Run with hold_out=0.1, or name clients to measure."
    )
    with pytest.raises(DataError, match="'user-55'"):
        personalize_client(run, "user-55", 1)


def test_a_binary_cold_start_names_the_accuracy_that_its_means_are() -> None:
    data = fedkeep.data.many_user_text(users=8, examples=20, kind="binary", seed=0)
    size = data.meta["vocabulary"]["size"]
    model = fedkeep.models.BagOfWords(size, 2, 2, embedding_dim=2, mlp=4)
    run = fedkeep.simulate(model, fedkeep.methods.furl("user"), data, rounds=1, cohort=2, hold_out=0.4)
    found = cold_start(run, ks=(0,))
    each = [r.value for r in found.records if r.client is not None and r.metric == "accuracy"]
    assert (found.metric, found.user_metric) == ("auc", "accuracy")
    assert found.mean[0] == pytest.approx(sum(each) / len(each), abs=1e-12)
    assert cold_start_form(found)["metric"] == "accuracy"

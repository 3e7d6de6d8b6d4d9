"""Cold start: only private values are fitted, nothing leaves, and k examples are among k + 1."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import fedkeep
import fedkeep.split.split as split_room
from fedkeep import Adapt, Phase, Run, Split, methods, sgd, simulate
from fedkeep.core.errors import ConfigError, DataError, MethodError
from fedkeep.core.optim import Optimizer
from fedkeep.engines import Stream
from fedkeep.engines.batches import batches
from fedkeep.experiments.analyses import cold_start_form, falls_in_words
from fedkeep.experiments.personalize import ColdStart, adapt_clients, cold_start
from fedkeep.methods import Global, Sent
from tests.engines.reference import step
from tests.fitting import first_examples, fit_private
from tests.refusals import raises
from tests.tiny import Logits, Noisy, bits, classes, everyone

DATA = classes(counts=(12, 9, 13, 7, 4, 16), kind="f8", test=4)
ADAPT = Phase(trains="private", optimizer=sgd(0.4, momentum=0.5), epochs=3, batch_size=5, examples="all")


@pytest.fixture(scope="module")
def run() -> Run:
    method = methods.furl(
        "user", adapt=ADAPT, private_init=0.125, local=Phase(optimizer=sgd(0.3), batch_size=4)
    )
    return simulate(Logits().double(), method, DATA, rounds=6, cohort=2, hold_out=0.34, seed=1).last


def test_more_examples_contain_the_fewer(run: Run) -> None:
    for client in run.held_out:
        rows = DATA.rows(DATA.index(client), "train")
        everything = first_examples(run, client, None)
        assert sorted(everything) == list(rows)
        for k in range(len(rows) + 3):
            assert first_examples(run, client, k).tolist() == everything[:k].tolist()
    orders = [first_examples(run, f"user-{c}", None) - DATA.rows(c, "train").start for c in (0, 2)]
    assert orders[0].tolist() != orders[1][: len(orders[0])].tolist()
    assert orders[0].tolist() != sorted(orders[0])


def test_no_example_leaves_the_default(run: Run) -> None:
    own = fit_private(run, run.held_out[0], np.zeros(0, np.int64))
    assert own.keys() == {"user"}
    assert own["user"].tolist() == [0.125] * 3


def test_clients_are_named_by_their_ids(run: Run) -> None:
    assert cold_start(run, list(run.held_out), (0, 2)) == cold_start(run, ks=(0, 2))
    rows = first_examples(run, run.held_out[0], 3)
    with pytest.raises(DataError, match=r"No client of these data has the id 'nobody'.*data\.ids"):
        cold_start(run, ["nobody"])
    with pytest.raises(DataError, match=r"No client of these data has the id 'nobody'.*data\.ids"):
        fit_private(run, "nobody", rows)


def test_the_default_itself_cannot_be_changed_by_the_caller() -> None:
    own = simulate(Logits(), methods.furl("user", private_init=0.0), classes(kind="f4"), rounds=0)
    for values in (
        fit_private(own, "user-0", np.zeros(0, np.int64)),
        adapt_clients(own, ["user-0"], begin="default", examples=0).own("user-0"),
    ):
        values["user"].add_(1)
    assert own.private.default(0)["user"].tolist() == [0.0] * 3


@pytest.mark.parametrize("k", [1, 3, None])
def test_fitting_equals_plain_pytorch_on_the_vector_alone(run: Run, k: int | None) -> None:
    client = run.held_out[0]
    rows = first_examples(run, client, k)
    own = fit_private(run, client, rows)
    vector = torch.full((3,), 0.125, dtype=torch.float64, requires_grad=True)
    weight, bias = run.server["linear.weight"], run.server["linear.bias"]
    stepper = torch.optim.SGD([vector], 0.4, 0.5)
    draws = Stream(1, f"personalize/{client}", len(rows))
    chunks = list(batches(DATA, rows, ADAPT, draws, 0))
    assert len(chunks) == 3 * -(-len(rows) // 5)
    for number, chosen in enumerate(chunks):
        stepper.param_groups[0]["lr"] = 0.4 * (1 - number / len(chunks))
        batch = DATA.batch(chosen)
        step(
            stepper, torch.nn.functional.cross_entropy(batch["x"] @ weight.T + bias + vector, batch["label"])
        )
    assert list(own) == ["user"]
    torch.testing.assert_close(own["user"], vector.detach(), rtol=0, atol=1e-12)
    assert not torch.equal(own["user"], torch.full((3,), 0.125, dtype=torch.float64))


def training_loss(run: Run, client: str, k: int | None) -> float:
    """Return the cross-entropy of the examples that a client was fitted to."""
    rows = first_examples(run, client, k)
    batch = DATA.batch(rows)
    weight, bias = run.server["linear.weight"], run.server["linear.bias"]
    logits = batch["x"] @ weight.T + bias + fit_private(run, client, rows)["user"]
    return float(torch.nn.functional.cross_entropy(logits, batch["label"]))


def test_a_high_rate_does_not_leave_what_the_last_mini_batches_made(run: Run) -> None:
    """With a constant rate the vector swings from mini-batch to mini-batch, and the more of them the less it fits."""
    loud = Phase(trains="private", optimizer=sgd(6.0), epochs=20, batch_size=2, examples="all")
    falling = replace(run, method=run.method.adapting(phases=(loud,)))
    constant = replace(falling, method=falling.method.adapting(rate_decay=None))
    for client in run.held_out:
        assert training_loss(falling, client, None) < 0.7 * training_loss(constant, client, None)
    with raises(MethodError, said="rate_decay must be None or 'linear'; got 'cosine'."):
        Adapt(rate_decay="cosine")  # type: ignore[arg-type]


@pytest.mark.parametrize(("changes", "planned"), [({"steps": 4}, 4), ({"epochs": 2, "batch_size": 3}, 6)])
def test_rates_fall_over_the_mini_batches_of_each_phase(
    run: Run, changes: dict[str, int], planned: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    scales, update = [], Optimizer.update

    def noted(self: Optimizer, params: Any, grads: Any, state: Any, scale: float = 1.0, **more: bool) -> None:
        scales.append(scale)
        update(self, params, grads, state, scale, **more)

    monkeypatch.setattr(Optimizer, "update", noted)
    two = (ADAPT.but(**changes), ADAPT.but(epochs=1, batch_size=7))
    fit_private(
        replace(run, method=run.method.adapting(phases=two)), "user-0", first_examples(run, "user-0", 7)
    )
    assert scales == [*(1 - step / planned for step in range(planned)), 1.0]
    scales.clear()
    early = ADAPT.but(epochs=4, batch_size=4, early_stopping=methods.EarlyStopping(every=1, patience=1))
    fit_private(
        replace(run, method=run.method.adapting(phases=(early,))), "user-0", first_examples(run, "user-0", 7)
    )
    assert scales  # of as many as there may be
    assert scales == [1 - step / 8 for step in range(len(scales))]


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
    adapt_clients(run, ["user-3"], begin="default", examples=4)
    assert before == (
        {n: bits(v) for n, v in run.server.items()},
        bits(everyone(run.private, 6)["user"]),
        len(run.history),
    )
    assert run.private.seen(run.held_out.positions.tolist()) == [False, False]


def test_federated_statistics_stay_too() -> None:
    data = classes(counts=(12, 9, 13), kind="f4")
    run = simulate(Noisy(dropout=0.3), methods.furl("user"), data, rounds=2, hold_out=0.34, seed=1)
    before = {n: bits(v) for n, v in run.server.items()}
    own = fit_private(run, run.held_out[0], first_examples(run, run.held_out[0], 6))
    assert before == {n: bits(v) for n, v in run.server.items()}
    assert list(own) == ["user"]


def test_the_curve_by_a_plain_loop(run: Run) -> None:
    ks = (0, 1, 5, None)
    found = cold_start(run, ks=ks)
    assert len(repr(found)) < 500  # of all clients' numbers it shows none
    assert (found.metric, found.k, found.clients) == ("accuracy", ks, 2)
    for number, k in enumerate(ks):
        shares, right = [], []
        for client in run.held_out:
            own = fit_private(run, client, first_examples(run, client, k))
            batch = DATA.batch(DATA.rows(DATA.index(client), "test"))
            logits = batch["x"] @ run.server["linear.weight"].T + run.server["linear.bias"] + own["user"]
            hits = (logits.argmax(1) == batch["label"]).tolist()
            shares.append(sum(hits) / len(hits))
            right += hits
        assert found.mean[number] == pytest.approx(np.mean(shares))
        assert found.std[number] == pytest.approx(np.std(shares))
        assert found.pooled[number] == pytest.approx(np.mean(right))
        assert found.each[number] == pytest.approx(shares)
    names = {r.split for r in found.records}
    assert names == {"cold_start/0", "cold_start/1", "cold_start/5", "cold_start/all"}
    assert {r.client for r in found.records if r.client} == set(run.held_out)


def test_the_most_frequent_label_by_hand_and_ties_by_their_mean() -> None:
    data = fedkeep.FederatedData.from_columns(
        ["a"] * 7 + ["b"] * 4,
        {"x": np.zeros((11, 2), np.float32), "label": [0, 0, 1, 1, 0, 2, 1, 2, 2, 2, 1]},
        split=["train"] * 4 + ["test"] * 3 + ["train"] * 2 + ["test"] * 2,
        meta={"classes": 3},
    )
    run = simulate(fedkeep.models.Linear(2, 3), methods.furl("user"), data, rounds=0)
    found = cold_start(run, clients=("a", "b"), ks=(0, 1, 3, None))
    # a tests on 0, 2, 1, and has 0, 0, 1, 1 to train on: 1/3 whatever it counts, and of a tie (1/3 + 1/3) / 2.
    # b tests on 2, 1, and has 2 and 2: 1/2.
    assert found.frequent == (None, *[pytest.approx((1 / 3 + 1 / 2) / 2)] * 3)
    other = data.columns["label"].copy()  # type: ignore[union-attr]
    other[[4, 5, 6]] = 0, 0, 1  # a tests on 0, 0, 1: 2/3 by label 0, 1/3 by 1, and of the tie 1/2
    tied = fedkeep.FederatedData(
        {**data.columns, "label": other}, data.offsets, data.ids, data.bounds, data.meta
    )
    again = replace(run, data=tied)
    first = int(tied.columns["label"][first_examples(again, "a", 1)[0]])  # type: ignore[index]
    assert cold_start(again, clients=("a",), ks=(1, None)).frequent == pytest.approx(((2, 1)[first] / 3, 0.5))


class Height(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.user = torch.nn.Parameter(torch.zeros(1))
        self.slope = torch.nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.slope + self.user


def test_where_there_are_no_classes_no_label_is_most_frequent() -> None:
    data = fedkeep.FederatedData.from_columns(
        ["a"] * 4,
        {"x": np.ones((4, 2), np.float32), "label": np.arange(4.0, dtype=np.float32)},
        split=["train", "train", "test", "test"],
        meta={"task": "regression"},
    )
    method = methods.furl("user", local=Phase(loss=methods.terms.squared_error()))
    found = cold_start(simulate(Height(), method, data, rounds=0), ["a"], (1, None))
    assert found.frequent == (None, None)
    assert found.changes == (None, None)  # of one user
    assert falls_in_words(found) == "A single user allows no test."
    assert [curve["name"] for curve in cold_start_form(found)["series"]] == ["fitted private part"]


def measured(metric: str, ks: tuple[int | None, ...], each: tuple[tuple[float, ...], ...]) -> ColdStart:
    return ColdStart(metric, metric, ks, each[0], (), each, (None,) * len(ks))


def test_changes_are_paired_over_users_and_falls_are_corrected_over_all_pairs() -> None:
    each = ((0.5, 0.25, 0.75) * 4, (0.375, 0.125, 0.609375) * 4, (0.5, 0.25, 0.5) * 4)
    found = measured("accuracy", (10, 50, None), each)
    # From 10 to 50: −0.125, −0.125, −0.140625; mean −0.390625 / 3, t of 11 degrees 2.2010.
    half = 2.200985 * np.std([0.125, 0.125, 0.140625] * 4, ddof=1) / np.sqrt(12)
    first, second, third = found.changes
    assert first is None
    assert (second.mean, second.low, second.high) == pytest.approx(
        (-0.390625 / 3, -0.390625 / 3 - half, -0.390625 / 3 + half), abs=1e-6
    )
    assert third.low < 0 < third.high  # 0.125, 0.125, −0.109375
    assert [(few, many) for few, many, _ in found.falls] == [(10, 50)]
    assert falls_in_words(found) == (
        "Significantly worse with more examples (95 %, paired over users, corrected over all pairs of k): "
        "k = 10 to 50: −13.0 points (−13.5 to −12.5)."
    )
    # −0.25 of four users in twelve: the interval leaves 0 out, p is 0.039; three times that is above 5 %
    alone = ((0.5,) * 12, (0.25,) * 4 + (0.5,) * 8)
    assert [(few, many) for few, many, _ in measured("accuracy", (10, 50), alone).falls] == [(10, 50)]
    assert measured("accuracy", (10, 50, None), (*alone, (0.375, 0.625) * 6)).falls == ()
    shuffled = measured("accuracy", (None, 50, 10), each[::-1])
    assert shuffled.falls == found.falls  # whatever the order of k
    better = measured("rmse", (10, 50, None), each)  # lower is better
    assert better.falls == ()
    assert (
        falls_in_words(better)
        == "Nowhere is a larger k significantly worse (95 %, paired over users, corrected over all pairs of k)."
    )
    worse = measured("rmse", (10, 50), each[1::-1])
    assert [(few, many) for few, many, _ in worse.falls] == [(10, 50)]


def test_few_users_and_changes_that_do_not_vary_have_no_interval() -> None:
    few = measured("accuracy", (10, 50), ((0.5, 0.25, 0.75) * 3, (0.375, 0.125, 0.609375) * 3))
    assert (few.changes, few.falls) == ((None, None), ())
    assert (
        falls_in_words(few) == "With 9 users nothing is claimed about users like these; that takes 10 users."
    )
    alike = measured("accuracy", (10, 50), ((0.5,) * 12, (0.25,) * 12))
    assert (alike.changes, alike.falls) == ((None, None), ())


def test_an_interval_of_a_fraction_does_not_go_beyond_a_hundred_points() -> None:
    each = ((0.0,) * 10, (1.0,) * 9 + (0.0,))
    fraction, other = (measured(metric, (10, 50), each).changes[1] for metric in ("accuracy", "rmse"))
    assert (fraction.mean, fraction.low, fraction.high) == (other.mean, other.low, 1.0)
    assert other.high > 1.1


def test_it_is_reproducible(run: Run) -> None:
    assert cold_start(run, ks=(2, None)) == cold_start(run, ks=(2, None))
    assert cold_start(run, ks=(None,)).mean == cold_start(run, ks=(2, None)).mean[1:]


def test_one_client_before_and_after(run: Run) -> None:
    found = adapt_clients(run, ["user-5"], begin="default", examples=3)
    fitted = fit_private(run, "user-5", first_examples(run, "user-5", 3))
    assert torch.equal(found.own("user-5")["user"], fitted["user"])
    assert found.evaluate()["loss"] != run.evaluate(clients=["user-5"], stage="shared")["loss"]
    none = adapt_clients(run, ["user-5"], begin="default", examples=0)
    assert none.evaluate()["loss"] == run.evaluate(clients=["user-5"], stage="shared")["loss"]
    assert none.own("user-5")["user"].tolist() == [0.125] * 3


def refused(run: Run, **changes: Any) -> str:
    broken = replace(run, method=run.method.but(**changes))
    with pytest.raises(MethodError) as error:
        fit_private(broken, "user-0", first_examples(run, "user-0", 2))
    return str(error.value)


def moved(server: Global, client: str) -> Sent:
    return Sent(params={n: v + len(client) for n, v in server.params.items()}, state=server.state)


def test_a_client_adapts_from_what_it_is_sent(run: Run) -> None:
    client = run.held_out[0]
    rows = first_examples(run, client, 3)
    sending = replace(run, method=run.method.on_server(send=moved))
    params = moved(run.whole, client).params
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
    with raises(ConfigError, said="k must be a whole number from", ks=[1, -2]):
        cold_start(run, ks=(1, -2))
    with pytest.raises(ConfigError, match=r"got \[1\.5\]\.$"):
        cold_start(run, ks=(1.5,))  # type: ignore[arg-type]
    with raises(ConfigError, said="No client was held out of this run."):
        cold_start(run, clients=[])
    with pytest.raises(DataError, match="'user-55'"):
        adapt_clients(run, ["user-55"])


def test_clients_without_examples_to_judge_are_left_out_of_a_cold_start() -> None:
    split = ["train"] * 12 + ["train", "train", "test"] * 2
    data = fedkeep.FederatedData.from_columns(
        ["a"] * 6 + ["b"] * 6 + ["c"] * 3 + ["d"] * 3,
        {"x": np.random.default_rng(0).standard_normal((18, 3)), "label": np.arange(18) % 3},
        split,
    )
    method = methods.furl("user", adapt=ADAPT, local=Phase(optimizer=sgd(0.3)))
    run = simulate(Logits().double(), method, data, rounds=1, cohort=2, evaluate_every=0)
    found = cold_start(run, ["a", "c", "d"], (0, np.int64(2)))  # type: ignore[arg-type]
    assert found.clients == 2
    assert {r.client for r in found.records} == {None, "c", "d"}
    assert found == cold_start(run, ["c", "d"], (0, 2))
    with raises(ConfigError, count=2, split="test"):
        cold_start(run, ["a", "b"])


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

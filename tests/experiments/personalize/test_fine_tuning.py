"""The personalisation curve, against plain PyTorch; what it keeps; what it refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedkeep.split.split as split_room
from fedkeep import Phase, Run, methods, sgd, simulate
from fedkeep.core.errors import ConfigError, NonFiniteError
from fedkeep.core.net import Net
from fedkeep.core.params import Batch, Params, clone
from fedkeep.data import FederatedData
from fedkeep.engines import Stream
from fedkeep.engines.batches import batches
from fedkeep.experiments.build import run_config
from fedkeep.experiments.personalize import (
    FineTuning,
    personalization_curve,
)
from fedkeep.methods.base import forward
from fedkeep.models import MatrixFactorization
from tests.engines.reference import step
from tests.experiments.configs import config
from tests.refusals import raises
from tests.tiny import Logits, Scalar, bits, classes, pairs

DATA = classes(counts=(12, 9, 13, 7), kind="f8", test=25)
OPTIMIZER = sgd(0.3, momentum=0.9, rates={"user": 0.6}, schedule="linear")
STEEP = FineTuning(ratio=0.5, steps=6, every=2)


def trained(method: Any, **options: Any) -> Run:
    return simulate(Logits().double(), method, DATA, rounds=3, cohort=4, seed=2, evaluate_every=0, **options)


@pytest.fixture(scope="module")
def run() -> Run:
    return trained(methods.furl("user", local=Phase(optimizer=OPTIMIZER, batch_size=4)))


def reference(run: Run, client: int, protocol: FineTuning) -> list[float]:
    """Return the accuracies of a module that is trained with torch.optim; only the batches are fedkeep's."""
    module = Logits().double()
    module.load_state_dict(run.parameters(DATA.ids[client], stage="before"))
    groups = [
        {"params": [module.user], "lr": 0.6 * protocol.ratio},
        {"params": module.linear.parameters(), "lr": 0.3 * protocol.ratio},
    ]
    stepper = torch.optim.Adam(groups) if protocol.optimizer else torch.optim.SGD(groups, momentum=0.9)
    rows = DATA.rows(client, "train")
    draws = Stream(2, f"personalization/{DATA.ids[client]}", run.round)
    phase = Phase(batch_size=4, steps=protocol.steps)
    test = DATA.batch(DATA.rows(client, "test"))

    def accuracy() -> float:
        return float((module(test["x"]).argmax(1) == test["label"]).double().mean())

    found = [accuracy()]
    for number, chosen in enumerate(batches(DATA, np.arange(rows.start, rows.stop), phase, draws, 0), 1):
        batch = DATA.batch(chosen)
        step(stepper, nn.functional.cross_entropy(module(batch["x"]), batch["label"]))
        if number % protocol.every == 0:
            found.append(accuracy())
    return found


def test_the_curve_equals_plain_pytorch(run: Run) -> None:
    curves = personalization_curve(run, STEEP)
    assert curves.steps == (0, 2, 4, 6)
    assert list(curves.accuracy["own"]) == list(DATA.ids)
    for client, name in enumerate(DATA.ids):
        assert list(curves.accuracy["own"][name]) == pytest.approx(reference(run, client, STEEP))
    values = np.array(list(curves.accuracy["own"].values()))
    assert len(np.unique(values[:, 0] - values[:, -1])) > 1  # fine-tuning does something
    by_adam = replace(STEEP, optimizer="adam")
    found = personalization_curve(run, by_adam).accuracy["own"]
    assert found != curves.accuracy["own"]
    for client, name in enumerate(DATA.ids):
        assert list(found[name]) == pytest.approx(reference(run, client, by_adam))
    scores = curves.scores()
    assert scores.mean == pytest.approx(values.mean())
    assert scores.curve == pytest.approx(values.mean(axis=0))


def test_what_rounds_left_frozen_is_fine_tuned_too() -> None:
    run = trained(methods.fedbabu("linear.*", local=Phase(optimizer=OPTIMIZER, batch_size=4)))
    curves = personalization_curve(run, STEEP)
    for client, name in enumerate(DATA.ids):
        assert list(curves.accuracy["own"][name]) == pytest.approx(reference(run, client, STEEP))


def test_what_rounds_left_frozen_is_judged_as_it_was_fine_tuned() -> None:
    run = simulate(Logits(), methods.fedbabu("linear.*"), DATA, rounds=1, cohort=3, engine="sequential")
    start, seen = run.net.initial()["linear.weight"], list[bool]()

    def noted(net: Net, params: Params, batch: Batch) -> torch.Tensor:
        seen.append(torch.equal(params["linear.weight"], start))
        return forward(net, params, batch)  # type: ignore[no-any-return]

    personalization_curve(run, STEEP, clients=["user-1"], predicts={"noted": noted})
    assert seen[0]
    assert not any(seen[1:])
    assert len(seen) > 1


def test_the_run_is_not_changed_and_nothing_is_uploaded(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("something was uploaded")

    monkeypatch.setattr(split_room.Split, "upload", refuse)
    server, private = clone(run.server), clone(run.private.read([0, 1, 2, 3]))
    personalization_curve(run, STEEP)
    assert all(bits(run.server[n]) == bits(v) for n, v in server.items())
    assert all(bits(run.private.read([0, 1, 2, 3])[n]) == bits(v) for n, v in private.items())


def test_before_the_first_step_it_is_the_run_s_own_evaluation(run: Run) -> None:
    curves = personalization_curve(run, STEEP)
    assert curves.scores().curve[0] == pytest.approx(run.evaluate("test")["accuracy_user_mean"])
    still = personalization_curve(run, replace(STEEP, ratio=0.0))
    assert set(still.scores().curve) == {still.scores().curve[0]}
    assert still.scores().curve[0] == curves.scores().curve[0]


def test_remark_4_fedavg_s_ag_is_the_curve_s_first_value() -> None:
    run = trained(methods.fedavg(local=Phase(optimizer=sgd(0.3), batch_size=4)))
    first = personalization_curve(run, STEEP).scores().curve[0]
    assert first == pytest.approx(run.evaluate("test", stage="shared")["accuracy_user_mean"])


def opposite(net: Net, params: Params, batch: Batch) -> torch.Tensor:
    return -net(params, batch)


def test_several_predictions_share_the_fine_tuning(run: Run) -> None:
    curves = personalization_curve(run, STEEP, predicts={"same": forward, "no": opposite})
    assert curves.accuracy["same"] == curves.accuracy["own"]
    assert curves.accuracy["no"] != curves.accuracy["own"]
    assert curves.accuracy["own"] == personalization_curve(run, STEEP).accuracy["own"]
    metrics = {r.metric for r in curves.records()}
    assert metrics == {"accuracy", "accuracy/same", "accuracy/no"}


def test_the_whole_curve_is_records(run: Run) -> None:
    curves = personalization_curve(run, STEEP, clients=["user-1"])
    (name,) = curves.examples
    records = curves.records()
    assert [r.split for r in records] == [f"personalization/{s}" for s in (0, 2, 4, 6)]
    assert [r.value for r in records] == list(curves.accuracy["own"][name])
    assert {(r.round, r.epoch, r.client, r.metric, r.n) for r in records} == {
        (3, 3.0, "user-1", "accuracy", 25)
    }


def test_one_phase_trains_everything_several_take_turns_on_their_own() -> None:
    names = ["linear.weight", "linear.bias", "user"]
    one = methods.furl("user", local=Phase(optimizer=OPTIMIZER, batch_size=4))
    (phase,) = STEEP.phases(one, names)
    assert (phase.trains, phase.steps, phase.batch_size, phase.examples) == ("all", 6, 4, "all")
    assert phase.loss == one.client.phases[0].loss
    assert (phase.optimizer.learning_rate, phase.optimizer.rates) == (0.15, (("user", 0.3),))
    assert (phase.optimizer.momentum, phase.optimizer.schedule) == (0.9, "constant")
    two = methods.fedrep("user", local=Phase(optimizer=sgd(0.3), batch_size=4))
    head, body = STEEP.phases(two, names)
    assert {*head.trains, *body.trains} == set(names)
    assert not {*head.trains} & {*body.trains}
    run = trained(two)
    assert personalization_curve(run, STEEP).scores().curve[0] == pytest.approx(
        run.evaluate("test")["accuracy_user_mean"]
    )


@pytest.mark.parametrize("kind", ["local", "fedprox", "ditto", "apfl", "lg_fedavg"])
def test_every_kind_of_method_has_a_curve(kind: str) -> None:
    make = methods.METHODS[kind]
    options: dict[str, Any] = {"local": Phase(optimizer=sgd(0.3), batch_size=4)}
    if kind == "lg_fedavg":
        options["private"] = "linear.*"
    run = trained(make(**options))
    scores = personalization_curve(run, STEEP).scores()
    assert 0 < scores.mean <= scores.max <= 1


def test_opted_out_examples_are_trained_on_too() -> None:
    method = methods.furl("user", local=Phase(optimizer=sgd(0.3), batch_size=4))
    found = []
    for opted_in in (True, False):
        data = classes(counts=(12, 9, 13, 7), kind="f8", test=25, opted_in=opted_in)
        run = simulate(Logits().double(), method, data, rounds=0)
        found.append(personalization_curve(run, STEEP).accuracy["own"])
    assert found[0] == found[1]


def test_clients_without_a_labelled_test_example_are_left_out_and_labels_are_counted() -> None:
    """They have test examples, whose tokens all are without a label: the whole run ended in a stack trace."""

    class Tags(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(4, 2)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.table(ids)

    ids = np.arange(24).reshape(8, 3) % 4
    label = ids % 2
    label[3], label[6:] = [1, -100, -100], -100
    owner, split = np.repeat(["a", "b"], 4), ["train", "train", "test", "test"] * 2
    data = FederatedData.from_columns(
        owner, {"ids": ids, "label": label}, split, {"task": "tokens", "classes": 2}
    )
    run = simulate(Tags(), methods.fedavg(local=Phase(optimizer=sgd(0.1))), data, rounds=1, cohort=2)
    found = personalization_curve(run, STEEP, progress=False)
    assert found.examples == {"a": 4}
    assert list(found.accuracy["own"]) == ["a"]
    with pytest.raises(ConfigError, match="No client has test examples with a label"):
        personalization_curve(run, STEEP, clients=["b"], progress=False)


def test_what_is_refused() -> None:
    for wrong in ({"ratio": -1.0}, {"steps": 0}, {"every": 0}, {"steps": 10, "every": 3}):
        with raises(ConfigError, **{"ratio": 0.01, "steps": 200, "every": 20, **wrong}):
            replace(FineTuning(), **wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"^The optimiser of.*'sgd'.*'adan'"):
        FineTuning(optimizer="adan")  # type: ignore[arg-type]
    untested = simulate(Logits(), methods.furl("user"), classes(kind="f4", test=0), rounds=0)
    with raises(ConfigError, said="No client has test examples with a label of", split="test"):
        personalization_curve(untested)
    numbers = pairs({"a": [(1, 1), (2, 2)]}, test=1)
    squared = methods.fedavg(local=Phase(loss=methods.terms.squared_error()))
    with raises(ConfigError, said="The personalisation curve measures accuracy;", task="regression"):
        personalization_curve(simulate(Scalar(), squared, numbers, rounds=0))
    rng = np.random.default_rng(0)
    columns = {"item": rng.integers(20, size=(6, 11)), "label": np.zeros(6, np.int64)}
    films = FederatedData.from_columns(
        [0] * 6, columns, ["train"] * 4 + ["valid", "test"], {"task": "ranking"}
    )
    with pytest.raises(ConfigError, match="measures accuracy; this task is a ranking"):
        personalization_curve(simulate(MatrixFactorization(20, 2), methods.furl("user"), films, rounds=0))


def test_fine_tuning_that_breaks_down_is_named() -> None:
    run = trained(methods.furl("user", local=Phase(optimizer=sgd(1.0), batch_size=4)))
    with pytest.raises(NonFiniteError, match=r"^Client 'user-0',.*NaN"):
        personalization_curve(run, FineTuning(ratio=1.5e308, steps=4, every=4))


def test_a_run_that_goes_on_keeps_its_protocol(tmp_path: Path) -> None:
    made = config(personalization={"ratio": 1.0, "steps": 4, "every": 2})
    run_config(made, out=tmp_path / "r", progress=False)
    other = made.model_copy(
        update={
            "personalization": config(personalization={"ratio": 0.5, "steps": 4, "every": 2}).personalization
        }
    )
    with raises(
        ConfigError,
        said="was made with another protocol of",
        lines="personalization.ratio: 1.0 in the run, 0.5 now",
    ):
        run_config(other, out=tmp_path / "r", resume=True, progress=False)
    run_config(made, out=tmp_path / "r", resume=True, progress=False)

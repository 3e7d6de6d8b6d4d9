"""Judging: every client's own model on its own examples, against a plain loop."""

from __future__ import annotations

import importlib
import math
import warnings
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedkeep import FederatedData, Phase, Run, declare, methods, sgd, simulate
from fedkeep.core.errors import DataError, MethodError, NonFiniteError
from fedkeep.core.run_files import read_info
from fedkeep.engines import to_records
from fedkeep.tasks import tasks_in
from tests.refusals import raises
from tests.tiny import Logits, Noisy, Slope, Unsaid, classes, pairs, parts, users


def loop(run: Run, split: str, clients: Any, default: bool = False) -> dict[str, float]:
    """Return accuracy, mean accuracy over clients, and loss, one example after the other."""
    right: dict[int, list[bool]] = {}
    losses = []
    for c in clients:
        values = dict(run.parameters(run.data.ids[c]))
        if default:
            values["user"] = torch.zeros_like(values["user"])
        for row in run.data.rows(c, split):
            x = torch.from_numpy(np.asarray(run.data.columns["x"][row])).to(values["user"].dtype)
            label = int(run.data.columns["label"][row])  # type: ignore[arg-type]
            logits = values["linear.weight"] @ x + values["linear.bias"] + values["user"]
            right.setdefault(c, []).append(int(logits.argmax()) == label)
            losses.append(float(torch.logsumexp(logits, 0) - logits[label]))
    everything = [r for rs in right.values() for r in rs]
    return {
        "accuracy": sum(everything) / len(everything),
        "accuracy_user_mean": sum(sum(rs) / len(rs) for rs in right.values()) / len(right),
        "loss": sum(losses) / len(losses),
    }


@pytest.mark.parametrize("chunk", [1, 5, 1024])
@pytest.mark.parametrize("kind", [Logits, Unsaid])
def test_evaluation_equals_a_plain_loop(
    kind: type[Logits], chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.import_module("fedkeep.engines.judge"), "CHUNK", chunk)
    data = classes(counts=(5, 9, 3, 7, 4, 6), valid=1, test=4)
    run = simulate(
        kind().double(),
        methods.furl("user", private_init=0.0, local=Phase(optimizer=sgd(0.5))),
        data,
        rounds=4,
        cohort=3,
        evaluate_every=0,
    )
    for split, clients in product(("train", "valid", "test"), (None, [3, 0], [5])):
        chosen = range(6) if clients is None else clients
        named = None if clients is None else users(clients)
        assert run.evaluate(split, clients=named) == pytest.approx(loop(run, split, chosen), abs=1e-12)
    assert run.evaluate("test", stage="shared") == pytest.approx(
        loop(run, "test", range(6), default=True), abs=1e-12
    )
    assert run.evaluate("test", stage="shared") != run.evaluate("test")


@pytest.mark.parametrize("kind", [Logits, Unsaid])
def test_a_model_that_does_not_fit_the_examples_is_an_error_that_says_whose(kind: type[Logits]) -> None:
    data = classes(counts=(5, 9, 3, 7, 4, 6), labels=4, test=1)
    data.columns["label"][:] = np.minimum(data.columns["label"], 2)  # type: ignore[index]
    for client in (1, 3, 4, 5):
        data.columns["label"][data.rows(client, "test")[0]] = 3  # type: ignore[index]
    with pytest.warns(UserWarning, match="test split alone"):
        run = simulate(kind(), methods.furl("user"), data, rounds=1, evaluate_every=0)
    with pytest.raises(MethodError) as error:
        run.evaluate("test", clients=users([1, 3, 4, 5]))
    whose, examples = (
        ("'user-1', 'user-3', 'user-4' and 1 more", "4 examples")
        if kind is Logits
        else ("'user-1'", "1 example")
    )
    facts = error.value.facts
    assert facts["who"] == f"Judging the test examples of {whose}"
    assert (facts["batch"], facts["why"]) == (f"a batch of {examples}", "Target 3 is out of bounds")


def test_clients_of_different_sizes_count_once_each_in_the_user_mean() -> None:
    data = FederatedData.from_columns(
        ["a"] * 4 + ["b"] * 2,
        {"x": np.zeros((6, 3)), "label": np.array([0, 0, 0, 0, 0, 1])},
        parts(1, 0, 3) + parts(1, 0, 1),
        meta={"task": "multiclass", "classes": 3},
    )
    model = Logits()
    with torch.no_grad():
        model.linear.bias.copy_(torch.tensor([5.0, 0.0, 0.0]))
    run = simulate(model, methods.furl("user", local=Phase(optimizer=sgd(0.0))), data, rounds=0)
    metrics = run.evaluate("test")
    assert (metrics["accuracy"], metrics["accuracy_user_mean"]) == (0.75, 0.5)
    with raises(DataError, count=2, split="valid"):
        run.evaluate("valid")
    assert run.evaluate(clients=["b"]) == run.evaluate(clients=run.clients[1:]) != run.evaluate(clients=["a"])
    assert run.evaluate(clients=("b", "a")) == run.evaluate()
    with pytest.raises(DataError, match="No client of these data has the id 'c'"):
        run.evaluate(clients=["c"])
    with pytest.raises(DataError, match="No client of these data has the id '1'"):
        run.judge(("own",), clients=["a", 1])


class Renormed(Unsaid):
    """Gives other logits in training, by an operation that vmap runs client by client, with a warning."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.renorm(x, 2, 0, 1e9)) * (3.0 if self.training else 1.0)


def test_clients_side_by_side_are_judged_as_one_after_the_other() -> None:
    data = classes(counts=[4] * 16)
    run = simulate(
        Renormed().double(), methods.furl("user"), data, rounds=1, engine="sequential", evaluate_every=0
    )
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = run.evaluate("test")
    assert [str(one.message) for one in said] == []
    assert found == pytest.approx(loop(run, "test", range(16)), abs=1e-12)


def test_dropout_and_batch_statistics_are_off() -> None:
    data = classes(kind="f4")
    run = simulate(Noisy(dropout=0.5), methods.furl("user"), data, rounds=2, cohort=4)
    counter = int(run.server["norm.num_batches_tracked"])
    assert run.evaluate() == run.evaluate()
    assert int(run.server["norm.num_batches_tracked"]) == counter


class Score(nn.Module):
    """Two logits, (0, x)."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([torch.zeros_like(x[:, 0]), self.w * x[:, 0]], 1)


def test_auc_is_the_share_of_pairs_in_order() -> None:
    rng = np.random.default_rng(1)
    x, label = np.round(rng.standard_normal((40, 1)), 1), rng.integers(0, 2, 40)
    data = FederatedData.from_columns(
        ["a"] * 15 + ["b"] * 25,
        {"x": x, "label": label},
        ["train"] + ["test"] * 39,
        meta={"task": "binary", "classes": 2},
    )
    run = simulate(Score(), methods.fedavg(local=Phase(optimizer=sgd(0.0))), data, rounds=0)
    metrics = run.evaluate()
    positive, negative = x[1:, 0][label[1:] == 1], x[1:, 0][label[1:] == 0]
    expected = np.mean([(p > n) + 0.5 * (p == n) for p in positive for n in negative])
    assert metrics["auc"] == pytest.approx(expected, abs=1e-12)
    assert metrics["accuracy"] == pytest.approx(np.mean((x[1:, 0] > 0) == label[1:]), abs=1e-12)


@pytest.mark.parametrize("outputs", [2, 3])
def test_what_is_not_a_number_is_no_right_answer(outputs: int) -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            out = self.w + x.expand(-1, outputs).clone()
            out[:, 0] = torch.where(x[:, 0] > 0, math.nan, 1.0)  # argmax would call these class 0
            return out

    data = FederatedData.from_columns(
        ["a"] * 5,
        {"x": np.array([[0.0], [0.0], [0.0], [1.0], [1.0]]), "label": np.array([0, 0, 1, 0, 1])},
        ["train"] + ["test"] * 4,
        meta={"task": "binary" if outputs == 2 else "multiclass", "classes": outputs},
    )
    run = simulate(Broken(), methods.fedavg(local=Phase(optimizer=sgd(0.0))), data, rounds=0)
    assert run.judge(("own",), "test")[0].of("own").right().tolist() == [1.0, 0.0, 0.0, 0.0]
    if outputs == 2:
        with pytest.raises(NonFiniteError, match="auc: a score is NaN"):
            run.evaluate()
    else:
        found = run.evaluate()
        assert (found["accuracy"], math.isnan(found["loss"])) == (0.25, True)


def test_regression_by_hand() -> None:
    data = pairs({"a": [(0, 0), (1, 3)], "b": [(0, 0), (2, 2), (3, 6)]}, test=1)
    run = simulate(
        Slope(),
        methods.fedavg(local=Phase(loss=methods.terms.squared_error(), optimizer=sgd(0.0))),
        data,
        rounds=1,
    )
    metrics = run.evaluate()  # errors −2 and −3
    assert metrics == pytest.approx({"loss": 6.5, "rmse": math.sqrt(6.5), "mae": 2.5})
    judged = run.judge(("own",), "test")
    assert judged[0].of("own").per_client() == {0: (2.0, 1), 1: (3.0, 1)}


def test_a_model_of_the_wrong_shape_is_refused_not_broadcast() -> None:
    class Column(Slope):
        def forward(self, x: Tensor) -> Tensor:
            return self.w * x

    data = pairs({"a": [(0, 0), (1, 3), (2, 2)]}, test=2)
    with pytest.raises(MethodError, match=r"\(2, 1\)"):
        simulate(Column(), methods.fedavg(), data, rounds=0).evaluate()


def test_several_tasks_have_metrics_of_their_own(tmp_path: Path) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.user = nn.Parameter(torch.zeros(2))
            self.w = nn.Parameter(torch.ones(()))
            declare(self, per_example=("user",))

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"topic": self.w * x[:, :2] + self.user, "stars": self.w * x[:, 2]}

    data = FederatedData.from_columns(
        ["a"] * 3 + ["b"] * 3,
        {
            "x": np.array([[1, 0, 2.0]] * 6, "f4"),
            "topic": np.array([0, 0, 1, 0, 0, -1]),
            "stars": np.array([0, 2, 5, 0, 2, 2.0]),
        },
        parts(1, 0, 2) * 2,
        meta={
            "task": "multiclass",
            "classes": 2,
            "tasks": {
                "topic": {"task": "multiclass", "label": "topic"},
                "stars": {"task": "regression", "label": "stars"},
            },
        },
    )
    loss = methods.terms.multi_task(
        {
            "topic": methods.terms.cross_entropy("topic", "topic"),
            "stars": methods.terms.squared_error("stars", "stars"),
        }
    )
    method = methods.furl("user", local=Phase(loss=loss, optimizer=sgd(0.0)))
    run = simulate(Two(), method, data, rounds=1, out=tmp_path / "run")
    assert read_info(tmp_path / "run")["data"]["task"] == {"topic": "multiclass", "stars": "regression"}
    metrics = run.evaluate()
    assert metrics["accuracy/topic"] == pytest.approx(2 / 3)  # one of four has no label
    assert metrics["rmse/stars"] == pytest.approx(1.5)  # errors 0, −3, 0, 0
    assert [t.metric("loss") for t in tasks_in(data.meta)] == ["loss/topic", "loss/stars"]
    assert {r.metric for r in run.history if r.split == "test" and r.client} == {
        "accuracy/topic",
        "rmse/stars",
    }


def test_several_tasks_have_a_kind_and_labels_each() -> None:
    data = classes(counts=(5,), test=3)
    for task, message in (
        ({"label": "label"}, r"meta\['tasks'\]\['a'\]\['task'\] must be 'multiclass', .* got None\."),
        ({"task": "binary"}, r"meta\['tasks'\]\['a'\] must name its column of labels as 'label'"),
    ):
        data.meta["tasks"] = {"a": task}
        with pytest.raises(DataError, match=message):
            tasks_in(data.meta)


def test_records_name_clients_and_counts() -> None:
    data = classes(counts=(5, 9), test=3, ids=("Zoë", "b/../c"))
    run = simulate(Logits(), methods.furl("user"), data, rounds=1, evaluate_every=0)
    judged = run.judge(("own",), "test")
    lines = to_records(judged, "own", 7, 3.5, "test", per_client=True)
    assert {(r.round, r.epoch, r.split) for r in lines} == {(7, 3.5, "test")}
    own = {r.client: (r.value, r.n) for r in lines if r.client is not None}
    assert own == {data.ids[c]: judged[0].per_client("own")[data.ids[c]] for c in (0, 1)}
    assert {r.n for r in lines if r.client is None} == {6}
    assert to_records(judged, "own", 7, 3.5, "test", per_client=False) == [
        r for r in lines if r.client is None
    ]


def test_a_method_whose_shared_part_cannot_predict_says_so() -> None:
    run = simulate(Logits().double(), methods.local(), classes(), rounds=1)
    assert run.evaluate()["accuracy"] >= 0
    with raises(MethodError, said="cannot predict alone, so it has no global", method="local"):
        run.evaluate(stage="shared")

"""kNN-Per: numbers by hand, once more in plain NumPy, and a memory that stays where it is."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedkeep import methods, sgd
from fedkeep.core.net import Net
from fedkeep.core.params import Batch, Params
from fedkeep.data import opt_out
from fedkeep.methods import Phase, Recall
from fedkeep.methods.knn_per import Memorize
from tests.methods import parts
from tests.methods.plain import DATA, examples_of
from tests.tiny import classes, same_bits

LOCAL = Phase(batch_size=4, epochs=2, optimizer=sgd(0.3))


trained = partial(parts.trained, rounds=4)


def numpy_of(w: Params, batch: Batch) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return features, probabilities and classes of examples."""
    a = {n: v.numpy() for n, v in w.items()}
    found = np.tanh(batch["x"].numpy() @ a["encoder.weight"].T + a["encoder.bias"])
    scores = np.exp(found @ a["classifier.weight"].T + a["classifier.bias"])
    return found, scores / scores.sum(1, keepdims=True), batch["label"].numpy()


def near(memory: np.ndarray, classes: np.ndarray, x: np.ndarray, k: int) -> np.ndarray:
    """Return the distribution of the nearest, one example."""
    far = np.sqrt(((memory - x) ** 2).sum(1))
    found = np.zeros(3)
    for i in np.argsort(far)[:k]:
        found[classes[i]] += math.exp(-far[i])
    return found / found.sum()


def losses(w: Params, k: int, client: int, split: str, weight: float) -> np.ndarray:
    """Return the cross-entropy of each of a client's examples."""
    memory, _, known = numpy_of(w, examples_of(client))
    found, shared, labels = numpy_of(w, examples_of(client, split))
    mixed = [
        weight * near(memory, known, x, k) + (1 - weight) * p for x, p in zip(found, shared, strict=True)
    ]
    return np.array([-math.log(p[y]) if p[y] > 0 else math.inf for p, y in zip(mixed, labels, strict=True)])


@pytest.mark.parametrize("k", [1, 3, 10])
def test_predictions_equal_a_loop_over_neighbours(k: int) -> None:
    run = trained(methods.knn_per(k, weight=0.3, local=LOCAL))
    expected = [losses(run.server, k, c, "test", 0.3) for c in range(len(DATA))]
    assert run.evaluate()["loss"] == pytest.approx(np.concatenate(expected).mean(), abs=1e-12)
    for c, mine in enumerate(expected):
        assert run.evaluate(clients=[f"user-{c}"])["loss"] == pytest.approx(mine.mean(), abs=1e-12)
    fedavg = trained(methods.fedavg(local=LOCAL))
    assert same_bits(run.server, fedavg.server)
    assert run.evaluate(stage="shared") == fedavg.evaluate() != run.evaluate()


def test_every_client_chooses_its_weight_on_its_validation_examples() -> None:
    run, chosen = trained(methods.knn_per(3, local=LOCAL)), []
    for c in range(len(DATA)):
        grid = [w / 10 for w in range(11)]
        best = min(
            grid, key=lambda w: np.minimum(losses(run.server, 3, c, "valid", w), -math.log(1e-12)).sum()
        )
        chosen.append(best)
        expected = losses(run.server, 3, c, "test", best)
        if np.isfinite(expected).all():
            assert run.evaluate(clients=[f"user-{c}"])["loss"] == pytest.approx(expected.mean(), abs=1e-12)
    assert len(set(chosen)) > 1
    none = classes(valid=0)
    half, free = (
        trained(methods.knn_per(3, weight=w, local=LOCAL), data=none).evaluate() for w in (0.5, None)
    )
    assert half == free


def test_the_mixture_by_hand() -> None:
    """At distances 1 and 2 an example of class 1 and one of class 0, p even: 0.4 · e⁻¹ / (e⁻¹ + e⁻²) + 0.6 / 2."""

    class Same(nn.Module):
        def features(self, x: Tensor) -> Tensor:
            return x

        def forward(self, x: Tensor) -> Tensor:
            return torch.zeros(len(x), 2, dtype=x.dtype)

    memory = {
        "client/keys": torch.tensor([[1.0], [-2.0], [9.0]]).double(),
        "client/classes": torch.tensor([1, 0, 0]),
        "client/weight": torch.tensor(0.4, dtype=torch.float64),
    }
    batch = {"x": torch.zeros(1, 1).double()}
    found = Memorize(neighbours=2, weight=0.4, label="label")(Net(Same()), memory, batch).exp()
    expected = 0.4 * math.exp(-1) / (math.exp(-1) + math.exp(-2)) + 0.3
    assert found[0].tolist() == pytest.approx([1 - expected, expected], abs=1e-14)
    nearest = Memorize(neighbours=1, weight=1.0, label="label")
    sure = nearest(Net(Same()), {**memory, "client/weight": torch.tensor(1.0).double()}, batch)
    assert sure[0, 1] == 0
    assert bool(torch.isfinite(sure).all())


class Twofold(nn.Module):
    """``forward`` is twice what a head, which nothing else calls, makes of the features."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.head(x)

    def features(self, x: Tensor) -> Tensor:
        return x

    def head(self, features: Tensor) -> Tensor:
        return torch.cat([torch.zeros_like(features), features], 1)


def test_the_shared_model_is_the_one_that_is_trained() -> None:
    """At x = ln 2 its class 1 has p = 4/5; its only neighbour has class 0: 0.5 · 0 + 0.5 · 4/5."""
    memory = {
        "client/keys": torch.zeros(1, 1),
        "client/classes": torch.tensor([0]),
        "client/weight": torch.tensor(0.5),
    }
    found = Memorize(1, 0.5, "label")(Net(Twofold()), memory, {"x": torch.tensor([[math.log(2.0)]])}).exp()
    assert found[0].tolist() == pytest.approx([0.6, 0.4], abs=1e-6)


def test_a_memory_takes_opted_out_examples_and_is_neither_stored_nor_sent() -> None:
    data = opt_out(classes(), 0.5, by="example", seed=1)
    run = trained(methods.knn_per(3, weight=1.0, local=LOCAL), data=data)
    assert run.evaluate()["accuracy"] == pytest.approx(
        np.mean([hit(run.server, c) for c in range(len(data))]), abs=1e-12
    )
    assert run.kept("user-0").params == {}
    assert run.kept("user-0").state == {}
    assert {r.value for r in run.history if r.metric == "upload_bytes"} == {
        sum(8.0 * v.numel() for v in run.server.values())
    }


def hit(w: Params, client: int) -> float:
    """Return the share of a client's test examples whose nearest three say their class."""
    memory, _, known = numpy_of(w, examples_of(client))
    found, _, labels = numpy_of(w, examples_of(client, "test"))
    return float(
        np.mean([near(memory, known, x, 3).argmax() == y for x, y in zip(found, labels, strict=True)])
    )


def test_a_client_without_examples_predicts_as_the_shared_model() -> None:
    data = classes(counts=(5, 0, 6, 7))
    run = trained(methods.knn_per(3, weight=1.0, local=LOCAL), data=data, cohort=3)
    assert run.evaluate(clients=["user-1"]) == run.evaluate(clients=["user-1"], stage="shared")
    assert run.evaluate(clients=["user-0"]) != run.evaluate(clients=["user-0"], stage="shared")


@dataclass(frozen=True)
class Constant:
    """Predicts the class that most of a client's own examples have: any method may look at these."""

    def recall(self, given: Recall) -> Params:
        counts = torch.zeros(3).double()
        for label, _ in given.outputs(lambda net, params, batch: batch["label"], "train"):
            counts += torch.bincount(label, minlength=3)
        assert not given.net.module.training
        return {"counts": counts}

    def __call__(self, net: Net, params: Params, batch: Batch) -> Tensor:
        counts = params.get("client/counts", torch.zeros(3).double())
        return counts.expand(len(batch["label"]), 3)


def test_any_method_may_recall_and_a_new_clients_model_does_not() -> None:
    run = trained(methods.fedper("classifier.*", local=LOCAL).but(predict=Constant()))
    device = run.local_device()
    for c in range(len(DATA)):
        most = torch.bincount(examples_of(c)["label"], minlength=3).argmax()
        expected = float((examples_of(c, "test")["label"] == most).double().mean())
        (judged,) = device.judge(run.orders([f"user-{c}"]), "test", ("own", "default"))
        assert judged.of("own").metrics()["accuracy"] == pytest.approx(expected)
        assert judged.of("default").metrics()["loss"] == pytest.approx(math.log(3))

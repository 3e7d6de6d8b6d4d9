"""FedProto: numbers by hand, a reduction as an equality, and once more in plain PyTorch."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedkeep import FederatedData, Method, Run, methods, sgd, simulate
from fedkeep.core.errors import ConfigError
from fedkeep.core.net import Net
from fedkeep.experiments.build import build_method
from fedkeep.experiments.config import MethodConfig
from fedkeep.methods import Global, Phase, Reduced
from fedkeep.methods.fedproto import NearPrototypes, new_prototypes, predict_nearest
from tests.engines.reference import close, cohorts, mini_batches, rows_of, step
from tests.methods.parts import Parts
from tests.tiny import bits, classes, job, results

LABELS = 8
DATA = classes(labels=LABELS)
LOCAL = Phase(batch_size=4, epochs=2, optimizer=sgd(0.2, momentum=0.9))
State = dict[str, Tensor]


def model() -> nn.Module:
    return Parts(labels=LABELS).double()


def trained(method: Method, data: FederatedData = DATA, net: nn.Module | None = None, **options: Any) -> Run:
    settings: dict[str, Any] = {"rounds": 5, "cohort": 4, "seed": 3, **options}
    return simulate(net or model(), method, data, **settings).last


def hidden(w: State, x: Tensor) -> Tensor:
    return torch.tanh(x @ w["encoder.weight"].T + w["encoder.bias"])


def plain(lam: float, rounds: int) -> tuple[list[State], dict[int, Tensor], list[set[int]]]:
    """Return every client's model, the prototypes by class, and the classes known after each round."""
    own = [{n: v.detach().clone() for n, v in model().state_dict().items()} for _ in range(len(DATA))]
    known: dict[int, Tensor] = {}
    course = []
    for number, cohort in enumerate(cohorts(DATA, 4, rounds, 3)):
        of: dict[int, list[Tensor]] = {}
        for c in cohort:
            w = {n: v.clone().requires_grad_() for n, v in own[c].items()}
            stepper = torch.optim.SGD(list(w.values()), 0.2, momentum=0.9)
            for batch in mini_batches(DATA, c, LOCAL, 3, number):
                z = hidden(w, batch["x"])
                logits = z @ w["classifier.weight"].T + w["classifier.bias"]
                loss = nn.functional.cross_entropy(logits, batch["label"])
                for row, j in zip(z, batch["label"].tolist(), strict=True):
                    if j in known:
                        loss = loss + lam * nn.functional.mse_loss(row, known[j]) / len(z)
                step(stepper, loss)
            own[c] = {n: v.detach() for n, v in w.items()}
            batch = DATA.batch(rows_of(DATA, c))
            for row, j in zip(hidden(own[c], batch["x"]), batch["label"].tolist(), strict=True):
                of.setdefault(j, []).append(row)
        known |= {j: torch.stack(rows).mean(0) for j, rows in of.items()}
        course.append(set(known))
    return own, known, course


@pytest.mark.parametrize("predict", ["prototype", "head"])
def test_rounds_equal_plain_pytorch(predict: Any) -> None:
    run = trained(methods.fedproto(1.7, predict=predict, local=LOCAL))
    own, known, course = plain(1.7, 5)
    assert len(course[0]) < LABELS, "after the first round some class is not known"
    assert run.server == {}
    assert {j for j, there in enumerate(run.state["known"].tolist()) if there} == set(known)
    for j, prototype in known.items():
        torch.testing.assert_close(run.state["prototypes"][j], prototype, rtol=0, atol=1e-10)
    right = total = 0
    for c, mine in enumerate(own):
        close(run.kept(str(DATA.ids[c])).params, mine)
        rows = DATA.rows(c, "test")
        batch = DATA.batch(np.arange(rows.start, rows.stop))
        for row, j in zip(hidden(mine, batch["x"]), batch["label"].tolist(), strict=True):
            near = min(known, key=lambda k: float((row - known[k]).norm()))
            best = int((mine["classifier.weight"] @ row + mine["classifier.bias"]).argmax())
            right += (near if predict == "prototype" else best) == j
            total += 1
    assert run.evaluate()["accuracy"] == pytest.approx(right / total, abs=1e-12)
    assert math.isfinite(run.evaluate()["loss"])


def test_the_server_by_hand() -> None:
    """The mean is over examples; a class that nobody had stays as it was."""
    old = torch.tensor([[1.0, 1.0], [5.0, 5.0], [0.0, 0.0]])
    server = Global(params={}, state={"prototypes": old, "known": torch.tensor([True, True, False])})
    state = {
        "sums": torch.tensor([[2.0, 4.0], [0.0, 0.0], [3.0, 0.0]]),
        "counts": torch.tensor([0.5, 0.0, 1.5]),
    }
    after = new_prototypes(server, Reduced(changes={}, state=state)).state
    assert after["prototypes"].tolist() == [[4.0, 8.0], [5.0, 5.0], [2.0, 0.0]]
    assert after["known"].tolist() == [True, True, True]
    after = new_prototypes(server, Reduced(changes={}, state={n: 0 * v for n, v in state.items()})).state
    assert after["known"].tolist() == [True, True, False]


class Same(nn.Module):
    """Features are the columns themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(2, dtype=torch.float64))

    def features(self, x: Tensor) -> Tensor:
        return x * self.w

    def head(self, features: Tensor) -> Tensor:
        return 0 * features


def test_the_loss_and_the_prediction_by_hand() -> None:
    net = Net(Same())
    sent = {
        "server/prototypes": torch.tensor([[1.0, 0.0], [9.0, 9.0]]).double(),
        "server/known": torch.tensor([True, False]),
    }
    batch = {"x": torch.tensor([[3.0, 1.0], [0.0, 0.0]]).double(), "label": torch.tensor([0, 1])}
    value = NearPrototypes(lam=0.5)(net, net.initial(), batch, sent)
    assert float(value) == pytest.approx(math.log(2) + 0.5 * (4 + 1) / 2 / 2, abs=1e-14)
    found = predict_nearest(net, {**net.initial(), **sent}, batch)
    lowest = math.log(torch.finfo(torch.float64).tiny)
    assert found.tolist() == [[0.0, lowest], [0.0, lowest]]
    known = {**sent, "server/known": torch.tensor([True, True])}
    assert predict_nearest(net, {**net.initial(), **known}, batch).tolist() == [
        [0.0, 5.0 - 100.0],
        [0.0, 1.0 - 162.0],
    ]
    none = {**sent, "server/known": torch.tensor([False, False])}
    assert predict_nearest(net, {**net.initial(), **none}, batch).tolist() == [[0.0, 0.0], [0.0, 0.0]]


def test_sums_and_counts_alone_leave() -> None:
    method = methods.fedproto(local=LOCAL)
    for result in results(job(model(), method, DATA), [0, 1, 2]):
        deltas = result.upload.deltas
        assert {n: tuple(v.shape) for n, v in deltas.items()} == {
            "server/sums": (8, 4),
            "server/counts": (8,),
        }
        assert result.upload.weight == 1
        labels = DATA.batch(rows_of(DATA, result.client))["label"]
        assert deltas["server/counts"].tolist() == torch.bincount(labels, minlength=8).tolist()
        sent = b"".join(bits(v) for v in deltas.values())
        assert not any(bits(v) in sent for v in result.kept.values())


def test_opted_out_examples_are_in_no_prototype() -> None:
    data = classes(labels=LABELS, opted_in=True)
    inside = np.asarray(data.columns["opted_in"])[rows_of(data, 1)]
    assert 0 < inside.sum() < len(inside)
    (result,) = results(job(model(), methods.fedproto(local=LOCAL), data), [1])
    assert float(result.upload.deltas["server/counts"].sum()) == inside.sum()


def test_what_is_refused() -> None:
    with pytest.raises(ConfigError, match="'fedproto' has no server optimiser"):
        build_method(MethodConfig.model_validate({"kind": "fedproto", "server_optimizer": {"kind": "sgd"}}))

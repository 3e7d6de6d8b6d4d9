"""Class weights: the numbers of torch's weighted cross-entropy, by hand, on every engine; no NaN where nothing weighs."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedkeep import FederatedData, Phase, methods, sgd, simulate
from fedkeep.core.errors import MethodError
from fedkeep.core.net import Net
from fedkeep.methods.mixture import as_likelihood
from fedkeep.methods.terms import Term, cross_entropy
from tests.methods.test_terms import LABELS, LOGITS, LOSSES, Given, Tasks, value
from tests.refusals import raises
from tests.tiny import Logits, classes, run_by

ENGINES = ["sequential", "vectorised", "workers", "centralised"]


def test_by_hand() -> None:
    """Weights 1 and 3, labels 1, 1, 0: (3 ln 4/3 + 3 ln 5 + ln 2) / 7."""
    batch = {"x": LOGITS, "label": LABELS}
    expected = (3 * LOSSES[0] + 3 * LOSSES[1] + LOSSES[2]) / 7
    assert value(cross_entropy(class_weights=[1, 3]), batch) == pytest.approx(expected, abs=1e-15)
    weight = torch.tensor([1.0, 0.0, 2.0])  # of examples: the second is padding
    expected = (3 * LOSSES[0] + 2 * LOSSES[2]) / 5
    assert value(cross_entropy(class_weights=[1, 3]), batch | {"weight": weight}) == pytest.approx(
        expected, abs=1e-15
    )


def test_smoothed_by_hand() -> None:
    """Softmax 3/4 and 1/4, label 1, weights 1 and 3: (0.9 · 3 ln 4/3 + 0.1 · 1 ln 4) / 3, as torch has it."""
    batch = {"x": LOGITS[:1], "label": LABELS[:1]}
    expected = (0.9 * 3 * math.log(4 / 3) + 0.1 * math.log(4)) / 3
    term = cross_entropy(smoothing=0.2, class_weights=[1, 3])
    assert value(term, batch) == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
@pytest.mark.parametrize("weights", [[0.5, 2.0, 7.0], [0.0, 1.0, 1.0]])
def test_as_torch(weights: list[float], smoothing: float) -> None:
    torch.manual_seed(0)
    x, label = torch.randn(20, 3, dtype=torch.float64), torch.randint(0, 3, (20,))
    expected = nn.functional.cross_entropy(
        x, label, torch.tensor(weights).double(), label_smoothing=smoothing
    )
    for given in (weights, np.array(weights), torch.tensor(weights)):
        term = cross_entropy(smoothing=smoothing, class_weights=given)  # type: ignore[arg-type]
        assert value(term, {"x": x, "label": label}) == pytest.approx(float(expected), rel=1e-14)


def test_tokens_and_tasks_without_a_label() -> None:
    torch.manual_seed(0)
    x, label = torch.randn(4, 5, 3, dtype=torch.float64), torch.randint(0, 3, (4, 5))
    label[0, 2:] = label[3] = -100
    weights = torch.tensor([0.5, 2.0, 7.0], dtype=torch.float64)
    expected = nn.functional.cross_entropy(x.flatten(0, 1), label.flatten(), weights, ignore_index=-100)
    term = cross_entropy(class_weights=[0.5, 2.0, 7.0])
    assert value(term, {"x": x, "label": label}) == pytest.approx(float(expected), rel=1e-14)
    several = cross_entropy("topic", "topic", class_weights=[1, 3])
    batch = {"x": LOGITS, "topic": torch.tensor([1, -1, 0])}
    assert value(several, batch, Tasks()) == pytest.approx((3 * LOSSES[0] + LOSSES[2]) / 4, abs=1e-15)


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_labels_that_all_weigh_nothing(smoothing: float) -> None:
    """torch divides by 0 here."""
    net, term = Net(Given()), cross_entropy(smoothing=smoothing, class_weights=[1.0, 0.0])
    params = {n: v.clone().requires_grad_() for n, v in net.initial().items()}
    found = term(net, params, {"x": LOGITS[:2], "label": LABELS[:2]}, {})
    found.backward()  # type: ignore[no-untyped-call]
    assert float(found.detach()) == 0.0
    assert float(params["w"].grad) == 0.0  # type: ignore[arg-type]


def test_sixteen_bits() -> None:
    """The sum of these weights is beyond float16, and so is a weighted loss."""
    x = torch.tensor([[4.0, -4.0]] * 8, dtype=torch.float16)
    net = Net(Given().half())
    batch = {"x": x, "label": torch.tensor([1] * 4 + [0] * 4)}
    found = cross_entropy(class_weights=[1.0, 20_000.0])(net, net.initial(), batch, {})
    expected = nn.functional.cross_entropy(x.double(), batch["label"], torch.tensor([1.0, 20_000.0]).double())
    assert float(found) == pytest.approx(float(expected), rel=1e-6)


def test_as_many_as_classes() -> None:
    with raises(MethodError, count=3, classes=2):
        value(cross_entropy(class_weights=[1, 2, 3]), {"x": LOGITS, "label": LABELS})
    with pytest.raises(MethodError, match="mix='logprob' knows no class weights"):
        as_likelihood(cross_entropy(class_weights=[1, 2]))


class ByHand(Term):
    """torch's weighted mean, in training."""

    reads_parameters = False

    def __call__(self, net: Any, params: Any, batch: Any, received: Any) -> Tensor:
        logits = net(params, batch)
        return nn.functional.cross_entropy(logits, batch["label"], logits.new_tensor(WEIGHTS))


WEIGHTS = [0.5, 2.0, 7.0]


def trained(loss: Term, data: FederatedData, engine: str, model: nn.Module | None = None) -> Any:
    method = methods.furl("user", local=Phase(loss=loss, optimizer=sgd(0.3), batch_size=4, epochs=2))
    workers = 2 if engine == "workers" else None
    return simulate(
        model or Logits().double(),
        method,
        data,
        rounds=2,
        cohort=3,
        seed=1,
        **run_by(engine),
        workers=workers,
        progress=False,
    )


def losses(run: Any) -> list[float]:
    return [r.value for r in run.history if (r.split, r.metric) == ("train", "loss")]


@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_trains_as_torch_would(engine: str) -> None:
    data = classes()  # mini-batches of different sizes, so that some are padded
    plain = trained(ByHand(), data, "centralised" if engine == "centralised" else "sequential")
    ours = trained(cross_entropy(class_weights=WEIGHTS), data, engine)
    for name, wanted in plain.server.items():
        assert torch.allclose(ours.server[name], wanted, rtol=0, atol=1e-12)
    assert losses(ours) == pytest.approx(losses(plain), rel=1e-12)


@pytest.mark.parametrize("kind", [torch.float64, torch.float16])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_client_whose_examples_weigh_nothing(engine: str, kind: torch.dtype) -> None:
    """It changes nothing, and no other client's numbers break."""
    rng, owner = np.random.default_rng(0), np.repeat(["a", "b", "c", "d"], [5, 9, 4, 6])
    label = np.where(owner == "b", 2, rng.integers(0, 2, len(owner)))
    columns = {"x": rng.standard_normal((len(owner), 3)), "label": label}
    data = FederatedData.from_columns(owner, columns, ["train"] * len(owner), {"classes": 3})
    run = trained(cross_entropy(class_weights=[1.0, 5.0, 0.0]), data, engine, Logits().to(kind))
    assert all(bool(v.isfinite().all()) for v in run.server.values())
    assert np.isfinite(losses(run)).all()
    if engine != "centralised":
        assert torch.equal(run.parameters("b")["user"], Logits().to(kind).user)

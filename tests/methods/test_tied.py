"""Methods that copy parts of a model, with weights that several parts share."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedkeep import Method, methods, sgd, simulate
from fedkeep.core.errors import MethodError
from fedkeep.methods import Phase
from fedkeep.methods.branches import TwoBranches
from fedkeep.methods.kteps import BranchLoss, PredictBranches
from tests.engines.reference import mini_batches
from tests.methods.parts import Parts, descend, linear
from tests.tiny import classes, everyone

DATA = classes()
LOCAL = Phase(batch_size=4, epochs=2, optimizer=sgd(0.3))
State = dict[str, Tensor]


class Tied(Parts):
    """x → encoder → tanh → classifier of the same weight."""

    def __init__(self) -> None:
        super().__init__(3, 3, 3)
        self.classifier.weight = self.encoder.weight


class Twice(Tied):
    """x → two layers of the same weight → classifier."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(5)
            self.second, self.classifier = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.encoder.weight

    def features(self, x: Tensor) -> Tensor:
        return torch.tanh(self.second(super().features(x)))


def trained(model: nn.Module, method: Method, engine: str = "sequential", rounds: int = 1) -> Any:
    return simulate(
        model.double(), method, DATA, rounds=rounds, cohort=6, seed=3, engine=engine, progress=False
    )


def branches(state: State, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return both branches' logits: one classifier has the encoder's weight, the other one its own."""
    found = torch.tanh(linear(state, "encoder", x))
    shared = found @ state["encoder.weight"].T + state["classifier.bias"]
    return shared, linear(state, "private.classifier", found)


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_a_private_classifier_is_no_longer_tied(engine: str) -> None:
    plain = TwoBranches(projections=False)
    phase = LOCAL.but(loss=BranchLoss(plain, diversity=0, transfer=0))
    method = methods.kteps(noise=0).on_client(phases=(phase,))
    method = method.but(extend=plain, predict=PredictBranches(plain, "p"), predict_shared=None)
    run = trained(Tied(), method, engine)
    start = {n: v.detach() for n, v in plain(Tied().double()).named_parameters()}
    assert "private.classifier.weight" in start

    def loss(state: State, batch: State) -> Tensor:
        both = branches(state, batch["x"])
        return sum((nn.functional.cross_entropy(g, batch["label"]) for g in both), torch.zeros(()))

    kept, right, losses = everyone(run.private, 6), 0, []
    for c in range(6):
        batches = list(mini_batches(DATA, c, method.client.phases[0], 3, 0))
        state = descend(start, [""], batches, loss, 0.3)
        for name in kept:
            torch.testing.assert_close(kept[name][c], state[name], rtol=0, atol=1e-12)
        rows = DATA.rows(c, "test")
        test = DATA.batch(torch.arange(rows.start, rows.stop).numpy())
        own = {n: v[c] for n, v in kept.items()}
        logits = branches({**run.server, **own}, test["x"])[1]
        losses.append(nn.functional.cross_entropy(logits, test["label"], reduction="none"))
        right += int((logits.argmax(1) == test["label"]).sum())
    assert run.evaluate()["loss"] == pytest.approx(float(torch.cat(losses).mean()), abs=1e-12)
    assert run.evaluate()["accuracy"] == right / len(torch.cat(losses))


def test_layers_that_share_a_weight_share_it_in_a_copy() -> None:
    method = methods.kteps(0.5, 0.5, copies=("encoder", "second", "classifier"), local=LOCAL)
    run = trained(Twice(), method, rounds=2)
    kept = {name.split(".", 1)[1] for name in everyone(run.private, 6)}
    assert {"encoder.weight", "encoder.bias", "second.bias"} <= kept
    assert "second.weight" not in kept


def test_fedcp_refuses_a_head_that_shares_a_weight_with_the_body() -> None:
    with pytest.raises(MethodError, match="'encoder.weight' and.*'classifier.weight'"):
        trained(Tied(), methods.fedcp(local=LOCAL))
    within = methods.fedcp().extend(Twice())  # the body's own ties stay
    assert within.second.weight is within.encoder.weight


def test_fedala_refuses_an_upper_layer_that_shares_a_weight_with_a_lower_one() -> None:
    with pytest.raises(MethodError, match=r"'classifier.weight', which is.*'encoder.weight'"):
        trained(Tied(), methods.fedala("classifier.*", local=LOCAL))
    both = trained(Tied(), methods.fedala(("encoder.weight", "classifier.*"), local=LOCAL), rounds=3)
    assert {"mix.encoder.weight", "mix.classifier.bias"} <= set(everyone(both.private, 6))

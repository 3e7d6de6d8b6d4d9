"""FedALA: numbers by hand, a reduction as an equality, and once more in plain PyTorch."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedkeep import Method, methods, sgd
from fedkeep.core.errors import MethodError
from fedkeep.engines import Stream
from fedkeep.engines.batches import batches
from fedkeep.experiments.build import build_method
from fedkeep.experiments.config import MethodConfig
from fedkeep.methods import Phase
from fedkeep.methods.fedala import AddWeights, mixed
from tests.engines.reference import averaged, close, cohorts, rows_of, step
from tests.methods import parts
from tests.methods.parts import Parts, Words
from tests.refusals import raises
from tests.tiny import classes, everyone, same_bits

DATA = classes()
LOCAL = Phase(batch_size=4, epochs=2, optimizer=sgd(0.2, momentum=0.9))
UPPER = ("classifier.weight", "classifier.bias")
State = dict[str, Tensor]


def ala(rate: float = 3.0, **options: Any) -> Method:
    options = {"tolerance": 0.02, "most_passes": 5, "local": LOCAL, **options}
    return methods.fedala("classifier.*", rate=rate, **options)


trained = partial(parts.trained, rounds=6)


def loss_of(w: State, x: Tensor, label: Tensor) -> Tensor:
    hidden = torch.tanh(x @ w["encoder.weight"].T + w["encoder.bias"])
    return nn.functional.cross_entropy(hidden @ w["classifier.weight"].T + w["classifier.bias"], label)


class Plain:
    """The server, and what each client keeps: its last upper layers and W, or nothing yet."""

    def __init__(self, rate: float, tolerance: float, most: int) -> None:
        self.rate, self.tolerance, self.most = rate, tolerance, most
        self.server = {n: v.detach().clone() for n, v in Parts().double().state_dict().items()}
        self.initial = dict(self.server)
        self.last: list[State | None] = [None] * len(DATA)
        self.weights = [{n: torch.ones_like(self.server[n]) for n in UPPER} for _ in range(len(DATA))]
        self.seen, self.passes = [0] * len(DATA), list[int]()

    def mixture(self, client: int, weights: State | None = None) -> State:
        last, share = self.last[client], weights or self.weights[client]
        if last is None:
            return dict(self.server)
        return self.server | {n: last[n] + (self.server[n] - last[n]) * share[n] for n in UPPER}

    def learn(self, client: int, round: int) -> None:
        rows, losses = rows_of(DATA, client), [math.inf]
        whole = DATA.batch(rows)
        for number in range(self.most if self.seen[client] == 1 else 1):
            draws = Stream(3, f"start/{number}/{DATA.ids[client]}", round)
            for chosen in batches(DATA, rows, Phase(batch_size=4), draws, 0):
                share = {n: v.clone().requires_grad_() for n, v in self.weights[client].items()}
                batch = DATA.batch(chosen)
                loss_of(self.mixture(client, share), batch["x"], batch["label"]).backward()  # type: ignore[no-untyped-call]
                for n, v in share.items():
                    assert v.grad is not None
                    self.weights[client][n] = (v.detach() - self.rate * v.grad).clamp(0, 1)
            losses.append(float(loss_of(self.mixture(client), whole["x"], whole["label"])))
            if losses[-2] - losses[-1] < self.tolerance:
                break
        if self.seen[client] == 1:
            self.passes.append(len(losses) - 1)

    def train(self, client: int, round: int) -> State:
        w = {n: v.clone().requires_grad_() for n, v in self.mixture(client).items()}
        stepper = torch.optim.SGD(list(w.values()), 0.2, momentum=0.9)
        for chosen in batches(DATA, rows_of(DATA, client), LOCAL, Stream(3, DATA.ids[client], round), 0):
            batch = DATA.batch(chosen)
            step(stepper, loss_of(w, batch["x"], batch["label"]))
        return {n: v.detach() for n, v in w.items()}

    def run(self, rounds: int) -> Plain:
        for number, cohort in enumerate(cohorts(DATA, 4, rounds, 3)):
            results = []
            for c in cohort:
                if self.seen[c]:
                    self.learn(c, number)
                results.append(self.train(c, number))
                self.last[c] = {n: results[-1][n] for n in UPPER}
                self.seen[c] += 1
            self.server = averaged(results, [float(len(rows_of(DATA, c))) for c in cohort])
        return self

    def test_loss(self) -> float:
        found = []
        for c in range(len(DATA)):
            rows = DATA.rows(c, "test")
            batch = DATA.batch(torch.arange(rows.start, rows.stop).numpy())
            found += [float(loss_of(self.mixture(c), batch["x"], batch["label"]))] * len(batch["label"])
        return sum(found) / len(found)


def test_rounds_equal_plain_pytorch() -> None:
    run, plain = trained(ala()), Plain(3.0, 0.02, 5).run(6)
    close(run.server, plain.server)
    for c, last in enumerate(plain.last):
        kept = run.kept(str(DATA.ids[c]))
        assert last is not None
        assert int(kept.state["rounds"]) == plain.seen[c] == 3
        close({n: kept.params[f"mix.{n}"] for n in UPPER}, plain.weights[c])
        close({n: kept.state[f"last.{n}"] for n in UPPER}, last)
    assert run.evaluate()["loss"] == pytest.approx(plain.test_loss(), abs=1e-9)
    learned = everyone(run.private, 6)["mix.classifier.weight"]
    assert 0 <= float(learned.min()) < float(learned.max()) == 1
    assert len(set(plain.passes)) > 1, "some clients' weights converge in fewer passes than others'"


def test_weights_of_one_are_fedavg_to_the_bit() -> None:
    fedavg = trained(methods.fedavg(local=LOCAL))
    ones = trained(ala(rate=0))
    assert same_bits(ones.server, fedavg.server)
    assert ones.evaluate() == fedavg.evaluate()
    other = trained(ala())
    assert not same_bits(other.server, fedavg.server)
    # In a client's first round there is nothing to mix.
    assert same_bits(trained(ala(), rounds=2).server, trained(methods.fedavg(local=LOCAL), rounds=2).server)


def test_the_mixture_by_hand() -> None:
    params = {
        "w": torch.tensor([4.0, 4.0, 4.0]),
        "client/last.w": torch.tensor([2.0, 2.0, 2.0]),
        "mix.w": torch.tensor([0.25, 0.0, 1.0]),
        "body": torch.tensor(7.0),
    }
    assert {n: v.tolist() for n, v in mixed(params).items()} == {"w": [2.5, 2.0, 4.0]}


def test_the_weights_stand_under_the_names_of_what_they_mix() -> None:
    module = AddWeights(("classifier.*",))(Parts().double())
    added = {n: v for n, v in module.named_parameters() if n.startswith("mix.")}
    assert {n.removeprefix("mix."): v.shape for n, v in added.items()} == {
        n: v.shape for n, v in Parts().named_parameters() if n in UPPER
    }
    assert all(v.dtype == torch.float64 and bool((v == 1).all()) for v in added.values())


def test_what_is_refused() -> None:
    with pytest.raises(MethodError) as error:
        AddWeights(("clasifier.*",))(Parts())
    names = ["encoder.weight", "encoder.bias", *UPPER]
    assert str(error.value) == f"layers='clasifier.*' matches no trainable parameter; they are {names}."
    with raises(MethodError, name="embedding.weight"):
        AddWeights(("*",))(Words())


def test_a_configuration_can_name_it() -> None:
    options = {"layers": ["classifier.*"], "rate": 2.0, "most_passes": 7, "batch_size": 5}
    method = build_method(MethodConfig(kind="fedala", **options))  # type: ignore[arg-type]
    start: Any = method.client.start
    assert (method.extend, start.most) == (AddWeights(("classifier.*",)), 7)
    assert start.phase.optimizer == sgd(2.0, bounds={"mix.*": (0.0, 1.0)})
    assert method.client.phases[0].batch_size == start.phase.batch_size == 5

"""FedAvg's and FURL's relatives once more in plain PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedkeep import FederatedData, Method, WeightedMean, methods, sgd, simulate
from fedkeep.engines import Stream
from fedkeep.engines.batches import batches
from fedkeep.experiments.personalize import adapt_clients, cold_start
from fedkeep.methods import Phase
from tests.engines.reference import averaged, close, cohorts, rows_of, step
from tests.fitting import fit_private
from tests.methods.parts import Deep
from tests.methods.table import DATA, ROWS, trained
from tests.tiny import bits, everyone, users

State = dict[str, Tensor]
Client = Callable[["Plain", nn.Module, State, int, int], float]


class Plain:
    """Federated training with private names, in modules and ``torch.optim``; a client's round is given."""

    def __init__(
        self, model: nn.Module, method: Method, data: FederatedData, private: str | tuple[str, ...]
    ) -> None:
        self.model, self.method, self.data, self.private = model.double(), method, data, private
        self.server = self.only(model.state_dict(), False)
        self.own = [self.only(model.state_dict(), True) for _ in range(len(data))]
        self.share = [0.3] * len(data)  # α of APFL

    def only(self, state: State, private: bool) -> State:
        return {n: v.detach().clone() for n, v in state.items() if n.startswith(self.private) == private}

    def draw(self, client: int, number: int, round: int) -> Iterator[tuple[Tensor, Tensor]]:
        name = Stream(3, self.data.ids[client], round)
        for chosen in batches(
            self.data, rows_of(self.data, client), self.method.client.phases[number], name, number
        ):
            batch = self.data.batch(chosen)
            yield batch["x"], batch["label"]

    def steps(
        self,
        local: nn.Module,
        names: Any,
        rate: float,
        batches: Any,
        extra: Callable[[nn.Module], Tensor] | None = None,
    ) -> None:
        stepper = torch.optim.SGD([p for n, p in local.named_parameters() if n.startswith(names)], rate)
        for x, label in batches:
            local.zero_grad()
            loss = nn.functional.cross_entropy(local(x), label)
            (loss if extra is None else loss + extra(local)).backward()
            stepper.step()

    def run(self, client: Client, rounds: int = 3, uniform: bool = False) -> Plain:
        for number, cohort in enumerate(cohorts(self.data, 4, rounds, 3)):
            results, weights = [], []
            for c in cohort:
                local = copy.deepcopy(self.model).train()
                local.load_state_dict({**self.server, **self.own[c]}, strict=False)
                weight = client(self, local, self.server, c, number)
                results.append(self.only(local.state_dict(), False))
                self.own[c] = self.only(local.state_dict(), True)
                weights.append(1.0 if uniform else weight)
            self.server = averaged(results, weights)
        return self


def count(plain: Plain, client: int) -> float:
    return float(len(rows_of(plain.data, client)))


def fedprox_client(plain: Plain, local: nn.Module, received: State, c: int, number: int) -> float:
    def pull(model: nn.Module) -> Tensor:
        return sum(
            (0.35 * (p - received[n]).pow(2).sum() for n, p in model.named_parameters()), torch.zeros(())
        )

    plain.steps(local, "", 0.3, plain.draw(c, 0, number), pull)
    return count(plain, c)


def joint_client(plain: Plain, local: nn.Module, received: State, c: int, number: int) -> float:
    plain.steps(local, "", 0.3, plain.draw(c, 0, number))
    return count(plain, c)


def fedrep_client(plain: Plain, local: nn.Module, received: State, c: int, number: int) -> float:
    plain.steps(local, "head.", 0.5, plain.draw(c, 0, number))
    plain.steps(local, ("body.", "norm."), 0.3, plain.draw(c, 1, number))
    return count(plain, c)


def fedrecon_client(plain: Plain, local: nn.Module, received: State, c: int, number: int) -> float:
    local.load_state_dict(
        {n: v for n, v in plain.model.state_dict().items() if n.startswith("head.")}, strict=False
    )
    plain.steps(local, "head.", 0.5, plain.draw(c, 0, number))
    query = list(plain.draw(c, 1, number))
    plain.steps(local, "body.", 0.3, query)
    return float(sum(len(label) for _, label in query))


@pytest.mark.parametrize("weighting", ["examples", "uniform"])
@pytest.mark.parametrize(
    ("name", "private", "client"),
    [
        ("fedprox", (), fedprox_client),
        ("fedper", ("head.",), joint_client),
        ("lg_fedavg", ("body.",), joint_client),
        ("fedbn", ("norm.",), joint_client),
        ("fedrep", ("head.",), fedrep_client),
        ("fedrecon", ("head.",), fedrecon_client),
    ],
)
def test_three_rounds_equal_plain_pytorch(
    name: str, private: tuple[str, ...], client: Client, weighting: Any
) -> None:
    make, method = ROWS[name]
    run = simulate(
        make().double(), method.on_server(reduce=WeightedMean(by=weighting)), DATA, rounds=3, cohort=4, seed=3
    ).last
    plain = Plain(make().double(), method, DATA, private).run(client, uniform=weighting == "uniform")
    assert run.server.keys() == plain.server.keys()
    close(run.server, plain.server)
    kept = everyone(run.private, 6)
    for c, state in enumerate(plain.own):
        assert kept.keys() == state.keys()
        close({n: v[c] for n, v in kept.items()}, state)
    start = make().double().state_dict()
    assert all(not torch.equal(run.server[n], start[n]) for n in run.server if n.endswith("weight"))


def ditto_step(plain: Plain, w: nn.Module, v: nn.Module, received: State, c: int, number: int) -> None:
    plain.steps(w, "", 0.3, plain.draw(c, 0, number))

    def pull(model: nn.Module) -> Tensor:
        return sum(
            (0.2 * (p - received[n]).pow(2).sum() for n, p in model.named_parameters()), torch.zeros(())
        )

    plain.steps(v, "", 0.3, plain.draw(c, 1, number), pull)


def apfl_step(plain: Plain, w: nn.Module, v: nn.Module, received: State, c: int, number: int) -> None:
    for x, label in plain.draw(c, 0, number):
        middle = copy.deepcopy(w)
        with torch.no_grad():
            for m, a, b in zip(middle.parameters(), v.parameters(), w.parameters(), strict=True):
                m.copy_(plain.share[c] * a + (1 - plain.share[c]) * b)
        for model in (w, middle):
            model.zero_grad()
            nn.functional.cross_entropy(model(x), label).backward()
        slope = 0.0
        with torch.no_grad():
            for m, a, b in zip(middle.parameters(), v.parameters(), w.parameters(), strict=True):
                slope += float((m.grad * (a - b)).sum())
                a -= 0.3 * plain.share[c] * m.grad  # the chain rule's α, times the rate
                b -= 0.3 * b.grad
        plain.share[c] = min(max(plain.share[c] - 0.3 * slope, 0.0), 1.0)


@pytest.mark.parametrize(("name", "step"), [("ditto", ditto_step), ("apfl", apfl_step)])
def test_private_copies_equal_plain_pytorch(name: str, step: Callable[..., None]) -> None:
    run = trained(name).last
    plain = Plain(Deep().double(), ROWS[name][1], DATA, ())
    own = [copy.deepcopy(plain.model).train() for _ in range(len(DATA))]

    def client(plain: Plain, local: nn.Module, received: State, c: int, number: int) -> float:
        step(plain, local, own[c], received, c, number)
        return count(plain, c)

    plain.run(client, uniform=name == "apfl")
    close(run.server, plain.server)
    kept = everyone(run.private, 6)
    shared, mine = [], []
    for c, model in enumerate(own):
        close({n.removeprefix("own."): v[c] for n, v in kept.items() if n != "alpha"}, model.state_dict())
        share = 1.0 if name == "ditto" else plain.share[c]
        assert name == "ditto" or float(kept["alpha"][c]) == pytest.approx(share, abs=1e-12)
        state = {n: share * v + (1 - share) * run.server[n] for n, v in model.state_dict().items()}
        batch = DATA.batch(np.arange(DATA.rows(c, "test").start, DATA.rows(c, "test").stop))
        for losses, values in ((mine, state), (shared, run.server)):
            logits = torch.func.functional_call(plain.model, values, batch["x"])
            losses.append(nn.functional.cross_entropy(logits, batch["label"], reduction="none"))
    assert run.evaluate()["loss"] == pytest.approx(float(torch.cat(mine).mean()), abs=1e-10)
    assert run.evaluate(stage="shared")["loss"] == pytest.approx(float(torch.cat(shared).mean()), abs=1e-10)
    assert any(not torch.equal(kept[f"own.{n}"][0], v) for n, v in run.server.items())
    assert name == "ditto" or len(set(plain.share)) == 6


def test_a_fine_tuned_copy_equals_plain_pytorch() -> None:
    method = methods.fine_tuned(
        tune_optimizer=sgd(0.2), tune_epochs=3, local=Phase(batch_size=50, optimizer=sgd(0.3))
    )
    run = simulate(Deep(norm=True).double(), method, DATA, rounds=2, cohort=4, seed=3)
    before = {n: bits(v) for n, v in run.server.items()}
    rows = rows_of(DATA, 1)
    own = fit_private(run, "user-1", rows)
    local = Deep(norm=True).double().train()
    local.load_state_dict(run.server)
    stepper = torch.optim.SGD(local.parameters(), 0.2)
    for chosen in batches(DATA, rows, method.adapt.phases[0], Stream(3, "personalize/user-1", len(rows)), 0):
        batch = DATA.batch(chosen)
        step(stepper, nn.functional.cross_entropy(local(batch["x"]), batch["label"]))
    assert own.keys() == local.state_dict().keys()
    close(own, {n: v.detach() for n, v in local.state_dict().items()})
    assert not torch.equal(
        own["norm.running_mean"], run.server["norm.running_mean"]
    )  # the copy's own statistics
    assert before == {n: bits(v) for n, v in run.server.items()}
    adapted = adapt_clients(run, ["user-1"], begin="default")
    found, metrics = adapted.own("user-1"), adapted.evaluate()
    local.eval()
    batch = DATA.batch(np.arange(DATA.rows(1, "test").start, DATA.rows(1, "test").stop))
    local.load_state_dict(found)
    with torch.no_grad():
        assert metrics["loss"] == pytest.approx(
            float(nn.functional.cross_entropy(local(batch["x"]), batch["label"]))
        )
    curve = cold_start(run, users(range(6)), (0, None))
    assert curve.pooled[0] == run.evaluate(stage="before")["accuracy"]


def test_reconstruction_is_how_a_client_of_fedrecon_predicts() -> None:
    run = trained("fedrecon")
    rows = rows_of(DATA, 2)
    own = fit_private(run, "user-2", rows)
    local = Deep().double()
    local.load_state_dict({**local.state_dict(), **run.server})
    stepper = torch.optim.SGD(local.head.parameters(), 0.5)
    for chosen in batches(
        DATA, rows, run.method.adapt.phases[0], Stream(3, "personalize/user-2", len(rows)), 0
    ):
        batch = DATA.batch(chosen)
        step(stepper, nn.functional.cross_entropy(local(batch["x"]), batch["label"]))
    close(own, {f"head.{n}": v.detach() for n, v in local.head.state_dict().items()})

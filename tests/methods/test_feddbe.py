"""FedDBE: a number by hand, reductions as equalities, and once more in plain PyTorch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fedkeep import methods, sgd
from fedkeep.core.net import Net
from fedkeep.methods import Phase
from fedkeep.methods.feddbe import BIAS, MEAN, NearMean
from tests.engines.reference import averaged, close, step
from tests.methods.parts import Parts
from tests.methods.plain import DATA, State, count, examples_of, plan, trained
from tests.tiny import everyone

LOCAL = Phase(batch_size=4, epochs=2, optimizer=sgd(0.2, momentum=0.9))


def body(w: State, x: Tensor) -> Tensor:
    return torch.tanh(x @ w["encoder.weight"].T + w["encoder.bias"])


def logits(w: State, bias: Tensor, x: Tensor) -> Tensor:
    return (body(w, x) + bias) @ w["classifier.weight"].T + w["classifier.bias"]


def plain(kappa: float, momentum: float) -> tuple[State, Tensor, list[Tensor], set[int]]:
    """Return the server's model, the mean that was agreed on, every client's offset, and who trained."""
    server = {n: v.detach().clone() for n, v in Parts().double().state_dict().items()}
    offsets, agreed, seen = [torch.zeros(4).double() for _ in range(len(DATA))], None, set[int]()
    for cohort in plan(LOCAL):
        ends, means, weights = [], [], [float(count(k)) for k in cohort]
        for k, batches in cohort.items():
            w = {n: v.clone().requires_grad_() for n, v in {**server, BIAS: offsets[k]}.items()}
            stepper = torch.optim.SGD(list(w.values()), 0.2, momentum=0.9)
            running = torch.zeros(4).double()
            for batch in batches:
                loss = nn.functional.cross_entropy(logits(w, w[BIAS], batch["x"]), batch["label"])
                running = (1 - momentum) * running.detach() + momentum * body(w, batch["x"]).mean(0)
                if agreed is not None:
                    loss = loss + kappa * nn.functional.mse_loss(running, agreed)
                step(stepper, loss)
            ends.append({n: w[n].detach() for n in server})
            means.append({MEAN: running.detach()})
            offsets[k] = w[BIAS].detach()
        if agreed is None:
            agreed = averaged(means, weights)[MEAN]
        server, seen = averaged(ends, weights), seen | set(cohort)
    assert agreed is not None
    return server, agreed, offsets, seen


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
@pytest.mark.parametrize("momentum", [1.0, 0.3])
def test_rounds_equal_plain_pytorch(momentum: float, engine: str) -> None:
    run = trained(methods.feddbe(3.0, momentum=momentum, local=LOCAL), engine=engine)
    server, agreed, offsets, _ = plain(3.0, momentum)
    close(run.server, {**server, MEAN: agreed})
    kept = everyone(run.private, len(DATA))
    assert kept.keys() == {BIAS}
    close(kept, {BIAS: torch.stack(offsets)})
    other = trained(methods.feddbe(0.0, momentum=momentum, local=LOCAL)).server["encoder.weight"]
    assert float((other - run.server["encoder.weight"]).abs().max()) > 1e-3
    for shared, offset in ((False, offsets), (True, [torch.zeros(4).double()] * len(DATA))):
        losses = []
        for k in range(len(DATA)):
            batch = examples_of(k, "test")
            losses.append(nn.functional.cross_entropy(logits(server, offset[k], batch["x"]), batch["label"]))
        mean = float(torch.stack(losses).mean())  # every client has 3 test examples
        assert run.evaluate(stage="shared" if shared else "own")["loss"] == pytest.approx(mean, abs=1e-9)


def test_the_mean_is_agreed_on_once_and_then_stays() -> None:
    first, later = (trained(methods.feddbe(3.0, local=LOCAL), rounds=r).server for r in (1, 4))
    assert torch.equal(first[MEAN], later[MEAN])
    assert float(first[MEAN].abs().min()) > 0
    assert not torch.equal(first["encoder.weight"], later["encoder.weight"])


def test_the_penalty_by_hand() -> None:
    """Features tanh 0 = 0 and m = 2 before: m = ½ · 2 = 1, so 3 · ((1 − 0)² + (1 − 4)²) / 2 = 15 with κ = 3."""
    method = methods.feddbe(3.0, momentum=0.5)
    net = Net(method.extend(Parts(width=2).double()))
    params = {n: torch.zeros_like(v) for n, v in net.initial().items()} | {
        MEAN: torch.full((2,), 2.0).double()
    }
    batch = {"x": torch.ones(5, 3).double(), "label": torch.tensor([0, 1, 2, 0, 0])}
    sent = {MEAN: torch.tensor([0.0, 4.0]).double()}
    net.train(False)
    loss = {
        known: NearMean(3.0)(net, params, batch, {**sent, "server/known": torch.tensor(known)})
        for known in (False, True)
    }
    assert float(loss[True] - loss[False]) == pytest.approx(15.0, abs=1e-12)


def test_examples_of_no_weight_change_nothing() -> None:
    method = methods.feddbe(3.0, momentum=0.5)
    net = Net(method.extend(Parts().double()))
    params = {**net.initial(), MEAN: torch.zeros(4).double()}
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(0)).double()
    found = []
    for batch in (
        {"features": x},
        {"features": torch.cat((x, x[:1] + 9)), "weight": torch.tensor([1.0] * 5 + [0.0])},
    ):
        net.train(True)
        held = {n: v.clone() for n, v in params.items()}
        wide = {**batch, "features": torch.nn.functional.pad(batch["features"], (0, 1))}
        found.append((net.call("memory", held, wide), held[MEAN]))
    assert torch.allclose(found[0][0], found[1][0], rtol=0, atol=1e-15)
    assert torch.allclose(found[0][1], 0.5 * torch.nn.functional.pad(x.mean(0), (0, 1)), rtol=0, atol=1e-15)
    net.train(False)
    held = {n: v.clone() for n, v in params.items()}
    net.call("memory", held, {"features": torch.ones(2, 4).double()})
    assert torch.equal(held[MEAN], params[MEAN])

"""FedCP: numbers by hand, and once more in plain PyTorch."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from fedkeep import methods, sgd
from fedkeep.core.net import Net
from fedkeep.methods import Phase
from fedkeep.methods.fedcp import FirstCondition, condition_of, mmd2, separated
from tests.engines.reference import averaged, close, step
from tests.methods.parts import Parts
from tests.methods.plain import DATA, State, count, examples_of, plan, trained
from tests.tiny import everyone

LOCAL = Phase(batch_size=4, epochs=2, optimizer=sgd(0.2, momentum=0.9))
HEAD = ("classifier.weight", "classifier.bias")
OWN = tuple(f"private.{n}" for n in HEAD)


def body(w: State, x: Tensor) -> Tensor:
    return torch.tanh(x @ w["encoder.weight"].T + w["encoder.bias"])


def both(w: State, h: Tensor, v: Tensor) -> Tensor:
    """Return the logits, with everything written out."""
    v = v / torch.sqrt((v * v).sum())
    a = (h * v) @ w["policy.0.weight"].T + w["policy.0.bias"]
    mean = a.mean(1, keepdim=True)
    a = (a - mean) / torch.sqrt(((a - mean) ** 2).mean(1, keepdim=True) + 1e-5)
    a = torch.relu(a * w["policy.1.weight"] + w["policy.1.bias"])
    first, second = torch.exp(a[:, :4]), torch.exp(a[:, 4:])
    own, shared = first / (first + second), second / (first + second)
    return (own * h) @ w[OWN[0]].T + w[OWN[1]] + (shared * h) @ w[HEAD[0]].T + w[HEAD[1]]


def alike(x: Tensor, y: Tensor) -> Tensor:
    """Return MMD² by pairs."""

    def mean(a: Tensor, b: Tensor) -> Tensor:
        apart = (a[:, None] - b[None]).square().sum(2)
        return sum((torch.exp(-0.5 * apart / width) for width in (10, 15, 20, 50)), torch.zeros(())).mean()

    return mean(x, x) + mean(y, y) - 2 * mean(x, y)


def plain(start: State, lam: float) -> tuple[State, list[State]]:
    """Return the server's parts and every client's head."""
    server = {n: v for n, v in start.items() if n not in OWN}
    own = [{n: start[n] for n in OWN} for _ in range(len(DATA))]
    for cohort in plan(LOCAL):
        ends = []
        for k, batches in cohort.items():
            w = {n: v.detach().clone() for n, v in {**server, **own[k]}.items()}
            moving = [v.requires_grad_() for n, v in w.items() if n not in HEAD]
            stepper, v = torch.optim.SGD(moving, 0.2, momentum=0.9), own[k][OWN[0]].sum(0)
            for batch in batches:
                h = body(w, batch["x"])
                loss = nn.functional.cross_entropy(both(w, h, v), batch["label"])
                loss = loss + lam * alike(h, body(server, batch["x"]))
                step(stepper, loss)
            own[k] = {n: w[n].detach() for n in OWN}
            end = {n: w[n].detach() for n in server}
            ends.append({**end, **{n: (own[k][f"private.{n}"] + server[n]) / 2 for n in HEAD}})
        server = averaged(ends, [float(count(k)) for k in cohort])
    return server, own


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
@pytest.mark.parametrize("lam", [0.0, 4.0])
def test_rounds_equal_plain_pytorch(lam: float, engine: str) -> None:
    method = methods.fedcp(lam, local=LOCAL)
    run = trained(method, engine=engine)
    start = Net(method.extend(Parts().double())).initial()
    server, own = plain(start, lam)
    close(run.server, server)
    for name in ("policy.0.weight", HEAD[0]):
        assert float((server[name] - start[name]).abs().max()) > 1e-2
    kept = everyone(run.private, len(DATA))
    for k, mine in enumerate(own):
        close({n: kept[n][k] for n in OWN}, mine)
        batch = examples_of(k, "test")
        for shared, w in (
            (False, {**server, **mine}),
            (True, {**server, **{f"private.{n}": server[n] for n in HEAD}}),
        ):
            output = both(w, body(w, batch["x"]), w[OWN[0]].sum(0))
            expected = float(nn.functional.cross_entropy(output, batch["label"]))
            assert run.evaluate(clients=[f"user-{k}"], stage="shared" if shared else "own")[
                "loss"
            ] == pytest.approx(expected, abs=1e-9)


def test_the_condition_is_the_column_sums_of_the_own_head() -> None:
    class Long(Parts):
        def __init__(self) -> None:
            super().__init__(width=2)
            self.classifier = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 3))  # type: ignore[assignment]

    net = Net(Long())
    params = {
        "private.classifier.0.weight": torch.tensor([[1.0, 0.0], [0.0, 2.0]]),
        "private.classifier.2.weight": torch.tensor([[1.0, 0.0], [1.0, 1.0], [1.0, 1.0]]),
    }
    # column sums (3, 2), times the first layer (3, 4), of length 5
    assert condition_of(net, params, "classifier").tolist() == pytest.approx([0.6, 0.8])
    method = methods.fedcp()
    state = FirstCondition("classifier")(Net(method.extend(Parts().double())))
    sums = Parts().double().classifier.weight.detach().sum(0)
    assert torch.allclose(state["condition"], sums / sums.norm())


def test_both_heads_by_hand() -> None:
    """P gives (ln 3, 0) to the own half and 0 to the shared one, so s = (3/4, 1/2); both heads sum what they see."""
    method = methods.fedcp()
    net = Net(method.extend(Parts(width=2, labels=1).double()))
    params = {n: torch.zeros_like(v) for n, v in net.initial().items()}
    params["policy.1.bias"] = torch.tensor([math.log(3), 0.0, 0.0, -5.0], dtype=torch.float64)
    params[OWN[0]], params[HEAD[0]] = torch.ones(1, 2).double(), torch.full((1, 2), 10.0).double()
    output = separated(net, params, torch.tensor([[4.0, 8.0]]).double(), torch.ones(2).double(), {})
    assert output.tolist() == [[pytest.approx(3 + 4 + 10 * (1 + 4), abs=1e-12)]]


def test_likeness_by_hand_and_examples_of_no_weight() -> None:
    """One example each, 4 apart in squares: Σ 2 − 2 e^(−2/a)."""
    x, y = torch.zeros(1, 2).double(), torch.tensor([[2.0, 0.0]]).double()
    expected = sum(2 - 2 * math.exp(-2 / a) for a in (10, 15, 20, 50))
    assert float(mmd2(x, y, None)) == pytest.approx(expected, abs=1e-14)
    wide = mmd2(torch.cat((x, x + 3)), torch.cat((y, y - 7)), torch.tensor([1.0, 0.0]))
    assert float(wide) == pytest.approx(expected, abs=1e-14)
    assert float(mmd2(x, x, None)) == 0

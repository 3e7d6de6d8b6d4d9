"""MOON: a number by hand, reductions as equalities, and once more in plain PyTorch."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from fedkeep import methods, sgd
from fedkeep.core.net import Net
from fedkeep.methods import Phase
from fedkeep.methods.moon import Contrast
from fedkeep.methods.terms import squared_error
from tests.engines.reference import averaged, close, cohorts, mini_batches, rows_of, step
from tests.methods import parts
from tests.methods.parts import Normal, Parts
from tests.tiny import classes

DATA = classes()
LOCAL = Phase(batch_size=4, epochs=2, optimizer=sgd(0.2, momentum=0.9))
State = dict[str, Tensor]


trained = partial(parts.trained, rounds=6)


def hidden(w: State, x: Tensor) -> Tensor:
    return torch.tanh(x @ w["encoder.weight"].T + w["encoder.bias"])


def alike(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(1) / (a.pow(2).sum(1).sqrt() * b.pow(2).sum(1).sqrt())


def plain(mu: float, temperature: float, rounds: int) -> tuple[State, list[State]]:
    """Return the server's model and every client's last one."""
    server = {n: v.detach().clone() for n, v in Parts().double().state_dict().items()}
    last = [dict(server) for _ in range(len(DATA))]
    for number, cohort in enumerate(cohorts(DATA, 4, rounds, 3)):
        for c in cohort:
            w = {n: v.clone().requires_grad_() for n, v in server.items()}
            stepper = torch.optim.SGD(list(w.values()), 0.2, momentum=0.9)
            for batch in mini_batches(DATA, c, LOCAL, 3, number):
                z = hidden(w, batch["x"])
                near = torch.exp(alike(z, hidden(server, batch["x"])) / temperature)
                far = torch.exp(alike(z, hidden(last[c], batch["x"])) / temperature)
                logits = z @ w["classifier.weight"].T + w["classifier.bias"]
                loss = nn.functional.cross_entropy(logits, batch["label"])
                step(stepper, (loss - mu * (near / (near + far)).log().mean()))
            last[c] = {n: v.detach() for n, v in w.items()}
        server = averaged([last[c] for c in cohort], [float(len(rows_of(DATA, c))) for c in cohort])
    return server, last


def test_rounds_equal_plain_pytorch() -> None:
    run = trained(methods.moon(1.5, temperature=0.4, local=LOCAL))
    server, last = plain(1.5, 0.4, 6)
    close(run.server, server)
    for c, mine in enumerate(last):
        kept = run.kept(str(DATA.ids[c]))
        assert kept.params == {}
        assert kept.state.keys() == mine.keys()
        close(kept.state, mine)


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_in_the_first_round_of_all_it_has_no_gradient(engine: str) -> None:
    """The received and the previous model are the same then; nor do they move the statistics of a normalisation."""
    whole = Phase(batch_size=50, epochs=2, optimizer=sgd(0.3))
    ours, plain = (
        trained(m, Normal(), rounds=1, engine=engine).server
        for m in (methods.moon(5.0, local=whole), methods.fedavg(local=whole))
    )
    close({n: v for n, v in plain.items() if v.is_floating_point()}, ours, atol=1e-14)
    assert any("running" in n for n in plain)


def test_the_contrast_by_hand() -> None:
    class Same(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.eye(2, dtype=torch.float64))

        def features(self, x: Tensor) -> Tensor:
            return x @ self.w

        def head(self, features: Tensor) -> Tensor:
            return features.sum(1)

    turned = torch.tensor([[0.0, 1.0], [-1.0, 0.0]], dtype=torch.float64)
    batch = {"x": torch.tensor([[1.0, 0.0]], dtype=torch.float64), "label": torch.tensor([1.0])}
    net = Net(Same())
    params = {**net.initial(), "client/w": turned}
    value = Contrast(mu=2.0, temperature=0.5, loss=squared_error())(net, params, batch, net.initial())
    # s = 1 with the received model, 0 with the previous one: −log(e² / (e² + 1))
    assert float(value) == pytest.approx(2 * math.log(1 + math.exp(-2)), abs=1e-14)

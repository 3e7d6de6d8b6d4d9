"""Gradients clipped over all that is trained, or over each half by itself."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedkeep import Phase, averaging, declare, methods, sgd, simulate
from tests.tiny import classes, everyone

DATA = classes(counts=(6,))
BOUND, RATE = 0.05, 0.5


class Loud(nn.Module):
    """logits = W x + b + loudness · user: the louder, the larger the private gradient; at user = 0 nothing else differs."""

    def __init__(self, loudness: float) -> None:
        super().__init__()
        self.loudness = loudness
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.linear = nn.Linear(3, 3).double()
        self.user = nn.Parameter(torch.zeros(3, dtype=torch.float64))
        declare(self, per_example=("user",))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.loudness * self.user


def trained(loudness: float, over: str, engine: str = "sequential") -> tuple[Tensor, Tensor]:
    """Return the change of the federated half and of the private one after one step on all examples."""
    local = Phase(batch_size=100, optimizer=sgd(RATE), clip_norm=BOUND, clip_over=over)  # type: ignore[arg-type]
    method = methods.furl("user", local=local, server=averaging(by="uniform"))
    run = simulate(Loud(loudness), method, DATA, rounds=1, cohort=1, engine=engine, evaluate_every=0)
    start = dict(Loud(loudness).named_parameters())
    federated = torch.cat([(v - start[n]).flatten() for n, v in run.server.items()]).detach()
    return federated, everyone(run.private, 1)["user"][0]


def slopes(loudness: float) -> tuple[Tensor, Tensor]:
    """Return both halves' gradients, by torch alone."""
    model, batch = Loud(loudness), DATA.batch(DATA.rows(0, "train"))
    cross_entropy(model(batch["x"]), batch["label"]).backward()
    found = {n: p.grad for n, p in model.named_parameters()}
    user = found.pop("user")
    assert user is not None
    return torch.cat([v.flatten() for v in found.values() if v is not None]), user


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_each_half_is_clipped_by_itself(engine: str) -> None:
    federated, private = slopes(30.0)
    assert min(federated.norm(), private.norm()) > BOUND
    got = trained(30.0, "halves", engine)
    for change, slope in zip(got, (federated, private), strict=True):
        torch.testing.assert_close(change, -RATE * BOUND * slope / slope.norm(), rtol=1e-4, atol=0)
    whole = torch.cat([federated, private])
    torch.testing.assert_close(
        torch.cat(trained(30.0, "all", engine)), -RATE * BOUND * whole / whole.norm(), rtol=1e-4, atol=0
    )


def test_the_private_gradients_size_shows_in_uploads_over_all_and_not_over_halves() -> None:
    for loudness in (3.0, 30.0):
        quiet, loud = (trained(k, "halves")[0] for k in (1.0, loudness))
        assert torch.equal(quiet, loud)
    quiet, loud = (trained(k, "all")[0] for k in (1.0, 30.0))
    assert float(loud.norm() / quiet.norm()) < 0.2

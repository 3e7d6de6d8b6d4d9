"""How long a run will take: its mini-batches are counted as they are trained."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from torch import nn

from fedkeep import FederatedData, models, sgd
from fedkeep.experiments.ahead import A_ROUND, A_STEP, Ahead, ahead
from fedkeep.experiments.run_settings import RunSettings
from fedkeep.experiments.simulate import Simulation
from fedkeep.methods import METHODS, Adapt, Method, Phase


def simulation(method: Method, model: nn.Module | None = None, **settings: object) -> Simulation:
    """Six clients of ten training examples."""
    rng = np.random.default_rng(0)
    columns = {"x": rng.standard_normal((72, 3)).astype("f4"), "label": rng.integers(0, 3, 72)}
    made = FederatedData.from_columns(
        np.repeat(np.arange(6), 12),
        columns,
        (["train"] * 10 + ["valid", "test"]) * 6,
        meta={"task": "multiclass", "classes": 3},
    )
    return Simulation(model or models.Linear(3, 3), method, made, RunSettings(**settings))  # type: ignore[arg-type]


def local(**changes: object) -> Phase:
    return Phase(optimizer=sgd(0.1), batch_size=4, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("phase", "settings", "rounds", "steps"),
    [
        (local(), {"rounds": 5, "cohort": 2}, 5, 6),
        (local(epochs=2), {"epochs": 4, "cohort": 3}, 8, 18),
        (local(steps=7), {"rounds": 5, "cohort": 100}, 5, 42),
        (local(), {"rounds": 5, "centralised": True}, 5, 18),
    ],
)
def test_rounds_and_mini_batches(
    phase: Phase, settings: dict[str, object], rounds: int, steps: float
) -> None:
    found = ahead(simulation(METHODS["fedavg"](local=phase), **settings))
    assert (found.rounds, found.steps, found.later) == (rounds, steps, 0)
    assert found.step > A_STEP


def test_phases_add_up_and_rounds_behind_do_not_count() -> None:
    method = METHODS["furl"](private=("user",), local=local())
    one = ahead(simulation(method, rounds=5, cohort=2), done=2)
    assert (one.rounds, one.steps) == (3, 6 * len(method.client.phases))


def test_what_comes_after_the_rounds() -> None:
    method = METHODS["fedavg"](local=local())
    found = ahead(simulation(method, rounds=5, cohort=2), tuned=20)
    assert found.later == 6 * 20
    adapts = replace(method, adapt=Adapt(phases=(local(epochs=3),), everyone=True))
    assert ahead(simulation(adapts, rounds=5, cohort=2)).later == 6 * 9


def test_seconds() -> None:
    found = Ahead(rounds=1000, steps=10, later=50, step=2.0)
    assert found.seconds == pytest.approx(1000 * (A_ROUND + 20) + 100)
    assert "1,000 rounds of 10 mini-batches" in str(found)
    assert "5 h 35 min" in str(found)


def test_chance_and_buffers_stay() -> None:
    class Counts(models.Linear):
        def forward(self, batch):  # type: ignore[no-untyped-def]
            self.seen += 1
            return super().forward(batch)

    model = Counts(3, 3)
    model.register_buffer("seen", nn.Parameter(model.user.detach().sum() * 0, requires_grad=False))
    ahead(simulation(METHODS["fedavg"](local=local()), model, rounds=1))
    assert model.seen == 0

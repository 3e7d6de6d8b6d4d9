"""Series of numbers, (rows, steps, values a step): the usual model learns what only their order tells."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from fedkeep import methods
from fedkeep.core.errors import ConfigError
from fedkeep.data import FederatedData
from fedkeep.experiments.build import build_model, settled
from fedkeep.experiments.config import Config
from fedkeep.experiments.personalize.exported import load_model
from fedkeep.experiments.simulate import simulate
from fedkeep.models import SequenceClassifier

STEPS = 6


def pulses(clients: int = 20, each: int = 60) -> FederatedData:
    """Two pulses, each on a channel of its own; the label is which comes first.

    Positions are drawn alike for both, so sums, means and each step's own values say nothing alone.
    """
    draw, rows = np.random.default_rng(0), clients * each
    places = np.stack([draw.permutation(STEPS)[:2] for _ in range(rows)])
    x = np.zeros((rows, STEPS, 2), np.float32)
    x[np.arange(rows), places[:, 0], 0] = x[np.arange(rows), places[:, 1], 1] = 1
    label = (places[:, 0] < places[:, 1]).astype(np.int64)
    who = np.repeat(np.arange(clients), each)
    return FederatedData.from_columns(who, {"x": x, "label": label}).split_per_user()


def usual(data: FederatedData, **model: object) -> torch.nn.Module:
    config = Config.model_validate({"data": {"reader": "saved", "folder": "d"}, "model": model})
    return build_model(settled(config, data), data)


def test_the_order_of_steps_is_learned_exported_and_answered_by(tmp_path: Path) -> None:
    data = pulses()
    assert (data.columns["x"].sum(1) == 1).all()  # a bag of steps is the same for all
    model = usual(data)
    assert isinstance(model, SequenceClassifier)
    run = simulate(model, methods.fedavg(), data, epochs=20, cohort=2, engine="sequential")
    assert run.evaluate("test")["accuracy"] > 0.9
    run.export(tmp_path / "models", ["3"])
    back = load_model(tmp_path / "models", "3", model=usual(data))
    batch = data.batch(data.rows(data.index("3"), "test"))
    share = (back(batch["x"]).argmax(-1) == batch["label"]).float().mean()
    assert share > 0.8


@pytest.mark.parametrize(
    "method", ["furl", "fedper", "fedrep", "ditto", "fedbabu", "kteps", "mixture", "moon", "fedproto"]
)
def test_methods_train_on_series(method: str) -> None:
    data = pulses(4, 10)
    run = simulate(usual(data, hidden=4), getattr(methods, method)(), data, rounds=2, engine="sequential")
    assert 0 <= run.evaluate("test")["accuracy"] <= 1


def test_steps_behind_the_end_are_not_read() -> None:
    torch.manual_seed(0)
    model, x = SequenceClassifier(2, 3, hidden=4), torch.randn(3, 5, 2)
    length = torch.tensor([5, 2, 1])
    whole = model(x, length)
    assert torch.allclose(whole[1], model(x[1:2, :2])[0], atol=1e-6)
    changed = x.clone()
    changed[1, 2:] = changed[2, 1:] = 9.0
    assert torch.equal(model(changed, length), whole)


def test_another_number_of_values_a_step_is_refused() -> None:
    with pytest.raises(ConfigError, match="step_features") as error:
        usual(pulses(4, 10), kind="gru", step_features=3)
    assert "2" in str(error.value)

"""Attacks on data with several tasks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedkeep import attacks
from fedkeep.data import FederatedData
from fedkeep.experiments.attack import AttackRequest, attack
from fedkeep.experiments.config import parse_config


class Scores(nn.Module):
    """Logits of four classes, for whichever task is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.vector = nn.Parameter(torch.tensor([0.3, -0.2, 0.1, 0.0]))
        self.scale = nn.Parameter(torch.tensor([1.0, 2.0, 3.0, 4.0]))

    def forward(self, x: Tensor) -> Tensor:
        """Return logits, (B, 4)."""
        return x[:, :1].float() * self.scale + self.vector


def test_membership_is_of_the_task_whose_label_the_loss_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    columns = {"x": rng.normal(size=(32, 1)), "mood": rng.integers(0, 2, 32), "place": rng.integers(0, 4, 32)}
    tasks = {
        "mood": {"task": "binary", "label": "mood", "classes": 2},
        "place": {"task": "multiclass", "label": "place", "classes": 4},
    }
    data = FederatedData.from_columns(
        client=np.repeat(list("abcd"), 8),
        columns=columns,
        split=(["train"] * 6 + ["test"] * 2) * 4,
        meta={"tasks": tasks},
    )
    data.save(tmp_path / "saved")
    text = f"""
data = {{ reader = "saved", folder = {str(tmp_path / "saved")!r} }}
model = {{ kind = "{__name__}:Scores" }}
method = {{ kind = "furl", private = "vector", loss = {{ label = "place" }}, optimizer = {{ learning_rate = 0.0 }} }}
run = {{ rounds = 1, cohort = 4, engine = "sequential" }}
"""
    seen: list[np.ndarray[Any, Any]] = []
    measured = attacks.membership
    monkeypatch.setattr(attacks, "membership", lambda *given: seen.append(given[0]) or measured(*given))
    found = attack(
        parse_config(text), AttackRequest(attacks=("membership",), epsilons=(), shadows=3)
    ).findings
    assert {
        f.note.rpartition(", ")[2] for f in found if f.value is not None and f.protection != "secure"
    } == {"by the task 'place' alone"}
    train = np.arange(32).reshape(4, 8)[:, :6].ravel()
    out, place = Scores()(torch.tensor(data.columns["x"])), torch.tensor(data.columns["place"])
    loss = nn.functional.cross_entropy(out, place, reduction="none").detach().double().numpy()
    for scores in seen:  # every model is the first one, whose losses are plain torch's
        np.testing.assert_allclose(scores, np.tile(attacks.confidence(loss)[train], (3, 1)), rtol=1e-5)

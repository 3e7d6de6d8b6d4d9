"""Models of 16-bit numbers: losses are summed, and labels compared, in numbers of 32 bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedkeep import FederatedData, Phase, methods, sgd, simulate
from tests.tiny import run_by

HALVES = [torch.bfloat16, torch.float16]
STILL = methods.fedavg(local=Phase(loss=methods.terms.squared_error(), batch_size=1, optimizer=sgd(0.0)))


class Constant(nn.Module):
    def __init__(self, start: float) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.tensor(start))

    def forward(self, x: Tensor) -> Tensor:
        return x.squeeze(-1) * 0 + self.value


def numbers(label: list[float], clients: int = 2) -> FederatedData:
    labels, count = np.tile(label, clients), len(label)
    splits = (["train"] * (count - count // 2) + ["test"] * (count // 2)) * clients
    return FederatedData.from_columns(
        np.repeat(np.arange(clients), count), {"x": np.zeros((count * clients, 1)), "label": labels}, splits
    )


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
@pytest.mark.parametrize("kind", HALVES)
def test_many_losses_have_their_mean(kind: torch.dtype, engine: str) -> None:
    # Summed in bfloat16, 512 losses of 9 come to 2,048; in float16, the sum of 300 losses of 400 has no place.
    for label, steps in ((3.0, 512), (20.0, 300)):
        data = numbers([label] * (2 * steps))
        run = simulate(
            Constant(0.0).to(kind), STILL, data, rounds=1, cohort=2, **run_by(engine), progress=False
        )
        (loss,) = [r.value for r in run.history if (r.split, r.metric) == ("train", "loss")]
        assert loss == label**2


@pytest.mark.parametrize("engine", ["sequential", "vectorised", "centralised"])
def test_labels_are_not_rounded(engine: str) -> None:
    # bfloat16 has 1,000, 1,004 and 1,008.
    labels = [1001.0, 1002.0, 1003.0, 1005.0] * 2
    data, squares = numbers(labels), np.mean((np.array(labels) - 1000) ** 2)
    if engine == "vectorised":
        data.meta["tasks"] = {"y": {"task": "regression", "label": "label"}}
    model = Constant(1000.0).bfloat16()
    run = simulate(model, STILL, data, rounds=1, cohort=2, **run_by(engine), progress=False)
    (loss,) = [r.value for r in run.history if (r.split, r.metric) == ("train", "loss")]
    found = run.evaluate("test", metrics={"own": lambda out, label: float(np.mean((out - label) ** 2))})
    assert loss == squares
    assert [v for n, v in found.items() if n.startswith(("loss", "own"))] == [squares] * 2

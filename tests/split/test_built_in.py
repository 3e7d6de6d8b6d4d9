"""Every built-in method and every built-in network, with the split that it comes with, passes the checker and can move."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fedkeep import FederatedData, Method, Split, check_split, methods, models
from fedkeep.core.net import Net
from fedkeep.core.params import Batch
from fedkeep.engines.rehearsal import cannot_move, first_batches, first_values, losses
from tests.engines.test_conformance import CASES
from tests.tiny import texts


def checked(
    model: nn.Module, method: Method, data: FederatedData, whose: bool
) -> tuple[list[str], list[str]]:
    """Return violations and what no phase can move, as ``fedkeep check`` finds them."""
    net = Net(model)
    batches = first_batches(data, net, whose=whose)
    start, terms = first_values(net, method, 0), losses(net, method, data)
    reports = [check_split(model, method.split, batches, loss=term, start=start, trains=()) for term in terms]
    violations = [str(v) for report in reports for v in report.violations]
    return violations, list(cannot_move(net, method, batches, start, terms))


# Parameters that no loss reaches. AspMTL: each task has a classifier of its own; the model's stands beside them. FedCP: the
# received head stands still, and a round's end moves it halfway to the client's own.
STAYS = {name: ["classifier.weight", "classifier.bias"] for name in ("asp_mtl", "fedcp")}


@pytest.mark.parametrize("name", [name for name in CASES if name != "a client sits out"])
def test_methods(name: str) -> None:
    case = CASES[name]
    model = case.model().double()
    method = case.method
    whole = method.extend(model) if method.extend else model
    violations, stays = checked(whole, method, case.data, name == "asp_mtl")
    assert violations == []
    assert stays == STAYS.get(name, [])


def images(classes: int, channels: int, side: int) -> list[Batch]:
    draw = torch.Generator().manual_seed(0)
    return [
        {
            "image": torch.randint(0, 256, (3, channels, side, side), generator=draw, dtype=torch.uint8),
            "label": torch.randint(0, classes, (3,), generator=draw),
        }
        for _ in range(2)
    ]


TEXT = first_batches(texts(counts=(6, 5)), Net(nn.Linear(1, 1)))
NUMBERS = [{"x": torch.randn(4, 3), "label": torch.tensor([0, 1, 2, k])} for k in range(2)]
RATINGS = [{"item": torch.tensor([0, 2, 1]), "label": torch.tensor([4.0, 1.0, 3.0 + k])} for k in range(2)]
NETWORKS: dict[str, tuple[Callable[[], nn.Module], Any, list[Batch]]] = {
    "BagOfWords": (lambda: models.BagOfWords(12, 3, 4, embedding_dim=5, mlp=6), "user", TEXT),
    "DocumentModel": (lambda: models.DocumentModel(12, 3, 4, embedding_dim=5, hidden=3, mlp=6), "user", TEXT),
    "TextClassifier": (lambda: models.TextClassifier(12, 3, embedding_dim=5, hidden=3), "classifier.*", TEXT),
    "Linear": (lambda: models.Linear(3, 3), "user", NUMBERS),
    "MatrixFactorization": (lambda: models.MatrixFactorization(3, 2), ("user", "user_bias"), RATINGS),
    "CNN": (lambda: models.CNN(4, 1, 16, widths=(3, 4), hidden=(16, 8)), "out.*", images(4, 1, 16)),
    "CifarCNN": (lambda: models.CifarCNN(10), "out.*", images(10, 3, 32)),
    "FashionCNN": (lambda: models.FashionCNN(10), "out.*", images(10, 1, 28)),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_networks(name: str) -> None:
    make, private, batches = NETWORKS[name]
    torch.manual_seed(0)
    loss = methods.terms.squared_error() if name == "MatrixFactorization" else methods.terms.cross_entropy()
    report = check_split(make(), Split(private), batches, loss=loss)
    assert report.probed == (1, 2, 3)
    assert report.violations == ()
    assert report.immovable == ()

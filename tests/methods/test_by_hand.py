"""Rounds of FedAvg's and FURL's relatives whose numbers are found by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedkeep import Method, methods, sgd, simulate
from fedkeep.core.errors import MethodError
from fedkeep.core.net import Net
from fedkeep.core.params import Params
from fedkeep.engines import Stream
from fedkeep.engines.batches import usable
from fedkeep.methods import Phase
from fedkeep.methods.fedprox import Proximal
from tests.engines.reference import rows_of
from tests.methods.table import DATA, Watched
from tests.tiny import Rounds, Scalar, classes, job, pairs

SQUARED = methods.terms.squared_error()


class Product(nn.Module):
    """ŷ = h·w·x from h = w = 1; h is the head."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.h = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.h * self.w * x[:, 0]


def test_the_proximal_term_by_hand() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(2))
            self.register_buffer("mean", torch.zeros(2))

    net = Net(Pair())
    params = {"w": torch.tensor([1.0, 2.0]), "mean": torch.tensor([9.0, 9.0])}
    value = float(Proximal(0.1)(net, params, {}, net.initial()))
    assert value == pytest.approx(0.25, abs=1e-7)  # ½ · 0.1 · (1 + 4); the norm unsquared would give 0.112
    with pytest.raises(MethodError, match="^mu must be at least 0; got -1"):
        methods.fedprox(-1)
    with pytest.raises(MethodError, match="no federated parameter to pull"):
        Proximal(0.1)(net, params, {}, {})


def one_client(method: Method, rows: list[tuple[float, float]], rounds: int = 1) -> tuple[float, Params]:
    model = Product() if method.split.is_private("h") else Scalar(1.0)
    run = simulate(model, method, pairs({"a": rows}), rounds=rounds)
    return float(run.server["w"]), {n: v[0] for n, v in run.private.read([0]).items()}


LOCAL = Phase(loss=SQUARED, optimizer=sgd(0.1))


def test_rounds_by_hand() -> None:
    """(x, y) = (1, 3), loss (ŷ − 3)², from 1: gradient −4, a step of 0.1 gives 1.4."""
    w, own = one_client(methods.fedper("h", local=LOCAL), [(1, 3)])
    assert (w, float(own["h"])) == pytest.approx((1.4, 1.4), abs=1e-14)
    w, own = one_client(methods.fedrep("h", head_epochs=1, local=LOCAL), [(1, 3)])
    assert (w, float(own["h"])) == pytest.approx((1.448, 1.4), abs=1e-14)  # 2 (1.4 − 3) 1.4 = −4.48
    w, own = one_client(methods.ditto(0.5, own_epochs=2, local=LOCAL), [(1, 3)])
    assert (w, float(own["own.w"])) == pytest.approx((1.4, 1.7), abs=1e-14)  # 2 (1.4 − 3) + 0.5 · 0.4 = −3
    w, own = one_client(methods.apfl(0.5, adaptive=False, local=LOCAL), [(1, 3)])
    assert (w, float(own["own.w"])) == pytest.approx((1.4, 1.2), abs=1e-14)
    w, _ = one_client(methods.fedprox(0.5, local=LOCAL.but(epochs=2)), [(1, 3)])
    assert w == pytest.approx(1.7, abs=1e-14)


def test_reconstruction_by_hand() -> None:
    """Two equal examples, one for each half; h starts from 1 in both rounds."""
    method = methods.fedrecon("h", reconstruction_steps=1, local=LOCAL)
    w, own = one_client(method, [(1, 3), (1, 3)])
    assert (w, float(own["h"])) == pytest.approx((1.448, 1.4), abs=1e-14)
    w, own = one_client(method, [(1, 3), (1, 3)], rounds=2)
    h = 1 - 0.1 * 2 * (1.448 - 3) * 1.448
    assert float(own["h"]) == pytest.approx(h, abs=1e-14)
    assert w == pytest.approx(1.448 - 0.1 * 2 * (h * 1.448 - 3) * h, abs=1e-14)
    data = pairs({"a": [(1, 3)] * 5, "b": [(1, 3)], "c": [(1, 3)] * 4})
    for halves, weights in ((True, [3, 1, 2]), (False, [5, 1, 4])):
        work, engine = job(Product(), methods.fedrecon("h", halves=halves, local=LOCAL), data), Watched()
        Rounds(work, engine)([0, 1, 2])
        assert engine.weights == weights


def test_halves_are_disjoint_complete_and_lasting() -> None:
    support, query = Phase(examples="support"), Phase(examples="query")
    data = classes(counts=(5, 9, 1), opted_in=True)
    for client in range(3):
        rows = rows_of(data, client)
        drawn = [
            [usable(data, rows, p, Stream(7, data.ids[client], r)).tolist() for p in (support, query)]
            for r in (0, 1)
        ]
        assert drawn[0] == drawn[1]
        inside = rows[np.asarray(data.columns["opted_in"])[rows]].tolist()  # type: ignore[index]
        assert sorted(drawn[0][0] + drawn[0][1]) == inside
        assert len(drawn[0][0]) == len(inside) // 2
    one, two = (usable(DATA, rows_of(DATA, 1), support, Stream(s, "user-1")).tolist() for s in (1, 2))
    assert sorted(one) != sorted(two)

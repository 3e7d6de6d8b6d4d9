"""Methods in 16-bit numbers: what only guards a division, or says "far", must be a number of theirs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedkeep import simulate
from fedkeep.methods.asp_mtl import orthogonality
from fedkeep.methods.dependence import hsic, mmd2
from fedkeep.methods.fedproto import predict_nearest
from fedkeep.methods.terms import unit
from tests.methods.table import ROWS
from tests.tiny import Rounds, classes, job

HALVES = [torch.float16, torch.bfloat16]


@pytest.mark.parametrize("name", ["kteps", "kteps_star", "gpfl", "fedmmd", "fedproto"])
@pytest.mark.parametrize("kind", HALVES)
def test_a_mini_batch_of_one_example_makes_no_nan(kind: torch.dtype, name: str) -> None:
    """Fewer than two examples have no distances, and a first round of FedProto knows no prototype."""
    make, method = ROWS[name]
    rounds = 2
    run = simulate(
        make().to(kind), method, classes((1, 4, 4, 8)), rounds=rounds, cohort=4, seed=3, engine="sequential"
    ).last
    values = [*run.server.values(), *run.state.values(), *run.private.read(range(4)).values()]
    assert all(bool(v.isfinite().all()) for v in values if v.is_floating_point())
    assert run.round == rounds


@pytest.mark.parametrize("kind", HALVES)
@pytest.mark.parametrize("options", [{}, {"unit": "median"}, {"normalised": True}])
def test_equal_features_are_independent(kind: torch.dtype, options: dict[str, object]) -> None:
    """Their distances are all 0, and so is what divides them."""
    same, other = torch.ones(3, 4).to(kind).requires_grad_(), torch.eye(3, 4).to(kind)
    value = hsic(same, other, **options)  # type: ignore[arg-type]
    assert abs(float(value.detach())) < 1e-3  # centring rounds
    (slope,) = torch.autograd.grad(value, [same])
    assert bool(slope.isfinite().all())


@pytest.mark.parametrize("kind", HALVES)
def test_one_example_is_alike_and_has_a_direction_or_none(kind: torch.dtype) -> None:
    one, zero = torch.ones(1, 4).to(kind), torch.zeros(1, 4).to(kind)
    assert float(mmd2(one, zero)) == 0
    assert float(hsic(one, zero)) == 0
    assert unit(zero, 1).tolist() == zero.tolist()
    assert unit(one, 1).tolist() == [[0.5] * 4]
    assert float(orthogonality(zero, one)) == 0


@pytest.mark.parametrize("kind", HALVES)
def test_unknown_prototypes_are_far(kind: torch.dtype) -> None:
    make, method = ROWS["fedproto"]
    made = job(make().to(kind), method, classes())
    rounds = Rounds(made)
    params = {**made.net.initial(), **{f"server/{n}": v for n, v in rounds.server.state.items()}}
    batch: dict[str, Tensor] = {"x": torch.ones(2, 3).to(kind)}
    known = params["server/known"]
    assert predict_nearest(made.net, params, batch).tolist() == [[0.0] * 3] * 2
    params["server/known"] = known.new_tensor([True, False, False])
    near = predict_nearest(made.net, params, batch)
    assert near[:, 0].tolist() == [0.0] * 2
    assert bool((near[:, 1:] < -9).all())

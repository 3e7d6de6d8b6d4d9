"""MR-MTL: a number by hand, reductions as equalities, and once more in plain PyTorch."""

from __future__ import annotations

import pytest

from fedkeep import Phase, averaging, methods, sgd, simulate
from fedkeep.methods.terms import squared_error
from tests.engines.reference import averaged, close
from tests.methods.parts import Deep
from tests.methods.plain import DATA, State, count, initial, plan, run_of, slopes_of
from tests.tiny import Scalar, everyone, pairs

LOCAL = Phase(batch_size=4, epochs=2, optimizer=sgd(0.2))


def plain(lam: float, uniform: bool = False) -> tuple[State, list[State]]:
    """Return the mean model and every client's own."""
    mean, own = initial(), [initial() for _ in range(len(DATA))]
    for cohort in plan(LOCAL):
        for k, batches in cohort.items():
            for batch in batches:
                g = slopes_of(own[k], batch)
                own[k] = {n: v - 0.2 * (g[n] + lam * (v - mean[n])) for n, v in own[k].items()}
        mean = averaged([own[k] for k in cohort], [1.0 if uniform else float(count(k)) for k in cohort])
    return mean, own


@pytest.mark.parametrize("uniform", [False, True])
def test_rounds_equal_a_plain_loop(uniform: bool) -> None:
    server = averaging(by="uniform" if uniform else "examples")
    run = run_of(methods.mr_mtl(0.7, local=LOCAL, server=server))
    mean, own = plain(0.7, uniform)
    close(run.server, mean)
    kept = everyone(run.private, len(DATA))
    for k, mine in enumerate(own):
        close({n: kept[f"own.{n}"][k] for n in mine}, mine)
    apart = plain(0.0)[0]
    assert any(float((run.server[n] - v).abs().max()) > 1e-3 for n, v in apart.items())


def test_two_rounds_by_hand() -> None:
    """(1, 3), loss (ŷ − 3)², rate 0.1, λ = 2: w goes 1 → 1.4; w̄ = 1.4 is then near, and of two clients it is between."""
    local = Phase(loss=squared_error(), optimizer=sgd(0.1))
    data = pairs({"a": [(1, 3)], "b": [(1, 1)]})
    run = simulate(Scalar(1.0), methods.mr_mtl(2.0, local=local), data, rounds=2, cohort=2)
    # a: 1.4, then slope 2 (1.4 − 3) + 2 (1.4 − 1.2) = −2.8 → 1.68; b: 1, then 0 + 2 (1 − 1.2) → 1.04
    assert everyone(run.private, 2)["own.w"].tolist() == pytest.approx([1.68, 1.04], abs=1e-14)
    assert float(run.server["w"]) == pytest.approx(1.36, abs=1e-14)


def test_buffers_are_averaged_with_the_models() -> None:
    whole = Phase(batch_size=50, optimizer=sgd(0.2))
    method = methods.mr_mtl(0.5, local=whole, server=averaging(by="uniform"))
    run = simulate(Deep(norm=True).double(), method, DATA, rounds=1, cohort=len(DATA))
    kept = everyone(run.private, len(DATA))
    for name in ("norm.running_mean", "norm.running_var", "body.weight"):
        close({name: run.server[name]}, {name: kept[f"own.{name}"].mean(0)}, atol=1e-14)
    assert int(run.server["norm.num_batches_tracked"]) == 1

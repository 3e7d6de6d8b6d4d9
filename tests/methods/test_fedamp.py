"""FedAMP: its shares by hand, once more in plain PyTorch, and what its server keeps."""

from __future__ import annotations

import math

import pytest
import torch

from fedkeep import Phase, methods, sgd
from fedkeep.core.errors import MethodError
from fedkeep.methods import Global, securely
from fedkeep.methods.fedamp import KNOWN, MODELS, Mixture
from fedkeep.methods.secure import SecureSums
from tests.methods.plain import DATA, State, apart, examples_of, initial, loss_of, plan, run_of, slopes_of
from tests.refusals import raises
from tests.tiny import everyone, same_bits

LOCAL = Phase(batch_size=4, epochs=2, optimizer=sgd(0.2))


def flat(w: State) -> torch.Tensor:
    return torch.cat([v.flatten() for v in w.values()])


def plain(alpha: float, sigma: float, lam: float) -> tuple[list[State], list[float]]:
    """Return every client's model, and the shares of its own in what it was sent."""
    own, known, kept = [initial() for _ in range(len(DATA))], set[int](), []
    for cohort in plan(LOCAL):
        before = list(own)
        for i, batches in cohort.items():
            far = {j: float((flat(before[i]) - flat(before[j])).square().sum()) for j in known - {i}}
            share = {j: alpha * math.exp(-d / sigma) / sigma for j, d in far.items()}
            total = sum(share.values())
            share = {j: s / max(total, 1.0) for j, s in share.items()}
            mine = 1 - sum(share.values())
            kept.append(mine)
            u = {n: mine * v + sum(s * before[j][n] for j, s in share.items()) for n, v in before[i].items()}
            for batch in batches:
                g = slopes_of(own[i], batch)
                own[i] = {n: v - 0.2 * (g[n] + lam / alpha * (v - u[n])) for n, v in own[i].items()}
        known |= set(cohort)
    return own, kept


@pytest.mark.parametrize(("alpha", "sigma"), [(0.3, 2.0), (3.0, 2.0)])
@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_rounds_equal_a_plain_loop(alpha: float, sigma: float, engine: str) -> None:
    run = run_of(methods.fedamp(alpha, sigma, lam=0.2, local=LOCAL), engine=engine)
    own, shares = plain(alpha, sigma, 0.2)
    kept = everyone(run.private, len(DATA))
    for k, mine in enumerate(own):
        assert apart({n: kept[f"own.{n}"][k] for n in mine}, mine) < 1e-12
        assert apart({n: run.state[MODELS + n][k] for n in mine}, mine) < 1e-12
        expected = float(loss_of(mine, examples_of(k, "test")))
        assert run.evaluate(clients=[f"user-{k}"])["loss"] == pytest.approx(expected, abs=1e-12)
    assert same_bits(run.server, initial())  # there is no shared model
    assert min(shares) < 0.9
    assert (abs(min(shares)) < 1e-15) == (alpha == 3.0)  # too large a share of others' is cut


def test_shares_by_hand() -> None:
    """Models 0, 1 and 3, the last one never trained: ‖0 − 1‖² = 1, so ξ = 0.5 e^(−1/2) / 2 of it."""
    models = {MODELS + "w": torch.tensor([0.0, 1.0, 3.0]).double(), KNOWN: torch.tensor([True, True, False])}
    server = Global(params={"w": torch.zeros(()).double()}, state=models, clients=("a", "b", "c"))
    mixture = Mixture(alpha=0.5, sigma=2.0)
    share = 0.25 * math.exp(-0.5)
    assert mixture.shares(server, 0).tolist() == pytest.approx([1 - share, share, 0.0], abs=1e-15)
    assert float(mixture(server, "a").params["w"]) == pytest.approx(share, abs=1e-15)
    # client c is sent its own model and those that were trained, at squared distances 9 and 4
    near, nearer = 0.25 * math.exp(-4.5), 0.25 * math.exp(-2)
    assert float(mixture(server, "c").params["w"]) == pytest.approx(
        3 * (1 - near - nearer) + nearer, abs=1e-14
    )
    close = mixture.shares(server.but(state={**models, MODELS + "w": torch.zeros(3).double()}), 2)
    assert close.tolist() == pytest.approx([0.25, 0.25, 0.5], abs=1e-15)
    much = Mixture(alpha=8.0, sigma=2.0).shares(server, 0)
    assert much.tolist() == pytest.approx([0.0, 1.0, 0.0], abs=1e-15)  # 4 e^(−1/2) > 1


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_what_is_the_same_in_all_models_is_sent_to_the_bit(kind: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    same = torch.randn(50, generator=draw, dtype=kind)
    others = torch.randn(7, 3, generator=draw, dtype=kind)
    models = {
        MODELS + "same": same.expand(7, 50),
        MODELS + "w": others,
        KNOWN: torch.ones(7, dtype=torch.bool),
    }
    server = Global(params={"same": same, "w": others[0]}, state=models, clients=tuple("abcdefg"))
    for client in server.clients:
        assert torch.equal(Mixture(alpha=0.3, sigma=2.0)(server, client).params["same"], same)


def test_that_the_server_keeps_models_is_said() -> None:
    with raises(MethodError, name="'fedamp'", kind="KeepEach", wants="Secure sums want"):
        securely(methods.fedamp(), SecureSums(clip=1.0))
    assert methods.fedamp().server.reduce.keeps == "the last model of each client"
    assert methods.pfedhn().server.reduce.keeps == "an embedding of each client"
    assert methods.fedavg().server.reduce.keeps == ""
    run = run_of(methods.fedamp(local=LOCAL), rounds=1)
    assert run.state[KNOWN].nonzero().squeeze(1).tolist() == sorted(plan(LOCAL, 1)[0])
    with pytest.raises(MethodError, match=r"^The shared part of 'fedamp' cannot predict alone"):
        run.evaluate(stage="shared")

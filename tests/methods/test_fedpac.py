"""FedPAC: its mixtures of heads against every support, and once more in plain PyTorch."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

from fedkeep import averaging, methods, sgd
from fedkeep.core.errors import MethodError
from fedkeep.data import opt_out
from fedkeep.engines import Stream
from fedkeep.engines.batches import batches
from fedkeep.methods import Median, Phase, securely
from fedkeep.methods.fedpac import HEADS, objective
from fedkeep.methods.secure import SecureSums
from fedkeep.methods.simplex import least
from tests.engines.reference import averaged, close, cohorts, rows_of, step
from tests.methods.parts import Parts
from tests.methods.plain import COHORT, DATA, ROUNDS, SEED, State, count, examples_of, trained
from tests.tiny import classes

LOCAL = Phase(batch_size=4, epochs=2, optimizer=sgd(0.2, momentum=0.9))
HEAD = ("classifier.weight", "classifier.bias")


def body(w: State, x: Tensor) -> Tensor:
    return torch.tanh(x @ w["encoder.weight"].T + w["encoder.bias"])


def over_supports(form: Tensor) -> Tensor:
    """Return the best mixture: on every set of clients the one where all slopes are equal, if nothing is negative."""
    found, lowest = torch.zeros(len(form)).double(), float("inf")
    for size in range(1, len(form) + 1):
        for some in map(list, itertools.combinations(range(len(form)), size)):
            part = form[some][:, some]
            share = torch.linalg.pinv(part) @ torch.ones(size).double()
            share = share / share.sum()
            if bool((share >= 0).all()) and float(share @ part @ share) < lowest:
                lowest, found = float(share @ part @ share), torch.zeros(len(form)).double()
                found[some] = share
    return found


def plain(lam: float, head_epochs: int) -> tuple[State, list[State], dict[int, Tensor]]:
    """Return the body, every client's head, and the classes' means."""
    start = {n: v.detach().clone() for n, v in Parts().double().state_dict().items()}
    server, heads = {n: v for n, v in start.items() if n not in HEAD}, [dict(start) for _ in range(len(DATA))]
    means: dict[int, Tensor] = {}
    for number, cohort in enumerate(cohorts(DATA, COHORT, ROUNDS, SEED)):
        ends, own, shares, spreads, sums = [], {}, {}, {}, dict[int, list[Tensor]]()
        for k in cohort:
            mine = examples_of(k)
            first, n = body(server, mine["x"]), count(k)
            by_class = [first[mine["label"] == c] for c in range(3)]
            p = [len(f) / n for f in by_class]
            mu = [f.mean(0) if len(f) else torch.zeros(4).double() for f in by_class]
            shares[k] = torch.stack([a * m for a, m in zip(p, mu, strict=True)])
            traces = [float(torch.trace(f.T @ f / max(len(f), 1))) for f in by_class]
            spreads[k] = sum(a * t - a**2 * float(m @ m) for a, t, m in zip(p, traces, mu, strict=True)) / n
            w = {name: v.clone() for name, v in {**server, **{h: heads[k][h] for h in HEAD}}.items()}
            for phase, (epochs, parts) in enumerate([(head_epochs, HEAD), (2, tuple(server))]):
                moving = [w[name].requires_grad_() for name in parts]
                stepper = torch.optim.SGD(moving, 0.2, momentum=0.9)
                stream = Stream(SEED, DATA.ids[k], number)
                for chosen in batches(DATA, rows_of(DATA, k), LOCAL.but(epochs=epochs), stream, phase):
                    batch = DATA.batch(chosen)
                    h, y = body(w, batch["x"]), batch["label"]
                    loss = nn.functional.cross_entropy(h @ w[HEAD[0]].T + w[HEAD[1]], y)
                    if phase == 1:
                        aims = torch.stack([means.get(int(c), h[i].detach()) for i, c in enumerate(y)])
                        loss = loss + lam * nn.functional.mse_loss(h, aims)
                    step(stepper, loss)
                w = {name: v.detach() for name, v in w.items()}
            ends.append({name: w[name] for name in server})
            own[k] = {name: w[name] for name in HEAD}
            for f, c in zip(body(w, mine["x"]), mine["label"].tolist(), strict=True):
                sums.setdefault(c, []).append(f)
        server = averaged(ends, [float(count(k)) for k in cohort])
        means |= {c: torch.stack(found).mean(0) for c, found in sums.items()}
        for i in cohort:
            apart = torch.stack([(shares[i] - shares[j]).flatten() for j in cohort])
            mix = over_supports(
                torch.diag(torch.tensor([spreads[j] for j in cohort], dtype=torch.float64)) + apart @ apart.T
            )
            for name in HEAD:
                heads[i][name] = sum(a * own[j][name] for a, j in zip(mix, cohort, strict=True))
    return server, heads, means


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
@pytest.mark.parametrize("head_epochs", [1, 3])
def test_rounds_equal_plain_pytorch(head_epochs: int, engine: str) -> None:
    run = trained(methods.fedpac(1.5, head_epochs=head_epochs, local=LOCAL), engine=engine)
    server, heads, means = plain(1.5, head_epochs)
    close({n: run.server[n] for n in server}, server)
    assert sorted(means) == run.state["known"].nonzero().squeeze(1).tolist()
    close({str(c): run.state["prototypes"][c] for c in means}, {str(c): v for c, v in means.items()})
    for k in range(len(DATA)):
        close({n: run.state[HEADS + n][k] for n in HEAD}, {n: heads[k][n] for n in HEAD})
        batch = examples_of(k, "test")
        output = body(server, batch["x"]) @ heads[k][HEAD[0]].T + heads[k][HEAD[1]]
        expected = float(nn.functional.cross_entropy(output, batch["label"]))
        assert run.evaluate(clients=[f"user-{k}"])["loss"] == pytest.approx(expected, abs=1e-9)
    first = run.state[HEADS + HEAD[0]]
    assert len({tuple(v.flatten().tolist()) for v in first}) == len(DATA)
    other = trained(methods.fedpac(0.0, head_epochs=head_epochs, local=LOCAL)).server["encoder.weight"]
    assert float((other - server["encoder.weight"]).abs().max()) > 1e-3


def test_mixtures_are_the_best_of_every_support() -> None:
    draw = torch.Generator().manual_seed(0)
    for size, wide in itertools.product((1, 2, 3, 5), (1, 3, 8)):
        shares = torch.randn(size, wide, 2, generator=draw, dtype=torch.float64)
        spreads = torch.rand(size, generator=draw, dtype=torch.float64) / 10
        for i in range(size):
            form = objective(shares, spreads, i)
            assert torch.allclose(least(form), over_supports(form), rtol=0, atol=1e-10)


def test_mixtures_by_hand() -> None:
    """Two clients alike: shares by 1/v, 3/4 and 1/4. One at a distance of 2: 1 · α² = (3 + 4) (1 − α)² → α = 7/8."""
    spreads = torch.tensor([1.0, 3.0]).double()
    alike = torch.ones(2, 1, 2).double()
    assert least(objective(alike, spreads, 0)).tolist() == pytest.approx([0.75, 0.25], abs=1e-12)
    apart = torch.tensor([[[0.0, 0.0]], [[2.0, 0.0]]]).double()
    assert least(objective(apart, spreads, 0)).tolist() == pytest.approx([0.875, 0.125], abs=1e-12)
    assert least(torch.zeros(2, 2).double()).tolist() == pytest.approx([0.5, 0.5])
    # one example each, of one point: no spread, so whoever is the same does equally well and nobody else counts
    same = torch.tensor([[[0.0]], [[0.0]], [[1.0]]]).double()
    assert least(objective(same, torch.zeros(3).double(), 0)).tolist() == pytest.approx(
        [0.5, 0.5, 0.0], abs=1e-12
    )


def test_a_client_gets_its_own_head_and_no_other() -> None:
    run = trained(methods.fedpac(local=LOCAL))
    one, two = run.sent("user-0"), run.sent("user-1")
    assert one.state.keys() == {"prototypes", "known"}
    assert torch.equal(one.params["encoder.weight"], two.params["encoder.weight"])
    assert not torch.equal(one.params[HEAD[0]], two.params[HEAD[0]])
    assert run.kept("user-0").params == run.kept("user-0").state == {}
    with pytest.raises(MethodError, match=r"^The shared part of 'fedpac' cannot predict alone"):
        run.evaluate(stage="shared")


def test_who_has_opted_out_of_everything_changes_nobodys_head() -> None:
    data = opt_out(classes(), 0.5, by="client", seed=1)
    out = [k for k in range(len(data)) if not data.batch(rows_of(data, k))["opted_in"].any()]
    assert 0 < len(out) < len(data)
    for method, name in (
        (methods.fedpac(local=LOCAL), HEADS + HEAD[0]),
        (methods.fedamp(local=LOCAL), "known"),
    ):
        first, run = (trained(method, data=data, rounds=r, cohort=len(data)).state[name] for r in (0, 2))
        for k in range(len(data)):
            assert torch.equal(first[k], run[k]) == (k in out)


def test_what_is_refused() -> None:
    with pytest.raises(MethodError, match=r"^'fedpac' averages bodies by.*WeightedMean"):
        methods.fedpac(server=averaging().but(reduce=Median()))
    with pytest.raises(MethodError, match=r"Its server keeps the head of each client\.$"):
        securely(methods.fedpac(), SecureSums(clip=1.0))

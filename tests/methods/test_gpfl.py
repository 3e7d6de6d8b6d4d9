"""GPFL: numbers by hand, and once more in plain PyTorch."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedkeep import methods, sgd
from fedkeep.core.net import Net
from fedkeep.methods import Phase
from fedkeep.methods.gpfl import GenericAndPersonal, own_condition
from tests.engines.reference import averaged, close, step
from tests.fitting import adapt_client, fit_private
from tests.methods.parts import Parts
from tests.methods.plain import DATA, State, count, examples_of, plan, trained
from tests.tiny import everyone, same_bits

LOCAL = Phase(batch_size=4, epochs=2, optimizer=sgd(0.1, momentum=0.9))
HEAD = ("classifier.weight", "classifier.bias")


def layer(w: State, name: str, q: Tensor) -> Tensor:
    """Return linear, ReLU and layer normalisation, written out."""
    out = torch.relu(w[f"valve.{name}.0.weight"] @ q + w[f"valve.{name}.0.bias"])
    normal = (out - out.mean()) / torch.sqrt(((out - out.mean()) ** 2).mean() + 1e-5)
    return normal * w[f"valve.{name}.2.weight"] + w[f"valve.{name}.2.bias"]


def valve(w: State, h: Tensor, q: Tensor) -> Tensor:
    return torch.relu((layer(w, "gamma", q) + 1) * h + layer(w, "beta", q))


def personal(w: State, e: Tensor, share: Tensor, x: Tensor) -> Tensor:
    h = torch.tanh(x @ w["encoder.weight"].T + w["encoder.bias"])
    return valve(w, h, share @ e) @ w[HEAD[0]].T + w[HEAD[1]]


def shares(client: int) -> Tensor:
    labels = examples_of(client)["label"]
    return torch.tensor([float((labels == c).sum()) for c in range(3)]).double() / len(labels)


def plain(start: State, lam: float, mu: float) -> tuple[State, list[State]]:
    """Return the server's parts and every client's head."""
    server = {n: v for n, v in start.items() if n not in HEAD}
    heads = [{n: start[n] for n in HEAD} for _ in range(len(DATA))]
    for cohort in plan(LOCAL):
        ends = []
        for k, batches in cohort.items():
            w = {n: v.detach().clone().requires_grad_() for n, v in {**server, **heads[k]}.items()}
            stepper = torch.optim.SGD(list(w.values()), 0.1, momentum=0.9, weight_decay=mu)
            e = server["categories"]
            for batch in batches:
                y = batch["label"]
                h = torch.tanh(batch["x"] @ w["encoder.weight"].T + w["encoder.bias"])
                loss = nn.functional.cross_entropy(personal(w, e, shares(k), batch["x"]), y)
                generic = valve(w, h, e.sum(0) / 3)
                cosine = nn.functional.cosine_similarity(generic[:, None], w["categories"][None], dim=2)
                loss = loss - torch.log_softmax(cosine, 1)[torch.arange(len(y)), y].mean()
                loss = loss + lam * torch.linalg.vector_norm(generic - e[y], dim=1).mean()
                step(stepper, loss)
            ends.append({n: w[n].detach() for n in server})
            heads[k] = {n: w[n].detach() for n in HEAD}
        server = averaged(ends, [float(count(k)) for k in cohort])
    return server, heads


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
@pytest.mark.parametrize("mu", [0.0, 0.05])
def test_rounds_equal_plain_pytorch(mu: float, engine: str) -> None:
    local = LOCAL.but(optimizer=sgd(0.1, momentum=0.9, weight_decay=mu))
    method = methods.gpfl(0.3, local=local)
    run = trained(method, engine=engine)
    start = Net(method.extend(Parts().double())).initial()
    server, heads = plain(start, 0.3, mu)
    close(run.server, server)
    assert float((server["categories"] - start["categories"]).abs().max()) > 1e-2
    kept = everyone(run.private, len(DATA))
    for k, mine in enumerate(heads):
        close({n: kept[n][k] for n in HEAD}, mine)
        assert kept["client/counts"][k].tolist() == (shares(k) * count(k)).round().tolist()
        batch = examples_of(k, "test")
        output = personal({**server, **mine}, server["categories"], shares(k), batch["x"])
        expected = float(nn.functional.cross_entropy(output, batch["label"]))
        assert run.evaluate(clients=[f"user-{k}"])["loss"] == pytest.approx(expected, abs=1e-9)


def test_the_loss_by_hand() -> None:
    """γ(q) = 0 and β(q) = 1, so V(h, q) = h + 1 = 1 where h = tanh 0: the angle to E_0 = (1, 1) is 0, to (1, −1) right."""
    method = methods.gpfl()
    net = Net(method.extend(Parts(width=2, labels=2).double()))
    params = {n: torch.zeros_like(v) for n, v in net.initial().items()}
    params["valve.beta.2.bias"] = torch.ones(2).double()
    params["categories"] = torch.tensor([[1.0, 1.0], [2.0, -2.0]]).double()
    params["client/counts"] = torch.zeros(2).double()
    sent = {"categories": torch.tensor([[4.0, 5.0], [0.0, 0.0]]).double()}
    for label, distance in ((0, 5.0), (1, math.sqrt(2))):
        batch = {"x": torch.ones(1, 3).double(), "label": torch.tensor([label])}
        value = float(GenericAndPersonal(lam=2.0)(net, params, batch, sent))
        angle = math.log(math.e + 1) - (1 - label)  # of cosines 1 and 0
        assert value == pytest.approx(math.log(2) + angle + 2 * distance, abs=1e-12)


def test_who_counted_nothing_takes_the_generic_condition() -> None:
    e = torch.tensor([[1.0, 2.0], [3.0, 6.0]]).double()
    counts = {False: torch.zeros(2).double(), True: torch.tensor([1.0, 3.0]).double()}
    assert own_condition({"client/counts": counts[False]}, e).tolist() == [2.0, 4.0]
    assert own_condition({"client/counts": counts[True]}, e).tolist() == [2.5, 5.0]


def test_a_client_that_only_adapts_has_a_condition_of_its_own() -> None:
    """Its counts are of the examples that it adapts on, before the first step; one of the federation keeps its own."""
    run = trained(methods.gpfl(local=LOCAL), hold_out=0.4)
    new, old = (next(c for c in DATA.ids if (c in run.held_out) == out) for out in (True, False))
    rows = DATA.rows(DATA.index(new), "train")
    for some in (3, len(rows)):
        own = fit_private(run, new, np.arange(rows.start, rows.start + some))
        labels = DATA.columns["label"][rows.start : rows.start + some]  # type: ignore[index]
        assert own["client/counts"].tolist() == np.bincount(labels, minlength=3).tolist()
    none = fit_private(run, new, np.arange(0))
    assert none["client/counts"].tolist() == [0, 0, 0]
    kept = run.private.read([DATA.index(old)])
    few = DATA.rows(DATA.index(old), "train")
    start = {name: value[0] for name, value in kept.items()}
    again = adapt_client(run, old, np.arange(few.start, few.start + 1), start=start).own
    assert again["client/counts"].tolist() == start["client/counts"].tolist()


def test_the_phases_of_adaptation_see_the_condition() -> None:
    """The head is trained on V(f(x), p_k), so with the generic condition it would become another."""
    method = methods.gpfl(local=LOCAL)
    run = trained(method, hold_out=0.4)
    new = next(iter(run.held_out))
    rows = DATA.rows(DATA.index(new), "train")
    every = np.arange(rows.start, rows.stop)
    own = fit_private(run, new, every)
    none = dict(run.private.default(new))
    given, generic = (
        adapt_client(run, new, every, start={**none, **counts}).own
        for counts in ({"client/counts": own["client/counts"]}, {})
    )
    assert same_bits(own, given)
    assert not torch.equal(own[HEAD[0]], generic[HEAD[0]])


def test_a_distance_of_zero_has_a_gradient() -> None:
    method = methods.gpfl()
    net = Net(method.extend(Parts(width=2, labels=2).double()))
    params = {n: torch.zeros_like(v).requires_grad_() for n, v in net.initial().items()}
    params["categories"] = torch.ones(2, 2).double().requires_grad_()
    sent = {"categories": torch.zeros(2, 2).double()}
    batch = {"x": torch.ones(3, 3).double(), "label": torch.tensor([0, 1, 1])}
    state = {"client/counts": torch.zeros(2).double()}
    loss = GenericAndPersonal(lam=1.0)(net, {**params, **state}, batch, sent)
    assert torch.isfinite(loss)
    found = torch.autograd.grad(loss, list(params.values()), allow_unused=True)
    assert all(bool(torch.isfinite(g).all()) for g in found if g is not None)

"""FedDyn: an independent loop, what its server's h is, and what it is as α goes to 0."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from torch import Tensor

from fedkeep import Phase, averaging, methods, sgd, simulate
from fedkeep.core.net import Net
from fedkeep.methods.feddyn import LinearTerm
from tests.methods.parts import Deep
from tests.methods.plain import DATA, State, apart, initial, kept, plan, run_of, slopes_of
from tests.tiny import Scalar, job, results, same_bits

LOCAL = Phase(batch_size=4, epochs=2, optimizer=sgd(0.2))


def plain(alpha: float) -> tuple[State, State, list[State]]:
    """Return w, h and every λ_k after some rounds."""
    w = initial()
    h = {n: torch.zeros_like(v) for n, v in w.items()}
    own = [dict(h) for _ in range(len(DATA))]
    for cohort in plan(LOCAL):
        trained = []
        for k, batches in cohort.items():
            theta = dict(w)
            for batch in batches:
                g = slopes_of(theta, batch)
                theta = {n: v - 0.2 * (g[n] - own[k][n] + alpha * (v - w[n])) for n, v in theta.items()}
            own[k] = {n: v - alpha * (theta[n] - w[n]) for n, v in own[k].items()}
            trained.append(theta)
        h = {n: v - alpha / len(DATA) * sum(t[n] - w[n] for t in trained) for n, v in h.items()}
        w = {n: sum(t[n] for t in trained) / len(trained) - h[n] / alpha for n in w}
    return w, h, own


@pytest.mark.parametrize("alpha", [0.1, 1.0])
def test_feddyn_equals_a_plain_loop(alpha: float) -> None:
    run = run_of(methods.feddyn(alpha, local=LOCAL))
    w, h, own = plain(alpha)
    assert apart(run.server, w) < 1e-12
    assert apart(run.state, h) < 1e-12
    assert max(apart(kept(run, k), own[k]) for k in range(len(DATA))) < 1e-12
    every = [kept(run, k) for k in range(len(DATA))]
    assert apart(run.state, {n: sum(s[n] for s in every) / len(every) for n in h}) < 1e-14


def test_clients_begin_as_fedprox() -> None:
    """λ_k is 0 then; the server's first step is 1 + m/N of FedAvg's, m of N clients."""
    ours, theirs = methods.feddyn(0.7, local=LOCAL), methods.fedprox(0.7, local=LOCAL)
    found = [results(job(Deep().double(), method, DATA), [0, 2, 3]) for method in (ours, theirs)]
    for mine, prox in zip(*found, strict=True):
        assert same_bits(mine.upload.deltas, prox.upload.deltas)
    dyn = run_of(ours, rounds=1)
    prox = run_of(theirs.on_server(reduce=averaging(by="uniform").reduce), rounds=1)
    start = initial()
    steps = {n: start[n] + (1 + 4 / 6) * (v - start[n]) for n, v in prox.server.items()}
    assert apart(dyn.server, steps) < 1e-14


def limit() -> State:
    """Return w for α → 0: clients train as FedAvg's, the server adds all rounds' mean changes once more."""
    w = initial()
    total = {n: torch.zeros_like(v) for n, v in w.items()}
    for cohort in plan(LOCAL):
        mean = {n: torch.zeros_like(v) for n, v in w.items()}
        for batches in cohort.values():
            theta = dict(w)
            for batch in batches:
                g = slopes_of(theta, batch)
                theta = {n: v - 0.2 * g[n] for n, v in theta.items()}
            mean = {n: v + (theta[n] - w[n]) / len(cohort) for n, v in mean.items()}
        total = {n: v + len(cohort) / len(DATA) * mean[n] for n, v in total.items()}
        w = {n: v + mean[n] + total[n] for n, v in w.items()}
    return w


def test_as_alpha_goes_to_zero_the_servers_step_alone_is_left() -> None:
    """In proportion to α. It does not become FedAvg."""
    far = [apart(run_of(methods.feddyn(alpha, local=LOCAL)).server, limit()) for alpha in (1e-3, 1e-5, 1e-7)]
    assert far[0] < 0.1
    assert far[1] / far[0] == pytest.approx(1e-2, rel=0.05)
    assert far[2] / far[1] == pytest.approx(1e-2, rel=0.05)
    fedavg = run_of(methods.fedavg(local=LOCAL, server=averaging(by="uniform")))
    assert apart(fedavg.server, limit()) > 0.1


def test_h_stays_on_the_server() -> None:
    sizes = [
        {r.value for r in run_of(method).history if r.metric == "download_bytes"}
        for method in (methods.feddyn(local=LOCAL), methods.fedavg(local=LOCAL))
    ]
    assert sizes[0] == sizes[1] == {8.0 * sum(v.numel() for v in initial().values())}


class Counting(Deep):
    """Notes how many examples each call has."""

    calls: ClassVar[list[int]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append(len(x))
        return super().forward(x)


def test_clients_who_are_sent_the_same_are_judged_together() -> None:
    run = simulate(Counting().double(), methods.feddyn(local=LOCAL), DATA, rounds=1, cohort=4, seed=3)
    Counting.calls.clear()
    run.evaluate()
    assert Counting.calls == [18]


def test_the_linear_term_by_hand() -> None:
    net, w = Net(Scalar(5.0)), torch.tensor(5.0, requires_grad=True)
    value = LinearTerm()(net, {"w": w, "client/w": torch.tensor(3.0)}, {}, {})
    value.backward()
    assert (float(value.detach()), float(w.grad)) == (-15.0, -3.0)  # type: ignore[arg-type]

"""IFCA: an independent loop, what one cluster is, sums by cluster, and what it refuses."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn

from fedkeep import Phase, Run, averaging, methods, sgd, simulate
from fedkeep.core.errors import MethodError, UploadError
from fedkeep.methods import Global
from fedkeep.methods.server import MeanByGroup
from fedkeep.split import Split
from tests.engines.test_conformance import Words
from tests.methods.plain import (
    DATA,
    State,
    apart,
    count,
    examples_of,
    initial,
    kept,
    loss_of,
    plan,
    run_of,
    slopes_of,
)
from tests.tiny import everyone, same_bits, texts

LOCAL = Phase(batch_size=4, epochs=2, optimizer=sgd(0.3))


def models_of(run: Run, clusters: int) -> list[State]:
    others = [
        {n.partition("/")[2]: v for n, v in run.state.items() if n.startswith(f"{j}/")}
        for j in range(1, clusters)
    ]
    return [run.server, *others]


def plain(
    models: list[State], rate: float, weights: Any
) -> tuple[list[State], list[int], set[tuple[int, ...]]]:
    """Return the models and every client's pick after some rounds, and which models each round moved."""
    picks, moved = [0] * len(DATA), set()
    for cohort in plan(LOCAL):
        changes: dict[int, list[tuple[float, State]]] = {}
        for k, batches in cohort.items():
            losses = [float(loss_of(model, examples_of(k))) for model in models]
            j = picks[k] = min(range(len(models)), key=losses.__getitem__)
            y = dict(models[j])
            for batch in batches:
                g = slopes_of(y, batch)
                y = {n: v - 0.3 * g[n] for n, v in y.items()}
            changes.setdefault(j, []).append((weights(k), {n: v - models[j][n] for n, v in y.items()}))
        moved.add(tuple(sorted(changes)))
        for j, each in changes.items():
            total = sum(weight for weight, _ in each)
            models[j] = {n: v + rate / total * sum(c * d[n] for c, d in each) for n, v in models[j].items()}
    return models, picks, moved


@pytest.mark.parametrize("by", ["examples", "uniform"])
def test_ifca_equals_a_plain_loop(by: Any) -> None:
    method = methods.ifca(3, spread=0.7, seed=1, local=LOCAL, server=averaging(sgd(0.8), by=by))
    run, start = run_of(method), run_of(method, rounds=0)
    models, picks, moved = plain(models_of(start, 3), 0.8, count if by == "examples" else lambda k: 1)
    assert max(map(apart, models_of(run, 3), models)) < 1e-12
    assert [int(kept(run, k)["cluster"]) for k in range(len(DATA))] == picks
    assert len(set(picks)) > 1
    assert any(len(each) < 3 for each in moved)  # a model that nobody picks stays
    for k, pick in enumerate(picks):
        expected = float(loss_of(models[pick], examples_of(k, "test")))
        assert run.evaluate(clients=[f"user-{k}"])["loss"] == pytest.approx(expected, abs=1e-12)


def test_the_models_first_differ_by_noise_of_a_stream_of_their_own() -> None:
    start = run_of(methods.ifca(3, spread=0.7, local=LOCAL), rounds=0)
    first, second, third = models_of(start, 3)
    assert same_bits(first, initial())
    noise = torch.cat([(v - first[n]).flatten() / 0.7 for m in (second, third) for n, v in m.items()])
    assert len(noise.unique()) == len(noise) == 62
    assert abs(float(noise.std()) - 1) < 0.2
    again = run_of(methods.ifca(2, spread=0.7, local=LOCAL), rounds=0)
    assert same_bits(models_of(again, 2)[1], second)
    assert not same_bits(models_of(run_of(methods.ifca(2, spread=0.7, seed=1), rounds=0), 2)[1], second)


def test_of_models_that_fit_equally_the_first_is_picked() -> None:
    run = run_of(methods.ifca(3, spread=1e-300, local=LOCAL), rounds=1)  # noise too small to change a bit
    assert same_bits(models_of(run, 3)[1], initial())
    assert {int(kept(run, k)["cluster"]) for k in range(len(DATA))} == {0}


def test_k_models_are_sent_and_one_is_uploaded() -> None:
    run, size = run_of(methods.ifca(3, local=LOCAL)), 8.0 * sum(v.numel() for v in initial().values())
    for metric, value in (("download_bytes", 3 * size), ("upload_bytes", size + 8)):
        assert {r.value for r in run.history if r.metric == metric} == {value}
    with pytest.raises(MethodError, match=r"^The shared part of 'ifca' cannot predict alone"):
        run.evaluate(stage="shared")


def test_tables_are_uploaded_by_rows_whichever_model_is_picked() -> None:
    data = texts(counts=(4, 9, 3, 5, 12, 1), vocabulary=300)
    method = methods.ifca(2, spread=0.3, local=Phase(batch_size=3, optimizer=sgd(0.2)))
    settings: dict[str, Any] = {"rounds": 3, "cohort": 4, "engine": "sequential"}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model: nn.Module = Words().double()
    few, whole = (simulate(model, m, data, **settings) for m in (method, method.on_client(tables="whole")))
    assert max(map(apart, models_of(few, 2), models_of(whole, 2))) < 1e-14
    assert set(everyone(few.private, 6)["client/cluster"].tolist()) == {0, 1}
    sizes = [[r.value for r in run.history if r.metric == "upload_bytes"] for run in (few, whole)]
    assert max(sizes[0]) < 0.5 * min(sizes[1])


def sums(order: list[int], parts: int, skipped: int = 3) -> State:
    """Return what the means by cluster make of 40 clients' uploads, added up in parts by blocks of 16."""
    ids = [f"{k:02}" for k in range(40)]
    start = {"w": torch.zeros(3, dtype=torch.float64), "server/cluster": torch.tensor(0)}
    reduction = MeanByGroup(group="cluster", groups=3)
    server = Global(params={"w": start["w"]})
    held = [reduction.begin(server, start, ids) for _ in range(parts)]
    for k in order:
        draw = torch.Generator().manual_seed(k)
        trained = {
            "w": torch.randn(3, generator=draw, dtype=torch.float64),
            "server/cluster": torch.tensor(k % 2 * 2),
        }
        if k == skipped:
            held[k // 16 % parts].skip(ids[k])
        else:
            held[k // 16 % parts].add(ids[k], Split().upload(start, trained, 1.0 + k))
    for other in held[1:]:
        held[0].merge(other)
    found = held[0].value()
    assert (found.count, found.weight) == (39, sum(1.0 + k for k in range(40) if k != skipped))
    return {"0/w": found.params["w"], **found.state}


def test_the_order_and_the_place_of_summing_change_no_bit() -> None:
    first = sums(list(range(40)), 1)
    assert set(first) == {"0/w", "2/w"}  # nobody picked model 1
    for order, parts in itertools.product((list(range(40)), list(range(39, -1, -1))), (1, 3)):
        assert same_bits(sums(order, parts), first)


def test_a_model_whose_clients_weigh_nothing_stays() -> None:
    start = {"w": torch.zeros(()), "server/cluster": torch.tensor(0)}
    means = MeanByGroup(group="cluster", groups=2).begin(Global(params={}), start, ["a", "b"])
    for client, pick, weight in (("a", 0, 2.0), ("b", 1, 0.0)):
        trained = {"w": torch.tensor(3.0), "server/cluster": torch.tensor(pick)}
        means.add(client, Split().upload(start, trained, weight))
    found = means.value()
    assert (float(found.changes["w"]), found.state, found.weight, found.count) == (3.0, {}, 2.0, 1)


@pytest.mark.parametrize("pick", [2, -1])
def test_a_pick_that_is_none_is_refused(pick: int) -> None:
    start = {"w": torch.zeros(()), "server/cluster": torch.tensor(0)}
    reduction = MeanByGroup(group="cluster", groups=2).begin(Global(params={}), start, ["a"])
    with pytest.raises(UploadError, match=rf"^The upload of client 'a' was.*{pick}.*2"):
        reduction.add("a", Split().upload(start, {**start, "server/cluster": torch.tensor(pick)}, 1.0))

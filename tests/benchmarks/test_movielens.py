"""PFedRec on MovieLens: a round by hand, what may train, and what is counted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks import movielens as one
from fedkeep import FederatedData, simulate
from fedkeep.data import movielens
from fedkeep.data.leave_one_out import leave_one_out

ITEMS, USERS, EACH = 130, 6, 9


def ratings(folder: Path) -> FederatedData:
    """Return a file's ratings, as recbole writes them, in no order of time."""
    rng = np.random.default_rng(0)
    lines = ["user_id:token\titem_id:token\trating:float\ttimestamp:float"]
    for user in range(USERS):
        items = rng.choice(ITEMS, EACH, replace=False) + 1
        times = rng.permutation(EACH) + 1000
        lines += [f"{user}\t{i}\t{1 + i % 5}\t{t}" for i, t in zip(items, times, strict=True)]
    lines += [f"{USERS}\t{i + 1}\t3\t{i}" for i in range(3)] + [
        f"{USERS + 1}\t{i + 1}\t3\t{i}" for i in range(ITEMS - 110)
    ]
    every = [f"{USERS + 2 + i // 20}\t{i + 1}\t3\t{i}" for i in range(ITEMS)]  # so that each item is known
    file = folder / "tiny.inter"
    file.write_text("\n".join(lines + every) + "\n", encoding="utf-8")
    return movielens(file)


def test_the_last_rating_is_tested_and_never_trains(tmp_path: Path) -> None:
    data = ratings(tmp_path)
    item, time = np.asarray(data.columns["item"]), np.asarray(data.columns["time"])
    asked = leave_one_out(data)
    found = one.never_asked(asked, seed=0)
    shown, leaked = np.asarray(found.columns["item"]), 0
    for client, name in enumerate(data.ids):
        own = np.asarray(data.rows(client))
        order = own[np.argsort(time[own])]
        where = found.index(name)
        label = np.asarray(found.columns["label"])
        test, valid, train = (np.asarray(found.rows(where, s)) for s in ("test", "valid", "train"))
        assert shown[test, label[test]].tolist() == [item[order[-1]]]
        assert shown[valid, label[valid]].tolist() == [item[order[-2]]]
        assert sorted(shown[train, label[train]]) == sorted(item[order[:-2]])
        left = item[order[-2:]]
        assert not np.isin(shown[train], left).any()  # neither as the right one nor as another
        before = np.asarray(asked.columns["item"])[np.asarray(asked.rows(asked.index(name), "train"))]
        leaked += np.isin(before, left).sum()
        same = ~np.isin(before, left)
        assert (shown[train][same] == before[same]).all()
        assert (np.isin(shown[train], item[own]).sum(1) == 1).all()  # what is put there was never rated
    assert leaked  # leave_one_out leaves them in


def test_a_round_by_hand() -> None:
    """Two users, one mini-batch each, one other item for each question: there is one way to draw."""
    item = np.array([[0, 3], [4, 1], [2, 5]])
    label = np.array([0, 1, 0])
    data = FederatedData.from_columns(
        ["a", "a", "b"],
        {"item": item, "label": label},
        split=["train"] * 3,
        meta={"items": 6, "task": "multiclass", "classes": 2},
    )
    torch.manual_seed(0)
    model = one.Scored(6)
    method = one.pfedrec(6)
    phases = tuple(p.but(loss=one.drawn(one.pointwise(), 1)) for p in method.client.phases)
    run = simulate(model, method.on_client(phases=phases), data, rounds=1, cohort=2, engine="sequential")
    tables = []
    for name, rows in (("a", [0, 1]), ("b", [2])):
        table = model.item.weight.detach().clone().requires_grad_()
        score = model.score.weight.detach().clone().requires_grad_()
        bias = model.score.bias.detach().clone().requires_grad_()

        def loss() -> torch.Tensor:
            of = table[torch.from_numpy(item[rows])] @ score[0] + bias  # noqa: B023 - called in its own turn
            wanted = nn.functional.one_hot(torch.from_numpy(label[rows]), 2).float()  # noqa: B023
            return nn.functional.binary_cross_entropy(torch.sigmoid(of), wanted)

        first = torch.autograd.grad(loss(), (score, bias))
        with torch.no_grad():
            score -= 0.1 * first[0]
            bias -= 0.1 * first[1]
        (second,) = torch.autograd.grad(loss(), (table,))
        with torch.no_grad():
            table -= 0.1 * 6 * 80 * second
        tables.append(table.detach())
        kept = run.parameters(name)
        assert torch.allclose(kept["score.weight"], score.detach(), atol=1e-5)
        own = run.model(name)(item=torch.arange(6)[None])
        wanted = (table @ score[0] + bias).detach()
        assert torch.allclose(torch.as_tensor(own).flatten(), wanted, atol=1e-4)
    assert torch.allclose(run.server["item.weight"], sum(tables) / 2, atol=1e-4)


def test_hits_and_gains_by_hand() -> None:
    """Of two users one finds its item third among 100, the other eleventh: HR 1/2, NDCG ½ · 1 / log2(4)."""
    order = np.arange(100)
    data = FederatedData.from_columns(
        ["a", "a", "b", "b"],
        {"item": np.stack([order] * 4), "label": np.array([2, 2, 2, 10])},
        split=["train", "test", "train", "test"],
        meta={"items": 100, "task": "ranking", "classes": 100},
    )

    class Falling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.by = nn.Parameter(torch.tensor(-1.0))

        def forward(self, item: torch.Tensor) -> torch.Tensor:
            return self.by * item

    still = one.fedavg(local=one.Phase(optimizer=one.fedkeep.sgd(1e-9)))
    run = simulate(Falling(), still, data, rounds=1, cohort=2, evaluate_every=1)
    assert one.sampled(run, 1) == pytest.approx({"hr10": 0.5, "ndcg10": 0.25})
    # the full ranking leaves out what a user had before: the item 2, for both; a's test item is that one
    assert one.ranked(run) == pytest.approx({"hr10": 1.0, "ndcg10": 1 / np.log2(11)})


@pytest.mark.parametrize("arm", one.ARMS)
def test_every_arm_runs(arm: str, tmp_path: Path) -> None:
    found = one.train(arm, leave_one_out(ratings(tmp_path)), seed=0, rounds=5)
    assert set(found["sampled"]) == {"hr10", "ndcg10"} == set(found["full"])
    assert 0 <= found["full"]["hr10"] <= found["sampled, best test round"]["hr10"] <= 1
    cell = {"arm": arm, "seed": 0, "found": found}
    table = one.summary({"x": cell, "y": {**cell, "seed": 1}})
    assert table[arm]["sampled"]["hr10"] == {"mean": found["sampled"]["hr10"], "std": 0}
    assert (table[arm]["seeds"], ("full, the server's table" in table[arm])) == (2, arm.startswith("PFedRec"))
    alone = one.summary({"x": cell})
    assert alone[arm]["full"]["ndcg10"]["std"] is None
    shown = f"| {arm} | 1 | full | {100 * found['full']['hr10']:.1f} | {100 * found['full']['ndcg10']:.1f} |"
    assert shown in one.page(alone)

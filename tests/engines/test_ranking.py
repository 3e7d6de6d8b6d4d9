"""A ranking, from ratings to the worth report: its numbers are those that plain NumPy finds from the model's scores."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import fedkeep
from fedkeep import Phase, sgd
from fedkeep.core.errors import MethodError
from fedkeep.data import FederatedData
from fedkeep.data.leave_one_out import leave_one_out
from fedkeep.experiments.worth import counted, worth_of
from fedkeep.report.runs import read_run
from fedkeep.tasks import RANKING

USERS, ITEMS, AGAINST = 12, 60, 19


def data() -> FederatedData:
    """Users of two kinds, who take films of their own half, the first ones more often."""
    rng = np.random.default_rng(0)
    taken = [
        rng.choice(30, 12, replace=False, p=np.arange(30, 0, -1) / 465) + 30 * (u % 2) for u in range(USERS)
    ]
    rated = FederatedData.from_columns(
        client=np.repeat(np.arange(USERS), 12),
        columns={
            "item": np.concatenate(taken),
            "label": np.ones(12 * USERS, np.float32),
            "time": np.tile(np.arange(12), USERS),
        },
        meta={"items": ITEMS, "task": "regression", "name": "films"},
    )
    return leave_one_out(rated, AGAINST)


def trained(method: fedkeep.Method, films: FederatedData, **options: object) -> fedkeep.Run:
    torch.manual_seed(0)
    model = fedkeep.models.MatrixFactorization(ITEMS, 4).double()
    return fedkeep.simulate(model, method, films, rounds=3, cohort=6, evaluate_every=1, **options).last


LOCAL = Phase(batch_size=8, optimizer=sgd(1.0))
FURL = fedkeep.methods.furl(["user", "user_bias"], local=LOCAL, private_init=("normal", 0.3))


def places(run: fedkeep.Run, films: FederatedData, client: int) -> tuple[int, float]:
    """Return the rank of a client's test film, and its cross-entropy, by NumPy."""
    (row,) = films.rows(client, "test")
    p = {n: v.double().numpy() for n, v in run.parameters(films.ids[client]).items()}
    ids, place = np.asarray(films.columns["item"])[row], int(np.asarray(films.columns["label"])[row])
    score = np.array([p["item.weight"][i] @ p["user"] + p["item_bias.weight"][i, 0] for i in ids])
    better = sum(score[k] >= score[place] for k in range(len(ids)) if k != place)
    return 1 + better, float(np.log(np.exp(score - score[place]).sum()))


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_a_run_says_what_numpy_finds(engine: str) -> None:
    films = data()
    run = trained(FURL, films, engine=engine)
    rank, loss = map(np.array, zip(*(places(run, films, c) for c in range(USERS)), strict=True))
    found = {
        r.metric: r.value for r in run.history if r.split == "test" and r.round == 3 and r.client is None
    }
    gain = sum(1 / np.log2(1 + r) for r in rank if r <= 10) / USERS
    assert found["hr10"] == pytest.approx((rank <= 10).mean())
    assert found["ndcg10"] == pytest.approx(gain)
    assert found["loss"] == pytest.approx(loss.mean())
    assert 0 < found["hr10"] < 1


@pytest.mark.parametrize("candidates", [10, 11])
def test_candidates_that_all_stand_among_the_first_ten_are_refused(candidates: int) -> None:
    rng = np.random.default_rng(0)
    columns = {"item": rng.integers(ITEMS, size=(12, candidates)), "label": rng.integers(10, size=12)}
    meta = {"task": "ranking", "classes": candidates}
    films = FederatedData.from_columns([0, 1] * 6, columns, ["train"] * 8 + ["valid", "test"] * 2, meta)
    if candidates == 11:
        assert "hr10" in {r.metric for r in trained(FURL, films).history}
        return
    with pytest.raises(MethodError, match=r"of more than 10 candidates.*gave \(\d, 10\)"):
        trained(FURL, films)


def test_tallies_and_examples_say_the_same() -> None:
    films = data()
    run = trained(FURL, films)
    (judged,) = run.local_device().judge(run.orders(run.clients), "test", ["own"])
    assert judged.tallies.metrics("own") == pytest.approx(judged.metrics("own"))
    assert {client: value for client, (value, _) in judged.tallies.per_client("own").items()} == {
        client: value for client, (value, _) in judged.per_client("own").items()
    }


def test_counting_shows_what_everybody_took(tmp_path: Path) -> None:
    films = data()
    trained(fedkeep.methods.fedavg(local=LOCAL), films, out=tmp_path / "run")
    examples = read_run(tmp_path / "run").examples
    assert examples is not None
    found = counted(films, examples)("own")
    item, label = np.asarray(films.columns["item"]), np.asarray(films.columns["label"])
    train = films.split_rows("train")
    taken = [int((item[train, label[train]] == i).sum()) for i in range(ITEMS)]
    expected = []
    for row in found.row:
        seen = [taken[i] for i in item[row]]
        expected.append(sum(n >= seen[label[row]] for n in seen))  # itself makes it begin with 1
    assert found.score.tolist() == expected
    assert found.kind == RANKING


def test_what_personalisation_was_worth(tmp_path: Path) -> None:
    films = data()
    trained(FURL, films, out=tmp_path / "furl", evaluate_shared=True)
    trained(fedkeep.methods.fedavg(local=LOCAL), films, out=tmp_path / "fedavg")
    fedavg, shared = worth_of([tmp_path / "furl", tmp_path / "fedavg"])
    ours, theirs = (read_run(tmp_path / name).examples for name in ("furl", "fedavg"))
    gain = (ours("own").score <= 10).mean() - (theirs("own").score <= 10).mean()
    assert fedavg.unit == "points"
    assert float(fedavg.found.gain.mean()) == pytest.approx(gain)
    assert [metric for metric, _ in fedavg.pooled] == ["hr10", "ndcg10"]
    assert shared.theirs == "the shared part alone"

"""The full ranking of items, against numbers computed by hand, and lists of the best."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedkeep
from fedkeep import FederatedData, methods, simulate
from fedkeep.core.errors import ConfigError, DataError, MethodError
from fedkeep.data.leave_one_out import leave_one_out
from fedkeep.experiments.recommending import Popular, judged, places
from fedkeep.models import MatrixFactorization
from tests.commands import call, succeeded


class Scores(nn.Module):
    """Gives item i the score w_i."""

    def __init__(self, scores: list[float]) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(scores, dtype=torch.float32))

    def forward(self, item: Tensor) -> Tensor:
        return self.w[item]


def ratings(rows: dict[str, list[tuple[int, float, str]]], items: int = 6) -> FederatedData:
    flat = [(name, *row) for name, own in rows.items() for row in own]
    name, item, label, split = zip(*flat, strict=True)
    return FederatedData.from_columns(
        list(name),
        {"item": np.array(item), "label": np.array(label, np.float32), "time": np.arange(len(item))},
        list(split),
        {"items": items, "task": "regression", "item_ids": [10 * n for n in range(items)]},
    )


DATA = ratings(
    {
        "a": [(0, 5, "train"), (1, 4, "valid"), (2, 5, "test"), (4, 2, "test")],
        "b": [(3, 3, "train"), (5, 4, "test")],
        "c": [(2, 1, "train"), (2, 5, "test")],
    }
)


def run_of(data: FederatedData = DATA, scores: list[float] = [6, 5, 4, 3, 2, 1]) -> fedkeep.Run:  # noqa: B006
    return simulate(Scores(scores), methods.fedavg(), data, rounds=0)


def test_numbers_by_hand() -> None:
    found = run_of().full_ranking(ks=(1, 3))
    # a has seen 0 and 1: left are 2, 3, 4, 5, so its items 2 and 4 are first and third. b: 0, 1, 2, 4, 5: 5 is fifth.
    assert found.ranks == {"a": [1, 3], "b": [5]}
    assert found.clients == 2  # what c takes again it had seen
    ideal = 1 + 1 / math.log2(3)
    assert found.metrics == pytest.approx(
        {
            "hr@1": 0.5,
            "recall@1": 0.25,
            "ndcg@1": 0.5,
            "hr@3": 0.5,
            "recall@3": 0.5,
            "ndcg@3": (1 + 1 / math.log2(4)) / ideal / 2,
            "mrr": (1 + 1 / 5) / 2,
        }
    )
    assert (found.cold_items, found.cold_recall, found.cold_clients) == (2, 0.5, 0)  # 4 and 5: third, fifth
    assert "3 items of 2 users" in found.told
    assert "2 of the items nobody had in training: 50.0%" in found.told
    assert run_of().full_ranking(liked=5, ks=(3,)).ranks == {"a": [1]}
    assert run_of().full_ranking("valid", ks=(3,)).ranks == {"a": [1]}


def test_equal_scores_stand_before() -> None:
    same = np.zeros(5)
    assert places(same, np.array([2]), np.array([0])).tolist() == [4]
    assert places(np.array([1, np.nan, 3.0]), np.array([2]), np.array([], np.int64)).tolist() == [2]
    assert judged(np.array([11]), (10,)) == {"hr@10": 0.0, "recall@10": 0.0, "ndcg@10": 0.0, "mrr": 1 / 11}


def test_lists_leave_out_what_a_user_has() -> None:
    lists = run_of().recommend(n=3).to_pydict()
    assert lists["client"] == ["a"] * 2 + ["b"] * 3 + ["c"] * 3
    assert lists["item"] == [30, 50, 0, 10, 20, 0, 10, 30]
    assert lists["rank"] == [1, 2, 1, 2, 3, 1, 2, 3]
    assert lists["score"][:2] == [3.0, 1.0]


def test_private_parts_and_questions_are_ranked() -> None:
    draw = np.random.default_rng(0)
    rows = {
        name: [(int(item), 1.0, "train") for item in draw.choice(30, 8, replace=False)] for name in "abcd"
    }
    questions = leave_one_out(ratings(rows, 30), against=12)
    torch.manual_seed(0)
    run = simulate(
        MatrixFactorization(30, dim=4),
        methods.furl("user*", private_init=("normal", 0.1)),
        questions,
        rounds=2,
        cohort=4,
    )
    found = run.full_ranking(ks=(5,))
    for name, ranks in found.ranks.items():
        values, place = run.parameters(name), questions.index(name)
        scores = values["item.weight"] @ values["user"] + values["item_bias.weight"].squeeze(1)
        of = {
            s: [
                int(questions.columns["item"][r, questions.columns["label"][r]])
                for r in questions.rows(place, s)
            ]
            for s in ("train", "valid", "test")
        }
        scores[torch.tensor(of["train"] + of["valid"])] = -torch.inf
        assert ranks == [1 + int((scores > scores[of["test"][0]]).sum())]
    assert len({tuple(v) for v in found.ranks.values()}) > 1


def test_what_cannot_be_ranked_is_refused() -> None:
    with pytest.raises(ConfigError):
        run_of().full_ranking(ks=(7,))
    with pytest.raises(ConfigError):
        run_of().recommend(n=0)
    with pytest.raises(DataError):
        simulate(fedkeep.models.Linear(4, 3), methods.fedavg(), fedkeep.data.toy(), rounds=0).recommend(n=3)
    with pytest.raises(DataError):
        run_of().full_ranking(liked=6, ks=(3,))

    class Timed(Scores):
        def forward(self, item: Tensor, time: Tensor) -> Tensor:
            return self.w[item] + time

    with pytest.raises(MethodError):
        simulate(Timed([0.0] * 6), methods.fedavg(), DATA, rounds=0).recommend(n=3)


def test_the_command(tmp_path: Path) -> None:
    lines = [f"{u}::{i}::{1 + (u * i) % 5}::{i}\n" for u in range(6) for i in range(u, u + 12)]
    (tmp_path / "ratings.dat").write_text("".join(lines))
    (tmp_path / "f.toml").write_text(
        '[data]\nreader = "movielens"\npath = "ratings.dat"\n[run]\nrounds = 1\nengine = "sequential"\n'
    )
    succeeded(call("run", tmp_path / "f.toml", "--out", tmp_path / "r"))
    told = succeeded(call("recommend", tmp_path / "r", "--n", "5", "--out", tmp_path / "l.csv"))
    assert "NDCG@5" in told.output
    assert (tmp_path / "l.csv").read_text().splitlines()[0] == '"client","rank","item","score"'


FILMS = """
[data]
reader = "table"
path = "films.csv"
user = "person"
item = "film"
label = "stars"

[method]
kind = "fedavg"

[run]
rounds = 1

[ranking]
liked = 4
"""


def films(folder: Path) -> Path:
    """Write ratings of 12 of 20 films by 8 people, and a configuration; labels come in deviations from their mean."""
    draw = np.random.default_rng(0)
    rows = [
        f"p{person},{100 + film},{draw.integers(1, 6)}\n"
        for person in range(8)
        for film in draw.choice(20, 12, replace=False)
    ]
    (folder / "films.csv").write_text("person,film,stars\n" + "".join(rows))
    (folder / "films.toml").write_text(FILMS)
    return folder / "films.toml"


def test_a_run_and_a_comparison_rank_all_items_where_the_configuration_asks(tmp_path: Path) -> None:
    config, out = films(tmp_path), tmp_path / "c"
    told = succeeded(call("run", config, "--out", tmp_path / "r"))
    assert "NDCG@10" in told.output
    asked = ("compare", config, "--methods", "furl,fedavg", "--seeds", "2", "--no-references", "--out", out)
    told = succeeded(call(*asked))
    assert "All items ranked" in told.output
    assert "All items ranked" in (out / "report.html").read_text()
    with (out / "tables" / "ranking.csv").open() as file:
        rows = {(row["method"], row["metric"]): row for row in csv.DictReader(file)}
    for method in ("furl", "fedavg"):
        runs = [fedkeep.load_run(out / "runs" / f"{method}-{seed}", data_folder=tmp_path) for seed in (0, 1)]
        found = [run.full_ranking(ks=(10,), liked=4).metrics for run in runs]
        for metric in found[0]:
            value = float(rows[method, metric]["mean"])
            assert value == pytest.approx((found[0][metric] + found[1][metric]) / 2)
    assert "NDCG@10" in (out / "tables" / "ranking.tex").read_text()
    stars = [float(line.rpartition(",")[2]) for line in (tmp_path / "films.csv").read_text().split()[1:]]
    test = runs[0].data.split_rows("test")
    liked = sum(map(len, runs[0].full_ranking(ks=(1,), liked=4).ranks.values()))
    assert 0 < liked < len(test) < len(stars)
    every = sum(map(len, runs[0].full_ranking(ks=(1,), liked=-math.inf).ranks.values()))
    for run in (runs[0], runs[0].last):  # without ks and liked they are the configuration's
        mine, same = run.full_ranking(), run.full_ranking(ks=(10,), liked=4)
        assert (mine.metrics, mine.ranks) == (same.metrics, same.ranks)
    for more, count in (((), liked), (("--liked", "0"), every)):
        told = succeeded(call("recommend", out / "runs" / "furl-0", "--data", tmp_path, *more))
        assert f"{count} items of " in " ".join(told.output.split())
    assert liked < every
    trained = (out / "runs" / "furl-0" / "timings.jsonl").read_bytes()
    succeeded(call(*asked, "--set", "ranking.ks=[3]"))
    assert (out / "runs" / "furl-0" / "timings.jsonl").read_bytes() == trained  # the runs are there already
    analyses = json.loads((out / "runs" / "furl-0" / "analyses.json").read_text())
    assert [row[0] for row in analyses["ranking"]["rows"]] == ["hr@3", "recall@3", "ndcg@3", "mrr"]


def test_counting_is_ranked_beside_them() -> None:
    counted = Popular(DATA)
    assert counted(item=torch.arange(6)).tolist() == [1, 0, 1, 1, 0, 0]


@pytest.mark.parametrize(
    ("key", "said"), [("ranking.ks=[21]", "from 1 to 20"), ("ranking.liked=6", "that counts")]
)
def test_a_ranking_that_cannot_be_made_is_refused_before_training(
    key: str, said: str, tmp_path: Path
) -> None:
    told = call("run", films(tmp_path), "--out", tmp_path / "r", "--set", key)
    assert (told.exit_code, said in told.stderr) == (2, True), told.stderr
    assert not (tmp_path / "r").exists()


def test_somebody_new_gets_a_list_without_what_it_has(tmp_path: Path) -> None:
    config, run = films(tmp_path), tmp_path / "r"
    assert call("run", config, "--out", run, "--set", "method.kind=furl").exit_code == 0
    (tmp_path / "new.csv").write_text("person,film,stars\nzoe,100,5\nzoe,103,5\nzoe,107,1\n")
    asked = ("recommend", run, "--new", tmp_path / "new.csv", "--n", "20", "--out", tmp_path / "l.csv")
    told = call(*asked)
    assert "fedkeep personalize" in told.stderr  # its private part is not fitted yet
    assert call("personalize", run, "--new", tmp_path / "new.csv").exit_code == 0
    told = call("recommend", run, "--client", "zoe")
    assert (told.exit_code, "--new FILE" in told.stderr) == (2, True)
    assert call(*asked).exit_code == 0
    with (tmp_path / "l.csv").open() as file:
        rows = list(csv.DictReader(file))
    known = {str(film) for film in range(100, 120)}
    assert {row["item"] for row in rows} == known - {"100", "103", "107"}
    assert {row["client"] for row in rows} == {"zoe"}
    assert all(1 < float(row["score"]) < 5 for row in rows)  # stars, as they were read
    assert float(rows[0]["score"]) == max(float(row["score"]) for row in rows)

"""PFedRec on MovieLens-100K beside its published numbers, and FURL, FedAvg and a pooled model on the same questions.

    python -m benchmarks.movielens [--data FILE] [--folder RUNS] [--only ARM] [--seeds 0 1 2]

FILE is MovieLens' ``u.data`` or ``ml-100k.inter`` (default: that of the installed package ``recbole``). Each finished run
is a file of RUNS and is not run again; ``results/movielens.json`` and ``.md`` hold them all. A run of PFedRec takes about ten
minutes of a core, and those of the others half a minute.

PFedRec (C. Zhang et al., IJCAI 2023) as in its authors' public repository Zhangcx19/IJCAI-23-PFedRec: every user's last
rating is tested and the one before validates, each among 99 items that the user never rated; any rating is a 1. A round
is one pass of all 943 users over their ratings with 4 drawn items each, in mini-batches of 256 pairs; on each, a step of the
private score function (SGD, rate 0.1), then one of the item table (0.1 · 1682 · 80). The server takes the mean of tables; a
user predicts with its own table as it was trained last. 100 rounds, 32 numbers an item.

``as published`` draws training items as the authors do, from those that the user never rated at all: what is tested is
never among them, so a user learns what it is not. ``leave_one_out`` leaves it in, as whoever trains cannot know it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import fedkeep
from benchmarks.measure import RESULTS, processor
from fedkeep import FederatedData, Phase, Run, simulate
from fedkeep.core.net import Net
from fedkeep.core.params import Batch, Params, State
from fedkeep.core.seeds import numpy_generator
from fedkeep.data import movielens
from fedkeep.data.leave_one_out import leave_one_out
from fedkeep.data.readers import movielens_100k
from fedkeep.experiments.environment import environment
from fedkeep.methods import Client, Finish, Finished, Method, averaging, fedavg, furl
from fedkeep.methods.base import forward
from fedkeep.methods.candidates import drawn, pointwise
from fedkeep.models import MatrixFactorization
from fedkeep.split import Split

DIM, AGAINST, ETA, RATE, ROUNDS = 32, 4, 80, 0.1, 100
PAIRS = 256  # a mini-batch, of which one in 1 + AGAINST is a rating
TABLE = "item.weight"
PUBLISHED: dict[str, Any] = {
    "source": "X. He et al., Co-clustering for Federated Recommender System, WWW 2024 (arXiv:2411.01690), table 4: PFedRec "
    "on MovieLens-100K, the lowest of five trials; read in public notes on that paper, not in the paper itself",
    "hr10": 0.7105,
    "ndcg10": 0.4389,
    "not found": "MovieLens-100K's column of the tables of PFedRec (IJCAI 2023) and FedNCF (2022) itself",
}


class Scored(nn.Module):
    """PFedRec's model: a score function, linear, of an item's numbers."""

    def __init__(self, items: int) -> None:
        super().__init__()
        self.item = nn.Embedding(items, DIM)
        self.score = nn.Linear(DIM, 1)

    def forward(self, item: Tensor) -> Tensor:
        """Return scores, of the shape of the items."""
        scores: Tensor = self.score(self.item(item)).squeeze(-1)
        return scores


def own_table(net: Net) -> State:
    """Return a new user's own table: the model's."""
    return {TABLE: net.initial()[TABLE]}


def keep_table(done: Finish) -> Finished:
    """Keep the table as it was trained here, beside the change of it that leaves."""
    return Finished(state={TABLE: done.trained[TABLE]})


def by_own_table(net: Net, params: Params, batch: Batch) -> Any:
    """Predict with the user's own table."""
    return net({**params, TABLE: params[f"client/{TABLE}"]}, batch)


def pfedrec(items: int) -> Method:
    """Return PFedRec."""
    score = Phase(
        loss=drawn(pointwise(), AGAINST),
        batch_size=PAIRS // (1 + AGAINST),
        optimizer=fedkeep.sgd(RATE),
        trains="private",
    )
    table = score.but(trains="federated", optimizer=fedkeep.sgd(RATE * items * ETA))
    client = Client(
        phases=(score, table), turns="batches", state=own_table, finish=keep_table, tables="whole"
    )
    return Method(
        name="pfedrec",
        split=Split("score.*"),
        client=client,
        server=averaging(by="uniform"),
        predict=by_own_table,
        predict_shared=None,
    )


def never_asked(questions: FederatedData, seed: int) -> FederatedData:
    """Return questions whose training items are drawn as PFedRec's authors do: never what validates or is tested."""
    item, label = np.array(questions.columns["item"]), np.asarray(questions.columns["label"])
    split = np.full(len(item), "train", dtype="<U5")
    for client, name in enumerate(questions.ids):
        rows = np.asarray(questions.rows(client))
        taken = item[rows, label[rows]]
        left = [np.asarray(questions.rows(client, part)) for part in ("valid", "test")]
        for part, of in zip(("valid", "test"), left, strict=True):
            split[of] = part
        asked = np.concatenate([item[of, label[of]] for of in left])
        train = np.asarray(questions.rows(client, "train"))
        own = item[train]
        wrong = np.isin(own, asked)
        free = np.setdiff1d(np.arange(questions.meta["items"]), taken)
        own[wrong] = numpy_generator(seed, "never_asked", name).choice(free, wrong.sum())
        item[train] = own
    return FederatedData.from_columns(
        client=[questions.ids[c] for c in questions.clients_of(np.arange(len(item)))],
        columns={"item": item, "label": label},
        split=split.tolist(),
        meta=dict(questions.meta),
    )


def ranked(run: Run) -> dict[str, float]:
    """Return the full ranking's HR@10 and NDCG@10 on test."""
    found = run.full_ranking("test", ks=(10,)).metrics
    return {"hr10": found["hr@10"], "ndcg10": found["ndcg@10"]}


def sampled(run: Run, round: int) -> dict[str, float]:
    """Return HR@10 and NDCG@10 on test among 100, as recorded at a round."""
    of = {r.metric: r.value for r in run.history if (r.round, r.split, r.client) == (round, "test", None)}
    return {name: of[name] for name in ("hr10", "ndcg10")}


def both(run: Run) -> dict[str, Any]:
    """Return a run's numbers at its round that is best on valid, and those at the round that is best on test."""
    test = {r.round: r.value for r in run.history if (r.split, r.client, r.metric) == ("test", None, "hr10")}
    best = max(test, key=lambda one: test[one])
    return {
        "round": run.round,
        "sampled": sampled(run, run.round),
        "best test round": best,
        "sampled, best test round": sampled(run, best),
        "full": ranked(run),
        "curve": {str(one): round(value, 4) for one, value in test.items()},
    }


def train(arm: str, questions: FederatedData, seed: int, rounds: int = ROUNDS) -> dict[str, Any]:
    """Return what an arm finds with a seed."""
    torch.manual_seed(seed)
    items = int(questions.meta["items"])
    if arm.startswith("PFedRec"):
        run = simulate(
            Scored(items),
            pfedrec(items),
            never_asked(questions, seed) if "as published" in arm else questions,
            rounds=rounds,
            cohort=len(questions),
            seed=seed,
            engine="sequential",
            evaluate_every=5,
            progress=False,
        )
        averaged = replace(run, method=run.method.but(predict=forward))
        among = averaged.evaluate("test")
        shared = {"full": ranked(averaged), "sampled": {name: among[name] for name in ("hr10", "ndcg10")}}
        return both(run) | {"with the server's table": shared}
    usual = Phase(batch_size=16, optimizer=fedkeep.sgd(0.5))
    server = averaging(fedkeep.adam(0.05, eps=1e-3))
    factors = ("user", "user_bias")
    method = (
        furl(factors, private_init=("normal", 0.1), local=usual, server=server)
        if arm != "FedAvg"
        else fedavg(local=usual, server=server)
    )
    run = simulate(
        MatrixFactorization(items, dim=8),
        method,
        questions,
        epochs=8,
        cohort=50,
        seed=seed,
        centralised=arm == "Pooled",
        engine="auto" if arm == "Pooled" else "vectorised",
        evaluate_every=38,
        progress=False,
    )
    return both(run)


ARMS = ("PFedRec, draws as published", "PFedRec, draws of leave_one_out", "FURL", "FedAvg", "Pooled")


TITLE = "MovieLens-100K: the last film of each user"
WAYS = (
    "sampled",
    "sampled, best test round",
    "sampled, the server's table",
    "full",
    "full, the server's table",
)
"""What a run is judged by: among 100 items or all, at its round that is best on valid, or (as no one may choose) on test."""


def spread(found: list[float]) -> dict[str, float | None]:
    """Return mean and deviation over seeds; of one seed there is no deviation."""
    return {"mean": statistics.mean(found), "std": statistics.stdev(found) if len(found) > 1 else None}


def summary(cells: Mapping[str, Any]) -> dict[str, Any]:
    """Return mean and deviation over the seeds of each arm that has run."""
    found: dict[str, Any] = {}
    for arm in ARMS:
        runs = [dict(cell["found"]) for cell in cells.values() if cell["arm"] == arm]
        for run in runs:
            run |= {
                f"{way}, the server's table": one
                for way, one in run.get("with the server's table", {}).items()
            }
        if runs:
            found[arm] = {"seeds": len(runs)} | {
                way: {metric: spread([run[way][metric] for run in runs]) for metric in ("hr10", "ndcg10")}
                for way in WAYS
                if way in runs[0]
            }
    return found


def page(found: Mapping[str, Any]) -> str:
    """Return the table of a summary as a page."""
    about = (
        "HR@10 and NDCG@10 in percent, mean and deviation over seeds. The user's last film among 100 (sampled) or among all that it "
        "has not rated (full), at the round that is best on the last film but one; beside it at the round that is best on the test "
        "film itself, which nobody may choose. A user of PFedRec predicts with its own table of films, or with the server's."
    )
    known = (
        f"Published: HR@10 {100 * PUBLISHED['hr10']:.2f}, NDCG@10 {100 * PUBLISHED['ndcg10']:.2f}, sampled. {PUBLISHED['source']}. "
        f"Not found: {PUBLISHED['not found']}."
    )
    table = ["| | seeds | judged | HR@10 | NDCG@10 |", "|:---|---:|:---|---:|---:|"]
    for arm, ways in found.items():
        for way in (way for way in WAYS if way in ways):
            cells = [_percent(ways[way][metric]) for metric in ("hr10", "ndcg10")]
            table.append(f"| {arm} | {ways['seeds']} | {way} | {cells[0]} | {cells[1]} |")
    return (
        "\n\n".join([f"# {TITLE}", "`python -m benchmarks.movielens`", about, known, "\n".join(table)]) + "\n"
    )


def _percent(one: Mapping[str, float | None]) -> str:
    std = "" if one["std"] is None else f" ± {100 * one['std']:.1f}"
    return f"{100 * (one['mean'] or 0.0):.1f}{std}"


def main() -> None:
    """Run what is missing, and write the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, help="u.data or ml-100k.inter")
    parser.add_argument("--folder", type=Path, default=Path("runs") / "movielens")
    parser.add_argument("--only", default="", help="arms whose name has this text")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    given = parser.parse_args()
    torch.set_num_threads(1)
    ratings = movielens(given.data) if given.data else movielens_100k()
    given.folder.mkdir(parents=True, exist_ok=True)
    for seed in given.seeds:
        questions = leave_one_out(ratings, seed=seed)
        for arm in (arm for arm in ARMS if given.only in arm):
            file = given.folder / f"{arm.replace(', ', '-').replace(' ', '-')}-{seed}.json"
            if file.exists():
                continue
            began = time.process_time()
            found = train(arm, questions, seed)
            cell = {"arm": arm, "seed": seed, "found": found, "core seconds": time.process_time() - began}
            made = {"processor": processor(), **environment()}
            file.write_text(json.dumps({**cell, "environment": made}, indent=1) + "\n", encoding="utf-8")
            print(arm, seed, found["sampled"], found["full"], flush=True)
    cells = {
        file.stem: json.loads(file.read_text(encoding="utf-8"))
        for file in sorted(given.folder.glob("*.json"))
    }
    found = summary(cells)
    content = {"command": "python -m benchmarks.movielens", "published": PUBLISHED, "summary": found}
    text = json.dumps({**content, "cells": cells}, indent=1, allow_nan=False)
    (RESULTS / "movielens.json").write_text(f"{text}\n", encoding="utf-8")
    (RESULTS / "movielens.md").write_text(page(found), encoding="utf-8")


if __name__ == "__main__":
    main()

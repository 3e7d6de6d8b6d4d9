"""Matrix factorisation: a user's row stays with the user, the films' rows are federated.

Ratings are generated and written in the format of MovieLens 100K (``u.data``). Give the folder of the real set to run
on it: python examples/movielens_like.py ml-100k

``main`` does it in Python, ``by_toml`` by commands.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

import fedkeep
from examples.shell import fedkeep as fedkeep_
from fedkeep import Phase
from fedkeep.data.readers import movielens
from fedkeep.methods import terms
from fedkeep.models import MatrixFactorization

CONFIG = """
[data]
reader = "movielens"
path = "u.data"
[model]
kind = "matrix_factorization"
dim = 8
[method]
kind = "furl"
private = "user*"
[run]
epochs = 10
[ranking]
ks = [10]
liked = 4
"""
COMMANDS = """
compare films.toml --methods furl,fedavg --seeds 2 --out compared
personalize compared/runs/furl-0 --new new.data
recommend compared/runs/furl-0 --new new.data --n 10 --out new.csv
recommend compared/runs/furl-0 --n 10 --out lists.csv
"""


def write_ratings(folder: Path, users: int = 100, films: int = 60, each: int = 30) -> None:
    draw = np.random.default_rng(0)
    taste, kind = draw.standard_normal((users, 3)), draw.standard_normal((films, 3))
    lines = []
    for user in range(users):
        for film in draw.choice(films, each, replace=False):
            score = 3.3 + 0.6 * taste[user] @ kind[film] + 0.3 * draw.standard_normal()
            rating = int(np.clip(np.rint(score), 1, 5))
            lines.append(f"{user + 1}\t{film + 1}\t{rating}\t{draw.integers(874_724_710, 893_286_638)}")
    (folder / "u.data").write_text("\n".join(lines) + "\n", encoding="utf-8")


def main(folder: Path | None = None, epochs: int = 40) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as temporary:
        if folder is None:
            folder = Path(temporary)
            write_ratings(folder)
        everyone = movielens(folder).split_per_user(seed=0)
    data, new = (
        everyone.select(range(len(everyone) - 5)),
        everyone.select(range(len(everyone) - 5, len(everyone))),
    )
    torch.manual_seed(0)
    model = MatrixFactorization(items=data.meta["items"], dim=8)
    with torch.no_grad():
        model.mean.fill_(3.5)
    loss = terms.squared_error() + 0.02 * terms.l2_penalty("user")
    method = fedkeep.methods.furl(
        "user*",
        private_init=("normal", 0.1),
        local=Phase(loss=loss, optimizer=fedkeep.sgd(0.1, rates={"item*": 1.0}), batch_size=8),
    )
    run = fedkeep.simulate(model, method, data, epochs=epochs, cohort=10, evaluate_every=0)
    own, shared = run.evaluate("test")["rmse"], run.evaluate("test", stage="shared")["rmse"]
    print(f"{data}\nRMSE on test: {own:.3f} with the users' own rows, {shared:.3f} without them")
    ranked = run.full_ranking(ks=(10,), liked=4)
    print(f"All films that a user has not rated, ranked: {ranked.metrics}")
    run.fit(rows=new)  # people who come later: their own rows alone are fitted
    later = run.on(new)
    lists = later.recommend(new.ids, 10)
    print(f"For {new.ids[0]}: films {lists['item'].to_pylist()[:10]}")
    found = {
        "own": own,
        "shared": shared,
        "ndcg@10": ranked.metrics["ndcg@10"],
        "lists": float(lists.num_rows),
    }
    for stage in ("own", "shared"):
        found[f"new, {stage}"] = later.evaluate(clients=new.ids, stage=stage)["rmse"]
    return found


def by_toml(folder: Path) -> str:
    """Do the same by commands, in a folder with ``u.data``, whose last five users come later; return all that was said."""
    ratings = folder / "u.data"
    rows = ratings.read_text(encoding="latin-1").splitlines(keepends=True)
    later = sorted({int(row.split()[0]) for row in rows})[-5:]
    for file, new in ((ratings, False), (folder / "new.data", True)):
        file.write_text("".join(row for row in rows if (int(row.split()[0]) in later) == new))
    (folder / "films.toml").write_text(CONFIG)
    return "\n".join(fedkeep_(folder, command) for command in COMMANDS.strip().splitlines())


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
    with tempfile.TemporaryDirectory() as name:
        write_ratings(Path(name))
        print(by_toml(Path(name)))

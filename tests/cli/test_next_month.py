"""Next month's file on the command line: new customers, one gone, a new label; then evaluate, export and predict."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from fedkeep import load_run
from fedkeep.core.run_files import read_info
from tests.cli.conftest import Command
from tests.commands import succeeded

TOML = """
[data]
reader = "table"
path = "may.csv"
user = "customer"
label = "plan"
features = ["a", "b"]
[method]
kind = "fedrep"
[run]
rounds = 3
engine = "sequential"
"""


def write(path: Path, customers: list[str], rows: int, more: Sequence[Sequence[object]] = ()) -> None:
    with path.open("w", newline="") as file:
        out = csv.writer(file)
        out.writerow(["customer", "a", "b", "plan"])
        for name in customers:
            draws = np.random.default_rng(sum(name.encode())).normal(size=(rows, 2))
            for a, b in draws.tolist():
                out.writerow(
                    [name, round(a, 4), round(b, 4), "basic" if a < -0.5 else "gold" if a < 0.5 else "plus"]
                )
        out.writerows(more)


@pytest.fixture
def months(fedkeep: Command, tmp_path: Path) -> Path:
    (tmp_path / "shop.toml").write_text(TOML)
    write(tmp_path / "may.csv", ["ann", "bob", "cyd", "dan"], 20)
    new = [["eve", 0.1 * n, 1.0, "max"] for n in range(12)]
    write(tmp_path / "june.csv", ["bob", "cyd", "dan", "eve"], 30, new)
    return tmp_path


def test_next_month(months: Path, fedkeep: Command) -> None:
    fedkeep("run", "shop.toml", "--out", "may")
    (months / "may.csv").unlink()  # nothing of it is wanted again
    given = ("--set", "data.path=june.csv", "--continue-from", "may")
    out = fedkeep("run", "shop.toml", *given, "--out", "june").output
    for part in (
        "after round 3",
        "72 new examples",
        "60 that stay",
        "1 new client",
        "1 gone",
        "1 new class",
    ):
        assert part in " ".join(out.split())
    info = read_info(Path("june"))
    assert info["continues"]["round"] == 3
    assert info["rounds"] == 6
    assert info["data"]["sizes"]["classes"] == 4
    first = fedkeep("evaluate", "june").output
    fedkeep("run", "june", "--resume")  # finished: nothing is trained again
    assert fedkeep("evaluate", "june").output == first
    fedkeep("export", "june", "--all", "--out", "models")
    told = fedkeep("predict", "models", "--data", "june.csv").stdout.splitlines()
    assert told[0] == "client,prediction,p(basic),p(gold),p(plus),p(max)"
    assert len(told) == 133


WORDS = """
[data]
reader = "table"
path = "may.csv"
user = "customer"
label = "plan"
text = "said"
tokens = "word"
vocabulary = {size}
[model]
kind = "bag_of_words"
[method]
kind = "fedrep"
[run]
rounds = 2
engine = "sequential"
"""


@pytest.mark.parametrize(("size", "words"), [(100, 3), (7, 1), (6, 0)])
def test_new_words_get_rows_while_the_vocabulary_has_room(
    fedkeep: Command, tmp_path: Path, size: int, words: int
) -> None:
    (tmp_path / "shop.toml").write_text(WORDS.format(size=size))
    for month, own in (("may", "old words here today"), ("june", "old words with new news")):
        lines = [f"{c},{own},{'yes' if n % 2 else 'no'}" for c in ("ann", "bob") for n in range(20)]
        (tmp_path / f"{month}.csv").write_text("\n".join(["customer,said,plan", *lines]) + "\n")
    fedkeep("run", "shop.toml", "--out", "may")
    rates = [
        f"--set=method.optimizer.{key}"
        for key in ("kind=sgd", "learning_rate=0.1", "rates={'*embedding*'=0.0}")
    ]
    given = ("--set", "data.path=june.csv", "--continue-from", "may", *rates)
    done = succeeded(fedkeep("run", "shop.toml", *given, "--out", "june"))
    assert (f"{words} new word" in " ".join(done.output.split())) == (words > 0)
    before, after = (load_run(tmp_path / month).last for month in ("may", "june"))
    (name,) = [n for n in before.server if n.endswith("embedding.weight")]
    assert after.data.meta["vocabulary"]["symbols"][:4] == before.data.meta["vocabulary"]["symbols"]
    assert len(after.server[name]) == len(before.server[name]) + words == 6 + words
    assert torch.equal(after.server[name][:6], before.server[name])


def test_a_month_without_a_column_is_refused(months: Path, fedkeep: Command) -> None:
    fedkeep("run", "shop.toml", "--out", "may")
    (months / "july.csv").write_text("customer,a,plan\nann,1,gold\n")
    wrong = ("--set", "data.path=july.csv", "--continue-from", "may", "--out", "july")
    assert "'b'" in fedkeep("run", "shop.toml", *wrong).stderr
    assert not Path("july").exists()
    assert "--out" in fedkeep("run", "shop.toml", "--continue-from", "may").stderr

"""``fedkeep worth``."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fedkeep.data import FederatedData
from fedkeep.data.leave_one_out import leave_one_out
from tests.cli.conftest import Command
from tests.commands import succeeded

pytestmark = pytest.mark.usefixtures("undrawn")

SHARED = ["--set", "run.evaluate_shared=true"]
LOCAL = ["--set", "method={kind='local'}", "--set", "name='Local'"]


@pytest.fixture
def runs(fedkeep: Command) -> None:
    for seed in (0, 1):
        assert fedkeep("run", "toy.toml", "--out", f"r{seed}", "--seed", seed, *SHARED).exit_code == 0
    assert fedkeep("run", "toy.toml", "--out", "local0", *LOCAL).exit_code == 0


def test_it_says_the_gain_in_words_and_as_a_table(fedkeep: Command, runs: None) -> None:
    result = succeeded(fedkeep("worth", "r0", "local0"))
    lines = result.stdout.splitlines()
    assert lines[0] == "Toy against local training alone:"
    assert lines[1].startswith("  Gain ")
    assert "Toy against the shared part alone:" in lines
    assert "  With 6 users nothing is claimed about users like these; that takes 10." in lines
    assert (
        "  With 1 seed this is about these trained models; a claim about the method takes 3 seeds." in lines
    )
    assert "All comparisons" in lines


def test_json_has_every_user(fedkeep: Command, runs: None) -> None:
    result = succeeded(fedkeep("worth", "r0", "--against", "local0", "--metric", "loss", "--json"))
    found = json.loads(result.stdout)
    assert [(c["against"], c["unit"]) for c in found] == [
        ("local training alone", "nats"),
        ("the shared part alone", "nats"),
    ]
    assert [user["client"] for user in found[0]["clients"]] == [f"user-{k}" for k in range(6)]


def test_what_a_boss_would_ask_for_comes_first(fedkeep: Command, runs: None) -> None:
    plain = ("--set", "method.kind=fedavg", "--set", "run.evaluate_shared=false")
    assert fedkeep("run", "toy.toml", "--out", "fedavg0", *plain).exit_code == 0
    pooled = (*plain, "--set", "run.centralised=true")
    assert fedkeep("run", "toy.toml", "--out", "pooled0", *pooled).exit_code == 0
    result = succeeded(
        fedkeep(
            "worth",
            "r0",
            "--against",
            "local0",
            "--against",
            "pooled0",
            "--against",
            "fedavg0",
            "--references",
            "--json",
        )
    )
    assert [c["against"].partition(" (")[0] for c in json.loads(result.stdout)] == [
        "FedAvg",
        "a pooled model of all rows",
        "counting each user's labels",
        "local training alone",
        "the shared part alone",
    ]


def test_data_that_follow_the_seed_are_not_mixed(refused: Callable[..., str], runs: None) -> None:
    message = refused("worth", "r0", "r1")
    assert " was run on other data than " in message
    assert message.endswith("where they follow the seed, compare one seed at a time.")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["r0", "--metric", "rmse"], "rmse has no value for a single example"),
        (
            ["r1", "--against", "local0"],
            "Seeds differ between methods: Toy has 1, local training alone has 0.",
        ),
        (["local0"], "None of these runs personalises: Local."),
        (["nowhere"], "There is no run in nowhere: there is no such folder."),
    ],
)
def test_wrong_use(refused: Callable[..., str], runs: None, words: list[str], message: str) -> None:
    assert message in refused("worth", *words)


def test_damaged_examples_are_named(refused: Callable[..., str], runs: None) -> None:
    (path,) = Path("r0").glob("examples-*.safetensors")
    path.write_bytes(path.read_bytes()[:-1])
    assert (
        refused("worth", "r0")
        == f"Error: {path} is damaged: its hash is not the committed one. Restore the run from a copy."
    )


def against_counting(fedkeep: Command, folder: str) -> tuple[list[str], str]:
    """Return what is said of a run beside counting, and its page."""
    result = succeeded(fedkeep("worth", folder, "--references"))
    assert fedkeep("report", folder).exit_code == 0
    return result.stdout.splitlines(), Path(folder, "report.md").read_text(encoding="utf-8")


def test_counting_is_a_reference_that_reads_the_data(fedkeep: Command, runs: None) -> None:
    lines, page = against_counting(fedkeep, "r0")
    assert "Toy against counting each user's labels:" in lines
    assert "Toy against counting each user's labels | Gain " in page
    assert "beat counting each user's labels" in page or "beats counting each user's labels" in page


ITEMS = """
data = { reader = "saved", folder = "questions" }
model = { kind = "matrix_factorization" }
method = { kind = "furl", loss = { kind = "LOSS" } }
run = { rounds = 1, cohort = 4 }
"""


def ratings(split: list[str] | None = None) -> FederatedData:
    """Return twelve users' ratings of eight of 30 items each."""
    item = np.concatenate([np.random.default_rng(user).permutation(30)[:8] for user in range(12)])
    columns = {"item": item, "label": np.float32(1 + item % 5), "time": np.arange(96)}
    meta = {"items": 30, "task": "regression"}
    return FederatedData.from_columns(np.repeat(np.arange(12), 8), columns, split, meta)


PARTS = [*["train"] * 4, *["valid"] * 2, *["test"] * 2] * 12


@pytest.mark.parametrize(
    ("questions", "loss", "called"),
    [
        (lambda: leave_one_out(ratings(), against=15), "cross_entropy", "counting what all users took"),
        (lambda: ratings(PARTS), "squared_error", "each user's mean label"),
    ],
    ids=["ranking", "regression"],
)
def test_counting_is_called_what_it_counts(
    questions: Callable[[], FederatedData],
    loss: str,
    called: str,
    fedkeep: Command,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FEDKEEP_DATA", ".")
    questions().save("questions")
    Path("items.toml").write_text(ITEMS.replace("LOSS", loss), encoding="utf-8")
    assert fedkeep("run", "items.toml", "--out", "q").exit_code == 0
    lines, page = against_counting(fedkeep, "q")
    assert f"furl against {called}:" in lines
    assert f"furl against {called} | Gain " in page
    assert "of a ranking what all users took most often; it learns nothing else." in page

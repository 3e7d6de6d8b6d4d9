"""Models compared by balanced accuracy and macro-F1: each client's share in the number over all examples."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from fedkeep.core.errors import ConfigError, RunError
from fedkeep.metrics import CLASS_METRICS
from fedkeep.metrics.worth.best import standings
from fedkeep.report.groups import configurations
from fedkeep.report.pairing import Side, check_metric, check_spread, own_side, pair, pooled_gains, shared_side
from fedkeep.report.runs import read_run
from fedkeep.tasks import MULTICLASS, REGRESSION
from fedkeep.tasks.results import ExampleResults
from tests.refusals import raises
from tests.report.run_folders import write_examples

USERS = 12
RNG = np.random.default_rng(5)
CLIENT = np.repeat(np.arange(USERS), RNG.integers(3, 9, USERS))
TRUE = np.concatenate([[0, 1, 2, *RNG.integers(0, 3, n - 3)] for n in np.bincount(CLIENT)])
GUESS = {
    model: np.where(RNG.random(len(TRUE)) < right, TRUE, RNG.integers(0, 4, len(TRUE)))
    for model, right in (("own", 0.8), ("shared", 0.3))
}


def examples(true: np.ndarray = TRUE, kept: bool = True) -> ExampleResults:
    columns = {"client": torch.from_numpy(CLIENT.astype(np.int32)), "row": torch.arange(len(true))}
    for model, guess in GUESS.items():
        columns[f"{model}/score"] = torch.from_numpy((guess == true).astype(np.uint8))
        columns[f"{model}/loss"] = torch.ones(len(true), dtype=torch.float64)
        if kept:
            columns[f"{model}/class"] = torch.from_numpy(guess.astype(np.int32))
    if kept:
        columns["class"] = torch.from_numpy(true.astype(np.int32))
    return ExampleResults(round=4, tensors=columns, kinds={None: MULTICLASS})


@pytest.fixture
def sides(write_run: Callable[..., Path]) -> Callable[[ExampleResults], tuple[Side, Side]]:
    def make(found: ExampleResults) -> tuple[Side, Side]:
        path = write_run("FURL-0", name="FURL", identity={"metrics": ["macro_f1"]})
        write_examples(path, found)
        own = own_side(configurations([read_run(path)])[0])
        shared = shared_side(own)
        assert shared is not None
        return own, shared

    return make


@pytest.mark.parametrize("name", CLASS_METRICS)
def test_shares_of_clients_by_leaving_out(
    name: str, sides: Callable[[ExampleResults], tuple[Side, Side]]
) -> None:
    own, shared = sides(examples())
    found = pair(own, shared, None, name)
    assert found.client.tolist() == list(range(USERS))
    metric = CLASS_METRICS[name]
    for got, model in ((found.ours, "own"), (found.theirs, "shared")):
        assert got.mean() == pytest.approx(metric(TRUE, GUESS[model]), rel=1e-12)
        left = np.array([metric(TRUE[k != CLIENT], GUESS[model][k != CLIENT]) for k in range(USERS)])
        assert got[0] - got[0].mean() == pytest.approx((USERS - 1) * (left.mean() - left), abs=1e-12)
    best, other = standings([found, pair(shared, shared, None, name)])
    assert (best.is_best, other.told_apart) == (True, True)
    assert other.behind.mean == pytest.approx(metric(TRUE, GUESS["shared"]) - metric(TRUE, GUESS["own"]))


def test_a_gain_over_all_examples_where_the_run_asked_for_it(
    sides: Callable[[ExampleResults], tuple[Side, Side]],
) -> None:
    gains = dict(pooled_gains(*sides(examples()), None, CLIENT))
    assert list(gains) == ["accuracy", "macro_f1"]
    f1 = CLASS_METRICS["macro_f1"]
    assert gains["macro_f1"].mean == pytest.approx(f1(TRUE, GUESS["own"]) - f1(TRUE, GUESS["shared"]))
    assert gains["macro_f1"].low > 0


def test_a_run_that_keeps_no_classes(sides: Callable[[ExampleResults], tuple[Side, Side]]) -> None:
    own, shared = sides(examples(kept=False))
    assert list(dict(pooled_gains(own, shared, None, CLIENT))) == ["accuracy"]
    with raises(ConfigError, said="keeps no predicted classes, so it can", metric="macro_f1"):
        pair(own, shared, None, "macro_f1")


def test_a_class_of_nine_users_is_too_rare(sides: Callable[[ExampleResults], tuple[Side, Side]]) -> None:
    rare = np.where((TRUE == 2) & (CLIENT < 3), 1, TRUE)
    wanted = (
        "macro_f1 wants test examples of every class of 10 users at least, so that leaving out one shows what is chance; "
        "of the class {} 9 have some. Choose --metric accuracy or loss."
    )
    with raises(ConfigError, text=wanted.format(2)):
        pair(*sides(examples(rare)), None, "macro_f1")
    with raises(ConfigError, text=wanted.format("'c'")):
        check_spread("macro_f1", np.append(rare, -1), np.append(CLIENT, 0), ["a", "b", "c"])


def test_what_has_no_classes() -> None:
    with raises(ConfigError, kind="regression", metric="macro_f1"):
        check_metric("macro_f1", REGRESSION)


def test_a_file_with_labels_and_without_predictions_is_damaged() -> None:
    held = examples().to_tensors()
    assert ExampleResults.checked(Path("f"), 1, held)().classes is not None
    del held["own/class"]
    with pytest.raises(RunError, match="'own/class' is missing"):
        ExampleResults.checked(Path("f"), 1, held)

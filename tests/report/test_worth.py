"""The worth report in words, and its section of a page."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedkeep.core.errors import ConfigError
from fedkeep.experiments.worth import worth_of
from fedkeep.metrics.worth.gains import Paired, worth
from fedkeep.metrics.worth.intervals import Interval
from fedkeep.report.charts import Gains, Lines
from fedkeep.report.page import write_report
from fedkeep.report.worth_page import (
    Comparison,
    _figures,
    examples_table,
    fairness_table,
    limits,
    plain,
    pooled_table,
    sentences,
    tenths,
    told_table,
    worth_table,
)
from fedkeep.tasks import MULTICLASS
from fedkeep.tasks.results import ExampleResults, JudgedClients
from tests import refusals
from tests.report.run_folders import write_examples


def comparison(
    gains: list[int], losses: list[int], same: int = 20, seeds: int = 1, **more: Any
) -> Comparison:
    """Client k gets so many examples right that the reference gets wrong, and the other way round."""
    ours = [[1] * g + [0] * w + [1] * same for g, w in zip(gains, losses, strict=True)]
    theirs = [[0] * g + [1] * w + [1] * same for g, w in zip(gains, losses, strict=True)]
    sides = [np.array([[v for own in side for v in own]] * seeds) for side in (ours, theirs)]
    p = Paired(
        clients=tuple(f"user-{k}" for k in range(len(gains))),
        seeds=tuple(range(seeds)),
        client=np.repeat(np.arange(len(gains)), [len(own) for own in ours]),
        ours=sides[0],
        theirs=sides[1],
        **more,
    )
    return Comparison(
        ours="FURL",
        theirs="the shared part alone",
        task=None,
        metric="accuracy",
        unit="points",
        found=worth(p),
        pooled=(),
    )


def test_the_gain_comes_first_and_then_who() -> None:
    c = comparison([10] * 9 + [0], [0] * 9 + [10], same=30, seeds=3)
    # nine clients gain 10 of 40, one loses 10 of 40: mean 20 points, deviation 15.81 points, t with 9 degrees 2.262
    assert sentences(c)[:2] == (
        "Gain 20.0 points (8.7 to 31.3). At least 90 % of users gain, at least 10 % lose.",
        "It beats the shared part alone, for users like these: the whole 95 % interval lies above 0.",
    )
    assert sentences(c)[2] == "Named: 9 users better off, 1 worse off. Worse off: user-9."
    assert list(limits(c.found)) == [
        "The runs keep no results on validation, so the tenth of users who gain least can't be chosen fairly."
    ]


def test_at_least_so_many_percent_are_rounded_down() -> None:
    c = comparison([30, 30, 0], [0, 0, 30])
    assert (c.found.at_least_better, c.found.at_least_worse) == (2, 1)
    assert sentences(c)[0].endswith("At least 66 % of users gain, at least 33 % lose.")


def test_a_model_that_does_not_beat_its_reference_says_so() -> None:
    same = comparison([3] * 7 + [0] * 5, [0] * 7 + [3] * 5)
    assert sentences(same)[1] == (
        "It does not beat the shared part alone for certain: the 95 % interval, for users like these and these trained "
        "models, holds 0."
    )
    worse = comparison([0] * 12, [5, 6] * 6)
    assert sentences(worse)[1] == (
        "It does not beat the shared part alone, and is worse for users like these and these trained models: the whole "
        "95 % interval lies below 0."
    )
    assert "a user needs about 156 test examples." in sentences(same)[2]


def test_claims_that_cannot_be_made_are_named() -> None:
    few = comparison([5, 4, 6], [0, 0, 0], seeds=2, valid=np.array([[0.6, 0.7, 0.8], [0.5, 0.5, 0.1]]))
    assert list(limits(few.found)) == [
        "With 3 users nothing is claimed about users like these; that takes 10.",
        "With 2 seeds this is about these trained models; a claim about the method takes 3 seeds.",
    ]
    assert "for these users and these trained models" in sentences(few)[1]
    assert tenths(few)[0].startswith("The tenth of users who gained least on validation: gain 20.0 points (")
    single = comparison([1, 0], [0, 1], same=0)
    assert sentences(single)[0] == "Gain 0.0 points, without an interval."
    assert sentences(single)[1] == "It can't be told whether it beats the shared part alone."
    assert "Some users have one test example only, so nothing is claimed about these users alone." in limits(
        single.found
    )


def test_at_most_five_users_who_lose_are_named_in_a_sentence() -> None:
    c = comparison([0] * 7, [20, 21, 22, 23, 24, 25, 26])
    assert sentences(c)[2].endswith("Worse off: user-6, user-5, user-4, user-3, user-2 and 2 more.")
    rows = told_table([c]).rows
    assert [row[0] for row in rows] == [f"user-{k}" for k in (6, 5, 4, 3, 2, 1, 0)]
    assert rows[0][2] == "worse off"


def test_losses_are_written_with_their_own_sign() -> None:
    theirs = -np.array([[2.0, 4.0, 6.0, 8.0]])
    p = Paired(clients=("a", "b"), seeds=(0,), client=np.array([0, 0, 1, 1]), ours=theirs + 1, theirs=theirs)
    c = Comparison(ours="A", theirs="B", task=None, metric="loss", unit="nats", found=worth(p), pooled=())
    assert sentences(c)[0].startswith("Gain 1 nats, without an interval.")  # each example gains as much
    assert list(limits(c.found))[-2].startswith("No user's gain varies over test examples")
    shown = fairness_table([c])
    assert shown.columns[4] == "worst tenth begins at, reference"
    assert "A tenth of users has a worse result than where it begins." in shown.note
    (row,) = shown.rows
    assert row[2:6] == ("2", "2", "6.6", "5.6")  # means 3 and 7; the tenth that is worst lies above 6.6


@pytest.mark.parametrize("unit", ["points", "nats"])
def test_a_named_user_whose_examples_all_differ_alike_has_no_interval(unit: str) -> None:
    c = replace(comparison([10, 10, 3], [0, 0, 3], same=0), unit=unit)
    assert [row[3] for row in told_table([c]).rows] == [
        "100.0 points (–)" if unit == "points" else "1 nats (–)"
    ] * 2


def test_a_pooled_gain_that_hangs_on_one_user_is_shown_without_an_interval() -> None:
    pooled = (("auc", Interval(0.31, np.nan, np.nan)), ("accuracy", Interval(0.02, -0.01, 0.05)))
    rows = pooled_table([replace(comparison([3], [0]), pooled=pooled)]).rows
    assert [row[2:] for row in rows] == [
        ("AUC", "+31.0 points", "–"),
        ("Accuracy", "+2.0 points", "−1.0 points to +5.0 points"),
    ]


def test_every_table_tells_tasks_apart() -> None:
    """Two tasks had lines alike in all but the first."""
    c = comparison([10] * 9 + [0], [0] * 9 + [10], trained=np.arange(10))
    found = [
        replace(c, task=task, pooled=(("accuracy", Interval(0.1, 0.0, 0.2)),)) for task in ("like", "share")
    ]
    for make in (worth_table, fairness_table, pooled_table, examples_table, told_table):
        said = {row[1] for row in make(found).rows}
        assert said == {"the shared part alone, like", "the shared part alone, share"}, make.__name__
    assert (
        " Of several tasks this is at the round that is best on valid by the first one."
        in worth_table(found).note
    )
    assert "several tasks" not in worth_table([c]).note


def test_axes_of_gains_have_their_own_tasks_unit() -> None:
    """A regression's gains beside a class's were drawn in points."""
    c = comparison([10] * 9 + [0], [0] * 9 + [10], trained=np.arange(10))
    mixed = [replace(c, task="like"), replace(c, task="age", metric="loss", unit="in squared error")]
    figures = list(_figures(mixed, "FURL"))
    assert len(figures) == 2
    for figure in figures:
        labels = [chart.y_label for chart in figure.panels if isinstance(chart, Gains | Lines)]
        assert labels == ["Gain (points)", "Gain (in squared error)"]


def test_plain_values_say_the_same() -> None:
    c = comparison([10] * 9 + [0], [0] * 9 + [10], same=30)
    found = plain(c)
    assert (found["users"], found["better"], found["worse"], found["helps"]) == (10, 9, 1, True)
    assert found["like_these"]["mean"] == pytest.approx(0.2)
    assert found["sentences"][0] == sentences(c)[0]
    assert found["clients"][9] == {
        "client": "user-9",
        "examples": 40,
        "gain": -0.25,
        "low": pytest.approx(-0.39, abs=0.01),
        "high": pytest.approx(-0.11, abs=0.01),
        "verdict": "worse",
    }


USERS = 12


def examples(seed: int, *models: str, gain: float = 0.3) -> ExampleResults:
    """Twelve clients with 30 examples each; the shared part gets half of them right, our model more."""
    rng = np.random.default_rng(seed)
    client = torch.from_numpy(np.repeat(np.arange(USERS), 30).astype(np.int32))
    columns = {"client": client, "row": torch.arange(len(client))}
    for model in models:
        right = torch.from_numpy(
            (rng.random(len(client)) < 0.5 + (gain if model == "own" else 0)).astype(np.uint8)
        )
        columns |= {f"{model}/score": right, f"{model}/loss": 1.0 - right.double()}
    trained = np.repeat([20, 40, 60, 80], 3)
    roster = JudgedClients(
        np.arange(USERS, dtype=np.int32), trained, tuple(f"<b>{k}</b>" for k in range(USERS))
    )
    valid = {name: column.clone() for name, column in columns.items()}
    return ExampleResults(round=4, tensors=columns, kinds={None: MULTICLASS}, valid=valid, roster=roster)


@pytest.fixture
def runs(write_run: Callable[..., Path]) -> list[Path]:
    folders = []
    for seed in range(3):
        for name, method, models, gain in (
            ("FURL", "furl", ("own", "shared"), 0.3),
            ("Local", "local", ("own",), 0.28),
            ("Global", "fedavg", ("own",), 0),
        ):
            folders.append(write_run(f"{name}-{seed}", name=name, method=method, seed=seed))
            write_examples(folders[-1], examples(seed, *models, gain=gain))
    return folders


def test_a_page_compares_with_all_references(runs: list[Path], tmp_path: Path) -> None:
    page = write_report(runs, tmp_path / "out")
    content = json.loads(page.with_suffix(".json").read_text())
    (section,) = [s for s in content["sections"] if s["title"] == "What personalisation was worth"]
    texts = [b["text"] for b in section["blocks"] if b["kind"] == "text"]
    assert [t.partition(": Gain ")[0] for t in texts] == [
        "FURL against FedAvg (Global)",
        "FURL against local training alone",
        "FURL against the shared part alone",
    ]
    wanted = worth_of(runs)
    assert [" ".join(sentences(c)) for c in wanted] == [t.partition(": ")[2] for t in texts]
    figures = [b["title"] for b in section["blocks"] if b["kind"] == "figure"]
    assert figures == ["Gain of each user: FURL", "Gain by number of training examples: FURL"]
    html = page.read_text()
    assert "<b>0</b>" not in html
    assert html.count("users, from the least gain to the") == 6
    assert "What personalisation was worth" in page.with_suffix(".md").read_text()


def test_a_page_says_what_could_not_be_compared(runs: list[Path], tmp_path: Path) -> None:
    page = write_report([runs[0], runs[4]], tmp_path / "out")  # FURL under seed 0, local under seed 1
    text = page.with_suffix(".md").read_text()
    assert "Seeds differ between methods: FURL has 0, local training alone has 1." in text
    assert "With 1 seed this is about these trained models" in text


def test_a_page_of_a_run_with_nothing_to_compare_says_what_to_do(
    write_run: Callable[..., Path], tmp_path: Path
) -> None:
    folder = write_run("alone", name="FURL")
    write_examples(folder, examples(0, "own"))
    text = write_report([folder], tmp_path / "out").with_suffix(".md").read_text()
    assert (
        "There is nothing to compare FURL with. Either fedkeep run CONFIG --set run.evaluate\\_shared=true"
        in text
    )


def test_a_file_of_examples_that_is_gone_is_noted(runs: list[Path], tmp_path: Path) -> None:
    (runs[0] / "examples-4.safetensors").unlink()
    text = write_report(runs[:1], tmp_path / "out").with_suffix(".md").read_text()
    assert "examples-4.safetensors is missing, so what personalisation was worth cannot be said." in text


def test_named_references_are_the_only_ones(runs: list[Path]) -> None:
    found = worth_of(runs[::3], against=runs[2::3])
    assert [c.theirs for c in found] == ["FedAvg (Global)", "the shared part alone"]
    assert worth_of(runs[1::3], against=runs[2::3])[0].ours == "Local"


def test_runs_that_do_not_personalise_are_refused(runs: list[Path]) -> None:
    with refusals.raises(ConfigError, said="None of these runs personalises: Local,", groups="Local, Global"):
        worth_of([*runs[1::3], *runs[2::3]])


def test_another_split_is_named_where_half_of_the_rows_would_do() -> None:
    same = comparison([3] * 7 + [0] * 5, [0] * 7 + [3] * 5)
    needed, said = same.found.needed, "data.fractions"
    assert needed is not None
    for examples, wanted in ((needed // 5 + 1, True), (needed // 5 - 1, False)):
        found = replace(same.found, examples=np.full(12, examples))
        assert (said in sentences(replace(same, found=found))[2]) is wanted

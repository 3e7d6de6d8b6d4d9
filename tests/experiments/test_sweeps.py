"""Sweeps: equal budgets, the choice by valid, early ends, interruptions. Training is stood in for by formulas."""

from __future__ import annotations

import csv
import json
import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fedkeep.core.errors import ConfigError, NonFiniteError, RunError
from fedkeep.core.records import Record, to_line
from fedkeep.experiments import sweeps
from fedkeep.experiments.config import Config, read_config
from fedkeep.experiments.sweeps import trials
from fedkeep.experiments.sweeps.trials import TrialWatch
from fedkeep.experiments.trackers import EndRun, Facts
from tests.experiments.configs import config
from tests.refusals import raises

optuna = pytest.importorskip("optuna")

SPACE = {"method.optimizer.learning_rate": "{low = 0.001, high = 1.0, log = true}"}
ROUNDS = 4


def valid_of(c: Config, round: int) -> float:
    """Best at the rate 0.1, better with later rounds; seeds differ by a constant."""
    return 0.8 - 0.1 * abs(math.log10(c.method.optimizer.learning_rate) + 1) - 0.05 / round - 0.01 * c.seed


class Trained:
    """Stands in for ``run_config``: a run of four rounds, each of which is judged; test is the opposite of valid."""

    def __init__(self, valid: Callable[[Config, int], float] = valid_of, metric: str = "accuracy") -> None:
        self.metric = metric
        self.valid, self.runs, self.stop_at = valid, list[tuple[str, int]](), 10**9
        self.rounds = 0

    def __call__(self, c: Config, *, out: Path, resume: bool, trackers: Any, **_: Any) -> Any:
        (watch,), path = trackers, out / "records.jsonl"
        records = [
            [
                Record(t, float(t), split, None, self.metric, value, 10)
                for split, value in (("valid", self.valid(c, t)), ("test", 1 - self.valid(c, t)))
            ]
            for t in range(1, ROUNDS + 1)
        ]
        assert resume == (out / "run.json").exists()
        out.mkdir(parents=True, exist_ok=True)
        (out / "run.json").touch()
        done = len(path.read_text().splitlines()) // 2 if path.exists() else 0
        self.runs.append((out.parent.name, done))
        past = [r for each in records[:done] for r in each]
        try:
            watch.started(Facts(run="r", name="r", folder=out, round=done, history=past, since=done + 1))
            for each in records[done:]:
                if self.rounds == self.stop_at:
                    raise KeyboardInterrupt
                self.rounds, done, past = self.rounds + 1, done + 1, past + each
                with path.open("a") as file:
                    file.write("".join(map(to_line, each)))
                watch.recorded(each)
        except EndRun:
            pass
        return SimpleNamespace(round=done, history=past)


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """The journal flushes every line to the disk, which no test here is about."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> Trained:
    made = Trained()
    monkeypatch.setattr(trials, "run_config", made)
    return made


def plan(
    out: Path, methods: tuple[str, ...] = ("furl",), space: dict[str, str] | None = None, **options: Any
) -> Any:
    spaces = sweeps.read_space(None, SPACE if space is None else space, methods)
    table = {"kind": "furl", "optimizer": {"momentum": 0.5}, "private_init": 0.1}
    return sweeps.plan(config(method=table), spaces, out, **{"trials": 8, **options})


def told(made: Any) -> list[dict[str, Any]]:
    """Return all trials without their seconds."""
    return [{**t, "method": r.method, "seconds": None} for r in sweeps.results(made) for t in r.trials]


def test_every_method_has_the_same_budget_and_is_chosen_by_valid(tmp_path: Path, trained: Trained) -> None:
    made = plan(tmp_path / "s", ("furl", "fedprox"), seeds=2, prune="none")
    sweeps.run(made, progress=False)
    found = sweeps.results(made)
    path = sweeps.write(made, found)
    assert len(trained.runs) == 2 * 8 * 2
    for r in found:
        rates = [t["values"]["method.optimizer.learning_rate"] for t in r.trials]
        values = [0.8 - 0.1 * abs(math.log10(rate) + 1) - 0.05 / ROUNDS - 0.005 for rate in rates]
        assert [t["value"] for t in r.trials] == pytest.approx(values, abs=1e-12)
        assert [t["number"] for t in r.trials] == list(range(8))
        assert r.number == max(range(8), key=values.__getitem__) != min(range(8), key=values.__getitem__)
        assert (r.finished, r.ended, r.diverged, r.rounds) == (8, 0, 0, 8 * 2 * ROUNDS)
        assert r.valid == pytest.approx([values[r.number] + 0.005, values[r.number] - 0.005], abs=1e-12)
        assert r.test == pytest.approx([1 - v for v in r.valid], abs=1e-12)
        best, _ = read_config(tmp_path / "s" / f"best-{r.method}.toml")
        assert (best.method.kind, best.method.optimizer.learning_rate) == (r.method, rates[r.number])
        assert best.method.optimizer.momentum == 0.5  # goes along
        assert ("private_init" in best.method.options) == (r.method == "furl")  # fedprox does not know it
    assert found[0].values != found[1].values
    kept = {p.name for p in (tmp_path / "s" / "trials").iterdir()}
    assert kept == {f"{r.method}-{r.number}" for r in found}
    rows = list(csv.DictReader((tmp_path / "s" / "results.csv").read_text().splitlines()))
    assert [(row["method"], row["trials"]) for row in rows] == [("furl", "8"), ("fedprox", "8")]
    assert float(rows[0]["valid"]) == pytest.approx(sum(found[0].valid) / 2, abs=1e-5)
    content = json.loads((tmp_path / "s" / "results.json").read_text())
    assert [len(m["trials"]) for m in content["methods"]] == [8, 8]
    text = path.read_text()
    assert "Every method had 8 trials, each with the seeds 0, 1. Chosen by accuracy on valid" in text
    assert "8: 8 finished, 0 ended early, 0 diverged" in text


@pytest.mark.usefixtures("trained")
def test_no_bound_may_be_among_the_choices(tmp_path: Path) -> None:
    space = {
        "method.optimizer.learning_rate": "{low=0.01, high=1.0, log=true}",
        "method.clip_norm": "{choices=[1.0, inf]}",
    }
    made = plan(tmp_path / "s", space=space, trials=4, prune="none")
    sweeps.run(made, progress=False)
    sweeps.write(made, sweeps.results(made))
    (method,) = json.loads((tmp_path / "s" / "results.json").read_text())["methods"]
    assert {t["values"]["method.clip_norm"] for t in method["trials"]} <= {1.0, "inf"}
    assert json.loads((tmp_path / "s" / "results.json").read_text())["space"]["furl"]["method.clip_norm"] == {
        "choices": [1.0, "inf"]
    }


def test_the_same_seed_gives_the_same_trials_and_another_gives_others(
    tmp_path: Path, trained: Trained
) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        spaces = sweeps.read_space(None, SPACE, ["furl"])
        made = sweeps.plan(config(seed=seed), spaces, tmp_path / name, trials=7, prune="none")
        sweeps.run(made, progress=False)
    one, two, other = (
        [t["values"] for t in told(sweeps.plan(config(seed=s), spaces, tmp_path / n, trials=7, prune="none"))]
        for n, s in (("a", 0), ("b", 0), ("c", 1))
    )
    assert one == two
    assert all(x != y for x, y in zip(one, other, strict=True))
    assert len({t["method.optimizer.learning_rate"] for t in one}) == 7


@pytest.mark.parametrize(("prune", "stops"), [("median", (0, 9, 30)), ("halving", (41,))])
def test_a_sweep_that_was_stopped_ends_as_one_that_was_not(
    tmp_path: Path, trained: Trained, prune: str, stops: tuple[int, ...]
) -> None:
    whole = plan(tmp_path / "whole", ("furl", "fedavg"), prune=prune, seeds=2)
    sweeps.run(whole, progress=False)
    rounds = trained.rounds
    states = [t["state"] for t in told(whole)]
    assert states.count("ended early") > 0
    assert rounds < 2 * 8 * 2 * ROUNDS
    for stop_at in stops:
        out, trained.rounds, trained.stop_at = tmp_path / str(stop_at), 0, stop_at
        made = plan(out, ("furl", "fedavg"), prune=prune, seeds=2)
        with pytest.raises(KeyboardInterrupt):
            sweeps.run(made, progress=False)
        assert [t["state"] for t in told(made)].count("running") == 1
        with (out / "journal.log").open("ab") as file:
            file.write(b'{"op_code": 5, "wor')  # a line that was being written
        trained.stop_at = 10**9
        sweeps.run(made, progress=False)
        assert told(made) == told(whole)
        assert trained.rounds == rounds  # no round was trained twice
        sweeps.run(made, progress=False)
        assert trained.rounds == rounds


def test_more_trials_are_added(tmp_path: Path, trained: Trained) -> None:
    sweeps.run(plan(tmp_path / "whole", trials=8), progress=False)
    sweeps.run(plan(tmp_path / "more", trials=3), progress=False)
    assert len(told(plan(tmp_path / "more", trials=3))) == 3
    sweeps.run(plan(tmp_path / "more", trials=8), progress=False)
    assert told(plan(tmp_path / "more")) == told(plan(tmp_path / "whole"))


def test_a_trial_is_ended_once_it_is_below_the_median(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five trials come to their end whatever they are; after those, the second evaluation decides."""
    order: list[float] = []

    def valid(c: Config, round: int) -> float:
        rate = c.method.optimizer.learning_rate
        if rate not in order:
            order.append(rate)
        return [0.5, 0.6, 0.7, 0.8, 0.9, 0.65, 0.75, 0.1][order.index(rate)] + 0.01 * round

    made, stand_in = plan(tmp_path / "s"), Trained(valid)
    monkeypatch.setattr(trials, "run_config", stand_in)
    sweeps.run(made, progress=False)
    (found,) = sweeps.results(made)
    # The median of the first five at the second evaluation is 0.72; then of six, 0.65 among them, 0.695; 0.75 passes.
    assert [t["state"] for t in found.trials] == [*["finished"] * 5, "ended early", "finished", "ended early"]
    assert [t["rounds"] for t in found.trials] == [4, 4, 4, 4, 4, 2, 4, 2]
    assert (found.number, found.finished, found.ended) == (4, 6, 2)


def test_an_error_is_the_better_the_smaller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = replace(plan(tmp_path / "s", trials=7, seeds=2), metric="rmse")
    monkeypatch.setattr(trials, "run_config", Trained(lambda c, t: 1 - valid_of(c, t), "rmse"))
    sweeps.run(made, progress=False)
    (found,) = sweeps.results(made)
    finished = [t for t in found.trials if t["state"] == "finished"]
    assert found.number == min(finished, key=lambda t: t["value"])["number"]
    assert sum(found.valid) / 2 == pytest.approx(min(t["value"] for t in finished), abs=1e-12)
    assert found.ended > 0


def test_what_a_trial_is_told_by_hand(tmp_path: Path) -> None:
    """After each evaluation the mean over seeds of the best so far; what was told is not told again."""

    def records(*values: float, first: int = 1) -> list[Record]:
        return [
            Record(t, 0.5 * t, split, client, "accuracy", value, 9)
            for t, v in enumerate(values, first)
            for split, client, value in (("valid", None, v), ("valid", "a", 9.0), ("test", None, 7.0))
        ]

    trial = plan(tmp_path).study("furl").ask()
    one = TrialWatch(trial, "accuracy")
    one.started(Facts(run="r", name="r"))
    one.recorded(records(0.25))
    again = TrialWatch(trial, "accuracy")  # goes on, and is told once more of round 1
    again.started(Facts(run="r", name="r", round=2, history=records(0.25, 0.5)))
    again.recorded(records(0.5, math.nan, 0.375, first=2))
    assert again.steps == 4
    two = TrialWatch(trial, "accuracy", [0.5], 4)
    two.recorded(records(0.125, 1.0))
    told = trial.storage.get_trial(trial._trial_id).intermediate_values
    assert told == {0: 0.25, 1: 0.5, 2: 0.5, 3: 0.5, 4: (0.5 + 0.125) / 2, 5: (0.5 + 1.0) / 2}


def test_trials_that_diverge_count_and_are_never_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def valid(c: Config, round: int) -> float:
        if c.method.kind == "fedavg" or c.method.optimizer.learning_rate > 0.1:
            raise NonFiniteError("The loss of user-1 became NaN.")
        return c.method.optimizer.learning_rate

    made = plan(tmp_path / "s", ("furl", "fedavg"), prune="none")
    monkeypatch.setattr(trials, "run_config", Trained(valid))
    sweeps.run(made, progress=False)
    furl, fedavg = found = sweeps.results(made)
    rates = [t["values"]["method.optimizer.learning_rate"] for t in furl.trials]
    assert furl.diverged == sum(rate > 0.1 for rate in rates) > 0
    assert furl.values["method.optimizer.learning_rate"] == max(rate for rate in rates if rate <= 0.1)
    assert (fedavg.number, fedavg.diverged, fedavg.values) == (None, 8, {})
    assert {t["diverged"] for t in fedavg.trials} == {"The loss of user-1 became NaN."}
    text = sweeps.write(made, found).read_text()
    assert "| fedavg | none finished | – | – | 8: 0 finished, 0 ended early, 8 diverged |" in text
    why = "No trial of fedavg came to its end; the last that diverged: The loss of user-1 became NaN."
    assert sweeps.table(made, found).note.endswith(f" {why}")
    assert why in text
    assert "No trial of furl" not in text
    assert {p.name for p in (tmp_path / "s").glob("*.toml")} == {"best-furl.toml"}


def test_the_rounds_of_trials_that_diverge_are_spent_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(c: Config, **options: Any) -> Any:
        made = Trained()(c, **options)
        if c.seed == 1:
            raise NonFiniteError("The loss of user-1 became NaN.")
        return made

    monkeypatch.setattr(trials, "run_config", breaks)
    made = plan(tmp_path / "s", trials=3, seeds=2, prune="none")
    sweeps.run(made, progress=False)
    (found,) = sweeps.results(made)
    assert (found.diverged, found.rounds) == (3, 3 * 2 * ROUNDS)


def test_a_folder_of_another_sweep_is_refused_by_name(tmp_path: Path, trained: Trained) -> None:
    out = tmp_path / "s"
    out.mkdir()
    (out / "sweep.json.0123456789abcdef.part").touch()  # of a start that was killed
    sweeps.run(plan(out, trials=1), progress=False)
    other = {"method.optimizer.learning_rate": "{low = 0.001, high = 2.0, log = true}"}
    with raises(RunError, said="holds another sweep, so it cannot go on with"):
        sweeps.run(plan(out, space=other), progress=False)
    for options, named in (({"seeds": 2}, "seeds"), ({"prune": "none"}, "prune")):
        with pytest.raises(RunError, match=rf"\n  {named}: "):
            sweeps.run(plan(out, **options), progress=False)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").touch()
    with pytest.raises(RunError, match=r"full is not empty and holds.*--out"):
        sweeps.run(plan(tmp_path / "full"), progress=False)
    (out / "sweep.json").write_text("{")
    with pytest.raises(RunError, match=r"sweep\.json is damaged\."):
        sweeps.run(plan(out), progress=False)


@pytest.mark.parametrize(
    ("method", "space", "message"),
    [
        (
            "furl",
            {"method.mu": "{low = 0.1, high = 1.0}"},
            r"^The space does not fit furl: method\.mu: unknown key\.",
        ),
        (
            "furl",
            {"method.optimizer.learning_rat": "{low = 0.1, high = 1.0}"},
            (
                r"^The space does not fit furl: the sweep's furl with .*:\n  method\.optimizer\.learning_rat: unknown key\. Did you "
                r"mean method\.optimizer\.learning_rate\?"
            ),
        ),
        (
            "furl",
            {"method.optimizer.learning_rate": "{low = -1.0, high = 1.0}"},
            r"learning_rate must be at least 0; got -1\.0\.$",
        ),
        (
            "fedprox",
            {"model.width": "{choices = [3]}"},
            r"^The space does not fit fedprox: model\.width: unknown key\.",
        ),
        ("fulr", SPACE, r"fulr.*Did you mean 'furl'\?"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*there is one value only")
def test_settings_that_do_not_fit_are_refused_before_anything_runs(
    tmp_path: Path, method: str, space: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(tmp_path / "s", (method,), space)
    assert not (tmp_path / "s").exists()


def test_what_no_run_would_do_is_refused_before_the_sweep(tmp_path: Path) -> None:
    spaces = sweeps.read_space(None, SPACE, ["furl"])
    split = {"reader": "toy", "split": {"fractions": [0.8, 0.0, 0.2]}}
    with pytest.raises(ConfigError, match=r"^A sweep chooses by valid,"):
        sweeps.plan(config(data=split), spaces, tmp_path / "s", trials=1)
    spaces = sweeps.read_space(None, {"run.sampling": '{choices = ["poisson", "shuffled"]}'}, ["furl"])
    private = config(
        method={"kind": "furl", "weighting": "uniform"},
        privacy={"clip": 1.0, "noise": 1.0},
        run={"rounds": 2, "cohort": 2, "sampling": "poisson"},
    )
    with pytest.raises(ConfigError, match=r"^The space does not fit furl:.*'shuffled'"):
        sweeps.plan(private, spaces, tmp_path / "s", trials=1)
    never = {"rounds": 2, "cohort": 2, "evaluate_every": 0}
    with pytest.raises(ConfigError, match=r"^run\.evaluate_every = 0"):
        sweeps.plan(config(run=never), spaces, tmp_path / "s", trials=1)

"""Runs with differential privacy: what is refused, the ledger beside the commits, resumed and loaded again."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import dp_accounting
import dp_accounting.pld
import pytest

from fedkeep import Phase, averaging, methods, sgd, simulate
from fedkeep.core.errors import BudgetError, ConfigError, FedkeepError, RunError
from fedkeep.engines import Sampler
from fedkeep.experiments import drive
from fedkeep.experiments.build import run_config
from fedkeep.experiments.config import parse_config
from fedkeep.experiments.drive import Drive
from fedkeep.experiments.load import load_run
from fedkeep.privacy import Adaptive, BudgetLedger, DifferentialPrivacy, Release, epsilon
from tests.refusals import raises
from tests.tiny import Logits, classes, one_run_id, same_bits

DATA = classes(counts=(5, 9, 3, 7, 4, 6, 5, 8))
METHOD = methods.furl("user", local=Phase(batch_size=4, optimizer=sgd(0.1)), server=averaging(by="uniform"))
SEEDED = DifferentialPrivacy(
    noise=2.0, clip=0.1, delta=1e-2, noise_seed=5, adaptive=Adaptive(noise=3.0), accountant="rdp"
)


def run(privacy: DifferentialPrivacy = SEEDED, **options: Any) -> Any:
    given: dict[str, Any] = {"rounds": 4, "cohort": 3, "sampling": "poisson", **options}
    return simulate(Logits().double(), METHOD, DATA, privacy=privacy, **given)


@pytest.mark.parametrize(
    ("options", "privacy", "message"),
    [
        (
            {"centralised": True},
            {},
            "Differential privacy wants cohorts of clients, and centralised training has none",
        ),
        (
            {"sampling": "shuffled"},
            {},
            "A budget wants a cohort that is drawn client by client: sampling must be",
        ),
        ({"sampling": "independent"}, {}, "A budget wants a cohort that is drawn client by client"),
        ({}, {"delta": 0.125}, "delta must be below 1 / N = 0.125 for N = 8 clients; got 0.125."),
        ({}, {"clip": {"linear.*": 1.0, "heat": 1.0}}, "The pattern 'heat' of clip matches nothing"),
        ({}, {"clip": {"linear.weight": 1.0}}, "No pattern of clip matches 'linear.bias'"),
    ],
)
def test_what_has_no_known_cost_is_refused_before_anything_is_written(
    tmp_path: Path, options: dict[str, Any], privacy: dict[str, Any], message: str
) -> None:
    with raises(ConfigError, said=message):
        run(
            DifferentialPrivacy(**{"noise": 1.0, "clip": 1.0, "delta": 0.01, **privacy}),
            out=tmp_path / "r",
            **options,
        )
    assert not (tmp_path / "r").exists()


def test_a_run_that_goes_on_ends_with_the_same_bits_and_counts_no_less(tmp_path: Path) -> None:
    with one_run_id():
        whole = run(out=tmp_path / "whole", evaluate_every=2)
        run(out=tmp_path / "parts", rounds=2, evaluate_every=2)
        parts = run(out=tmp_path / "parts", evaluate_every=2, resume=True)
    assert same_bits(whole.server, parts.server)
    assert same_bits(whole.state, parts.state)
    assert 0 < float(whole.state["clip_bound"]) != 0.1
    assert len({(tmp_path / name / "budget.jsonl").read_bytes() for name in ("whole", "parts")}) == 1
    commit = json.loads((tmp_path / "parts" / "commit.json").read_text())
    ledger = BudgetLedger.read(tmp_path / "parts" / "budget.jsonl", commit["run"])
    assert commit["extra"]["ledger"] == ledger.mark
    assert ledger.rounds == [0, 1, 2, 3]
    assert ledger.spent() == pytest.approx(epsilon({Release(rate=3 / 8, noise=2.0): 4}, 1e-2, "rdp"))


def test_the_engine_changes_nothing() -> None:
    ends = [run(engine=engine) for engine in ("sequential", "vectorised")]
    for name, value in ends[0].server.items():
        assert float((value - ends[1].server[name]).abs().max()) < 1e-9


def test_a_budget_ends_a_run_and_what_was_done_is_kept(tmp_path: Path) -> None:
    budget = epsilon({Release(rate=3 / 8, noise=2.0): 2}, 1e-2, "rdp") + 1e-6
    asked = DifferentialPrivacy(noise=2.0, clip=0.1, delta=1e-2, budget=budget, accountant="rdp")
    for resume in (False, True):
        with pytest.raises(BudgetError, match="Round 2 would cost more privacy than is left"):
            run(asked, out=tmp_path / "r", resume=resume)
        assert json.loads((tmp_path / "r" / "commit.json").read_text())["round"] == 2
        assert len((tmp_path / "r" / "budget.jsonl").read_bytes().splitlines()) == 3


def test_a_round_that_broke_down_is_not_charged_as_nothing_of_it_was_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise FedkeepError("broken")

    monkeypatch.setattr("fedkeep.experiments.drive.run_round", broken)
    with pytest.raises(FedkeepError, match="broken"):
        run(out=tmp_path / "r")
    monkeypatch.undo()
    run(out=tmp_path / "r", resume=True)
    assert BudgetLedger.read(tmp_path / "r" / "budget.jsonl", run_id(tmp_path / "r")).rounds == [0, 1, 2, 3]


def test_a_round_is_charged_before_anything_of_it_is_judged_or_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, judge, commit = list[int](), Drive.judged, Drive._commit

    def charged(self: Drive) -> None:
        ledger = BudgetLedger.read(tmp_path / "r" / "budget.jsonl", run_id(tmp_path / "r"))
        seen.append(len(ledger.rounds) - self.conductor.server.round)

    def judging(self: Drive, server: Any) -> Any:
        charged(self)
        return judge(self, server)

    def committing(self: Drive, *given: Any) -> None:
        charged(self)
        commit(self, *given)

    monkeypatch.setattr(Drive, "judged", judging)
    monkeypatch.setattr(Drive, "_commit", committing)
    run(out=tmp_path / "r", evaluate_every=2)
    assert seen == [0] * (4 + 2)


def cohorts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, tuple[str, ...]]]:
    """Note each round that is run, with its cohort."""
    seen, plain = list[tuple[int, tuple[str, ...]]](), drive.run_round

    def noted(method: Any, device: Any, server: Any, cohort: Any, *given: Any) -> Any:
        seen.append((server.round, tuple(sorted(cohort))))
        return plain(method, device, server, cohort, *given)

    monkeypatch.setattr(drive, "run_round", noted)
    return seen


def stopped_in_round(
    number: int, out: Path, asked: DifferentialPrivacy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stop a run in a round that was charged, before it was committed."""

    def stop(self: Drive, *given: Any) -> None:
        if self.conductor.server.round == number + 1:
            raise KeyboardInterrupt
        commit(self, *given)

    commit = Drive._commit
    with monkeypatch.context() as patch:
        patch.setattr(Drive, "_commit", stop)
        with pytest.raises(KeyboardInterrupt):
            run(asked, out=out)


def test_a_charged_round_that_is_run_again_has_coins_of_its_own_as_its_charge_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ε is that of five independent rounds by the exact privacy loss; one cohort twice would cost more than it says."""
    asked, seen = DifferentialPrivacy(noise=2.0, clip=0.1, delta=1e-2), cohorts(monkeypatch)
    stopped_in_round(1, tmp_path / "r", asked, monkeypatch)
    run(asked, out=tmp_path / "r", rounds=3, resume=True)
    once = json.loads((tmp_path / "r" / "run.json").read_text())["cohort_seed"]
    run(asked, out=tmp_path / "r", resume=True)  # drawn anew each time that it goes on
    assert [number for number, _ in seen] == [0, 1, 1, 2, 3]
    secret = json.loads((tmp_path / "r" / "run.json").read_text())["cohort_seed"]
    assert secret != once
    for (number, cohort), seed in zip(seen, [0, 0, once, once, secret], strict=True):
        assert cohort == tuple(sorted(f"user-{k}" for k in Sampler(8, 3, "poisson", seed)(number)))
    ledger = BudgetLedger.read(tmp_path / "r" / "budget.jsonl", run_id(tmp_path / "r"))
    exact = dp_accounting.pld.PLDAccountant()
    once = dp_accounting.PoissonSampledDpEvent(3 / 8, dp_accounting.GaussianDpEvent(2.0))
    exact.compose(once, 5)
    assert ledger.spent() == pytest.approx(exact.get_epsilon(1e-2))
    twice = dp_accounting.PoissonSampledDpEvent(3 / 8, dp_accounting.GaussianDpEvent(2.0 / math.sqrt(2)))
    same_cohort = dp_accounting.pld.PLDAccountant()
    same_cohort.compose(once, 3).compose(twice)
    assert same_cohort.get_epsilon(1e-2) > ledger.spent()


def test_with_noise_from_a_seed_the_same_round_comes_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = cohorts(monkeypatch)
    with one_run_id():
        stopped_in_round(1, tmp_path / "r", SEEDED, monkeypatch)
        parts = run(out=tmp_path / "r", resume=True)
        assert seen[1] == seen[2]
        assert same_bits(parts.server, run(out=tmp_path / "whole").server)
    assert "cohort_seed" not in json.loads((tmp_path / "r" / "run.json").read_text())


def test_a_run_whose_ledger_was_lost_does_not_go_on(tmp_path: Path) -> None:
    run(out=tmp_path / "r", rounds=2, evaluate_every=2)
    (tmp_path / "r" / "budget.jsonl").unlink()
    with pytest.raises(RunError, match="There is no ledger"):
        run(out=tmp_path / "r", evaluate_every=2, resume=True)


TOML = """
[data]
reader = "toy"
users = 12
[model]
kind = "linear"
[method]
kind = "furl"
weighting = "uniform"
[run]
rounds = 2
cohort = 3
sampling = "poisson"
[privacy]
noise = 1.0
clip = {"linear.*" = 0.5, "*" = 0.1}
delta = 0.01
"""


def test_a_configuration_asks_for_it_and_its_run_is_loaded_again(tmp_path: Path) -> None:
    adaptive = TOML.replace('clip = {"linear.*" = 0.5, "*" = 0.1}', "clip = 0.5\nadaptive = {noise = 2.0}")
    made = run_config(parse_config(adaptive), out=tmp_path / "r", progress=False)
    loaded = load_run(tmp_path / "r")
    assert loaded.evaluate("test") == made.evaluate("test")
    assert same_bits(loaded.state, made.state)
    assert "clip_bound" in loaded.state


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (
            "cohort = 3\n",
            "",
            "configuration: privacy wants run.cohort, the expected number of clients in a round",
        ),
        ("noise = 1.0", "noize = 1.0", "privacy.noize: unknown key. Did you mean privacy.noise?"),
        ("delta = 0.01", 'unit = "example"', "unit must be 'client'; got 'example'."),
        ('clip = {"linear.*" = 0.5, "*" = 0.1}\n', "", "Noise without clipping protects nobody"),
        ("delta = 0.01", "adaptive = {}", "Adaptive clipping wants noise of its own"),
        ('"linear.*" = 0.5', '"linear.*" = "x"', "privacy.clip"),
    ],
)
def test_a_table_that_makes_no_sense_is_refused(before: str, after: str, message: str) -> None:
    assert before in TOML
    with raises(ConfigError, said=message):
        run_config(parse_config(TOML.replace(before, after)), progress=False)


def run_id(folder: Path) -> str:
    return str(json.loads((folder / "run.json").read_text())["run"])

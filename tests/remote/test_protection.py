"""Differential privacy across machines: equal to a simulation, charged before each round, by cohorts nobody knows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedkeep import simulate
from fedkeep.core.errors import BudgetError, ConfigError
from fedkeep.core.run_files import read_commit, read_info
from fedkeep.privacy import Adaptive, DifferentialPrivacy
from fedkeep.privacy.ledger import FILE, Ledger
from fedkeep.remote.memory import Died
from fedkeep.remote.policy import RoundPolicy
from fedkeep.remote.server import serve_run
from tests.engines.test_conformance import CASES, SEED
from tests.remote.federations import Devices, federation
from tests.remote.test_conformance import ledger_of, server_of
from tests.remote.test_fleet import dies_at
from tests.remote.test_server import stops_after
from tests.tiny import everyone, on_server, same_bits

CASE = "furl"
ASKED = DifferentialPrivacy(
    noise=1.1, clip=0.05, delta=1e-3, heaviest=4.0, noise_seed=5, adaptive=Adaptive(noise=2.0)
)
HERE: dict[str, Any] = {"sampling": "poisson", "rounds": 5, "cohort": 2}


def served(devices: Devices, folder: Path, **changes: Any) -> Any:
    given = {"privacy": ASKED, "cohort_seed": SEED, **HERE, **changes}
    return serve_run(federation(CASE, **given), devices.transport, folder / "run", progress=False)


def test_a_private_run_equals_a_simulation_and_charges_each_round(tmp_path: Path) -> None:
    torch.manual_seed(0)
    what = CASES[CASE]
    expected = simulate(
        what.model(), what.method, what.data, seed=SEED, engine="sequential", privacy=ASKED, evaluate_every=2, **HERE
    )  # fmt: skip
    devices = Devices(CASE, tmp_path, 2)
    served(devices, tmp_path)
    assert same_bits(server_of(tmp_path / "run"), on_server(expected))
    assert same_bits(devices.kept(ledger_of(tmp_path / "run")), everyone(expected.private, len(what.data)))
    devices.close()
    charged = Ledger.read(tmp_path / "run" / FILE, read_info(tmp_path / "run")["run"])
    assert charged.rounds == [0, 1, 2, 3, 4]


def test_a_round_that_a_killed_server_had_not_released_is_charged_once(tmp_path: Path) -> None:
    devices = Devices(CASE, tmp_path, 2)
    stops_after(devices, 2)
    with pytest.raises(Died):
        served(devices, tmp_path, cohort=6)  # all clients, so that each round sends
    served(devices, tmp_path, cohort=6)
    devices.close()
    charged = Ledger.read(tmp_path / "run" / FILE, read_info(tmp_path / "run")["run"])
    assert charged.rounds == [0, 1, 2, 3, 4]


def test_a_round_that_does_not_count_costs_nothing(tmp_path: Path) -> None:
    devices = Devices(CASE, tmp_path, 2)
    devices.back = 300.0
    dies_at(devices, "work", 1, after=False)
    served(devices, tmp_path, cohort=6, policy=RoundPolicy(deadline=50.0, minimum=4))
    devices.close()
    assert "does not count" in (tmp_path / "run" / "events.jsonl").read_text(encoding="utf-8")
    assert Ledger.read(tmp_path / "run" / FILE, read_info(tmp_path / "run")["run"]).rounds == [0, 1, 2, 3, 4]


def test_a_round_beyond_the_budget_is_refused_before_anything_is_sent(tmp_path: Path) -> None:
    devices = Devices(CASE, tmp_path, 2)
    with pytest.raises(BudgetError, match="would cost more privacy than is left"):
        served(devices, tmp_path, privacy=replace(ASKED, budget=2.0))
    devices.close()
    info = read_info(tmp_path / "run")
    charged = Ledger.read(tmp_path / "run" / FILE, info["run"]).rounds
    assert 0 < len(charged) < 5
    assert len(charged) == read_commit(tmp_path / "run", info).round


def test_cohorts_come_from_a_secret_that_devices_do_not_know(tmp_path: Path) -> None:
    seeds = set()
    for name in ("one", "two"):
        devices = Devices(CASE, tmp_path / name, 2)
        served(devices, tmp_path / name, cohort_seed=None, rounds=1)
        served(devices, tmp_path / name, cohort_seed=None, rounds=2)  # goes on by the same secret
        seeds.add(read_info(tmp_path / name / "run")["cohort_seed"])
        devices.close()
    assert len(seeds) == 2
    assert SEED not in seeds


@pytest.mark.parametrize("policy", [RoundPolicy(over_selection=1.5), RoundPolicy(mode="buffered", buffer=2)])
def test_first_answers_are_no_coins(policy: RoundPolicy, tmp_path: Path) -> None:
    devices = Devices(CASE, tmp_path, 2)
    with pytest.raises(ConfigError, match="the first answers of more are none"):
        served(devices, tmp_path, policy=policy)
    devices.close()
    assert not (tmp_path / "run").exists()

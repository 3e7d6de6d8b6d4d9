"""Differential privacy across machines: equal to a simulation, charged before each round, by cohorts nobody knows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from fedkeep import simulate
from fedkeep.core.errors import BudgetError, ConfigError
from fedkeep.core.packet import Packet
from fedkeep.core.run_files import read_commit, read_info
from fedkeep.engines import Sampler
from fedkeep.privacy import Adaptive, DifferentialPrivacy, epsilon
from fedkeep.privacy.budget_ledger import FILE, BudgetLedger
from fedkeep.remote.policy import RoundPolicy
from fedkeep.remote.served_run import serve_run
from fedkeep.remote.transport import Died
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
        what.model(),
        what.method,
        what.data,
        seed=SEED,
        engine="sequential",
        privacy=ASKED,
        evaluate_every=2,
        **HERE,
    ).last
    devices = Devices(CASE, tmp_path, 2)
    served(devices, tmp_path)
    assert same_bits(server_of(tmp_path / "run"), on_server(expected))
    assert same_bits(devices.kept(ledger_of(tmp_path / "run")), everyone(expected.private, len(what.data)))
    devices.close()
    charged = BudgetLedger.read(tmp_path / "run" / FILE, read_info(tmp_path / "run")["run"])
    assert charged.rounds == [0, 1, 2, 3, 4]


def test_a_round_that_a_killed_server_had_not_released_is_charged_once(tmp_path: Path) -> None:
    devices = Devices(CASE, tmp_path, 2)
    stops_after(devices, 2)
    with pytest.raises(Died):
        served(devices, tmp_path, cohort=6)  # all clients, so that each round sends
    served(devices, tmp_path, cohort=6)
    devices.close()
    charged = BudgetLedger.read(tmp_path / "run" / FILE, read_info(tmp_path / "run")["run"])
    assert charged.rounds == [0, 1, 2, 3, 4]


def test_a_round_that_does_not_count_costs_nothing(tmp_path: Path) -> None:
    devices = Devices(CASE, tmp_path, 2)
    devices.back = 300.0
    dies_at(devices, "work", 1, after=False)
    served(devices, tmp_path, cohort=6, policy=RoundPolicy(deadline=50.0, minimum=4))
    devices.close()
    assert "does not count" in (tmp_path / "run" / "events.jsonl").read_text(encoding="utf-8")
    assert BudgetLedger.read(tmp_path / "run" / FILE, read_info(tmp_path / "run")["run"]).rounds == [
        0,
        1,
        2,
        3,
        4,
    ]


def test_a_round_beyond_the_budget_is_refused_before_anything_is_sent(tmp_path: Path) -> None:
    devices = Devices(CASE, tmp_path, 2)
    with pytest.raises(BudgetError, match="would cost more privacy than is left"):
        served(devices, tmp_path, privacy=replace(ASKED, budget=3.0, accountant="rdp"))
    devices.close()
    info = read_info(tmp_path / "run")
    charged = BudgetLedger.read(tmp_path / "run" / FILE, info["run"]).rounds
    assert 0 < len(charged) < 5
    assert len(charged) == read_commit(tmp_path / "run", info).round


def test_cohorts_come_from_a_secret_that_devices_do_not_know(tmp_path: Path) -> None:
    seeds = set()
    for name in ("one", "two"):
        devices = Devices(CASE, tmp_path / name, 2)
        served(devices, tmp_path / name, cohort_seed=None, rounds=1, evaluate_every=1)
        served(
            devices, tmp_path / name, cohort_seed=None, rounds=2, evaluate_every=1
        )  # goes on by the same secret
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


def test_devices_are_told_nothing_of_who_else_was_in_a_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first round's cohort with a client more and without: other devices get the same headers, but for numbers."""
    heard: list[list[dict[str, Any]]] = []
    for cohort in ([0, 1, 2], [0, 1]):
        monkeypatch.setattr(Sampler, "__call__", lambda _, number, first=cohort: [0, 1] if number else first)
        devices, headers = Devices(CASE, tmp_path / str(len(cohort)), 6), list[dict[str, Any]]()

        def noting(packet: Packet, serve: Any, name: str, to: list[dict[str, Any]]) -> Packet:
            if packet.header["kind"] == "work" and name in ("node-0", "node-1"):
                to.append(without_numbers(packet.header))
            return serve(packet)  # type: ignore[no-any-return]

        for name, node in devices.transport._nodes.items():
            node.serve = partial(noting, serve=node.serve, name=name, to=headers)
        served(devices, tmp_path / str(len(cohort)), rounds=3, evaluate_every=0)
        devices.close()
        heard.append(headers)
    assert heard[0] == heard[1]
    assert [o["version"] for header in heard[0] for o in header["orders"]] == [0, 0, 1, 1, 2, 2, 3, 3]


def without_numbers(header: Mapping[str, Any]) -> dict[str, Any]:
    """Return a header without what the clock numbers."""
    orders = [{k: v for k, v in order.items() if k != "attempt"} for order in header["orders"]]
    return {**{k: v for k, v in header.items() if k not in ("run", "attempt")}, "orders": orders}


def test_a_run_that_continues_another_goes_on_with_its_budget(tmp_path: Path) -> None:
    """Three runs of two rounds each in a chain cost what six rounds cost; a fourth has no room left."""
    asked = replace(ASKED, noise=3.0, noise_seed=None, adaptive=None, accountant="rdp")
    kind = asked.release(2 / 6)
    asked = replace(asked, budget=epsilon({kind: 7}, asked.delta, "rdp"))
    for number, name in enumerate(("first", "second", "third")):
        served_after(tmp_path, name, (None, "first", "second")[number], asked)
        ledger = BudgetLedger.read(tmp_path / name / FILE, read_info(tmp_path / name)["run"])
        assert ledger.charged == {kind: 2 * number + 2}
        assert ledger.spent() == pytest.approx(epsilon({kind: 2 * number + 2}, asked.delta, "rdp"))
    with pytest.raises(BudgetError, match="Round 1 would cost more.*7"):
        served_after(tmp_path, "fourth", "third", asked)
    with pytest.raises(BudgetError, match="Round 1 would cost"):  # also when it goes on
        served_after(tmp_path, "fourth", "third", asked)


@pytest.mark.parametrize("before", [None, ASKED])
def test_no_private_run_continues_one_without_noise_that_protects(
    before: DifferentialPrivacy | None, tmp_path: Path
) -> None:
    served_after(tmp_path, "first", None, before, sampling="poisson" if before else "shuffled")
    with pytest.raises(ConfigError, match="has no differential privacy,"):
        served_after(tmp_path, "second", "first", replace(ASKED, noise_seed=None))
    assert not (tmp_path / "second").exists()


def served_after(folder: Path, name: str, older: str | None, asked: Any, **changes: Any) -> None:
    given = {**HERE, "rounds": 2, "evaluate_every": 0, "privacy": asked, **changes}
    devices = Devices(CASE, folder / "devices", 2)
    try:
        one = federation(CASE, continue_from=None if older is None else folder / older, **given)
        serve_run(one, devices.transport, folder / name, progress=False)
    finally:
        devices.close()

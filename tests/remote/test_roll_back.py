"""A private run that is rolled back or killed: what comes again is released again, so its cohorts are drawn anew."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedkeep.core.errors import RunError
from fedkeep.core.files import write_of_run
from fedkeep.core.run_files import read_commit, read_info
from fedkeep.core.sealed import sealed_bytes
from fedkeep.engines import Sampler
from fedkeep.privacy import DifferentialPrivacy
from fedkeep.privacy.budget_ledger import FILE, BudgetLedger, marks
from fedkeep.remote.roll_back import roll_back
from fedkeep.remote.served_run import serve_run
from fedkeep.remote.view import view_of
from tests.engines.test_conformance import SEED
from tests.remote.federations import Devices, federation

CASE = "furl"
ASKED = DifferentialPrivacy(noise=1.1, clip=0.05, delta=1e-3, heaviest=4.0)
ROUNDS = 4
TO = 3  # devices keep what they need to follow so far


class KilledError(BaseException):
    """Stands for a kill."""


def served(
    folder: Path, privacy: DifferentialPrivacy | None = ASKED, dies: bool = False, **changes: Any
) -> list[list[str]]:
    """Serve a run, and return who was asked to train in each of its rounds; ``dies``: see ``stops_at_judging``."""
    private = {} if privacy is None else {"sampling": "poisson", "privacy": privacy}
    given: dict[str, Any] = {"rounds": ROUNDS, "cohort": 3, "evaluate_every": 0, **private, **changes}
    devices = Devices(CASE, folder, 1)
    cohorts, serve = list[list[str]](), devices.nodes[0].serve

    def noting(packet: Any) -> Any:
        if packet.header["kind"] == "work" and any(o["train"] for o in packet.header["orders"]):
            cohorts.append(sorted(o["client"] for o in packet.header["orders"] if o["train"]))
        return serve(packet)

    devices.transport._nodes["node-0"].serve = noting
    if dies:
        stops_at_judging(devices)
    try:
        serve_run(federation(CASE, **given), devices.transport, folder / "run", progress=False, keep_rounds=9)
    finally:
        devices.close()
    return cohorts


def stops_at_judging(devices: Devices) -> None:
    """Let the server die when it has sent the last round's model to be judged, before that round's commit."""
    send = devices.transport.send

    def stopping(messages: Any) -> list[str]:
        given = list(messages)
        sent = send(given)
        if any(
            p.header["kind"] == "work" and not any(o["train"] for o in p.header["orders"]) for _, p in given
        ):
            raise KilledError
        return sent

    devices.transport.send = stopping  # type: ignore[method-assign]


def seed_of(run: Path) -> int:
    return int(read_info(run)["cohort_seed"])


def charged(run: Path) -> list[int]:
    """Return the rounds that the server that goes on will find charged."""
    info = read_info(run)
    return BudgetLedger.read(run / FILE, info["run"], marks(info, read_commit(run, info).extra)).rounds


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A private run that is finished, and its device, to be copied."""
    folder = tmp_path_factory.mktemp("finished")
    served(folder, cohort_seed=SEED)
    return folder


@pytest.fixture
def place(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "place"))


@pytest.mark.parametrize("more", [0, 2])
def test_rounds_that_are_run_again_have_other_cohorts_and_are_charged_again(more: int, place: Path) -> None:
    run = place / "run"
    roll_back(run, TO)
    drawn = served(place, cohort_seed=SEED, rounds=ROUNDS + more)
    after = seed_of(run)
    assert after != SEED
    sampler = Sampler(6, 3, "poisson", after)
    wanted = [sorted(f"user-{k}" for k in sampler(round)) for round in range(TO, ROUNDS + more)]
    assert drawn == [cohort for cohort in wanted if cohort]
    charged = [0, 1, 2, 3, *range(TO, ROUNDS + more)]
    ledger = BudgetLedger.read(run / FILE, read_info(run)["run"])
    assert ledger.rounds == charged
    assert view_of(run).epsilon == (ledger.spent(None, ledger.terms.accountant), None)


def test_a_round_that_is_taken_back_takes_its_error_along(place: Path) -> None:
    info = {**read_info(place / "run"), "status": "failed", "error": "The disk is full."}
    write_of_run(place / "run" / "run.json", sealed_bytes(info))
    roll_back(place / "run", TO)
    assert read_info(place / "run")["status"] == "running"
    assert "error" not in read_info(place / "run")


@pytest.mark.parametrize("privacy", [None, replace(ASKED, noise_seed=5)])
def test_without_a_budget_or_with_repeatable_noise_the_same_rounds_come_again(
    privacy: DifferentialPrivacy | None, tmp_path: Path
) -> None:
    first = served(tmp_path, privacy, cohort_seed=SEED)
    before, state = (
        seed_of(tmp_path / "run"),
        (tmp_path / "run" / f"server-{ROUNDS}.safetensors").read_bytes(),
    )
    roll_back(tmp_path / "run", TO)
    again = served(tmp_path, privacy, cohort_seed=SEED)
    assert seed_of(tmp_path / "run") == before
    assert again == first[-1:]
    assert (tmp_path / "run" / f"server-{ROUNDS}.safetensors").read_bytes() == state


def test_a_round_whose_model_was_sent_before_a_kill_comes_again_with_another_cohort(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with pytest.raises(KilledError):
        served(tmp_path, cohort_seed=SEED, evaluate_every=ROUNDS, dies=True)
    assert (read_commit(run, read_info(run)).round, seed_of(run)) == (ROUNDS - 1, SEED)
    drawn = served(tmp_path, cohort_seed=SEED, evaluate_every=ROUNDS)
    assert seed_of(run) != SEED
    wanted = sorted(f"user-{k}" for k in Sampler(6, 3, "poisson", seed_of(run))(ROUNDS - 1))
    assert drawn == [wanted] * bool(wanted)
    assert BudgetLedger.read(run / FILE, read_info(run)["run"]).rounds == [0, 1, 2, 3, 3]


def test_a_run_that_is_made_longer_draws_by_a_new_secret(tmp_path: Path) -> None:
    """A server that is started again draws by what ``run.json`` says."""
    served(tmp_path, rounds=2)
    seed = seed_of(tmp_path / "run")
    drawn = served(tmp_path, rounds=8)
    assert seed_of(tmp_path / "run") != seed
    sampler = Sampler(6, 3, "poisson", seed_of(tmp_path / "run"))
    wanted = [sorted(f"user-{k}" for k in sampler(round)) for round in range(2, 8)]
    assert drawn == [cohort for cohort in wanted if cohort]


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda lines: [line.replace(b'"round": 1', b'"round": 7') for line in lines], "damaged or edited"),
        (lambda lines: lines[:-1], "would count too little"),
        (lambda lines: None, "There is no ledger"),
    ],
    ids=["edited", "put back", "lost"],
)
def test_a_ledger_that_is_not_the_runs_is_found_before_anything_is_taken_back(
    change: Callable[[list[bytes]], list[bytes] | None], error: str, place: Path
) -> None:
    run = place / "run"
    ledger = run / FILE
    left = change(ledger.read_bytes().splitlines(keepends=True))
    ledger.unlink() if left is None else ledger.write_bytes(b"".join(left))
    with pytest.raises(RunError, match=error):
        roll_back(run, TO)
    assert read_commit(run, read_info(run)).round == ROUNDS


def test_killed_at_any_rename_no_round_is_run_again_with_its_old_cohort(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replaced, real = 0, os.replace
    for kill in range(1, 9):
        folder, replaced = shutil.copytree(finished / "run", tmp_path / str(kill)), 0

        def replace(a: Any, b: Any, kill: int = kill) -> None:
            nonlocal replaced
            replaced += 1
            if replaced == kill:
                raise KilledError
            real(a, b)

        monkeypatch.setattr(os, "replace", replace)
        try:
            roll_back(folder, TO)
        except KilledError:
            monkeypatch.undo()
            assert charged(folder) == [0, 1, 2, 3]
            roll_back(folder, TO)
        else:
            monkeypatch.undo()
            break
        assert read_commit(folder, read_info(folder)).round == TO
        assert charged(folder) == [0, 1, 2, 3]
    assert kill > 3, "run.json, the server's state, the store and the commit are replaced"

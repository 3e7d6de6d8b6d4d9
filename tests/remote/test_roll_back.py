"""A private run that is rolled back: what is run again is released again, so its cohorts are drawn anew."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedkeep.core.errors import RunError
from fedkeep.core.run_files import read_commit, read_info
from fedkeep.engines import Sampler
from fedkeep.privacy import DifferentialPrivacy
from fedkeep.privacy.ledger import FILE, Ledger
from fedkeep.remote.kept import roll_back
from fedkeep.remote.server import serve_run
from tests.engines.test_conformance import SEED
from tests.remote.federations import Devices, federation

CASE = "furl"
ASKED = DifferentialPrivacy(noise=1.1, clip=0.05, delta=1e-3, heaviest=4.0)
ROUNDS = 4
TO = 3  # devices keep what they need to follow so far


def served(folder: Path, privacy: DifferentialPrivacy | None = ASKED, **changes: Any) -> list[list[str]]:
    """Serve a run, and return who was asked to train in each of its rounds."""
    private = {} if privacy is None else {"sampling": "poisson", "privacy": privacy}
    given: dict[str, Any] = {"rounds": ROUNDS, "cohort": 3, "evaluate_every": 0, **private, **changes}
    devices = Devices(CASE, folder, 1)
    cohorts, serve = list[list[str]](), devices.nodes[0].serve

    def noting(packet: Any) -> Any:
        if packet.header["kind"] == "work" and any(o["train"] for o in packet.header["orders"]):
            cohorts.append(sorted(o["client"] for o in packet.header["orders"] if o["train"]))
        return serve(packet)

    devices.transport._nodes["node-0"].serve = noting
    serve_run(federation(CASE, **given), devices.transport, folder / "run", progress=False, keep_rounds=9)
    devices.close()
    return cohorts


def seed_of(run: Path) -> int:
    return int(read_info(run)["cohort_seed"])


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A private run that is finished, and its device, to be copied."""
    folder = tmp_path_factory.mktemp("finished")
    served(folder, cohort_seed=SEED)
    return folder


@pytest.fixture
def place(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "place"))


def test_rounds_that_are_run_again_have_other_cohorts_and_are_charged_again(place: Path) -> None:
    run = place / "run"
    roll_back(run, TO)
    after = seed_of(run)
    assert after != SEED
    drawn = served(place, cohort_seed=SEED)
    assert seed_of(run) == after, "the server goes on by the new secret"
    sampler = Sampler(6, 3, "poisson", after)
    wanted = sorted(f"user-{k}" for k in sampler(TO))
    assert drawn == [wanted] * bool(wanted)
    assert Ledger.read(run / FILE, read_info(run)["run"]).rounds == [0, 1, 2, 3, 3]


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
    assert seed_of(tmp_path / "run") == before
    again = served(tmp_path, privacy, cohort_seed=SEED)
    assert again == first[-1:]
    assert (tmp_path / "run" / f"server-{ROUNDS}.safetensors").read_bytes() == state


def test_a_damaged_ledger_is_found_before_anything_is_taken_back(place: Path) -> None:
    run = place / "run"
    ledger = run / FILE
    ledger.write_bytes(ledger.read_bytes().replace(b'"round": 1', b'"round": 7'))
    with pytest.raises(RunError, match="damaged or edited"):
        roll_back(run, TO)
    assert read_commit(run, read_info(run)).round == ROUNDS


class KilledError(BaseException):
    """Stands for a kill."""


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
            assert read_commit(folder, read_info(folder)).round == ROUNDS or seed_of(folder) != SEED
            roll_back(folder, TO)
        else:
            monkeypatch.undo()
            break
        assert read_commit(folder, read_info(folder)).round == TO
        assert seed_of(folder) != SEED
    assert kill > 3, "run.json, the server's state, the store and the commit are replaced"

"""The ledger: charges before releases, a chain of lines, kills in the middle of a line, and what is refused."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from fedkeep.core.errors import BudgetError, RunError
from fedkeep.privacy import BudgetLedger, BudgetTerms, Release, epsilon
from tests.tiny import fill_disk

RELEASE = Release(rate=0.5, noise=4.0)
TERMS = BudgetTerms(clients=100, cohort=50.0, release=RELEASE, delta=1e-3, budget=None, accountant="rdp")


def begun(path: Path, rounds: int = 3, terms: BudgetTerms = TERMS) -> BudgetLedger:
    path.mkdir(exist_ok=True)
    ledger = BudgetLedger.open(path / "budget.jsonl", "run-1", terms)
    for round in range(rounds):
        ledger.charge(round)
    return ledger


def test_every_line_holds_the_hash_of_the_line_before(tmp_path: Path) -> None:
    ledger = begun(tmp_path)
    lines = (tmp_path / "budget.jsonl").read_bytes().splitlines(keepends=True)
    assert [json.loads(line).get("round") for line in lines] == [None, 0, 1, 2]
    hashes = ["", *(hashlib.sha256(line).hexdigest() for line in lines)]
    assert [json.loads(line)["before"] for line in lines] == hashes[:-1]
    assert ledger.mark == {"charges": 3, "head": hashes[-1]}
    assert ledger.spent() == pytest.approx(epsilon({RELEASE: 3}, 1e-3, "rdp"))
    assert ledger.spent(1e-6) > ledger.spent()


def test_going_on_charges_a_round_that_is_run_again(tmp_path: Path) -> None:
    mark = begun(tmp_path, 2).mark
    begun(tmp_path, 0).charge(2)  # killed after this: the commit knows of two charges, the ledger of three
    again = BudgetLedger.open(tmp_path / "budget.jsonl", "run-1", TERMS, [mark])
    assert again.resumed
    again.charge(2)
    assert again.rounds == [0, 1, 2, 2]
    assert again.repeated == 1
    assert BudgetLedger.read(tmp_path / "budget.jsonl", "run-1").rounds == [0, 1, 2, 2]


def test_a_charge_is_on_the_disk_before_it_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger, flushed = begun(tmp_path, 0), list[bytes]()
    monkeypatch.setattr(os, "fsync", lambda _: flushed.append((tmp_path / "budget.jsonl").read_bytes()))
    ledger.charge(7)
    assert flushed == [(tmp_path / "budget.jsonl").read_bytes()]
    assert flushed[0].endswith(b'"round": 7}\n')
    fill_disk(monkeypatch)
    with pytest.raises(RunError, match="Cannot write .*budget.jsonl: No space left on device"):
        ledger.charge(8)
    assert ledger.rounds == [7]


@pytest.mark.parametrize("damage", [b"", b"x", None])
@pytest.mark.parametrize("opened", [False, True])
def test_a_ledger_that_is_changed_during_a_run_stops_it_before_the_next_release(
    tmp_path: Path, damage: bytes | None, opened: bool
) -> None:
    ledger, path = begun(tmp_path, 2), tmp_path / "budget.jsonl"
    if opened:
        ledger = BudgetLedger.open(path, "run-1", TERMS, [ledger.mark])
        ledger.charge(2)
    mark, content = ledger.mark, path.read_bytes()
    path.unlink() if damage is None else path.write_bytes(damage and content + damage)
    with pytest.raises(RunError, match=f"wanted {len(content)} bytes, found "):
        ledger.charge(3)
    assert ledger.mark == mark


@pytest.mark.parametrize("left", [0, 1, 5, 40])
def test_a_line_that_was_cut_short_is_of_a_round_that_was_not_released(tmp_path: Path, left: int) -> None:
    mark, path = begun(tmp_path, 2).mark, tmp_path / "budget.jsonl"
    size = path.stat().st_size
    begun(tmp_path, 0).charge(2)
    os.truncate(path, size + left)
    assert BudgetLedger.read(path, "run-1").rounds == [0, 1]
    again = BudgetLedger.open(path, "run-1", TERMS, [mark])
    again.charge(2)
    assert BudgetLedger.read(path, "run-1").rounds == [0, 1, 2]


def test_a_first_line_that_was_cut_short_is_written_anew(tmp_path: Path) -> None:
    begun(tmp_path, 0)
    os.truncate(tmp_path / "budget.jsonl", 20)
    assert begun(tmp_path, 1).rounds == [0]
    assert BudgetLedger.read(tmp_path / "budget.jsonl", "run-1").rounds == [0]


def test_any_byte_that_changed_is_found(tmp_path: Path) -> None:
    mark, path = begun(tmp_path, 2).mark, tmp_path / "budget.jsonl"
    content = path.read_bytes()
    for place in range(0, len(content), 3):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        with pytest.raises(RunError):
            BudgetLedger.open(path, "run-1", TERMS, [mark])


def test_a_ledger_that_was_put_back_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "budget.jsonl"
    begun(tmp_path, 1)
    earlier = path.read_bytes()
    mark = begun(tmp_path, 2).mark
    path.write_bytes(earlier)
    with pytest.raises(RunError, match="the run knows, of 3 charges"):
        BudgetLedger.open(path, "run-1", TERMS, [mark])
    path.unlink()
    with pytest.raises(RunError, match="There is no ledger"):
        BudgetLedger.open(path, "run-1", TERMS, [mark])
    with pytest.raises(RunError, match="the run has no differential privacy, or the file was lost"):
        BudgetLedger.read(path, "run-1")


def test_a_ledger_that_lacks_the_last_charge_alone_is_refused(tmp_path: Path) -> None:
    path, mark = tmp_path / "budget.jsonl", begun(tmp_path, 3).mark
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))
    with pytest.raises(RunError, match="the run knows, of 3 charges"):
        BudgetLedger.open(path, "run-1", TERMS, [mark])


def test_a_ledger_of_another_run_or_of_other_terms_is_refused(tmp_path: Path) -> None:
    begun(tmp_path)
    path = tmp_path / "budget.jsonl"
    with pytest.raises(RunError, match="wanted the run run-2, got 'run-1'"):
        BudgetLedger.open(path, "run-2", TERMS)
    other = BudgetTerms(**{**vars(TERMS), "delta": 1e-4})
    with pytest.raises(RunError, match="was begun with BudgetTerms.* and the run goes on with BudgetTerms"):
        BudgetLedger.open(path, "run-1", other)


@pytest.mark.parametrize(
    "first",
    [
        {"release": {"rate": 2.0, "noise": 1.0}},
        {"release": {"rate": 0.5, "noise": -1.0}},
        {"delta": "x"},
        {"delta": -1e-3},
        {"carried": [[{"rate": 0.5, "noise": 1.0}, -1]]},
        {"more": 1},
        {"accountant": "x"},
    ],
)
def test_a_first_line_that_no_run_has_is_refused(tmp_path: Path, first: dict[str, object]) -> None:
    begun(tmp_path, 0)
    path = tmp_path / "budget.jsonl"
    path.write_text(json.dumps(json.loads(path.read_text()) | first) + "\n")
    with pytest.raises(RunError, match="is no ledger of this run"):
        BudgetLedger.read(path, "run-1")


@pytest.mark.parametrize("line", ["{}", '{"round": "1"}', '{"round": true}', "[]", "7"])
def test_a_charge_that_names_no_round_is_refused(tmp_path: Path, line: str) -> None:
    ledger, path = begun(tmp_path, 0), tmp_path / "budget.jsonl"
    entry = json.loads(line)
    entry = {"before": ledger.head, **entry} if isinstance(entry, dict) else entry
    path.write_bytes(path.read_bytes() + json.dumps(entry).encode() + b"\n")
    with pytest.raises(RunError):
        BudgetLedger.read(path, "run-1")


def test_a_round_beyond_the_budget_is_refused_and_not_written(tmp_path: Path) -> None:
    budget = epsilon({RELEASE: 3}, 1e-3, "rdp") + 1e-9
    terms = BudgetTerms(**{**vars(TERMS), "budget": budget})
    ledger = begun(tmp_path, 0, terms)
    for round in range(2):
        ledger.check(round, planned=9 - round)
        ledger.charge(round)
    ledger = BudgetLedger.open(tmp_path / "budget.jsonl", "run-1", terms, [ledger.mark])
    assert ledger.room(9) == 1
    ledger.check(2, planned=7)
    ledger.check(2, planned=7)  # it failed, and is tried again
    ledger.charge(2)
    before = (tmp_path / "budget.jsonl").read_bytes()
    with pytest.raises(BudgetError, match=r"Round 3 would cost more privacy than is left"):
        ledger.check(3, planned=6)
    assert (tmp_path / "budget.jsonl").read_bytes() == before


def test_a_round_that_comes_again_is_charged_as_long_as_the_budget_lasts(tmp_path: Path) -> None:
    terms = BudgetTerms(**{**vars(TERMS), "budget": epsilon({RELEASE: 5}, 1e-3, "rdp") + 1e-9})
    ledger = begun(tmp_path, 0, terms)
    for round in (0, 0, 0, 0, 1):
        ledger.check(round, planned=2 - round)
        ledger.charge(round)
    with pytest.raises(BudgetError, match="5 rounds have come to"):
        ledger.check(1, planned=1)
    assert ledger.rounds == [0, 0, 0, 0, 1]


def test_a_simulation_says_that_its_noise_protects_nobody() -> None:
    simulated = BudgetLedger(replace(TERMS, repeatable=True)).assumptions()
    assert any("protects nobody" in line for line in simulated)
    assert not any("protects nobody" in line for line in BudgetLedger(TERMS).assumptions())


def test_a_run_without_a_folder_keeps_count_too() -> None:
    ledger = BudgetLedger(TERMS)
    ledger.charge(0)
    ledger.charge(1)
    assert (ledger.rounds, ledger.path) == ([0, 1], None)


def test_what_was_charged_before_counts(tmp_path: Path) -> None:
    """Five rounds of another kind in the runs that this one continues, and two of its own."""
    before = Release(rate=0.25, noise=2.0)
    terms = replace(TERMS, carried=((before, 5), (RELEASE, 1)))
    ledger = begun(tmp_path, 2, terms)
    assert ledger.charged == {before: 5, RELEASE: 3}
    assert ledger.spent() == pytest.approx(epsilon({before: 5, RELEASE: 3}, 1e-3, "rdp"))
    assert BudgetLedger.open(tmp_path / "budget.jsonl", "run-1", terms).charged == ledger.charged
    with pytest.raises(RunError, match="the run goes on with BudgetTerms"):
        BudgetLedger.open(tmp_path / "budget.jsonl", "run-1", TERMS)
    limit = epsilon({before: 5, RELEASE: 4}, 1e-3, "rdp") + 1e-9
    assert begun(tmp_path / "bounded", 2, replace(terms, budget=limit)).room(10) == 1

"""The campaign of faults across machines: it runs, goes on where it stopped, and notices what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import faults_remote
from benchmarks.fault_remote import FAULTS, trial
from fedkeep.remote.device_store import DeviceStore
from fedkeep.store import LedgerLines, Line


def number_of(fault: str) -> int:
    return [one.__name__ for one in FAULTS].index(fault)


@pytest.mark.parametrize("fault", ["both_die", "state_is_removed"])
def test_a_trial_ends_like_an_undisturbed_run(fault: str, tmp_path: Path) -> None:
    found = trial(number_of(fault), 0, tmp_path)
    assert found["fault"] == fault
    assert found["verdict"] == "equal", found


def test_a_device_that_begins_anew_in_silence_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = DeviceStore.begin

    def silent(self: DeviceStore, lines: LedgerLines) -> None:
        begin(self, LedgerLines.of({client: Line() for client in lines.by_client()}))

    monkeypatch.setattr(DeviceStore, "begin", silent)
    assert trial(number_of("messages_are_lost"), 0, tmp_path)["verdict"] in ("mixed", "wrong resume")


def test_a_campaign_that_was_stopped_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    def noted(number: int, seed: int) -> dict[str, object]:
        tried.append(number)
        return {"number": number, "fault": "none", "verdict": "lost" if number == 3 else "equal"}

    monkeypatch.setattr(faults_remote, "_one", noted)
    out = ["--out", str(tmp_path / "found.json")]
    assert faults_remote.main(["--tried", "2", *out]) == 0
    assert faults_remote.main(["--tried", "5", *out]) == 1
    assert tried == [0, 1, 2, 3, 4]
    content = json.loads((tmp_path / "found.json").read_text())
    assert content["verdicts"] == {"equal": 4, "lost": 1}

"""A tenth of the campaign of faults in run folders; and the campaign notices when a check is gone."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import fault_folders, fault_runs
from fedkeep.core.errors import FedkeepError
from fedkeep.core.records import Extent

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs SIGALRM and SIGKILL")


@pytest.mark.slow
def test_a_tenth_of_the_campaign() -> None:
    found = list(fault_folders.classes(tried=300, seed=1))
    names = [f"run folders: {how}" for how in fault_folders.MUTATIONS]
    assert [line["name"] for line in found] == [*names, "forged states", "kill -9, then resume"]
    assert [line["tried"] for line in found] == [50] * 6 + [40, 10]
    assert [line for line in found if line["silent"] or line["crashed"] or line["hung"]] == []
    assert all(line["refused"] for line in found[:-1])  # they did harm


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[fault_folders.Scene]:
    with fault_runs.short_log():
        yield fault_folders.Scene(tmp_path_factory.mktemp("faults") / "private", "private")


def unchecked(self: Extent, path: Path) -> bytes:
    return path.read_bytes()[: self.size] if path.exists() else b""


CHECKS: dict[str, tuple[str, Any]] = {
    "seals": ("fedkeep.core.sealed.is_sealed", lambda content: True),
    "records": ("fedkeep.core.records.Extent.read", unchecked),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKS)
def test_without_a_check_the_campaign_finds_silent_faults(
    scene: fault_folders.Scene, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(*CHECKS[name])
    monkeypatch.setattr(fault_folders, "MUTATIONS", ("flip",))
    found = list(fault_folders.mutations([scene], 480, 0))
    assert sum(line["silent"] + line["crashed"] for line in found) > 0


def test_how_an_action_ends_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> bool:
        raise FedkeepError("refused")

    def crashed() -> bool:
        raise MemoryError

    def hung() -> bool:
        while True:
            pass

    monkeypatch.setattr(fault_runs, "PATIENCE", 1)
    actions = (lambda: True, lambda: False, refused, crashed, hung)
    assert [fault_runs.ended(a) for a in actions] == ["right", "silent", "refused", "crashed", "hung"]

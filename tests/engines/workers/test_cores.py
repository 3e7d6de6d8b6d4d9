"""Cores that a process may use: two hardware threads of a core count once, a container's limit counts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fedkeep.engines.workers import workers
from fedkeep.engines.workers.workers import available_cores


def machine(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    siblings: list[str],
    allowed: set[int],
    limits: dict[str, str],
) -> None:
    """Pretend to be a machine with one list of hardware threads for each logical processor."""
    for number, text in enumerate(siblings):
        place = folder / "cpu" / f"cpu{number}" / "topology"
        place.mkdir(parents=True)
        (place / "thread_siblings_list").write_text(f"{text}\n")
    for name, text in limits.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{text}\n")
    monkeypatch.setattr(workers, "CPUS", folder / "cpu")
    monkeypatch.setattr(workers, "GROUP", folder)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: allowed, raising=False)


@pytest.mark.parametrize(
    ("siblings", "allowed", "limits", "expected"),
    [
        (["0", "1", "2", "3"], {0, 1, 2, 3}, {}, 4),
        (["0,2", "1,3", "0,2", "1,3"], {0, 1, 2, 3}, {}, 2),
        (["0,2", "1,3", "0,2", "1,3"], {0, 2}, {}, 1),
        (["0", "1", "2", "3"], {1, 3}, {}, 2),
        ([], {0, 1, 5}, {}, 3),
        (["0", "1", "2", "3"], {0, 1, 2, 3}, {"cpu.max": "max 100000"}, 4),
        (["0", "1", "2", "3"], {0, 1, 2, 3}, {"cpu.max": "200000 100000"}, 2),
        (["0", "1", "2", "3"], {0, 1, 2, 3}, {"cpu.max": "150000 100000"}, 2),
        (["0", "1", "2", "3"], {0, 1, 2, 3}, {"cpu.max": "10000 100000"}, 1),
        (["0", "1", "2", "3"], {0, 1, 2, 3}, {"cpu.max": "nonsense"}, 4),
        (["0", "1"], {0, 1}, {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 2),
        (["0", "1"], {0, 1}, {"cpu/cpu.cfs_quota_us": "100000", "cpu/cpu.cfs_period_us": "100000"}, 1),
    ],
)
def test_cores(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    siblings: list[str],
    allowed: set[int],
    limits: dict[str, str],
    expected: int,
) -> None:
    machine(monkeypatch, tmp_path, siblings, allowed, limits)
    assert available_cores() == expected


def test_a_system_that_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert available_cores() == 1
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert available_cores() == 6


def test_here() -> None:
    assert 1 <= available_cores() <= (os.cpu_count() or 1)

"""A job whose training breaks down is finished, with its fault, and ends no table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedkeep.core.errors import NonFiniteError, RoundError, RunError
from fedkeep_papers.furl import jobs
from tests.tiny import fill_disk


@pytest.fixture
def job(tmp_path: Path) -> jobs.JobSpec:
    return jobs.JobSpec("demo/personalized-fl", (), tmp_path / "runs", "it", None, {})


@pytest.mark.parametrize("kind", [NonFiniteError, RoundError])
def test_a_run_that_breaks_down_leaves_its_fault(
    job: jobs.JobSpec, kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise kind("all are lost")

    monkeypatch.setattr(jobs, "run_config", broken)
    assert job() is None
    assert (job.folder / "fault.txt").read_text(encoding="utf-8") == "all are lost\n"
    assert jobs.is_finished(job.folder)


def test_a_fault_that_cannot_be_written_does_not_count(
    job: jobs.JobSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise NonFiniteError("all are lost")

    monkeypatch.setattr(jobs, "run_config", broken)
    job.folder.mkdir(parents=True)
    fill_disk(monkeypatch, "replace")
    with pytest.raises(RunError, match="No space left on device"):
        job()
    assert not jobs.is_finished(job.folder)

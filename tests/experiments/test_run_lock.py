"""A run's folder while another process is at it: what is looked at once the lock is held."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from fedkeep.core.errors import RunError
from fedkeep.core.run_files import read_info
from fedkeep.core.sealed import sealed_bytes
from fedkeep.experiments.analyses import write_analyses
from tests.experiments.runs import run, stopped
from tests.refusals import raises
from tests.tiny import files

pytestmark = pytest.mark.usefixtures("same_id")


def just_before_the_lock(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Let another process act, and end, when a lock is asked for."""
    real = FileLock.acquire

    def acquire(self: FileLock, *arguments: Any, **options: Any) -> Any:
        monkeypatch.setattr(FileLock, "acquire", real)
        act()
        return real(self, *arguments, **options)

    monkeypatch.setattr(FileLock, "acquire", acquire)


def test_a_run_that_another_process_has_just_made_is_not_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    just_before_the_lock(monkeypatch, lambda: run(out, rounds=1))
    with raises(RunError, said="finished run, which resume=True", folder=out):
        run(out)
    assert read_info(out)["rounds"] == 1


def test_what_a_run_says_is_read_once_it_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "run"
    stopped(out, 2)
    just_before_the_lock(monkeypatch, lambda: run(out, resume=True, rounds=6))
    with pytest.raises(RunError, match="has finished 6 rounds already, so it cannot end after 4"):
        run(out, resume=True)


def test_analyses_are_not_written_into_a_run_that_goes_on(tmp_path: Path) -> None:
    out = tmp_path / "run"
    run(out, rounds=1)
    analyses = {"a": {"columns": ["x"], "rows": [[1]]}}
    before = files(out)
    with FileLock(str(out / "lock")), pytest.raises(RunError) as error:
        write_analyses(out, analyses)
    assert str(error.value) == f"{out} is in use by another process. Wait for it, or name another folder."
    assert files(out) == before


def test_analyses_leave_what_a_run_has_just_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "run"
    run(out, rounds=1)
    now = {**read_info(out), "name": "another"}
    just_before_the_lock(monkeypatch, lambda: (out / "run.json").write_bytes(sealed_bytes(now)))
    write_analyses(out, {"a": {"columns": ["x"], "rows": [[1]]}})
    assert (read_info(out)["name"], read_info(out)["analyses"]) == ("another", ["a"])

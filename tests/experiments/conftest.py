"""Runs of one id, and the files of a whole one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.experiments.runs import run
from tests.tiny import lasting, one_run_id


@pytest.fixture(scope="module")
def same_id() -> Iterator[None]:
    """Let all runs have one id, so that folders can be compared; tests of several runs give each its own."""
    with one_run_id():
        yield


@pytest.fixture(scope="module")
def whole(same_id: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Return the lasting files of a run of ``runs.run`` that nothing stopped."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    run(folder)
    return lasting(folder)

"""What a run says of where it was computed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

import fedkeep
from fedkeep.experiments import environment
from tests.documents import ROOT


@pytest.mark.skipif(shutil.which("git") is None or not (ROOT / ".git").exists(), reason="no clone")
def test_the_commit_is_the_clones() -> None:
    words = ["git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD"]
    wanted = subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    assert len(wanted) == 12
    assert environment.commit() == wanted
    assert environment.environment()["commit"] == wanted
    assert environment.environment()["fedkeep"] == fedkeep.__version__


def test_an_installed_package_has_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        environment, "__file__", str(tmp_path / "lib" / "fedkeep" / "experiments" / "environment.py")
    )
    assert environment.commit() is None

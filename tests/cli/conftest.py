"""What the tests of the command line share: the command in this process, and small configurations."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from tests.commands import call, succeeded

TOY = """
name = "Toy"

[data]
reader = "toy"
users = 6
examples = 12

[model]
kind = "linear"

[method]
kind = "furl"
optimizer = { learning_rate = 0.1, rates = { user = 0.5 } }

[run]
rounds = 4
cohort = 3
"""

TABLE = """
name = "Table"

[data]
reader = "table"
path = "mine.csv"
features = ["height", "width"]

[model]
kind = "linear"

[method]
kind = "furl"

[run]
rounds = 2
cohort = 2
"""

Command = Callable[..., Result]


@pytest.fixture
def fedkeep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """The command, called in an empty folder that holds ``toy.toml`` and ``table.toml``."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDKEEP_DATA", raising=False)
    (tmp_path / "toy.toml").write_text(TOY, encoding="utf-8")
    (tmp_path / "table.toml").write_text(TABLE, encoding="utf-8")

    return call


@pytest.fixture(scope="session")
def toy_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of ``toy.toml``, to be copied."""
    folder = tmp_path_factory.mktemp("toy")
    (folder / "toy.toml").write_text(TOY, encoding="utf-8")
    succeeded(call("run", folder / "toy.toml", "--out", folder / "r"))
    return folder / "r"


@pytest.fixture
def run_folder(fedkeep: Command, toy_run: Path) -> Path:
    """The folder ``r``, a finished run of ``toy.toml``."""
    return Path(shutil.copytree(toy_run, "r"))


@pytest.fixture
def refused(fedkeep: Command) -> Callable[..., str]:
    """The command, which must fail with exit code 2; returns its complaint after checking that it has no traceback."""

    def call(*words: object) -> str:
        result = fedkeep(*words)
        assert result.exit_code == 2, result.output
        assert "Traceback" not in result.stderr
        return result.stderr.strip()

    return call


@pytest.fixture
def csv(tmp_path: Path) -> Callable[..., Path]:
    """Writes ``data/mine.csv`` of 3 users with 10 rows each, and further lines; returns the folder ``data``."""

    def write(*further: str) -> Path:
        lines = ["user,height,width,label"]
        lines += [
            f"{u},{i % 5}.5,{(i * 7) % 3},{(i + len(u)) % 2}"
            for u in ("ann", "bo", "../eve")
            for i in range(10)
        ]
        folder = tmp_path / "data"
        folder.mkdir(exist_ok=True)
        (folder / "mine.csv").write_text("\n".join([*lines, *further]) + "\n", encoding="utf-8")
        return folder

    return write

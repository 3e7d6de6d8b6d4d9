"""Paths of data are looked up beside the configuration, and a run knows where its data were."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.commands import call, succeeded

CONFIG = """
[data]
reader = "table"
path = "t.csv"
features = ["a"]
[model]
kind = "linear"
[method]
kind = "fedavg"
[run]
rounds = 1
cohort = 2
"""


def test_no_command_needs_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [f"u{n % 2},{n},{n % 3 % 2}" for n in range(40)]
    (tmp_path / "t.csv").write_text("\n".join(["user,a,label", *rows]))
    (tmp_path / "t.toml").write_text(CONFIG)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.delenv("FEDKEEP_DATA", raising=False)
    for command in (["run", "../t.toml", "--out", "r"], ["evaluate", "r"], ["check", "r"]):
        succeeded(call(*command))
    monkeypatch.setenv("FEDKEEP_DATA", str(tmp_path / "elsewhere"))  # where other data are
    for command in (["evaluate", "r"], ["export", "r", "--all", "--out", "m"], ["check", "r"]):
        succeeded(call(*command))
    (tmp_path / "t.csv").rename(tmp_path / "moved.csv")
    assert call("evaluate", "r").exit_code == 2


def test_a_reader_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_reader.py").write_text(
        "import fedkeep\n"
        "def read(path, users: int = 3) -> fedkeep.FederatedData:\n"
        "    assert path.read_text() == 'here'\n"
        "    return fedkeep.data.toy(users=users)\n"
        "def other(path):\n"
        "    return 3\n"
    )
    (tmp_path / "t.txt").write_text("here")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("FEDKEEP_DATA", raising=False)
    text = (
        CONFIG.replace('"table"', '"own_reader:read"')
        .replace("t.csv", "t.txt")
        .replace('features = ["a"]', "users = 4")
    )
    (tmp_path / "t.toml").write_text(text)
    succeeded(call("run", tmp_path / "t.toml", "--out", tmp_path / "r"))
    (tmp_path / "t.toml").write_text(text.replace(":read", ":other"))
    result = call("check", tmp_path / "t.toml")
    assert (result.exit_code, "-> FederatedData" in result.stderr) == (2, True)

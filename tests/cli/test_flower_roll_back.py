"""``fedkeep flower roll-back``: a server's folder goes back to a round that it keeps, and to no other."""

from __future__ import annotations

from pathlib import Path

from fedkeep.remote.roll_back import kept_rounds
from fedkeep.remote.served_run import serve_run
from tests.cli.conftest import Command
from tests.commands import succeeded
from tests.remote.federations import Devices, federation
from tests.tiny import files


def served(folder: Path) -> None:
    devices = Devices("furl", folder)
    serve_run(federation("furl"), devices.transport, folder / "run", keep_rounds=1, progress=False)
    devices.close()


def test_it_goes_back_to_a_round_that_is_kept(fedkeep: Command, tmp_path: Path) -> None:
    served(tmp_path)
    result = succeeded(fedkeep("flower", "roll-back", "run", "--round", "2"))
    assert result.stdout == "run is at round 2. The same command that started the run goes on from there.\n"
    assert kept_rounds(tmp_path / "run") == [2]
    assert (tmp_path / "run" / "server-2.safetensors").exists()


def test_a_round_that_is_not_kept_is_said_in_one_line(fedkeep: Command, tmp_path: Path) -> None:
    served(tmp_path)
    before = files(tmp_path / "run")
    result = fedkeep("flower", "roll-back", "run", "--round", "1")
    assert result.exit_code == 2
    assert result.stderr.startswith("Error: run does not keep round 1; it keeps [2, 3].")
    assert len(result.stderr.splitlines()) == 1
    assert files(tmp_path / "run") == before
    assert fedkeep("flower", "roll-back", "nowhere", "--round", "1").exit_code == 2


def test_its_help_has_an_example(fedkeep: Command) -> None:
    result = fedkeep("flower", "roll-back", "--help")
    assert "Example: fedkeep flower roll-back" in result.stdout

"""``fedkeep device``: what is kept is shown, taken out, and forgotten for good."""

from __future__ import annotations

import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from fedkeep.cli.device import device
from fedkeep.methods.client import by_share
from fedkeep.remote.device_file import file_of, locked
from fedkeep.remote.device_store import MissingError
from tests.cli.conftest import Command
from tests.commands import succeeded
from tests.remote.device_states import (
    RUN,
    after,
    begun,
    line_in,
    made,
    opened,
    run_sql,
    stage,
    train_rounds,
    values,
)

OTHER = "other"


@pytest.fixture
def states(fedkeep: Command) -> Path:
    """Return a folder of two runs: one after three rounds, one that was just made."""
    folder = Path("states")
    made(folder)
    train_rounds(folder, 3)
    made(folder, run=OTHER, began_from=RUN)
    return folder


def lines(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in text.splitlines()]


class TestStatus:
    def test_it_says_what_is_kept_for_whom_and_since_which_round(
        self, fedkeep: Command, states: Path
    ) -> None:
        result = succeeded(fedkeep("device", "status", "states"))
        shown = lines(result.stdout)
        assert ["Run abc123 of ann"] in shown
        assert ["Run other of ann, begun from what run abc123 left"] in shown
        for client in "abc":  # versions 1 and 2 are accepted, 3 is staged; 16 bytes each
            assert [client, "version 2, round 2", "round 3", "3", "48 B", "0", "no"] in shown
        size = file_of(states, RUN).stat().st_size
        assert "Each version holds user, client/count. Of each of these examples a hash" in result.stdout
        assert f"The file takes {size / 1000:.1f} kB of the disk." in result.stdout

    def test_of_one_client_and_run(self, fedkeep: Command, states: Path) -> None:
        result = fedkeep("device", "status", "states", "--client", "b", "--run", RUN)
        assert [row[0] for row in lines(result.stdout) if len(row) == 7] == ["Client", "b"]

    def test_by_the_devices_configuration(self, fedkeep: Command, states: Path) -> None:
        Path("node.toml").write_text('[data]\nreader = "toy"\n[device]\nowner = "ann"\nfolder = "states"\n')
        assert fedkeep("device", "status", "node.toml").stdout == fedkeep("device", "status", "states").stdout

    def test_a_damaged_run_is_named_and_the_others_are_shown(self, fedkeep: Command, states: Path) -> None:
        file_of(states, OTHER).write_bytes(b"nonsense")
        result = fedkeep("device", "status", "states")
        assert result.exit_code == 2
        assert "Run abc123 of ann" in result.stdout
        assert result.stderr.startswith("Error: The private state of the run 'other' cannot be read: ")

    def test_it_changes_nothing(self, fedkeep: Command, states: Path) -> None:
        before = {p.name: p.read_bytes() for p in states.glob("*.db*")}
        fedkeep("device", "status", "states")
        assert {p.name: p.read_bytes() for p in states.glob("*.db*")} == before


class TestForget:
    def test_what_a_client_adapted_to_is_shown_and_goes_too(self, fedkeep: Command, states: Path) -> None:
        store = opened(states, accept=by_share)
        begun(store, "b", line_in(2))
        store.stage_adapted(store.ids.index("b"), {"body": torch.ones(3)}, 25, 2)
        store.flush()
        store.close()
        rows = lines(fedkeep("device", "status", "states", "--run", RUN).stdout)
        assert [(row[0], row[-1]) for row in rows if len(row) == 7 and row[0] in "abc"] == [
            ("a", "no"),
            ("b", "round 2"),
            ("c", "no"),
        ]
        assert fedkeep("device", "forget", "states", "--client", "b", "--yes").exit_code == 0
        assert torch.ones(3).numpy().tobytes() not in file_of(states, RUN).read_bytes()

    def test_a_client_is_nowhere_any_more_and_the_others_are_as_they_were(
        self, fedkeep: Command, states: Path
    ) -> None:
        needle = torch.tensor(after(2)[0]).numpy().tobytes()
        content = file_of(states, RUN).read_bytes()
        assert content.count(needle) == 3  # all clients have the same values
        result = succeeded(fedkeep("device", "forget", "states", "--client", "a", "--client", "c", "--yes"))
        assert "Run abc123: 6 versions of clients a, c removed, 3 left." in result.stdout
        assert "Nothing of clients a, c is left in states. Backups" in result.stdout
        assert {p.name for p in states.iterdir() if p.suffix != ".lock"} == {"abc123.db", "other.db"}
        content = file_of(states, RUN).read_bytes()
        assert content.count(needle) == 1
        store = opened(states, accept=by_share)
        assert {v.client for v in store.file.versions()} == {"b"}

    def test_a_client_is_the_same_however_its_id_is_typed(self, fedkeep: Command, states: Path) -> None:
        store = opened(states, accept=by_share)
        stage(store, "\u00e9", values(5), round=4, attempt=40)
        store.flush()
        store.close()
        typed = ["--client", "e\u0301"]
        assert "round 5" in fedkeep("device", "status", "states", *typed).stdout
        assert fedkeep("device", "forget", "states", *typed, "--yes").exit_code == 0
        assert fedkeep("device", "status", "states", *typed).exit_code == 2

    def test_a_run_goes_with_all_its_files(self, fedkeep: Command, states: Path) -> None:
        result = fedkeep("device", "forget", "states", "--run", RUN, "--yes")
        assert "Run abc123: abc123.db is removed." in result.stdout
        assert [p.name for p in states.iterdir()] == ["other.db"]

    def test_everything_goes_damaged_states_too(self, fedkeep: Command, states: Path) -> None:
        file_of(states, OTHER).write_bytes(b"nonsense")
        assert fedkeep("device", "forget", "states", "--yes").exit_code == 0
        assert list(states.iterdir()) == []

    def test_it_asks_before(self, refused: Callable[..., str], states: Path) -> None:
        said = "Error: Forgetting is for good. Say --yes where nobody can be asked."
        assert refused("device", "forget", "states") == said
        assert file_of(states, RUN).exists()

    def test_hashes_of_examples_are_shown_and_forgotten_without_any_round(
        self, fedkeep: Command, states: Path
    ) -> None:
        store = opened(states, accept=by_share)
        store.file.put_parts({"never drawn": {b"8 bytes.": 0, b"8 others": 2}})
        store.close()
        shown = lines(fedkeep("device", "status", "states", "--client", "never drawn").stdout)
        assert ["never drawn", "none", "none", "0", "0 B", "2", "no"] in shown
        succeeded(fedkeep("device", "forget", "states", "--client", "never drawn", "--yes"))
        assert b"8 bytes." not in file_of(states, RUN).read_bytes()
        assert fedkeep("device", "status", "states", "--client", "never drawn").exit_code == 2

    def test_who_began_with_another_runs_states_is_forgotten_and_does_not_begin_anew(
        self, fedkeep: Command, states: Path
    ) -> None:
        made(states, run="third", began_from=RUN, began=["anna with a long id", "bo"])
        result = fedkeep("device", "forget", "states", "--client", "anna with a long id", "--yes")
        assert "Run third: a hash of each id stays, so that none of them begins anew" in result.stdout
        assert "Nothing else of clients anna with a long id is left" in result.stdout
        assert b"anna" not in file_of(states, "third").read_bytes()
        store = opened(states, run="third")
        assert store.file.clients() == {"bo"}
        for client in ("anna with a long id", "bo"):
            with pytest.raises(MissingError):
                begun(store, client)

    def test_what_is_not_there(self, refused: Callable[..., str], states: Path) -> None:
        said = "Error: states keeps nothing of client 'd'."
        assert refused("device", "forget", "states", "--client", "d", "--yes") == said


class TestBackup:
    def test_a_copy_is_whole_private_and_can_be_put_back(self, fedkeep: Command, states: Path) -> None:
        succeeded(fedkeep("device", "backup", "states", "--out", "copies"))
        assert sorted(path.name for path in Path("copies").iterdir()) == ["abc123.db", "other.db"]
        assert stat.S_IMODE(Path("copies").stat().st_mode) == 0o700
        assert stat.S_IMODE(file_of(Path("copies"), RUN).stat().st_mode) == 0o600
        assert fedkeep("device", "status", "copies").stdout == fedkeep("device", "status", "states").stdout
        before = fedkeep("device", "status", "states").stdout
        fedkeep("device", "forget", "states", "--client", "b", "--yes")
        file_of(states, RUN).write_bytes(file_of(Path("copies"), RUN).read_bytes())
        file_of(states, OTHER).write_bytes(file_of(Path("copies"), OTHER).read_bytes())
        assert fedkeep("device", "status", "states").stdout == before

    def test_commits_that_are_in_the_log_alone_are_in_the_copy(self, fedkeep: Command) -> None:
        folder = Path("states")
        made(folder)
        train_rounds(folder, 1)
        assert fedkeep("device", "backup", "states", "--out", "copies").exit_code == 0
        train_rounds(folder, 2, begin=1)
        assert fedkeep("device", "backup", "states", "--out", "copies").exit_code == 0
        assert fedkeep("device", "status", "copies").stdout == fedkeep("device", "status", "states").stdout

    def test_a_damaged_state_takes_no_good_copys_place(
        self, fedkeep: Command, refused: Callable[..., str], states: Path
    ) -> None:
        fedkeep("device", "backup", "states", "--run", RUN, "--out", "copies")
        good = file_of(Path("copies"), RUN).read_bytes()
        run_sql(states, "UPDATE kept SET row = zeroblob(length(row)) WHERE client = 'b'")
        assert "client 'b'" in refused("device", "backup", "states", "--run", RUN, "--out", "copies")
        assert file_of(Path("copies"), RUN).read_bytes() == good

    def test_it_goes_into_another_folder(self, refused: Callable[..., str], states: Path) -> None:
        assert "Name another" in refused("device", "backup", "states", "--out", "states")


@pytest.mark.parametrize("command", ["status", "forget", "log", "watch"])
def test_a_folder_that_is_none(refused: Callable[..., str], command: str) -> None:
    assert refused("device", command, "nowhere") == (
        "Error: There is no folder of private states nowhere. Name it, or the device's configuration file."
    )
    Path("empty").mkdir()
    if command in ("status", "forget"):
        assert refused("device", command, "empty") == "Error: empty keeps no private states."


def test_a_run_that_serves_a_message_is_watched_on(
    fedkeep: Command, states: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedkeep.cli.device.PATIENCE", 0.0)
    lock = locked(file_of(states, RUN), 1.0)
    try:
        shown = succeeded(fedkeep("device", "watch", "states", "--once")).stdout
    finally:
        lock.release()
    assert f"Run {RUN}: " in shown
    assert shown.count("busy") == 1
    assert "Run other: 0 messages were served, 0 B left\n" in shown


def test_what_comes_is_watched_until_it_is_stopped(fedkeep: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("node.toml").write_text('[data]\nreader = "toy"\n[device]\nowner = "ann"\nfolder = "states"\n')
    waits = list[float]()

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 2:
            raise KeyboardInterrupt
        made(Path("states"))

    monkeypatch.setattr("fedkeep.cli.output.time.sleep", sleep)
    shown = fedkeep("device", "watch", "node.toml", "--every", "3")
    assert shown.stdout.startswith("No message has been served yet.\nRun abc123: 0 messages were served")
    assert waits == [3.0, 3.0]


def test_before_the_first_round_a_device_has_nothing_to_show(fedkeep: Command) -> None:
    Path("node.toml").write_text('[data]\nreader = "toy"\n[device]\nowner = "ann"\nfolder = "states"\n')
    for words in (["log"], ["watch", "--once"]):
        said = succeeded(fedkeep("device", words[0], "node.toml", *words[1:])).stdout
        assert said == "No message has been served yet.\n"


def test_each_command_has_help_with_an_example(fedkeep: Command) -> None:
    commands = [one.name or cast(Any, one.callback).__name__ for one in device.registered_commands]
    assert {"watch", "log", "run"} <= set(commands)
    for command in commands:
        shown = fedkeep("device", command, "--help")
        assert f"Example: fedkeep device {command} " in shown.stdout

"""What a kill leaves of a device's private states: found, removed with its bytes, and never told to be gone while it is there."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedkeep.core.errors import StoreError
from fedkeep.core.files import write_whole
from fedkeep.remote.device_file import DeviceFile, file_of, remove, runs_in, sum_of
from tests.commands import call, succeeded
from tests.remote.device_states import NEW, RUN, copied, fresh, made, opened, rows, train_rounds, trained

SECRET = b"a secret of a client"
OTHER = "abc"  # the other run's id begins so
LONG = "x" * 64


class KilledError(BaseException):
    """Stands for a kill."""


def killed(*_: object, **__: object) -> None:
    raise KilledError


def cut_short(monkeypatch: pytest.MonkeyPatch, path: Path) -> Path:
    """Be killed while a file is written, and return what is left of it."""
    before = set(path.parent.glob("*"))
    monkeypatch.setattr(os, "replace", killed)
    monkeypatch.setattr(Path, "unlink", killed)
    with pytest.raises(KilledError):
        write_whole(path, SECRET, 0o600)
    monkeypatch.undo()
    (part,) = set(path.parent.glob("*")) - before
    assert part.suffix == ".part"
    return part


def watched(path: Path) -> Path:
    """Return a second name of a file, by which its bytes are seen when the first is gone."""
    seen = path.parent.parent / f"{path.name}.seen"
    os.link(path, seen)
    return seen


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.suffix != ".lock"}


@pytest.fixture
def states(tmp_path: Path) -> Path:
    """A folder of a run with its log and secrets of sums, as a kill leaves it."""
    folder = tmp_path / "states"
    path = made(folder)
    train_rounds(folder, 1)
    path.with_name(f"{path.name}-wal").write_bytes(SECRET)
    for client in "ab":
        sum_of(path, client).write_bytes(SECRET)
    return folder


@pytest.mark.parametrize("run", [RUN, LONG])
@pytest.mark.parametrize("of", [lambda path: path, lambda path: sum_of(path, "a")])
def test_what_was_being_written_goes_when_the_run_is_opened_and_no_other_runs_does(
    run: str, of: Callable[[Path], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "states"
    path = made(folder, run=run)
    others = cut_short(monkeypatch, sum_of(file_of(folder, OTHER), "a"))
    seen = watched(cut_short(monkeypatch, of(path)))
    DeviceFile(path, "ann").close()
    assert names(folder) == {path.name, others.name}
    assert seen.read_bytes() == bytes(len(SECRET))


def test_values_are_never_outside_the_folder_where_another_kill_may_leave_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("mkdtemp", "mkstemp"):
        monkeypatch.setattr(tempfile, name, killed)
    store = fresh(tmp_path / "states")
    trained(store, 0, NEW, 5)
    left = copied(tmp_path / "states", tmp_path / "left")
    assert names(left) == {f"{RUN}.db", f"{RUN}.db-wal"}
    again = opened(left)
    assert rows(again) == rows(store) == [(1, 0, False)]
    again.close()


@pytest.mark.parametrize("clients", [[], ["--client", "a"]])
def test_forgetting_takes_what_was_being_written_and_its_bytes(
    clients: list[str], states: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = file_of(states, RUN)
    path.with_name(f"{path.name}-wal").unlink()
    parts = [cut_short(monkeypatch, sum_of(path, "a")), cut_short(monkeypatch, path)]
    seen = [watched(one) for one in (*parts, sum_of(path, "a"))]
    succeeded(call("device", "forget", states, *clients, "--yes"))
    assert names(states) == ({path.name, sum_of(path, "b").name} if clients else set())
    assert [one.read_bytes() for one in seen] == [bytes(len(SECRET))] * 3


def test_killed_anywhere_while_it_is_removed_the_run_is_listed_and_removed_later(
    states: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, kill = file_of(states, RUN), 0
    calls = {(os, "fsync"), (os, "rename"), (Path, "unlink")}
    real = {(place, name): getattr(place, name) for place, name in calls}
    while True:
        kill, done = kill + 1, 0
        part = cut_short(monkeypatch, sum_of(path, "a"))

        def stops(call: Any, kill: int = kill) -> Any:
            def stopped(*given: Any, **more: Any) -> Any:
                nonlocal done
                done += 1
                if done == kill:
                    raise KilledError
                return call(*given, **more)

            return stopped

        for place, name in calls:
            monkeypatch.setattr(place, name, stops(real[place, name]))
        try:
            remove(path)
        except KilledError:
            monkeypatch.undo()
            assert runs_in(states) == ([RUN] if names(states) else [])
            assert path.exists() or not names(states), "the file goes last"
            with pytest.raises(StoreError):
                DeviceFile(path, "ann").close()
        else:
            monkeypatch.undo()
            break
        remove(path)
        assert names(states) == set()
        assert not part.exists()
        train_again(states)
    assert kill > 10
    assert list(states.iterdir()) == []


def train_again(folder: Path) -> None:
    path = made(folder)
    path.with_name(f"{path.name}-wal").write_bytes(SECRET)
    for client in "ab":
        sum_of(path, client).write_bytes(SECRET)


class TestWithoutItsFile:
    """What an older fedkeep, or a hand, has left of a run whose file is gone."""

    @pytest.fixture(params=["log", "sum", "part of a sum", "part of the file"])
    def left(self, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        path = file_of(tmp_path / "states", RUN)
        made(path.parent, run="other")
        if request.param.startswith("part"):
            return cut_short(monkeypatch, sum_of(path, "a") if "sum" in request.param else path)
        found = path.with_name(f"{path.name}-wal") if request.param == "log" else sum_of(path, "a")
        found.write_bytes(SECRET)
        return found

    def test_it_is_listed_shown_and_forgotten(self, left: Path) -> None:
        assert runs_in(left.parent) == [RUN, "other"]
        shown = call("device", "status", left.parent)
        assert shown.exit_code == 2
        assert "Run other of ann" in shown.stdout
        assert shown.stderr == (
            f"Error: The file of the run '{RUN}' is gone, and {left.name} is left of it. Restore the file from a copy, "
            f"or forget the run.\n"
        )
        seen = watched(left)
        result = call("device", "forget", left.parent, "--run", RUN, "--yes")
        assert f"Run {RUN}: {left.name} is removed." in result.stdout
        assert seen.read_bytes() == bytes(len(SECRET))
        assert names(left.parent) == {"other.db"}

    def test_other_runs_are_served_and_a_clients_rest_goes(self, left: Path) -> None:
        train_rounds_of_other(left.parent)
        result = call("device", "forget", left.parent, "--client", "a", "--yes")
        if left.name.endswith("-wal"):
            assert result.exit_code == 2
            assert f"forget the run: --run {RUN}" in result.stderr.replace("\n", " ")
        else:
            assert result.exit_code == 0, result.output
            assert names(left.parent) == {"other.db"}


def train_rounds_of_other(folder: Path) -> None:
    """Give client a of the other run a version."""

    store = opened(folder, run="other")
    trained(store, 1, NEW, 1.0)
    store.close()


def test_a_client_that_has_secrets_of_sums_alone_is_forgotten(tmp_path: Path) -> None:
    folder = tmp_path / "states"
    path = made(folder)
    sum_of(path, "z").write_bytes(SECRET)
    seen = watched(sum_of(path, "z"))
    succeeded(call("device", "forget", folder, "--client", "z", "--yes"))
    assert names(folder) == {path.name}
    assert seen.read_bytes() == bytes(len(SECRET))
    again = call("device", "forget", folder, "--client", "z", "--yes")
    assert again.exit_code == 2
    assert "keeps nothing of client 'z'" in again.stderr


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "states"
    made(folder)
    mine = ["notes.txt", "video.part", "a.b.db", f"{RUN}.txt", f"{RUN}.sum", "readme.db-old"]
    for name in mine:
        (folder / name).write_bytes(b"mine")
    (folder / f"{RUN}.db.0123456789abcdef.part").symlink_to(folder / "notes.txt")
    assert runs_in(folder) == [RUN]
    remove(file_of(folder, RUN))
    assert names(folder) >= set(mine)
    assert (folder / "notes.txt").read_bytes() == b"mine"

"""A device's private states go along with the server, version by version, and are never reset."""

from __future__ import annotations

import os
import stat
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fedkeep.core.errors import NonFiniteError, StoreError
from fedkeep.core.files import leftovers, sync_folder
from fedkeep.methods.client import by_share
from fedkeep.remote.device_file import DeviceFile, FileHeader, create, file_of, remove, runs_in
from fedkeep.remote.device_store import STAGED, DeviceStore, MissingError
from fedkeep.store import Line, Named, database
from fedkeep.store.version_file import Version
from tests.refusals import raises
from tests.remote.device_states import (
    OWNER,
    RUN,
    begun,
    fresh,
    made,
    one,
    opened,
    plain,
    rows,
    run_sql,
    stage,
    train_rounds,
    trained,
    values,
)
from tests.tiny import interrupt

FIRST = Line()


class TestVersions:
    def test_what_was_staged_is_accepted_when_the_next_order_names_it(self, tmp_path: Path) -> None:
        store = fresh(tmp_path)
        trained(store, 1, FIRST, 7)
        assert rows(store) == [(1, 10, False)]
        assert plain(begun(store, "a", Line(1, 10, 0.25))) == ([7, -7], 7)
        assert rows(store) == [(1, 10, False)]  # not before commit
        store.flush()
        assert rows(store) == [(1, 10, True)]
        store.close()
        assert plain(begun(opened(tmp_path), "a", Line(1, 10))) == ([7, -7], 7)

    def test_what_the_server_did_not_take_is_trained_anew(self, tmp_path: Path) -> None:
        store = fresh(tmp_path)
        trained(store, 1, FIRST, 7)
        assert plain(trained(store, 2, Line(1, 10), 8)) == ([7, -7], 7)
        assert plain(trained(store, 5, Line(1, 10), 9)) == ([7, -7], 7)  # round 2's upload did not count
        assert plain(trained(store, 6, Line(2, 50), 10)) == ([9, -9], 9)
        assert rows(store) == [(1, 10, True), (2, 50, True), (3, 60, False)]

    def test_private_values_move_by_the_clients_share(self, tmp_path: Path) -> None:
        """FURL eq. 6: [0.5, -1.5] + 0.25 ([7, -7] - [0.5, -1.5]) = [2.125, -2.875]; the counter is kept."""
        store = fresh(tmp_path, accept=by_share)
        trained(store, 1, FIRST, 7)
        assert plain(trained(store, 2, Line(1, 10, 0.25), 8)) == ([2.125, -2.875], 7)
        # from there with z = 0.5: [2.125, -2.875] + 0.5 ([8, -8] - [2.125, -2.875]) = [5.0625, -5.4375]
        assert plain(begun(store, "a", Line(2, 20, 0.5))) == ([5.0625, -5.4375], 8)
        store.flush()
        assert plain(begun(store, "a", Line(2, 20, 0.5))) == ([5.0625, -5.4375], 8)  # once

    def test_who_kept_what_is_no_number_is_said(self, tmp_path: Path) -> None:
        store = fresh(tmp_path, accept=by_share)
        trained(store, 1, FIRST, 7)
        with raises(NonFiniteError, name="user", who="accept of client 'a' in round 1"):
            begun(store, "a", Line(1, 10, float("nan")))

    def test_the_same_order_again_stages_once(self, tmp_path: Path) -> None:
        store = fresh(tmp_path)
        for _ in range(3):
            assert plain(trained(store, 1, FIRST, 7)) == ([0.5, -1.5], 4)
        assert rows(store) == [(1, 10, False)]

    def test_a_late_repetition_does_not_undo_what_was_accepted(self, tmp_path: Path) -> None:
        store = fresh(tmp_path, accept=by_share)
        trained(store, 1, FIRST, 7)
        trained(store, 2, Line(1, 10, 0.25), 8)
        trained(store, 1, FIRST, 7)  # the first message once more
        assert plain(begun(store, "a", Line(1, 10, 0.25))) == ([2.125, -2.875], 7)
        assert plain(begun(store, "a", Line(2, 20, 1.0))) == ([8, -8], 8)

    def test_two_attempts_of_one_version_are_told_apart(self, tmp_path: Path) -> None:
        """The message of round 4 comes late, after that of round 5; the server took round 5's upload, or round 4's."""
        store = fresh(tmp_path)
        trained(store, 5, FIRST, 7)
        trained(store, 4, FIRST, 8)
        assert plain(begun(store, "a", Line(1, 50))) == ([7, -7], 7)
        assert plain(begun(store, "a", Line(1, 40))) == ([8, -8], 8)
        with pytest.raises(MissingError, match=r"wants version 1 of another attempt of what client 'a'"):
            begun(store, "a", Line(1, 60))

    def test_of_attempts_that_nobody_took_the_last_few_stay(self, tmp_path: Path) -> None:
        store = fresh(tmp_path)
        for round in range(1, 8):
            trained(store, round, FIRST, round)
        assert [attempt for _, attempt, _ in rows(store)] == [10 * r for r in range(8 - STAGED, 8)]

    def test_what_is_staged_must_have_the_names_that_are_kept(self, tmp_path: Path) -> None:
        with pytest.raises(StoreError, match=r"other names than are kept: missing \['client/count'\]"):
            stage(fresh(tmp_path), "a", {"user": torch.ones(2)}, round=1, attempt=1)


class TestHistory:
    @pytest.mark.parametrize(("history", "there"), [(0, [4]), (1, [3, 4]), (2, [2, 3, 4])])
    def test_so_many_accepted_versions_stay(self, tmp_path: Path, history: int, there: list[int]) -> None:
        store = fresh(tmp_path, history=history)
        trained(store, 1, FIRST, 1)
        for round in range(2, 6):
            trained(store, round, Line(round - 1, 10 * (round - 1)), round)
        assert rows(store) == [(v, 10 * v, True) for v in there] + [(5, 50, False)]

    def test_a_server_that_went_back_is_followed_and_may_go_on_otherwise(self, tmp_path: Path) -> None:
        store = fresh(tmp_path)
        trained(store, 1, FIRST, 1)
        trained(store, 2, Line(1, 10), 2)
        trained(store, 3, Line(2, 20), 3)  # versions 1 and 2 accepted, 3 staged
        assert plain(trained(store, 7, Line(1, 10), 8)) == ([1, -1], 1)
        assert rows(store) == [(1, 10, True), (2, 20, True), (3, 30, False), (2, 70, False)]
        assert plain(trained(store, 8, Line(2, 70), 9)) == ([8, -8], 8)
        assert rows(store) == [(1, 10, True), (2, 70, True), (3, 80, False)]  # the other line is gone

    def test_a_server_that_went_back_to_the_beginning_is_followed(self, tmp_path: Path) -> None:
        store = fresh(tmp_path)
        trained(store, 1, FIRST, 1)
        trained(store, 2, Line(1, 10), 2)
        assert plain(begun(store, "a", FIRST)) == ([0.5, -1.5], 4)

    def test_too_far_back_is_refused_and_says_what_there_is(self, tmp_path: Path) -> None:
        store = fresh(tmp_path, history=0)
        trained(store, 1, FIRST, 1)
        trained(store, 2, Line(1, 10), 2)
        trained(store, 3, Line(2, 20), 3)
        there = "2 (round 2, accepted), 3 (round 3, staged)"
        with raises(MissingError, client="a", there=there, version=1) as caught:
            begun(store, "a", Line(1, 10))
        assert caught.value.late == 29  # the message of attempt 30 may come again, which staged version 3


class TestMissing:
    def test_a_version_of_a_client_without_any_is_refused(self, tmp_path: Path) -> None:
        made(tmp_path)
        with pytest.raises(MissingError, match=r"wants version 4 of what.*'b'"):
            begun(opened(tmp_path), "b", Line(4, 3))

    def test_a_client_may_begin_anew_and_goes_on_from_there(self, tmp_path: Path) -> None:
        store = fresh(tmp_path, accept=by_share)
        store.begin_anew(1, Line(4, 3))
        assert plain(one(store, "b")) == ([0.5, -1.5], 4)
        stage(store, "b", values(7), round=9, attempt=90)
        store.flush()
        assert rows(store, "b") == [(4, 3, True), (5, 90, False)]
        assert plain(begun(store, "b", Line(5, 90, 0.25))) == ([2.125, -2.875], 7)

    def test_a_client_may_go_on_from_an_older_version(self, tmp_path: Path) -> None:
        store = fresh(tmp_path, accept=by_share)
        trained(store, 1, FIRST, 1)
        trained(store, 2, Line(1, 10, 1.0), 2)  # version 1 is accepted, 2 staged
        with pytest.raises(MissingError):
            begun(store, "a", Line(6, 60))
        older = store.begin_older(0, Line(6, 60))
        assert (older.version, older.attempt) == (1, 10)
        assert plain(one(store, "a")) == ([1, -1], 1)
        stage(store, "a", values(7), round=9, attempt=90)
        store.flush()
        assert rows(store)[-2:] == [(6, 60, True), (7, 90, False)]
        # from [1, -1] with z = 0.5: [1, -1] + 0.5 ([7, -7] - [1, -1]) = [4, -4]
        assert plain(begun(store, "a", Line(7, 90, 0.5))) == ([4, -4], 7)

    def test_what_is_newer_or_not_accepted_is_no_older_version(self, tmp_path: Path) -> None:
        store = fresh(tmp_path, history=0)
        trained(store, 1, FIRST, 1)
        assert store.begin_older(0, Line(6, 60)) is None  # version 1 is staged
        trained(store, 2, Line(1, 10), 2)
        trained(store, 3, Line(2, 20), 3)
        assert store.begin_older(0, Line(1, 10)) is None  # the server went back
        assert store.begin_older(1, Line(6, 60)) is None  # nothing is there

    def test_a_client_that_began_from_another_run_never_begins_with_the_default(self, tmp_path: Path) -> None:
        """Its version 0 is a row; without it there is an error."""
        made(tmp_path, began_from="old", began=["a"])
        with pytest.raises(MissingError, match="wants version 0"):
            begun(opened(tmp_path), "a", FIRST)
        assert plain(begun(opened(tmp_path), "b", FIRST)) == ([0.5, -1.5], 4)

    def test_a_forgotten_client_that_began_from_another_run_is_named_no_more(self, tmp_path: Path) -> None:
        made(tmp_path, began_from="old", began=["a-patient", "b"])
        store = opened(tmp_path)
        store.file.forget(["a-patient"])
        store.close()
        assert opened(tmp_path).file.clients() == {"b"}
        assert not [path for path in tmp_path.iterdir() if b"a-patient" in path.read_bytes()]


class TestFile:
    def test_only_its_owner_may_read_it(self, tmp_path: Path) -> None:
        folder = tmp_path / "states"
        folder.mkdir(mode=0o755)  # somebody has made it, for everybody
        old = os.umask(0)
        try:
            store = fresh(folder)
            trained(store, 1, FIRST, 1)
        finally:
            os.umask(old)
        modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in (folder, *folder.iterdir())}
        assert modes.pop("states") == 0o700
        assert set(modes) >= {"abc123.db", "abc123.db-wal"}
        assert set(modes.values()) == {0o600}

    def test_a_run_id_names_no_other_place(self, tmp_path: Path) -> None:
        for wrong in ("", "../x", "a/b", "a.b", "x" * 65, "ü"):
            with pytest.raises(StoreError, match="A run's id is 1 to 64 letters"):
                file_of(tmp_path, wrong)
        made(tmp_path)
        (tmp_path / "notes.txt").touch()
        assert runs_in(tmp_path) == ["abc123"]

    def test_it_is_made_once(self, tmp_path: Path) -> None:
        made(tmp_path)
        with pytest.raises(StoreError, match="has private states on this device already"):
            made(tmp_path)

    def test_another_process_waits_for_it(self, tmp_path: Path) -> None:
        store = fresh(tmp_path)
        with pytest.raises(StoreError, match="is in use by another process"):
            opened(tmp_path)
        store.close()
        opened(tmp_path).close()

    def test_what_is_forgotten_is_nowhere_in_the_files(self, tmp_path: Path) -> None:
        path = made(tmp_path)
        store = opened(tmp_path)
        secret = {"user": torch.tensor([1234.5678, -8765.4321]), "client/count": torch.tensor(4711)}
        needle = secret["user"].numpy().tobytes()
        for client in ("a", "b"):
            begun(store, client)
            stage(store, client, secret if client == "a" else values(1), round=1, attempt=10)
        store.flush()
        assert needle in content(tmp_path)
        begun(store, "a", Line(1, 10))
        store.flush()
        assert store.file.forget(["a"]) == 1
        assert needle not in content(tmp_path)
        assert rows(store, "a") == []
        assert rows(store, "b") == [(1, 10, False)]
        store.close()
        assert needle not in content(tmp_path)
        assert remove(path) == [path]
        assert list(tmp_path.iterdir()) == []

    def test_a_damaged_file_is_removed_with_its_log(self, tmp_path: Path) -> None:
        path = made(tmp_path)
        log = path.with_name("abc123.db-wal")
        path.write_bytes(b"nonsense")
        log.write_bytes(b"more")
        assert remove(path) == [path, log]
        assert list(tmp_path.iterdir()) == []

    def test_what_it_says_of_itself_can_be_replaced(self, tmp_path: Path) -> None:
        path = made(tmp_path)
        file = DeviceFile(path, None)
        assert file.about.agreed == {}
        file.write_about(type(file.about)(**{**vars(file.about), "agreed": {"seed": 3}}))
        file.close()
        assert DeviceFile(path, "ann").about.agreed == {"seed": 3}


def content(folder: Path) -> bytes:
    sync_folder(folder)
    return b"".join(path.read_bytes() for path in sorted(folder.iterdir()))


LARGE = FileHeader(owner=OWNER, run=RUN, columns=[["user", "torch.uint8", [1 << 20]]])


def large_rows(at: int = 9) -> Iterator[tuple[Version, bytes]]:
    """Yield rows of a MiB for eight clients; with the ``at``-th the process is killed."""
    for number in range(8):
        if number + 1 == at:
            interrupt()
        yield Version(0, str(number), 0, 0, 0, 0, accepted=True), bytes([number]) * (1 << 20)


class TestMadeWithRows:
    @pytest.mark.parametrize("at", [1, 3, 9])
    def test_killed_while_it_is_made_one_file_is_left_which_goes_with_its_bytes(
        self, at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Killed at a row, or before the file gets its name; only its owner can read what is left."""
        path = file_of(tmp_path / "states", RUN)
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", interrupt)
            patch.setattr(database, "wipe", interrupt)
            with pytest.raises(KeyboardInterrupt):
                create(path, LARGE, large_rows(at))
        (part,) = path.parent.iterdir()
        assert leftovers(path.parent, f"{RUN}.") == [part]
        assert stat.S_IMODE(part.stat().st_mode) == 0o600
        os.link(part, tmp_path / "seen")
        made(path.parent)
        train_rounds(path.parent, 1)
        assert {one.suffix for one in path.parent.iterdir()} <= {".db", ".lock"}
        assert not any((tmp_path / "seen").read_bytes())

    def test_what_goes_wrong_leaves_nothing(self, tmp_path: Path) -> None:
        with pytest.raises(KeyboardInterrupt):
            create(file_of(tmp_path, RUN), LARGE, large_rows(3))
        assert list(tmp_path.iterdir()) == []
        (tmp_path / "file").touch()
        with raises(StoreError, why="File exists"):
            create(file_of(tmp_path / "file", RUN), LARGE, large_rows())

    def test_one_row_is_in_memory(self, tmp_path: Path) -> None:
        """All rows and the whole file were in memory, and more than 2 GiB were refused."""
        tracemalloc.start()
        create(file_of(tmp_path, RUN), LARGE, large_rows())
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 4 << 20
        file = DeviceFile(file_of(tmp_path, RUN), OWNER)
        assert [int(file.values(version)["user"][-1]) for version in file.versions()] == list(range(8))
        file.close()


class TestBestRound:
    """Rounds train the client, and each order names the last version and that of the best round."""

    def order(self, store: DeviceStore, round: int, best: Named | None, message: int = 0) -> str:
        """Train the version after ``round`` rounds; attempts are ten times the version that they make."""
        begun(store, "a", Line(round, 10 * round))
        said = store.name(0, Named(round, round, 10 * round), best, message or round + 1)
        store.stage(0, values(round + 1), 10 * (round + 1), round)
        store.flush()
        return said

    def kept(self, store: DeviceStore) -> list[int]:
        return [version for version, _, accepted in rows(store) if accepted]

    def test_its_version_is_kept_until_another_is_the_best(self, tmp_path: Path) -> None:
        store = fresh(tmp_path)
        bests = [None, None, 1, 1, 1, 1, 5, 5, 5, 5]
        for round, best in enumerate(bests):
            named = None if best is None else Named(best, best, 10 * best)
            assert self.order(store, round, named) == ""
        assert self.kept(store) == [5, 8, 9]
        assert plain(begun(store, "a", Line(5, 50))) == ([5, -5], 5)

    def test_without_any_order_to_train_the_old_one_goes_too(self, tmp_path: Path) -> None:
        store = fresh(tmp_path)
        for round in range(5):
            self.order(store, round, Named(1, 1, 10) if round > 1 else None)
        assert self.kept(store) == [1, 3, 4]
        begun(store, "a", Line(4, 40))
        assert store.name(0, Named(6, 4, 40), Named(5, 4, 40), 7) == ""
        store.flush()
        assert self.kept(store) == [3, 4]

    @pytest.mark.parametrize("history", [0, 3])
    def test_it_is_one_more_at_most(self, history: int, tmp_path: Path) -> None:
        store = fresh(tmp_path, history=history)
        for round in range(12):
            self.order(store, round, Named(2, 2, 20) if round > 2 else None)
        assert self.kept(store) == [2, *range(11 - history, 12)]

    def test_an_older_message_changes_nothing(self, tmp_path: Path) -> None:
        store = fresh(tmp_path)
        for round in range(6):
            self.order(store, round, Named(3, 3, 30) if round > 3 else None)
        begun(store, "a", Line(4, 40))
        store.name(0, Named(4, 4, 40), Named(1, 1, 10), 5)
        store.flush()
        assert store.file.named("a")["best"].named == Named(3, 3, 30)
        assert store.file.named("a")["last"].named == Named(5, 5, 50)
        store.name(0, Named(4, 4, 40), Named(1, 1, 10), 9)  # by a server that went back
        store.flush()
        assert store.file.named("a")["best"].named == Named(1, 1, 10)

    def test_what_is_missing_is_told_once(self, tmp_path: Path) -> None:
        store = fresh(tmp_path)
        for round in range(5):
            said = self.order(store, round, Named(1, 1, 7) if round > 2 else None)
            assert ("version 1" in said.lower()) == (round == 3)
        assert self.kept(store) == [3, 4]

    def test_words_are_damaged_or_forgotten_with_the_client(self, tmp_path: Path) -> None:
        store = fresh(tmp_path)
        for round in range(4):
            self.order(store, round, Named(1, 1, 10) if round > 1 else None)
        store.close()
        run_sql(tmp_path, "UPDATE words SET version = 2 WHERE which = 'best'")
        store = opened(tmp_path)
        with pytest.raises(StoreError, match="checksum"):
            store.file.named("a")
        store.file.forget(["a"])
        assert store.file.named("a") == {}

"""A store in a file that was damaged, cut, forged or lost is refused, and not touched."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from fedkeep.core.errors import StoreError
from fedkeep.store import SqliteStore
from tests.refusals import raises
from tests.store.build import (
    committed,
    count,
    expected,
    killed,
    lines,
    lines_after,
    numbers,
    run_sql,
    sqlite,
    state,
    values,
)
from tests.tiny import files, harmed

NAMES = ("client", "version", "attempt", "parent", "round", "accepted", "crc")


class TestDamage:
    """Every byte that decides a result is looked at."""

    @pytest.mark.parametrize(
        "change",
        [
            "DELETE FROM kept WHERE client = 2",  # it would be read as a client that was never seen
            "UPDATE kept SET client = 4 WHERE client = 2",
            "UPDATE kept SET attempt = 3 WHERE client = 5",
            "UPDATE kept SET crc = crc + 1 WHERE client = 2",
            "UPDATE kept SET client = CASE client WHEN 2 THEN 3 WHEN 3 THEN 2 ELSE client END",
            "DELETE FROM kept",
        ],
    )
    def test_of_what_versions_there_are(self, tmp_path: Path, change: str) -> None:
        """Named when the file is taken over, or when the client is read; nothing is touched."""
        committed(tmp_path / "a", 3)
        run_sql(tmp_path / "a", change)
        before = files(tmp_path / "a")
        with pytest.raises(StoreError, match="of client 'user-"):
            state(tmp_path / "a", 3, write=False)
        assert files(tmp_path / "a") == before

    def test_of_another_time(self, tmp_path: Path) -> None:
        committed(tmp_path / "a", 2)
        before, store = files(tmp_path / "a"), sqlite(tmp_path / "a")
        with pytest.raises(StoreError, match="Restore the whole run from one copy"):
            store.begin(lines_after(3))
        assert files(tmp_path / "a") == before
        with pytest.raises(StoreError, match="call begin"):
            store.read([0])

    @pytest.mark.parametrize(
        "change",
        [
            "UPDATE kept SET client = 99 WHERE client = 2",
            "UPDATE kept SET client = -1 WHERE client = 2",
            "UPDATE kept SET attempt = 0 WHERE number = 1",
            "INSERT INTO kept SELECT number + 99, client, version, attempt, parent, round, accepted, crc, row FROM kept",
            "UPDATE kept SET client = 'two' WHERE client = 2",
            "DROP TABLE kept",
        ],
    )
    def test_of_what_makes_no_sense(self, tmp_path: Path, change: str) -> None:
        committed(tmp_path / "a", 3)
        run_sql(tmp_path / "a", change)
        with pytest.raises(StoreError, match=r"store\.db is damaged: "):
            state(tmp_path / "a", 3)

    @pytest.mark.parametrize(
        "change",
        [
            "UPDATE kept SET row = zeroblob(length(row)) WHERE client = 2",
            "UPDATE kept SET row = x'00' WHERE client = 2",
            "UPDATE kept SET row = 'text' WHERE client = 2",
            "UPDATE kept SET row = (SELECT row FROM kept WHERE client = 3) WHERE client = 2",
            *(f"UPDATE kept SET {name} = {name} + 1 WHERE client = 2" for name in NAMES),
            "DELETE FROM kept WHERE client = 2",
        ],
    )
    def test_of_a_row_is_named_when_it_is_read(self, tmp_path: Path, change: str) -> None:
        """Also where it came after the file was taken over: no row is read as a client that was never seen."""
        committed(tmp_path / "a", 5)
        store = sqlite(tmp_path / "a")
        store.begin(lines_after(5))
        store._file.database.query(change)
        store.read([0, 1, 3])
        assert store.seen([2]) == [True]
        with raises(StoreError, client="user-2", attempt=2):
            store.read([1, 2])
        store.read([0, 1, 3])  # the error left no transaction open

    def test_of_any_byte_is_right_or_refused(self, tmp_path: Path) -> None:
        """Flipped bits, zeroed bytes, a cut: what is read is what was written, or an error that names the store."""
        committed(tmp_path / "a", 9)
        wanted = expected(tmp_path, 9)
        content = (tmp_path / "a" / "store.db").read_bytes()
        path, ends = tmp_path / "b" / "store.db", []
        path.parent.mkdir()
        for damaged in harmed(content, 400):
            path.write_bytes(damaged)
            ends.append(read_or_refused(tmp_path / "b", 9))
            assert path.read_bytes() == damaged
            assert len(list(path.parent.iterdir())) == 1
        assert "refused" in ends
        assert [end for end in ends if end not in ("refused", wanted)] == []

    @pytest.mark.parametrize("size", [0, 19, 100, 4096, 8192])
    def test_a_file_that_was_cut(self, tmp_path: Path, size: int) -> None:
        committed(tmp_path / "a", 3)
        path = tmp_path / "a" / "store.db"
        path.write_bytes(path.read_bytes()[:size])
        before = files(tmp_path / "a")
        for write in (True, False):
            with pytest.raises(StoreError, match=r"^Cannot open the private store .* from a copy\.$"):
                state(tmp_path / "a", 3, write=write)
        assert files(tmp_path / "a") == before

    @pytest.mark.parametrize("content", [b"\xff{", b"[]", b"SQLite format 3\0", b"x" * 5000])
    def test_a_file_that_is_none(self, tmp_path: Path, content: bytes) -> None:
        (tmp_path / "store.db").write_bytes(content)
        for write in (True, False):
            with raises(
                StoreError,
                text=(
                    f"Cannot open the private store {tmp_path}: store.db does not begin as a private store does. Restore it "
                    f"from a copy."
                ),
            ):
                sqlite(tmp_path, write=write)
        assert files(tmp_path) == {"store.db": content}

    @pytest.mark.parametrize("content", ["[]", "{", "[" * 100_000, ""])
    def test_a_garbled_description_is_an_error(self, tmp_path: Path, content: str) -> None:
        committed(tmp_path / "a", 1)
        run_sql(tmp_path / "a", f"UPDATE about SET content = '{content}'")
        with pytest.raises(StoreError, match="^Cannot open the private store "):
            sqlite(tmp_path / "a")

    def test_a_description_that_is_no_text_is_an_error(self, tmp_path: Path) -> None:
        committed(tmp_path / "a", 1)
        run_sql(
            tmp_path / "a",
            "DROP TABLE about",
            "CREATE TABLE about (content)",
            "INSERT INTO about VALUES (NULL)",
        )
        with pytest.raises(StoreError, match="^Cannot open the private store "):
            sqlite(tmp_path / "a")

    def test_other_sqlite_files_are_named_and_not_touched(self, tmp_path: Path) -> None:
        """One with a write-ahead log would grow two files by being read."""
        for name, mode in (("plain", "DELETE"), ("log", "WAL")):
            (tmp_path / name).mkdir()
            with closing(sqlite3.connect(tmp_path / name / "store.db")) as sql:
                sql.execute(f"PRAGMA journal_mode = {mode}")
                sql.execute("CREATE TABLE other (x)")
            before = files(tmp_path / name)
            for write in (True, False):
                with pytest.raises(StoreError, match="^Cannot open the private store "):
                    sqlite(tmp_path / name, write=write)
            assert files(tmp_path / name) == before


def read_or_refused(folder: Path, round: int) -> object:
    """Return what a store gives, or ``"refused"`` where it gives an error that names its place."""
    try:
        store = sqlite(folder, write=False, create=False)
        store.begin(lines_after(round))
        return numbers(store)
    except StoreError as error:
        named = str(folder) in str(error) or "of client 'user-" in str(error)
        return "refused" if named else str(error)


def test_missing_files_are_errors_and_nothing_is_made_in_their_place(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "store.db-journal").write_bytes(b"journal")
    before = files(tmp_path / "a")
    for write in (True, False):
        with raises(
            StoreError,
            text=f"The private store's {tmp_path / 'a' / 'store.db'} is missing; restore it from a copy.",
        ):
            sqlite(tmp_path / "a", write=write)
        assert files(tmp_path / "a") == before
        with raises(
            StoreError,
            text=(
                f"The private store {tmp_path / 'nowhere'} is missing, but the run has finished rounds. Restore it from a "
                f"copy."
            ),
        ):
            sqlite(tmp_path / "nowhere", create=False, write=write)
    assert not (tmp_path / "nowhere").exists()


def test_a_forged_row_that_is_not_finite_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody wrote it with all the checksums that fit."""
    store = sqlite(tmp_path / "a")
    wrong = values(0, 1)
    wrong["user"][0, 2] = float("nan")
    with monkeypatch.context() as patch:
        patch.setattr(SqliteStore, "_check_finite", lambda *_: None)
        count(store, [5], wrong, 1)
        store.flush()
    again = sqlite(killed(tmp_path / "a"))
    again.begin(lines({5: 1}))
    with pytest.raises(StoreError, match="Private 'user' of client 'user-5' holds a NaN or an infinity"):
        again.read([5])

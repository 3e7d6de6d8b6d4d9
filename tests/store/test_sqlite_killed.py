"""A store in a file survives a kill, a loss of power and a full disk at every instant of a commit."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import sqlite3
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedkeep.core.errors import RunError, StoreError
from fedkeep.store import Default, SqliteStore, database
from tests.store.build import (
    CLIENTS,
    IDS,
    RUN,
    committed,
    expected,
    numbers,
    of_round,
    sqlite,
    state,
    values,
    versions,
)
from tests.tiny import files

PAGE = database.PAGE_BYTES
LARGE = {"user": torch.zeros(1500)}  # 6,000 bytes: a row takes two pages


def large(folder: Path, **options: Any) -> SqliteStore:
    return SqliteStore(folder, Default(LARGE), IDS, **{"run": RUN, **options})


def large_round(store: SqliteStore, round: int) -> None:
    clients = [c for c in range(CLIENTS) if (c + round) % 2]
    store.write(clients, {"user": torch.full((len(clients), 1500), float(round))})


def large_state(folder: Path, round: int, **options: Any) -> list[float]:
    store = large(folder, **options)
    store.recover(round)
    found = store.read(range(CLIENTS))["user"]
    assert (found == found[:, :1]).all()
    return found[:, 0].tolist()


def after(round: int) -> list[float]:
    """What every value of each client is after a round of ``large_round``."""
    return [float(max((r for r in range(1, round + 1) if (c + r) % 2), default=0)) for c in range(CLIENTS)]


@pytest.fixture(scope="module")
def torn(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, bytes, bytes]:
    """Return the file before a commit of round 4, after it, and the journal as it was flushed in between."""
    folder = tmp_path_factory.mktemp("torn")
    store = large(folder)
    for round in (1, 2, 3):
        large_round(store, round)
        store.prepare(round)
        store.apply()
    before = (folder / "store.db").read_bytes()
    large_round(store, 4)
    query, kept = database.Database.query, folder / "kept"

    def watched(self: database.Database, text: str, *rest: Any) -> sqlite3.Cursor:
        if text == "COMMIT":
            os.link(folder / "store.db-journal", kept)  # SQLite removes the name alone
        return query(self, text, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(database.Database, "query", watched)
        store.prepare(4)
    whole = (folder / "store.db").read_bytes()
    assert large_state(folder, 4) == after(4)
    assert len(whole) > len(before) + PAGE
    return before, whole, kept.read_bytes()


def left(folder: Path, content: bytes, journal: bytes | None) -> Path:
    folder.mkdir()
    (folder / "store.db").write_bytes(content)
    if journal is not None:
        (folder / "store.db-journal").write_bytes(journal)
    return folder


@contextmanager
def untouched(folder: Path) -> Iterator[None]:
    before = files(folder)
    yield
    assert files(folder) == before


def goes_on(folder: Path) -> None:
    """Read the state of round 3 without a touch; resume, and repeat round 4."""
    with untouched(folder):
        assert large_state(folder, 3, write=False, create=False) == after(3)
    assert large_state(folder, 3) == after(3)
    store = large(folder)
    store.recover(3)
    large_round(store, 4)
    store.prepare(4)
    store.apply()
    assert large_state(folder, 4) == after(4)
    assert [p.name for p in folder.iterdir()] == ["store.db"]


@pytest.mark.skipif(os.name != "posix", reason="needs links to open files")
class TestInsideACommit:
    def test_killed_after_each_page_that_sqlite_wrote(
        self, tmp_path: Path, torn: tuple[bytes, bytes, bytes]
    ) -> None:
        before, whole, journal = torn
        for number, at in enumerate(range(0, len(whole) + 1, PAGE)):
            content = whole[:at] + before[at:]
            goes_on(left(tmp_path / str(number), content, journal))

    @settings(max_examples=25, suppress_health_check=list(HealthCheck))
    @given(pages=st.lists(st.booleans(), min_size=40, max_size=40), seed=st.integers(0, 2**30))
    def test_without_power_pages_came_to_the_disk_in_any_order(
        self, tmp_path: Path, torn: tuple[bytes, bytes, bytes], pages: list[bool], seed: int
    ) -> None:
        before, whole, journal = torn
        content = b"".join(
            (whole if pages[at // PAGE % 40] else before.ljust(len(whole), b"\0"))[at : at + PAGE]
            for at in range(0, len(whole), PAGE)
        )
        folder = tmp_path / "p"
        shutil.rmtree(folder, ignore_errors=True)
        goes_on(left(folder, content, journal))

    def test_killed_while_the_journal_was_written(
        self, tmp_path: Path, torn: tuple[bytes, bytes, bytes]
    ) -> None:
        """The file is as before: SQLite touches it when the journal was flushed."""
        before, _, journal = torn
        for number, size in enumerate((0, 8, 28, 512, 600, 512 + PAGE, len(journal) - 1)):
            unsealed = journal[:8] + bytes(4) + journal[12:]  # how many pages it holds is written last
            goes_on(left(tmp_path / str(number), before, unsealed[:size]))

    def test_when_the_journal_was_removed_the_round_is_durable(
        self, tmp_path: Path, torn: tuple[bytes, bytes, bytes]
    ) -> None:
        folder = left(tmp_path / "a", torn[1], None)
        assert large_state(folder, 4, write=False) == after(4)
        goes_on(folder)

    def test_a_file_that_lost_its_journal_is_refused(
        self, tmp_path: Path, torn: tuple[bytes, bytes, bytes]
    ) -> None:
        """Somebody copied the file alone. Whatever of it is read must be right, or refused."""
        before, whole, _ = torn
        refused = 0
        for number, at in enumerate(range(PAGE, min(len(before), len(whole)), PAGE)):
            folder = left(tmp_path / str(number), whole[:at] + before[at:], None)
            for round in (3, 4):
                with untouched(folder):
                    try:
                        assert large_state(folder, round, write=False) == after(round)
                    except StoreError:
                        refused += 1
        assert refused > 4

    def test_the_journal_of_another_time_is_refused_and_changes_nothing(
        self, tmp_path: Path, torn: tuple[bytes, bytes, bytes]
    ) -> None:
        _, whole, journal = torn
        store = large(tmp_path / "late")
        for round in range(1, 8):
            large_round(store, round)
            store.prepare(round)
            store.apply()
        (tmp_path / "late" / "store.db-journal").write_bytes(journal)
        for write in (True, False):
            with untouched(tmp_path / "late"), pytest.raises(StoreError):
                large_state(tmp_path / "late", 7, write=write)
        (tmp_path / "late" / "store.db-journal").unlink()
        assert large_state(tmp_path / "late", 7) == after(7)
        assert whole

    def test_a_damaged_journal_is_right_or_refused(
        self, tmp_path: Path, torn: tuple[bytes, bytes, bytes]
    ) -> None:
        before, whole, journal = torn
        half = whole[: 2 * PAGE] + before[2 * PAGE :]
        ends = []
        for number, at in enumerate(range(0, len(journal), 331)):
            content = bytearray(journal)
            content[at] ^= 1 << number % 8
            folder = left(tmp_path / str(number), half, bytes(content))
            with untouched(folder):
                try:
                    assert large_state(folder, 3, write=False) == after(3)
                    ends.append("right")
                except StoreError:
                    ends.append("refused")
        assert set(ends) == {"right", "refused"}


def commits_within(folder: str, size: int) -> None:
    """Commit rounds until a file would grow beyond a size: the system then kills this process in the write."""
    import resource

    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    torch.set_num_threads(1)
    store = large(Path(folder))
    store.recover(3)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    large_round(store, 4)
    store.prepare(4)


@pytest.mark.skipif(sys.platform != "linux", reason="needs fork and SIGXFSZ")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_killed_by_the_system_in_a_write(tmp_path: Path) -> None:
    store = large(tmp_path / "a")
    for round in (1, 2, 3):
        large_round(store, round)
        store.prepare(round)
        store.apply()
    size = (tmp_path / "a" / "store.db").stat().st_size
    ends = set()
    for number, most in enumerate(
        [100, 600, 5000, 9000, 20_000, size, size + PAGE, size + 3 * PAGE, 1 << 20]
    ):
        folder = tmp_path / str(number)
        shutil.copytree(tmp_path / "a", folder)
        child = multiprocessing.get_context("fork").Process(target=commits_within, args=(str(folder), most))
        child.start()
        child.join()
        ends.add((child.exitcode, (folder / "store.db-journal").exists()))
        goes_on(folder)
    assert ends == {(-signal.SIGXFSZ, True), (0, False)}


class TestRounds:
    def test_written_values_are_read_at_once_and_lost_without_a_commit(self, tmp_path: Path) -> None:
        store = committed(tmp_path / "a", 2)
        store.write([0], values(9, 1))
        assert torch.equal(store.read([0])["user"][0], values(9, 1)["user"][0])
        assert store.seen([0]) == [True]
        assert state(tmp_path / "a", 2) == expected(tmp_path, 2)

    @pytest.mark.parametrize("rounds", [1, 3])
    def test_killed_between_prepare_and_the_runs_commit_the_round_is_dropped(
        self, tmp_path: Path, rounds: int
    ) -> None:
        store = committed(tmp_path / "a", rounds - 1)
        store.write(*of_round(rounds))
        store.prepare(rounds)
        wanted = expected(tmp_path, rounds - 1)
        for write in (False, True):
            with untouched(tmp_path / "a"):
                assert state(tmp_path / "a", rounds - 1, write=write) == wanted

    def test_killed_after_the_runs_commit_the_round_is_there(self, tmp_path: Path) -> None:
        store = committed(tmp_path / "a", 2)
        store.write(*of_round(3))
        digest = store.prepare(3)
        again = sqlite(tmp_path / "a")
        again.recover(3, digest)
        assert numbers(again) == expected(tmp_path, 3)
        assert again.digest == digest
        store.apply()
        assert store.digest == digest

    def test_a_round_after_recovery_is_like_any_other(self, tmp_path: Path) -> None:
        """What the dropped round has written is gone from the file, too."""
        store = committed(tmp_path / "a", 2)
        store.write([0, 1, 5], values(77, 3))
        store.prepare(3)
        again = sqlite(tmp_path / "a")
        again.recover(2)
        again.write(*of_round(3))
        again.prepare(3)
        again.apply()
        assert state(tmp_path / "a", 3) == expected(tmp_path, 3)
        assert versions(tmp_path / "a") == versions(tmp_path / "reference-3")

    def test_a_round_may_be_prepared_again(self, tmp_path: Path) -> None:
        store = committed(tmp_path / "a", 2)
        store.write([0, 1, 5], values(77, 3))
        store.prepare(3)
        store.write([1], values(78, 1))
        store.prepare(3)
        store.apply()
        assert torch.equal(
            store.read([1, 5])["count"], torch.cat([values(78, 1)["count"], values(77, 3)["count"][2:]])
        )
        assert [v for v in versions(tmp_path / "a") if v[0] == 1] == [(1, 1), (1, 3)]

    def test_the_last_round_can_be_taken_back_and_no_earlier_one(self, tmp_path: Path) -> None:
        committed(tmp_path / "a", 3)
        assert state(tmp_path / "a", 2) == expected(tmp_path, 2)
        with pytest.raises(StoreError, match=r"stands at round 3, the run at round 1; restore both"):
            state(tmp_path / "a", 1)

    def test_versions_that_nobody_needs_go_with_the_next_commit(self, tmp_path: Path) -> None:
        committed(tmp_path / "a", 10)
        found = versions(tmp_path / "a")
        last = {c: max(r for r in range(1, 11) if c in of_round(r)[0]) for c in range(CLIENTS)}
        before = {c: max(r for r in range(1, 10) if c in of_round(r)[0]) for c in of_round(10)[0]}
        assert found == sorted({*last.items(), *before.items()})

    def test_a_round_in_which_nobody_wrote(self, tmp_path: Path) -> None:
        store = committed(tmp_path / "a", 2)
        store.prepare(3)
        store.apply()
        assert state(tmp_path / "a", 3) == expected(tmp_path, 2)

    def test_apply_without_anything_prepared_keeps_what_was_written(self, tmp_path: Path) -> None:
        store = committed(tmp_path / "a", 1)
        store.write([0], values(9, 1))
        store.apply()
        assert torch.equal(store.read([0])["count"], values(9, 1)["count"])

    def test_killed_before_the_first_commit(self, tmp_path: Path) -> None:
        store = sqlite(tmp_path / "a")
        store.write([1], values(1, 1))
        shutil.copytree(tmp_path / "a", tmp_path / "b")
        store.prepare(1)
        shutil.copytree(tmp_path / "a", tmp_path / "c")
        for copy in ("b", "c"):
            assert state(tmp_path / copy, 0)["seen"] == [False] * CLIENTS

    def test_killed_while_the_file_is_made(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """It appears whole, so only what was begun may be lying about."""

        def killed(*_: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", killed)
            with pytest.raises(KeyboardInterrupt):
                sqlite(tmp_path / "a")
        assert not (tmp_path / "a" / "store.db").exists()
        assert state(tmp_path / "a", 0)["seen"] == [False] * CLIENTS

    @pytest.mark.parametrize(
        "statement", ["BEGIN IMMEDIATE", "INSERT INTO kept", "DELETE FROM kept", "COMMIT"]
    )
    def test_interrupted_inside_prepare_nothing_is_written(
        self, tmp_path: Path, statement: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store = committed(tmp_path / "a", 2)
        store.write(*of_round(3))

        def interrupted(name: str) -> Callable[..., Any]:
            call = getattr(database.Database, name)

            def watched(self: database.Database, text: str, *rest: Any) -> Any:
                if text.startswith(statement):
                    raise KeyboardInterrupt
                return call(self, text, *rest)

            return watched

        with monkeypatch.context() as patch, untouched(tmp_path / "a"):
            for name in ("query", "for_each"):
                patch.setattr(database.Database, name, interrupted(name))
            with pytest.raises(KeyboardInterrupt):
                store.prepare(3)
        store.prepare(3)  # this process may go on
        store.apply()
        assert state(tmp_path / "a", 3) == expected(tmp_path, 3)


class TestFullDisk:
    def test_in_prepare_leaves_the_last_commit(self, tmp_path: Path) -> None:
        store = large(tmp_path / "a")
        for round in (1, 2):
            large_round(store, round)
            store.prepare(round)
            store.apply()
        large_round(store, 3)
        assert store._file is not None
        (pages,) = store._file.query("PRAGMA page_count").fetchone()
        store._file.query(f"PRAGMA max_page_count = {pages + 1}")
        with untouched(tmp_path / "a"), pytest.raises(RunError) as error:
            store.prepare(3)
        assert str(error.value) == (
            f"Cannot write {tmp_path / 'a' / 'store.db'}: database or disk is full. Nothing was lost: the last finished "
            f"round is kept. Free some space or check the rights, then resume."
        )
        assert large_state(tmp_path / "a", 2) == after(2)
        store._file.query("PRAGMA max_page_count = 100000")  # space was made: this process may go on
        store.prepare(3)
        store.apply()
        assert large_state(tmp_path / "a", 3) == after(3)

    @pytest.mark.skipif(sys.platform != "linux", reason="needs limits of file sizes")
    @pytest.mark.parametrize("more", [-20_000, 0, PAGE + 100, 3 * PAGE])
    def test_when_the_system_refuses_a_write(self, tmp_path: Path, more: int) -> None:
        import resource

        store = large(tmp_path / "a")
        for round in (1, 2, 3):
            large_round(store, round)
            store.prepare(round)
            store.apply()
        large_round(store, 4)
        size = (tmp_path / "a" / "store.db").stat().st_size
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (max(100, size + more), hard))
        try:
            with pytest.raises(RunError, match=r"Nothing was lost: the last finished round is kept"):
                store.prepare(4)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        goes_on(tmp_path / "a")


def test_a_commit_is_flushed_to_the_disk(tmp_path: Path) -> None:
    """EXTRA flushes journal, file, and the journal's removal: see SQLite's page on atomic commit."""
    for store in (committed(tmp_path / "a", 1), sqlite(tmp_path / "a")):
        store.recover(1)
        assert store._file is not None
        assert store._file.query("PRAGMA synchronous").fetchone() == (3,)
        assert store._file.query("PRAGMA fullfsync").fetchone() == (1,)
        assert store._file.query("PRAGMA journal_mode").fetchone() == ("delete",)


@pytest.mark.skipif(sys.platform != "linux", reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_does_not_use_the_connection_and_harms_nothing(tmp_path: Path) -> None:
    store = committed(tmp_path / "a", 2)
    child = os.fork()
    if not child:
        code = 1
        try:
            store.read([0])
        except StoreError as error:
            code = 0 if "open it anew in this one" in str(error) else 2
        finally:
            if store._file is not None:
                store._file._close()
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    with closing(sqlite3.connect(tmp_path / "a" / "store.db")):
        store.write(*of_round(3))
        store.prepare(3)
        store.apply()
    assert state(tmp_path / "a", 3) == expected(tmp_path, 3)

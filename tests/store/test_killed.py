"""A store in a file survives a kill, a loss of power and a full disk at every instant of a commit."""

from __future__ import annotations

import multiprocessing
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedkeep.core.errors import RunError, StoreError
from tests.store.build import (
    committed,
    count,
    expected,
    killed,
    lines_after,
    numbers,
    of_round,
    sqlite,
    state,
    values,
)
from tests.store.large import PAGE, after, goes_on, large, large_lines, large_round, large_state, untouched


class Torn(NamedTuple):
    """What stood on the disk around the commit of round 4: the file, its log before and after, the file at rest."""

    file: bytes
    before: bytes
    log: bytes
    rest: bytes


@pytest.fixture(scope="module", params=[4096, 1], ids=["grows", "anew"])
def torn(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Torn:
    """Return the bytes of a commit; with ``anew`` the log begins anew with each, over what it held."""
    folder = tmp_path_factory.mktemp("torn")
    store = large(folder)
    store._file.database.query(f"PRAGMA wal_autocheckpoint = {request.param}")
    for round in (1, 2, 3):
        large_round(store, round)
        store.flush()
    log = folder / "store.db-wal"
    store._file.database.query("PRAGMA wal_autocheckpoint = 4096")
    file, before = (folder / "store.db").read_bytes(), log.read_bytes()
    large_round(store, 4)
    store.flush()
    after_commit = log.read_bytes()
    assert (folder / "store.db").read_bytes() == file
    assert (after_commit[: len(before)] == before) == (request.param > 1)
    store.rest()
    assert [p.name for p in folder.iterdir()] == ["store.db"]
    assert large_state(folder, 4) == after(4)
    return Torn(file, before, after_commit, (folder / "store.db").read_bytes())


def left(folder: Path, content: bytes, log: bytes | None) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / "store.db").write_bytes(content)
    if log is not None:
        (folder / "store.db-wal").write_bytes(log)
    return folder


class TestInsideACommit:
    def test_killed_after_any_part_of_the_log(self, tmp_path: Path, torn: Torn) -> None:
        first = next(
            (k for k, (a, b) in enumerate(zip(torn.before, torn.log, strict=False)) if a != b),
            len(torn.before),
        )
        sizes = [first, *range(first + 11, len(torn.log), 1777), len(torn.log) - 1, len(torn.log)]
        for number, size in enumerate(sizes):
            log = torn.log[:size] + torn.before[size:]
            goes_on(left(tmp_path / str(number), torn.file, log))

    @settings(max_examples=25, suppress_health_check=list(HealthCheck), deadline=None)
    @given(pages=st.lists(st.booleans(), min_size=60, max_size=60), partly=st.integers(0, 511))
    def test_without_power_the_log_came_to_the_disk_in_any_order(
        self, tmp_path: Path, torn: Torn, pages: list[bool], partly: int
    ) -> None:
        """In sectors of 512 bytes or larger pieces; what was there before has been flushed."""
        old, size = torn.before.ljust(len(torn.log), b"\0"), 512 * (1 + partly % 8)
        pieces = range(0, len(torn.log), size)
        log = b"".join((torn.log if pages[at // size % 60] else old)[at : at + size] for at in pieces)
        goes_on(left(tmp_path / "p", torn.file, log))

    @settings(max_examples=25, suppress_health_check=list(HealthCheck), deadline=None)
    @given(pages=st.lists(st.booleans(), min_size=40, max_size=40))
    def test_killed_while_the_log_is_moved_into_the_file(
        self, tmp_path: Path, torn: Torn, pages: list[bool]
    ) -> None:
        old = torn.file.ljust(len(torn.rest), b"\0")
        at_rest = (torn.rest, old)
        content = b"".join(
            at_rest[pages[at // PAGE % 40]][at : at + PAGE] for at in range(0, len(torn.rest), PAGE)
        )
        goes_on(left(tmp_path / "p", content, torn.log))
        assert large_state(left(tmp_path / "p", content, torn.log), 4, write=False) == after(4)

    def test_a_file_that_lost_its_log_is_refused(self, tmp_path: Path, torn: Torn) -> None:
        """Somebody copied the file alone. Whatever of it is read must be right, or refused."""
        for round in (3, 4):
            folder = left(tmp_path / str(round), torn.file, None)
            with untouched(folder):
                assert outcome(folder, round) in (after(round), "refused")
        assert outcome(folder, 4) == "refused"

    def test_the_log_of_another_time_is_refused_and_changes_nothing(self, tmp_path: Path, torn: Torn) -> None:
        """SQLite would take it for this file's own."""
        store = large(tmp_path / "late")
        for round in range(1, 8):
            large_round(store, round)
            store.flush()
        store.rest()
        log = tmp_path / "late" / "store.db-wal"
        log.write_bytes(torn.log)
        for write in (True, False):
            with untouched(tmp_path / "late"):
                assert outcome(tmp_path / "late", 7, write=write) == "refused"
        log.unlink()
        assert large_state(tmp_path / "late", 7) == after(7)

    def test_a_damaged_log_is_right_or_refused(self, tmp_path: Path, torn: Torn) -> None:
        ends = []
        for number, at in enumerate(range(0, len(torn.log), 907)):
            content = bytearray(torn.log)
            content[at] ^= 1 << number % 8
            folder = left(tmp_path / "a", torn.file, bytes(content))
            for round in (3, 4):
                with untouched(folder):
                    end = outcome(folder, round)
                ends.append(end if end == "refused" else end == after(round))
        assert set(ends) == {True, "refused"}


def outcome(folder: Path, round: int, *, write: bool = False) -> object:
    """Return the state, or ``"refused"``."""
    try:
        return large_state(folder, round, write=write)
    except StoreError:
        return "refused"


def commits_within(folder: str, size: int) -> None:
    """Commit rounds until a file would grow beyond a size: the system then kills this process in the write."""
    import resource

    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    torch.set_num_threads(1)
    store = large(Path(folder))
    store.begin(large_lines(3))
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    large_round(store, 4)
    store.flush()


@pytest.mark.skipif(sys.platform != "linux", reason="needs fork and SIGXFSZ")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_killed_by_the_system_in_a_write(tmp_path: Path) -> None:
    store = large(tmp_path / "a")
    for round in (1, 2, 3):
        large_round(store, round)
        store.flush()
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
        ends.add(child.exitcode)
        goes_on(folder)
    assert ends == {-signal.SIGXFSZ, 0}


class TestFullDisk:
    def test_in_a_flush_leaves_the_last(self, tmp_path: Path) -> None:
        store = large(tmp_path / "a")
        for round in (1, 2):
            large_round(store, round)
            store.flush()
        large_round(store, 3)
        (pages,) = store._file.database.query("PRAGMA page_count").fetchone()
        store._file.database.query(f"PRAGMA max_page_count = {pages + 1}")
        with pytest.raises(RunError, match="full. Nothing was lost"):
            store.flush()
        assert large_state(killed(tmp_path / "a"), 2) == after(2)
        store._file.database.query("PRAGMA max_page_count = 100000")  # space was made: this process may go on
        store.flush()
        assert large_state(killed(tmp_path / "a"), 3) == after(3)

    @pytest.mark.skipif(sys.platform != "linux", reason="needs limits of file sizes")
    @pytest.mark.parametrize("more", [0, 20, PAGE + 100, 5 * PAGE])
    def test_when_the_system_refuses_a_write(self, tmp_path: Path, more: int) -> None:
        import resource

        store = large(tmp_path / "a")
        for round in (1, 2, 3):
            large_round(store, round)
            store.flush()
        large_round(store, 4)
        size = (tmp_path / "a" / "store.db-wal").stat().st_size
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + more, hard))
        try:
            with pytest.raises(RunError, match=r"Nothing was lost: the last finished round is kept"):
                store.flush()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        goes_on(killed(tmp_path / "a"))
        store.flush()  # this process may go on
        assert large_state(killed(tmp_path / "a"), 4) == after(4)


def test_a_commit_is_flushed_to_the_disk(tmp_path: Path) -> None:
    """FULL flushes the log with every commit: see SQLite's pages on its log and on ``synchronous``."""
    committed(tmp_path / "a", 1)
    for folder in (tmp_path / "a", tmp_path / "new"):
        store = sqlite(folder)
        store.begin(lines_after(int(folder.name == "a")))
        assert store._file.database.query("PRAGMA synchronous").fetchone() == (2,)
        assert store._file.database.query("PRAGMA fullfsync").fetchone() == (1,)
        assert store._file.database.query("PRAGMA journal_mode").fetchone() == ("wal",)


FORKS = """
import os, sys
from pathlib import Path
from tests.store.build import committed, count, of_round

store = committed(Path(sys.argv[1]), 2)
child = os.fork()
if not child:
    try:
        store.read([0])
    except Exception as error:
        print(error, flush=True)
    del store
    sys.exit(0)  # as any script does: all objects go
assert os.waitpid(child, 0)[1] == 0
count(store, *of_round(3), 3)
store.flush()
os._exit(0)  # the log stays, as after a kill
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs fork")
def test_a_forked_process_does_not_use_the_connection_and_harms_nothing(tmp_path: Path) -> None:
    """Closed in a copy of the process, SQLite would remove the log that this one writes."""
    command = [sys.executable, "-W", "ignore", "-c", FORKS, str(tmp_path / "a")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
    assert re.fullmatch(
        r"The private store .*a is of the process \d+; open it anew in this one\.\n", done.stdout
    ), done.stdout
    assert (tmp_path / "a" / "store.db-wal").exists()
    assert state(tmp_path / "a", 3) == expected(tmp_path, 3)


def test_a_store_that_is_being_written_is_not_written_by_another(tmp_path: Path) -> None:
    store = committed(tmp_path / "a", 2)
    assert state(tmp_path / "a", 2, write=False) == numbers(store)
    other = sqlite(tmp_path / "a")
    with pytest.raises(RunError, match="database is locked"):
        other.begin(lines_after(2))
    count(store, *of_round(3), 3)
    store.flush()
    store.rest()
    assert state(tmp_path / "a", 3) == expected(tmp_path, 3)
    with pytest.raises(StoreError, match="was opened to be read"):
        count(store, [0], values(0, 1), 9)
    assert numbers(store) == expected(tmp_path / "again", 3)

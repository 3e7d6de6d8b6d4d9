"""Stores in a file survive a kill, a loss of power and a full disk at every instant of a commit."""

from __future__ import annotations

import multiprocessing
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedkeep.core.errors import FedkeepError, RunError, StoreError
from fedkeep.store import database
from tests.store.build import (
    DEVICE,
    FILE,
    KINDS,
    LARGE,
    Kind,
    content_of,
    count,
    expected,
    killed,
    lines_after,
    names,
    numbers,
    of_round,
    sqlite,
    untouched,
    values,
)
from tests.tiny import interrupt

PAGE = database.PAGES[0]
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="needs fork and limits of file sizes")
FORKS = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


def right(folder: Path, kind: Kind, round: int, **options: bool) -> bool:
    """Tell whether a round is there, all of it; what is not there must be refused."""
    found = kind.outcome(folder, round, LARGE, **options)
    assert found in ("refused", expected(round, LARGE))
    return found != "refused"


def goes_on(folder: Path, kind: Kind) -> bool:
    """Read round 3, without a touch where it can be; resume, and repeat round 4. Return whether that was there."""
    assert right(copied := killed(folder), kind, 3)
    found = right(killed(folder), kind, 4)
    if kind.reads:
        with untouched(folder):
            assert right(folder, kind, 3, write=False, create=False)
    assert right(copied, kind, 3)  # once more, after it was opened
    store = kind.open(folder, initial=LARGE.initial)
    kind.train(store, 4, LARGE)
    kind.rest(store)
    assert right(folder, kind, 4)
    assert names(folder) == [kind.file]
    return found


class Torn(NamedTuple):
    """What stood on the disk around the commit of round 4: the file, its log before and after, the file at rest."""

    kind: Kind
    file: bytes
    before: bytes
    log: bytes
    rest: bytes

    def left(self, folder: Path, content: bytes, log: bytes | None) -> Path:
        for each in folder.parent.glob(f"{folder.name}*"):
            shutil.rmtree(each)
        folder.mkdir()
        self.kind.path(folder).write_bytes(content)
        if log is not None:
            self.kind.log(folder).write_bytes(log)
        return folder


@pytest.fixture(
    scope="module",
    params=[(FILE, 4096), (FILE, 1), (DEVICE, 4096), (DEVICE, 1)],
    ids=["file-grows", "file-anew", "device-grows", "device-anew"],
)
def torn(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Torn:
    """Return the bytes of a commit; with ``anew`` the log begins anew with each, over what it held."""
    folder = tmp_path_factory.mktemp("torn")
    kind, size = request.param
    store = kind.open(folder, initial=LARGE.initial)
    kind.database(store).query(f"PRAGMA wal_autocheckpoint = {size}")
    for round in (1, 2, 3):
        kind.train(store, round, LARGE)
    kind.database(store).query("PRAGMA wal_autocheckpoint = 4096")
    file, before = kind.path(folder).read_bytes(), kind.log(folder).read_bytes()
    kind.train(store, 4, LARGE)
    after = kind.log(folder).read_bytes()
    assert kind.path(folder).read_bytes() == file
    assert (after[: len(before)] == before) == (size > 1)
    kind.rest(store)
    assert names(folder) == [kind.file]
    assert right(folder, kind, 4)
    return Torn(kind, file, before, after, kind.path(folder).read_bytes())


class TestInsideACommit:
    def test_killed_after_any_part_of_the_log(self, tmp_path: Path, torn: Torn) -> None:
        first = next(
            (k for k, (a, b) in enumerate(zip(torn.before, torn.log, strict=False)) if a != b),
            len(torn.before),
        )
        sizes = [first, *range(first + 11, len(torn.log), 1777), len(torn.log) - 1, len(torn.log)]
        ends = [
            goes_on(torn.left(tmp_path / "a", torn.file, torn.log[:size] + torn.before[size:]), torn.kind)
            for size in sizes
        ]
        assert ends == sorted(ends)
        assert set(ends) == {False, True}

    @settings(max_examples=25, suppress_health_check=list(HealthCheck), deadline=None)
    @given(pages=st.lists(st.booleans(), min_size=60, max_size=60), partly=st.integers(0, 511))
    def test_without_power_the_log_came_to_the_disk_in_any_order(
        self, tmp_path: Path, torn: Torn, pages: list[bool], partly: int
    ) -> None:
        """In sectors of 512 bytes or larger pieces; what was there before has been flushed."""
        old, size = torn.before.ljust(len(torn.log), b"\0"), 512 * (1 + partly % 8)
        pieces = range(0, len(torn.log), size)
        log = b"".join((torn.log if pages[at // size % 60] else old)[at : at + size] for at in pieces)
        goes_on(torn.left(tmp_path / "p", torn.file, log), torn.kind)

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
        assert goes_on(torn.left(tmp_path / "p", content, torn.log), torn.kind)

    def test_a_file_that_lost_its_log_is_refused(self, tmp_path: Path, torn: Torn) -> None:
        """Somebody copied the file alone. Whatever of it is read must be right, or refused."""
        for round in (3, 4):
            folder = torn.left(tmp_path / "a", torn.file, None)
            with untouched(folder):
                found = right(folder, torn.kind, round)
        assert not found

    def test_a_damaged_log_is_right_or_refused(self, tmp_path: Path, torn: Torn) -> None:
        """SQLite drops what is damaged in a log without a word; the ledger then asks for what is not there."""
        ends = []
        for number, at in enumerate(range(0, len(torn.log), 907 if torn.kind.reads else 4999)):
            content = bytearray(torn.log)
            content[at] ^= 1 << number % 8
            for round in (3, 4):
                folder = torn.left(tmp_path / "a", torn.file, bytes(content))
                before = content_of(folder)
                ends.append(right(folder, torn.kind, round, **torn.kind.to_read))
                assert not torn.kind.reads or content_of(folder) == before
        assert set(ends) == {True, False}


def test_the_log_of_another_time_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    """SQLite would take it for this file's own."""
    store = FILE.trained(tmp_path / "early", 4, LARGE)
    content = FILE.log(tmp_path / "early").read_bytes()
    FILE.rest(store)
    log = FILE.log(FILE.at_rest(tmp_path / "late", 7, LARGE))
    log.write_bytes(content)
    for write in (True, False):
        with untouched(tmp_path / "late"):
            assert not right(tmp_path / "late", FILE, 7, write=write)
    log.unlink()
    assert right(tmp_path / "late", FILE, 7)


def commits_within(kind: Kind, folder: Path, size: int) -> None:
    """Commit a round until a file would grow beyond a size: the system then kills this process in the write."""
    import resource

    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    torch.set_num_threads(1)
    store = kind.open(folder, initial=LARGE.initial)
    store.begin(lines_after(3, LARGE))
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    kind.train(store, 4, LARGE)
    kind.rest(store)


@LINUX
@FORKS
@KINDS
def test_killed_by_the_system_in_a_write(tmp_path: Path, kind: Kind) -> None:
    store = kind.trained(tmp_path / "a", 3, LARGE)
    left = [killed(tmp_path / "a")]
    kind.rest(store)
    size = kind.path(tmp_path / "a").stat().st_size
    left.append(tmp_path / "a")  # with its log, and without
    ends, there = set(), []
    for folder in left:
        for most in [20, 100, 600, 5000, 9000, 20_000, size, size + PAGE, size + 3 * PAGE, 1 << 20]:
            found = killed(folder)
            child = multiprocessing.get_context("fork").Process(
                target=commits_within, args=(kind, found, most)
            )
            child.start()
            child.join()
            ends.add(child.exitcode)
            there.append(goes_on(found, kind))
    assert ends == {-signal.SIGXFSZ, 0}
    assert not there[0]
    assert there[-1]


def rounds_told(kind: Kind, folder: Path, begin: int, told: Connection) -> None:
    """Go on from a round for ever, and tell each that is durable."""
    torch.set_num_threads(1)
    store = kind.open(folder)
    store.begin(lines_after(begin))
    told.send(begin)
    for round in range(begin + 1, begin + 1000):
        kind.train(store, round)
        told.send(round)


@LINUX
@FORKS
@KINDS
@pytest.mark.parametrize("kills", [5, pytest.param(100, marks=pytest.mark.slow)])
def test_killed_at_random_instants_it_has_every_round_that_it_told(
    tmp_path: Path, kind: Kind, kills: int
) -> None:
    draw, begun, folder = random.Random(0), 0, tmp_path / "a"  # noqa: S311
    kind.rest(kind.open(folder))
    for _ in range(kills):
        ours, theirs = multiprocessing.Pipe(duplex=False)
        child = multiprocessing.get_context("fork").Process(
            target=rounds_told, args=(kind, folder, begun, theirs)
        )
        child.start()
        theirs.close()
        assert ours.recv() == begun
        time.sleep(draw.uniform(0, 0.05))
        child.kill()
        child.join()
        told = begun
        while ours.poll():
            try:
                told = ours.recv()
            except EOFError:
                break
        later = kind.outcome(killed(folder), told + 1)
        assert later in ("refused", expected(told + 1))
        assert kind.state(killed(folder), told) == expected(told)
        begun = told + (later != "refused")
    assert begun > 0
    assert kind.state(folder, begun) == expected(begun)


@KINDS
class TestFullDisk:
    def test_in_a_flush_leaves_the_last(self, tmp_path: Path, kind: Kind) -> None:
        store = kind.trained(tmp_path / "a", 2, LARGE)
        (pages,) = kind.database(store).query("PRAGMA page_count").fetchone()
        kind.database(store).query(f"PRAGMA max_page_count = {pages + 1}")
        with pytest.raises(FedkeepError, match="full. Nothing was lost"):
            kind.train(store, 3, LARGE)
        assert right(killed(tmp_path / "a"), kind, 2)
        assert not right(killed(tmp_path / "a"), kind, 3)
        kind.database(store).query("PRAGMA max_page_count = 100000")  # space was made: this process may go on
        kind.again(store, 3, LARGE)
        assert right(killed(tmp_path / "a"), kind, 3)

    @LINUX
    @pytest.mark.parametrize("more", [0, 20, PAGE + 100, 5 * PAGE])
    @pytest.mark.parametrize("anew", [False, True])
    def test_when_the_system_refuses_a_write(self, tmp_path: Path, kind: Kind, more: int, anew: bool) -> None:
        """The log grows, or begins anew."""
        import resource

        store = kind.trained(tmp_path / "a", 3, LARGE)
        if anew:
            kind.rest(store)
            store = kind.open(tmp_path / "a", initial=LARGE.initial)
            store.begin(lines_after(3, LARGE))
        log = kind.log(tmp_path / "a")
        size = log.stat().st_size if log.exists() else 0
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + more, hard))
        try:
            with pytest.raises(FedkeepError, match=r"cannot be written|Cannot write") as error:
                kind.train(store, 4, LARGE)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert "Nothing was lost" in str(error.value)
        assert isinstance(error.value, RunError if kind is FILE else StoreError)
        assert not goes_on(killed(tmp_path / "a"), kind)
        kind.again(store, 4, LARGE)
        assert right(killed(tmp_path / "a"), kind, 4)

    @LINUX
    def test_no_file_is_half_made(self, tmp_path: Path, kind: Kind) -> None:
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, hard))
        try:
            with pytest.raises(FedkeepError, match="annot be made|Cannot write"):
                kind.open(tmp_path / "a")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert names(tmp_path / "a") == []


@KINDS
def test_killed_while_the_file_is_made(tmp_path: Path, kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """It appears whole, so only what was begun may be lying about."""
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", interrupt)
        patch.setattr(database, "wipe", interrupt)
        with pytest.raises(KeyboardInterrupt):
            kind.open(tmp_path / "a")
    (part,) = names(tmp_path / "a")
    assert part.endswith(".part")
    assert (tmp_path / "a" / part).stat().st_mode & 0o777 == 0o600
    assert kind.state(tmp_path / "a", 0) == expected(0)


@KINDS
@pytest.mark.parametrize(("log", "left"), [(True, b""), (False, b"what a kill has left")])
def test_a_log_that_is_empty_or_not_read_yet_is_not_copied(
    tmp_path: Path, kind: Kind, log: bool, left: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = kind.at_rest(tmp_path / "a", 1)
    kind.log(folder).write_bytes(left)
    monkeypatch.delattr(shutil, "copyfile")
    database.Database(kind.path(folder), log=log).close()


@KINDS
def test_a_commit_is_flushed_to_the_disk(tmp_path: Path, kind: Kind) -> None:
    """FULL flushes the log with every commit: see SQLite's pages on its log and on ``synchronous``."""
    kind.at_rest(tmp_path / "a", 1)
    for folder in (tmp_path / "a", tmp_path / "new"):
        store = kind.open(folder)
        store.begin(lines_after(int(folder.name == "a")))
        found = kind.database(store)
        assert found.query("PRAGMA synchronous").fetchone() == (2,)
        assert found.query("PRAGMA fullfsync").fetchone() == (1,)
        assert found.query("PRAGMA journal_mode").fetchone() == ("wal",)


FORKING = """
import os, sys
from pathlib import Path
from tests.store.build import FILE, count, of_round

store = FILE.trained(Path(sys.argv[1]), 2)
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
    command = [sys.executable, "-W", "ignore", "-c", FORKING, str(tmp_path / "a")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
    assert re.fullmatch(
        r"The private store .*a is of the process \d+; open it anew in this one\.\n", done.stdout
    ), done.stdout
    assert (tmp_path / "a" / "store.db-wal").exists()
    assert FILE.state(tmp_path / "a", 3) == expected(3)


def test_a_store_that_is_being_written_is_not_written_by_another(tmp_path: Path) -> None:
    store = FILE.trained(tmp_path / "a", 2)
    assert FILE.state(tmp_path / "a", 2, write=False) == numbers(store)
    other = sqlite(tmp_path / "a")
    with pytest.raises(RunError, match="database is locked"):
        other.begin(lines_after(2))
    count(store, *of_round(3), 3)
    store.flush()
    store.rest()
    assert FILE.state(tmp_path / "a", 3) == expected(3)
    with pytest.raises(StoreError, match="was opened to be read"):
        count(store, [0], values(0, 1), 9)
    assert numbers(store) == expected(3)

"""A device that is interrupt, loses power, or has a full disk at any instant has the states before a message or after it."""

from __future__ import annotations

import multiprocessing
import os
import random
import resource
import shutil
import signal
import stat
import sys
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedkeep.core.errors import StoreError
from fedkeep.core.files import leftovers
from fedkeep.methods.client import by_share
from fedkeep.remote.device_file import About, DeviceFile, Version, create, file_of
from fedkeep.store import database
from tests.remote.device_states import (
    CLIENTS,
    OWNER,
    RUN,
    begun,
    copied,
    line_in,
    made,
    opened,
    stage,
    staged_in,
    train_rounds,
)
from tests.tiny import interrupt

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="needs fork and limits of file sizes")
FORKS = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


class Torn(NamedTuple):
    """What stood on the disk around the commit of round 2: the file, and its log before and after."""

    file: bytes
    before: bytes
    log: bytes


@pytest.fixture(scope="module")
def torn(tmp_path_factory: pytest.TempPathFactory) -> Torn:
    folder = tmp_path_factory.mktemp("torn")
    path = made(folder)
    log = path.with_name(f"{RUN}.db-wal")
    train_rounds(folder, 2)
    file, before = path.read_bytes(), b""
    store = opened(folder, accept=by_share)
    for client in CLIENTS:
        kept = begun(store, client, line_in(2))
        new = {"user": kept["user"] + 8, "client/count": kept["client/count"] + 1}
        stage(store, client, new, round=2, attempt=30)
    store.flush()
    after = log.read_bytes()
    assert path.read_bytes() == file
    store.close()
    assert not log.exists()
    return Torn(file, before, after)


def left(folder: Path, content: bytes, log: bytes) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    path = file_of(folder, RUN)
    path.write_bytes(content)
    path.with_name(f"{RUN}.db-wal").write_bytes(log)
    return folder


def goes_on(folder: Path) -> int:
    """Check that all clients are at one round's end, go on to round 5, and return that round."""
    round = staged_in(folder)
    train_rounds(folder, 5, round + 1)
    assert staged_in(folder) == 4
    return round


class TestInsideACommit:
    def test_killed_after_any_part_of_the_log(self, tmp_path: Path, torn: Torn) -> None:
        sizes = [0, 1, 31, *range(32, len(torn.log), 521), len(torn.log) - 1, len(torn.log)]
        ends = [goes_on(left(tmp_path / "p", torn.file, torn.log[:size])) for size in sizes]
        assert ends == sorted(ends)
        assert set(ends) == {1, 2}

    @settings(max_examples=25, suppress_health_check=list(HealthCheck), deadline=None)
    @given(pieces=st.lists(st.booleans(), min_size=60, max_size=60), size=st.sampled_from([512, 4096]))
    def test_without_power_the_log_came_to_the_disk_in_any_order(
        self, tmp_path: Path, torn: Torn, pieces: list[bool], size: int
    ) -> None:
        log = b"".join(
            torn.log[at : at + size] if pieces[at // size % 60] else bytes(len(torn.log[at : at + size]))
            for at in range(0, len(torn.log), size)
        )
        assert goes_on(left(tmp_path / "p", torn.file, log)) in (1, 2)


@LINUX
@FORKS
def test_killed_by_the_system_in_any_write(tmp_path: Path) -> None:
    """The system kills a process in the write that would make a file too large."""
    made(tmp_path / "a")
    train_rounds(tmp_path / "a", 2)
    path = file_of(tmp_path / "a", RUN)
    ends, rounds = set(), []
    for number, most in enumerate([20, 500, *range(4096, 55_000, 4960)]):
        folder = copied(tmp_path / "a", tmp_path / str(number))
        child = multiprocessing.get_context("fork").Process(target=limited, args=(folder, most))
        child.start()
        child.join()
        ends.add(child.exitcode)
        rounds.append(goes_on(folder))
    assert ends == {-signal.SIGXFSZ, 0}
    assert rounds[0] == 1
    assert rounds[-1] == 3
    assert path.stat().st_size < 53_000


def limited(folder: Path, most: int) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    train_rounds(folder, 4, 2)


@LINUX
@FORKS
@pytest.mark.parametrize("kills", [5, pytest.param(100, marks=pytest.mark.slow)])
def test_killed_at_random_instants_it_has_every_round_that_it_told(tmp_path: Path, kills: int) -> None:
    made(tmp_path)
    draw, begun = random.Random(0), 0  # noqa: S311
    for _ in range(kills):
        ours, theirs = multiprocessing.Pipe(duplex=False)
        child = multiprocessing.get_context("fork").Process(
            target=train_rounds, args=(tmp_path, begun + 100_000, begun, theirs)
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
        round = staged_in(tmp_path)
        assert round in (told, told + 1)
        begun = round + 1
    train_rounds(tmp_path, begun + 2, begun)
    assert staged_in(tmp_path) == begun + 1


@pytest.mark.parametrize("at", [1, 3, 9])
def test_killed_while_it_is_made_one_file_is_left_which_goes_with_its_bytes(
    at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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


def test_what_goes_wrong_while_it_is_made_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        create(file_of(tmp_path, RUN), LARGE, large_rows(3))
    assert list(tmp_path.iterdir()) == []


def test_it_is_made_with_one_row_in_memory(tmp_path: Path) -> None:
    """All rows and the whole file were in memory, and more than 2 GiB were refused."""
    tracemalloc.start()
    create(file_of(tmp_path, RUN), LARGE, large_rows())
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 << 20
    file = DeviceFile(file_of(tmp_path, RUN), OWNER)
    assert [int(file.values(version)["user"][-1]) for version in file.versions()] == list(range(8))
    file.close()


LARGE = About(owner=OWNER, run=RUN, columns=[["user", "torch.uint8", [1 << 20]]])


def large_rows(at: int = 9) -> Iterator[tuple[Version, bytes]]:
    """Yield rows of a MiB for eight clients; with the ``at``-th the process is killed."""
    for number in range(8):
        if number + 1 == at:
            interrupt()
        yield Version(0, str(number), 0, 0, 0, 0, accepted=True), bytes([number]) * (1 << 20)


@LINUX
class TestFullDisk:
    @pytest.mark.parametrize("most", [0, 20, 5000])
    def test_a_message_changes_nothing_and_is_served_later(self, tmp_path: Path, most: int) -> None:
        folder = tmp_path / "a"
        made(folder)
        train_rounds(folder, 2)
        store = opened(folder, accept=by_share)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        begun(store, "a", line_in(2))
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
        try:
            with pytest.raises(StoreError) as error:
                store.flush()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert str(error.value).startswith("The private state of the run 'abc123' cannot be written: ")
        assert str(error.value).endswith(
            ". Nothing was lost: it is as it was before. Free some space or check the rights."
        )
        assert staged_in(copied(folder, tmp_path / "copy")) == 1
        store.close()
        assert goes_on(folder) == 1

    def test_no_file_is_half_made(self, tmp_path: Path) -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, hard))
        try:
            with pytest.raises(StoreError, match="The private state of the run 'abc123' cannot be made: "):
                made(tmp_path)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert list(tmp_path.iterdir()) == []

"""Stores in a file: what values they take, how they lie there, and that reading touches nothing."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fedkeep.core.errors import StoreError
from fedkeep.data import RangeIds
from fedkeep.remote.device_file import packed
from fedkeep.store import Default, SqliteStore, database
from fedkeep.store.version_file import Version
from tests.refusals import raises
from tests.store.build import (
    CLIENTS,
    DEVICE,
    FILE,
    IDS,
    KINDS,
    Kind,
    count,
    device,
    expected,
    killed,
    lines,
    lines_after,
    names,
    numbers,
    of_round,
    sqlite,
    untouched,
    values,
)
from tests.tiny import files


def test_a_store_that_was_there_begins_before_it_is_used(tmp_path: Path) -> None:
    FILE.at_rest(tmp_path / "a", 1)
    store = sqlite(tmp_path / "a")
    calls: list[Callable[[], object]] = [lambda: store.read([0]), lambda: store.seen([0]), store.flush]
    for call in calls:
        with pytest.raises(StoreError, match="call begin"):
            call()


class TestReadOnly:
    def test_it_reads_what_was_committed_and_touches_nothing(self, tmp_path: Path) -> None:
        """Round 3 may be committed by the run, or prepared only."""
        store = FILE.trained(tmp_path / "a", 3)
        left = killed(tmp_path / "a")
        store.rest()
        for folder in (tmp_path / "a", left):
            for round in (2, 3):
                with untouched(folder):
                    read = sqlite(folder, write=False, create=False)
                    read.begin(lines_after(round))
                    assert numbers(read) == expected(round)
                    with raises(StoreError, said="was opened to be read; nothing is written", folder=folder):
                        count(read, [0], values(0, 1), 9)

    def test_where_nothing_was_ever_written(self, tmp_path: Path) -> None:
        store = sqlite(tmp_path / "a", write=False)
        store.begin(lines_after(0))
        assert numbers(store)["seen"] == [False] * CLIENTS
        assert not (tmp_path / "a").exists()

    def test_in_a_folder_that_cannot_be_written(self, tmp_path: Path) -> None:
        folder = FILE.at_rest(tmp_path / "a ä%20?#", 2)
        folder.chmod(0o555)
        try:
            assert FILE.state(folder, 2, write=False) == expected(2)
        finally:
            folder.chmod(0o755)


@KINDS
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_refused(tmp_path: Path, kind: Kind, value: float) -> None:
    store = kind.open(tmp_path / "a")
    wrong = values(0, 2)
    wrong["half"][1, 0, 1] = value
    with pytest.raises(StoreError) as error:
        count(store, [4, 5], wrong, 1)
    said = ["'half'", "'user-5'", *([str(tmp_path / "a")] if kind is FILE else [])]
    assert [text in str(error.value) for text in said] == [True] * len(said)
    assert store.seen([4, 5]) == [False, False]


@pytest.mark.parametrize("clients", [[-1], [CLIENTS], [0, 99]])
def test_clients_out_of_range(tmp_path: Path, clients: list[int]) -> None:
    store = sqlite(tmp_path)
    calls: list[Callable[[], object]] = [
        lambda: store.read(clients),
        lambda: store.seen(clients),
    ]
    for call in calls:
        with raises(StoreError, last=6, low=min(clients), high=max(clients)):
            call()


@KINDS
@pytest.mark.parametrize("wrong", [torch.zeros(2, 4), torch.zeros(2, 3).double(), torch.zeros(2)])
def test_values_of_another_shape_or_type(tmp_path: Path, kind: Kind, wrong: torch.Tensor) -> None:
    store = kind.open(tmp_path)
    with raises(
        StoreError, said=r"Private 'user' should be (2, 3) torch.float32" if kind is FILE else "(1, 3)"
    ):
        count(store, [0, 1], {**values(0, 2), "user": wrong}, 1)
    assert store.seen([0, 1]) == [False, False]


def test_clients_never_sampled_take_no_space(tmp_path: Path) -> None:
    """A million clients: the file has those that were seen, and reading a few costs only those."""
    store = SqliteStore(tmp_path, Default({"user": torch.zeros(32)}, 0.0), RangeIds(1_000_000))
    count(store, [999_999, 17], {"user": torch.ones(2, 32)}, 1)
    store.flush()
    assert (tmp_path / "store.db").stat().st_size < 100_000
    assert store.read([17, 18, 999_999])["user"][:, 0].tolist() == [1.0, 0.0, 1.0]


def test_more_versions_than_are_read_at_once(tmp_path: Path) -> None:
    ids, default = RangeIds(10_000), Default({"user": torch.zeros(1)})
    store = SqliteStore(tmp_path, default, ids)
    for round in (1, 2):
        count(store, range(10_000), {"user": torch.arange(10_000.0).reshape(-1, 1) * round}, round)
        store.flush()
    store.rest()
    for round in (1, 2):
        again = SqliteStore(tmp_path, default, ids, write=False)
        again.begin(lines(dict.fromkeys(range(10_000), round)))
        assert torch.equal(again.read(range(10_000))["user"][:, 0], torch.arange(10_000.0) * round)


@KINDS
def test_equal_histories_give_equal_bytes(tmp_path: Path, kind: Kind) -> None:
    for name in ("a", "b"):
        kind.at_rest(tmp_path / name, 4)
        assert names(tmp_path / name) == [kind.file]
    assert files(tmp_path / "a") == files(tmp_path / "b")


@KINDS
@pytest.mark.parametrize(("floats", "page"), [(2500, 4096), (9000, 16_384)])
def test_longer_rows_are_kept_in_larger_pages(tmp_path: Path, kind: Kind, floats: int, page: int) -> None:
    initial = {"user": torch.zeros(floats)}
    store = kind.open(tmp_path / "a", initial=initial)
    for round in (1, 2, 3):
        count(store, sorted({round, 3}), {"user": torch.full((2, floats), float(round))}, round)
        store.flush()
    kind.rest(store)
    assert kind.sql(tmp_path / "a", "PRAGMA page_size") == [(page,)]
    again = kind.open(tmp_path / "a", initial=initial)
    again.begin(lines({1: 1, 2: 2, 3: 3}))
    assert again.read([1, 2, 3])["user"][:, -1].tolist() == [1.0, 2.0, 3.0]


class TestMoreThanARowHolds:
    @KINDS
    def test_is_refused_before_anything_is_written(self, tmp_path: Path, kind: Kind) -> None:
        """It was refused when the first round was to be committed."""
        one, folder = torch.zeros(1, dtype=torch.uint8), tmp_path / "s"
        with raises(StoreError, values=1000000000, most=999995904):
            kind.open(folder, initial={"body": one.expand(10**9)})
        assert not folder.exists()
        assert kind.open(folder, initial={"body": one.expand(10**9 - 4096)}).seen([0]) == [False]

    def test_is_refused_when_a_device_is_opened(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        DEVICE.at_rest(tmp_path, 0)
        monkeypatch.setattr(database, "BESIDE", 10**9 - 8)
        with pytest.raises(StoreError, match="^A client's private values.* 48 .* 8 "):
            device(tmp_path)

    @KINDS
    def test_all_that_may_stand_beside_the_values_has_room(self, tmp_path: Path, kind: Kind) -> None:
        store = kind.open(tmp_path)
        file, most = store._file, 2**63 - 1
        row = packed(file.format, {n: v[0] for n, v in values(7, 1).items()}, "a")
        file.database._sql.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, len(row) + database.BESIDE)
        with file.database.transaction("BEGIN IMMEDIATE"):
            file.add([(Version(1, "ä" * 2000, most, most, most, most, accepted=False), row)])


def test_rows_of_both_kinds_are_alike(tmp_path: Path) -> None:
    """But for how a client is named, and that a device awaits the server's word."""
    (who, _), columns = of_round(1), "accepted, version, attempt, parent, round, length(row)"
    for kind, accepted in ((FILE, 1), (DEVICE, 0)):
        folder = kind.at_rest(tmp_path / kind.file, 1)
        assert kind.sql(folder, f"SELECT {columns} FROM kept") == [(accepted, 1, 1, 0, 1, 48)] * len(who)
        assert [client for client, _ in kind.versions(folder)] == [c if kind is FILE else IDS[c] for c in who]


def test_what_read_a_file_is_closed_before_it_is_written(tmp_path: Path) -> None:
    """Closing it later would release the writer's lock, which is of the process (POSIX)."""
    database.new_file(tmp_path / "a.db", "CREATE TABLE seen (number)", 8, [])
    file = database.Database(tmp_path / "a.db")
    reading = file.query("SELECT count(*) FROM seen")
    file.begin_to_write()
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        reading.fetchone()
    file.close()

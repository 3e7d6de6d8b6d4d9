"""Stores in a file that was damaged, cut, forged, lost, or is another's are refused, and not touched."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
import torch

from fedkeep.core.errors import StoreError
from fedkeep.store import SqliteStore
from tests.refusals import raises
from tests.store.build import (
    DEVICE,
    FILE,
    IDS,
    INITIAL,
    KINDS,
    RUN,
    Kind,
    count,
    device,
    expected,
    killed,
    lines,
    lines_after,
    sqlite,
    untouched,
    values,
)
from tests.tiny import files, harmed

OF_A_ROW = [
    "UPDATE kept SET row = zeroblob(length(row)) WHERE client = {two}",
    "UPDATE kept SET row = x'00' WHERE client = {two}",
    "UPDATE kept SET row = 'text' WHERE client = {two}",
    "UPDATE kept SET row = (SELECT row FROM kept WHERE client = {three}) WHERE client = {two}",
    "UPDATE kept SET (row, crc) = (SELECT row, crc FROM kept WHERE client = {three}) WHERE client = {two}",
    "UPDATE kept SET accepted = 1 - accepted WHERE client = {two}",
    *(
        f"UPDATE kept SET {name} = {name} + 1 WHERE client = {{two}}"
        for name in ("version", "attempt", "parent", "round", "crc")
    ),
    "UPDATE kept SET client = {four} WHERE client = {two}",
    "UPDATE kept SET client = CASE client WHEN {two} THEN {three} WHEN {three} THEN {two} ELSE client END",
    "DELETE FROM kept WHERE client = {two}",  # it would be read as a client that was never seen
]


def changed(kind: Kind, change: str) -> str:
    return change.format(two=kind.client(2), three=kind.client(3), four=kind.client(4))


@KINDS
class TestDamage:
    """Every byte that decides a result is looked at."""

    @pytest.mark.parametrize("change", OF_A_ROW)
    def test_of_a_row_is_named_and_others_are_read(self, tmp_path: Path, kind: Kind, change: str) -> None:
        """When the file is taken over, or when the client is read."""
        folder = kind.at_rest(tmp_path / "a", 5)
        kind.sql(folder, changed(kind, change))
        with untouched(folder), pytest.raises(StoreError, match="client 'user-2'"):
            kind.state(folder, 5, **kind.to_read)
        if "three" not in change or "SELECT" in change:
            store, found = kind.open(folder), lines_after(5)
            store.begin(found.some(found.clients != 2))
            assert store.read([0, 1, 3])["user"].tolist() == [expected(5)["user"][c] for c in (0, 1, 3)]

    def test_of_all_rows(self, tmp_path: Path, kind: Kind) -> None:
        folder = kind.at_rest(tmp_path / "a", 3)
        kind.sql(folder, "DELETE FROM kept")
        with untouched(folder), pytest.raises(StoreError, match="client 'user-1'"):
            kind.state(folder, 3, **kind.to_read)

    def test_of_another_time(self, tmp_path: Path, kind: Kind) -> None:
        folder = kind.at_rest(tmp_path / "a", 2)
        store = kind.open(folder)
        with untouched(folder), pytest.raises(StoreError, match=r"'user-.* from (one|a) copy"):
            store.begin(lines_after(3))
        store.begin(lines_after(2))
        store.flush()
        assert store.read([1, 2])["user"].tolist() == expected(2)["user"][1:3]

    def test_of_any_byte_is_right_or_refused(self, tmp_path: Path, kind: Kind) -> None:
        """Flipped bits, zeroed bytes, a cut: what is read is what was written, or an error that says whose it is."""
        content = kind.path(kind.at_rest(tmp_path / "a", 9)).read_bytes()
        folder, ends = tmp_path / "b", []
        for damaged in harmed(content, 400):
            folder.mkdir(exist_ok=True)
            kind.path(folder).write_bytes(damaged)
            ends.append(read_or_refused(kind, folder, 9))
            if kind.reads:
                assert kind.path(folder).read_bytes() == damaged
                assert len(list(folder.iterdir())) == 1
        assert "refused" in ends
        assert [end for end in ends if end not in ("refused", expected(9))] == []
        assert expected(9) in ends

    @pytest.mark.parametrize("size", [0, 19, 100, 4096, 8192])
    def test_a_file_that_was_cut(self, tmp_path: Path, kind: Kind, size: int) -> None:
        folder = kind.at_rest(tmp_path / "a", 3)
        path = kind.path(folder)
        path.write_bytes(path.read_bytes()[:size])
        with untouched(folder), pytest.raises(StoreError, match=f"^{kind.unreadable}.* a copy"):
            kind.state(folder, 3)
        with untouched(folder), pytest.raises(StoreError, match=f"^{kind.unreadable}"):
            kind.state(folder, 3, **kind.to_read)

    @pytest.mark.parametrize("content", [b"", b"\xff{", b"[]", b"SQLite format 3\0", b"nonsense" * 1000])
    def test_a_file_that_is_none(self, tmp_path: Path, kind: Kind, content: bytes) -> None:
        kind.path(tmp_path).write_bytes(content)
        for options in ({}, kind.to_read):
            with pytest.raises(
                StoreError,
                match=f"^{kind.unreadable}.*{kind.file} does not begin as a private store does. Restore it from a copy",
            ):
                kind.open(tmp_path, **options)
        assert files(tmp_path, but=(f"{RUN}.lock",)) == {kind.file: content}

    @pytest.mark.parametrize(
        "change",
        [
            *(f"UPDATE about SET content = '{text}'" for text in ("[]", "{", "[" * 100_000, "")),
            "UPDATE about SET content = x'ff'",
            "UPDATE about SET content = replace(content, 'a-run', 'b-run')",
            "DELETE FROM about",
            "DROP TABLE about",
            "DROP TABLE about; CREATE TABLE about (content, crc); INSERT INTO about VALUES (NULL, 0)",
        ],
    )
    def test_of_what_it_says_of_itself(self, tmp_path: Path, kind: Kind, change: str) -> None:
        folder = kind.at_rest(tmp_path / "a", 1)
        kind.sql(folder, *change.split("; "))
        with untouched(folder), pytest.raises(StoreError) as error:
            kind.open(folder)
        assert str(error.value).startswith(kind.unreadable) or (
            kind is FILE and "'b-run'" in str(error.value)
        )

    def test_other_sqlite_files_are_named_and_not_touched(self, tmp_path: Path, kind: Kind) -> None:
        """One with a write-ahead log would grow two files by being read."""
        for name, mode in (("plain", "DELETE"), ("log", "WAL")):
            (tmp_path / name).mkdir()
            with closing(sqlite3.connect(kind.path(tmp_path / name))) as sql:
                sql.execute(f"PRAGMA journal_mode = {mode}")
                sql.execute("CREATE TABLE other (x)")
            for options in ({}, kind.to_read):
                with untouched(tmp_path / name), pytest.raises(StoreError, match=f"^{kind.unreadable}"):
                    kind.open(tmp_path / name, **options)

    @pytest.mark.parametrize("end", ["-wal", "-journal"])
    def test_a_log_without_its_file(self, tmp_path: Path, kind: Kind, end: str) -> None:
        """Nothing is made in the place of what is gone."""
        (tmp_path / f"{kind.file}{end}").write_bytes(b"log")
        for options in [{}, {"write": False}] if kind.reads else [{}, {"create": False}]:
            with untouched(tmp_path), pytest.raises(StoreError, match=r"is missing.* a copy"):
                kind.open(tmp_path, **options)

    def test_a_file_that_is_gone(self, tmp_path: Path, kind: Kind) -> None:
        for options in ({}, kind.to_read):
            with pytest.raises(
                StoreError, match="is missing, but the run has|has no private state on this device"
            ):
                kind.open(tmp_path / "nowhere", create=False, **options)
        assert not (tmp_path / "nowhere").exists()

    def test_of_another_run(self, tmp_path: Path, kind: Kind) -> None:
        """Nothing is touched, also where a kill has left its log."""
        store = kind.trained(tmp_path / "a", 1)
        folder, run = killed(tmp_path / "a"), "another"
        assert kind.log(folder).stat().st_size
        kind.rest(store)
        for each in folder.iterdir():
            each.rename(each.with_name(each.name.replace(RUN, run)))
        before = files(folder)
        with pytest.raises(StoreError, match=f"belongs to the run '{RUN}'.*Restore this run's own"):
            kind.open(folder, run=run)
        assert files(folder, but=(f"{run}.lock",)) == before

    @pytest.mark.parametrize(
        "initial",
        [
            {"user": torch.zeros(3)},
            {**INITIAL, "user": torch.zeros(4)},
            {**INITIAL, "user": torch.zeros(3).double()},
            {**INITIAL, "more": torch.zeros(1)},
            {("vser" if n == "user" else n): v for n, v in INITIAL.items()},
        ],
    )
    def test_of_another_model(self, tmp_path: Path, kind: Kind, initial: dict[str, torch.Tensor]) -> None:
        folder = kind.at_rest(tmp_path / "a", 1)
        with (
            untouched(folder),
            pytest.raises(StoreError, match=r"was made for other private .*: wanted .*, found "),
        ):
            kind.open(folder, initial=initial)
        assert kind.state(folder, 1) == expected(1)


def read_or_refused(kind: Kind, folder: Path, round: int) -> object:
    """Return what a store gives, or ``"refused"`` where it gives an error that says what is wrong where."""
    try:
        return kind.state(folder, round, create=False, **kind.to_read)
    except StoreError as error:
        named = (str(folder), "client 'user-", kind.unreadable, "does not fit its checksum")
        return "refused" if any(name in str(error) for name in named) else str(error)


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        *(
            (FILE, change)
            for change in (
                "UPDATE kept SET client = 99 WHERE client = 2",
                "UPDATE kept SET client = -1 WHERE client = 2",
                "UPDATE kept SET attempt = 0 WHERE number = 1",
                "INSERT INTO kept SELECT number + 99, client, version, attempt, parent, round, accepted, crc, row FROM kept",
                "UPDATE kept SET client = 'two' WHERE client = 2",
            )
        ),
        (DEVICE, "UPDATE kept SET version = 'two'"),
        (DEVICE, "UPDATE kept SET client = x'00' WHERE client = 'user-2'"),
        (FILE, "DROP TABLE kept"),
        (DEVICE, "DROP TABLE kept"),
    ],
)
def test_versions_that_make_no_sense(tmp_path: Path, kind: Kind, change: str) -> None:
    folder = kind.at_rest(tmp_path / "a", 3)
    kind.sql(folder, change)
    store = kind.open(folder)
    look = partial(store.begin, lines_after(3)) if kind is FILE else store.file.versions
    with pytest.raises(StoreError, match=r"store\.db is damaged: |cannot be read: "):
        look()


@pytest.mark.parametrize("change", OF_A_ROW)
def test_damage_after_a_file_was_taken_over_is_named_when_it_is_read(tmp_path: Path, change: str) -> None:
    """No row is read as a client that was never seen."""
    FILE.at_rest(tmp_path / "a", 5)
    store = sqlite(tmp_path / "a")
    store.begin(lines_after(5))
    FILE.database(store).query(changed(FILE, change))
    store.read([0, 1])
    assert store.seen([2]) == [True]
    with raises(StoreError, client="user-2", attempt=2):
        store.read([1, 2])
    store.read([0, 1])  # the error left no transaction open


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
    with raises(StoreError, name="user", client="user-5"):
        again.read([5])


@pytest.mark.parametrize("log", [False, True])
def test_what_is_another_owners_is_not_touched(tmp_path: Path, log: bool) -> None:
    """Also where a kill has left its log."""
    store = DEVICE.trained(tmp_path / "a", 1)
    folder = killed(tmp_path / "a") if log else tmp_path / "a"
    DEVICE.rest(store)
    assert DEVICE.log(folder).exists() == log
    with (
        untouched(folder),
        raises(StoreError, got="ann", run="a-run", owner="bob"),
    ):
        device(folder, owner="bob")
    assert DEVICE.state(folder, 1) == expected(1)


def test_a_devices_error_does_not_say_where_the_file_is(tmp_path: Path) -> None:
    """Its text goes to the server."""
    DEVICE.path(tmp_path).mkdir()
    with raises(StoreError, run="a-run", why="Is a directory"):
        device(tmp_path)


@pytest.mark.parametrize("ids", [[*IDS, "user-7"], [*IDS[:-1], "somebody else"], [IDS[1], IDS[0], *IDS[2:]]])
def test_of_other_clients(tmp_path: Path, ids: list[str]) -> None:
    """A simulation has the same people in the same order; to a device they come and go."""
    FILE.at_rest(tmp_path / "a", 1)
    with pytest.raises(StoreError) as error:
        sqlite(tmp_path / "a", ids=ids)
    message = str(error.value)
    assert message.startswith(
        f"The private store {tmp_path / 'a'} was made for other private parameters or clients: wanted {{"
    )
    assert message.endswith("Use the model and data that it was made with.")
    store = DEVICE.trained(tmp_path / "b", 1)
    store.close()
    again = device(tmp_path / "b", ids=ids)
    again.begin(lines({ids.index("user-4"): 1}))
    assert again.read([ids.index("user-4")])["user"].tolist() == [expected(1)["user"][4]]

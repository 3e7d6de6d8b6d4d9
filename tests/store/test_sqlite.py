"""A store in a file: whose it is, what damage is noticed, and that reading touches nothing."""

from __future__ import annotations

import random
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import torch

from fedkeep.core.errors import StoreError
from fedkeep.data import RangeIds
from fedkeep.store import Default, MemoryStore, SqliteStore
from tests.store.build import (
    CLIENTS,
    IDS,
    INITIAL,
    committed,
    expected,
    killed,
    numbers,
    run_sql,
    sqlite,
    state,
    values,
)
from tests.tiny import files


def test_a_model_without_private_parameters(tmp_path: Path) -> None:
    for store in (MemoryStore(Default({}), IDS), sqlite(tmp_path, initial={})):
        assert store.read([0, 1]) == {}
        store.write([0, 1], {})
        store.prepare(1)
        store.apply()
        assert store.seen([0, 2]) == [True, False]
        assert store.read([0, 2]) == {}


def test_an_empty_private_tensor(tmp_path: Path) -> None:
    initial = {"none": torch.zeros(0), "user": torch.zeros(2)}
    for store in (MemoryStore(Default(initial), IDS), sqlite(tmp_path, initial=initial)):
        store.write([1, 0], {"none": torch.zeros(2, 0), "user": torch.tensor([[1.0, 2.0], [3.0, 4.0]])})
        store.prepare(1)
        store.apply()
        assert store.read([0])["none"].shape == (1, 0)
        assert store.read([0])["user"].tolist() == [[3.0, 4.0]]


def test_a_store_for_another_model_is_an_error(tmp_path: Path) -> None:
    committed(tmp_path / "a", 1)
    for initial, ids in (
        (INITIAL, [*IDS, "user-7"]),
        (INITIAL, [*IDS[:-1], "somebody else"]),
        (INITIAL, [IDS[1], IDS[0], *IDS[2:]]),
        ({**INITIAL, "user": torch.zeros(4)}, IDS),
        ({**INITIAL, "user": torch.zeros(3).double()}, IDS),
        ({("vser" if n == "user" else n): v for n, v in INITIAL.items()}, IDS),
    ):
        with pytest.raises(StoreError) as error:
            sqlite(tmp_path / "a", initial=initial, ids=ids)
        message = str(error.value)
        assert message.startswith(
            f"The private store {tmp_path / 'a'} was made for other private parameters or clients: wanted {{"
        )
        assert message.endswith("Use the model and data that it was made with.")


def test_a_store_of_another_run_is_an_error(tmp_path: Path) -> None:
    committed(tmp_path / "a", 1)
    with pytest.raises(StoreError) as error:
        sqlite(tmp_path / "a", run="another")
    assert str(error.value) == (
        f"The private store {tmp_path / 'a'} belongs to the run 'a run', not to 'another'. Restore this run's own store "
        f"from a copy."
    )


def test_a_store_of_another_fedkeep_is_named(tmp_path: Path) -> None:
    committed(tmp_path / "a", 1)
    run_sql(tmp_path / "a", """UPDATE about SET content = '{"format": 4, "clients": 7}'""")
    with pytest.raises(StoreError) as error:
        sqlite(tmp_path / "a")
    assert str(error.value) == (
        f"The private store {tmp_path / 'a'} is of another fedkeep: wanted the format 3, found 4. Run it again, or read "
        f"it with that fedkeep."
    )


def test_a_store_of_another_round_is_an_error(tmp_path: Path) -> None:
    committed(tmp_path / "a", 2)
    for round in (3, 0, 7):
        with pytest.raises(StoreError) as error:
            state(tmp_path / "a", round)
        assert str(error.value) == (
            f"The private store {tmp_path / 'a'} stands at round 2, the run at round {round}; restore both from the same "
            f"copy."
        )


def test_a_store_that_was_there_is_recovered_before_it_is_used(tmp_path: Path) -> None:
    committed(tmp_path / "a", 1)
    store = sqlite(tmp_path / "a")
    calls: list[Callable[[], object]] = [
        lambda: store.read([0]), lambda: store.write([0], values(0, 1)), lambda: store.prepare(2),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(StoreError) as error:
            call()
        assert str(error.value) == (
            f"The private store {tmp_path / 'a'} was there before: call recover(round) before it is used."
        )


class TestDamage:
    """Every byte that decides a result is looked at."""

    def expect(self, folder: Path, round: int, digest: str | None = None) -> None:
        before = files(folder)
        store = sqlite(folder)
        with pytest.raises(StoreError) as error:
            store.recover(round, digest)
        assert str(error.value) == (
            f"The private store's {folder / 'store.db'} does not hold the states after round {round}: a row was lost, "
            f"damaged or is of another time. Restore the whole run from one copy."
        )
        assert files(folder) == before
        with pytest.raises(StoreError, match="call recover"):
            store.read([0])

    def test_of_another_commit(self, tmp_path: Path) -> None:
        digest = committed(tmp_path / "a", 3).digest
        store = sqlite(tmp_path / "a")
        store.recover(3, digest)
        assert store.digest == digest
        self.expect(tmp_path / "a", 3, "0" * 16)

    @pytest.mark.parametrize(
        "change",
        [
            "DELETE FROM kept WHERE client = 2",  # it would be read as a client that was never seen
            "UPDATE kept SET client = 4 WHERE client = 2",
            "UPDATE kept SET round = 3 WHERE client = 5",
            "UPDATE kept SET crc = crc + 1 WHERE client = 2",
            "UPDATE kept SET client = CASE client WHEN 2 THEN 3 WHEN 3 THEN 2 ELSE client END",
            "DELETE FROM kept",
        ],
    )
    def test_of_what_versions_there_are(self, tmp_path: Path, change: str) -> None:
        committed(tmp_path / "a", 3)
        run_sql(tmp_path / "a", change)
        self.expect(tmp_path / "a", 3)

    @pytest.mark.parametrize(
        ("change", "what"),
        [
            ("UPDATE kept SET client = 99 WHERE client = 2", "a version is of nobody"),
            ("UPDATE kept SET client = -1 WHERE client = 2", "a version is of nobody"),
            ("UPDATE kept SET crc = -1 WHERE client = 2", "a version is of nobody"),
            ("UPDATE kept SET round = 0 WHERE version = 1", "a version is of nobody"),
            ("UPDATE kept SET round = 9 WHERE version = 1", "its versions are not in order"),
            ("UPDATE kept SET round = 1 << 40 WHERE round = 3", "its versions are not in order"),
            ("UPDATE kept SET version = -version", "its versions are not in order"),
            ("UPDATE kept SET client = 'two' WHERE client = 2", "invalid literal"),
            ("DROP TABLE kept", "no such table: kept"),
        ],
    )
    def test_of_what_makes_no_sense(self, tmp_path: Path, change: str, what: str) -> None:
        committed(tmp_path / "a", 3)
        run_sql(tmp_path / "a", change)
        with pytest.raises(StoreError) as error:
            state(tmp_path / "a", 3)
        assert str(error.value).startswith(
            f"The private store's {tmp_path / 'a' / 'store.db'} is damaged: {what}"
        )
        assert str(error.value).endswith(". Restore it from a copy.")

    @pytest.mark.parametrize(
        "change",
        [
            "UPDATE kept SET row = zeroblob(length(row)) WHERE client = 2",
            "UPDATE kept SET row = x'00' WHERE client = 2",
            "UPDATE kept SET row = 'text' WHERE client = 2",
            "UPDATE kept SET row = (SELECT row FROM kept WHERE client = 3) WHERE client = 2",
            "DELETE FROM kept WHERE client = 2",
        ],
    )
    def test_of_a_row_is_named_when_it_is_read(self, tmp_path: Path, change: str) -> None:
        """Also where it came after the digest was looked at: no row is read as a client that was never seen."""
        committed(tmp_path / "a", 5)
        store = sqlite(tmp_path / "a")
        store.recover(5)
        assert store._file is not None
        store._file.query(change)
        store.read([0, 1, 3])
        assert store.seen([2]) == [True]
        with pytest.raises(StoreError) as error:
            store.read([1, 2])
        assert str(error.value) == (
            f"The private values of client 'user-2' in {tmp_path / 'a' / 'store.db'} are damaged: their checksum is not "
            f"the one kept of round 2. Restore the store from a copy."
        )
        store.read([0, 1, 3])  # the error left no transaction open

    def test_of_any_byte_is_right_or_refused(self, tmp_path: Path) -> None:
        """Flipped bits, zeroed bytes, a cut: what is read is what was written, or an error that names the store."""
        committed(tmp_path / "a", 9)
        wanted = expected(tmp_path, 9)
        content = (tmp_path / "a" / "store.db").read_bytes()
        digest = state_digest(tmp_path / "a", 9)
        draw, ends = random.Random(0), []  # noqa: S311
        path = tmp_path / "b" / "store.db"
        path.parent.mkdir()
        held = [at for at in range(len(content)) if content[at]]
        for number in range(400):
            harmed, at = bytearray(content), draw.choice(held)
            if number % 3 == 0:
                harmed[at] ^= 1 << draw.randrange(8)
            elif number % 3 == 1:
                harmed[at : at + 64] = bytes(len(harmed[at : at + 64]))
            else:
                del harmed[at:]
            path.write_bytes(harmed)
            ends.append(read_or_refused(tmp_path / "b", 9, digest))
            assert path.read_bytes() == harmed
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
            with pytest.raises(StoreError) as error:
                sqlite(tmp_path, write=write)
            assert str(error.value) == (
                f"Cannot open the private store {tmp_path}: store.db does not begin as a private store does. Restore it "
                f"from a copy."
            )
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


def read_or_refused(folder: Path, round: int, digest: str) -> object:
    """Return what a store gives, or ``"refused"`` where it gives an error that names its place."""
    try:
        store = sqlite(folder, write=False, create=False)
        store.recover(round, digest)
        return numbers(store)
    except StoreError as error:
        return "refused" if str(folder) in str(error) else str(error)


def state_digest(folder: Path, round: int) -> str:
    store = sqlite(folder, write=False)
    store.recover(round)
    return store.digest


class TestReadOnly:
    def test_it_reads_what_was_committed_and_touches_nothing(self, tmp_path: Path) -> None:
        """Round 3 may be committed by the run, or prepared only."""
        store = committed(tmp_path / "a", 2)
        store.write([3, 6], values(3, 2))
        store.prepare(3)
        shutil.copytree(tmp_path / "a", tmp_path / "b")
        for round in (2, 3):
            before = files(tmp_path / "b")
            read = sqlite(tmp_path / "b", write=False, create=False)
            read.recover(round)
            assert numbers(read) == expected(tmp_path / str(round), round)
            with pytest.raises(StoreError) as error:
                read.write([0], values(0, 1))
            assert str(error.value) == (
                f"The private store {tmp_path / 'b'} was opened to be read; nothing is written to it."
            )
            assert files(tmp_path / "b") == before

    def test_where_nothing_was_ever_written(self, tmp_path: Path) -> None:
        store = sqlite(tmp_path / "a", write=False)
        store.recover(0)
        assert numbers(store)["seen"] == [False] * CLIENTS
        assert not (tmp_path / "a").exists()

    def test_in_a_folder_that_cannot_be_written(self, tmp_path: Path) -> None:
        committed(tmp_path / "a ä%20?#", 2)
        (tmp_path / "a ä%20?#").chmod(0o555)
        try:
            assert state(tmp_path / "a ä%20?#", 2, write=False) == expected(tmp_path, 2)
        finally:
            (tmp_path / "a ä%20?#").chmod(0o755)


def test_missing_files_are_errors_and_nothing_is_made_in_their_place(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "store.db-journal").write_bytes(b"journal")
    before = files(tmp_path / "a")
    for write in (True, False):
        with pytest.raises(StoreError) as error:
            sqlite(tmp_path / "a", write=write)
        assert str(error.value) == (
            f"The private store's {tmp_path / 'a' / 'store.db'} is missing; restore it from a copy."
        )
        assert files(tmp_path / "a") == before
        with pytest.raises(StoreError) as error:
            sqlite(tmp_path / "nowhere", create=False, write=write)
        assert str(error.value) == (
            f"The private store {tmp_path / 'nowhere'} is missing, but the run has finished rounds. Restore it from a "
            f"copy."
        )
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_refused(tmp_path: Path, value: float) -> None:
    store = sqlite(tmp_path / "a")
    wrong = values(0, 2)
    wrong["half"][1, 0, 1] = value
    with pytest.raises(StoreError) as error:
        store.write([4, 5], wrong)
    assert str(error.value) == (
        f"Private 'half' of client 'user-5' holds a NaN or an infinity; the store {tmp_path / 'a'} keeps finite values "
        f"only."
    )
    assert store.seen([4, 5]) == [False, False]


def test_a_forged_row_that_is_not_finite_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody wrote it with all the checksums that fit."""
    store = sqlite(tmp_path / "a")
    wrong = values(0, 1)
    wrong["user"][0, 2] = float("nan")
    with monkeypatch.context() as patch:
        patch.setattr(SqliteStore, "_check_finite", lambda *_: None)
        store.write([5], wrong)
        store.prepare(1)
        store.apply()
    again = sqlite(killed(tmp_path / "a"))
    again.recover(1)
    with pytest.raises(StoreError, match="Private 'user' of client 'user-5' holds a NaN or an infinity"):
        again.read([5])


@pytest.mark.parametrize("round", [0, -1, 2**32])
def test_a_round_that_is_none(tmp_path: Path, round: int) -> None:
    with pytest.raises(StoreError) as error:
        sqlite(tmp_path / "a").prepare(round)
    assert str(error.value) == f"A round's number must be in 1 .. 4294967295; got {round}."


@pytest.mark.parametrize("clients", [[-1], [CLIENTS], [0, 99]])
def test_clients_out_of_range(tmp_path: Path, clients: list[int]) -> None:
    store = sqlite(tmp_path)
    calls: list[Callable[[], object]] = [
        lambda: store.read(clients), lambda: store.seen(clients), lambda: store.write(clients, values(0, len(clients))),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(StoreError) as error:
            call()
        assert str(error.value) == f"Client indices must be in 0 .. 6; got {min(clients)} .. {max(clients)}."


@pytest.mark.parametrize("wrong", [torch.zeros(2, 4), torch.zeros(2, 3).double(), torch.zeros(3)])
def test_values_of_another_shape_or_type(tmp_path: Path, wrong: torch.Tensor) -> None:
    store = sqlite(tmp_path)
    with pytest.raises(StoreError) as error:
        store.write([0, 1], {**values(0, 2), "user": wrong})
    assert str(error.value) == (
        f"Private 'user' should be (2, 3) torch.float32; got {tuple(wrong.shape)} {wrong.dtype}."
    )
    assert store.seen([0, 1]) == [False, False]


def test_clients_never_sampled_take_no_space(tmp_path: Path) -> None:
    """A million clients: the file has those that were seen, and reading a few costs only those."""
    store = SqliteStore(tmp_path, Default({"user": torch.zeros(32)}, 0.0), RangeIds(1_000_000))
    store.write([999_999, 17], {"user": torch.ones(2, 32)})
    store.prepare(1)
    store.apply()
    assert (tmp_path / "store.db").stat().st_size < 100_000
    assert store.read([17, 18, 999_999])["user"][:, 0].tolist() == [1.0, 0.0, 1.0]


def test_more_versions_than_are_read_at_once(tmp_path: Path) -> None:
    ids, default = RangeIds(10_000), Default({"user": torch.zeros(1)})
    store = SqliteStore(tmp_path, default, ids)
    for round in (1, 2):
        store.write(range(10_000), {"user": torch.arange(10_000.0).reshape(-1, 1) * round})
        store.prepare(round)
        store.apply()
    store.rest()
    for round in (1, 2):
        again = SqliteStore(tmp_path, default, ids, write=False)
        again.recover(round)
        assert torch.equal(again.read(range(10_000))["user"][:, 0], torch.arange(10_000.0) * round)


def test_equal_histories_give_equal_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        committed(tmp_path / name, 4)
    assert files(tmp_path / "a") == files(tmp_path / "b")
    assert list(files(tmp_path / "a")) == ["store.db"]


@pytest.mark.parametrize(("floats", "page"), [(2500, 4096), (9000, 16_384)])
def test_longer_rows_are_kept_in_larger_pages(tmp_path: Path, floats: int, page: int) -> None:
    store = sqlite(tmp_path / "a", initial={"user": torch.zeros(floats)})
    for round in (1, 2, 3):
        store.write([round, 3], {"user": torch.full((2, floats), float(round))})
        store.prepare(round)
        store.apply()
    store.rest()
    assert run_sql(tmp_path / "a", "PRAGMA page_size") == [(page,)]
    again = sqlite(tmp_path / "a", initial={"user": torch.zeros(floats)}, write=False)
    again.recover(3)
    assert again.read([1, 2, 3])["user"][:, -1].tolist() == [1.0, 2.0, 3.0]

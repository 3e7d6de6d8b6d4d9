"""A store in a file: whose it is, what values it takes, and that reading touches nothing."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fedkeep.core.errors import StoreError
from fedkeep.data import RangeIds
from fedkeep.store import Default, SqliteStore
from tests.refusals import raises
from tests.store.build import (
    CLIENTS,
    IDS,
    INITIAL,
    committed,
    count,
    expected,
    lines,
    lines_after,
    numbers,
    of_round,
    run_sql,
    sqlite,
    state,
    values,
)
from tests.tiny import files


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
    with raises(
        StoreError,
        text=(
            f"The private store {tmp_path / 'a'} belongs to the run 'a run', not to 'another'. Restore this run's own store "
            f"from a copy."
        ),
    ):
        sqlite(tmp_path / "a", run="another")


def test_a_store_of_another_fedkeep_is_named(tmp_path: Path) -> None:
    committed(tmp_path / "a", 1)
    run_sql(tmp_path / "a", """UPDATE about SET content = '{"format": 4, "clients": 7}'""")
    with raises(
        StoreError,
        text=(
            f"The private store {tmp_path / 'a'} is of another fedkeep: wanted the format 5, found 4. Run it again, or read "
            f"it with that fedkeep."
        ),
    ):
        sqlite(tmp_path / "a")


def test_a_store_that_was_there_begins_before_it_is_used(tmp_path: Path) -> None:
    committed(tmp_path / "a", 1)
    store = sqlite(tmp_path / "a")
    calls: list[Callable[[], object]] = [lambda: store.read([0]), lambda: store.seen([0]), store.flush]
    for call in calls:
        with pytest.raises(StoreError, match="call begin"):
            call()


class TestReadOnly:
    def test_it_reads_what_was_committed_and_touches_nothing(self, tmp_path: Path) -> None:
        """Round 3 may be committed by the run, or prepared only."""
        store = committed(tmp_path / "a", 2)
        count(store, *of_round(3), 3)
        store.flush()
        shutil.copytree(tmp_path / "a", tmp_path / "b")
        for round in (2, 3):
            before = files(tmp_path / "b")
            read = sqlite(tmp_path / "b", write=False, create=False)
            read.begin(lines_after(round))
            assert numbers(read) == expected(tmp_path / str(round), round)
            with raises(
                StoreError,
                text=f"The private store {tmp_path / 'b'} was opened to be read; nothing is written to it.",
            ):
                count(read, [0], values(0, 1), 9)
            assert files(tmp_path / "b") == before

    def test_where_nothing_was_ever_written(self, tmp_path: Path) -> None:
        store = sqlite(tmp_path / "a", write=False)
        store.begin(lines_after(0))
        assert numbers(store)["seen"] == [False] * CLIENTS
        assert not (tmp_path / "a").exists()

    def test_in_a_folder_that_cannot_be_written(self, tmp_path: Path) -> None:
        committed(tmp_path / "a ä%20?#", 2)
        (tmp_path / "a ä%20?#").chmod(0o555)
        try:
            assert state(tmp_path / "a ä%20?#", 2, write=False) == expected(tmp_path, 2)
        finally:
            (tmp_path / "a ä%20?#").chmod(0o755)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_refused(tmp_path: Path, value: float) -> None:
    store = sqlite(tmp_path / "a")
    wrong = values(0, 2)
    wrong["half"][1, 0, 1] = value
    with pytest.raises(StoreError) as error:
        count(store, [4, 5], wrong, 1)
    assert error.value.facts == {"name": "half", "client": "user-5", "folder": tmp_path / "a"}
    assert store.seen([4, 5]) == [False, False]


@pytest.mark.parametrize("clients", [[-1], [CLIENTS], [0, 99]])
def test_clients_out_of_range(tmp_path: Path, clients: list[int]) -> None:
    store = sqlite(tmp_path)
    calls: list[Callable[[], object]] = [
        lambda: store.read(clients),
        lambda: store.seen(clients),
    ]
    for call in calls:
        with raises(
            StoreError, text=f"Client indices must be in 0 .. 6; got {min(clients)} .. {max(clients)}."
        ):
            call()


@pytest.mark.parametrize("wrong", [torch.zeros(2, 4), torch.zeros(2, 3).double(), torch.zeros(2)])
def test_values_of_another_shape_or_type(tmp_path: Path, wrong: torch.Tensor) -> None:
    store = sqlite(tmp_path)
    with raises(StoreError, said="Private 'user' should be (2, 3) torch.float32"):
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


def test_equal_histories_give_equal_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        committed(tmp_path / name, 4)
    assert files(tmp_path / "a") == files(tmp_path / "b")
    assert list(files(tmp_path / "a")) == ["store.db"]


@pytest.mark.parametrize(("floats", "page"), [(2500, 4096), (9000, 16_384)])
def test_longer_rows_are_kept_in_larger_pages(tmp_path: Path, floats: int, page: int) -> None:
    store = sqlite(tmp_path / "a", initial={"user": torch.zeros(floats)})
    for round in (1, 2, 3):
        count(store, list({round, 3}), {"user": torch.full((2, floats), float(round))}, round)
        store.flush()
    store.rest()
    assert run_sql(tmp_path / "a", "PRAGMA page_size") == [(page,)]
    again = sqlite(tmp_path / "a", initial={"user": torch.zeros(floats)}, write=False)
    again.begin(lines({1: 1, 2: 2, 3: 3}))
    assert again.read([1, 2, 3])["user"][:, -1].tolist() == [1.0, 2.0, 3.0]


def test_more_than_a_row_holds_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    """It was refused when the first round was to be committed."""
    one = torch.zeros(1, dtype=torch.uint8)
    with pytest.raises(
        StoreError, match=r"take 1000000000 bytes, and a private store holds at most 999995904 "
    ):
        sqlite(tmp_path / "s", initial={"body": one.expand(10**9)})
    assert not (tmp_path / "s").exists()
    assert sqlite(tmp_path / "s", initial={"body": one.expand(10**9 - 4096)}).seen([0]) == [False]

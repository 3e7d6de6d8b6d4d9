"""Both stores keep the same values; the table survives a kill at every step of a commit."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedkeep.core.errors import ConfigError, FedkeepError, StoreError
from fedkeep.core.params import Params
from fedkeep.core.seeds import generator
from fedkeep.data import RangeIds
from fedkeep.store import Default, MemoryStore, PrivateStore, TableStore, journal
from tests.tiny import files, fill_disk, same_bits

CLIENTS = 7
INITIAL = {
    "user": torch.tensor([0.5, -1.5, 2.5]),
    "scalar": torch.tensor(3.0, dtype=torch.float64),
    "flag": torch.tensor([[True, False]]),
    "count": torch.tensor(4),
    "half": torch.ones(2, 2, dtype=torch.bfloat16),
}


IDS = [f"user-{k}" for k in range(CLIENTS)]
RUN = "a run"


def table(
    folder: Path, rule: Any = "model", ids: list[str] = IDS, initial: Params = INITIAL, **options: Any
) -> TableStore:
    return TableStore(folder, Default(initial, rule, seed=3), ids, **{"run": RUN, **options})


def values(number: int, clients: int) -> Params:
    draw = torch.Generator().manual_seed(number)
    return {
        "user": torch.randn(clients, 3, generator=draw),
        "scalar": torch.randn(clients, generator=draw, dtype=torch.float64),
        "flag": torch.randint(0, 2, (clients, 1, 2), generator=draw).bool(),
        "count": torch.randint(-(2**62), 2**62, (clients,), generator=draw),
        "half": torch.randn(clients, 2, 2, generator=draw).bfloat16(),
    }


def numbers(store: PrivateStore, clients: int = CLIENTS) -> dict[str, Any]:
    read = store.read(range(clients))
    assert {n: (v.dtype, tuple(v.shape[1:])) for n, v in read.items()} == {
        n: (v.dtype, tuple(v.shape)) for n, v in INITIAL.items()
    }
    return {n: v.tolist() for n, v in read.items()} | {"seen": store.seen(range(clients))}


some_clients = st.lists(st.integers(0, CLIENTS - 1), max_size=4, unique=True)
step = st.one_of(
    st.tuples(st.just("write"), some_clients, st.integers(0, 10**6)),
    st.tuples(st.just("read"), st.lists(st.integers(0, CLIENTS - 1), max_size=6), st.just(0)),
    st.tuples(st.just("commit"), st.just([]), st.just(0)),
    st.tuples(st.just("reopen"), st.just([]), st.just(0)),
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(steps=st.lists(step, max_size=12), rule=st.sampled_from([0.0, -2.5, ("normal", 0.5), "model"]))
def test_table_and_memory_agree_over_any_sequence(steps: list[tuple[str, list[int], int]], rule: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        kept, memory = table(Path(folder), rule), MemoryStore(Default(INITIAL, rule, seed=3), IDS)
        round = 0
        for what, clients, number in steps:
            if what == "write":
                for store in (kept, memory):
                    store.write(clients, values(number, len(clients)))
            elif what == "read":
                one, two = kept.read(clients), memory.read(clients)
                assert one.keys() == two.keys()
                assert all(torch.equal(one[n], two[n]) for n in one)
                assert kept.seen(clients) == memory.seen(clients)
            else:
                round += 1
                kept.prepare(round)
                kept.apply()
                if what == "reopen":
                    kept = table(Path(folder), rule)
                    kept.recover(round)
        assert numbers(kept) == numbers(memory)


STORES: list[Callable[[Path, Any], PrivateStore]] = [
    lambda folder, rule: MemoryStore(Default(INITIAL, rule, seed=3), IDS),
    lambda folder, rule: table(folder, rule),
]


@pytest.mark.parametrize("build", STORES, ids=["memory", "table"])
class TestBoth:
    def test_a_client_never_seen_has_the_default(
        self, tmp_path: Path, build: Callable[..., PrivateStore]
    ) -> None:
        store = build(tmp_path, "model")
        store.write([2], values(1, 1))
        read = store.read([2, 0, 2])
        assert torch.equal(read["user"][1], INITIAL["user"])
        assert torch.equal(read["user"][0], values(1, 1)["user"][0])
        assert torch.equal(read["count"][[0, 2]], values(1, 1)["count"].repeat(2))
        assert store.seen([0, 2]) == [False, True]

    def test_a_number_fills_the_floats_alone(
        self, tmp_path: Path, build: Callable[..., PrivateStore]
    ) -> None:
        read = build(tmp_path, 0.25).read([1])
        assert read["user"].tolist() == [[0.25] * 3]
        assert read["scalar"].tolist() == [0.25]
        assert read["flag"].tolist() == [[[True, False]]]
        assert read["count"].tolist() == [4]

    def test_normal_values_come_from_a_stream_of_the_clients_own(
        self, tmp_path: Path, build: Callable[..., PrivateStore]
    ) -> None:
        store = build(tmp_path, ("normal", 0.01))
        together, alone = store.read([0, 4, 5]), store.read([4])
        assert torch.equal(together["user"][1], alone["user"][0])
        assert torch.equal(
            alone["user"][0], torch.randn(3, generator=generator(3, "private_init", "user-4")) * 0.01
        )
        assert len({tuple(row) for row in together["user"].tolist()}) == 3
        assert alone["count"].tolist() == [4]

    def test_what_is_read_or_written_is_a_copy(
        self, tmp_path: Path, build: Callable[..., PrivateStore]
    ) -> None:
        store = build(tmp_path, "model")
        given_values = values(1, 2)
        store.write([0, 1], given_values)
        before = numbers(store)
        for v in (*given_values.values(), *store.read(range(CLIENTS)).values(), *store.read([6]).values()):
            v.zero_()
        assert numbers(store) == before
        assert INITIAL["scalar"].item() == 3.0

    def test_graphs_are_left_behind(self, tmp_path: Path, build: Callable[..., PrivateStore]) -> None:
        store = build(tmp_path, "model")
        new = values(1, 1)
        new["user"].requires_grad_()
        store.write([3], new)
        assert not store.read([3])["user"].requires_grad

    def test_nobody_at_all(self, tmp_path: Path, build: Callable[..., PrivateStore]) -> None:
        store = build(tmp_path, "model")
        assert {n: tuple(v.shape) for n, v in store.read([]).items()} == {
            n: (0, *v.shape) for n, v in INITIAL.items()
        }
        store.write([], values(0, 0))
        assert store.seen([]) == []
        assert store.seen(range(CLIENTS)) == [False] * CLIENTS


def test_an_unknown_rule_is_refused() -> None:
    with pytest.raises(ConfigError) as error:
        Default(INITIAL, "zeros")
    assert str(error.value) == "private_init must be a number, ('normal', std) or 'model'; got 'zeros'."


@pytest.mark.parametrize("rule", ["model", 0.0, ("normal", 1.0)])
def test_a_rule_of_private_parameters_leaves_a_methods_state_as_it_begins(rule: Any) -> None:
    ones = torch.ones(3)
    default = Default({"user": ones, "client/user": 2 * ones}, rule, seed=3)
    for _ in range(2):
        made = default("a")
        assert torch.equal(made["client/user"], 2 * ones)
        assert torch.equal(made["user"], ones) == (rule == "model")
        made["client/user"].zero_()  # the default is a copy


def test_a_model_without_private_parameters(tmp_path: Path) -> None:
    for store in (MemoryStore(Default({}), IDS), table(tmp_path, initial={})):
        assert store.read([0, 1]) == {}
        store.write([0, 1], {})
        store.prepare(1)
        store.apply()


def test_an_empty_private_tensor(tmp_path: Path) -> None:
    initial = {"none": torch.zeros(0), "user": torch.zeros(2)}
    for store in (MemoryStore(Default(initial), IDS), table(tmp_path, initial=initial)):
        store.write([1, 0], {"none": torch.zeros(2, 0), "user": torch.tensor([[1.0, 2.0], [3.0, 4.0]])})
        assert store.read([0])["none"].shape == (1, 0)
        assert store.read([0])["user"].tolist() == [[3.0, 4.0]]


class Killed(Exception):
    """The process is killed here."""


def committed(folder: Path, rounds: int) -> TableStore:
    store = table(folder)
    for round in range(1, rounds + 1):
        store.write([round % CLIENTS, (round + 3) % CLIENTS], values(round, 2))
        store.prepare(round)
        store.apply()
    return store


def state(folder: Path, round: int) -> dict[str, Any]:
    store = table(folder)
    store.recover(round)
    return numbers(store)


def expected(tmp_path: Path, rounds: int) -> dict[str, Any]:
    return numbers(committed(tmp_path / f"reference-{rounds}", rounds))


def test_staged_values_are_read_at_once_and_lost_without_a_commit(tmp_path: Path) -> None:
    store = committed(tmp_path / "a", 2)
    store.write([0], values(9, 1))
    assert torch.equal(store.read([0])["user"][0], values(9, 1)["user"][0])
    assert store.seen([0]) == [True]
    assert state(tmp_path / "a", 2) == expected(tmp_path, 2)


def test_killed_between_prepare_and_the_runs_commit_the_round_is_dropped(tmp_path: Path) -> None:
    store = committed(tmp_path / "a", 2)
    store.write([3, 6], values(3, 2))
    store.prepare(3)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    assert state(tmp_path / "b", 2) == expected(tmp_path, 2)


@pytest.mark.parametrize("writes", [0, 1, 2, 3, 4])
def test_killed_inside_apply_the_round_is_repeated(
    tmp_path: Path, writes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run has committed round 3; the table got some of its rows, or a row without its entry."""
    store = committed(tmp_path / "a", 2)
    store.write([3, 6], values(3, 2))
    store.prepare(3)
    write, left = os.pwrite, writes

    def killed(*arguments: Any) -> int:
        nonlocal left
        if not left:
            raise Killed
        left -= 1
        return write(*arguments)

    with monkeypatch.context() as patch, suppress(Killed):
        patch.setattr(os, "pwrite", killed)
        store.apply()
    assert left == 0
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    assert state(tmp_path / "b", 3) == expected(tmp_path, 3)
    assert state(tmp_path / "b", 3) == expected(tmp_path / "again", 3)  # and may be repeated again


def test_killed_before_the_first_commit(tmp_path: Path) -> None:
    store = table(tmp_path / "a")
    store.write([1], values(1, 1))
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    store.prepare(1)
    shutil.copytree(tmp_path / "a", tmp_path / "c")
    for copy in ("b", "c"):
        assert state(tmp_path / copy, 0)["seen"] == [False] * CLIENTS


def test_killed_while_the_table_is_made(tmp_path: Path) -> None:
    """The schema comes first, then the table, both whole: only what was begun may be lying about."""
    store = table(tmp_path / "a")
    (tmp_path / "a" / "table.bin").unlink()
    (tmp_path / "a" / "table.bin.0123456789abcdef.part").write_bytes(b"\0" * 11)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "schema.json.part").write_bytes(b"{")
    for name in ("a", "b"):
        assert state(tmp_path / name, 0)["seen"] == [False] * CLIENTS
    del store


def test_a_round_after_recovery_is_like_any_other(tmp_path: Path) -> None:
    store = committed(tmp_path / "a", 2)
    store.write([5], values(77, 1))
    store.prepare(3)
    again = table(tmp_path / "a")
    again.recover(2)
    again.write([3, 6], values(3, 2))
    again.prepare(3)
    again.apply()
    assert state(tmp_path / "a", 3) == expected(tmp_path, 3)


def record_bytes(folder: Path) -> int:
    """Return the size of a round's record in ``committed``: a head and two rows, each behind its index."""
    return journal.HEAD.size + 2 * (16 + table(folder).row_bytes)


@pytest.mark.parametrize("rounds", [1, 2, 3, 5])
def test_without_power_what_the_table_had_not_flushed_is_repeated(
    tmp_path: Path, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loss of power leaves of each file what was flushed last. The journal begins anew after every second round."""
    monkeypatch.setattr("fedkeep.store.table.JOURNAL_BYTES", 2 * record_bytes(tmp_path / "size"))
    path, sync, flushed = tmp_path / "a" / "table.bin", os.fsync, b""

    def fsync(handle: int) -> None:
        nonlocal flushed
        sync(handle)
        if path.exists() and os.path.samestat(os.fstat(handle), path.stat()):
            flushed = path.read_bytes()

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        committed(tmp_path / "a", rounds)
    whole = path.read_bytes()
    path.write_bytes(flushed)
    assert state(tmp_path / "a", rounds) == expected(tmp_path, rounds)
    assert path.read_bytes() == whole


def test_the_journal_begins_anew_before_it_grows_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = record_bytes(tmp_path / "size")
    monkeypatch.setattr("fedkeep.store.table.JOURNAL_BYTES", 2 * size)
    journal = tmp_path / "a" / "journal"
    store, sizes = table(tmp_path / "a"), []
    for round in range(1, 6):
        store.write([round % CLIENTS, (round + 3) % CLIENTS], values(round, 2))
        store.prepare(round)
        shutil.copytree(tmp_path / "a", tmp_path / f"killed-{round}")
        store.apply()
        sizes.append(journal.stat().st_size // size)
    assert sizes == [1, 2, 1, 2, 1]
    for round in range(1, 6):  # killed before the run's commit, or just after it
        shutil.copytree(tmp_path / f"killed-{round}", tmp_path / f"after-{round}")
        if round > 1:
            assert state(tmp_path / f"killed-{round}", round - 1) == expected(
                tmp_path / str(round), round - 1
            )
        assert state(tmp_path / f"after-{round}", round) == expected(tmp_path / str(round), round)


def test_a_round_that_was_dropped_leaves_nothing_in_the_journal(tmp_path: Path) -> None:
    committed(tmp_path / "a", 3)
    store = committed(tmp_path / "b", 2)
    store.write([0, 1, 2], values(9, 3))
    store.prepare(3)
    again = table(tmp_path / "b")
    again.recover(2)
    again.write([3, 6], values(3, 2))
    again.prepare(3)
    again.apply()
    assert (tmp_path / "b" / "journal").read_bytes() == (tmp_path / "a" / "journal").read_bytes()


def test_a_round_that_was_written_in_half_is_dropped(tmp_path: Path) -> None:
    """Without power inside ``prepare``, a part of the record may stand in the journal."""
    committed(tmp_path / "a", 2)
    before = (tmp_path / "a" / "journal").read_bytes()
    (tmp_path / "a" / "journal").write_bytes(before + before[:100])
    assert state(tmp_path / "a", 2) == expected(tmp_path, 2)
    assert (tmp_path / "a" / "journal").read_bytes() == before


@pytest.mark.parametrize("harm", ["flip", "cut", "empty", "magic"])
def test_a_damaged_journal_is_an_error(tmp_path: Path, harm: str) -> None:
    committed(tmp_path / "a", 2)
    journal = tmp_path / "a" / "journal"
    content = bytearray(journal.read_bytes())
    if harm == "flip":
        content[-3] ^= 1
    elif harm == "magic":
        content[0] ^= 1
    journal.write_bytes({"cut": content[:-1], "empty": b""}.get(harm, bytes(content)))
    with pytest.raises(StoreError) as error:
        state(tmp_path / "a", 2)
    assert str(error.value) == f"The private store's journal {journal} is damaged; restore it from a copy."


def test_a_store_of_another_round_is_an_error(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    committed(folder, 2)
    with pytest.raises(StoreError) as error:
        state(folder, 3)
    assert str(error.value) == (
        f"The private store {folder} stands at round 2, the run at round 3; restore both from the same copy."
    )
    with pytest.raises(StoreError):
        state(folder, 0)  # round 1 was applied to the table long ago, so round 0 cannot be had back
    (folder / "journal").unlink()
    with pytest.raises(StoreError) as error:
        state(folder, 2)
    assert str(error.value) == f"The private store {folder} lacks its journal of round 2; restore it."


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
            table(tmp_path / "a", initial=initial, ids=ids)
        message = str(error.value)
        assert message.startswith(
            f"The private store {tmp_path / 'a'} was made for other private parameters or clients: wanted {{"
        )
        assert message.endswith("Use the model and data that it was made with.")


def test_a_store_of_another_run_is_an_error(tmp_path: Path) -> None:
    committed(tmp_path / "a", 1)
    with pytest.raises(StoreError) as error:
        table(tmp_path / "a", run="another")
    assert str(error.value) == (
        f"The private store {tmp_path / 'a'} belongs to the run 'a run', not to 'another'. Restore this run's own store "
        f"from a copy."
    )
    store = table(tmp_path / "b", run="another")
    store.write([0], values(1, 1))
    store.prepare(1)
    shutil.copy(tmp_path / "b" / "journal", tmp_path / "a" / "journal")
    with pytest.raises(StoreError) as error:
        state(tmp_path / "a", 1)
    assert str(error.value) == (
        f"The private store's journal {tmp_path / 'a' / 'journal'} is of another run than 'a run'; restore it from a copy."
    )


def test_a_store_of_an_older_fedkeep_is_named(tmp_path: Path) -> None:
    committed(tmp_path / "a", 1)
    (tmp_path / "a" / "schema.json").write_text('{"version": 1, "clients": 7}')
    with pytest.raises(StoreError) as error:
        table(tmp_path / "a")
    assert str(error.value) == (
        f"The private store {tmp_path / 'a'} is of another fedkeep: wanted the format 2, found 1. Run it again, or read "
        f"it with that fedkeep."
    )


def test_a_store_that_was_there_is_recovered_before_it_is_used(tmp_path: Path) -> None:
    committed(tmp_path / "a", 1)
    store = table(tmp_path / "a")
    calls: list[Callable[[], object]] = [
        lambda: store.read([0]), lambda: store.write([0], values(0, 1)), lambda: store.prepare(2),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(StoreError) as error:
            call()
        assert str(error.value) == (
            f"The private store {tmp_path / 'a'} was there before: call recover(round) before it is used."
        )


class TestTheTable:
    """Every byte of it that decides a result is looked at. The journal here reaches back for one round only."""

    @pytest.fixture(autouse=True)
    def short(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("fedkeep.store.table.JOURNAL_BYTES", record_bytes(tmp_path / "size"))

    def expect(self, folder: Path, round: int, digest: str | None = None) -> None:
        before = files(folder)
        store = table(folder)
        with pytest.raises(StoreError) as error:
            store.recover(round, digest)
        assert str(error.value) == (
            f"The private store's {folder / 'table.bin'} does not hold the states after round {round}: a row was lost, "
            f"damaged or is of another time. Restore the whole run from one copy."
        )
        assert files(folder) == before
        with pytest.raises(StoreError, match="call recover"):
            store.read([0])

    def test_of_an_earlier_round(self, tmp_path: Path) -> None:
        committed(tmp_path / "early", 2)
        committed(tmp_path / "late", 4)
        shutil.copy(tmp_path / "early" / "table.bin", tmp_path / "late" / "table.bin")
        self.expect(tmp_path / "late", 4)

    def test_of_a_later_round(self, tmp_path: Path) -> None:
        committed(tmp_path / "early", 2)
        committed(tmp_path / "late", 4)
        shutil.copy(tmp_path / "late" / "table.bin", tmp_path / "early" / "table.bin")
        self.expect(tmp_path / "early", 2)

    def test_of_another_commit(self, tmp_path: Path) -> None:
        digest = committed(tmp_path / "a", 3).digest
        store = table(tmp_path / "a")
        store.recover(3, digest)
        assert store.digest == digest
        self.expect(tmp_path / "a", 3, "0" * 16)

    def test_the_round_before_the_last_is_not_had_back_once_it_was_applied(self, tmp_path: Path) -> None:
        committed(tmp_path / "a", 3)
        self.expect(tmp_path / "a", 2)

    def test_that_has_lost_a_row(self, tmp_path: Path) -> None:
        """Zeros would be read as a client that was never seen."""
        committed(tmp_path / "a", 5)
        path = tmp_path / "a" / "table.bin"
        content = bytearray(path.read_bytes())
        content[8 * 2 : 8 * 3] = bytes(8)  # client 2 took part in round 2 alone
        path.write_bytes(content)
        self.expect(tmp_path / "a", 5)

    def test_two_clients_whose_rows_changed_places(self, tmp_path: Path) -> None:
        store = committed(tmp_path / "a", 5)
        path = tmp_path / "a" / "table.bin"
        content = bytearray(path.read_bytes())
        for size, start in ((8, 0), (store.row_bytes, 8 * CLIENTS)):
            one, two = (slice(start + k * size, start + (k + 1) * size) for k in (2, 3))
            content[one], content[two] = content[two], content[one]
        path.write_bytes(content)
        self.expect(tmp_path / "a", 5)

    def test_a_row_whose_values_changed_is_named_when_it_is_read(self, tmp_path: Path) -> None:
        committed(tmp_path / "a", 5)
        path = tmp_path / "a" / "table.bin"
        content = bytearray(path.read_bytes())
        row = table(tmp_path / "size").row_bytes
        content[8 * CLIENTS + 2 * row + 3] ^= 1
        path.write_bytes(content)
        store = table(tmp_path / "a")
        store.recover(5)
        store.read([0, 1, 3])
        with pytest.raises(StoreError) as error:
            store.read([1, 2])
        assert str(error.value) == (
            f"The private values of client 'user-2' in {path} are damaged: their checksum is not the one kept of round "
            f"2. Restore the store from a copy."
        )


class TestReadOnly:
    def test_it_reads_what_was_committed_and_touches_nothing(self, tmp_path: Path) -> None:
        """Killed with round 3 committed and not applied, and round 4 prepared only."""
        store = committed(tmp_path / "a", 2)
        store.write([3, 6], values(3, 2))
        store.prepare(3)
        shutil.copytree(tmp_path / "a", tmp_path / "b")
        for round in (2, 3):
            before = files(tmp_path / "b")
            read = table(tmp_path / "b", write=False, create=False)
            read.recover(round)
            assert numbers(read) == expected(tmp_path / str(round), round)
            with pytest.raises(StoreError) as error:
                read.write([0], values(0, 1))
            assert str(error.value) == (
                f"The private store {tmp_path / 'b'} was opened to be read; nothing is written to it."
            )
            assert files(tmp_path / "b") == before

    def test_where_nothing_was_ever_written(self, tmp_path: Path) -> None:
        store = table(tmp_path / "a", write=False)
        store.recover(0)
        assert numbers(store)["seen"] == [False] * CLIENTS
        assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_refused(tmp_path: Path, value: float) -> None:
    store = table(tmp_path / "a")
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
    store = table(tmp_path / "a")
    wrong = values(0, 1)
    wrong["user"][0, 2] = float("nan")
    with monkeypatch.context() as patch:
        patch.setattr(TableStore, "_check_finite", lambda *_: None)
        store.write([5], wrong)
        store.prepare(1)
        store.apply()
    again = table(tmp_path / "a")
    again.recover(1)
    with pytest.raises(StoreError, match="Private 'user' of client 'user-5' holds a NaN or an infinity"):
        again.read([5])


@pytest.mark.parametrize("round", [0, -1, 2**32])
def test_a_round_that_is_none(tmp_path: Path, round: int) -> None:
    with pytest.raises(StoreError) as error:
        table(tmp_path / "a").prepare(round)
    assert str(error.value) == f"A round's number must be in 1 .. 4294967295; got {round}."


def test_default_values_follow_the_id_and_not_the_place(tmp_path: Path) -> None:
    """They followed the position once: another order of the same people gave everybody another vector."""
    backwards = IDS[::-1]
    for make in (
        lambda name, ids: MemoryStore(Default(INITIAL, ("normal", 1.0), seed=3), ids),
        lambda name, ids: table(tmp_path / name, ("normal", 1.0), ids),
    ):
        one, two = make("a", IDS), make("b", backwards)
        for client in IDS:
            mine = one.read([IDS.index(client)])["user"], two.read([backwards.index(client)])["user"]
            assert torch.equal(*mine)
    with pytest.raises(TypeError, match=r"^A client's default values are drawn by its id, a text; got 4\.$"):
        Default(INITIAL, ("normal", 1.0))(4)  # type: ignore[arg-type]


@pytest.mark.parametrize("change", [-1, 1])
def test_a_table_of_another_size_is_an_error(tmp_path: Path, change: int) -> None:
    committed(tmp_path / "a", 1)
    path = tmp_path / "a" / "table.bin"
    path.write_bytes((path.read_bytes() + b"\0")[: path.stat().st_size + change])
    with pytest.raises(StoreError) as error:
        table(tmp_path / "a")
    assert str(error.value) == f"The private store's {path} has been truncated; restore it from a copy."


def test_missing_files_are_errors_and_nothing_is_made_in_their_place(tmp_path: Path) -> None:
    for name, message in (
        (
            "schema.json",
            "has table.bin and journal, but no schema.json. Nothing was changed; restore it from a copy.",
        ),
        ("table.bin", "table.bin is missing; restore it from a copy."),
    ):
        folder = tmp_path / name
        committed(folder, 1)
        (folder / name).unlink()
        before = files(folder)
        for write in (True, False):
            with pytest.raises(StoreError) as error:
                table(folder, write=write)
            assert str(error.value).endswith(message)
        assert files(folder) == before
    with pytest.raises(StoreError) as error:
        table(tmp_path / "nowhere", create=False)
    assert str(error.value) == (
        f"The private store {tmp_path / 'nowhere'} is missing, but the run has finished rounds. Restore it from a copy."
    )


@pytest.mark.parametrize("content", [b"\xff{", b"[]", b"[" * 100_000, b""])
def test_a_garbled_schema_is_an_error(tmp_path: Path, content: bytes) -> None:
    committed(tmp_path, 1)
    (tmp_path / "schema.json").write_bytes(content)
    with pytest.raises(StoreError, match="^Cannot open the private store "):
        table(tmp_path)


@pytest.mark.parametrize("clients", [[-1], [CLIENTS], [0, 99]])
def test_clients_out_of_range(tmp_path: Path, clients: list[int]) -> None:
    store = table(tmp_path)
    calls: list[Callable[[], object]] = [
        lambda: store.read(clients), lambda: store.seen(clients), lambda: store.write(clients, values(0, len(clients))),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(StoreError) as error:
            call()
        assert str(error.value) == f"Client indices must be in 0 .. 6; got {min(clients)} .. {max(clients)}."


@pytest.mark.parametrize("wrong", [torch.zeros(2, 4), torch.zeros(2, 3).double(), torch.zeros(3)])
def test_values_of_another_shape_or_type(tmp_path: Path, wrong: torch.Tensor) -> None:
    store = table(tmp_path)
    with pytest.raises(StoreError) as error:
        store.write([0, 1], {**values(0, 2), "user": wrong})
    assert str(error.value) == (
        f"Private 'user' should be (2, 3) torch.float32; got {tuple(wrong.shape)} {wrong.dtype}."
    )
    assert store.seen([0, 1]) == [False, False]


def test_a_full_disk_in_prepare_leaves_the_last_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = committed(tmp_path / "a", 2)
    store.write([3, 6], values(3, 2))
    fill_disk(monkeypatch)
    with pytest.raises(FedkeepError, match="No space left on device"):
        store.prepare(3)
    monkeypatch.undo()
    assert state(tmp_path / "a", 2) == expected(tmp_path, 2)


def test_clients_never_sampled_take_no_space(tmp_path: Path) -> None:
    """A million clients: the file is sparse, and reading a few costs only those."""
    store = TableStore(tmp_path, Default({"user": torch.zeros(32)}, 0.0), RangeIds(1_000_000))
    store.write([999_999, 17], {"user": torch.ones(2, 32)})
    store.prepare(1)
    store.apply()
    assert (tmp_path / "table.bin").stat().st_blocks * 512 < 100_000
    assert store.read([17, 18, 999_999])["user"][:, 0].tolist() == [1.0, 0.0, 1.0]


def test_nothing_is_pickled(tmp_path: Path) -> None:
    committed(tmp_path, 1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["journal", "schema.json", "table.bin"]
    json.loads((tmp_path / "schema.json").read_text())


def test_equal_histories_give_equal_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        committed(tmp_path / name, 4)
    assert (tmp_path / "a" / "table.bin").read_bytes() == (tmp_path / "b" / "table.bin").read_bytes()
    assert same_bits(values(3, 2), values(3, 2))

"""Both stores keep the same values; the table survives a kill at every step of a commit."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedkeep.core.errors import ConfigError, FedkeepError, StoreError
from fedkeep.core.params import Params
from fedkeep.core.seeds import generator
from fedkeep.store import Default, MemoryStore, PrivateStore, TableStore
from tests.tiny import fill_disk, same_bits

CLIENTS = 7
INITIAL = {
    "user": torch.tensor([0.5, -1.5, 2.5]),
    "scalar": torch.tensor(3.0, dtype=torch.float64),
    "flag": torch.tensor([[True, False]]),
    "count": torch.tensor(4),
    "half": torch.ones(2, 2, dtype=torch.bfloat16),
}


def table(folder: Path, rule: Any = "model", clients: int = CLIENTS, initial: Params = INITIAL) -> TableStore:
    return TableStore(folder, Default(initial, rule, seed=3), clients)


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
        kept, memory = table(Path(folder), rule), MemoryStore(Default(INITIAL, rule, seed=3))
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
    lambda folder, rule: MemoryStore(Default(INITIAL, rule, seed=3)),
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
            alone["user"][0], torch.randn(3, generator=generator(3, "private_init", "4")) * 0.01
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
        made = default(0)
        assert torch.equal(made["client/user"], 2 * ones)
        assert torch.equal(made["user"], ones) == (rule == "model")
        made["client/user"].zero_()  # the default is a copy


def test_a_model_without_private_parameters(tmp_path: Path) -> None:
    for store in (MemoryStore(Default({})), table(tmp_path, initial={})):
        assert store.read([0, 1]) == {}
        store.write([0, 1], {})
        store.prepare(1)
        store.apply()


def test_an_empty_private_tensor(tmp_path: Path) -> None:
    initial = {"none": torch.zeros(0), "user": torch.zeros(2)}
    for store in (MemoryStore(Default(initial)), table(tmp_path, initial=initial)):
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


@pytest.mark.parametrize("rows", [0, 1, 2])
def test_killed_inside_apply_the_round_is_repeated(tmp_path: Path, rows: int) -> None:
    """The run has committed round 3; the table got some of its rows."""
    store = committed(tmp_path / "a", 2)
    store.write([3, 6], values(3, 2))
    store.prepare(3)
    whole = dict(store._staged)
    store._staged = dict(list(whole.items())[:rows])
    store.apply()
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
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "table.bin").write_bytes(b"\0" * 11)
    (tmp_path / "a" / "schema.json.part").write_bytes(b"{")
    assert state(tmp_path / "a", 0)["seen"] == [False] * CLIENTS


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
    return 64 + 2 * (8 + table(folder).row_bytes)


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


def test_a_journal_of_the_first_format_is_read(tmp_path: Path) -> None:
    """It held one round, with a sha256 in the place of the crc32."""
    committed(tmp_path / "a", 2)
    journal, size = tmp_path / "a" / "journal", record_bytes(tmp_path / "size")
    body = journal.read_bytes()[size + 64 :]
    head = struct.pack(
        "<8sqqq32s", b"fedkeep1", 2, 2, table(tmp_path / "a").row_bytes, hashlib.sha256(body).digest()
    )
    journal.write_bytes(head + body)
    assert state(tmp_path / "a", 2) == expected(tmp_path, 2)
    journal.write_bytes(head + body[:-1] + b"!")
    with pytest.raises(StoreError, match="is damaged"):
        state(tmp_path / "a", 2)


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
    for initial, clients in (
        (INITIAL, CLIENTS + 1),
        ({**INITIAL, "user": torch.zeros(4)}, CLIENTS),
        ({**INITIAL, "user": torch.zeros(3).double()}, CLIENTS),
        ({("vser" if n == "user" else n): v for n, v in INITIAL.items()}, CLIENTS),
    ):
        with pytest.raises(StoreError) as error:
            table(tmp_path / "a", initial=initial, clients=clients)
        message = str(error.value)
        assert message.startswith(
            f"The private store {tmp_path / 'a'} was made for other private parameters or clients: wanted {{"
        )
        assert message.endswith("Use the model and data that it was made with.")


@pytest.mark.parametrize("change", [-1, 1])
def test_a_table_of_another_size_is_an_error(tmp_path: Path, change: int) -> None:
    committed(tmp_path / "a", 1)
    path = tmp_path / "a" / "table.bin"
    path.write_bytes((path.read_bytes() + b"\0")[: path.stat().st_size + change])
    with pytest.raises(StoreError) as error:
        table(tmp_path / "a")
    assert str(error.value) == f"The private store's {path} has been truncated; restore it from a copy."


@pytest.mark.parametrize("name", ["schema.json", "table.bin"])
def test_missing_and_garbled_files_are_errors(tmp_path: Path, name: str) -> None:
    committed(tmp_path / "a", 1)
    path = tmp_path / "a" / name
    if name == "schema.json":
        path.write_bytes(b"\xff{")
    else:
        path.unlink()
    with pytest.raises(StoreError, match="^Cannot open the private store "):
        table(tmp_path / "a")


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
    store = TableStore(tmp_path, Default({"user": torch.zeros(32)}, 0.0), 1_000_000)
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

"""All stores keep the same values; a client that was never seen has default ones."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedkeep.core.errors import ConfigError, StoreError
from fedkeep.core.params import Params
from fedkeep.core.seeds import generator
from fedkeep.store import Default, MemoryStore, PrivateStore, SqliteStore, VersionLedger
from tests.refusals import raises
from tests.store.build import CLIENTS, IDS, INITIAL, count, device, lines, numbers, sqlite, values

some_clients = st.lists(st.integers(0, CLIENTS - 1), max_size=4, unique=True)
step = st.one_of(
    st.tuples(st.just("stage"), some_clients, st.integers(0, 10**6)),
    st.tuples(st.just("accept"), some_clients, st.just(0)),
    st.tuples(st.just("read"), st.lists(st.integers(0, CLIENTS - 1), max_size=6), st.just(0)),
    st.tuples(st.just("commit"), st.just([]), st.just(0)),
    st.tuples(st.just("mark"), st.just([]), st.just(0)),
    st.tuples(st.just("reopen"), st.just([]), st.just(0)),
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(steps=st.lists(step, max_size=12), rule=st.sampled_from([0.0, -2.5, ("normal", 0.5), "model"]))
def test_all_stores_agree_over_any_sequence(steps: list[tuple[str, list[int], int]], rule: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        memory, file = MemoryStore(Default(INITIAL, rule, seed=3), IDS), sqlite(Path(folder), rule)
        on_device = device(Path(folder), rule)
        ledger, attempt, staged, marked = VersionLedger(CLIENTS), 1, set[int](), None
        for what, clients, number in steps:
            stores: list[PrivateStore] = [memory, file, on_device]
            if what == "stage":
                for store in stores:
                    for client in clients:
                        store.stage(client, {n: v[0] for n, v in values(number, 1).items()}, attempt)
                staged.update(clients)
            elif what == "accept":
                taken = [c for c in clients if c in staged]
                lines = ledger.accept(taken, [attempt] * len(taken))
                for store in stores:
                    store.begin(lines)
                    store.drop()
                attempt, staged = attempt + 1, set()
            elif what == "read":
                one, *others = (store.read(clients) for store in stores)
                for other in others:
                    assert one.keys() == other.keys()
                    assert all(torch.equal(one[n], other[n]) for n in one)
                assert len({tuple(store.seen(clients)) for store in stores}) == 1
            else:
                if what == "mark":
                    file.mark()
                    memory.mark()
                    marked, then = ledger.seen(), numbers(memory)
                for store in stores:
                    store.flush()
                if what == "reopen":
                    stores.clear()
                    file = sqlite(Path(folder), rule)
                    file.begin(ledger.seen(), marked)
                    on_device.close()
                    on_device = device(Path(folder), rule)
                    on_device.begin(ledger.seen())
                    memory.drop()
                    attempt, staged = attempt + 1, set()
        on_device.begin(ledger.seen())
        assert numbers(file) == numbers(memory) == numbers(on_device)
        on_device.close()
        if marked is not None:
            assert numbers(file.marked()) == numbers(memory.marked()) == then


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
def test_what_counted_at_a_mark_is_there_after_later_rounds(kind: str, tmp_path: Path) -> None:
    store = MemoryStore(Default(INITIAL, 0.0, seed=3), IDS) if kind == "memory" else sqlite(tmp_path, 0.0)
    ledger = VersionLedger(CLIENTS)

    def round(attempt: int, clients: list[int]) -> None:
        for client in clients:
            store.stage(client, {n: v[0] for n, v in values(attempt, 1).items()}, attempt)
        store.begin(ledger.accept(clients, [attempt] * len(clients)))

    round(1, [0, 1])
    store.mark()
    store.flush()
    then = numbers(store)
    for attempt in (2, 3):
        round(attempt, [1, 2])
        store.flush()
    assert numbers(store) != then
    assert numbers(store.marked()) == then


STORES: list[Callable[[Path, Any], PrivateStore]] = [
    lambda folder, rule: MemoryStore(Default(INITIAL, rule, seed=3), IDS),
    lambda folder, rule: sqlite(folder, rule),
    lambda folder, rule: device(folder, rule),
]


@pytest.mark.parametrize("build", STORES, ids=["memory", "sqlite", "device"])
class TestContract:
    def test_a_client_never_seen_has_the_default(
        self, tmp_path: Path, build: Callable[..., PrivateStore]
    ) -> None:
        store = build(tmp_path, "model")
        count(store, [2], values(1, 1), 1)
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
        count(store, [0, 1], given_values, 1)
        before = numbers(store)
        for v in (*given_values.values(), *store.read(range(CLIENTS)).values(), *store.read([6]).values()):
            v.zero_()
        assert numbers(store) == before
        assert INITIAL["scalar"].item() == 3.0

    def test_graphs_are_left_behind(self, tmp_path: Path, build: Callable[..., PrivateStore]) -> None:
        store = build(tmp_path, "model")
        new = values(1, 1)
        new["user"].requires_grad_()
        count(store, [3], new, 1)
        assert not store.read([3])["user"].requires_grad

    def test_nobody_at_all(self, tmp_path: Path, build: Callable[..., PrivateStore]) -> None:
        store = build(tmp_path, "model")
        assert {n: tuple(v.shape) for n, v in store.read([]).items()} == {
            n: (0, *v.shape) for n, v in INITIAL.items()
        }
        count(store, [], values(0, 0), 1)
        assert store.seen([]) == []
        assert store.seen(range(CLIENTS)) == [False] * CLIENTS

    def test_what_is_staged_is_read_once_the_ledger_names_it(
        self, tmp_path: Path, build: Callable[..., PrivateStore]
    ) -> None:
        store = build(tmp_path, "model")
        count(store, [1], values(1, 1), 1)
        before, trained = numbers(store), values(2, 4)
        for client in range(4):
            row = {n: v[client].clone().requires_grad_(n == "user") for n, v in trained.items()}
            store.stage(client, row, 2)
        assert numbers(store) == before
        found = store.staged(2)
        assert found.keys() == INITIAL.keys()
        assert all(torch.equal(v, trained[n][2]) for n, v in found.items())
        assert not found["user"].requires_grad
        store.begin(lines({2: 2, 0: 2}))
        store.drop()
        read = store.read([0, 2])
        assert all(torch.equal(v, trained[n][[0, 2]]) for n, v in read.items())
        assert not read["user"].requires_grad
        assert store.seen(range(4)) == [True, True, True, False]
        assert torch.equal(store.read([1])["count"], values(1, 1)["count"])  # what it staged was dropped
        with pytest.raises(KeyError):
            store.staged(1)

    def test_a_version_that_is_not_here_is_an_error_and_nothing_is_changed(
        self, tmp_path: Path, build: Callable[..., PrivateStore]
    ) -> None:
        store = build(tmp_path, "model")
        count(store, [1], values(1, 1), 1)
        before = numbers(store)
        for client in (1, 2):
            store.stage(client, {n: v[0] for n, v in values(2, 1).items()}, 2)
        for wanted in ({1: 2, 2: 3}, {1: 2, 5: 2}, {3: 1}):
            with pytest.raises(StoreError):
                store.begin(lines(wanted))
            assert numbers(store) == before
        store.begin(lines({1: 1}))  # as it is


def test_an_unknown_rule_is_refused() -> None:
    with raises(ConfigError, said="private_init must be a number", rule="zeros"):
        Default(INITIAL, "zeros")


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
    for store in (MemoryStore(Default({}), IDS), sqlite(tmp_path, initial={})):
        assert store.read([0, 1]) == {}
        count(store, [0, 1], {}, 1)
        store.flush()
        assert store.seen([0, 2]) == [True, False]
        assert store.read([0, 2]) == {}


def test_an_empty_private_tensor(tmp_path: Path) -> None:
    initial = {"none": torch.zeros(0), "user": torch.zeros(2)}
    for store in (MemoryStore(Default(initial), IDS), sqlite(tmp_path, initial=initial)):
        user = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        count(store, [1, 0], {"none": torch.zeros(2, 0), "user": user}, 1)
        store.flush()
        assert store.read([0])["none"].shape == (1, 0)
        assert store.read([0])["user"].tolist() == [[3.0, 4.0]]


def test_default_values_follow_the_id_and_not_the_place(tmp_path: Path) -> None:
    """They followed the position once: another order of the same people gave everybody another vector."""
    backwards = IDS[::-1]
    for make in (
        lambda name, ids: MemoryStore(Default(INITIAL, ("normal", 1.0), seed=3), ids),
        lambda name, ids: sqlite(tmp_path / name, ("normal", 1.0), ids),
    ):
        one, two = make("a", IDS), make("b", backwards)
        for client in IDS:
            mine = one.read([IDS.index(client)])["user"], two.read([backwards.index(client)])["user"]
            assert torch.equal(*mine)
    with pytest.raises(TypeError, match=r"drawn by its id, a text; got 4\.$"):
        Default(INITIAL, ("normal", 1.0))(4)  # type: ignore[arg-type]


OLD, NEW = ["b", "a", "c"], ["a", "x", "c"]


def older(tmp_path: Path, kind: str) -> PrivateStore:
    """Return a store of another run that knows a and b."""
    default = Default({"user": torch.zeros(2)}, ("normal", 1.0), seed=1)
    store = MemoryStore(default, OLD) if kind == "memory" else SqliteStore(tmp_path, default, OLD)
    count(store, [0, 1], {"user": torch.tensor([[1.0, 2.0], [3.0, 4.0]])}, 1)
    if isinstance(store, SqliteStore):
        store.flush()
        store.rest()
    return store


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
def test_clients_of_an_older_run_begin_with_what_they_keep_there_and_it_stays(
    tmp_path: Path, kind: str
) -> None:
    before = older(tmp_path, kind)
    default = Default({"user": torch.zeros(2)}, 9.0)
    store = MemoryStore(default, NEW, before)
    assert store.read([1, 0, 2])["user"].tolist() == [[9.0, 9.0], [3.0, 4.0], [9.0, 9.0]]
    assert store.seen(range(3)) == [True, False, False]
    count(store, [0, 1], {"user": torch.ones(2, 2)}, 1)
    assert store.read([0, 1])["user"].tolist() == [[1.0, 1.0], [1.0, 1.0]]
    assert before.read([1])["user"].tolist() == [[3.0, 4.0]]
    assert before.seen(range(3)) == [True, True, False]


@pytest.mark.parametrize("initial", [{"user": torch.zeros(3)}, {"other": torch.zeros(2)}, {}])
def test_an_older_run_that_keeps_something_else_is_refused(tmp_path: Path, initial: Params) -> None:
    with pytest.raises(ConfigError) as error:
        MemoryStore(Default(initial), NEW, older(tmp_path, "memory"))
    assert error.value.facts.keys() == {"wanted", "found"}


def test_an_older_run_of_nobody_here_is_refused(tmp_path: Path) -> None:
    with raises(ConfigError, found=OLD):
        MemoryStore(Default({"user": torch.zeros(2)}), ["y", "z"], older(tmp_path, "memory"))

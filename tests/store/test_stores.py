"""Both stores keep the same values; a client that was never seen has default ones."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedkeep.core.errors import ConfigError
from fedkeep.core.seeds import generator
from fedkeep.store import Default, MemoryStore, PrivateStore
from tests.store.build import CLIENTS, IDS, INITIAL, numbers, sqlite, values

some_clients = st.lists(st.integers(0, CLIENTS - 1), max_size=4, unique=True)
step = st.one_of(
    st.tuples(st.just("stage"), some_clients, st.integers(0, 10**6)),
    st.tuples(st.just("accept"), some_clients, st.just(0)),
    st.tuples(st.just("write"), some_clients, st.integers(0, 10**6)),
    st.tuples(st.just("read"), st.lists(st.integers(0, CLIENTS - 1), max_size=6), st.just(0)),
    st.tuples(st.just("commit"), st.just([]), st.just(0)),
    st.tuples(st.just("reopen"), st.just([]), st.just(0)),
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(steps=st.lists(step, max_size=12), rule=st.sampled_from([0.0, -2.5, ("normal", 0.5), "model"]))
def test_sqlite_and_memory_agree_over_any_sequence(
    steps: list[tuple[str, list[int], int]], rule: Any
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        kept, memory = sqlite(Path(folder), rule), MemoryStore(Default(INITIAL, rule, seed=3), IDS)
        round, staged = 0, set[int]()
        for what, clients, number in steps:
            if what == "write":
                for store in (kept, memory):
                    store.write(clients, values(number, len(clients)))
            elif what == "stage":
                for store in (kept, memory):
                    for client in clients:
                        store.stage(client, {n: v[0] for n, v in values(number, 1).items()})
                staged.update(clients)
            elif what == "accept":
                for store in (kept, memory):
                    store.accept([c for c in clients if c in staged])
                staged = set()
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
                    kept = sqlite(Path(folder), rule)
                    kept.recover(round)
                    memory.accept(())
                    staged = set()
        assert numbers(kept) == numbers(memory)


STORES: list[Callable[[Path, Any], PrivateStore]] = [
    lambda folder, rule: MemoryStore(Default(INITIAL, rule, seed=3), IDS),
    lambda folder, rule: sqlite(folder, rule),
]


@pytest.mark.parametrize("build", STORES, ids=["memory", "sqlite"])
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

    def test_what_is_staged_is_read_once_it_was_accepted(
        self, tmp_path: Path, build: Callable[..., PrivateStore]
    ) -> None:
        store = build(tmp_path, "model")
        store.write([1], values(1, 1))
        before, trained = numbers(store), values(2, 4)
        for client in range(4):
            store.stage(
                client, {n: v[client].clone().requires_grad_(n == "user") for n, v in trained.items()}
            )
        assert numbers(store) == before
        found = store.staged([2, 0])
        assert found.keys() == INITIAL.keys()
        assert all(torch.equal(v, trained[n][[2, 0]]) for n, v in found.items())
        store.accept([2, 0])
        found = store.read([0, 2])
        assert all(torch.equal(v, trained[n][[0, 2]]) for n, v in found.items())
        assert not found["user"].requires_grad
        assert store.seen(range(4)) == [True, True, True, False]
        assert torch.equal(store.read([1])["count"], values(1, 1)["count"])  # it was dropped
        with pytest.raises(KeyError):
            store.staged([1])

    def test_other_values_are_accepted_in_place_of_those_staged(
        self, tmp_path: Path, build: Callable[..., PrivateStore]
    ) -> None:
        store = build(tmp_path, "model")
        for client in (0, 1):
            store.stage(client, {n: v[0] for n, v in values(client, 1).items()})
        store.accept([1], values(7, 1))
        assert store.seen([0, 1]) == [False, True]
        assert all(torch.equal(v, values(7, 1)[n]) for n, v in store.read([1]).items())

    def test_what_is_staged_is_dropped_where_nobody_is_accepted(
        self, tmp_path: Path, build: Callable[..., PrivateStore]
    ) -> None:
        store = build(tmp_path, "model")
        store.stage(0, {n: v[0] for n, v in values(1, 1).items()})
        store.accept(())
        store.prepare(1)
        store.apply()
        assert store.seen([0]) == [False]
        with pytest.raises(KeyError):
            store.staged([0])


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
    for store in (MemoryStore(Default({}), IDS), sqlite(tmp_path, initial={})):
        assert store.read([0, 1]) == {}
        store.write([0, 1], {})
        store.prepare(1)
        store.apply()


def test_an_empty_private_tensor(tmp_path: Path) -> None:
    initial = {"none": torch.zeros(0), "user": torch.zeros(2)}
    for store in (MemoryStore(Default(initial), IDS), sqlite(tmp_path, initial=initial)):
        store.write([1, 0], {"none": torch.zeros(2, 0), "user": torch.tensor([[1.0, 2.0], [3.0, 4.0]])})
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
    with pytest.raises(TypeError, match=r"^A client's default values are drawn by its id, a text; got 4\.$"):
        Default(INITIAL, ("normal", 1.0))(4)  # type: ignore[arg-type]


def test_what_is_written_while_a_round_is_prepared_stays(tmp_path: Path) -> None:
    """It is read at once, and durable with the next round; also where the same client was prepared."""
    kept, memory = sqlite(tmp_path, 0.0), MemoryStore(Default(INITIAL, 0.0), IDS)
    for store in (kept, memory):
        store.write([0, 1], values(1, 2))
        store.prepare(1)
        store.write([1, 2], values(2, 2))
        store.apply()
    for round in (2, 3):
        one, two = kept.read([0, 1, 2, 3]), memory.read([0, 1, 2, 3])
        assert all(torch.equal(one[n], two[n]) for n in two)
        assert kept.seen([0, 1, 2, 3]) == memory.seen([0, 1, 2, 3]) == [True, True, True, False]
        kept.prepare(round)
        kept.apply()
        kept = sqlite(tmp_path, 0.0)
        kept.recover(round)

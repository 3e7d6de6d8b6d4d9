"""A store for other clients than its own: values go by id, and another layout is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fedkeep.core.errors import ConfigError, StoreError
from fedkeep.store import Default, MemoryStore, for_clients
from tests.store.build import IDS, INITIAL, sqlite, values

DEFAULT = Default(INITIAL)


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
@pytest.mark.parametrize(
    "ids",
    [IDS[1:], [*IDS, "user-9"], IDS[::-1], ["new", IDS[4], IDS[2]]],
    ids=["fewer", "more", "turned", "mixed"],
)
def test_values_go_by_id(tmp_path: Path, kind: str, ids: list[str]) -> None:
    store = MemoryStore(DEFAULT, IDS) if kind == "memory" else sqlite(tmp_path)
    store.write([4, 2], values(1, 2))
    first = {name: value + 1 if name == "user" else value for name, value in INITIAL.items()}
    view, known = for_clients(store, Default(first), ids), [client for client in ids if client in IDS]
    everyone = list(range(len(ids)))
    for name, value in view.read(everyone).items():
        for client in everyone:
            own = store.read([IDS.index(ids[client])]) if ids[client] in IDS else {name: first[name][None]}
            assert torch.equal(value[client], own[name][0])
    assert view.seen(everyone) == [client in (IDS[4], IDS[2]) for client in ids]
    assert view.read([])["user"].shape == (0, 3)
    made = values(2, len(ids))
    view.write(everyone, made)
    view.stage(ids.index(known[0]), {name: value[0] for name, value in values(3, 1).items()})
    view.accept([ids.index(known[0])])
    made = {
        name: value.index_copy(0, torch.tensor([ids.index(known[0])]), values(3, 1)[name])
        for name, value in made.items()
    }
    view.prepare(1)
    view.apply()
    for name, value in view.read(everyone).items():
        assert torch.equal(value, made[name])
        own = store.read([IDS.index(client) for client in known])[name]
        assert torch.equal(own, torch.stack([value[ids.index(client)] for client in known]))


def test_a_view_is_recovered_to_the_very_states_that_are_named(tmp_path: Path) -> None:
    store = sqlite(tmp_path)
    view = for_clients(store, DEFAULT, IDS[1:])
    view.write([0], values(1, 1))
    digest = view.prepare(1)
    view.apply()
    view.recover(1, digest)
    assert torch.equal(view.read([0])["user"], values(1, 1)["user"])
    with pytest.raises(StoreError, match="does not hold the states after round 1"):
        view.recover(1, "0" * 16)


def test_the_same_clients_have_the_store_itself() -> None:
    store = MemoryStore(DEFAULT, IDS)
    assert for_clients(store, DEFAULT, tuple(IDS)) is store


@pytest.mark.parametrize(
    "initial",
    [
        {**INITIAL, "more": torch.zeros(1)},
        {name: value for name, value in INITIAL.items() if name != "flag"},
        {**INITIAL, "user": torch.zeros(2)},
        {**INITIAL, "user": INITIAL["user"].double()},
    ],
    ids=["one name more", "one fewer", "another shape", "another type"],
)
def test_another_layout_is_refused(initial: dict[str, torch.Tensor]) -> None:
    with pytest.raises(
        ConfigError, match=r"^The store given as private does not keep what this run does: wanted "
    ):
        for_clients(MemoryStore(DEFAULT, IDS), Default(initial), IDS)


def test_a_store_of_nobody_here_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"has none of this run's clients: wanted \['7'\], \.\.\., found \['user-0'"
    ):
        for_clients(MemoryStore(DEFAULT, IDS), DEFAULT, ["7"])


def test_a_store_that_can_only_be_read_is_refused(tmp_path: Path) -> None:
    store = sqlite(tmp_path)
    store.rest()
    with pytest.raises(
        ConfigError, match=r"can only be read: it is of a run with a folder\. Run that one without"
    ):
        for_clients(store, DEFAULT, IDS)
